"""Reductions along axes across memory: how many programs, and the same meaning."""

from __future__ import annotations

from typing import Any

import pytest

from esper_ir.builder import Builder as Graphs
from forge.emit.triton import emit_kernel
from forge.plan import KernelPlan, RowTile
from forge.service import front
from forge.templates import rows, strided
from tests.forge.test_windows import document, parsed, plans
from tests.forge.whole import check


def swept(op: str, shape: list[Any], dtype: str) -> KernelPlan:
    data = document(op, shape, dtype, {"dims": [1]} if op != "argmin" else {"dim": 1})
    (plan,) = [p for p in plans(front(parsed(data), "h100")) if p.name.startswith("inf")]
    return plan


@pytest.mark.parametrize(
    ("op", "dtype", "elements"),
    [
        ("sum", "float32", 8192),  # 64 loads of a thread are under way
        ("amax", "float32", 8192),
        ("argmin", "float32", 4096),  # a place beside every maximum
        ("sum", "bfloat16", 4096),
    ],
)
def test_one_operand_is_asked_for_early(op: str, dtype: str, elements: int) -> None:
    tile = swept(op, [64, 1024, 4095], dtype).tile
    assert isinstance(tile, RowTile)
    assert tile.block_rows * tile.block_cols == elements


@pytest.mark.parametrize("op", ["sum", "mean", "amax"])
def test_deeper_blocks_mean_the_same(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strided, "FEW_PROGRAMS", 2)
    monkeypatch.setattr(strided, "HELD", 1)
    data = document(op, [2, 131, 510], "float32", {"dims": [1]})
    work = check(parsed(data), {}, "h100")
    tiles = [p.tile for p in plans(work) if p.name.startswith("inf")]
    assert [t.block_cols for t in tiles if isinstance(t, RowTile)] == [256]


def test_few_long_rows_share_what_is_of_their_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each weight is read once, not once a row: it stands before the loop over rows."""
    b = Graphs("scaled")
    x, w = b.input("x", "float32", [5, 3000]), b.param("w", "float32", [3000])
    blueprint = b.build(b.mul(x, w))
    (plan,) = plans(front(blueprint, "h100"))[:1]
    assert isinstance(plan.tile, RowTile) and plan.tile.rows_per_program == 1, "too short to be worth it"
    monkeypatch.setattr(rows, "FEW_PROGRAMS", 2)
    work = check(blueprint, {}, "h100")
    (plan,) = [p for p in plans(work) if p.name.startswith("inf")]
    assert isinstance(plan.tile, RowTile) and plan.tile.rows_per_program == 8
    text = emit_kernel(plan)
    assert text.index("tl.load(p_1") < text.index("for i in")


def test_short_rows_of_three_operands_are_eight_elements_a_thread() -> None:
    b = Graphs("norm")
    x, w, shift = (
        b.input("x", "float32", [8192, 4096]),
        b.param("w", "float32", [4096]),
        b.param("b", "float32", [4096]),
    )
    made = b.group_norm(b.silu(x), w, shift, num_groups=16)
    (plan,) = [p for p in plans(front(b.build(made), "h100")) if p.name.startswith("inf")]
    assert isinstance(plan.tile, RowTile)
    assert plan.tile.block_rows * plan.tile.block_cols == 8 * 32 * plan.tile.warps
