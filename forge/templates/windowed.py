"""Tiles of kernels whose operands move in windows along axes before the last: pooling, depthwise convolutions
and their gradients. As timed on an H200 (bench/NOTES.md): what bounds them is instructions and the traffic
between the caches, before memory does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from esper_ir.types import Dim
from forge.access import INDEX, Access
from forge.plan import Compute, Load, Reduce, RowTile, Stmt, Store, next_pow2
from forge.target import Target
from forge.templates.staged import full, loaded
from forge.unroll import possible
from forge.views import ONE

BYTES = 16  # that a thread loads at once
ALONE = 132  # programs that share the rows where each is all that its multiprocessor runs, and
TURNS = 528  # where four are
MOST = 640  # statements of a body for all neighbours: longer ones are fetched from memory
LANES = 4  # columns beside each other that are made of vectors
FEW = 2  # values of a column that are loaded, beyond which they are worth it for more rows


def tile(
    target: Target, space: tuple[Dim, ...], accesses: Sequence[Access], stmts: Sequence[Stmt],
    sizes: Mapping[str, int], reverse: bool,
) -> RowTile | None:  # fmt: skip
    """Neighbours that are one row, each with the channels that a thread loads at once; None where there is
    nothing to share.
    """
    if vectors(target, space, accesses, stmts):
        return _columns_tile(space, sizes, reverse)
    if target.kind == "cpu" or not possible(space, accesses, stmts):
        return None
    sums, columns = sum(isinstance(s, Reduce) for s in stmts), _columns(accesses, stmts)
    across, above = _neighbours(space, accesses, sums > 1 or columns > FEW)
    if across * above == 1 or len(stmts) * across * above > MOST:
        return None
    item = max((accesses[at].dtype.itemsize for at in full(list(accesses))), default=4)
    lanes = 32 * max(BYTES // item, 1)
    cols = next_pow2(max(space[-1].value(sizes), 16))

    def made(wide: int, warps: int, programs: int = 0, held: int = 1) -> RowTile:
        wide = min(cols, wide)
        block = max(warps * lanes // held // wide, 1)
        most = max(min(-(-_groups(space, sizes, across, above) // block), -(-programs * wide // cols)), 1)
        taken = (0, most) if programs else (block, 0)
        return RowTile(
            block, taken[0], wide, warps, taken[1], reverse, unroll=across, unroll_above=above
        )  # fmt: skip

    if sums > 1:
        return made(64, 4, TURNS, held=2)
    if sums and target.async_copies:
        return replace(made(128, 8, ALONE), stages=4)
    if sums:
        return replace(made(128, 4, 3 * ALONE), prefetch=True)
    return made(256, 1) if columns > FEW else made(128, 4)


def _neighbours(space: Sequence[Dim], accesses: Sequence[Access], both: bool) -> tuple[int, int]:
    """How many positions along the rows' last axis, and along the one before, are one row of a tile: as many
    as the stride where windows divide by it; else two along both, or along the outer one alone.
    """
    last = len(space) - 1
    found = [[w for a in accesses for w in a.windows if w.axis == last - back] for back in (1, 2)]
    times = [math.lcm(*(w.div for w in windows), 1) for windows in found]
    if max(times) == 1:
        times = [2 if windows else 1 for windows in found]
        times[0] = times[0] if both or times[1] == 1 else 1
    sizes = (space[last - 1].static, space[last - 2].static)
    fits = [t <= 4 and (size is None or size >= 2 * t) for t, size in zip(times, sizes, strict=True)]
    return times[0] if fits[0] else 1, times[1] if fits[1] else 1


def _groups(space: Sequence[Dim], sizes: Mapping[str, int], across: int, above: int) -> int:
    rows = [d.value(sizes) for d in space[:-1]]
    for back, times in ((1, across), (2, above)):
        rows[-back] = -(-rows[-back] // times)
    return math.prod(rows)


def _columns(accesses: Sequence[Access], stmts: Sequence[Stmt]) -> int:
    """How many values of a column alone are loaded."""
    read = {s.access for s in stmts if isinstance(s, Load)}
    return sum(accesses[at].letters() == "c" and accesses[at].buffer != INDEX for at in read)


def vectors(
    target: Target, space: Sequence[Dim], accesses: Sequence[Access], stmts: Sequence[Stmt]
) -> bool:  # fmt: skip
    """Whether windows move by one along the columns over rows that begin where vectors do, and overlap: then
    neighbouring columns are made together of vectors. Loads one by one are at addresses that only their own
    size divides, eight of them a result of a sum of eight.
    """
    last, plain = len(space) - 1, (Load, Compute, Store)
    if target.kind == "cpu" or last < 1 or not all(isinstance(s, plain) for s in stmts):
        return False
    read = [accesses[s.access] for s in stmts if isinstance(s, Load)]
    read = [a for a in read if a.buffer != INDEX and "c" in a.letters()]
    whole = all(a.letters() == "rc" for at, a in enumerate(accesses) if at not in loaded(stmts))
    several = len(read) >= LANES and len(stmts) * LANES <= MOST
    return several and whole and all(_aligned(a, last) for a in read)


def _aligned(access: Access, last: int) -> bool:
    window, steps = access.window(last), (*access.strides[:-1], access.offset)
    if window is None or access.parts or access.table or "r" not in access.letters():
        return False
    whole = all(count % LANES == 0 for step in steps for _, count in step.terms)
    return whole and access.strides[-1] == ONE and (window.mul, window.div) == (1, 1)


def _columns_tile(space: Sequence[Dim], sizes: Mapping[str, int], reverse: bool) -> RowTile:
    """Two vectors of results a thread: 7 % less time than one for windows of 3 x 3."""
    groups = -(-max(space[-1].value(sizes), 1) // LANES)
    wide = min(max(next_pow2(groups), 16), 128)
    return RowTile(256 // wide, 256 // wide, wide, 4, reverse=reverse, unroll_cols=LANES)
