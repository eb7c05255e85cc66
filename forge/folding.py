"""Whole numbers and truth values of a body that are known: positions as lines over the space, and what
follows from them; divisions that are products.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from esper_ir.scalar import Arg, Cast, Const, Expr, Prim, prim, walk
from esper_ir.types import Dim
from forge.plan import Compute, KernelPlan, PointTile


@dataclass(frozen=True)
class Affine:
    """start + the sum of position x step over the axes of a space."""

    steps: tuple[int, ...]
    start: int

    def ends(self, space: Sequence[Dim]) -> tuple[float, float]:
        """Least and greatest value."""
        low = high = float(self.start)
        for step, size in zip(self.steps, space, strict=True):
            far = step * (size.static - 1) if size.static is not None else math.copysign(math.inf, step)
            low, high = low + min(far if step else 0, 0), high + max(far if step else 0, 0)
        return low, high


def line(expr: Expr, args: Sequence[Affine | None]) -> Affine | None:
    """The expression as a line, where it is one."""
    if isinstance(expr, Arg):
        return args[expr.index]
    if isinstance(expr, Cast):
        return None if expr.dtype.is_floating else line(expr.arg, args)
    if isinstance(expr, Const):
        return Affine((), expr.value) if type(expr.value) is int else None
    parts = [line(a, args) for a in expr.args]
    if expr.name not in ("add", "sub", "mul") or parts[0] is None or parts[1] is None:
        return None
    a, b = _levelled(parts[0], parts[1])
    if expr.name == "mul":
        a, b = (b, a) if not any(a.steps) else (a, b)
        return None if any(b.steps) else Affine(tuple(s * b.start for s in a.steps), a.start * b.start)
    sign = 1 if expr.name == "add" else -1
    steps = tuple(s + sign * t for s, t in zip(a.steps, b.steps, strict=True))
    return Affine(steps, a.start + sign * b.start)


def _levelled(a: Affine, b: Affine) -> tuple[Affine, Affine]:
    """Numbers have no steps of their own."""
    rank = max(len(a.steps), len(b.steps))
    return Affine(a.steps or (0,) * rank, a.start), Affine(b.steps or (0,) * rank, b.start)


def folded(expr: Expr, args: Sequence[Affine | None], space: Sequence[Dim]) -> Expr:
    """The expression with what is known in it as numbers. A zero in the place of what cannot be is not
    added: of -0.0 and 0.0 the sum is then the first."""
    if isinstance(expr, Cast):
        inner = folded(expr.arg, args, space)
        whole = isinstance(inner, Const) and isinstance(inner.value, int) and not expr.dtype.is_floating
        zero = isinstance(inner, Const) and inner.value == 0 and expr.dtype.is_floating
        return inner if whole else Const(0.0) if zero else Cast(inner, expr.dtype)
    if not isinstance(expr, Prim):
        return expr
    parts = tuple(folded(a, args, space) for a in expr.args)
    made = Prim(expr.name, parts)
    values = [p.value for p in parts if isinstance(p, Const) and isinstance(p.value, int)]
    if len(values) == len(parts) and expr.name in _NUMBERS:
        return Const(_NUMBERS[expr.name](*values))
    return _partly(made, args, space)


def _partly(expr: Prim, args: Sequence[Affine | None], space: Sequence[Dim]) -> Expr:
    """With some operands known."""
    parts = expr.args
    if expr.name == "where" and isinstance(parts[0], Const):
        return parts[1] if parts[0].value else parts[2]
    if expr.name in ("and", "or"):
        return _truth(expr)
    if expr.name == "add":
        zeros = [isinstance(p, Const) and isinstance(p.value, float) and p.value == 0 for p in parts]
        return parts[1] if zeros[0] else parts[0] if zeros[1] else expr
    if expr.name in _ORDER or expr.name in ("maximum", "fmod"):
        a, b = line(parts[0], args), line(parts[1], args)
        if a is not None and b is not None and not any(b.steps):
            return _against(expr, a, b.start, space)
    return expr


def _truth(expr: Prim) -> Expr:
    settles = expr.name == "or"
    for a, b in (expr.args, expr.args[::-1]):
        if isinstance(a, Const):
            return Const(settles) if bool(a.value) is settles else b
    return expr


def _against(expr: Prim, a: Affine, number: int, space: Sequence[Dim]) -> Expr:
    """A line compared with a number, or what is left when it is divided by one."""
    low, high = a.ends(space) if a.steps else (a.start, a.start)
    if expr.name == "fmod":
        known = number > 0 and low >= 0 and all(step % number == 0 for step in a.steps)
        return Const(a.start % number) if known else expr
    if expr.name == "maximum":
        return Const(number) if high <= number else expr.args[0] if low >= number else expr
    ends = {_NUMBERS[expr.name](end, number) for end in (low, high)}
    sure = len(ends) == 1 and (expr.name not in ("eq", "ne") or not low <= number <= high)
    return Const(ends.pop()) if sure else expr


def renumbered(expr: Expr, given: Sequence[str | Const]) -> tuple[Expr, list[str]]:
    """The expression over the operands that are names and occur in it, each once; numbers in their places."""
    used = [a.index for a in walk(expr) if isinstance(a, Arg)]
    names = list(dict.fromkeys(v for i in used if isinstance(v := given[i], str)))

    def put(e: Expr) -> Expr:
        if isinstance(e, Arg):
            value = given[e.index]
            return value if isinstance(value, Const) else Arg(names.index(value))
        if isinstance(e, Prim):
            return Prim(e.name, tuple(put(a) for a in e.args))
        return Cast(put(e.arg), e.dtype) if isinstance(e, Cast) else e

    return put(expr), names


def without_divisions(plan: KernelPlan) -> KernelPlan:
    """The plan with `multiplied` work on elements; what is made once a row costs little."""
    axes, alone = plan.axes(), isinstance(plan.tile, PointTile)
    body = tuple(
        replace(s, expr=multiplied(s.expr))
        if isinstance(s, Compute) and (alone or axes[s.name] == "rc")
        else s
        for s in plan.body
    )
    return plan if body == plan.body else replace(plan, body=body)


def multiplied(expr: Expr) -> Expr:
    """Divisions by powers of two as products, of the same bits: division rounded to nearest is some twenty
    instructions and a branch, and no compiler after this one takes it away.
    """
    if isinstance(expr, Cast):
        return Cast(multiplied(expr.arg), expr.dtype)
    if not isinstance(expr, Prim):
        return expr
    args = [multiplied(a) for a in expr.args]
    if expr.name == "div" and isinstance(by := args[1], Const) and not isinstance(args[0], Const):
        half, power = math.frexp(float(by.value))
        if abs(half) == 0.5 and abs(power) < 100:
            return prim("mul", args[0], 1.0 / float(by.value))
    return Prim(expr.name, tuple(args))


_ORDER: Mapping[str, Callable[..., bool]] = {
    "eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b, "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b,
}  # fmt: skip
_NUMBERS: Mapping[str, Callable[..., int]] = {
    **_ORDER,
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b,
    "maximum": max, "minimum": min, "fmod": lambda a, b: int(math.fmod(a, b)) if b else 0,
    "and": lambda a, b: bool(a and b), "or": lambda a, b: bool(a or b), "not": lambda a: not a,
    "where": lambda c, a, b: a if c else b,
}  # fmt: skip
