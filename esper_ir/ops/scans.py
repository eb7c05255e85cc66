"""Running products, extrema and sums of exponentials along an axis. Float32 inside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from esper_ir.lazy import torch
from esper_ir.opdef import (
    Attrs,
    ByExpansion,
    Composite,
    Cotangents,
    Emit,
    InferRule,
    Number,
    Opaque,
    OpDef,
    Operand,
    Operands,
    Sample,
    Scan,
    Tolerance,
    Val,
    Vals,
    Wanted,
)
from esper_ir.ops.gradients import to, up
from esper_ir.ops.picking import DIM, resolve_axis
from esper_ir.ops.recurrence import REVERSE
from esper_ir.ops.reduction import only
from esper_ir.ops.rules import accept, tensor
from esper_ir.types import DType, TensorType

Types = Sequence[TensorType | Number]


def _infer(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    """A primitive: in a compute type, products in int64 too."""
    x = tensor(operands[0])
    accept([x], "float")
    return (x,)


def _infer_running_product(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x = tensor(operands[0])
    return (x,) if x.dtype is DType.int64 else _infer(operands, attrs)


def _infer_product(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    """Whole numbers are multiplied in int64."""
    x = tensor(operands[0])
    return (x if x.dtype.is_floating else TensorType(DType.int64, x.shape),)


def _infer_extremum(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x = tensor(operands[0])
    accept([x], "number")
    return x, TensorType(DType.int64, x.shape)


def _backwards(emit: Emit, op: str, x: Val, at: int) -> Val:
    """A scan from the other end."""
    return emit(op, x, dim=at, reverse=True)


def _ends(vjp: Any) -> Any:
    """The rule of a scan from the other end: that of the scan of what is read backwards."""

    def rule(
        emit: Emit, inputs: Operands, outputs: Vals, cotangents: Cotangents, attrs: Attrs, wanted: Wanted
    ) -> Cotangents:
        if not attrs["reverse"]:
            return vjp(emit, inputs, outputs, cotangents, attrs, wanted)
        at = attrs["dim"]
        turned = [emit("reverse", only(v), dim=at) for v in (inputs, outputs)]
        g = None if cotangents[0] is None else emit("reverse", cotangents[0], dim=at)
        made = vjp(emit, turned[:1], turned[1:], [g], {**attrs, "reverse": False}, wanted)[0]
        return [None if made is None else emit("reverse", made, dim=at)]

    return rule


def _vjp_product(
    emit: Emit, inputs: Operands, outputs: Vals, cotangents: Cotangents, attrs: Attrs, wanted: Wanted
) -> Cotangents:
    """sum over t >= i of g[t] y[t] / x[i] before the first zero of a row; at that zero the products without
    it; 0 behind it, since every product there holds the zero.
    """
    g, x, at = cotangents[0], only(inputs), attrs["dim"]
    if g is None or not wanted[0]:
        return [None]
    zero = emit("eq", x, 0.0)
    seen = emit("running_sum", emit("cast", zero, dtype=x.type.dtype), dim=at)
    first = emit("logical_and", zero, emit("eq", seen, 1.0))
    around = emit("running_product", emit("where", first, 1.0, x), dim=at)
    before = emit("div", _backwards(emit, "running_sum", emit("mul", g, outputs[0]), at), x)
    behind = emit("where", emit("ge", seen, 1.0), emit("mul", g, around), 0.0)
    hit = _backwards(emit, "running_sum", behind, at)
    return [emit("where", emit("eq", seen, 0.0), before, emit("where", first, hit, 0.0))]


def _vjp_logsumexp(
    emit: Emit, inputs: Operands, outputs: Vals, cotangents: Cotangents, attrs: Attrs, wanted: Wanted
) -> Cotangents:
    """exp(x[i]) sum over t >= i of g[t] exp(-y[t]), in logarithms, apart for positive and negative g."""
    g, x, at = cotangents[0], only(inputs), attrs["dim"]
    if g is None or not wanted[0]:
        return [None]
    parts = []
    for part in (g, emit("neg", g)):
        size = emit("log", emit("maximum", part, 0.0))
        behind = _backwards(emit, "running_logsumexp", emit("sub", size, outputs[0]), at)
        parts.append(emit("exp", emit("add", behind, x)))
    return [emit("sub", *parts)]


def _vjp_extremum(
    emit: Emit, inputs: Operands, outputs: Vals, cotangents: Cotangents, attrs: Attrs, wanted: Wanted
) -> Cotangents:
    g, x = cotangents[0], only(inputs)
    if g is None or not wanted[0]:
        return [None]
    zeros = emit("full", shape=x.type.shape, value=0.0, dtype=x.type.dtype)
    return [emit("scatter_add", zeros, outputs[1], g, dim=attrs["dim"])]


def _expand(primitive: str) -> Any:
    def expand(emit: Emit, inputs: Sequence[Operand], attrs: Attrs) -> Sequence[Val]:
        x = only(inputs)
        if not x.type.dtype.is_floating:
            return (emit(primitive, to(emit, x, DType.int64), **attrs),)
        return (to(emit, emit(primitive, up(emit, x), **attrs), x.type.dtype),)

    return expand


def _wide(call: str) -> Any:
    def reference(inputs: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
        short = inputs[0].is_floating_point() and inputs[0].dtype.itemsize == 2
        x, at = inputs[0].float() if short else inputs[0], attrs["dim"]
        made = getattr(torch, call)(x.flip(at) if attrs["reverse"] else x, at)
        made = made.to(inputs[0].dtype) if short else made
        return (made.flip(at) if attrs["reverse"] else made,)

    return reference


def _samples(dtypes: Sequence[str], low: float = -2.0, high: float = 2.0) -> tuple[Sample, ...]:
    rows = [((5, 7), {"dim": 1}), ((5, 7), {"dim": 0}), ((2, 3, 4), {"dim": -2})]
    return tuple(Sample((TensorType.of(d, s),), a, low, high) for d in dtypes for s, a in rows)


def _scan(
    name: str, call: str, lowering: Any, vjp: Any, samples: tuple[Sample, ...], infer: InferRule = _infer
) -> OpDef:
    return OpDef(
        name=name, infer=infer, reference=_wide(call), vjp=vjp, lowering=lowering, samples=samples,
        arity=(1, 1), params=(DIM, REVERSE), resolve=resolve_axis, cost=lambda i, o, a: o[0].numel,
        tolerance=Tolerance(4.0, "every step adds its rounding"), doc=f"torch.{call}",
    )  # fmt: skip


def _extremum(name: str) -> OpDef:
    return OpDef(
        name=name, infer=_infer_extremum, vjp=_vjp_extremum, lowering=Opaque(name), arity=(1, 1),
        reference=lambda i, a: tuple(getattr(torch, name)(i[0], a["dim"])), params=(DIM,),
        resolve=resolve_axis, cost=lambda i, o, a: o[0].numel, doc=f"torch.{name}: values and places",
        samples=_samples(("float32", "bfloat16", "float64", "int64")),
    )  # fmt: skip


BOTH, WIDE = ("float32", "bfloat16", "float64"), ("float32", "float64")
ZERO_ROW = Sample((TensorType.of("float32", (3, 5)),), {"dim": 1}, 0.0, 0.0)

OPS = (
    _scan("cumprod", "cumprod", Composite(_expand("running_product")), ByExpansion(),
          (*_samples((*BOTH, "int64", "bool"), -1.5, 1.5), ZERO_ROW), _infer_product),
    _scan("running_product", "cumprod", Scan("cumprod", "prod"), _ends(_vjp_product),
          _samples((*WIDE, "int64"), -1.5, 1.5), _infer_running_product),
    _scan("logcumsumexp", "logcumsumexp", Composite(_expand("running_logsumexp")), ByExpansion(),
          _samples(BOTH)),
    _scan("running_logsumexp", "logcumsumexp", Scan("logcumsumexp", "logsumexp"), _ends(_vjp_logsumexp),
          _samples(WIDE)),
    _extremum("cummax"),
    _extremum("cummin"),
)  # fmt: skip
