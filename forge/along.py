"""Memory that runs along the rows of a kernel instead of along its columns."""

from __future__ import annotations

from collections.abc import Sequence

from forge.access import INDEX, Access
from forge.plan import KernelPlan, Reduce, RowTile
from forge.views import ONE, ZERO


def across(accesses: Sequence[Access], beside: bool = False) -> bool:
    """Memory runs along the rows' axis: of the accesses to most axes none steps by 1 along the columns, and
    one does along an axis before (with `beside`, along the one right before). A square tile then reads whole
    lines.
    """
    reach = max((sum(s != ZERO for s in a.strides) for a in accesses), default=0)
    full = [a for a in accesses if sum(s != ZERO for s in a.strides) == reach and a.buffer != INDEX]
    before = slice(-2 if beside else 0, -1)
    return any(ONE in a.strides[before] for a in full) and all(a.strides[-1] != ONE for a in full)


def apart(plan: KernelPlan) -> bool:
    """A block of rows lies in one position of the axes before the rows' last one: else its addresses would
    not be known to be neighbours, and every element were a transaction of its own. Where blocks divide that
    axis they lie so anyway; of an axis shorter than half a block most of a block would be empty.
    """
    tile = plan.tile
    if not isinstance(tile, RowTile) or len(plan.space) < 3 or tile.programs:
        return False
    inner, block = plan.space[-2].static, tile.block_rows
    if block == 1 or tile.rows_per_program != block:
        return False
    if inner is not None and (inner % block == 0 or 2 * inner < block):
        return False
    plain = not any(a.windows or a.parts or a.table for a in plan.accesses)
    return plain and across(plan.accesses, beside=True)


def in_line(plan: KernelPlan) -> bool:
    """Programs that only move and compute go through memory in its order, blocks of columns before blocks of
    rows: what is under way then lies in few pages of memory.
    """
    tile = plan.tile
    if not isinstance(tile, RowTile) or tile.programs or any(isinstance(s, Reduce) for s in plan.body):
        return False
    cols = plan.cols.static
    plain = tile.unroll_cols > 1 or not any(a.windows for a in plan.accesses)
    return plain and (cols is None or cols > tile.block_cols) and not across(plan.accesses)
