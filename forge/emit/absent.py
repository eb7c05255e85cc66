"""Values that are zero where a tile has no row or column, so that a sum needs no mask."""

from __future__ import annotations

from esper_ir.scalar import Arg, Cast, Const, Expr
from forge.plan import INDEX, Compute, KernelPlan, Load


def zero_outside(plan: KernelPlan) -> frozenset[str]:
    """Made by sums, products and choices from nothing but full loads, which are zero there."""
    out: set[str] = set()
    for s in plan.body:
        if isinstance(s, Load):
            access = plan.accesses[s.access]
            plain = access.buffer != INDEX and access.table is None and access.fill == 0
            out |= {s.name} if plain and access.letters() == "rc" and not s.row else set()
        elif isinstance(s, Compute) and _zero(s.expr, [a in out for a in s.args]):
            out.add(s.name)
    return frozenset(out)


def _zero(expr: Expr, zeros: list[bool]) -> bool:
    if isinstance(expr, Arg):
        return zeros[expr.index]
    if isinstance(expr, Const):
        return expr.value == 0
    if isinstance(expr, Cast):
        return _zero(expr.arg, zeros)
    if expr.name == "where":
        return all(_zero(a, zeros) for a in expr.args[1:])
    return expr.name in ("add", "sub", "mul", "neg", "abs") and all(_zero(a, zeros) for a in expr.args)
