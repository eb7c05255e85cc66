"""Judges tensors of a case with the one rule of `esper_ir.oracle`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from esper_ir import oracle
from esper_ir.types import DType
from gauntlet.stage import Failed, Outcome, Passed, Recipe
from gauntlet.subject import Subject

Row = tuple[str, Tensor, Tensor, Tensor]
"""(label, result, float64 meaning, eager's result)."""


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


def one(subject: Subject, recipe: Recipe, row: Row) -> str:
    """Why this result is wrong; empty when it is right."""
    found = compare(subject, recipe, row)
    return "" if found.passed else found.reason


def all_of(subject: Subject, recipe: Recipe, rows: Iterable[Row]) -> Outcome:
    """All rows, with the worst margin (1 is the bound) and the largest relative error among them."""
    worst, drift = 0.0, 0.0
    for row in rows:
        found = compare(subject, recipe, row)
        if not found.passed:
            return Failed(f"{row[0]} at {recipe}: {found.reason}", metrics=_finite({"margin": found.worst_margin}))
        worst = max(worst, found.worst_margin)
        drift = max(drift, relative(row[1], row[2]))
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
