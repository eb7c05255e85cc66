"""Rows, then groups of rows, then the rows again, as one kernel: group norm and its gradient.

The statistics of a group of channels come from those of its channels (rows of memory); with them every row is
read a second time. As three kernels the rows come from memory twice. Here a program owns the rows of one
group: it reads them once for their sums, keeps these on chip, and reads them again, last to first, while the
caches still hold them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from esper_ir.types import Dim
from forge.groups import WHOLE_ROW, Group
from forge.held import dense, in_registers
from forge.lowered import Call, Launch, Lowered, size_of, symbols
from forge.plan import INDEX, Access, Compute, KernelPlan, Load, Reduce, RowTile, Stmt, Store, next_pow2
from forge.views import ONE

LONG = 2048  # columns: shorter rows leave a program with too few bytes under way
MANY = 256  # programs at the tuned size, and
FEW = 64  # where they read memory once
MOST_ROWS = 64  # of a group
STAGED_ROW = 16 << 10  # bytes of the operands of a row
HELD = 256 << 10  # bytes that a program reads twice
ZERO = Dim()


@dataclass(frozen=True)
class BandTile(RowTile):
    """A program has `rows` rows of `parts[0]` and `parts[2]`, and one of `parts[1]` whose columns they are.
    Values in `inner` are on chip only. `held`: all its rows wait in registers between the two readings.
    """

    rows: int = 0
    parts: tuple[KernelPlan, ...] = ()
    inner: frozenset[str] = frozenset()
    held: bool = False

    def __str__(self) -> str:
        made = ", ".join(p.digest[:16] for p in self.parts)
        inner = ", ".join(sorted(self.inner))
        staged = f", stages={self.stages}" if self.stages > 1 else ""
        told = f"rows={self.rows}, warps={self.warps}, reverse={self.reverse}{staged}"
        told += ", held" if self.held else ""
        return f"BandTile({told}, [{made}], [{inner}])"


Done = tuple[Group, Lowered]


def banded(
    done: Sequence[Done], declared: Set[str], sizes: Mapping[str, int], copies: bool = False
) -> list[Done]:
    """The steps of a phase with such triples in a row as one; values in `declared` are seen outside.
    `copies`: memory is copied to on-chip memory while a program goes on.
    """
    out = list(done)
    at = 0
    while at + 2 < len(out):
        plans = _three([low for _, low in out[at : at + 3]], sizes, copies)
        if plans is not None:
            others = [step for i, (_, low) in enumerate(out) if not at <= i < at + 3 for step in low.steps]
            seen = declared | {value for step in others for value in _reads(step)}
            group = replace(out[at + 2][0], nodes=[n for g, _ in out[at : at + 3] for n in g.nodes])
            out[at : at + 3] = [(group, _band(*plans, seen, copies))]
        at += 1
    return out


def _reads(step: Launch | Call) -> Iterator[str]:
    if isinstance(step, Call):
        return (o.value for o in step.inputs)
    return iter(step.plan.buffers)


def _three(
    lowered: Sequence[Lowered], sizes: Mapping[str, int], copies: bool
) -> tuple[KernelPlan, KernelPlan, KernelPlan] | None:
    """The kernels, where they make a band."""
    first, second, third = (_alone(low) for low in lowered)
    if first is None or second is None or third is None or not _fits(first, second, third, sizes, copies):
        return None
    return (first, second, third) if _linked(first, second, third) and _summing(first, second) else None


def _stages(third: KernelPlan) -> int:
    """Rows under way while one is worked on: on an H200 7 to 13 % less time than with one of them in
    registers and twice the warps; not where they are longer than measured.
    """
    row = (third.cols.static or 0) * sum(a.dtype.itemsize for a in _loaded(third) if a.strides[-1] != ZERO)
    return 1 if row > STAGED_ROW else 4 if 2 * row <= STAGED_ROW else 3


def _band(
    first: KernelPlan, second: KernelPlan, third: KernelPlan, seen: Set[str], copies: bool
) -> Lowered:  # fmt: skip
    count, cols = second.cols.static or 0, first.cols.static or 0
    inner = frozenset(a.buffer for p in (first, second) for a in _stored(p)) - seen
    held = copies and in_registers(first, second, third)
    stages = 1 if held or not copies else _stages(third)
    warps = min(max(next_pow2(cols) // (512 if stages > 1 else 256), 4), 16)
    wide = any(p.wide for p in (first, second, third))
    shape = RowTile(1, 1, next_pow2(cols), warps)
    middle = replace(shape, block_cols=next_pow2(count))
    parts = tuple(
        replace(renamed(p, prefix), tile=tile, wide=wide)
        for p, prefix, tile in ((first, "a", shape), (second, "b", middle), (third, "c", shape))
    )
    reverse = isinstance(first.tile, RowTile) and first.tile.reverse
    tile = BandTile(
        1, 1, shape.block_cols, warps, reverse=reverse, stages=stages, rows=count, parts=parts, inner=inner,
        held=held,
    )  # fmt: skip
    accesses, stores = _outside(parts, inner)
    used = symbols(second.rows, *(d for p in parts for d in p.space), *(d for a in accesses for d in a.dims))
    plan = KernelPlan(third.name, third.space, accesses, stores, tile, used, wide=wide)
    return Lowered("band", (Launch(plan, (size_of(second.rows), 1, 1)),))


def _alone(low: Lowered) -> KernelPlan | None:
    """The kernel of a group that is nothing but rows."""
    step = low.steps[0]
    if len(low.steps) != 1 or not isinstance(step, Launch) or type(step.plan.tile) is not RowTile:
        return None
    plan = step.plan
    special = any(a.partial or a.windows or a.table or a.parts for a in plan.accesses)
    columns = any(isinstance(s, Reduce) and s.axis == "col" for s in plan.body)
    return None if special or columns else plan


def _fits(
    first: KernelPlan, second: KernelPlan, third: KernelPlan, sizes: Mapping[str, int], copies: bool
) -> bool:
    """Sizes: whole rows in registers, enough programs, and what one reads twice is held by the caches."""
    count, cols = second.cols.static or 0, first.cols.static or 0
    rows = first.rows == third.rows == second.rows * count and first.cols == third.cols
    full = {a.buffer: a.dtype.itemsize for a in _loaded(third) if a.strides[-1] != ZERO}
    held = count * cols * sum(full.values())
    many = FEW if copies and in_registers(first, second, third) else MANY
    enough = second.rows.value(dict(sizes)) >= many and held <= HELD
    return rows and 1 < count <= MOST_ROWS and LONG <= cols <= WHOLE_ROW and enough


def _linked(first: KernelPlan, second: KernelPlan, third: KernelPlan) -> bool:
    """The first makes values of rows for the second alone, the second values of its rows for the third alone,
    and each lies where the next one looks for it.
    """
    made, total = _stored(first), _stored(second)
    axes = second.axes()
    between = [a for a in _loaded(second) if a.buffer in {x.buffer for x in made}]
    after = [a for a in _loaded(third) if a.buffer in {x.buffer for x in total}]
    whole = {p.accesses[s.access].buffer for p in (second,) for s in p.body
             if isinstance(s, Store) and "c" not in axes[s.value]}  # fmt: skip
    return (
        bool(between and after)
        and all("c" not in first.store_axes(s) for s in first.body if isinstance(s, Store))
        and all(_by_row(a, first.space) for a in made)
        and all(dense(a, second.space) for a in between)
        and all(a.buffer in whole and _meets(a, total, second, third) for a in after)
        and all(a.dtype is a.dtype.compute for a in (*between, *after))
        and not {a.buffer for a in _loaded(third)} & {a.buffer for a in made}
        and not {a.buffer for a in _loaded(first)} & {a.buffer for p in (second, third) for a in _stored(p)}
    )


def _meets(read: Access, total: Sequence[Access], second: KernelPlan, third: KernelPlan) -> bool:
    """What is read for a row is what was written for its group: once for each of its rows, or once."""
    wrote = next(a for a in total if a.buffer == read.buffer)
    if _by_row(read, third.space) and dense(wrote, second.space):
        return True
    groups, axis = ONE, 0
    while axis < len(third.space) - 1 and groups != second.rows:
        groups, axis = groups * third.space[axis], axis + 1
    behind = all(stride == ZERO for stride in read.strides[axis:])
    front = replace(read, strides=read.strides[:axis], windows=())
    alike = groups == second.rows and behind and dense(front, third.space[:axis])
    return alike and _by_row(wrote, second.space)


def _summing(*plans: KernelPlan) -> bool:
    return all(any(isinstance(s, Reduce) for s in p.body) for p in plans)


def _stored(plan: KernelPlan) -> list[Access]:
    return [plan.accesses[s.access] for s in plan.body if isinstance(s, Store)]


def _loaded(plan: KernelPlan) -> list[Access]:
    found = (plan.accesses[s.access] for s in plan.body if isinstance(s, Load))
    return [a for a in found if a.buffer != INDEX]


def _by_row(access: Access, space: tuple[Dim, ...]) -> bool:
    """Element number = linear row."""
    rows = replace(access, strides=access.strides[:-1], windows=())
    return access.strides[-1] == ZERO and dense(rows, space[:-1])


def _outside(
    parts: tuple[KernelPlan, ...], inner: frozenset[str]
) -> tuple[tuple[Access, ...], tuple[Stmt, ...]]:
    """What the kernel touches in memory, in a space of the last part's rank, and its stores."""
    accesses: list[Access] = []
    stores: list[Stmt] = []
    rank = max(len(p.space) for p in parts)
    for part in parts:
        written = {s.access for s in part.body if isinstance(s, Store)}
        for at, access in enumerate(part.accesses):
            if access.buffer in inner:
                continue
            lead = (ZERO,) * (rank - len(access.strides))
            accesses.append(replace(access, strides=(*lead, *access.strides)))
            if at in written:
                stores.append(Store(len(accesses) - 1, ""))
    return tuple(accesses), tuple(stores)


def renamed(plan: KernelPlan, prefix: str) -> KernelPlan:
    """The plan with a prefix before the names of its values."""

    def new(s: Stmt) -> Stmt:
        if isinstance(s, Store):
            return replace(s, value=prefix + s.value)
        if isinstance(s, Load):
            return replace(s, name=prefix + s.name, row=prefix + s.row if s.row else "")
        if isinstance(s, Compute):
            return replace(s, name=prefix + s.name, args=tuple(prefix + a for a in s.args))
        if isinstance(s, Reduce):
            return replace(s, name=prefix + s.name, arg=prefix + s.arg)
        raise TypeError(f"{type(s).__name__} in rows")

    return replace(plan, name=prefix, body=tuple(map(new, plan.body)))
