"""The same values give the same bits: again, with other things in memory, with work between, on other thread counts."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from gauntlet import arena, inputs
from gauntlet.stage import Context, Failed, Outcome, Passed, Recipe, Skipped, Sweep

REPEATS = 4
THREADS = (1, 2, 3, 4)
RACE_CALLS, RACE_SECONDS = 40, 0.25
"""Two threads meet only now and then: calls per thread count, and the time after which it is enough."""
DIRT = 24


def _recipes(context: Context) -> Iterator[Recipe]:
    subject = context.subject
    large = subject.largest_dims()
    for dims in (subject.base_dims(), _reduced(context, large)):
        yield Recipe("determinism", dims, cotangent="normal", seed=context.seed, repeat=REPEATS)
        if subject.device.type == "cpu":
            for threads in THREADS:
                yield Recipe("determinism", dims, cotangent="normal", seed=context.seed, threads=threads, repeat=RACE_CALLS)


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
        values = inputs.values(subject, recipe)
        flowing = inputs.cotangents(subject, recipe)
        again, first = 0, _results(context, recipe, values, flowing)
        if recipe.threads:
            torch.set_num_threads(recipe.threads)
        began = time.monotonic()
        for again in range(1, recipe.repeat):
            if again > REPEATS and time.monotonic() - began > RACE_SECONDS:
                break
            if again <= REPEATS:
                _dirty(subject.device, recipe.seed + again)
            found = _results(context, recipe, values, flowing)
            for at, (a, b) in enumerate(zip(first, found, strict=True)):
                if not arena.same_bits(a, b):
                    share = int((arena.bits(a) != arena.bits(b)).sum())
                    return Failed(f"repeat {again} gives other bits in result {at} ({share} bytes)")
    finally:
        torch.set_num_threads(before)
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


def _dirty(device: torch.device, seed: int) -> None:
    """Leaves random bytes in the allocator's free blocks of many sizes, and does other work on the device."""
    blocks = [arena.random_bytes(64 << (i % 16), seed + i, device).clone() for i in range(DIRT)]
    noise = torch.randn(64, 64, device=device)
    for _ in range(4):
        noise = noise @ noise.softmax(-1)
    del blocks


STAGE = Sweep("determinism", 60, _recipes, _check)
