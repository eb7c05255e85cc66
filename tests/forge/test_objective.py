"""Artifacts made for little memory: fewer bytes are kept between forward and backward, and they are right."""

from __future__ import annotations

from pathlib import Path

import pytest

import esper_ir.text as text
from esper_ir.diagnostics import EsperError
from forge.pipelines import Work
from forge.service import compile_blueprint, front
from forge.tuning import tune_artifact
from library.store import Library
from tests.forge.test_blocks import BLOCKS, shrunk
from tests.forge.whole import Machine, close, compared

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
FEW = ("squeeze_excite", "linear_cross_entropy", "mamba_scan", "seed_attention", "seed_gated")
GATED = ("swiglu", "geglu", "seed_gated", "linear_cross_entropy")


def kept(work: Work) -> int:
    """Bytes beyond parameters that the backward is given, at the largest size to tune for."""
    assert work.joint is not None
    sizes = {name: max(d.tune, default=d.min) for name, d in work.blueprint.dims.items()}
    activations = [
        s for s in work.saved if s not in {v.name for v in work.blueprint.leaves if v.kind != "input"}
    ]
    return sum(work.joint.graph.types[s].nbytes.value(sizes) for s in activations)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.json")), ids=lambda p: p.stem)
def test_no_example_keeps_more(path: Path) -> None:
    blueprint = text.load(path)
    speed, memory = (front(blueprint, "h100", aim=aim) for aim in ("speed", "memory"))
    if speed.joint is None:
        assert memory.joint is None
        return
    assert kept(memory) <= kept(speed)
    if path.stem in GATED:
        assert kept(memory) <= kept(speed) / 5, "a gated block keeps its input alone"


@pytest.mark.parametrize("name", [n if n in FEW else pytest.param(n, marks=pytest.mark.slow) for n in BLOCKS])
@pytest.mark.parametrize(("target", "backend"), [("h100", "plans"), ("cpu", "c")])
def test_block_means_the_same(name: str, target: str, backend: str) -> None:
    sizes, dims = BLOCKS[name]
    work = front(shrunk(name, sizes), target, aim="memory")
    found, wide, eager = compared(work, Machine(work, backend), dims)
    for value in found:
        assert close(found[value], wide[value], eager[value]), value


def test_a_portfolio_is_two_artifacts(tmp_path: Path) -> None:
    blueprint = text.load(EXAMPLES / "seed_mlp_64.json")
    with Library.open(tmp_path / "library", trust=tmp_path / "trust", roles=("compiler",)) as library:
        speed, memory = compile_blueprint(
            blueprint, targets=("cpu",), objectives=("speed", "memory"), library=library
        )
        assert speed.artifact_id != memory.artifact_id
        assert library.resolve(memory.artifact_id).objective == "memory"
        assert library.resolve(speed.artifact_id).objective == "speed"
        tuned = tune_artifact(library, memory.artifact_id, budget_s=0.0)
        assert library.resolve(tuned.artifact_id).objective == "memory", "what is tuned stays what it was for"
        with pytest.raises(EsperError) as refused:
            compile_blueprint(blueprint, targets=("cpu",), objectives=("power",), library=library)
    assert refused.value.code == "E0529"
