"""Every byte around, before and after: fences on both sides of every buffer, inputs left alone, results
written in full, nothing taken from memory that the kernels did not write, and no growth over a thousand
calls.

A call also leaves the processor's arithmetic as it was, and on the CPU no thread that goes on computing.

Each plan runs with every buffer fenced and poisoned, twice with other poison: an element that was not
written, a workspace read before it was written, and a read beyond a buffer all make the two runs differ. On
the CPU it runs twice more with untouchable pages after, and before, every buffer, and inputs in pages
that can only be read.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from esper_ir.diagnostics import EsperError
from gauntlet import arena, inputs
from gauntlet.stage import Context, Failed, Outcome, Passed, Recipe, Sweep
from gauntlet.stages.determinism import near
from gauntlet.subject import Subject
from library.launch import Plan, evaluate

CALLS, QUICK_CALLS = 1000, 100
LEAST_CALLS, QUARTERS, GROWTH_BYTES = 20, 4, 128 << 10
"""Growth is steady when each quarter after the first adds more: an allocator settles, a leak does not."""
ROTATION = 3
TOGETHER = 16
"""Calls whose results are compared at once: a card is waited for once."""


NAPS, NAP_SECONDS = 20, 0.05


def _arithmetic() -> list[float]:
    """What this thread's processor makes of a few sums and products: other than at first where its rounding
    mode was changed, or subnormal numbers are taken for zero. The later numbers of a caller depend on it."""
    bit, least = 2.0**-53, sys.float_info.min
    return [1.0 + bit, -1.0 - bit, 1.0 + 1.5 * bit, least * 0.5, least * (2.0 * bit) * 2.0**60]


ARITHMETIC = _arithmetic()
"""Before any candidate code ran."""


def _recipes(context: Context) -> Iterator[Recipe]:
    subject = context.subject
    sizes = [subject.base_dims(), subject.least_dims()]
    names = [d.name for d in subject.launch.interface.dims]
    for name in names:
        odd = [n for n in subject.sizes(name) if n % 2][-4:]
        sizes += [{**subject.base_dims(), name: n} for n in (odd[:1] if context.quick else odd)]
    layouts = ["zones", "shifted", *(["pages-end", "pages-start"] if subject.device.type == "cpu" else [])]
    sizes += subject.regions[1:]
    seen: list[dict[str, int]] = []
    for dims in sizes:
        if dims in seen or not subject.admits(dims):
            continue
        seed = context.seed + len(seen)  # other weights too: what is written over one may be what it was
        seen.append(dims)
        for layout in layouts:
            yield Recipe("memory", dims, "normal", layout, "normal", seed=seed)
    calls = QUICK_CALLS if context.quick else CALLS
    yield Recipe("memory", subject.base_dims(), "normal", "growth", "normal", seed=context.seed, repeat=calls)


def _check(context: Context, recipe: Recipe) -> Outcome:
    return _growth(context, recipe) if recipe.layout == "growth" else _fenced(context, recipe)


@dataclass
class _Run:
    """One plan in fenced memory."""

    arena: arena.Zones | arena.Pages
    feeds: list[Tensor | None]
    given: dict[int, Tensor]
    before: Sequence[Tensor | None]
    found: list[Tensor] = field(default_factory=list)


def _fenced(context: Context, recipe: Recipe) -> Outcome:
    subject = context.subject
    values = inputs.values(subject, recipe)
    flowing = inputs.cotangents(subject, recipe) if recipe.cotangent else []
    ordered = [values[s.name] for s in subject.launch.interface.inputs]
    saved: list[Tensor] = []
    for plan in subject.launch.plans:
        if plan not in subject.plans(plan.phase, recipe.dims):
            continue
        if plan.phase == "backward" and not saved:
            with context.launching():
                saved = subject.forward(values)[1]
        feeds: Sequence[Tensor | None] = [*saved, *flowing] if plan.phase == "backward" else ordered
        try:
            wrong = _plan(context, recipe, plan, feeds)
        except EsperError as error:
            if recipe.layout != "shifted" or error.code != "E0812":
                raise
            wrong = ""  # no kernel for such addresses, and it says so
        if wrong:
            return Failed(f"{plan.phase} plan: {wrong}")
    return Passed()


def _plan(context: Context, recipe: Recipe, plan: Plan, feeds: Sequence[Tensor | None]) -> str:
    subject, runs = context.subject, []
    for turn in range(2):
        run = _set_up(subject, recipe, plan, feeds, 7919 * (turn + 1) + recipe.seed)
        with context.launching():
            run.found = subject.program.run(plan, run.feeds, run.given, subject.dims_tuple(recipe.dims))
        if _arithmetic() != ARITHMETIC:
            return "it leaves the processor rounding in another way, or without subnormal numbers"
        if wrong := _disturbed(plan, run):
            return wrong
        runs.append(run)
    pairs = list(zip(runs[0].found, runs[1].found, strict=True))
    if arena.all_same(pairs):
        return ""
    alike = arena.same_bits if subject.deterministic else near
    for at, (first, second) in enumerate(pairs):
        if not alike(first, second):
            return f"result {at} depends on what lay in memory before: {_difference(first, second)}"
    return ""


def _set_up(subject: Subject, recipe: Recipe, plan: Plan, feeds: Sequence[Tensor | None], seed: int) -> _Run:
    device = subject.device
    fence = (
        arena.Pages(seed, recipe.layout.removeprefix("pages-"))
        if recipe.layout.startswith("pages")
        else arena.Zones(device, seed)
    )
    shifted = _from_outside(subject, plan) if recipe.layout == "shifted" else frozenset()
    placed: list[Tensor | None] = []
    for at, feed in enumerate(feeds):
        copy = None
        if feed is not None:
            copy = fence.empty(f"input {at}", tuple(feed.shape), feed.dtype, shift=int(at in shifted))
            copy.copy_(feed)
        placed.append(copy)
    fence.seal()
    given = {}
    for number, buffer in enumerate(plan.buffers):
        if buffer.source not in ("input", "saved", "cotangent"):
            shape = tuple(evaluate(s, recipe.dims) for s in buffer.shape)
            given[number] = fence.empty(buffer.name, shape, getattr(torch, buffer.dtype))
    return _Run(fence, placed, given, feeds)


def _from_outside(subject: Subject, plan: Plan) -> frozenset[int]:
    """Feeds whose address a caller chooses: inputs, cotangents, and inputs that were saved. All other memory
    comes from the allocator, aligned.
    """
    if plan.phase != "backward":
        return frozenset(range(len(subject.launch.interface.inputs)))
    forward = next(p for p in subject.launch.plans if p.phase == "forward")
    saved = {at for at, number in enumerate(forward.saved) if forward.buffers[number].source == "input"}
    count = len(forward.saved)
    return frozenset(saved | set(range(count, count + len(subject.results))))


def _disturbed(plan: Plan, run: _Run) -> str:
    feeds = [(a, b) for a, b in zip(run.feeds, run.before, strict=True) if a is not None and b is not None]
    if arena.all_same([*run.arena.sides(), *feeds]):
        return ""
    if breach := run.arena.breaches():
        return f"out of bounds: {breach}"
    for at, (now, then) in enumerate(zip(run.feeds, run.before, strict=True)):
        if now is not None and then is not None and not arena.same_bits(now, then):
            names = [
                b.name for b in plan.buffers if b.source in ("input", "saved", "cotangent") and b.index == at
            ]
            return f"input {at} ({', '.join(names)}) was overwritten: {_difference(now, then)}"
    return ""


def _difference(a: Tensor, b: Tensor) -> str:
    size = a.dtype.itemsize
    where = torch.nonzero((arena.bits(a) != arena.bits(b)).reshape(-1, size).any(1)).flatten()
    return f"{where.numel()} of {a.numel()} elements, the first at {int(where[0])}"


def _growth(context: Context, recipe: Recipe) -> Outcome:
    """Many calls through the same memory with values that change under it: every result has the bits of the
    first call with those values, and the process does not grow steadily.
    """
    subject = context.subject
    turns = [replace(recipe, seed=recipe.seed + i) for i in range(ROTATION)]
    sets = [[inputs.values(subject, t)[s.name] for s in subject.launch.interface.inputs] for t in turns]
    flows = [inputs.cotangents(subject, t) for t in turns]
    home = [t.clone() for t in sets[0]]
    expected: dict[int, list[Tensor]] = {}
    calls = min(
        recipe.repeat, max(LEAST_CALLS, int(context.budgets[0] / 2 / subject.eager_seconds(recipe.dims)))
    )
    looked = [(calls - 1) * i // QUARTERS for i in range(QUARTERS + 1)]
    marks: list[int] = []
    waiting: _Waiting = []
    wrong = ""
    with context.launching(calls):
        for call in range(calls):
            turn = call % ROTATION
            for kept, fresh in zip(home, sets[turn], strict=True):
                kept.copy_(fresh)
            found = _both(subject, home, flows[turn], recipe.dims)
            waiting.append((call, expected.setdefault(turn, found), found))
            del found
            if call in looked or len(waiting) == TOGETHER:
                wrong = wrong or _unlike(subject, waiting)
                waiting.clear()
            if call in looked:  # the last one too
                marks.append(_resident(subject))
    if wrong:
        return Failed(wrong)
    if subject.device.type == "cpu" and _restless():
        return Failed("threads that it began go on computing after its calls have ended")
    steps = [b - a for a, b in zip(marks[1:], marks[2:], strict=False)]  # the first quarter warms up
    if min(steps) > GROWTH_BYTES:
        return Failed(f"memory grows steadily: {steps} bytes in each {calls // QUARTERS} of {calls} calls")
    return Passed({"calls": calls, "grown_bytes": max(marks[-1] - marks[1], 0)})


def _restless() -> bool:
    """Whether other threads of this process compute while this one waits: those of a pool may do so for a
    while before they sleep."""
    for _ in range(NAPS):
        began, own = time.process_time(), time.thread_time()
        time.sleep(NAP_SECONDS)
        if time.process_time() - began - (time.thread_time() - own) < NAP_SECONDS / 20:
            return False
    return True


def _both(
    subject: Subject, tensors: Sequence[Tensor], flowing: Sequence[Tensor | None], dims: Mapping[str, int]
) -> list[Tensor]:
    values = {s.name: t for s, t in zip(subject.launch.interface.inputs, tensors, strict=True)}
    if not subject.launch.interface.differentiable:
        return subject.infer(values)
    outputs, saved = subject.forward(values)
    gradients = subject.backward(saved, flowing, dims, subject.launch.interface.differentiable)
    return [*outputs, *gradients.values()]


_Waiting = list[tuple[int, list[Tensor], list[Tensor]]]


def _unlike(subject: Subject, waiting: _Waiting) -> str:
    """Which of the calls gave other bits than it should have: (number of the call, expected, found)."""
    if not subject.deterministic:
        return ""
    told = [(call, at, a, b) for call, known, found in waiting
            for at, (a, b) in enumerate(zip(known, found, strict=True))]  # fmt: skip
    if arena.all_same([(a, b) for _, _, a, b in told]):
        return ""
    call, at, a, b = next(row for row in told if not arena.same_bits(row[2], row[3]))
    return f"call {call + 1} differs from the first with the same values: result {at}, {_difference(a, b)}"


def _resident(subject: Subject) -> int:
    if subject.device.type == "cuda":
        return torch.cuda.memory_allocated(subject.device)
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


STAGE = Sweep("memory", 15, _recipes, _check)
