"""Derivatives of scalar expressions, and the small algebra that keeps them short.

Used once per operator to make its gradient rule; the result is again an expression of the closed scalar
language.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

from esper_ir.scalar import BOOLEAN, INTEGRAL, Arg, Cast, Const, Expr, Prim, prim

ZERO, ONE = Const(0.0), Const(1.0)


def _log(value: float) -> float:
    return math.log(value) if value > 0 else (-math.inf if value == 0 else math.nan)


FOLD: dict[str, Callable[..., Any]] = {
    "neg": operator.neg, "add": operator.add, "sub": operator.sub, "mul": operator.mul, "log": _log,
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt,
    "ge": operator.ge,
    "isnan": lambda a: a != a,
    "not": operator.not_, "and": lambda a, b: bool(a and b), "or": lambda a, b: bool(a or b),
}  # fmt: skip


def fold(expr: Expr) -> Expr:
    """Parts that have numbers only, computed; a selection by a number decided."""
    if not isinstance(expr, Prim):
        return Cast(fold(expr.arg), expr.dtype) if isinstance(expr, Cast) else expr
    args = tuple(fold(a) for a in expr.args)
    if expr.name == "where" and isinstance(args[0], Const):
        return args[1] if args[0].value else args[2]
    rule = FOLD.get(expr.name)
    numbers = [a.value for a in args if isinstance(a, Const)]
    if rule is None or len(numbers) < len(args):
        return Prim(expr.name, args)
    return Const(rule(*numbers))


def is_const(expr: Expr, value: float) -> bool:
    return isinstance(expr, Const) and expr.value == value


def mul(a: Expr, b: Expr) -> Expr:
    """a * b, with factors 0, 1, -1 removed and selections kept outermost: a branch that is not taken stays
    out of the product, so that an infinite cotangent does not meet its zero.
    """
    if is_const(a, 0) or is_const(b, 0):
        return ZERO
    if is_const(a, 1):
        return b
    if is_const(b, 1):
        return a
    if is_const(b, -1):
        return neg(a)
    if isinstance(b, Prim) and b.name == "where":
        return where(b.args[0], mul(a, b.args[1]), mul(a, b.args[2]))
    if isinstance(a, Prim) and a.name == "where":
        return where(a.args[0], mul(a.args[1], b), mul(a.args[2], b))
    if isinstance(b, Prim) and b.name == "neg":
        return neg(mul(a, b.args[0]))
    if isinstance(b, Prim) and b.name == "div":
        return prim("div", mul(a, b.args[0]), b.args[1])
    return prim("mul", a, b)


def add(a: Expr, b: Expr) -> Expr:
    if is_const(a, 0):
        return b
    if is_const(b, 0):
        return a
    return prim("add", a, b)


def neg(a: Expr) -> Expr:
    if isinstance(a, Const):
        return Const(-a.value)
    return a.args[0] if isinstance(a, Prim) and a.name == "neg" else prim("neg", a)


def where(condition: Expr, a: Expr, b: Expr) -> Expr:
    return a if a == b else prim("where", condition, a, b)


def square(a: Expr) -> Expr:
    return prim("mul", a, a)


def _one_minus(a: Expr) -> Expr:
    return prim("sub", 1.0, a)


Unary = Callable[[Expr, Expr], Expr]

# name -> derivative in terms of the operand x and the value y.
UNARY: dict[str, Unary] = {
    "neg": lambda x, y: Const(-1.0),
    "abs": lambda x, y: prim("sign", x),
    "exp": lambda x, y: y,
    "exp2": lambda x, y: prim("mul", y, math.log(2.0)),
    "expm1": lambda x, y: prim("add", y, 1.0),
    "log": lambda x, y: prim("div", 1.0, x),
    "log2": lambda x, y: prim("div", 1.0, prim("mul", x, math.log(2.0))),
    "log1p": lambda x, y: prim("div", 1.0, prim("add", x, 1.0)),
    "sqrt": lambda x, y: prim("div", 0.5, y),
    "rsqrt": lambda x, y: prim("mul", -0.5, prim("mul", y, square(y))),
    "sin": lambda x, y: prim("cos", x),
    "cos": lambda x, y: neg(prim("sin", x)),
    "tan": lambda x, y: prim("add", square(y), 1.0),
    "asin": lambda x, y: prim("rsqrt", _one_minus(square(x))),
    "acos": lambda x, y: neg(prim("rsqrt", _one_minus(square(x)))),
    "atan": lambda x, y: prim("div", 1.0, prim("add", square(x), 1.0)),
    "sinh": lambda x, y: prim("cosh", x),
    "cosh": lambda x, y: prim("sinh", x),
    "tanh": lambda x, y: _one_minus(square(y)),
    "asinh": lambda x, y: prim("rsqrt", prim("add", square(x), 1.0)),
    "acosh": lambda x, y: prim("rsqrt", prim("mul", prim("sub", x, 1.0), prim("add", x, 1.0))),
    "atanh": lambda x, y: prim("div", 1.0, _one_minus(square(x))),
    "erf": lambda x, y: prim("mul", 2.0 / math.sqrt(math.pi), prim("exp", neg(square(x)))),
    "erfc": lambda x, y: prim("mul", -2.0 / math.sqrt(math.pi), prim("exp", neg(square(x)))),
    "sigmoid": lambda x, y: prim("mul", y, _one_minus(y)),
}
FLAT = frozenset({"sign", "floor", "ceil", "round", "trunc"}) | BOOLEAN | INTEGRAL


def _pow(a: Expr, b: Expr, y: Expr) -> tuple[Expr, Expr]:
    """d(a^b): b a^(b-1), zero where b is 0; a^b log(a), zero where a is 0 and b is not negative."""
    if isinstance(b, Const):
        power = float(b.value)
        if power in (0, 1):
            return Const(power), ZERO
        inner = a if power == 2 else prim("pow", a, power - 1.0)
        return mul(Const(power), inner), ZERO
    base = where(prim("eq", b, 0.0), ZERO, mul(b, prim("pow", a, prim("sub", b, 1.0))))
    at_zero = prim("and", prim("eq", a, 0.0), prim("ge", b, 0.0))
    return base, where(at_zero, ZERO, prim("mul", y, prim("log", a)))


def _extremum(a: Expr, b: Expr, name: str) -> tuple[Expr, Expr]:
    """As in torch: equal operands share the cotangent, and both get all of it where one is NaN."""
    under, over = prim("le", a, b), prim("ge", a, b)
    if name == "minimum":
        under, over = over, under
    half = Const(0.5)
    return where(under, where(over, half, ZERO), ONE), where(over, where(under, half, ZERO), ONE)


def partials(expr: Prim) -> tuple[Expr, ...]:
    """Derivative of a primitive with respect to each operand."""
    name, args = expr.name, expr.args
    if name in FLAT:
        return (ZERO,) * len(args)
    if name in UNARY:
        return (UNARY[name](args[0], expr),)
    if name == "where":
        return ZERO, where(args[0], ONE, ZERO), where(args[0], ZERO, ONE)
    a, b = args
    if name in ("maximum", "minimum"):
        return _extremum(a, b, name)
    if name == "pow":
        return _pow(a, b, expr)
    if name == "atan2":
        norm = prim("add", square(a), square(b))
        norm = where(prim("eq", norm, 0.0), ONE, norm)  # zero at the origin, as in torch
        return prim("div", b, norm), prim("div", neg(a), norm)
    table = {
        "add": (ONE, ONE),
        "sub": (ONE, Const(-1.0)),
        "mul": (b, a),
        "div": (prim("div", 1.0, b), prim("div", neg(expr), b)),
        "fmod": (ONE, neg(prim("trunc", prim("div", a, b)))),
    }
    return table[name]


def differentiate(expr: Expr, index: int) -> Expr:
    """Derivative of an expression with respect to `Arg(index)` (forward mode: no value is needed twice)."""
    if isinstance(expr, Arg):
        return ONE if expr.index == index else ZERO
    if isinstance(expr, Cast):
        return differentiate(expr.arg, index)
    if isinstance(expr, Const):
        return ZERO
    inner = [differentiate(a, index) for a in expr.args]
    if expr.name == "where":
        return where(expr.args[0], inner[1], inner[2])
    if all(is_const(d, 0) for d in inner):
        return ZERO
    total: Expr = ZERO
    for partial, d in zip(partials(expr), inner, strict=True):
        total = add(total, mul(d, partial))
    return total
