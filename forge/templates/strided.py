"""Tiles of reductions along axes across memory: elements of a row lie lines apart, rows beside each other."""

from __future__ import annotations

from collections.abc import Mapping

from forge.picked import places
from forge.plan import KernelPlan, Reduce, RowTile, Store, next_pow2
from forge.target import Target
from forge.templates.staged import full, loaded

TILE = 4096
MANY_ROWS = 4096
FEW_PROGRAMS = 448  # that sweep such an axis: 3 or 4 on each multiprocessor
HELD = 1 << 14  # elements of a program in registers, at most: 32 a thread


def tile(target: Target, plan: KernelPlan, sizes: Mapping[str, int], reverse: bool) -> RowTile:
    """A row's part of a line is at least 128 bytes.

    Short rows that are read more than once, or written, are held, 32 elements a thread: with half as many
    in twice the warps, what warps tell each other costs more than a longer wait for memory. Long ones are
    swept with 32 loads of a thread or more under way ahead, each row by one thread where rows are many.
    """
    reads = len(full(plan.accesses) & loaded(plan.body))
    writes = len(full(plan.accesses) & {s.access for s in plan.body if isinstance(s, Store)})
    cols, rows = max(plan.cols.value(sizes), 1), max(plan.rows.value(sizes), 1)
    wide, inner = next_pow2(cols), next_pow2(max(plan.space[-2].value(sizes), 1))
    size = max((plan.accesses[at].dtype.itemsize for at in full(plan.accesses)), default=4)
    where = len(places(plan))
    several = writes > 0 or sum(isinstance(s, Reduce) for s in plan.body) - where > 1
    line, streams = max(128 // size, 16), max(reads, 1)
    share = TILE // next_pow2(streams)
    most = HELD if several else HELD // 2
    if not where and plan.cols.static is not None and line * wide * streams <= most:
        block = min(max(share // wide, line), max(inner, line))
        warps = min(max(next_pow2(block * wide * streams // 1024), 1), 16)
        return RowTile(block, block, wide, warps, reverse=reverse)
    block = 4 * line if rows >= MANY_ROWS * line else line
    more = next(n for n in (1, 2, 4) if n == 4 or -(-rows // block) * n >= FEW_PROGRAMS)
    # Few programs have more under way each: 64 x 128 elements in 8 warps, whatever they read, is as timed. Of
    # one operand of 4 bytes 64 loads a thread take 4 % less time than 32, or than as many in fewer programs.
    deep = streams == 1 and size == 4 and not several and not where
    swept = max(share * (2 if deep else 1), block) if more == 1 else TILE * more
    if target.async_copies and streams == 1 and more > 1 and not several and size == 2:
        # 2 to 4 % less time than the next block in registers.
        return RowTile(block, block, swept // block, 8, reverse=reverse, stages=4 if more == 2 else 3)
    return RowTile(block, block, swept // block, 4 * more, reverse=reverse, prefetch=not several)
