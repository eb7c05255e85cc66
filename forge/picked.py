"""Sums along a row that are one value of it: zeros everywhere but where the position is a given number."""

from __future__ import annotations

from collections.abc import Mapping

from esper_ir.scalar import Arg, Const, Prim, prim
from esper_ir.types import Dim
from forge.plan import INDEX, Compute, KernelPlan, Load, Reduce


def picked(plan: KernelPlan, r: Reduce) -> tuple[str, str] | None:
    """(value, column) where a sum along the row is where(position == column, value, 0): the value at that
    column, or 0 when there is none.
    """
    made = {s.name: s for s in plan.body if isinstance(s, (Load, Compute))}
    term = made.get(r.arg)
    if r.axis != "row" or r.combine != "sum" or not isinstance(term, Compute) or not term.dtype.is_floating:
        return None
    expr = term.expr
    zero = isinstance(expr, Prim) and expr.name == "where" and expr.args[2] == Const(0.0)
    if not zero or not isinstance(expr, Prim) or expr.args[:2] != (Arg(0), Arg(1)) or len(term.args) != 2:
        return None
    test, axes = made.get(term.args[0]), plan.axes()
    if not isinstance(test, Compute) or test.expr != prim("eq", Arg(0), Arg(1)):
        return None
    for position, column in (test.args, test.args[::-1]):
        if _is_column(plan, made, position) and "c" not in axes[column] and made.get(column) is not None:
            return term.args[1], column
    return None


def _is_column(plan: KernelPlan, made: Mapping[str, Load | Compute], name: str) -> bool:
    """The number of the column, maybe in another type of whole numbers."""
    stmt = made.get(name)
    while isinstance(stmt, Compute) and stmt.expr == Arg(0) and not stmt.dtype.is_floating:
        stmt = made.get(stmt.args[0])
    if not isinstance(stmt, Load):
        return False
    access = plan.accesses[stmt.access]
    still = not any(s != Dim() for s in access.strides[:-1])
    plain = access.offset == Dim() and still and not access.parts
    return access.buffer == INDEX and plain and access.strides[-1] == Dim.of(1)
