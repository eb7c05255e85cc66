"""Pointwise operators of two and three operands: arithmetic, extrema, comparisons, logic, selection."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

from esper_ir.derivative import ONE, ZERO
from esper_ir.diagnostics import EsperError
from esper_ir.lazy import torch
from esper_ir.opdef import (
    Attr,
    Attrs,
    InferRule,
    NotDifferentiable,
    Number,
    OpDef,
    Pointwise,
    Sample,
    Tolerance,
    VjpRule,
)
from esper_ir.ops.gradients import Derivatives, pointwise_vjp
from esper_ir.ops.rules import broadcast, call, elementwise, lift, pointwise_cost, result_type, tensor
from esper_ir.scalar import Arg, Const, Expr, Prim, prim, walk
from esper_ir.types import DType, TensorType

A, B, C, Y2 = Arg(0), Arg(1), Arg(2), Arg(2)
PAIRS: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (
    ((5, 7), (5, 7)),
    ((5, 7), (7,)),
    ((5, 1), (1, 7)),
    ((2, 3, 1), (4,)),
    ((), (3, 4)),
    ((1,), (1,)),
    ((0, 3), (1, 3)),
)


def samples(
    low: float, high: float, dtypes: Sequence[str], attrs: Attrs, number: Number | None
) -> tuple[Sample, ...]:
    """Every pair of shapes in float32, the first in the other dtypes, one mixed pair, a number on either
    side.
    """
    attrs = dict(attrs)
    out = [
        Sample((TensorType.of("float32", a), TensorType.of("float32", b)), attrs, low, high) for a, b in PAIRS
    ]
    first, second = PAIRS[1]
    out += [Sample((TensorType.of(d, first), TensorType.of(d, second)), attrs, low, high) for d in dtypes]
    if "bfloat16" in dtypes:
        mixed = (TensorType.of("bfloat16", first), TensorType.of("float32", second))
        out.append(Sample(mixed, attrs, low, high))
    if number is not None:
        out.append(Sample((TensorType.of("float32", first), number), attrs, low, high))
        out.append(Sample((number, TensorType.of("float32", first)), attrs, low, high))
    return tuple(out)


def binary(
    name: str,
    body: Callable[[Attrs], Expr] | None = None,
    *,
    out: str = "same",
    accepts: str = "any",
    low: float = -2.0,
    high: float = 2.0,
    dtypes: Sequence[str] = ("bfloat16", "float16", "float64", "int64"),
    derivatives: Derivatives | None = None,
    flat: str = "",
    number: Number | None = 1.5,
    reference: Callable[[Sequence[Any], Attrs], tuple[Any, ...]] | None = None,
    params: tuple[Attr, ...] = (),
    attrs: Attrs | None = None,
    commutative: bool = False,
    tolerance: Tolerance | None = None,
    doc: str = "",
) -> OpDef:
    """A record of two operands; without `body` it is the scalar primitive of the same name."""
    made: Callable[[Attrs], Expr] = body or (lambda a: prim(name, A, B))
    weight = sum(
        isinstance(e, Prim) for e in walk(made({p.name: p.default for p in params} | dict(attrs or {})))
    )
    vjp: VjpRule | NotDifferentiable = (
        NotDifferentiable(flat, constant=True) if flat else pointwise_vjp(made, 2, derivatives)
    )
    return OpDef(
        name=name,
        infer=elementwise(out, accepts),
        reference=reference or call(name),
        vjp=vjp,
        lowering=Pointwise(made),
        samples=samples(low, high, dtypes, attrs or {}, number),
        arity=(2, 2),
        params=params,
        tolerance=tolerance or Tolerance(),
        cost=pointwise_cost(max(1, weight)),
        commutative=commutative,
        doc=doc or f"torch.{name}, element by element with broadcasting",
    )


def _python(function: Callable[[Any, Any], Any]) -> Callable[[Sequence[Any], Attrs], tuple[Any, ...]]:
    return lambda inputs, attrs: (function(inputs[0], inputs[1]),)


def _remainder(attrs: Attrs) -> Expr:
    """Sign of the divisor: fmod, moved by the divisor when the signs differ."""
    rest = prim("fmod", A, B)
    # Zeros without a point: a fraction would have integers computed in float32.
    differs = prim("ne", prim("lt", rest, 0), prim("lt", B, 0))
    return prim("where", prim("and", prim("ne", rest, 0), differs), prim("add", rest, B), rest)


def _hypot(attrs: Attrs) -> Expr:
    """Scaled by the larger operand, so that squares do not overflow."""
    a, b = prim("abs", A), prim("abs", B)
    large, small = prim("maximum", a, b), prim("minimum", a, b)
    ratio = prim("div", small, large)
    scaled = prim("mul", large, prim("sqrt", prim("add", 1.0, prim("mul", ratio, ratio))))
    infinite = prim("or", prim("eq", a, math.inf), prim("eq", b, math.inf))
    return prim("where", infinite, math.inf, prim("where", prim("eq", large, 0.0), large, scaled))


def _where_infer(operands: Sequence[TensorType | Number], attrs: Attrs) -> tuple[TensorType, ...]:
    condition = operands[0]
    if not isinstance(condition, TensorType) or condition.dtype is not DType.bool:
        raise EsperError("E0205", f"the condition is {condition}", hint="a bool tensor is needed")
    shapes = [o.shape for o in operands if isinstance(o, TensorType)]
    return (TensorType(result_type(operands[1:]), broadcast(shapes)),)


def _where_reference(inputs: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
    condition, a, b = inputs
    plain = not isinstance(a, torch.Tensor) and not isinstance(b, torch.Tensor)
    return (torch.where(condition, *((a, b) if plain else lift([a, b]))),)


def _where_sample(*shapes: tuple[int, ...], dtype: str = "float32") -> Sample:
    c, a, b = shapes
    return Sample((TensorType.of("bool", c), TensorType.of(dtype, a), TensorType.of(dtype, b)))


WHERE = OpDef(
    name="where",
    infer=_where_infer,
    reference=_where_reference,
    vjp=pointwise_vjp(
        lambda a: prim("where", A, B, C),
        3,
        lambda a: (ZERO, prim("where", A, ONE, ZERO), prim("where", A, ZERO, ONE)),
    ),
    lowering=Pointwise(lambda a: prim("where", A, B, C)),
    samples=(
        _where_sample((5, 7), (5, 7), (5, 7)),
        _where_sample((5, 1), (7,), (5, 7)),
        _where_sample((5, 7), (5, 7), (7,), dtype="bfloat16"),
        _where_sample((3,), (), (3,)),
        Sample((TensorType.of("bool", (4,)), TensorType.of("float32", (4,)), 0.5)),
        Sample((TensorType.of("bool", (4,)), 1.0, TensorType.of("bfloat16", (4,)))),
    ),
    arity=(3, 3),
    cost=pointwise_cost(1),
    doc="torch.where(condition, a, b): a branch that is not taken has no influence, NaN or not",
)


def _lerp(attrs: Attrs) -> Expr:
    """torch's two forms, exact at both ends."""
    difference = prim("sub", B, A)
    near = prim("add", A, prim("mul", C, difference))
    far = prim("sub", B, prim("mul", difference, prim("sub", 1.0, C)))
    return prim("where", prim("lt", prim("abs", C), 0.5), near, far)


def _lerp_derivatives(attrs: Attrs) -> tuple[Expr, ...]:
    return prim("sub", 1.0, C), C, prim("sub", B, A)


def _triple(*shapes: tuple[int, ...], dtype: str = "float32", attrs: Attrs | None = None) -> Sample:
    return Sample(tuple(TensorType.of(dtype, s) for s in shapes), dict(attrs or {}), 0.5, 2.0)


def _infer_three(alike: bool) -> InferRule:
    plain = elementwise("same", "float")

    def infer(operands: Sequence[TensorType | Number], attrs: Attrs) -> tuple[TensorType, ...]:
        types = [tensor(o, i) for i, o in enumerate(operands)]
        if alike and len({t.dtype for t in types}) > 1:
            found = " and ".join(str(t) for t in types)
            raise EsperError("E0205", f"operands {found} differ in dtype", hint="add a cast")
        return plain(operands, attrs)

    return infer


def ternary(name: str, body: Callable[[Attrs], Expr], reference: Callable[..., Any], *,
            derivatives: Derivatives | None = None, params: tuple[Attr, ...] = ()) -> OpDef:  # fmt: skip
    """A floating record of three operands."""
    attrs = {"value": 0.5} if params else {}
    return OpDef(
        name=name,
        infer=_infer_three(name == "lerp"),
        reference=lambda inputs, a: (reference(*inputs, **{p.name: a[p.name] for p in params}),),
        vjp=pointwise_vjp(body, 3, derivatives),
        lowering=Pointwise(body),
        samples=(
            _triple((5, 7), (5, 7), (5, 7), attrs=attrs),
            _triple((5, 1), (7,), (5, 7), attrs=attrs),
            _triple((5, 7), (7,), (1, 7), dtype="bfloat16", attrs=attrs),
            _triple((), (3,), (), attrs=attrs),
        ),
        arity=(3, 3),
        params=params,
        cost=pointwise_cost(3),
        doc=f"torch.{name}",
    )


VALUE = Attr("value", "float", 1.0, doc="factor of the product or quotient")
TRUTH = "the result is a truth value"
NUMBERS = ("bfloat16", "float64", "int64", "bool")

OPS = (
    binary("add", reference=_python(operator.add), commutative=True),
    binary("sub", reference=_python(operator.sub), accepts="number"),
    binary("mul", reference=_python(operator.mul), commutative=True),
    binary("div", reference=_python(operator.truediv), out="float", low=0.5, high=2.5,
           derivatives=lambda a: (prim("div", 1.0, B), prim("neg", prim("div", Arg(2), B)))),
    binary("pow", reference=_python(operator.pow), accepts="number", low=0.3, high=2.5,
           dtypes=("bfloat16", "float64"), number=2.5,
           tolerance=Tolerance(4.0, "exponentiation magnifies the rounding of its operands")),
    binary("fmod", accepts="number", low=0.5, high=4.0, dtypes=("bfloat16", "float64")),
    binary("remainder", _remainder, accepts="number", low=0.5, high=4.0, dtypes=("bfloat16", "float64"),
           derivatives=lambda a: (Const(1.0), prim("neg", prim("floor", prim("div", A, B))))),
    binary("atan2", out="float", dtypes=("bfloat16", "float64")),
    binary("hypot", _hypot, accepts="float", dtypes=("bfloat16", "float64"), commutative=True,
           derivatives=lambda a: (prim("div", A, Arg(2)), prim("div", B, Arg(2)))),
    binary("maximum", commutative=True),
    binary("minimum", commutative=True),
    *(binary(n, out="bool", flat=TRUTH, dtypes=NUMBERS, commutative=n in ("eq", "ne"))
      for n in ("eq", "ne", "lt", "le", "gt", "ge")),
    *(binary(f"logical_{n}", lambda a, n=n: prim(n, A, B), out="bool", flat=TRUTH, dtypes=("bool", "int64"),
             commutative=True, number=None) for n in ("and", "or", "xor")),
    WHERE,
    ternary("lerp", _lerp, lambda a, b, c: torch.lerp(a, b, c), derivatives=_lerp_derivatives),
    ternary("addcmul", lambda a: prim("add", A, prim("mul", prim("mul", a["value"], B), C)),
            lambda a, b, c, value: torch.addcmul(a, b, c, value=value), params=(VALUE,)),
    ternary("addcdiv", lambda a: prim("add", A, prim("div", prim("mul", a["value"], B), C)),
            lambda a, b, c, value: torch.addcdiv(a, b, c, value=value), params=(VALUE,)),
)  # fmt: skip
