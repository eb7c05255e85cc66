"""Pointwise operators of one operand."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from esper_ir.derivative import FLAT, UNARY
from esper_ir.lazy import torch
from esper_ir.opdef import (
    Attr,
    Attrs,
    Composite,
    Cotangents,
    Emit,
    InferRule,
    NotDifferentiable,
    Number,
    OpDef,
    Operands,
    Pointwise,
    Sample,
    Tolerance,
    Vals,
    Wanted,
)
from esper_ir.ops.gradients import Derivatives, pointwise_vjp, to, val
from esper_ir.ops.rules import (
    accept,
    call,
    demand,
    elementwise,
    pointwise_cost,
    result_type,
    tensor,
    torch_dtype,
)
from esper_ir.scalar import Arg, Cast, Const, Expr, Prim, prim, walk
from esper_ir.types import TensorType

X = Arg(0)
SHAPES: tuple[tuple[int, ...], ...] = ((5, 7), (), (1,), (2, 1, 33), (0, 3))


def samples(
    low: float, high: float, attrs: Attrs | None = None, dtypes: Sequence[str] = ()
) -> tuple[Sample, ...]:
    """One case per shape in float32, and the first shape in the other dtypes."""
    kinds = [("float32", s) for s in SHAPES] + [(d, SHAPES[0]) for d in dtypes]
    return tuple(Sample((TensorType.of(d, s),), dict(attrs or {}), low, high) for d, s in kinds)


def _always(derivatives: tuple[Expr, ...], attrs: Attrs) -> tuple[Expr, ...]:
    return derivatives


def unary(
    name: str,
    body: Callable[[Attrs], Expr] | None = None,
    *,
    low: float = -2.0,
    high: float = 2.0,
    out: str = "float",
    accepts: str = "any",
    dtypes: Sequence[str] = ("bfloat16", "float16", "float64"),
    derivatives: Derivatives | None = None,
    flat: str = "",
    params: tuple[Attr, ...] = (),
    cases: Sequence[Attrs] = ({},),
    reference: Callable[[Sequence[Any], Attrs], tuple[Any, ...]] | None = None,
    tolerance: Tolerance | None = None,
    check: tuple[Callable[[Attrs], bool], str] | None = None,
    infer: InferRule | None = None,
    doc: str = "",
) -> OpDef:
    """A record of one operand; without `body` it is the scalar primitive of the same name. The derivative
    then uses the result where that is shorter, as torch does. `flat`: the reason why there is no gradient.
    """
    made: Callable[[Attrs], Expr] = body or (lambda attrs: prim(name, X))
    if body is None and derivatives is None and name in UNARY:
        short = UNARY[name](X, Arg(1))
        derivatives = partial(_always, (short,))
    weight = sum(
        isinstance(e, Prim) for e in walk(made({p.name: p.default for p in params} | dict(cases[0])))
    )
    return OpDef(
        name=name,
        infer=infer or elementwise(out, accepts),
        reference=reference or call(name),
        vjp=NotDifferentiable(flat, constant=True) if flat else pointwise_vjp(made, 1, derivatives),
        lowering=Pointwise(made),
        samples=tuple(s for c in cases for s in samples(low, high, c, dtypes)),
        arity=(1, 1),
        params=params,
        tolerance=tolerance or Tolerance(),
        resolve=demand(*check) if check else None,
        cost=pointwise_cost(max(1, weight)),
        doc=doc or f"torch.{name}, element by element",
    )


def _infer_cast(operands: Sequence[TensorType | Number], attrs: Attrs) -> tuple[TensorType, ...]:
    return (TensorType(attrs["dtype"], tensor(operands[0]).shape),)


def _vjp_cast(
    emit: Emit, inputs: Operands, outputs: Vals, cotangents: Cotangents, attrs: Attrs, wanted: Wanted
) -> Cotangents:
    g = cotangents[0]
    return [None if g is None or not wanted[0] else to(emit, g, val(inputs[0]).type.dtype)]


def _cast_sample(source: str, target: str) -> Sample:
    return Sample((TensorType.of(source, (5, 7)),), {"dtype": target}, -3.0, 3.0)


CAST = OpDef(
    name="cast",
    infer=_infer_cast,
    reference=lambda inputs, attrs: (inputs[0].to(torch_dtype(attrs["dtype"])),),
    vjp=_vjp_cast,
    lowering=Pointwise(lambda attrs: Cast(X, attrs["dtype"])),
    samples=(
        _cast_sample("float32", "bfloat16"),
        _cast_sample("bfloat16", "float32"),
        _cast_sample("float32", "float16"),
        _cast_sample("float64", "float32"),
        _cast_sample("int64", "float32"),
        _cast_sample("float32", "int32"),
        _cast_sample("float32", "bool"),
        _cast_sample("bool", "float32"),
    ),
    arity=(1, 1),
    params=(Attr("dtype", "dtype", doc="element type of the result"),),
    cost=pointwise_cost(0),
    doc="Tensor.to(dtype): round to nearest even between floating types, truncate to integers",
)


DETACH = OpDef(
    name="detach",
    infer=lambda operands, attrs: (tensor(operands[0]),),
    reference=lambda inputs, attrs: (inputs[0].detach(),),
    vjp=NotDifferentiable("the result counts as a constant", constant=True),
    lowering=Composite(
        lambda emit, inputs, attrs: (emit("cast", inputs[0], dtype=val(inputs[0]).type.dtype),)
    ),
    samples=samples(-2.0, 2.0, dtypes=("bfloat16", "float64", "int64")),
    arity=(1, 1),
    cost=pointwise_cost(0),
    doc="torch.Tensor.detach: the value, without its gradient",
)


def _square(attrs: Attrs) -> Expr:
    return prim("mul", X, X)


def _log10(attrs: Attrs) -> Expr:
    return prim("mul", prim("log", X), 1.0 / math.log(10.0))


def _frac(attrs: Attrs) -> Expr:
    return prim("sub", X, prim("trunc", X))


def _clamp(attrs: Attrs) -> Expr:
    out: Expr = X
    if attrs["min"] is not None:
        out = prim("maximum", out, attrs["min"])
    return out if attrs["max"] is None else prim("minimum", out, attrs["max"])


def _bounded(attrs: Attrs) -> bool:
    return attrs["min"] is not None or attrs["max"] is not None


def _infer_clamp(operands: Sequence[TensorType | Number], attrs: Attrs) -> tuple[TensorType, ...]:
    """Bounds promote as numbers do: an integer tensor and a fraction give float32."""
    x = tensor(operands[0])
    accept(operands, "number")
    bounds = [v for v in (attrs["min"], attrs["max"]) if v is not None]
    return (TensorType(result_type([x, *bounds]), x.shape),)


def _clamp_derivative(attrs: Attrs) -> tuple[Expr]:
    """torch passes the cotangent at the bounds themselves."""
    out: Expr = Const(1.0)
    if attrs["min"] is not None:
        out = prim("where", prim("ge", X, attrs["min"]), out, 0.0)
    return (out if attrs["max"] is None else prim("where", prim("le", X, attrs["max"]), out, 0.0),)


CONSTANT = "the result is piecewise constant"
TRUTH = "the result is a truth value"
ANYNUM = ("bfloat16", "float64", "int32", "int64")

OPS = (
    CAST,
    DETACH,
    unary("neg", out="same", accepts="number", dtypes=ANYNUM),
    unary("abs", out="same", accepts="number", dtypes=ANYNUM),
    unary("sign", out="same", flat=CONSTANT, dtypes=ANYNUM),
    unary("square", _square, out="same", accepts="number", dtypes=ANYNUM,
          derivatives=lambda a: (prim("mul", 2.0, X),)),
    unary("reciprocal", lambda a: prim("div", 1.0, X), low=0.5, high=3.0,
          derivatives=lambda a: (prim("neg", prim("mul", Arg(1), Arg(1))),)),
    unary("log10", _log10, low=0.1, high=5.0,
          derivatives=lambda a: (prim("div", 1.0, prim("mul", X, math.log(10.0))),)),
    unary("frac", _frac, out="same", accepts="float"),
    unary("clamp", _clamp, check=(_bounded, "at least one of min and max"), infer=_infer_clamp,
          accepts="number", derivatives=_clamp_derivative,
          params=(Attr("min", "number", None, doc="lower bound"),
                  Attr("max", "number", None, doc="upper bound")),
          cases=({"min": -0.5, "max": 1.0}, {"min": 0.0}, {"max": 0.25}),
          reference=lambda i, a: (torch.clamp(i[0], a["min"], a["max"]),)),
    *(unary(n, low=-2.0, high=2.0) for n in (
        "exp", "exp2", "expm1", "sin", "cos", "sinh", "cosh", "tanh", "asinh", "atan", "erf", "erfc",
        "sigmoid")),
    unary("tan", low=-1.2, high=1.2),
    *(unary(n, low=0.1, high=5.0) for n in ("log", "log2", "sqrt", "rsqrt")),
    unary("log1p", low=-0.5, high=4.0),
    *(unary(n, low=-0.9, high=0.9) for n in ("asin", "acos", "atanh")),
    unary("acosh", low=1.1, high=4.0),
    *(unary(n, out="same", accepts="float", flat=CONSTANT, low=-5.0, high=5.0)
      for n in ("floor", "ceil", "round", "trunc")),
    unary("isnan", out="bool", accepts="float", flat=TRUTH),
    unary("isinf", lambda a: prim("eq", prim("abs", X), math.inf), out="bool", accepts="float", flat=TRUTH),
    unary("isfinite", lambda a: prim("lt", prim("abs", X), math.inf), out="bool", accepts="float",
          flat=TRUTH),
    unary("logical_not", lambda a: prim("not", X), out="bool", flat=TRUTH, dtypes=("bool", "int64")),
)  # fmt: skip
assert {"sign", "floor"} <= FLAT  # the scalar language agrees that these are flat
