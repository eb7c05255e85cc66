"""The closed scalar language: bodies of pointwise and reduction operators, over values of one element.

An expression is computed in the compute type of its operands (float32 for bfloat16 and float16); rounding to
a stored type happens only at `Cast` and where a graph value ends. Spelling for a target belongs to
forge/emit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from esper_ir.types import DType

# name -> number of operands. Semantics are torch's (NaN propagates through maximum/minimum).
PRIMITIVES: dict[str, int] = {
    "neg": 1, "abs": 1, "sign": 1, "exp": 1, "exp2": 1, "expm1": 1, "log": 1, "log2": 1, "log1p": 1,
    "sqrt": 1, "rsqrt": 1, "sin": 1, "cos": 1, "tan": 1, "asin": 1, "acos": 1, "atan": 1,
    "sinh": 1, "cosh": 1, "tanh": 1, "asinh": 1, "acosh": 1, "atanh": 1, "erf": 1, "erfc": 1, "sigmoid": 1,
    "floor": 1, "ceil": 1, "round": 1, "trunc": 1, "isnan": 1, "not": 1,
    "add": 2, "sub": 2, "mul": 2, "div": 2, "pow": 2, "fmod": 2, "atan2": 2, "maximum": 2, "minimum": 2,
    "eq": 2, "ne": 2, "lt": 2, "le": 2, "gt": 2, "ge": 2, "and": 2, "or": 2, "xor": 2,
    "bitand": 2, "bitor": 2, "bitxor": 2, "shl": 2, "shr": 2, "quotient": 2, "where": 3,
}  # fmt: skip
INTEGRAL = frozenset({"bitand", "bitor", "bitxor", "shl", "shr", "quotient"})
"""Of whole numbers and truth values only; a quotient is cut off towards 0, and 0 where the divisor is."""
BOOLEAN = frozenset({"isnan", "not", "eq", "ne", "lt", "le", "gt", "ge", "and", "or", "xor"})


@dataclass(frozen=True)
class Arg:
    """Operand number `index` of the operator."""

    index: int


@dataclass(frozen=True)
class Const:
    """A Python number, used in the compute type of the expression around it."""

    value: float | int | bool


@dataclass(frozen=True)
class Prim:
    name: str
    args: tuple[Expr, ...]


@dataclass(frozen=True)
class Cast:
    """Round to `dtype` (and back to its compute type)."""

    arg: Expr
    dtype: DType


Expr = Arg | Const | Prim | Cast


def prim(name: str, *args: Expr | float | int | bool) -> Prim:
    """Build a primitive, wrapping Python numbers; arity is checked."""
    if PRIMITIVES.get(name) != len(args):
        raise ValueError(f"scalar primitive {name!r} with {len(args)} operands")
    return Prim(name, tuple(a if isinstance(a, (Arg, Const, Prim, Cast)) else Const(a) for a in args))


def walk(expr: Expr) -> list[Expr]:
    """All sub-expressions, operands before users."""
    if isinstance(expr, Prim):
        return [s for a in expr.args for s in walk(a)] + [expr]
    if isinstance(expr, Cast):
        return [*walk(expr.arg), expr]
    return [expr]


def substitute(expr: Expr, operands: Sequence[Expr]) -> Expr:
    """Replace every `Arg(i)` by `operands[i]`."""
    if isinstance(expr, Arg):
        return operands[expr.index]
    if isinstance(expr, Prim):
        return Prim(expr.name, tuple(substitute(a, operands) for a in expr.args))
    if isinstance(expr, Cast):
        return Cast(substitute(expr.arg, operands), expr.dtype)
    return expr


def render(expr: Expr, name: Callable[[int], str] = "a{}".format) -> str:
    """Readable text of an expression; `name` gives the text of an operand."""
    if isinstance(expr, Arg):
        return name(expr.index)
    if isinstance(expr, Const):
        return repr(expr.value)
    if isinstance(expr, Cast):
        return f"{expr.dtype.value}({render(expr.arg, name)})"
    return f"{expr.name}({', '.join(render(a, name) for a in expr.args)})"
