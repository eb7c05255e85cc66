"""The same values give the same bits: again, with other things in memory, with work between, on other thread counts."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gauntlet import arena, inputs
from gauntlet.stage import Context, Failed, Outcome, Passed, Recipe, Skipped, Sweep

REPEATS = 4
THREADS = (1, 2, 3, 4)
DIRT = 24


def _recipes(context: Context) -> Iterator[Recipe]:
    subject = context.subject
    large = subject.largest_dims()
    for dims in (subject.base_dims(), _reduced(context, large)):
        yield Recipe("determinism", dims, cotangent="normal", seed=context.seed, repeat=REPEATS)
        if subject.device.type == "cpu":
            for threads in THREADS:
                yield Recipe("determinism", dims, cotangent="normal", seed=context.seed, threads=threads, repeat=2)


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
        first = _results(context, recipe)
        if recipe.threads:
            torch.set_num_threads(recipe.threads)
        for again in range(1, recipe.repeat):
            _dirty(subject.device, recipe.seed + again)
            found = _results(context, recipe)
            for at, (a, b) in enumerate(zip(first, found, strict=True)):
                if not arena.same_bits(a, b):
                    share = int((arena.bits(a) != arena.bits(b)).sum())
                    return Failed(f"repeat {again} gives other bits in result {at} ({share} bytes)")
    finally:
        torch.set_num_threads(before)
    return Passed({"repeats": recipe.repeat})


def _results(context: Context, recipe: Recipe) -> list[Tensor]:
    subject = context.subject
    values = inputs.values(subject, recipe)
    wanted = subject.launch.interface.differentiable
    with context.launching():
        out = subject.infer(values)
        if wanted:
            forward, saved = subject.forward(values)
            flowing = inputs.cotangents(subject, recipe)
            out += [*forward, *subject.backward(saved, flowing, recipe.dims, wanted).values()]
    return [t.clone() for t in out]


def _dirty(device: torch.device, seed: int) -> None:
    """Leaves random bytes in the allocator's free blocks of many sizes, and does other work on the device."""
    blocks = [arena.random_bytes(64 << (i % 16), seed + i, device).clone() for i in range(DIRT)]
    noise = torch.randn(64, 64, device=device)
    for _ in range(4):
        noise = noise @ noise.softmax(-1)
    del blocks


STAGE = Sweep("determinism", 60, _recipes, _check)
