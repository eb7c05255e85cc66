"""Sums down the rows of a tile: how many sets of rows a program keeps apart until its end.

What one thread has of a block is added at once; what lies in other warps, or other lanes, is not, since they
would meet at a barrier for every block.
"""

from __future__ import annotations

from forge.access import INDEX
from forge.emit.triton_base import COMBINE
from forge.plan import KernelPlan, Load, Reduce, RowTile

VECTOR = 8  # elements a thread loads at once, 16 bytes of a 16-bit type


def sets_of(plan: KernelPlan, tile: RowTile) -> int:
    """1 where no thread has rows that another has columns of, else as many as lie side by side in threads;
    each row its own where that is not known.
    """
    if tile.warps == 1 or tile.warps * 32 * VECTOR <= tile.block_cols:
        return 1
    beside = tile.warps * 32 * VECTOR // tile.block_cols
    halves = all(plan.accesses[s.access].dtype.itemsize == 2 for s in _read(plan))
    along = any(isinstance(s, Reduce) and s.axis == "row" for s in plan.body)
    whole = plan.cols.static is not None and plan.cols.static % tile.block_cols == 0
    apart = halves and whole and not along and tile.block_rows % beside == 0
    return beside if apart else tile.block_rows


def _read(plan: KernelPlan) -> list[Load]:
    loads = [s for s in plan.body if isinstance(s, Load)]
    return [
        s for s in loads
        if plan.accesses[s.access].buffer != INDEX and plan.accesses[s.access].letters() == "rc"
    ]  # fmt: skip


def down(value: str, tile: RowTile, sets: int, combine: str) -> str:
    """What each set has of a block."""
    if sets == 1:
        return f"tl.reduce({value}, 0, {COMBINE[combine]}, keep_dims=True)"
    if sets == tile.block_rows:
        return value
    shape = f"[{tile.block_rows // sets}, {sets}, {tile.block_cols}]"
    return f"tl.reduce(tl.reshape({value}, {shape}), 0, {COMBINE[combine]})"


def count(rows: str, first: str, tile: RowTile, sets: int) -> str:
    """How many rows each set has of the block that begins at `first`; text of an integer, or of a column."""
    if sets == 1:
        return f"tl.minimum(tl.maximum({rows} - ({first}), 0), {tile.block_rows})"
    if sets == tile.block_rows:
        return "row_ok"
    left = f"{rows} - ({first}) - tl.arange(0, {sets})[:, None] + {sets - 1}"
    return f"tl.minimum(tl.maximum(({left}) // {sets}, 0), {tile.block_rows // sets})"


def fits(rows: str, first: str, tile: RowTile, sets: int) -> str:
    """Whether there is a row, with the sets as the second of three axes."""
    turn = f"tl.arange(0, {tile.block_rows // sets})[:, None, None] * {sets}"
    return f"({first}) + {turn} + tl.arange(0, {sets})[None, :, None] < {rows}"
