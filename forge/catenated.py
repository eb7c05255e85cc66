"""Sums down the columns that a tensor is put together from: written where they lie in it, not copied."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from esper_ir.types import Dim
from forge.groups import Group
from forge.lowered import Call, Launch, Lowered
from forge.plan import Access, KernelPlan, Store, SumTile
from forge.views import ONE, ZERO

Done = tuple[Group, Lowered]


@dataclass(frozen=True)
class Place:
    """Element c of a vector is element start + c x step of `buffer`."""

    buffer: str
    step: Dim
    start: Dim


def catenated(done: Sequence[Done], seen: Set[str]) -> list[Done]:
    """The groups without the calls that join nothing but such sums; values in `seen` are read outside."""
    out = list(done)
    for at, (_, low) in enumerate(done):
        call = low.steps[0] if len(low.steps) == 1 else None
        if not isinstance(call, Call) or call.op != "cat":
            continue
        places = _places(call)
        if places and not places.keys() & seen and all(_vector(out, b) for b in places):
            others = [(g, _moved(made, places)) for i, (g, made) in enumerate(out) if i != at]
            return catenated(others, seen)
    return out


def _places(call: Call) -> dict[str, Place]:
    """Where each operand is in the result; none unless all are vectors along one axis, or one run of it."""
    out, start = dict[str, Place](), ZERO
    dim, whole = int(call.attrs["dim"]), call.outs[0].shape
    inner = _product(whole[dim + 1 :])
    for operand in call.inputs:
        size = operand.shape[dim]
        run = all(n == ONE for n in operand.shape[:dim])
        spread = size == ONE and inner == ONE
        place = Place(call.outs[0].value, ONE if run else whole[dim], start * inner)
        plain = not operand.permute or operand.permute == tuple(range(len(operand.shape)))
        known = place.step.static is not None and place.start.static is not None
        if not (plain and known and (run or spread)) or operand.value in out:
            return {}
        out[operand.value] = place
        start = start + size
    return out


def _product(sizes: Sequence[Dim]) -> Dim:
    total = ONE
    for size in sizes:
        total = total * size
    return total


def _vector(done: Sequence[Done], buffer: str) -> bool:
    """Whether one second stage makes it, column by column, and nothing but the call reads it."""
    users = [step for _, low in done for step in low.steps if buffer in _names(step)]
    makers = [s for s in users if isinstance(s, Launch) and isinstance(s.plan.tile, SumTile)]
    if len(users) != 2 or len(makers) != 1:
        return False
    stores = list(_stores(makers[0].plan, buffer))
    return len(stores) == 1 and stores[0].strides == (ZERO, ONE) and stores[0].offset == ZERO


def _names(step: Launch | Call) -> Iterator[str]:
    if isinstance(step, Launch):
        yield from step.plan.buffers
    else:
        yield from (o.value for o in (*step.inputs, *step.outs))


def _stores(plan: KernelPlan, buffer: str) -> Iterator[Access]:
    for s in plan.body:
        if isinstance(s, Store) and plan.accesses[s.access].buffer == buffer:
            yield plan.accesses[s.access]


def _moved(low: Lowered, places: Mapping[str, Place]) -> Lowered:
    steps = tuple(_moved_launch(s, places) if isinstance(s, Launch) else s for s in low.steps)
    return replace(low, steps=steps)


def _moved_launch(step: Launch, places: Mapping[str, Place]) -> Launch:
    plan = replace(step.plan, accesses=tuple(_moved_access(a, places) for a in step.plan.accesses))
    return step if plan == step.plan else replace(step, plan=plan)


def _moved_access(a: Access, places: Mapping[str, Place]) -> Access:
    place = places.get(a.buffer)
    if place is None:
        return a
    return replace(a, buffer=place.buffer, strides=(ZERO, place.step), offset=place.start)
