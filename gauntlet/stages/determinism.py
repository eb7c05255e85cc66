"""The same values give the same bits: again, with other things in memory, with work between, on other thread
counts."""

from __future__ import annotations

import contextlib
import ctypes
import signal
import time
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from gauntlet import arena, inputs
from gauntlet.stage import Context, Failed, Outcome, Passed, Recipe, Skipped, Sweep

REPEATS = 4
THREADS = (1, 2, 3, 4)
RACE_CALLS, RACE_SECONDS, QUICK_RACE_SECONDS = 200, 0.6, 0.2
"""Two threads meet only now and then: calls per thread count, and the time after which it is enough."""
DIRT = 24
STORM_US = 30
_libc = ctypes.CDLL(None)
_libc.signal.restype = ctypes.c_void_p


def _recipes(context: Context) -> Iterator[Recipe]:
    subject = context.subject
    large = subject.largest_dims()
    for dims in (subject.base_dims(), _reduced(context, large)):
        yield Recipe("determinism", dims, cotangent="normal", seed=context.seed, repeat=REPEATS)
        if subject.device.type == "cpu":
            for threads in THREADS:
                yield Recipe(
                    "determinism",
                    dims,
                    cotangent="normal",
                    seed=context.seed,
                    threads=threads,
                    repeat=RACE_CALLS,
                )


def _reduced(context: Context, dims: dict[str, int]) -> dict[str, int]:
    """The largest sizes, or a sixteenth of the elements when in a hurry."""
    subject = context.subject
    while context.quick and subject.elements(dims) > 1 << 17:
        smaller = {n: max(subject.least_dims()[n], subject.nearest(n, size // 2)) for n, size in dims.items()}
        if smaller == dims:
            break
        dims = smaller
    return dims


def _check(context: Context, recipe: Recipe) -> Outcome:
    subject = context.subject
    if not subject.deterministic:
        return Skipped("declared library-nondeterministic")
    before = torch.get_num_threads()
    try:
        return _repeated(context, recipe)
    finally:
        torch.set_num_threads(before)


def _repeated(context: Context, recipe: Recipe) -> Outcome:
    subject = context.subject
    values, flowing = inputs.values(subject, recipe), inputs.cotangents(subject, recipe)
    again, first = 0, _results(context, recipe, values, flowing)
    if recipe.threads:
        torch.set_num_threads(recipe.threads)
    began, enough = time.monotonic(), QUICK_RACE_SECONDS if context.quick else RACE_SECONDS
    for again in range(1, recipe.repeat):
        if again > REPEATS and time.monotonic() - began > enough:
            break
        if again <= REPEATS:
            _dirty(subject.device, recipe.seed + again)
        with storm(recipe.threads > 1):
            found = _results(context, recipe, values, flowing)
        wrong = [at for at, (a, b) in enumerate(zip(first, found, strict=True)) if not arena.same_bits(a, b)]
        if wrong:
            share = int((arena.bits(first[wrong[0]]) != arena.bits(found[wrong[0]])).sum())
            return Failed(f"repeat {again} gives other bits in result {wrong[0]} ({share} bytes)")
    return Passed({"repeats": again})


def _results(
    context: Context, recipe: Recipe, values: Mapping[str, Tensor], flowing: Sequence[Tensor | None]
) -> list[Tensor]:
    subject = context.subject
    wanted = subject.launch.interface.differentiable
    with context.launching():
        out = subject.infer(values)
        if wanted:
            forward, saved = subject.forward(values)
            out += [*forward, *subject.backward(saved, flowing, recipe.dims, wanted).values()]
    return out


@contextlib.contextmanager
def storm(wanted: bool) -> Iterator[None]:
    """Interrupts the calling thread every few microseconds and makes it give up its processor: threads that
    share what they should not then meet in the middle of things even on a busy machine. The handler is libc's
    sched_yield itself.
    """
    if not wanted:
        yield
        return
    before = _libc.signal(signal.SIGALRM, ctypes.cast(_libc.sched_yield, ctypes.c_void_p))
    try:
        _libc.setitimer(0, (ctypes.c_long * 4)(0, STORM_US, 0, STORM_US), None)
        yield
    finally:
        _libc.setitimer(0, (ctypes.c_long * 4)(0, 0, 0, 0), None)
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
