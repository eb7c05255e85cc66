"""Memory that is used again within one plan.

A kernel on a processor writes its result over an operand that nothing reads afterwards: a cache reads a line
of memory before it writes to it, so that a result in a place of its own costs its bytes twice, and pages that
were never touched cost more than that. What is done in chunks of rows has the memory of one chunk."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from math import lcm, prod

from esper_ir.types import Dim
from forge.groups import chunk_of
from forge.plan import Access, KernelPlan, Load, PointTile, Reduce, RowTile, Store
from forge.views import ONE
from library.launch import Argument, Bound, ExternStep, KernelStep, Plan, Size, View, evaluate

Step = KernelStep | ExternStep


def in_place(plan: Plan, kernels: Sequence[KernelPlan | None], chunks: bool = False) -> Plan:
    """The plan with fewer buffers. `kernels`: what each step runs, None for a library call; `chunks`: only
    what is done in chunks."""
    for at, kernel in enumerate(kernels):
        while kernel is not None and (pair := _pair(plan, at, kernel, chunks)):
            plan = _merged(plan, *pair)
    return plan


def in_turn(plan: Plan) -> Plan:
    """The plan in which what one chunk (`forge/passes/chunks.py`) leaves behind is memory for a later one."""
    while True:
        first, last = dict[int, int](), dict[int, int]()
        for at, step in enumerate(plan.steps):
            for number in _used(step):
                first.setdefault(number, at)
                last[number] = at
        pairs = ((a, b) for b in first for a in first if last[a] < first[b] and _of_chunks(plan, a, b))
        pair = next(pairs, None)
        if pair is None:
            return plan
        plan = _merged(plan, *pair)


def _of_chunks(plan: Plan, one: int, other: int) -> bool:
    """Whether the memory of `other`, of a later chunk, can be that of `one` before."""
    a, b = plan.buffers[one], plan.buffers[other]
    temps = a.source == b.source == "temp" and a.dtype == b.dtype
    return temps and bool(chunk_of(a.name) and chunk_of(b.name)) and _as_large(a.shape, b.shape, plan.bucket)


@cache
def _as_large(one: tuple[Size, ...], other: tuple[Size, ...], bucket: tuple[Bound, ...]) -> bool:
    """Whether there are never fewer elements in the second shape. Of one size each that varies, both are
    linear but for a period, that of their floors: what holds for a period at either end of the range holds
    between."""
    if one == other:
        return True
    if len(bucket) != 1 or any(sum(not isinstance(s, int) for s in shape) > 1 for shape in (one, other)):
        return False
    name, low, high = bucket[0].dim, bucket[0].low, bucket[0].high
    period = lcm(*_divisors((one, other)))
    ends = {*range(low, min(low + period, high + 1)), *range(max(high - period, low), high + 1)}
    return all(prod(evaluate(s, {name: n}) for s in one) <= prod(evaluate(s, {name: n}) for s in other)
               for n in ends)  # fmt: skip


def _divisors(size: object) -> Iterator[int]:
    """Of the floors in sizes."""
    if isinstance(size, tuple):
        if size and size[0] == "floordiv":
            yield int(size[2])
        for part in size:
            yield from _divisors(part)


def _pair(plan: Plan, at: int, kernel: KernelPlan, chunks: bool) -> tuple[int, int] | None:
    """(operand, result): buffers of one shape and type, of which this step is the last to read the one and
    the first to name the other, element by element in the same order."""
    step = plan.steps[at]
    if not isinstance(step, KernelStep) or not isinstance(kernel.tile, (PointTile, RowTile)):
        return None
    if kernel.cols == ONE and any(isinstance(s, Reduce) for s in kernel.body):
        return None  # what a row gives is stored at once, and its elements may be loaded again
    if any(isinstance(s, Reduce) and s.combine == "squares" for s in kernel.body):
        return None  # all rows are loaded again when their sums are known
    number = dict(zip(kernel.buffers, _used(step), strict=True))
    earlier = {n for s in plan.steps[:at] for n in _used(s)}
    later = {n for s in plan.steps[at + 1 :] for n in _used(s)} | {
        *plan.outputs,
        *plan.saved,
        *plan.gradients,
    }
    stores = {s.access for s in kernel.body if isinstance(s, Store)}
    for result in sorted(stores):
        made = number[kernel.accesses[result].buffer]
        if made in earlier or not _alone(kernel, result):
            continue
        for operand in sorted({s.access for s in kernel.body if isinstance(s, Load)}):
            read = number.get(kernel.accesses[operand].buffer, made)
            own = read in earlier and read not in later and plan.buffers[read].source == "temp"
            own = own and (not chunks or bool(chunk_of(plan.buffers[read].name)))
            if own and _same(plan, read, made) and _beside(kernel, operand, result):
                return read, made
    return None


def _alone(kernel: KernelPlan, result: int) -> bool:
    """The buffer is written once, every element of it, and not read."""
    access = kernel.accesses[result]
    moves = all(s != Dim() for s, size in zip(access.strides, kernel.space, strict=True) if size != ONE)
    named = [a for a in kernel.accesses if a.buffer == access.buffer]
    return moves and len(named) == 1 and not (access.partial or access.windows or access.parts)


def _beside(kernel: KernelPlan, operand: int, result: int) -> bool:
    """Every access to the operand's buffer is to the element that is written, and comes before."""
    place, buffer = _place(kernel.accesses[result]), kernel.accesses[operand].buffer
    end = next(at for at, s in enumerate(kernel.body) if isinstance(s, Store) and s.access == result)
    if any(isinstance(s, Load) and kernel.accesses[s.access].buffer == buffer for s in kernel.body[end:]):
        return False
    return all(
        _place(a) == place and not (a.windows or a.table or a.partial or a.parts)
        for a in kernel.accesses
        if a.buffer == buffer
    )


def _place(access: Access) -> tuple[tuple[Dim, ...], Dim]:
    return access.strides, access.offset


def _same(plan: Plan, one: int, other: int) -> bool:
    a, b = plan.buffers[one], plan.buffers[other]
    return a.dtype == b.dtype and a.shape == b.shape and b.source in ("temp", "output", "gradient")


def _used(step: Step) -> list[int]:
    if isinstance(step, ExternStep):
        return [v.buffer for v in (*step.inputs, *step.outs)]
    return [a.value for a in step.args if a.kind == "buffer" and isinstance(a.value, int)]


def _merged(plan: Plan, operand: int, result: int) -> Plan:
    """The plan without the operand's buffer: what made it writes where the result will be."""
    names = {n: n - (n > operand) for n in range(len(plan.buffers))}
    names[operand] = names[result]
    kept = tuple(b for n, b in enumerate(plan.buffers) if n != operand)
    return replace(
        plan, buffers=kept, steps=tuple(_renamed(s, names) for s in plan.steps),
        outputs=_numbers(plan.outputs, names), saved=_numbers(plan.saved, names),
        gradients=_numbers(plan.gradients, names),
    )  # fmt: skip


def _numbers(numbers: Iterable[int], names: Mapping[int, int]) -> tuple[int, ...]:
    return tuple(names[n] for n in numbers)


def _renamed(step: Step, names: Mapping[int, int]) -> Step:
    if isinstance(step, ExternStep):
        return replace(step, inputs=_views(step.inputs, names), outs=_views(step.outs, names))
    args = tuple(
        Argument("buffer", names[a.value]) if a.kind == "buffer" and isinstance(a.value, int) else a
        for a in step.args
    )
    variants = tuple(
        replace(v, guard=replace(v.guard, aligned=_numbers(v.guard.aligned, names))) for v in step.variants
    )
    return replace(step, args=args, variants=variants)


def _views(views: Iterable[View], names: Mapping[int, int]) -> tuple[View, ...]:
    return tuple(replace(v, buffer=names[v.buffer]) for v in views)
