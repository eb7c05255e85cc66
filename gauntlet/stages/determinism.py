"""The same values give the same bits: again, with other things in memory, with work between, on other thread
counts."""

from __future__ import annotations

import contextlib
import ctypes
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from esper_ir import oracle
from gauntlet import arena, inputs
from gauntlet.stage import Context, Failed, Outcome, Passed, Recipe, Sweep
from gauntlet.subject import Subject
from library.launch import evaluate

REPEATS = 4
THREADS, MANY_THREADS = (1, 2, 3, 4), 9
"""The last at the usual sizes alone: more than a kernel would have set room aside for by the core counts of
small machines."""
RACE_CALLS, RACE_SECONDS, QUICK_RACE_SECONDS = 400, 0.6, 0.2
"""Two threads meet only now and then: calls per thread count, and the processor seconds after which it is
enough."""
RACE_ELEMENTS = 1 << 16
NEAR = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 0.03, torch.float16: 4e-3}
ALIGNED = 512
"""Bytes: where torch's allocator on a card begins every tensor."""
DIRT = 24
STORM_US = 30
POISONS = 250
_libc = ctypes.CDLL(None)
_libc.signal.restype = ctypes.c_void_p


def _recipes(context: Context) -> Iterator[Recipe]:
    subject = context.subject
    # On a card they were run before: nothing has to be loaded or planned for others.
    hurried = context.quick and subject.device.type == "cpu"
    large = subject.largest_dims()
    base = Recipe("determinism", subject.base_dims(), cotangent="normal", seed=context.seed, repeat=REPEATS)
    for dims in (*subject.regions[1:], base.dims, _reduced(subject, large) if hurried else large):
        yield replace(base, dims=dims)
    if subject.device.type == "cpu":
        for dims in (base.dims, _reduced(subject, large)):
            for threads in (*THREADS, MANY_THREADS) if dims == base.dims else THREADS:
                yield replace(base, dims=dims, threads=threads, repeat=RACE_CALLS)


def _reduced(subject: Subject, dims: dict[str, int]) -> dict[str, int]:
    """The largest sizes, made smaller until the largest tensor is: threads meet more often in many calls over
    memory that stays in the cache than in a few over memory that does not."""
    while subject.elements(dims) > RACE_ELEMENTS:
        smaller = {n: max(subject.least_dims()[n], subject.nearest(n, size // 2)) for n, size in dims.items()}
        if smaller == dims:
            break
        dims = smaller
    return dims


def _check(context: Context, recipe: Recipe) -> Outcome:
    before = torch.get_num_threads()
    try:
        return _repeated(context, recipe)
    finally:
        torch.set_num_threads(before)


def _repeated(context: Context, recipe: Recipe) -> Outcome:
    calls = _Calls(context, recipe)
    alike = arena.same_bits if context.subject.deterministic else near
    again, first = 0, [t.clone() for t in calls.run(recipe.seed)]
    if recipe.threads:
        torch.set_num_threads(recipe.threads)
    began, enough = time.process_time(), QUICK_RACE_SECONDS if context.quick else RACE_SECONDS
    enough *= max(1.0, len(calls.plans) / 3)
    for again in range(1, recipe.repeat):
        if again > REPEATS and time.process_time() - began > enough:
            break
        if again <= REPEATS:
            _dirty(context.subject.device, recipe.seed + again)
        found = calls.run(recipe.seed + again)
        if arena.all_same(list(zip(first, found, strict=True))):
            continue
        wrong = [at for at, (a, b) in enumerate(zip(first, found, strict=True)) if not alike(a, b)]
        if wrong:
            share = int((arena.bits(first[wrong[0]]) != arena.bits(found[wrong[0]])).sum())
            return Failed(f"repeat {again} gives other bits in result {wrong[0]} ({share} bytes) at {recipe}")
    return Passed({"repeats": again, "bits_promised": int(context.subject.deterministic)})


def near(a: Tensor, b: Tensor) -> bool:
    """Of library calls whose bits may vary: no element is off by more than another order of sums explains,
    as a share of the largest one."""
    if arena.same_bits(a, b):
        return True
    if not a.is_floating_point():
        return torch.equal(a, b)
    if not torch.equal(oracle.classes(a), oracle.classes(b)):
        return False
    wide, other = (torch.where(torch.isfinite(t), t.double(), 0.0) for t in (a, b))
    top = float(torch.maximum(wide.abs(), other.abs()).max()) if wide.numel() else 0.0
    return bool(((wide - other).abs() <= NEAR[a.dtype] * top).all())


class _Calls:
    """A call without gradients, a forward and every backward plan, in memory that holds random bytes before
    each: what a thread leaves out must not be found there from the call before."""

    def __init__(self, context: Context, recipe: Recipe) -> None:
        subject = self.subject = context.subject
        self.context, self.recipe = context, recipe
        self.dims = subject.dims_tuple(recipe.dims)
        values = inputs.values(subject, recipe)
        self.flowing = inputs.cotangents(subject, recipe)
        self.ordered = [values[s.name] for s in subject.launch.interface.inputs]
        phases = ("inference", *(("forward",) if subject.launch.interface.differentiable else ()))
        self.plans = [subject.program.plan_for(phase, self.dims) for phase in phases]
        self.plans += subject.plans("backward", recipe.dims)
        self.memory, self.whole = self._buffers()

    def _buffers(self) -> tuple[list[dict[int, Tensor]], Tensor]:
        """Memory by buffer for every plan, and the one block that all of it lies in: random bytes for a
        whole run are then one copy."""
        places: list[tuple[int, int, int, tuple[int, ...], torch.dtype]] = []
        end = 0
        for at, plan in enumerate(self.plans):
            for number, buffer in enumerate(plan.buffers):
                if buffer.source not in ("input", "saved", "cotangent"):
                    shape = tuple(evaluate(s, self.recipe.dims) for s in buffer.shape)
                    dtype = getattr(torch, buffer.dtype)
                    places.append((at, number, end, shape, dtype))
                    end += -(-prod(shape) * dtype.itemsize // ALIGNED) * ALIGNED
        whole = torch.empty(end + ALIGNED, dtype=torch.uint8, device=self.subject.device)
        whole = whole[-whole.data_ptr() % ALIGNED :][:end]
        memory: list[dict[int, Tensor]] = [{} for _ in self.plans]
        for at, number, start, shape, dtype in places:
            part = whole[start : start + prod(shape) * dtype.itemsize]
            memory[at][number] = part.view(dtype).reshape(shape)
        return memory, whole

    def run(self, seed: int) -> list[Tensor]:
        """Outputs, outputs again, gradients of each plan; they are overwritten by the next run."""
        out: list[Tensor] = []
        feeds: list[Tensor | None] = list(self.ordered)
        self.whole.fill_(seed * 2654435761 % POISONS + 1)
        with self.context.launching(len(self.plans)), storm(self.recipe.threads > 1, seed % 2 == 1):
            for plan, memory in zip(self.plans, self.memory, strict=True):
                found = self.subject.program.run(plan, feeds, memory, self.dims)
                count = len(plan.outputs) if plan.phase != "backward" else len(found)
                out += found[:count]
                if plan.phase == "forward":
                    feeds = [*found[count:], *self.flowing]
        return out


@contextlib.contextmanager
def storm(wanted: bool, others: bool = False) -> Iterator[None]:
    """Interrupts the calling thread (or one of the `others`) every few microseconds and makes it give up its
    processor: threads that share what they should not then meet in the middle of things even on a busy
    machine. The handler is libc's sched_yield itself.
    """
    if not wanted:
        yield
        return
    if others:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    before = _libc.signal(signal.SIGALRM, ctypes.cast(_libc.sched_yield, ctypes.c_void_p))
    try:
        _libc.setitimer(0, (ctypes.c_long * 4)(0, STORM_US, 0, STORM_US), None)
        yield
    finally:
        _libc.setitimer(0, (ctypes.c_long * 4)(0, 0, 0, 0), None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
        _libc.signal(signal.SIGALRM, ctypes.c_void_p(before))


def _dirty(device: torch.device, seed: int) -> None:
    """Leaves random bytes in the allocator's free blocks of many sizes, and does other work on the device."""
    pool = arena.random_bytes(64 << 16, seed, device)
    blocks = [pool[64 * i : 64 * i + (64 << (i % 16))].clone() for i in range(DIRT)]
    noise = torch.randn(64, 64, device=device)
    for _ in range(4):
        noise = noise @ noise.softmax(-1)
    del blocks


STAGE = Sweep("determinism", 60, _recipes, _check)
