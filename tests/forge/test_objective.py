"""Artifacts made for little memory: fewer bytes are kept between forward and backward, and they are right."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

import esper_ir.text as text
from esper_ir.diagnostics import EsperError
from forge.objectives import objective
from forge.passes import save
from forge.pipelines import Work
from forge.plan import RowTile
from forge.service import compile_blueprint, front
from forge.target import targets
from forge.tune.trials import Hunt, Trial, report, trial_of
from forge.tuning import tune_artifact
from library.store import Library
from runtime import energy
from runtime.energy import Meter
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
    assert _means_the_same(name, target, backend, "memory") > 1


@pytest.mark.parametrize(
    "name",
    [n if n in ("small_mlp", "squeeze_excite") else pytest.param(n, marks=pytest.mark.slow) for n in BLOCKS],
)
def test_block_of_few_joules_means_the_same(name: str) -> None:
    assert _means_the_same(name, "h100", "plans", "power") > 1


def _means_the_same(name: str, target: str, backend: str, aim: str) -> int:
    """How many results and gradients were compared."""
    sizes, dims = BLOCKS[name]
    work = front(shrunk(name, sizes), target, aim=aim)
    found, wide, eager = compared(work, Machine(work, backend), dims)
    for value in found:
        assert close(found[value], wide[value], eager[value]), value
    return len(found)


@pytest.mark.parametrize("name", ["swiglu", "mamba_scan", "seed_attention"])
def test_a_budget_is_kept_and_used(name: str) -> None:
    """No share keeps more than a larger one, none more than its part of the bytes between the ends."""
    blueprint = text.load(EXAMPLES / f"{name}.json")
    aims = ("memory", "memory-0.25", "memory-0.5", "memory-0.75", "speed")
    least, *between, most = [kept(front(blueprint, "h100", aim=aim)) for aim in aims]
    assert sorted(between) == between
    for share, found in zip((0.25, 0.5, 0.75), between, strict=True):
        assert least <= found <= least + share * (most - least)
    assert name == "seed_attention" or least < between[-1], "three quarters leave room for something"


def test_values_of_one_price_are_kept_one_by_one() -> None:
    """Gate and up projection weigh the same: half of the budget keeps one of them, not none."""
    work = front(text.load(EXAMPLES / "swiglu.json"), "h100", aim="memory-0.5")
    assert len({"g", "u"} & set(work.saved)) == 1


@pytest.mark.parametrize("name", ["squeeze_excite", pytest.param("mamba_scan", marks=pytest.mark.slow)])
def test_block_within_a_budget_means_the_same(name: str) -> None:
    assert _means_the_same(name, "h100", "plans", "memory-0.5") > 1


def test_all_results_of_a_library_call_are_on_one_side() -> None:
    """Attention hands on its result and the sums of its rows: both are kept, or it runs again."""
    for share in (0.3, 0.6, 0.75, 0.9):
        work = front(text.load(EXAMPLES / "seed_attention.json"), "h100", aim=f"memory-{share}")
        assert ("a:attention" in work.saved) is ("a:attention.1" in work.saved)


@pytest.mark.parametrize(
    ("given", "found"), [("memory-0.50", "memory-0.5"), ("memory-0", "memory"), ("memory-1.0", "speed")]
)
def test_a_budget_has_one_spelling(given: str, found: str) -> None:
    assert objective(given) == found


@pytest.mark.parametrize("given", ["memory-", "memory-2", "memory--0.1", "memory-nan", "memory-half"])
def test_what_is_no_budget(given: str) -> None:
    with pytest.raises(EsperError) as refused:
        objective(given)
    assert refused.value.code == "E0550"


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
        (power,) = compile_blueprint(blueprint, targets=("cpu",), objectives=("power",), library=library)
        assert len({speed.artifact_id, memory.artifact_id, power.artifact_id}) == 3
        assert library.resolve(power.artifact_id).objective == "power"
        with pytest.raises(EsperError) as refused:
            compile_blueprint(blueprint, targets=("cpu",), objectives=("beauty",), library=library)
    assert refused.value.code == "E0529" and refused.value.hint == "one of: speed, memory, power, memory-0.5"


def joules(work: Work) -> float:
    """Of what is saved by this plan and computed again for it, as the choice is priced."""
    assert work.joint is not None and work.target.energy is not None
    sizes = {name: max(d.tune, default=d.min) for name, d in work.blueprint.dims.items()}
    late = save.depends_on(work.joint.graph, frozenset(work.joint.cotangents.values()))
    moved = save._traffic(work.joint.graph, sizes, save._stored(work.joint.graph, late, True))
    again = save._redone(work.joint.graph, sizes, work.target, work.target.energy, late)
    total = sum(moved(v) for v in work.saved) * work.target.energy.moved(1.0, work.target.copy_TBps)
    return total + sum(again(work.joint.graph.by_output[v]) or 0 for v in recomputed(work, late))


def recomputed(work: Work, late: frozenset[str]) -> set[str]:
    """Nodes of the forward that the backward runs: what it needs and is not given."""
    assert work.joint is not None
    makers = work.joint.graph.by_output
    stack = [v for n in work.joint.graph if n.id in late for v in n.tensors if v not in late]
    out: set[str] = set()
    while stack:
        value = stack.pop()
        if value not in work.saved and value in makers and makers[value].id not in out:
            out.add(makers[value].id)
            stack += makers[value].tensors
    return out


@pytest.mark.parametrize("name", ["small_mlp", "rmsnorm_residual", "squeeze_excite", "linear_gelu"])
def test_power_spends_no_more_joules_than_the_others(name: str) -> None:
    blueprint = text.load(EXAMPLES / f"{name}.json")
    speed, memory, power = (front(blueprint, "h100", aim=aim) for aim in ("speed", "memory", "power"))
    assert joules(power) <= joules(speed) * 1.0001 and joules(power) <= joules(memory) * 1.0001


def test_a_short_product_is_made_again_rather_than_kept() -> None:
    """64 products a value cost fewer joules than writing and reading it; 4,096 do not."""
    power = front(text.load(EXAMPLES / "small_mlp.json"), "h100", aim="power")
    assert "u" not in power.saved and "u" in front(power.blueprint, "h100").saved
    deep = front(text.load(EXAMPLES / "linear_gelu.json"), "h100", aim="power")
    assert set(deep.saved) == set(front(deep.blueprint, "h100").saved)


def test_every_target_that_is_stored_says_what_its_joules_are_from() -> None:
    for target in targets().values():
        assert (target.energy is not None) is target.stored
        if target.energy is not None:
            assert target.energy.source and min(target.energy.byte_pJ, target.energy.flop_pJ) > 0


def test_energy_decides_where_it_was_measured_and_time_elsewhere() -> None:
    prior, quick, frugal = RowTile(1, 4, 128, 1), RowTile(1, 8, 128, 1), RowTile(1, 16, 128, 1)

    def hunt(measured: bool) -> Hunt:
        found = Hunt("k", "g", prior)
        spent = {prior: 50.0, quick: 60.0, frugal: 40.0}
        for tile, us in ((prior, 100.0), (quick, 80.0), (frugal, 99.0)):
            uj = spent[tile] if measured else math.inf
            found.keep(Trial(tile, us, us - 1, us + 1, "", uj, uj - 1, uj + 1))
        return found

    assert hunt(True).winner("power") == frugal and hunt(True).winner("speed") == quick
    assert hunt(False).winner("power") == quick
    assert report([hunt(True)], "a", "t", "power")["groups"][0]["decided"] == "energy"
    told = report([hunt(False)], "a", "t", "power", "no energy counter here")
    assert told["groups"][0]["decided"] == "time" and told["absent"] == "no energy counter here"
    kept = hunt(True)
    kept.keep(Trial(frugal, 98.0, 97.0, 99.0))
    assert kept.trials[repr(frugal)].uj == 40.0, "a later time keeps the joules"
    assert trial_of(kept.trials[repr(frugal)].row()) == kept.trials[repr(frugal)]


def test_the_meter_counts_between_two_moves_of_the_counter(monkeypatch: pytest.MonkeyPatch) -> None:
    """A counter that moves every 50 ms and work of 2 mJ a call that takes 1 ms, on a clock of its own."""
    now = [0.0]
    monkeypatch.setattr(energy.time, "monotonic", lambda: now[0])
    meter = Meter(torch.device("cpu"))
    assert meter.absent
    meter._read = lambda: 2.0 * int(now[0] / 0.05) * 50

    def calls() -> int:
        now[0] += 0.005
        return 5

    found = meter.measure(calls)
    assert len(found.samples) == 3 and all(abs(s / 2000.0 - 1) < 0.02 for s in found.samples)
