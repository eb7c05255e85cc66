"""Kernels of the gradient of a lookup in Triton: lists of positions by part of the table, and their sums."""

from __future__ import annotations

from esper_ir.types import Dim
from forge.emit.triton_base import Kernel
from forge.emit.triton_scalars import TRITON_TYPE
from forge.emit.writer import dim_text
from forge.plan import Access, GatherTile, PlaceTile

MANY = 8  # positions of one row in a block of the list from which they are read several at once


def _across(k: Kernel, access: Access, index: list[str]) -> str:
    """Addresses as wide as the last index, also where an axis of one, or one value for all, has no step."""
    where = f"{k.pointer[access.buffer]} + {k.offset(access, index)}"
    return where if access.strides[-1] != Dim() else f"{where} + {index[-1]} * 0"


def places(k: Kernel, tile: PlaceTile) -> None:
    """Body of a PlaceTile kernel: count what lies before, then list what is the program's own."""
    w = k.w
    rows, count = (dim_text(d) for d in k.plan.space)
    numbers, order, listed, starts = k.plan.accesses
    read = f"tl.load({_across(k, numbers, ['0', 'at'])}, mask=at < {count}, other=-1)"
    w.line("pid = tl.program_id(0)")
    w.line(f"low = pid * {tile.rows}")
    w.line(f"high = tl.minimum(low + {tile.rows}, {rows})")
    w.line(f"below = tl.zeros([{tile.block}], tl.int32)")
    loop = f"for start in tl.range(0, {count}, {tile.block}):"
    at = f"at = start + tl.arange(0, {tile.block}).to({k.index_type})"
    with w.block(loop):
        w.line(at)
        w.line(f"number = {read}")
        w.line("below += ((number >= 0) & (number < low)).to(tl.int32)")
    w.line("base = tl.sum(below, 0)")
    w.line(f"tl.store({k.pointer[starts.buffer]} + pid, base)")
    with w.block(loop):
        w.line(at)
        w.line(f"number = {read}")
        w.line("hit = (number >= low) & (number < high)")
        w.line("ones = hit.to(tl.int32)")
        w.line("place = base + tl.cumsum(ones, 0) - 1")
        w.line(f"tl.store({k.pointer[order.buffer]} + place, at.to(tl.int32), mask=hit)")
        w.line(f"tl.store({k.pointer[listed.buffer]} + place, number.to(tl.int32), mask=hit)")
        w.line("base += tl.sum(ones, 0)")
    w.line(f"tl.store({k.pointer[starts.buffer]} + pid + 1, base, mask=high >= {rows})")


def gathers(k: Kernel, tile: GatherTile) -> None:
    """Body of a GatherTile kernel: row by row of the table, the positions of its part's list that name it."""
    w = k.w
    rows, cols = (dim_text(d) for d in k.plan.space)
    values, order, listed, starts, out = k.plan.accesses
    kind = TRITON_TYPE[k.plan.accesses[0].dtype.compute]
    starts_at, listed_at = k.pointer[starts.buffer], k.pointer[listed.buffer]
    w.line(f"pid = tl.program_id(0).to({k.index_type})")
    w.line(f"across = tl.cdiv({cols}, {tile.block_cols})")
    w.line(f"first_row = pid // across * {tile.rows}")
    w.line(f"col = pid % across * {tile.block_cols} + tl.arange(0, {tile.block_cols})")
    w.line(f"col_ok = col < {cols}")
    w.line(f"part = first_row // {tile.listed}")
    w.line(f"first = tl.load({starts_at} + part)")
    w.line(f"last = tl.load({starts_at} + part + 1)")
    with w.block(f"for r in tl.range(0, {tile.rows}):"):
        w.line("row = first_row + r")
        w.line(f"acc = tl.zeros([{tile.block_cols}], {kind})")
        with w.block(f"for start in tl.range(first, last, {tile.block}):"):
            w.line(f"at = start + tl.arange(0, {tile.block})")
            w.line(f"hit = tl.load({listed_at} + at, mask=at < last, other=-1) == row")
            w.line("found = tl.sum(hit.to(tl.int32), 0)")
            with w.block(f"if found >= {MANY}:"):
                _several(k, tile, kind)
            with w.block("else:"):
                _one_by_one(k, kind)
        narrow = f"acc.to({TRITON_TYPE[out.dtype]})"
        where = _across(k, out, ["row", "col"])
        w.line(f"tl.store({where}, {narrow}, mask=col_ok & (row < {rows}))")


def _several(k: Kernel, tile: GatherTile, kind: str) -> None:
    w = k.w
    values, order, listed = k.plan.accesses[:3]
    with w.block(f"for some in tl.range(0, {tile.block}, {MANY}):"):
        w.line(f"spot = start + some + tl.arange(0, {MANY})")
        w.line(f"mine = tl.load({k.pointer[listed.buffer]} + spot, mask=spot < last, other=-1) == row")
        w.line(f"at_row = tl.load({k.pointer[order.buffer]} + spot, mask=mine, other=0).to({k.index_type})")
        where = _across(k, values, ["at_row[:, None]", "col[None, :]"])
        w.line(f"rows = tl.load({where}, mask=mine[:, None] & col_ok[None, :], other=0).to({kind})")
        w.line("acc += tl.sum(rows, 0)")


def _one_by_one(k: Kernel, kind: str) -> None:
    w = k.w
    values, order = k.plan.accesses[:2]
    none = str(2**31 - 1)
    w.line(f"left = tl.where(hit, at, {none})")
    with w.block("for _ in tl.range(0, found):"):
        w.line("spot = tl.min(left, 0)")
        w.line(f"at_row = tl.load({k.pointer[order.buffer]} + spot).to({k.index_type})")
        where = _across(k, values, ["at_row", "col"])
        w.line(f"acc += tl.load({where}, mask=col_ok, other=0).to({kind})")
        w.line(f"left = tl.where(left == spot, {none}, left)")
