"""Reductions along axes across memory: how many programs, and the same meaning."""

from __future__ import annotations

from typing import Any

import pytest

from forge.plan import KernelPlan, RowTile
from forge.service import front
from forge.templates import strided
from tests.forge.test_windows import document, parsed, plans
from tests.forge.whole import check


def swept(op: str, shape: list[Any]) -> KernelPlan:
    data = document(op, shape, "float32", {"dims": [1]} if op != "argmin" else {"dim": 1})
    (plan,) = [p for p in plans(front(parsed(data), "h100")) if p.name.startswith("inf")]
    return plan


@pytest.mark.parametrize(
    ("op", "shape", "block"),
    [
        ("sum", [64, 1024, 4095], 512),  # 512 programs, not 2,048
        ("amax", [64, 1024, 4095], 512),
        ("argmin", [64, 1024, 4095], 128),  # registers leave room for four programs
        ("sum", [32, 1024, 4095], 256),
        ("sum", [640, 1024, 260], 128),  # of blocks of 256 half of each second one would be empty
        ("sum", [8, 1024, 4095], 64),
    ],
)
def test_most_programs_are_there_at_once(op: str, shape: list[Any], block: int) -> None:
    tile = swept(op, shape).tile
    assert isinstance(tile, RowTile)
    assert tile.block_rows == block
    assert tile.block_rows * tile.block_cols == 4096


@pytest.mark.parametrize("op", ["sum", "mean", "amax"])
def test_wider_blocks_mean_the_same(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strided, "FEW_PROGRAMS", 2)
    monkeypatch.setattr(strided, "MANY_ROWS", 1)
    monkeypatch.setattr(strided, "HELD", 1)
    data = document(op, [2, 19, 510], "float32", {"dims": [1]})
    work = check(parsed(data), {}, "h100")
    tiles = [p.tile for p in plans(work) if p.name.startswith("inf")]
    assert [t.block_rows for t in tiles if isinstance(t, RowTile)] == [512]
