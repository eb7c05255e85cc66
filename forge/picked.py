"""Reductions along a row that need no pass of their own: sums of zeros and one value, places of extrema."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Place:
    """The first column where `value` is its own extremum `of`, or is no number where `nan`; else `none`."""

    of: Reduce
    nan: bool
    none: int


def places(plan: KernelPlan) -> dict[str, Place]:
    """Reductions that say where another one found its extremum."""
    found = ((s.name, _place(plan, s)) for s in plan.body if isinstance(s, Reduce))
    return {name: place for name, place in found if place is not None}


def _place(plan: KernelPlan, r: Reduce) -> Place | None:
    """Of min(where(value == extremum or isnan(value), column, none)) along the row."""
    made = {s.name: s for s in plan.body if isinstance(s, (Load, Compute, Reduce))}
    term = made.get(r.arg)
    if (r.axis, r.combine) != ("row", "min") or not isinstance(term, Compute) or len(term.args) != 2:
        return None
    expr = term.expr
    if not isinstance(expr, Prim) or expr.name != "where" or expr.args[:2] != (Arg(0), Arg(1)):
        return None
    none = expr.args[2]
    if not isinstance(none, Const) or not _is_column(plan, made, term.args[1]):
        return None
    test, nan = made.get(term.args[0]), ""
    if isinstance(test, Compute) and test.expr == prim("or", Arg(0), Arg(1)):
        test, other = (made.get(a) for a in test.args)
        if not isinstance(other, Compute) or other.expr != prim("isnan", Arg(0)):
            return None
        nan = other.args[0]
    if not isinstance(test, Compute) or test.expr != prim("eq", Arg(0), Arg(1)):
        return None
    for value, name in (test.args, test.args[::-1]):
        of = _extremum(plan, made, value, name)
        if of is not None and nan in ("", value):
            return Place(of, bool(nan), int(none.value))
    return None


def _extremum(
    plan: KernelPlan, made: Mapping[str, Load | Compute | Reduce], value: str, name: str
) -> Reduce | None:
    """The extremum along the row of `value` that `name` is, maybe back in the value's type."""
    of = made.get(name)
    while isinstance(of, Compute) and of.expr == Arg(0) and of.dtype is plan.dtypes()[value]:
        of = made.get(of.args[0])
    if not isinstance(of, Reduce) or of.axis != "row" or of.combine not in ("min", "max"):
        return None
    return of if of.arg == value else None


def _is_column(plan: KernelPlan, made: Mapping[str, Load | Compute | Reduce], name: str) -> bool:
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
