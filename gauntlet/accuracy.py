"""Judges tensors of a case with the one rule of `esper_ir.oracle`.

Where the exact result is what is left of a cancellation (the gradient of a softmax for equal cotangents is
zero), eager may hit it exactly while any other order of operations is off by roundings of the terms. So a
result that the rule refuses is judged once more, with what roundings of the inputs and of every value on the
way do to the float64 result (`meaning.rounded`) in the place of eager's error where that is larger.

Where inf or NaN came in, what comes out may depend on how a composite is written: torch's group norm computes
x a + (b - mean a), which is inf - inf for an infinite weight, where (x - mean) a + b is inf. There the
primitives that the composite stands for are as good a meaning as torch's own form of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from esper_ir import oracle
from esper_ir.types import DType
from gauntlet.stage import Failed, Outcome, Passed, Recipe
from gauntlet.subject import Subject

Row = tuple[str, Tensor, Tensor, Tensor]
"""(label, result, float64 meaning, eager's result)."""
SHAKES = 3


@dataclass(frozen=True)
class Others:
    """More float64 results by label: `nearby` with random roundings on the way (the number of a draw is
    given), `flat` by primitives."""

    nearby: Callable[[int], Mapping[str, Tensor]]
    flat: Callable[[], Mapping[str, Tensor]]


def dtype_of(subject: Subject, label: str) -> DType:
    """Declared dtype of an output ("y"), or of the leaf of a gradient ("d(x)")."""
    name = label.partition(" ")[0]
    if name.startswith("d("):
        return next(t.dtype for n, _, t in subject.leaves if n == name[2:-1])
    return next(t.dtype for n, _, t in subject.results if n == name)


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
    row = _by_primitives(row, others)
    label, got, exact, eager = row
    if exact is not torchs and (found := compare(subject, recipe, row)).passed:
        return found
    error = torch.nan_to_num((eager.double() - exact).abs())
    for shake in range(SHAKES):
        moved = torch.nan_to_num((others.nearby(shake)[label] - exact).abs())
        error = torch.maximum(error, moved)
    again = compare(
        subject, recipe, (label, got, exact, torch.where(torch.isfinite(exact), exact + error, exact))
    )
    return again if again.passed else found


def _by_primitives(row: Row, others: Others) -> Row:
    """The row with the primitives' result wherever the result is inf, NaN or finite as it is and not as
    torch's form is."""
    label, got, exact, eager = row
    kind, meant = oracle.classes(got), oracle.classes(exact.to(got.dtype))
    if bool((kind == meant).all()):
        return row
    flat = others.flat()[label]
    use = (kind != meant) & (kind == oracle.classes(flat.to(got.dtype)))
    return label, got, torch.where(use, flat, exact), torch.where(use, flat.to(eager.dtype), eager)


def one(subject: Subject, recipe: Recipe, row: Row) -> str:
    """Why this result is wrong; empty when it is right."""
    found = compare(subject, recipe, row)
    return "" if found.passed else found.reason


def all_of(subject: Subject, recipe: Recipe, rows: Iterable[Row], others: Others | None = None) -> Outcome:
    """All rows, with the worst margin (1 is the bound) and the largest relative error among them."""
    worst, drift = 0.0, 0.0
    for row in rows:
        found = judged(subject, recipe, row, others)
        if not found.passed:
            return Failed(
                f"{row[0]} at {recipe}: {found.reason}",
                metrics=_finite({"margin": max(found.worst_margin, found.rmse_margin)}),
            )
        worst = max(worst, found.worst_margin)
        drift = max(drift, 0.0 if row[0].startswith("d(") else relative(row[1], row[2]))
    told = {"tolerance_used": worst, **({"drift": drift} if recipe.draw == "normal" else {})}
    return Passed(_finite(told))


def relative(got: Tensor, exact: Tensor) -> float:
    """Root mean square error over the root mean square of the exact values; 0 where that says nothing."""
    if not got.is_floating_point() or not torch.isfinite(exact).all():
        return 0.0
    size = float(exact.double().norm())
    error = float((got.double() - exact.double()).norm())
    return error / size if size and math.isfinite(error) else 0.0


def _finite(values: Mapping[str, float]) -> dict[str, Any]:
    return {k: float(f"{v:.6g}") for k, v in values.items() if math.isfinite(v)}
