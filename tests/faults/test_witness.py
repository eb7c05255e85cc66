"""What is a fault and what changes nothing: no judge is asked."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from bench import faults
from gauntlet.isolate import ForkServer
from tests.faults import corpus, witness
from tests.faults.fault import Mutant

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="no C compiler")
FEW = 300
"""Draws: a witness was never further off than the seventieth."""


@pytest.fixture(scope="module")
def block() -> corpus.Block:
    """y = tanh(x w) + x: the gradient of x takes nothing of x but tanh(x w)^2."""
    data = next(d for d in corpus.blueprints() if d["name"] == "tanh_residual_64_bf16")
    return corpus.compiled(data, "cpu")


def _written(block: corpus.Block, chosen: list[Mutant], folder: Path) -> list[tuple[Mutant, bytes]]:
    made = list(faults._written(folder, block, chosen, 0))
    return [(m, (folder / p.file).read_bytes()) for m, p in zip(chosen, made, strict=True)]


def test_every_class_of_values_has_a_witness(block: corpus.Block, server: ForkServer, tmp_path: Path) -> None:
    """Also those that are wrong for one size in sixteen only, or for a zero."""
    kinds = [kind for kind in faults.KINDS.values() if kind.by_value]
    assert len(kinds) >= 10
    chosen = [m for kind in kinds for m in list(kind.mutants(block))[:1]]
    for mutant, data in _written(block, chosen, tmp_path):
        found = witness.find(block.container, data, "cpu", server, draws=FEW)
        assert found.fault, (mutant.kind, mutant.place, found)


def test_what_changes_nothing_has_none(block: corpus.Block, server: ForkServer, tmp_path: Path) -> None:
    """|x| in the place of x where only the square of an odd function of it is used, and the clean artifact
    itself."""
    signs = faults.KINDS["right only on [0,1)"].mutants(block)
    same = [m for m in signs if (m.kernel, m.place) == ("bwd1_0_0_g", "load 0: magnitude")]
    ((_, data),) = _written(block, same, tmp_path)
    assert not witness.find(block.container, data, "cpu", server, draws=FEW).place
    assert not witness.find(block.container, block.container, "cpu", server, draws=FEW).place


def test_a_search_that_does_not_end_well_excuses_nothing(block: corpus.Block, server: ForkServer) -> None:
    assert witness.find(block.container, b"no artifact", "cpu", server, draws=1).fault


def test_what_stays_within_the_bound_is_no_fault(
    block: corpus.Block, server: ForkServer, tmp_path: Path
) -> None:
    """A gradient in bfloat16 that is off by a tenth of a rounding, and by ten of them."""
    head, found, tail = block.texts["bwd1_0_0_g"].rpartition("= round_bf16(")
    texts = [f"{head}{found}{by}f * {tail}" for by in (1.0004, 1.04)]
    chosen = [Mutant("gradient of one input wrong", "bwd1_0_0_g", "", text=text) for text in texts]
    made = [data for _, data in _written(block, chosen, tmp_path)]
    near, far = (witness.find(block.container, data, "cpu", server, draws=8) for data in made)
    assert near.place and not near.fault
    assert far.fault


def test_another_number_is_no_other_nan_and_no_other_zero() -> None:
    one = torch.tensor([0.0, torch.nan, 1.0])
    assert not witness.other(one, torch.tensor([-0.0, -torch.nan, 1.0]))
    assert witness.other(one, torch.tensor([0.0, 0.0, 1.0])) and witness.other(one, one + 1)


def _row(kind: str, passed: bool, stage: str = "", **more: object) -> dict[str, object]:
    return {"kind": kind, "block": "b", "kernel": "k", "place": "p", "stage": stage, "margin": None,
            "reason": "", "passed": passed, "by_value": False, "witness": "", "beyond": False,
            "subtle": False, **more}  # fmt: skip


def test_only_what_no_draw_tells_apart_is_left_out() -> None:
    rows = [
        _row("a", False, "numerics", by_value=True),
        _row("a", True, by_value=True),
        _row("a", True, by_value=True, witness="draw 3", beyond=True),
        _row("a", True, by_value=True, witness="draw 5"),
        _row("b", True),
        _row("a", False, "integrity"),
        _row("", True),
        _row("", False, "memory"),
    ]
    found = faults.document(rows, len(rows), 0, "cpu")
    values = {name: figure["value"] for name, figure in found["figures"].items()}
    assert values["faults_planted"] == 4 and values["mutants_that_change_nothing"] == 1
    assert values["mutants_never_beyond_the_bound"] == len(found["within"]) == 1
    assert values["faults_missed"] == 3 and values["clean_refused"] == 1
    assert len(found["change_nothing"]) == 1 and len(found["wrong"]) == 4
