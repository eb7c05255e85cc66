"""Rows: pointwise work with reductions along rows, down columns, or both, one pass over the data.

A program owns a fixed block of rows. Column results (weight gradients of norms, bias gradients) are kept per
program in registers and written once as a partial row; a second kernel adds the partial rows in ascending
order. The number of partial rows depends on the number of rows alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from esper_ir.diagnostics import EsperError
from esper_ir.graph import Graph
from esper_ir.scalar import Prim, walk
from esper_ir.types import Dim
from forge.along import across, apart, in_line
from forge.body import Body, collapse, folded
from forge.folding import without_divisions
from forge.groups import WHOLE_ROW, Group
from forge.halves import in_places, places_of
from forge.lowered import Launch, Lowered, ceildiv, size_of, symbols
from forge.partials import SecondStage, Shares, workspaces
from forge.plan import (
    INDEX,
    Access,
    Compute,
    KernelPlan,
    Load,
    PointTile,
    Reduce,
    RowTile,
    Stmt,
    Store,
    SumTile,
    Tile,
    next_pow2,
)
from forge.target import Target
from forge.templates import strided, windowed
from forge.templates.choice import SLOW
from forge.templates.staged import both_axes, columns_staged, full, loaded, swept, within
from forge.templates.strided import FEW_PROGRAMS, MANY_ROWS, TILE
from forge.tune.journal import Choices, choice_key
from forge.tune.shapes import shape_of
from forge.tune.tiles import bad
from forge.unroll import unrolled
from forge.views import ONE

ZERO = Dim()
LONG_ROW = 256
SHORT_ROW = 16
BUSY_COLUMNS = 4  # statements, and
WARPS = 2048  # of all programs that take rows in turn
SPREAD = 128  # programs that few rows are dealt to, before one has several
LIGHT = 16  # operations on an element that leave registers for 8 rows
# Programs that share the rows when columns are reduced: about one a multiprocessor of a large card, and the
# number of
# partial rows. A constant, so that results do not depend on the card.
PROGRAMS = 128
# Rows that one program adds in float32 before the float64 sum of the partial rows: the error of a running
# sum grows
# with the root of its length, and eager's own sums are trees.
ADDED_ROWS = 16
FEW_ROWS = 1024  # at most, added in one kernel
BESIDE = 256  # rows of a processor's program that lie side by side in memory, and
FEW_BESIDE = 8  # the fewest that are worth it
MANY_WORDS = 3  # read for an element, for which registers have not the room of two blocks
MANY_COLUMNS = 8192  # of a row in registers, beyond which nothing else is
ODD_ROWS = 16  # of which each thread has a column, and so all their values, where rows begin at odd addresses


@dataclass(frozen=True)
class RowsInput:
    """A group ready for the template: its body over the group's space, and sizes to tune for. `reverse`: rows
    last to first, so that what the kernel before touched last is met in the cache first.
    """

    graph: Graph
    group: Group
    body: Body
    target: Target
    sizes: dict[str, int]
    name: str
    stored: frozenset[str] = frozenset()
    reverse: bool = False
    choices: Choices = field(default_factory=Choices)

    def choose(
        self, space: tuple[Dim, ...], accesses: list[Access], prior: Tile, more: object = None,
        product: str = "",
    ) -> Any:  # fmt: skip
        """The journal's tile for this work, else a measured one, else the prior. `product`: its node."""
        work = (self.target.arch, space, tuple(accesses), tuple(self.body.stmts), more, self.sizes)
        return self.choices.pick(choice_key(*work), prior, shape_of(*work), product)


def lower(given: RowsInput) -> Lowered:
    """Kernels for a group without a contraction."""
    space, accesses = collapse(given.group.space, given.body.accesses, given.group.split)
    reducing = any(isinstance(s, Reduce) for s in given.body.stmts)
    if not reducing:
        return _pointwise(given, space, accesses)
    space, accesses, split = _two_sided(given, space, accesses)
    one = folded(space, accesses, split)
    if one is None:
        raise EsperError(
            "E0533", "the reduced axes are not one run of memory for every operand", node=given.group.name,
            hint="esper-forge explain shows the group",
        )  # fmt: skip
    return _rows(given, *one)


def _two_sided(
    given: RowsInput, space: tuple[Dim, ...], accesses: list[Access]
) -> tuple[tuple[Dim, ...], list[Access], int]:
    """Axes before and from the split on, in collapsed terms; a side without axes gets one of size 1."""
    rows = ONE
    for size in given.group.space[: given.group.split or 0]:
        rows = rows * size
    split, product = 0, ONE
    while split < len(space) and product != rows:
        product = product * space[split]
        split += 1
    if split == 0:
        space = (ONE, *space)
        accesses = [a.led() for a in accesses]
        split = 1
    if split == len(space):
        space = (*space, ONE)
        accesses = [replace(a, strides=(*a.strides, ZERO)) for a in accesses]
    return space, accesses, split


def _pointwise(given: RowsInput, space: tuple[Dim, ...], accesses: list[Access]) -> Lowered:
    if not space:
        space, accesses = (ONE,), [replace(a, strides=(ZERO,)) for a in accesses]
    total = ONE
    for size in space:
        total = total * size
    if len(space) > 1 and (given.target.kind == "cpu" or len(space) == 2 or _by_rows(given, space, accesses)):
        return _rows(given, space, accesses)
    block = 1024 if given.target.kind != "cpu" else 16384
    tile = given.choose(space, accesses, PointTile(block, 4, given.reverse and given.target.kind != "cpu"))
    step = _launch(given, space, accesses, given.body.stmts, tile, ceildiv(total, tile.block))
    return Lowered("pointwise", (step,))


def _by_rows(given: RowsInput, space: tuple[Dim, ...], accesses: list[Access]) -> bool:
    """Some value is the same along a long last axis: loaded once a row, not once an element. Or windows move
    along other axes only: where they are is found once a row. Or neighbours are made of vectors.
    """
    if windowed.vectors(given.target, space, accesses, given.body.stmts):
        return True
    last = len(space) - 1
    count = space[-1].static or 0
    if any(a.windows for a in accesses) and not any(a.window(last) for a in accesses):
        return count >= SHORT_ROW
    return count >= LONG_ROW and any(a.strides[-1] == ZERO and a.buffer != INDEX for a in accesses)


def _launch(
    given: RowsInput, space: tuple[Dim, ...], accesses: list[Access], stmts: list[Stmt],
    tile: RowTile | PointTile | SumTile, programs: Dim, columns: Dim = ONE, suffix: str = "",
) -> Launch:  # fmt: skip
    used = symbols(*space, *(s for a in accesses for s in a.dims))
    plan = KernelPlan(
        given.name + suffix,
        space,
        tuple(accesses),
        tuple(stmts),
        tile,
        used,
        wide=_wide(given, space, accesses),
    )
    plan = without_divisions(plan) if given.target.kind != "cpu" else plan
    return Launch(plan, (size_of(programs), size_of(columns), 1))


def _wide(given: RowsInput, space: tuple[Dim, ...], accesses: list[Access]) -> bool:
    """64-bit indices when some element offset over the declared range may pass 2**31."""
    ranges = {n: (s.min, s.max) for n, s in given.graph.dims.items()}
    for access in accesses:
        reach = ONE + access.offset
        axes = list(enumerate(zip(space, access.strides, strict=True)))
        for axis, (size, stride) in axes[:-1] if access.parts else axes:
            window = access.window(axis)
            reach = reach + (size if window is None else window.size) * stride
        for size, stride in access.parts:
            reach = reach + size * stride
        if access.table is not None:
            reach = reach + access.table[0] * access.table[1]
        high = reach.bounds(ranges)[1]
        if high is None or high + 2**20 >= 2**31:
            return True
    return False


def _tile(given: RowsInput, space: tuple[Dim, ...], accesses: list[Access]) -> RowTile:
    """A prior by shape. Column reductions on a card, and columns' values that are work to make: a fixed
    number of programs take blocks of rows in turn, the next block loaded while one is worked on; else one
    block of rows a program.
    """
    row_reduce, col_reduce = reduces(given.body.stmts)
    cols = space[-1].value(given.sizes)
    if given.target.kind == "cpu":
        return _processor_tile(given, space, accesses)
    side = windowed.tile(given.target, space, accesses, given.body.stmts, given.sizes, given.reverse)
    if side is not None:
        return side
    if not col_reduce and across(accesses):
        if not row_reduce:
            return RowTile(64, 64, 64, 8, reverse=given.reverse)
        return strided.tile(given.target, _bare(given, space, accesses), given.sizes, given.reverse)
    whole = space[-1].static is not None and cols <= WHOLE_ROW
    wide = next_pow2(max(cols, 1)) if whole else 4096
    if not row_reduce:
        many = _rows_of(given, space) >= MANY_ROWS
        moved = any(a.windows for a in accesses)
        looped = col_reduce or (many and not moved and _busy_columns(given, accesses))
        wide = min(wide, 512 if looped else 1024)
        if looped and not col_reduce:
            # 32 elements a thread of one block: 1 to 5 % less time than programs that take blocks in turn.
            block = TILE // wide
            return RowTile(block, block, wide, 4, reverse=given.reverse)
        if looped:
            return _in_turn(given, space, accesses, wide)
    if not col_reduce and not row_reduce and any(a.windows for a in accesses):
        if _busy_columns(given, accesses):
            # A thread has 8 columns of two rows, so that what the columns need is loaded once for both; warps
            # alone, since what they load is handed round nowhere.
            wide = min(wide, 256)
            block = max(512 // wide, 2)
            return RowTile(block, block, wide, 1, reverse=given.reverse)
        block = max(min(TILE // 2 // wide, 64), 1)  # many operands: 8 elements a thread
        return RowTile(block, block, wide, max(block * wide // 256, 1), reverse=given.reverse)
    if not col_reduce and not row_reduce and _by_row_alone(accesses):
        wide = min(next_pow2(max(cols, 1)), TILE // 4)
        room = 2 * TILE // 4 if cols > wide else TILE // 4  # two rows of 1,024: 9 % less time than one
        block = max(min(room // wide, 64, next_pow2(-(-_rows_of(given, space) // SPREAD))), 1)
        return RowTile(block, block, wide, 4, reverse=given.reverse)
    if not col_reduce and not whole and row_reduce:
        return swept(given.target, _bare(given, space, accesses), given.sizes, given.reverse)
    if not col_reduce and not row_reduce and (few := _few_rows(given, space, accesses)) is not None:
        return few
    if not col_reduce and whole and row_reduce and wide <= 1024 and _words(given, accesses) >= MANY_WORDS:
        # 8 elements a thread: with 16 of three operands two programs fit, which all wait or all compute. In
        # warps as few as a row allows: 2 rows in 2 take 5 % less time than 4 in 4.
        block = max(512 // wide, 1)
        return RowTile(block, block, wide, max(block * wide // 256, 1), reverse=given.reverse)
    if not col_reduce:
        block = max(min(TILE // wide, 64, next_pow2(-(-_rows_of(given, space) // SPREAD))), 1)
        warps = next_pow2(min(max(block * wide // 512, 1), 16 if wide >= 8192 else 8))
        ahead = not whole and _streams(given, accesses)[0] <= 2
        return RowTile(block, block, wide, warps, reverse=given.reverse, prefetch=ahead)
    return _both_tile(given, accesses, _rows_of(given, space), wide, whole)


def _both_tile(given: RowsInput, accesses: list[Access], rows: int, wide: int, whole: bool) -> RowTile:
    """Reductions along rows and down columns. Blocks too large for two of them in registers are copied ahead
    into shared memory. Of the longest rows a thread has half the elements and no next block: with 16 warps
    it spilled thousands of bytes for each row.
    """
    staged = both_axes(given.target, _streams(given, accesses)[0], wide, rows, given.reverse)
    if staged is not None and whole:
        return staged
    if wide > MANY_COLUMNS:
        warps, programs = 1024 // given.target.warp, max(min(rows, PROGRAMS), 1)
        return RowTile(1, 0, wide, warps, programs=next_pow2(programs), reverse=given.reverse)
    block, warps = _both_axes(wide)
    most = PROGRAMS * max(4096 // wide, 1) if wide >= 256 else WARPS // warps
    programs = next_pow2(max(min(-(-rows // block), most), 1))
    ahead = wide >= LONG_ROW  # in registers; of short rows there is no room: a fifth less time without
    made = RowTile(block, 0, wide, warps, programs=programs, reverse=given.reverse, prefetch=ahead)
    words = _words(given, accesses)
    crowded = words >= MANY_WORDS or (words > 1 and wide == MANY_COLUMNS)
    copied = ahead and crowded and given.target.async_copies
    return replace(made, prefetch=False, stages=2) if copied else made


def _few_rows(given: RowsInput, space: tuple[Dim, ...], accesses: list[Access]) -> RowTile | None:
    """All of few and very long rows in one program, so that what is of the columns alone is read once: it is
    as long as they are, and not in the cache any more when the next row comes. None where it is not so.
    Two rows at a time, of which a thread has 8 columns: what these need is handed round nowhere.
    """
    read = {accesses[at].letters() for at in loaded(given.body.stmts) if accesses[at].buffer != INDEX}
    rows, wide = next_pow2(_rows_of(given, space)), TILE // 4
    if "c" not in read or not 1 < rows <= SHORT_ROW or wide * FEW_PROGRAMS > space[-1].value(given.sizes):
        return None
    return RowTile(2, rows, wide, 4, reverse=given.reverse, prefetch=rows > 2)


def _by_row_alone(accesses: list[Access]) -> bool:
    """Values of a row are read, and none of a column: several rows of a program would share nothing."""
    letters = {a.letters() for a in accesses if a.buffer != INDEX}
    return "r" in letters and "c" not in letters and not any(a.windows for a in accesses)


def _processor_tile(given: RowsInput, space: tuple[Dim, ...], accesses: list[Access]) -> RowTile:
    """Some rows of one after the other; where memory runs along the rows, `BESIDE` at a time in vectors."""
    col_reduce = reduces(given.body.stmts)[1]
    cols = space[-1].value(given.sizes)
    wide = next_pow2(max(cols, 1))
    per = ADDED_ROWS if col_reduce else next_pow2(max(min(8192 // max(cols, 1), 64), 1))
    count = space[-2].value(given.sizes)
    moved = any(a.windows or a.parts for a in accesses)
    if col_reduce or moved or count < FEW_BESIDE or not across(accesses, beside=True):
        return RowTile(1, per, wide, 1)
    beside = min(next_pow2(count), BESIDE)
    return RowTile(beside, max(beside, per), wide, 1)


def _rows_of(given: RowsInput, space: tuple[Dim, ...]) -> int:
    return max(KernelPlan("", space, (), (), PointTile(1, 1), ()).rows.value(given.sizes), 1)


def _in_turn(given: RowsInput, space: tuple[Dim, ...], accesses: list[Access], wide: int) -> RowTile:
    """Programs that take blocks of rows in turn, without a reduction along rows.

    A thread owns 8 columns, 16 bytes of a 16-bit type, in every row of the block, so that sums down the block
    need no other thread. Memory answers after about a microsecond, so some 50 KB a multiprocessor have to be
    under way: 8 rows a warp, and 16 warps (8 where more than one tensor is read and its registers leave no
    room for more) on each of 128. All programs are there at once: a second wave would be mostly idle.
    """
    cols, rows = space[-1].value(given.sizes), _rows_of(given, space)
    reads, writes = _streams(given, accesses)
    words = _words(given, accesses)
    light = (reads + writes == 1 or reads == 2) and words <= 1 and _work(given) <= LIGHT
    deep = 8 if light else 4 if words < MANY_WORDS else 2
    block = min(deep * 256 // min(wide, 256), next_pow2(rows))
    warps = max(wide // 256, 1)
    if cols % 8 and sum(accesses[at].letters() == "r" for at in loaded(given.body.stmts)) > 1:
        block = min(block, ODD_ROWS)
    if any(a.windows for a in accesses):
        # Neighbours read the same elements: they come from the cache, and many programs hide that.
        block = min(max(block // 4, 1), next_pow2(rows))
        programs = max(min(-(-rows // block), 2 * WARPS // (warps * -(-cols // wide))), 1)
        return RowTile(block, 0, wide, warps, programs=programs, reverse=given.reverse)
    staged = columns_staged(given.target, [accesses[at] for at in full(accesses) & loaded(given.body.stmts)],
                            (rows, cols, wide), given.reverse)  # fmt: skip
    if staged is not None:
        return staged
    at_once = WARPS if reads <= 1 else WARPS // 2 if light else WARPS * 7 // 8
    most = at_once // (warps * -(-cols // wide))
    programs = max(min(-(-rows // block), most), 1)
    return RowTile(block, 0, wide, warps, programs=programs, reverse=given.reverse, prefetch=True)


def _streams(given: RowsInput, accesses: list[Access]) -> tuple[int, int]:
    """Operands that are read, and results that are written, for every row and column."""
    stores = {s.access for s in given.body.stmts if isinstance(s, Store)}
    return len(full(accesses) & loaded(given.body.stmts)), len(full(accesses) & stores)


def _words(given: RowsInput, accesses: list[Access]) -> int:
    """Words of 4 bytes that are read for an element."""
    return sum(accesses[at].dtype.itemsize for at in full(accesses) & loaded(given.body.stmts)) // 4


def _work(given: RowsInput) -> int:
    """Operations on an element, about."""
    exprs = [s.expr for s in given.body.stmts if isinstance(s, Compute)]
    prims = [e.name for expr in exprs for e in walk(expr) if isinstance(e, Prim)]
    return len(prims) + 8 * sum(name in SLOW for name in prims)


def _busy_columns(given: RowsInput, accesses: list[Access]) -> bool:
    """Many values depend on the column alone: they are made once a program, so a program has many rows."""
    axes = KernelPlan("", (ONE,) * len(accesses[0].strides), tuple(accesses), tuple(given.body.stmts),
                      PointTile(1, 1), ()).axes()  # fmt: skip
    return sum(kind == "c" for kind in axes.values()) >= BUSY_COLUMNS


def _bare(given: RowsInput, space: tuple[Dim, ...], accesses: list[Access]) -> KernelPlan:
    return KernelPlan("", space, tuple(accesses), tuple(given.body.stmts), PointTile(1, 1), ())


def _both_axes(wide: int) -> tuple[int, int]:
    """(rows of a block, warps): a thread owns 8 columns of every row of the block where a row is long enough,
    so that the sum down the block needs no exchange between warps.
    """
    if wide >= 4096:
        return max(8192 // wide, 1), 16
    if wide >= 256:
        return 4, wide // 256
    return max(min(2048 // wide, 64), 1), 4


def reduces(stmts: Sequence[Stmt]) -> tuple[bool, bool]:
    """Whether a body reduces along rows, and down columns."""
    axes = {s.axis for s in stmts if isinstance(s, Reduce)}
    return "row" in axes, "col" in axes


def _rows(given: RowsInput, space: tuple[Dim, ...], accesses: list[Access]) -> Lowered:
    summed = _summed(given, space, accesses)
    if summed:
        one = Shares(space[0], 1, 0)
        return Lowered("rows", (_second_stage(given, space[0], space[-1], one, summed),))
    chosen = given.choose(space, accesses, _tile(given, space, accesses))
    cols = space[-1]
    held = given.target.kind != "cpu" and chosen.block_cols >= (cols.static or chosen.block_cols + 1)
    if given.target.kind != "cpu" and all(reduces(given.body.stmts)) and not held:
        raise bad(f"rows of {given.name} are reduced and added down their columns: a block holds whole ones")
    space, accesses, stmts = unrolled(space, accesses, given.body.stmts, chosen)
    if held or given.target.kind == "cpu":
        count = places_of(space, accesses, stmts)
        space, accesses, stmts = in_places(space, accesses, stmts, count)
        chosen = replace(chosen, block_cols=max(chosen.block_cols // count, 1))
    tile = within(given.target, stmts, space, accesses, chosen)
    row_reduce, _ = reduces(given.body.stmts)
    rows = KernelPlan("", space, (), (), tile, ()).rows
    programs = Dim.of(tile.programs) if tile.programs else ceildiv(rows, tile.rows_per_program)
    columns = ONE if row_reduce or given.target.kind == "cpu" else ceildiv(space[-1], tile.block_cols)
    plan = KernelPlan("", space, tuple(accesses), tuple(stmts), tile, ())
    if given.target.kind != "cpu" and apart(plan):
        outer = KernelPlan("", space[:-1], (), (), tile, ()).rows
        programs = outer * ceildiv(space[-2], tile.block_rows)
    if given.target.kind != "cpu" and in_line(plan):
        programs, columns = programs * columns, ONE
    steps = [_launch(given, space, accesses, stmts, tile, programs, columns)]
    temps = workspaces(given.graph, given.body, programs, cols)
    if given.body.partials:
        steps.append(_second_stage(given, programs, cols, Shares.of(tile, rows)))
    return Lowered("rows", tuple(steps), temps)


def _summed(given: RowsInput, space: tuple[Dim, ...], accesses: list[Access]) -> dict[str, Access]:
    """What is added down few rows, by reduction, where the group does nothing else: partial rows of it would
    be a kernel for nothing.
    """
    ranges = {n: (s.min, s.max) for n, s in given.graph.dims.items()}
    high = space[0].bounds(ranges)[1]
    few = given.target.kind != "cpu" and len(space) == 2 and high is not None and high <= FEW_ROWS
    loads = {s.name: accesses[s.access] for s in given.body.stmts if isinstance(s, Load) and not s.row}
    sums = {s.name: s.arg for s in given.body.stmts if isinstance(s, Reduce) and s.axis == "col"}
    stores = [s for s in given.body.stmts if isinstance(s, Store)]
    if given.body.means:
        return {}
    nothing = len(loads) + len(sums) + len(stores) == len(given.body.stmts)
    plain = all(a.buffer != INDEX and not (a.windows or a.parts) for a in loads.values())
    if not (few and nothing and plain and sums.keys() == {s.value for s in stores}):
        return {}
    found = {accesses[s.access].buffer: loads.get(sums[s.value]) for s in stores}
    made = {node: found.get(buffer) for node, buffer in given.body.partials.items()}
    kept = {node: access for node, access in made.items() if access is not None}
    return kept if len(kept) == len(made) else {}


def _second_stage(
    given: RowsInput, parts: Dim, cols: Dim, shares: Shares, summed: Mapping[str, Access] | None = None
) -> Launch:
    """All partial workspaces of the group in one kernel, or what is `summed` in their place, with the
    pointwise work that follows them.
    """
    stage = SecondStage(given.graph, given.group, given.body, cols, given.target.kind == "cpu", shares)
    stage.build(summed or {}, given.stored)
    tile = SumTile(1, 1024, 1)
    if given.target.kind != "cpu":
        buffers = workspaces(given.graph, given.body, parts, cols).values()
        words = sum(max(t.dtype.itemsize // 4, 1) for t in buffers)
        tile = _sum_tile(parts.value(given.sizes), cols.value(given.sizes), words)
    programs = ceildiv(cols, tile.block_cols)
    return _launch(given, (parts, cols), stage.accesses, stage.stmts, tile, programs, suffix="_sum")


def _sum_tile(parts: int, cols: int, words: int) -> SumTile:
    """Some hundred programs where there are columns for them (at least 32 bytes each), and a block of partial
    rows that leaves few steps: each waits for memory. `words` of 4 bytes are added up for each of them.
    """
    wide = min(max(next_pow2(cols // 128), 8), 32)
    most = 4096 if parts * wide <= 8192 else max(16384 // next_pow2(words), 4096)
    block = min(most // wide, next_pow2(max(parts, 1)))
    most = 8 if block * wide <= 4096 and words <= 2 else 16
    return SumTile(block, wide, min(max(block * wide // (512 if words <= 2 else 256), 1), most))
