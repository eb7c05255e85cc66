"""Rows copied ahead into shared memory: where, and how many blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from esper_ir.types import Dim
from forge.access import INDEX, Access
from forge.online import about, below, joined, joins
from forge.plan import Compute, KernelPlan, Load, Phase, Reduce, RowTile, Stmt, Store, next_pow2, phases
from forge.target import Target

KEPT = 20 << 10  # bytes on chip for what is no block under way: values of rows, exchange between warps
BLOCKS = 4  # of a program, without which copying ahead is no use


def loaded(stmts: Sequence[Stmt]) -> set[int]:
    return {s.access for s in stmts if isinstance(s, Load)}


def full(accesses: Sequence[Access]) -> set[int]:
    """Numbers of the accesses to every row and column."""
    return {at for at, a in enumerate(accesses) if a.buffer != INDEX and a.letters() == "rc"}


def within(
    target: Target, stmts: Sequence[Stmt], space: Sequence[Dim], accesses: Sequence[Access], tile: RowTile
) -> RowTile:
    """The tile with as many stages as the target has asynchronous copies and on-chip memory for.

    Where all that comes of a row held whole is values of the row, Triton 3.6 and 3.7 give the copied block
    the layout of their store, a row a thread: their compiler takes minutes for it, and would make it slow.
    """
    if tile.stages == 1:
        return tile
    whole = space[-1].static is not None and tile.block_cols >= space[-1].static
    if whole and not _spread_out(stmts, accesses):
        return replace(tile, stages=1)
    words = sum(accesses[at].dtype.itemsize for at in full(accesses) & loaded(stmts))
    block = max(tile.block_rows * tile.block_cols * words, 1)
    most = 1 + max(target.shared_bytes - KEPT, 0) // block if target.async_copies else 1
    return replace(tile, stages=min(tile.stages, most))


def _spread_out(stmts: Sequence[Stmt], accesses: Sequence[Access]) -> bool:
    """Every sum of a row goes into values of its columns that are stored or added down them."""
    wanted: set[str] = set()
    for s in reversed(stmts):
        if isinstance(s, Store):
            wanted |= {s.value} if "c" in accesses[s.access].letters() else set()
        elif isinstance(s, Reduce) and (s.axis == "col" or s.name in wanted):
            wanted |= {s.name, s.arg, *s.about}
        elif isinstance(s, Compute) and s.name in wanted:
            wanted |= set(s.args)
    return all(s.name in wanted for s in stmts if isinstance(s, Reduce))


def both_axes(target: Target, reads: int, wide: int, rows: int, reverse: bool) -> RowTile | None:
    """Of rows that are reduced and added down their columns, two operands read: on an H200 11 to 17 % less
    time than with the next block in registers; with three operands 3 % more. 16 elements a thread, and some
    64 to 96 KB under way on a multiprocessor. None where that was not measured.
    """
    if not target.async_copies or reads != 2 or wide not in (1024, 2048, 4096):
        return None
    block, warps, programs, stages = (1, 8, 132, 5) if wide == 4096 else (2048 // wide, 4, 528, 4)
    made = RowTile(block, 0, wide, warps, programs, reverse, stages=stages)
    return made if rows >= BLOCKS * block * programs else None


def columns_staged(
    target: Target, read: Sequence[Access], sizes: tuple[int, int, int], reverse: bool
) -> RowTile | None:
    """Of two operands of 16 bits whose columns are added up, nothing along the rows; `sizes`: rows, columns,
    columns of a block. On an H200 4 to 30 % less time than with the next block in registers, with 16 warps on
    a multiprocessor. None where that was not measured.
    """
    rows, cols, wide = sizes
    halves = len(read) == 2 and all(a.dtype.itemsize == 2 for a in read)
    if not target.async_copies or not halves or wide not in (256, 512):
        return None
    block, warps, programs = 16, 8, 264
    if wide == 512 and cols % 1024 == 0:
        block, wide, warps, programs = 2, 1024, 4, max(512 // (cols // 1024), 1)
    elif wide == 512:
        block, warps, programs = 4, 2, max(1056 // -(-cols // wide), 1)
    made = RowTile(block, 0, wide, warps, programs, reverse, stages=4)
    return made if rows >= BLOCKS * block * programs and cols % wide == 0 else None


def swept(target: Target, plan: KernelPlan, sizes: Mapping[str, int], reverse: bool) -> RowTile:
    """Of rows too wide for registers, as timed on an H200.

    Where a maximum and sums of exponentials below it are all, one reading: 4 to 9 % less time for rows of
    62 KiB than two, 42 % for rows of 128 KiB. A row that is read again is to come from the second-level
    cache, so programs have the warps that leave room there for the rows of all of them (registers leave room
    for half of the warps that a multiprocessor could have): 7 % less for rows of 62 KiB with 16, 21 to 35 %
    for 128 and 256 KiB with 32. A softmax that is stored is read twice either way, online in more time. Mean
    and squares about it take one reading where the rows of all programs are lost before the second (11 % more
    time for rows of 256 KiB, which are not).
    """
    reads = full(plan.accesses) & loaded(plan.body)
    row = plan.cols.value(sizes) * sum(plan.accesses[at].dtype.itemsize for at in reads)
    if joins(plan) and _readings(joined(plan, phases(plan)[1], 4096)) == 1:
        halves = all(plan.accesses[at].dtype.itemsize <= 2 for at in reads)
        wide, warps, stages = (2048, 4, 4) if halves else (4096, 8, 3)
        if target.async_copies:
            return RowTile(1, 1, wide, warps, reverse=reverse, stages=stages, online=True)
        return RowTile(1, 1, 4096, 8, reverse=reverse, prefetch=len(reads) <= 2, online=True)
    again = target.kind == "cuda" and _readings(phases(plan)[1]) > 1
    rows, room = max(plan.rows.value(sizes), 1), target.l2_bytes // 2

    def held(warps: int) -> bool:
        there = max(target.max_warps // 2 // warps, 1) * target.multiprocessors
        return min(there, rows) * row <= room

    warps = next((w for w in (8, 16) if held(w)), 32) if again else 8
    wide = 16384 // next_pow2(max(len(reads), 1)) if warps == 32 else 4096  # 64 registers a thread
    once = again and lost(target, rows, row) and not below(plan) and about(plan, wide)
    wide = wide // 2 if once and warps == 32 else wide
    return RowTile(1, 1, wide, warps, reverse=reverse, prefetch=len(reads) <= 2, online=once)


def lost(target: Target, rows: int, row: int) -> bool:
    """Whether rows of so many bytes, one on each multiprocessor, are not in the cache when read again."""
    return min(target.multiprocessors, rows) * row > target.l2_bytes


def _readings(sweeps: Sequence[Phase]) -> int:
    return sum(bool(s.full) for s in sweeps)
