"""Building blocks of gradient rules.

Cotangents have the dtype of the value they belong to. A rule of more than one rounding step computes in the
compute type (float32 for bfloat16) and rounds once at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from esper_ir.derivative import differentiate, fold, is_const, mul
from esper_ir.opdef import Attrs, Cotangents, Emit, Operand, Operands, Val, Vals, VjpRule, Wanted
from esper_ir.scalar import Arg, Cast, Const, Expr, Prim, substitute, walk
from esper_ir.types import DType, TensorType

# Scalar primitives whose operator has another name.
OPERATOR = {"not": "logical_not", "and": "logical_and", "or": "logical_or", "xor": "logical_xor"}
# Primitives that round nothing.
EXACT = frozenset({
    "neg", "abs", "sign", "maximum", "minimum", "where", "floor", "ceil", "round", "trunc", "isnan", "not",
    "eq", "ne", "lt", "le", "gt", "ge", "and", "or", "xor",
})  # fmt: skip


def val(operand: Operand) -> Val:
    """An operand that the shape rule has shown to be a value."""
    assert isinstance(operand, Val)
    return operand


def to(emit: Emit, value: Val, dtype: DType) -> Val:
    """Cast unless it is that type already."""
    return value if value.type.dtype is dtype else emit("cast", value, dtype=dtype)


def up(emit: Emit, value: Val) -> Val:
    """The value in its compute type."""
    return to(emit, value, value.type.dtype.compute)


def unbroadcast(emit: Emit, value: Val, like: TensorType) -> Val:
    """Sum over the dimensions along which `like` was broadcast to the shape of `value`."""
    shape = value.type.shape
    if shape == like.shape:
        return value
    lead = len(shape) - like.rank
    stretched = [i + lead for i, d in enumerate(like.shape) if d != shape[i + lead]]
    out = emit("sum", value, dims=(*range(lead), *stretched), keepdim=False)
    return out if out.type.shape == like.shape else emit("reshape", out, shape=like.shape)


def broadcast_to(emit: Emit, value: Val, like: TensorType) -> Val:
    return value if value.type.shape == like.shape else emit("expand", value, shape=like.shape)


def restore(emit: Emit, value: Val, like: TensorType, dims: Sequence[int], keepdim: bool) -> Val:
    """Give a reduced value back the dimensions that were reduced, with size 1."""
    if keepdim or not dims:
        return value
    shape = tuple(type(d).of(1) if i in dims else d for i, d in enumerate(like.shape))
    return emit("reshape", value, shape=shape)


def emit_expr(emit: Emit, expr: Expr, operands: Sequence[Operand], dtype: DType) -> Operand:
    """The expression as operators over `operands`; `dtype` is the type of numbers that stand alone."""
    if isinstance(expr, Arg):
        return operands[expr.index]
    if isinstance(expr, Const):
        return expr.value
    if isinstance(expr, Cast):
        inner = emit_expr(emit, expr.arg, operands, dtype)
        return to(emit, inner, expr.dtype) if isinstance(inner, Val) else inner
    args = [emit_expr(emit, a, operands, dtype) for a in expr.args]
    if expr.name == "where" and not any(isinstance(a, Val) for a in args[1:]):
        args[1] = emit("full", shape=(), value=args[1], dtype=dtype)
    return emit(OPERATOR.get(expr.name, expr.name), *args)


def _one_rounding(expr: Expr) -> bool:
    return sum(isinstance(e, Prim) and e.name not in EXACT for e in walk(expr)) <= 1


def apply(
    emit: Emit, expr: Expr, operands: Sequence[Operand], like: TensorType, rank_type: TensorType
) -> Val:
    """Compute a cotangent expression for an operand of type `like`; `rank_type` is the type of the result of
    the node.
    """
    used = {e.index for e in walk(expr) if isinstance(e, Arg)}
    floating = {
        v.type.dtype
        for i, v in enumerate(operands)
        if i in used and isinstance(v, Val) and v.type.dtype.is_floating
    }
    direct = floating == {like.dtype} and like.shape == rank_type.shape and _one_rounding(expr)
    dtype = like.dtype if direct else rank_type.dtype.compute
    lifted = [
        to(emit, v, dtype) if i in used and isinstance(v, Val) and v.type.dtype.is_floating else v
        for i, v in enumerate(operands)
    ]
    value = emit_expr(emit, expr, lifted, dtype)
    assert isinstance(value, Val)
    return to(emit, unbroadcast(emit, value, like), like.dtype)


Derivatives = Callable[[Attrs], Sequence[Expr | None]]
"""Derivative per operand, over Arg(0..n-1) for the operands and Arg(n) for the result; None: from the
body.
"""


def pointwise_vjp(
    body: Callable[[Attrs], Expr], arity: int, derivatives: Derivatives | None = None
) -> VjpRule:
    """Gradient rule of an element-by-element operator from its body, or from derivatives given by hand."""

    def rule(
        emit: Emit, inputs: Operands, outputs: Vals, cotangents: Cotangents, attrs: Attrs, wanted: Wanted
    ) -> Cotangents:
        g = cotangents[0]
        found: list[Val | None] = [None] * len(inputs)
        if g is None:
            return found
        given = list(derivatives(attrs)) if derivatives else [None] * len(inputs)
        operands = [*inputs, outputs[0], g]
        known = [Arg(i) if isinstance(v, Val) else Const(v) for i, v in enumerate(operands)]
        for i, operand in enumerate(inputs):
            if not wanted[i] or not isinstance(operand, Val):
                continue
            by_hand = given[i] if i < len(given) else None
            if by_hand is None:
                expr = differentiate(substitute(body(attrs), known), i)
            else:
                expr = substitute(by_hand, known)
            total = fold(mul(Arg(len(inputs) + 1), fold(expr)))
            if not is_const(total, 0):
                found[i] = apply(emit, total, operands, operand.type, outputs[0].type)
        return found

    return rule
