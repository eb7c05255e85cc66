"""Results against float64, over the battery of values, the whole declared range of sizes, and every way to
lie in memory.

A refusal with a name is a pass only where the artifact never promised an answer: sizes outside the declared
range, and layouts without a kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

from torch import Tensor

from esper_ir.diagnostics import EsperError
from gauntlet import accuracy, edges, equal, hosted, inputs, invariance, lone, meaning, medley, ranges
from gauntlet.stage import Context, Failed, Outcome, Passed, Recipe, Sweep
from gauntlet.subject import Subject

LAYOUT_REFUSALS = ("E0812", "E0821")
RANGE_REFUSALS = ("E0813", "E0810")
OUTSIDE = "outside"
RESTS = 16
"""Sizes in a row that every plan and variant is tried with: every rest of a division by up to so many."""
DEEP = 1 << 17
"""Most elements of a tensor of the cases that are tried with many draws at large sizes."""
TURNS = 6
"""Draws of what lies at a place by chance: of a leaf that is one row, the hole, the zeros, the largest."""
TELLING = ("ties", "zeros", "gaps", "special", "shifted", "sunk", "below")
"""Draws that are tried with every plan and variant, also in a hurry."""


def _recipes(context: Context) -> Iterator[Recipe]:
    subject = context.subject
    base = Recipe("numerics", subject.base_dims(), seed=context.seed)
    yield base
    for draw in inputs.draws(subject, quick=context.quick):
        yield replace(base, draw=draw)
    beside = [*edges.names(subject), *(() if context.quick else edges.scaled(subject))]
    for draw in beside:
        yield replace(base, draw=draw, dims=edges.dims(subject))
    ends = [*ranges.names(subject), *lone.names(subject)]
    opposed = [*ranges.opposed(subject), *ranges.over(subject)[:: 2 if context.quick else 1]]
    for draw in (*ends, *opposed):
        yield replace(base, draw=draw)
    for dims, seed in turns(context):
        yield replace(base, dims=dims, draw="holed", seed=seed)
    ends += [] if context.quick else opposed
    for dims in subject.regions[1:]:
        for draw in TELLING if context.quick else inputs.draws(subject, quick=False):
            yield replace(base, dims=dims, draw=draw)
        for draw in (*ends, *beside) if subject.elements(dims) <= edges.ELEMENTS else ():
            yield replace(base, dims=dims, draw=draw)
    for number, (draw, dims) in enumerate(() if context.quick else medley.tried(subject, context.seed)):
        yield replace(base, dims=dims, draw=draw, seed=context.seed + number)
    for draw, dims, seed in invariance.tried(context, deep(context)):
        yield replace(base, dims=dims, draw=draw, seed=seed)
    for dims in sizes(context):
        yield replace(base, dims=dims)
    for dims in deep(context):
        for draw in (*inputs.draws(subject, quick=False), *ends):
            yield replace(base, dims=dims, draw=draw)
    odd = odd_dims(subject)
    for draw in inputs.draws(subject, quick=True):
        yield replace(base, dims=odd, draw=draw, seed=context.seed + 1)
    for layout in inputs.LAYOUTS:
        yield replace(base, layout=layout)
        if layout not in inputs.HALVED:
            yield replace(base, layout=layout, dims=odd)
    for dims in _outside(subject):
        yield replace(base, dims=dims, draw=OUTSIDE)
    large = replace(base, dims=subject.largest_dims(), draw="normal")
    yield large
    if not context.quick:
        yield replace(large, seed=context.seed + 1)
        for seed in range(2, 6):
            yield replace(base, seed=context.seed + seed)


def sizes(context: Context) -> Iterator[dict[str, int]]:
    """Every interesting size of each dim, the others as they are, and in every region `RESTS` sizes in a row;
    then all small, and a few mixtures."""
    subject = context.subject
    base = subject.base_dims()
    for name in base:
        wanted = subject.sizes(name)
        if context.quick:
            wanted = [*wanted[:6], *wanted[6::4], *wanted[-1:]]
        for size in sorted({*wanted, *_in_a_row(subject, name, context.quick)}):
            yield {**base, name: size}
    yield subject.least_dims()
    if len(base) > 1:
        yield odd_dims(subject)
        spread = {name: subject.sizes(name) for name in base}
        for turn in range(4 if context.quick else 12):
            mixed = {n: s[(7 * turn + 3 * i) % len(s)] for i, (n, s) in enumerate(spread.items()) if s}
            if subject.admits({**base, **mixed}, subject.swept):
                yield {**base, **mixed}


def deep(context: Context) -> Iterator[dict[str, int]]:
    """Each dim as large as every plan and every variant of a kernel allows, and the many cases: where a loop
    goes round, the code of its later turns sees what the first turn sees elsewhere. None in a hurry."""
    subject, base = context.subject, context.subject.base_dims()
    if context.quick or subject.heavy:
        return
    for name in base:
        admitted = [n for n in subject.sizes(name) if subject.admits({**base, name: n}, DEEP)]
        seen = set[tuple[int, str]]()
        for size in sorted((n for n in admitted if n > base[name]), reverse=True):
            dims = {**base, name: size}
            if not (here := subject.launched(dims)) <= seen:
                yield dims
                seen |= here


def turns(context: Context) -> Iterator[tuple[dict[str, int], int]]:
    """Sizes and seeds of the draws that are tried again, beside the first: a fault that four of ten of them
    show passes all in one verdict of twenty. None in a hurry."""
    subject = context.subject
    if context.quick or subject.heavy:
        return
    for dims in subject.regions:
        if subject.elements(dims) <= edges.ELEMENTS:
            for turn in range(1, TURNS):
                yield dims, context.seed + turn * inputs.PRIME


def _in_a_row(subject: Subject, name: str, quick: bool) -> Iterator[int]:
    """From the smallest size of the dim in each region on; where 16 divides that, also in steps of 16."""
    base = subject.base_dims()
    starts = [1, *(dims[name] for dims in subject.regions[1:] if {**base, name: dims[name]} == dims)]
    rows = [
        (at, start, step) for at, start in enumerate(starts) for step in ((1,) if start % 16 else (1, 16))
    ]
    for at, start, step in rows:
        for size in range(start, start + step * (RESTS + 1), step)[:: 5 if quick and at else 1]:
            dims = {**base, name: size}
            if subject.nearest(name, size) == size and subject.admits(dims, subject.swept):
                yield size


def odd_dims(subject: Subject) -> dict[str, int]:
    """Sizes that no tile divides, where the range has such."""
    return {name: subject.nearest(name, min(37, size | 1)) for name, size in subject.base_dims().items()}


def _outside(subject: Subject) -> Iterator[dict[str, int]]:
    """Just outside the declared range of each dim."""
    base = subject.base_dims()
    for dim in subject.launch.interface.dims:
        beyond = [
            dim.min - dim.multiple_of,
            dim.max + dim.multiple_of,
            *([dim.min + 1] if dim.multiple_of > 1 else []),
        ]
        for size in beyond:
            dims = {**base, dim.name: size}
            if size >= 0 and subject.elements(dims) <= 1 << 24:
                yield dims


def _check(context: Context, recipe: Recipe) -> Outcome:
    subject = context.subject
    values, meant = inputs.case(subject, recipe)
    if recipe.draw == OUTSIDE:
        return _refused(context, values)
    if recipe.draw.startswith(equal.DRAW):
        return _of_equal_rows(context, recipe, values, meant)
    here = hosted.device(subject, recipe.dims)
    exact = meaning.outputs(subject, meant, "float64")
    try:
        with context.launching():
            plain = subject.infer(values)
            trained = subject.forward(values)[0] if subject.launch.interface.differentiable else plain
    except EsperError as error:
        if recipe.layout != "dense" and error.code in LAYOUT_REFUSALS:
            return Passed()
        raise
    home = hosted.fetched([*plain, *trained], here)
    plain, trained = home[: len(exact)], home[len(exact) :]

    def eager() -> dict[str, Tensor]:
        found = hosted.fetched(meaning.outputs(subject, values, "declared"), here)
        return named(dict(zip(subject.blueprint.outputs, found, strict=True)))

    def named(found: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {n + phase: t for phase in ("", " (training)") for n, t in found.items()}

    def flat() -> dict[str, Tensor]:
        found = meaning.outputs(subject, meant, "float64", flat=True)
        return named(dict(zip(subject.blueprint.outputs, found, strict=True)))

    forms = (flat, lambda: named(meaning.by_bodies(subject, meant)))
    others = accuracy.Others(
        lambda turn: named(meaning.rounded(subject, meant, None, turn)),
        forms,
        lambda: named(meaning.flushed(subject, meant, None)),
        lambda: accuracy.numbers_of(subject, recipe, values),
    )
    rows = [
        (name + phase, got, wanted)
        for found, phase in ((plain, ""), (trained, " (training)"))
        for name, got, wanted in zip(subject.blueprint.outputs, found, exact, strict=True)
    ]
    return accuracy.beside_eager(subject, recipe, rows, eager, others, accuracy.Seen())


def _of_equal_rows(
    context: Context, recipe: Recipe, values: Mapping[str, Tensor], meant: Mapping[str, Tensor]
) -> Outcome:
    subject, here = context.subject, hosted.device(context.subject, recipe.dims)
    with context.launching():
        found = [(n, t) for n, t in zip(subject.blueprint.outputs, subject.infer(values), strict=True)]
        if subject.launch.interface.differentiable:
            trained = subject.forward(values)[0]
            found += [(f"{n} (training)", t) for n, t in zip(subject.blueprint.outputs, trained, strict=True)]
    home = hosted.fetched([t for _, t in found], here)

    def exact() -> dict[str, Tensor]:
        return dict(zip(subject.blueprint.outputs, meaning.outputs(subject, meant, "float64"), strict=True))

    rows = [(label, t) for (label, _), t in zip(found, home, strict=True)]
    nearby = partial(meaning.rounded, subject, meant, None)
    return invariance.judged(recipe, invariance.of_rows(subject, recipe, rows, exact, nearby))


def _refused(context: Context, values: Mapping[str, Tensor]) -> Outcome:
    try:
        with context.launching():
            context.subject.infer(values)
    except EsperError as error:
        if error.code in RANGE_REFUSALS:
            return Passed()
        return Failed(f"sizes outside the declared range: {error.code} instead of E0813")
    return Failed("sizes outside the declared range are accepted")


STAGE = Sweep("numerics", 30, _recipes, _check)
