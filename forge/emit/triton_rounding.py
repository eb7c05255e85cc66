"""Where a value of a 16-bit type need not be rounded: Triton's conversions are instructions that no compiler
after it takes away.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from esper_ir.scalar import Arg, Cast, Const, Expr, Prim, walk
from esper_ir.types import DType
from forge.plan import Compute, KernelPlan, Load, Reduce, Stmt, Store

HALVES = (DType.bfloat16, DType.float16)
PICKS = frozenset({"where", "maximum", "minimum", "neg", "abs"})
"""What they make is one of their operands, or that with another sign: rounding before is rounding after."""


def exact(expr: Expr, dtypes: Sequence[DType], dtype: DType) -> bool:
    """Whether the value is one of `dtype` before it is rounded."""
    if dtype not in HALVES:
        return False
    if isinstance(expr, Arg):
        return dtypes[expr.index] is dtype
    if isinstance(expr, Cast):
        return expr.dtype is dtype
    if isinstance(expr, Const):
        return isinstance(expr.value, float) and (expr.value == 0 or math.isinf(expr.value))
    chosen = _chosen(expr)
    known = all(isinstance(a, Const) for a in chosen)  # numbers alone have no type
    return bool(chosen) and not known and all(exact(a, dtypes, dtype) for a in chosen)


def packed(plan: KernelPlan) -> bool:
    """Whether 16-bit numbers are computed from loaded ones alone, which assemblers do two at a time without
    widening them.
    """
    kinds = plan.dtypes()
    loaded = {s.name for s in plan.body if isinstance(s, Load)}
    return any(
        isinstance(s, Compute)
        and s.dtype in HALVES
        and any(a in loaded and kinds[a] is s.dtype for a in s.args)
        and all(kinds[a] in (s.dtype, DType.bool) for a in s.args)
        for s in plan.body
    )


def rounded_by_stores(plan: KernelPlan) -> frozenset[str]:
    """Values that only stores of their type read, directly or after a choice: these round them."""
    kinds = plan.dtypes()
    out = {s.name for s in plan.body if isinstance(s, Compute) and s.dtype in HALVES}
    read = set[str]()
    for s in reversed(plan.body):
        read |= set(_read(s))
        if isinstance(s, Store):
            same = plan.accesses[s.access].dtype is kinds.get(s.value)
            out -= set() if same else {s.value}
        elif isinstance(s, Compute):
            passed = s.name in out and exact(s.expr, [kinds[a] for a in s.args], s.dtype)
            out -= set(s.args) - (_passed_on(s) if passed else set())
        else:
            out -= set(_read(s))
    return frozenset(out & read)


def _read(s: Stmt) -> tuple[str, ...]:
    if isinstance(s, Load):
        return (s.row,)
    if isinstance(s, Store):
        return (s.value,)
    return (s.arg, *s.about) if isinstance(s, Reduce) else s.args


def _passed_on(s: Compute) -> set[str]:
    """Operands of which a choice makes nothing but its result: not those that it looks at."""
    looked, taken, left = set[int](), set[int](), [s.expr]
    while left:
        e = left.pop()
        if isinstance(e, Arg):
            taken.add(e.index)
        elif isinstance(e, Prim) and e.name in PICKS:
            chosen = _chosen(e)
            left += chosen
            looked |= {a.index for c in e.args if c not in chosen for a in walk(c) if isinstance(a, Arg)}
    return {s.args[i] for i in taken} - {s.args[i] for i in looked}


def _chosen(expr: Expr) -> tuple[Expr, ...]:
    """Operands of a choice that may be what it makes."""
    if not isinstance(expr, Prim) or expr.name not in PICKS:
        return ()
    return expr.args[1:] if expr.name == "where" else expr.args
