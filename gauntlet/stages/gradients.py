"""Every gradient against float64 autograd of the reference, through the same path that training takes.

gradients asked for     all, each alone, all but one
cotangents              random, ones and rows with stride 0, alike in parts, one-hot, zeros, runs of zeros,
                        transposed, absent
medleys                 each leaf and cotangent drawn in a way of its own, at one to three rows
equal rows              the same, all rows alike: so is what has a row for each, and each row's share of sums
heavy sums              leaves and cotangents of one sign, exact, with rows that one element outweighs, or
                        rows that sum to zero
ends                    infinities, small, huge and subnormal numbers, far exponents, in one tensor at a time
directional             <gradient, d> against <cotangent, (f(v+hd) - f(v-hd)) / 2h> in float64: no rule

Beside the cases the report gets `parameters`: how many tensors there are that a training changes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from esper_ir import oracle
from gauntlet import accuracy, edges, equal, hosted, inputs, invariance, meaning, medley, ranges
from gauntlet.kept import Kept
from gauntlet.stage import Context, Failed, Outcome, Passed, Recipe, Skipped, Sweep
from gauntlet.stages.numerics import DEEP, deep, odd_dims, sizes, turns
from gauntlet.subject import Subject

DIRECTIONAL, PARAMETERS = "directional", "parameters"
CONSTANT = ("ones", "columns", "one-hot")
"""Cotangents that are tried with every plan and variant, also in a hurry."""
MORE = ("gaps", "zeros", "shifted", "sunk", "uneven")
HEAVY = (
    *((draw, "ones") for draw in ("above", "below", "tail", "dip", "holed", inputs.REPEATED)),
    ("above", "below"),
    (inputs.BALANCED, inputs.INTEGERS),
    (inputs.BALANCED, "ones"),
)
"""(draw, cotangent): what flows back through a sum over a row (the mean of w g in a centred row) is nearly
nothing where its terms have either sign, and so is a fault of it; where they have one sign, roundings of the
sum hide it, but for terms whose sums are exact. Each sign of leaves and cotangents once, and cotangents that
are all alike. The rest of a row has its share only where its element outweighs the others, and zeros in a row
may be taken for its end. What a row is above its mean is exact where that is zero."""
LEAK = ("seesaw", "seesaw")
"""Where a row takes in a little of another, a sum over rows shows it: large leaves meet large cotangents."""
ENDS = (("normal", inputs.START), ("normal", inputs.END))
SPARSE = (("ties", "few"), ("gaps", "gaps"))
"""Leaves and cotangents with many zeros and equal values."""
AGAIN = (("holed", "ones"), ("few", "infinite"))
"""Tried with several seeds: of a leaf that is one row a draw has one hole, and numbers beside a few zeros."""
MOST_PARTS = 1 << 11
"""Rows at which the last part of a sum over them is looked at."""
KEPT, KEPT_BYTES, KEPT_ON_CARD = 96, 256 << 20, 4 << 30
"""Cases that are kept at a time, and bytes of them."""
UNDECIDED = "roundings of these scores decide which exponentials are anything at all"
_Row = tuple[str, Tensor, Tensor]
STEP = 1e-6
SLACK = 16.0
"""Times the deviation that eager's own gradient shows, plus rounding of the dot product."""


@dataclass(frozen=True)
class _Case:
    """Leaves by name and a cotangent per output, as the artifact gets them and as the reference takes them,
    and the gradients in float64 and, where it was asked, of eager torch."""

    values: Mapping[str, Tensor]
    flowing: Sequence[Tensor | None]
    meant: Mapping[str, Tensor]
    meant_flow: Sequence[Tensor | None]
    exact: Mapping[str, Tensor]
    eager: dict[str, Tensor] = field(default_factory=dict)
    seen: accuracy.Seen = field(default_factory=accuracy.Seen)

    @property
    def nbytes(self) -> int:
        """Of all tensors, eager's gradients too and those that were seen, which come later."""
        drawn = [*self.values.values(), *self.meant.values(), *self.flowing, *self.meant_flow]
        each = {id(t): t.nbytes for t in drawn if t is not None}
        return sum(each.values()) + 3 * sum(t.nbytes for t in self.exact.values())


_kept: WeakKeyDictionary[Subject, Kept[_Case]] = WeakKeyDictionary()
_latest: WeakKeyDictionary[Subject, tuple[_Case, accuracy.Others]] = WeakKeyDictionary()


def _recipes(context: Context) -> Iterator[Recipe]:
    subject = context.subject
    every = subject.launch.interface.differentiable
    if not every:
        return
    base = Recipe("gradients", subject.base_dims(), cotangent="normal", wanted=every, seed=context.seed)
    yield base
    for wanted in _asked(subject):
        yield replace(base, wanted=wanted)
        yield replace(base, wanted=wanted, dims=odd_dims(subject), seed=context.seed + 1)
        if not _planned(subject, wanted):
            continue
        for cotangent in inputs.cotangent_kinds(subject):
            yield replace(base, wanted=wanted, cotangent=cotangent)
        for draw in edges.names(subject):
            yield replace(base, wanted=wanted, draw=draw, dims=edges.dims(subject))
        few = ("ties", "gaps")
        for draw in few if context.quick else (*inputs.smooth_draws(subject), *few, "integers"):
            yield replace(base, wanted=wanted, draw=draw)
    yield from _together(subject, base)
    for dims, seed in turns(context):
        yield from _together(subject, replace(base, dims=dims, seed=seed), AGAIN, ranges.away(subject))
    skewed = [] if context.quick else [(draw, "normal") for draw in edges.scaled(subject)]
    for dims in (edges.dims(subject), *subject.regions[1:]):
        if subject.elements(dims) <= edges.ELEMENTS:
            yield from _together(subject, replace(base, dims=dims), skewed, ())
    for dims in (_ragged(subject), *subject.regions[1:]):
        yield from _together(subject, replace(base, dims=dims), (LEAK, *(() if context.quick else ENDS)), ())
    for dims in _whole(context):
        yield from _together(subject, replace(base, dims=dims), (("normal", inputs.END),), ())
    for draw, dims, seed in (*_medleys(context), *invariance.tried(context, deep(context))):
        yield from _together(subject, replace(base, dims=dims, seed=seed), ((draw, draw),), ())
    for draw in inputs.smooth_draws(subject):
        yield replace(base, draw=draw)
    for cotangent in inputs.cotangent_kinds(subject):
        yield replace(base, cotangent=cotangent, dims=odd_dims(subject), wanted=every[-1:])
    for dims in subject.regions[1:]:
        for wanted in dict.fromkeys(p.wanted for p in subject.plans("backward", dims)):
            named = replace(base, dims=dims, wanted=tuple(n for n in every if n in wanted))
            for cotangent in CONSTANT if context.quick else inputs.cotangent_kinds(subject):
                yield replace(named, cotangent=cotangent)
            few = edges.names(subject)[:1] if subject.elements(dims) <= edges.ELEMENTS else []
            for draw in (*few, "ties", *(() if context.quick else MORE)):
                yield replace(named, draw=draw)
        if subject.elements(dims) <= edges.ELEMENTS:
            yield from _together(subject, replace(base, dims=dims))
    for dims in deep(context):
        yield from _together(subject, replace(base, dims=dims), (*HEAVY, ("normal", "ones"), *ENDS, *SPARSE))
    plans = list(dict.fromkeys(p.wanted for p in subject.launch.plans if p.phase == "backward"))
    plans.sort(key=len, reverse=True)
    for at, dims in enumerate(sizes(context)):
        chosen = plans if not context.quick else [plans[at % len(plans)]]
        for wanted in chosen:
            yield replace(base, dims=dims, wanted=tuple(n for n in every if n in wanted))
    yield replace(base, dims=subject.largest_dims())
    yield replace(base, layout="strided")
    for seed in range(2 if context.quick else 4):
        yield replace(base, draw="normal", layout=DIRECTIONAL, seed=context.seed + seed)


def _medleys(context: Context) -> Iterator[tuple[str, dict[str, int], int]]:
    """Draws, sizes and seeds. None in a hurry."""
    for number, (draw, dims) in enumerate(
        () if context.quick else medley.tried(context.subject, context.seed)
    ):
        yield draw, dims, context.seed + number


def _ragged(subject: Subject) -> dict[str, int]:
    """Sizes that no tile divides, and even: of rows in turn the last is another than the first."""
    return {name: subject.nearest(name, size + 1) for name, size in odd_dims(subject).items()}


def _whole(context: Context) -> Iterator[dict[str, int]]:
    """Powers of two of each dim, where something is summed over it. Such sums are of parts, of so many rows
    each, and both numbers are powers of two: at one of these sizes the last row is in the last part, alone
    where it alone flows back. None in a hurry."""
    subject, base = context.subject, context.subject.base_dims()
    kinds = {name: kind for name, _, kind in subject.leaves}
    for name in () if context.quick or subject.heavy else base:
        wanted = [kinds[n] for n in subject.launch.interface.differentiable]
        if all(any(name in d.symbols() for d in kind.shape) for kind in wanted):
            continue
        for power in range(2, MOST_PARTS.bit_length()):
            dims = {**base, name: 1 << power}
            if subject.declares(dims) and subject.admits(dims, DEEP):
                yield dims


def _together(
    subject: Subject,
    base: Recipe,
    summed: Sequence[tuple[str, str]] = HEAVY,
    ends: Sequence[tuple[str, str]] | None = None,
) -> Iterator[Recipe]:
    """Every plan with leaves and cotangents that show something together: sums that are felt, or the ends of
    their types; the same values for all plans in a row."""
    every = subject.launch.interface.differentiable
    plans = [p.wanted for p in subject.plans("backward", base.dims)]
    asked = list(dict.fromkeys(tuple(n for n in every if n in wanted) for wanted in (every, *plans)))
    for draw, cotangent in (*summed, *(ranges.pairs(subject) if ends is None else ends)):
        for wanted in asked:
            yield replace(base, wanted=wanted, draw=draw, cotangent=cotangent)


def _planned(subject: Subject, wanted: tuple[str, ...]) -> bool:
    """Whether a plan computes just these; where another gives more, only which are handed on is another."""
    dims = subject.dims_tuple(subject.base_dims())
    return set(subject.program.plan_for("backward", dims, wanted).wanted) == set(wanted)


def _asked(subject: Subject) -> list[tuple[str, ...]]:
    """All gradients, those of each plan, each one alone, all but one; each combination once."""
    every = subject.launch.interface.differentiable
    plans = [p.wanted for p in subject.plans("backward", subject.base_dims())]
    alone = [(name,) for name in every]
    rest = [tuple(n for n in every if n != name) for name in every if len(every) > 2]
    ordered = [tuple(n for n in every if n in wanted) for wanted in (every, *plans, *alone, *rest)]
    return list(dict.fromkeys(ordered))


def _check(context: Context, recipe: Recipe) -> Outcome:
    subject = context.subject
    if recipe.layout == DIRECTIONAL:
        return _directional(context, recipe)
    if recipe.draw.startswith(equal.DRAW):
        return _of_equal_rows(context, recipe)
    case = _case(subject, recipe)
    exact = case.exact
    with context.launching():
        found = subject.trained(case.values, case.flowing, recipe.wanted)
    found = hosted.named(found, hosted.device(subject, recipe.dims))
    for name in recipe.wanted:
        got, wanted = list(found[name].shape), list(exact[name].shape)
        if got != wanted:
            return Failed(f"d({name}) has the shape {got} instead of {wanted}")
    rows = [(f"d({name})", found[name], exact[name]) for name in recipe.wanted]
    others = _others(subject, recipe, case)
    outcome = _judged(subject, recipe, case, rows, others)
    if isinstance(outcome, Failed) and not _means_one_thing(subject, case):
        return Skipped("ways to write the function differ in where it is inf or NaN")
    free = meaning.through_attention(subject) if isinstance(outcome, Failed) else set[str]()
    if free.isdisjoint(label for label, _, _ in rows) or meaning.decided(subject, case.meant):
        return outcome
    return _judged(subject, recipe, case, [r for r in rows if r[0] not in free or _not_finite(r)], others)


def _of_equal_rows(context: Context, recipe: Recipe) -> Outcome:
    """What has a row for each of equal rows, and what is summed over them, one after the other alone."""
    subject, here = context.subject, hosted.device(context.subject, recipe.dims)
    values, meant = inputs.case(subject, recipe)
    flowing, wanted = inputs.cotangents(subject, recipe), recipe.wanted
    over = invariance.summed(subject, recipe)
    each = invariance.one_by_one(subject, recipe, flowing) if over else {}
    with context.launching(1 + len(each)):
        found = subject.trained(values, flowing, wanted)
        alone = {row: subject.trained(values, flow, wanted) for row, flow in each.items()}
    found = hosted.named(found, here)
    meant_flow = hosted.flowing(flowing, here)
    results = invariance.of_rows(
        subject, recipe, [(f"d({n})", found[n]) for n in wanted],
        lambda: _labelled(meaning.gradients(subject, meant, meant_flow, wanted, "float64")),
        partial(meaning.rounded, subject, meant, meant_flow),
    )  # fmt: skip
    flows = {row: hosted.flowing(flow, here) for row, flow in each.items()}

    def exact(name: str) -> Tensor:
        of = [meaning.gradients(subject, meant, flow, (name,), "float64")[name] for flow in flows.values()]
        return torch.stack(of)

    def nearby(name: str, turn: int) -> Tensor:
        return torch.stack(
            [meaning.rounded(subject, meant, flow, turn)[f"d({name})"] for flow in flows.values()]
        )

    sums = [
        invariance.Alike(f"d({n})", torch.stack(hosted.fetched([of[n] for of in alone.values()], here)),
                         partial(exact, n), partial(nearby, n))
        for n in over
    ]  # fmt: skip
    return invariance.judged(recipe, [*results, *sums])


def _labelled(gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"d({name})": grad for name, grad in gradients.items()}


def _judged(
    subject: Subject, recipe: Recipe, case: _Case, rows: Sequence[_Row], others: accuracy.Others
) -> Outcome:
    if not rows:
        return Skipped(UNDECIDED)
    return accuracy.beside_eager(
        subject, recipe, rows, lambda: _eager(subject, recipe, case), others, case.seen
    )


def _not_finite(row: _Row) -> bool:
    """Whether inf or NaN came out where float64 has a number."""
    _, got, exact = row
    return bool((torch.isfinite(exact) & ~torch.isfinite(got)).any())


def _means_one_thing(subject: Subject, case: _Case) -> bool:
    """Whether the function itself is inf, NaN and finite at the same places however it is written: where it
    is not, a mask in a backward depends on how it was. Without an edge there is no mask."""
    if not edges.any_of(subject) or all(bool(torch.isfinite(t).all()) for t in case.meant.values()):
        return True
    exact = meaning.outputs(subject, case.meant, "float64")
    eager = hosted.fetched(meaning.outputs(subject, case.values, "declared"), exact[0].device)
    flat = meaning.outputs(subject, case.meant, "float64", flat=True)
    kinds = [
        [oracle.classes(w.to(e.dtype)) for w in (a, e, b)] for a, e, b in zip(exact, eager, flat, strict=True)
    ]
    return all(torch.equal(a, e) and torch.equal(a, b) for a, e, b in kinds)


def _case(subject: Subject, recipe: Recipe) -> _Case:
    """The last cases are kept: the same values are judged for many sets of gradients that are asked for."""
    key = (*sorted(recipe.dims.items()), recipe.draw, recipe.layout, recipe.cotangent, recipe.seed)
    most = KEPT_BYTES if subject.device.type == "cpu" else KEPT_ON_CARD
    kept = _kept.setdefault(subject, Kept(KEPT, most))
    found = kept.get(key)
    if found is not None and found.exact.keys() >= set(recipe.wanted):
        return found
    values, meant = inputs.case(subject, recipe)
    flowing, here = inputs.cotangents(subject, recipe), hosted.device(subject, recipe.dims)
    meant_flow = flowing if here == subject.device else inputs.cotangents(subject, recipe, here)
    exact = meaning.gradients(subject, meant, meant_flow, recipe.wanted, "float64")
    made = _Case(values, flowing, meant, meant_flow, exact)
    if not subject.heavy:
        kept.put(key, made, made.nbytes)
    return made


def _others(subject: Subject, recipe: Recipe, case: _Case) -> accuracy.Others:
    """Of all gradients of the case. Those of the last case are kept: what is near an end is tried with one
    set of gradients after the other."""
    last, found = _latest.get(subject, (None, None))
    if last is case and found is not None:
        return found
    meant, flowing = case.meant, case.meant_flow

    def flat() -> dict[str, Tensor]:
        found = meaning.gradients(subject, meant, flowing, case.exact, "float64", flat=True)
        return {f"d({name})": grad for name, grad in found.items()}

    def rules() -> dict[str, Tensor]:
        return meaning.by_rules(subject, meant, flowing)

    others = accuracy.Others(
        lambda turn: meaning.rounded(subject, meant, flowing, turn),
        (flat, rules),
        lambda: meaning.flushed(subject, meant, flowing),
        lambda: accuracy.numbers_of(subject, recipe, case.values),
    )
    _latest[subject] = case, others
    return others


def _eager(subject: Subject, recipe: Recipe, case: _Case) -> Mapping[str, Tensor]:
    """Of all that the case was made for: others may be asked for by the next recipe."""
    if not case.eager:
        found = meaning.gradients(subject, case.values, case.flowing, case.exact, "declared")
        found = hosted.named(found, hosted.device(subject, recipe.dims))
        case.eager.update((f"d({name})", grad) for name, grad in found.items())
    return case.eager


def _directional(context: Context, recipe: Recipe) -> Outcome:
    subject = context.subject
    values, meant = inputs.case(subject, recipe)
    flowing, here = inputs.cotangents(subject, recipe), hosted.device(subject, recipe.dims)
    meant_flow = inputs.cotangents(subject, recipe, here)
    along = {n: inputs.direction(recipe, n, meant[n]) for n in recipe.wanted}
    slopes = meaning.directional(subject, meant, along, STEP)
    pairs = [(s, c) for s, c in zip(slopes, meant_flow, strict=True) if c is not None]
    wanted = sum(float((s * c.double()).sum()) for s, c in pairs)
    if not math.isfinite(wanted):
        return Skipped("the function is not finite beside these values")
    with context.launching():
        found = subject.trained(values, flowing, recipe.wanted)
    found = hosted.named(found, here)
    eager = hosted.named(meaning.gradients(subject, values, flowing, recipe.wanted, "declared"), here)
    got, theirs = _dot(found, along), _dot(eager, along)
    scale = sum(float((g.double() * along[n]).abs().sum()) for n, g in eager.items())
    unit = max(float(torch.finfo(g.dtype).eps) for g in eager.values())
    allowed = SLACK * abs(theirs - wanted) + unit * scale + 1e-6 * scale
    if not abs(got - wanted) <= allowed:
        return Failed(
            f"along a direction the gradient says {got:.6g}, differences say {wanted:.6g} (+-{allowed:.2g})"
        )
    return Passed()


def _dot(gradients: Mapping[str, Tensor], along: Mapping[str, Tensor]) -> float:
    return sum(float((g.double() * along[n]).sum()) for n, g in gradients.items())


@dataclass(frozen=True)
class _Gradients(Sweep):
    def run(self, context: Context) -> Outcome:
        outcome = super().run(context)
        if not isinstance(outcome, Passed):
            return outcome
        interface = context.subject.launch.interface
        learnt = [s for s in interface.inputs if s.kind == "param" and s.name in interface.differentiable]
        return Passed({**outcome.metrics, PARAMETERS: len(learnt)})


STAGE = _Gradients("gradients", 40, _recipes, _check)
