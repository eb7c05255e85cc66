"""Judges tensors of a case with the one rule of `esper_ir.oracle`.

Where the exact result is what is left of a cancellation (the gradient of a softmax for equal cotangents is
zero), eager may hit it exactly while any other order of operations is off by roundings of the terms. So a
result that the rule refuses is judged once more, with what roundings of the inputs and of every value on the
way do to the float64 result (`meaning.rounded`) in the place of what is allowed of eager's error where that
is larger, and with what two ways to compute the same in float64 are apart: nobody knows it better.

Where inf or NaN came in, what comes out may depend on how a composite is written: torch's group norm computes
x a + (b - mean a), which is inf - inf for an infinite weight, where (x - mean) a + b is inf. There the
primitives that the composite stands for are as good a meaning as torch's own form of it, and so are the
gradients by the blueprint's own rules, and what either gives for values one rounding away.

Where exponentials are far apart, an element may be nothing beside the others of its tensor and still known to
its last digits. `small_ones` holds such elements by themselves. docs/bounds.md derives all of it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from esper_ir import oracle
from esper_ir.types import DType, TensorType
from gauntlet import meaning, medley, ranges
from gauntlet.stage import Failed, Outcome, Passed, Recipe
from gauntlet.subject import Subject

T = TypeVar("T")
Row = tuple[str, Tensor, Tensor, Tensor]
"""(label, result, float64 meaning, eager's result)."""
EASY = 0.5
"""Of an element's bound without eager's error: up to here nobody has to know how wide it is with that."""
SHAKES, MORE_SHAKES = 3, 8
ALIKE = (1, 3, 5)
"""Draws of random roundings; so many more before one of few numbers is called wrong; and those in which equal
values are rounded alike."""
MANY = 32
"""Errors of about one size, in numbers."""
ALONE = 64.0
"""Times what is known of the error of an element alone, where it is held by itself."""


class Others:
    """More float64 results by label: `nearby` with random roundings on the way (the number of a draw is
    given), `forms` in other ways to compute the same: by primitives, by bodies of operators, by other rules
    of gradients; `flushed` what it changes where small results of functions are zero; `numbers` how many
    numbers the errors of all elements are made of. Each is computed when it is first asked for."""

    def __init__(
        self,
        nearby: Callable[[int], Mapping[str, Tensor]],
        forms: Sequence[Callable[[], Mapping[str, Tensor]]],
        flushed: Callable[[], Mapping[str, Tensor]] = dict,
        numbers: Callable[[], int] = lambda: MANY,
    ) -> None:
        self.nearby, self.forms = functools.cache(nearby), [functools.cache(form) for form in forms]
        self.flushed, self.numbers = functools.cache(flushed), functools.cache(numbers)

    def ended(self, subject: Subject) -> Others:
        """The same with the first and the last row by themselves."""
        forms = [lambda form=form: with_ends(subject, form()) for form in self.forms]
        return Others(
            lambda turn: with_ends(subject, self.nearby(turn)),
            forms,
            lambda: with_ends(subject, self.flushed()),
            self.numbers,
        )


class Seen:
    """Results of one case by name, each with what was said of it: another plan or phase that gives the same
    numbers needs no second look. Copies, so that nothing a candidate does later changes them."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], list[tuple[Tensor, Any]]] = {}

    def said(self, how: str, row: tuple[str, Tensor, Tensor], ask: Callable[[], T]) -> T:
        """What `ask` says of this result, asked once."""
        label, got, _ = row
        found = self._found.setdefault((how, label.partition(" ")[0]), [])
        for known, answer in found:
            if known.dtype == got.dtype and torch.equal(known, got):
                return answer
        answer = ask()
        found.append((got.detach().clone(), answer))
        return answer


def type_of(subject: Subject, label: str) -> TensorType:
    """Declared type of an output ("y"), or of the leaf of a gradient ("d(x)"); of a row ("y[0]") the type of
    all rows."""
    name = label.partition(" ")[0].partition("[")[0]
    if name.startswith("d("):
        return next(t for n, _, t in subject.leaves if n == name[2:-1])
    return next(t for n, _, t in subject.results if n == name)


def dtype_of(subject: Subject, label: str) -> DType:
    return type_of(subject, label).dtype


def with_ends(subject: Subject, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """By label, and the first and the last row by themselves of what has a row for each of something."""
    made = dict(found)
    for label, t in found.items():
        name, space, rest = label.partition(" ")
        if t.dim() > 1 and t.numel() and any(d.symbols() for d in type_of(subject, label).shape[:-1]):
            rows = t.reshape(-1, t.shape[-1])
            made |= {f"{name}[{at}]{space}{rest}": rows[at:][:1] for at in (0, -1)}
    return made


def compare(subject: Subject, recipe: Recipe, row: Row) -> oracle.Comparison:
    label, got, exact, eager = row
    length = subject.accumulation(recipe.dims, gradient=label.startswith("d("))
    return oracle.compare(got, exact, eager, length, dtype_of(subject, label))


def judged(subject: Subject, recipe: Recipe, row: Row, others: Others | None) -> oracle.Comparison:
    """`compare`, and where that refuses, once more with what the others say."""
    found = compare(subject, recipe, row)
    if found.passed or others is None or not row[2].is_floating_point():
        return found
    torchs = row[2]
    row = _by_other_forms(row, others)
    label, got, exact, eager = row
    flushed = _flushed(row, others)

    def beside(near: Tensor) -> oracle.Comparison:
        if flushed is None:
            return compare(subject, recipe, (label, got, exact, near))
        return compare(subject, recipe, (label, got, exact + flushed, near.double() + flushed))

    if (exact is not torchs or flushed is not None) and (found := beside(eager)).passed:
        return found
    error = _apart(eager.double(), exact)
    for form in others.forms:
        error = torch.maximum(error, _apart(form()[label], exact))

    def moved_by(shakes: Iterable[int], off: Tensor) -> Tensor:
        for shake in shakes:
            off = torch.maximum(off, _apart(others.nearby(shake)[label], exact))
        return off

    def again(off: Tensor) -> oracle.Comparison:
        fine = torch.isfinite(exact) & torch.isfinite(eager)  # elsewhere eager may stand for either
        return beside(torch.where(fine, exact + torch.maximum(error, off), eager.double()))

    moved = moved_by(range(SHAKES), torch.zeros_like(error))
    many = _many(moved, exact) and others.numbers() >= MANY
    rmse = oracle.BOUNDS[dtype_of(subject, label)].rmse
    second = again(moved / rmse if many else moved)
    if many and second.rmse_margin > 1.0 and math.isfinite(second.rmse_margin):
        # One draw of three rounds equal values alike, and where they are added that is felt: three of these.
        second = again(moved_by(ALIKE, torch.zeros_like(error)) / rmse)
    if many and not second.passed and second.rmse_margin <= 1.0:
        second = again(moved)  # the mean is right, and an element has its own factor
    alone = not many or second.rmse_margin <= 1.0
    if alone and not second.passed and math.isfinite(second.worst_margin):
        # Three draws of one number, or of one element, may all be small.
        second = again(moved_by(range(SHAKES, SHAKES + MORE_SHAKES), moved))
    return second if second.passed else found


def _apart(other: Tensor, exact: Tensor) -> Tensor:
    """How far two results are apart; 0 where either is no number, which says nothing of finite ones."""
    return torch.nan_to_num((other - exact).abs(), nan=0.0, posinf=0.0)


def numbers_of(subject: Subject, recipe: Recipe, leaves: Mapping[str, Tensor]) -> int:
    """Of a medley: how many numbers an element's error can come of, up to `MANY`. Where each leaf is one
    number, or one of five, or a function is asked for one only, all elements have a few errors between them,
    however they differ by what flows back. Of a short type the last rounding is felt, each element's own."""
    floating = [t for t in leaves.values() if t.is_floating_point() and t.numel()]
    if not recipe.draw.startswith(medley.DRAW) or any(t.element_size() < 4 for t in floating):
        return MANY
    combined = math.prod(min(MANY, torch.unique(t).numel()) for t in floating)
    return min(MANY, combined, meaning.asked(subject, leaves))


def _many(errors: Tensor, exact: Tensor) -> bool:
    """Whether the mean square of errors is one of many, of different numbers (columns that are all one sum
    are off alike). Each is the largest of several draws already, and where luck evens out, the factor on
    eager's single sample would count that twice."""
    if exact.numel() < MANY or torch.unique(exact).numel() < MANY:
        return False
    square = errors.square() / errors.square().max().clamp(min=torch.finfo(errors.dtype).tiny)
    return bool(square.sum() ** 2 >= MANY * square.square().sum()) and bool(square.any())


def _by_other_forms(row: Row, others: Others) -> Row:
    """The row with another form's result wherever the result is inf, NaN or finite as it is there and not as
    torch's form is. Values one rounding away are such forms too: which of two equal distances is the smaller
    is decided by their roundings, and an infinite cotangent flows to that one only."""
    draws = (functools.partial(others.nearby, at) for at in range(SHAKES + MORE_SHAKES))
    for form in (*others.forms, *draws):
        label, got, exact, eager = row
        kind, meant = oracle.classes(got), oracle.classes(exact.to(got.dtype))
        if bool((kind == meant).all()):
            break
        other = form()[label]
        use = (kind != meant) & (kind == oracle.classes(other.to(got.dtype)))
        if bool(use.any()):
            row = label, got, torch.where(use, other, exact), torch.where(use, other.to(eager.dtype), eager)
    return row


def _flushed(row: Row, others: Others) -> Tensor | None:
    """How far the meaning moves where small results of functions are zero, wherever the result is nearer to
    that; None where it is nowhere. What is no number then excuses nothing."""
    label, got, exact, eager = row
    change = others.flushed().get(label)
    if change is None or not bool(change.any()):
        return None
    other = exact + change
    nearer = (got.double() - other).abs() < (got.double() - exact).abs()
    use = nearer & torch.isfinite(exact) & torch.isfinite(other.to(got.dtype)) & torch.isfinite(eager)
    return torch.where(use, change, 0.0) if bool(use.any()) else None


def small_ones(subject: Subject, row: Row, others: Others) -> str:
    """Why an element is wrong by itself, however small it is beside the others; empty where none is.

    What is known of the error of one element: what eager's is, what other forms and random roundings on the
    way do to it, and the rounding of the result. An error of `ALONE` times the largest of these is wrong,
    where that largest one leaves the size of the element certain.
    """
    label, got, exact, _ = row
    if not got.is_floating_point():
        return ""
    moved = [*(form()[label] for form in others.forms), *(others.nearby(at)[label] for at in range(SHAKES))]
    wrong = _alone(row, moved)
    if bool(wrong.any()):
        moved += [others.nearby(SHAKES + at)[label] for at in range(MORE_SHAKES)]
        wrong = _alone(row, moved)
    if not bool(wrong.any()):
        return ""
    at = tuple(int(n) for n in torch.nonzero(wrong)[0])
    return f"element {list(at)} is {float(got[at]):.3g} instead of {float(exact[at]):.3g}, small as it is"


def _alone(row: Row, moved: Sequence[Tensor]) -> Tensor:
    """Which elements are further off than `ALONE` times what the others say, of those of a certain size."""
    _, got, exact, eager = row
    info = torch.finfo(got.dtype)
    known = torch.maximum((eager.double() - exact).abs(), exact.abs() * info.eps / 2)
    for other in moved:
        known = torch.maximum(known, torch.nan_to_num((other - exact).abs(), nan=torch.inf, posinf=torch.inf))
    known = torch.maximum(known, _of_like_size(known, exact))
    least = ALONE * info.smallest_normal
    held = torch.isfinite(exact) & torch.isfinite(eager) & (2 * (known + least) < exact.abs())
    return held & ~((got.double() - exact).abs() <= ALONE * known + least)


def _of_like_size(known: Tensor, exact: Tensor) -> Tensor:
    """The largest of what is known of elements between the same powers of two. A sum that cancels inside a
    scalar function (1 + erf of a far number) has an error that one draw of one element says nothing about:
    it may be 0 by luck."""
    fine = torch.isfinite(exact) & torch.isfinite(known)
    _, power = torch.frexp(torch.where(fine, exact, 0.0))
    sizes, place = torch.unique(power, return_inverse=True)
    told = torch.where(fine, known, 0.0).flatten()
    return known.new_zeros(len(sizes)).scatter_reduce(0, place.flatten(), told, "amax")[place]


def one(subject: Subject, recipe: Recipe, row: Row) -> str:
    """Why this result is wrong; empty when it is right."""
    found = compare(subject, recipe, row)
    return "" if found.passed else found.reason


def beside_eager(
    subject: Subject, recipe: Recipe, rows: Sequence[tuple[str, Tensor, Tensor]],
    eager: Callable[[], Mapping[str, Tensor]], others: Others, seen: Seen,
) -> Outcome:  # fmt: skip
    """(label, result, float64 meaning), judged beside what eager gives by label. Its error only ever widens
    the bound, and of all numbers of a type the float64 result rounded to it has the least. So where that
    stands for eager's result and nothing is near the bound, eager is not run."""
    if by_ends := medley.by_ends(subject, recipe.draw, recipe.dims):
        got = with_ends(subject, {label: t for label, t, _ in rows})
        exact = with_ends(subject, {label: t for label, _, t in rows})
        rows, others = [(n, t, exact[n]) for n, t in got.items() if n in exact], others.ended(subject)
    if (easy := _easy(subject, recipe, rows, seen)) is not None:
        return easy
    theirs = with_ends(subject, eager()) if by_ends else eager()
    rows_of = [(label, got, exact, theirs[label]) for label, got, exact in rows]
    return all_of(subject, recipe, rows_of, others, seen)


def _easy(
    subject: Subject, recipe: Recipe, rows: Sequence[tuple[str, Tensor, Tensor]], seen: Seen
) -> Passed | None:
    """None where eager has to be asked. Beside infinities and what is nearly one it may have others, and
    where small elements are held by themselves its own count."""
    if ranges.at_an_end(recipe.draw) or ranges.at_an_end(recipe.cotangent):
        return None
    worst, drift = 0.0, 0.0
    for row in rows:
        told = seen.said("easy", row, functools.partial(_at_ease, subject, recipe, row))
        if told is None:
            return None
        worst, drift = max(worst, told[0]), max(drift, told[1])
    return _passed(recipe, worst, drift)


def _at_ease(
    subject: Subject, recipe: Recipe, row: tuple[str, Tensor, Tensor]
) -> tuple[float, float] | None:  # fmt: skip
    """Margin and drift of a result that is far from wrong."""
    label, got, exact = row
    found, dtype = compare(subject, recipe, (*row, exact.to(got.dtype))), dtype_of(subject, label)
    if not found.passed or found.worst_margin > EASY:
        return None
    if dtype.is_floating and not found.far_from_overflow(dtype):
        return None
    return found.worst_margin, _drift(recipe, label, got, exact)


def _drift(recipe: Recipe, label: str, got: Tensor, exact: Tensor) -> float:
    """Asked of outputs on ordinary values."""
    return relative(got, exact) if recipe.draw == "normal" and not label.startswith("d(") else 0.0


def _passed(recipe: Recipe, worst: float, drift: float) -> Passed:
    told = {"tolerance_used": worst, **({"drift": drift} if recipe.draw == "normal" else {})}
    return Passed(_finite(told))


def all_of(
    subject: Subject, recipe: Recipe, rows: Iterable[Row], others: Others | None = None,
    seen: Seen | None = None,
) -> Outcome:  # fmt: skip
    """All rows, with the worst margin (1 is the bound) and the largest relative error among them. The first
    that is wrong is told, with the worst margin of it and of those behind it."""
    worst, drift, rows, seen = 0.0, 0.0, iter(rows), seen or Seen()
    for row in rows:
        found, wrong = seen.said("beside", row[:3], functools.partial(_told, subject, recipe, row, others))
        if wrong:
            every = [found, *(compare(subject, recipe, left) for left in rows)]
            margin = max(max(one.worst_margin, one.rmse_margin) for one in every)
            return Failed(f"{row[0]} at {recipe}: {wrong}", metrics=_finite({"margin": margin}))
        worst = max(worst, found.worst_margin)
        drift = max(drift, _drift(recipe, *row[:3]))
    return _passed(recipe, worst, drift)


def _told(
    subject: Subject, recipe: Recipe, row: Row, others: Others | None
) -> tuple[oracle.Comparison, str]:  # fmt: skip
    """The comparison, and why it is wrong; empty where it is not."""
    found = judged(subject, recipe, row, others)
    if found.passed and others is not None and recipe.draw.startswith(ranges.FAR):
        return found, small_ones(subject, row, others)
    return found, "" if found.passed else found.reason


def relative(got: Tensor, exact: Tensor) -> float:
    """Root mean square error over the root mean square of the exact values; 0 where that says nothing."""
    if not got.is_floating_point() or not torch.isfinite(exact).all():
        return 0.0
    size = float(exact.double().norm())
    error = float((got.double() - exact.double()).norm())
    return error / size if size and math.isfinite(error) else 0.0


def _finite(values: Mapping[str, float]) -> dict[str, Any]:
    return {k: float(f"{v:.6g}") for k, v in values.items() if math.isfinite(v)}
