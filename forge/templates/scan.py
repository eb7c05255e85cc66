"""Running values along an axis: one pass over the data with the state in registers.

A program walks time in blocks, in order or against it, and takes as many columns as keep a card busy; what is
computed from and for the running values is in the same kernel. The order in which a block is added up depends
on the tile alone.
"""

from __future__ import annotations

from dataclasses import replace

from esper_ir.diagnostics import EsperError
from esper_ir.types import Dim
from forge.body import collapse
from forge.lowered import Launch, Lowered, ceildiv, size_of, symbols
from forge.plan import Access, KernelPlan, Load, ScanTile, next_pow2
from forge.templates.rows import RowsInput, _wide
from forge.views import ONE

ZERO = Dim()
BUSY = 192  # programs above which some multiprocessor has two
MANY_LOADS = 3  # operands above which 16 warps have too few registers


def lower(given: RowsInput) -> Lowered:
    """The kernel of a group with running values."""
    space, accesses = _three_sided(given)
    tile = given.choose(space, accesses, _tile(given, space, accesses))
    rows = ONE
    for size in space[:-2]:
        rows = rows * size
    programs = ceildiv(rows, tile.block) if space[-1] == ONE else rows * ceildiv(space[-1], tile.block)
    used = symbols(*space, *(d for a in accesses for d in a.dims))
    wide = _wide(given, space, accesses)
    plan = KernelPlan(given.name, space, tuple(accesses), tuple(given.body.stmts), tile, used, wide=wide)
    return Lowered("scan", (Launch(plan, (size_of(programs), 1, 1)),))


def _three_sided(given: RowsInput) -> tuple[tuple[Dim, ...], list[Access]]:
    """(outer axes ..., time, columns), with one axis of columns; E0533 where they are more."""
    assert given.group.scan is not None
    time = given.group.scan[0]
    long = [axis for axis, size in enumerate(given.group.space) if size != ONE]
    space, accesses = collapse(given.group.space, given.body.accesses, time, time + 1)
    behind = len(space) - 1 - _place(given, space, long.index(time))
    if behind > 1:
        raise EsperError(
            "E0533", "the axes behind the running values are not one run of memory", node=given.group.name,
            hint="esper-forge explain shows the group",
        )  # fmt: skip
    if behind == 0:
        space = (*space, ONE)
        accesses = [replace(a, strides=(*a.strides, ZERO)) for a in accesses]
    return space, accesses


def _place(given: RowsInput, space: tuple[Dim, ...], before: int) -> int:
    """Axis of time after joining: `before` long axes stood in front of it."""
    assert given.group.scan is not None
    rows, joined, at = ONE, ONE, 0
    for size in given.group.space[: given.group.scan[0]]:
        rows = rows * size
    while before and joined != rows:
        joined, at = joined * space[at], at + 1
    return at


def _tile(given: RowsInput, space: tuple[Dim, ...], accesses: list[Access]) -> ScanTile:
    """A prior by shape. A thread has some steps of one column of each operand under way while it works on the
    block before: 4 where there are two programs for each multiprocessor, 8 where there is one. A program has
    16 warps, 8 where many operands fill their registers. 32 columns are 64 bytes of a 16-bit type, whole
    sectors of memory.
    """
    length, cols = space[-2].value(given.sizes), space[-1].value(given.sizes)
    rows = ONE
    for size in space[:-2]:
        rows = rows * size
    count = rows.value(given.sizes)
    if given.target.kind == "cpu":
        return ScanTile(1, 1, 1 if space[-1] == ONE else next_pow2(min(max(cols, 1), 512)), 1)
    if space[-1] == ONE:
        span = min(next_pow2(max(length, 16)), 1024)
        block = max(min(2048 // span, next_pow2(max(count // BUSY, 1))), 1)
        return ScanTile(span, 1, block, 4)
    streams = len({s.access for s in given.body.stmts if isinstance(s, Load)})
    block = min(32, next_pow2(max(cols, 1)))
    steps = 8 if count * -(-cols // block) < BUSY else 4
    parts = max(min(8 if streams > MANY_LOADS else 16, next_pow2(-(-length // steps))), 1)
    return ScanTile(steps, parts, block, max(parts * block // 32, 1))
