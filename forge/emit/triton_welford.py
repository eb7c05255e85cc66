"""Squares about the mean of a row that is swept once (forge/online.py)."""

from __future__ import annotations

from collections.abc import Sequence

from forge.emit.triton_base import Kernel
from forge.online import Squares
from forge.plan import RowTile


def begin(k: Kernel, s: Squares, shape: str) -> None:
    for name in ("mean", "squares"):
        k.w.line(f"{s.total.name}_{name} = tl.full({shape}, 0.0, tl.float32)")


def block(k: Kernel, squares: Sequence[Squares]) -> None:
    """One block, of which every column has as many elements so far as blocks were read."""
    tile = k.plan.tile
    assert isinstance(tile, RowTile)
    for s in squares:
        name = s.total.name
        k.w.line(f"{name}_off = {s.value} - {name}_mean")
        k.w.line(f"{name}_mean += {name}_off * (1.0 / (start // {tile.block_cols} + 1))")
        k.w.line(f"{name}_squares += {name}_off * ({s.value} - {name}_mean)")


def end(k: Kernel, s: Squares, block: int) -> None:
    name, count = s.total.name, (k.plan.cols.static or 0) // block
    k.w.line(f"{name}_off = {name}_mean - {s.mean}")
    of_all = f"{name}_squares + {name}_off * {name}_off * {float(count)}"
    k.w.line(f"{name} = tl.reduce({of_all}, 1, _add, keep_dims=True)")
