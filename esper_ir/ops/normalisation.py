"""Normalisations: softmax along one axis, layer and RMS norm over trailing axes. Composites, float32
inside.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from esper_ir.diagnostics import EsperError
from esper_ir.lazy import functional
from esper_ir.opdef import (
    Attr,
    Attrs,
    Composite,
    Cotangents,
    Emit,
    Number,
    OpDef,
    Operand,
    Operands,
    Sample,
    Val,
    Vals,
    Wanted,
)
from esper_ir.ops.gradients import to, unbroadcast, up, val
from esper_ir.ops.reduction import only
from esper_ir.ops.rules import accept, resolve_dim, same, tensor
from esper_ir.types import DType, TensorType

Types = Sequence[TensorType | Number]
EPSILON = {DType.float64: 2.0**-52, DType.float32: 2.0**-23, DType.bfloat16: 2.0**-7, DType.float16: 2.0**-10}
"""torch.finfo(dtype).eps."""


def _infer_same(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    accept(operands, "float")
    return (tensor(operands[0]),)


def _dims(x: Val, attrs: Attrs) -> tuple[int, ...]:
    return (attrs["dim"],) if x.type.rank else ()


def _empty(x: Val, attrs: Attrs) -> bool:
    """An axis of size 0 has no maximum; the result has no elements."""
    return bool(x.type.rank) and x.type.shape[attrs["dim"]].static == 0


def _softmax(emit: Emit, inputs: Sequence[Operand], attrs: Attrs) -> Sequence[Val]:
    x = only(inputs)
    if _empty(x, attrs):
        return (emit("cast", x, dtype=x.type.dtype),)
    x32, dims = up(emit, x), _dims(x, attrs)
    e = emit("exp", emit("sub", x32, emit("amax", x32, dims=dims, keepdim=True)))
    return (to(emit, emit("div", e, emit("sum", e, dims=dims, keepdim=True)), x.type.dtype),)


def _log_softmax(emit: Emit, inputs: Sequence[Operand], attrs: Attrs) -> Sequence[Val]:
    x = only(inputs)
    if _empty(x, attrs):
        return (emit("cast", x, dtype=x.type.dtype),)
    x32, dims = up(emit, x), _dims(x, attrs)
    shifted = emit("sub", x32, emit("amax", x32, dims=dims, keepdim=True))
    total = emit("log", emit("sum", emit("exp", shifted), dims=dims, keepdim=True))
    return (to(emit, emit("sub", shifted, total), x.type.dtype),)


def _vjp_softmax(
    emit: Emit, inputs: Operands, outputs: Vals, cotangents: Cotangents, attrs: Attrs, wanted: Wanted
) -> Cotangents:
    """y (g - sum(g y))."""
    if cotangents[0] is None or not wanted[0]:
        return [None]
    x = only(inputs)
    y, g, dims = up(emit, outputs[0]), up(emit, cotangents[0]), _dims(x, attrs)
    gy = emit("mul", g, y)
    inner = emit("mul", y, emit("sum", gy, dims=dims, keepdim=True))
    return [to(emit, emit("sub", gy, inner), x.type.dtype)]


def _vjp_log_softmax(
    emit: Emit, inputs: Operands, outputs: Vals, cotangents: Cotangents, attrs: Attrs, wanted: Wanted
) -> Cotangents:
    """g - exp(y) sum(g)."""
    if cotangents[0] is None or not wanted[0]:
        return [None]
    x = only(inputs)
    y, g = up(emit, outputs[0]), up(emit, cotangents[0])
    total = emit("sum", g, dims=_dims(x, attrs), keepdim=True)
    return [to(emit, emit("sub", g, emit("mul", emit("exp", y), total)), x.type.dtype)]


def _along(name: str, expand: Any, vjp: Any, flops: int) -> OpDef:
    rows: list[tuple[str, tuple[int, ...], int]] = [
        ("float32", (5, 7), -1), ("float32", (5, 7), 0), ("float32", (2, 3, 65), 2), ("float32", (4, 1), 1),
        ("float32", (), 0), ("float32", (0, 3), 1), ("bfloat16", (5, 130), -1), ("float64", (5, 7), -1),
    ]  # fmt: skip
    return OpDef(
        name=name, infer=_infer_same, reference=lambda i, a: (getattr(functional, name)(i[0], dim=a["dim"]),),
        vjp=vjp, lowering=Composite(expand), arity=(1, 1), resolve=resolve_dim,
        samples=tuple(Sample((TensorType.of(d, s),), {"dim": dim}, -4.0, 4.0) for d, s, dim in rows),
        params=(Attr("dim", "int", -1, doc="axis that sums to one"),),
        cost=lambda i, o, a: o[0].numel * flops, doc=f"torch.nn.functional.{name}",
    )  # fmt: skip


# Norms over trailing axes.


def _resolve_norm(operands: Types, attrs: Attrs) -> dict[str, Any]:
    x = tensor(operands[0])
    if not x.rank:
        raise EsperError("E0207", "a norm needs at least one axis", hint="reshape to [1]")
    shape = (x.shape[-1],) if attrs["normalized_shape"] is None else attrs["normalized_shape"]
    if not shape:
        raise EsperError("E0204", "normalized_shape is empty", hint="at least the last axis")
    eps = EPSILON.get(x.dtype, 0.0) if attrs["eps"] is None else attrs["eps"]
    return {**attrs, "normalized_shape": tuple(shape), "eps": eps}


def _infer_norm(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x, shape = tensor(operands[0]), attrs["normalized_shape"]
    accept(operands, "float")
    if len(shape) > x.rank:
        raise EsperError("E0204", f"normalized_shape has {len(shape)} sizes, {x} has {x.rank}")
    parts = [x.shape[x.rank - len(shape) :], *(tensor(o, i).shape for i, o in enumerate(operands) if i)]
    for part in parts:
        if len(part) != len(shape):
            raise EsperError(
                "E0204", "weight and bias have the normalized shape", hint=f"{len(shape)} dimensions"
            )
        for have, want in zip(part, shape, strict=True):
            same(have, want, "trailing sizes, weight and bias equal normalized_shape", part, shape)
    return (x,)


def _trailing(x: Val, attrs: Attrs) -> tuple[int, ...]:
    return tuple(range(x.type.rank - len(attrs["normalized_shape"]), x.type.rank))


def _rms(emit: Emit, x: Val, attrs: Attrs, dims: tuple[int, ...]) -> Val:
    """1 / sqrt(mean(x^2) + eps), of a value in its compute type."""
    return emit("rsqrt", emit("add", emit("mean", emit("mul", x, x), dims=dims, keepdim=True), attrs["eps"]))


def _normalised(emit: Emit, x: Val, attrs: Attrs, centre: bool) -> tuple[Val, Val]:
    """(x_hat, 1/sigma) in the compute type."""
    x32, dims = up(emit, x), _trailing(x, attrs)
    if centre:
        x32 = emit("sub", x32, emit("mean", x32, dims=dims, keepdim=True))
    rstd = _rms(emit, x32, attrs, dims)
    return emit("mul", x32, rstd), rstd


def _expand_norm(centre: bool) -> Any:
    def expand(emit: Emit, inputs: Sequence[Operand], attrs: Attrs) -> Sequence[Val]:
        x = only(inputs)
        out, _ = _normalised(emit, x, attrs, centre)
        extra = [up(emit, v) for v in inputs[1:] if isinstance(v, Val)]
        if extra:
            out = emit("mul", out, extra[0])
        if len(extra) > 1:
            out = emit("add", out, extra[1])
        return (to(emit, out, x.type.dtype),)

    return expand


def _vjp_norm(centre: bool) -> Any:
    """With h = g * weight: rstd (h - mean(h x_hat) x_hat), minus the mean of h when centred."""

    def rule(
        emit: Emit, inputs: Operands, outputs: Vals, cotangents: Cotangents, attrs: Attrs, wanted: Wanted
    ) -> Cotangents:
        found: list[Val | None] = [None] * len(inputs)
        if cotangents[0] is None:
            return found
        x, g = only(inputs), up(emit, cotangents[0])
        hat, rstd = _normalised(emit, x, attrs, centre)
        if wanted[0]:
            h = emit("mul", g, up(emit, val(inputs[1]))) if len(inputs) > 1 else g
            dims = _trailing(x, attrs)
            along = emit("mean", emit("mul", h, hat), dims=dims, keepdim=True)
            inner = emit("sub", h, emit("mul", hat, along))
            if centre:
                inner = emit("sub", inner, emit("mean", h, dims=dims, keepdim=True))
            found[0] = to(emit, emit("mul", inner, rstd), x.type.dtype)
        if len(inputs) > 1 and wanted[1]:
            w = val(inputs[1]).type
            found[1] = to(emit, unbroadcast(emit, emit("mul", g, hat), w), w.dtype)
        if len(inputs) > 2 and wanted[2]:
            b = val(inputs[2]).type
            found[2] = to(emit, unbroadcast(emit, g, b), b.dtype)
        return found

    return rule


def _norm_samples(most: int) -> tuple[Sample, ...]:
    rows: list[tuple[str, tuple[int, ...], int, Attrs]] = [
        ("float32", (5, 7), 1, {"eps": 1e-6}),
        ("float32", (5, 7), most, {"eps": 1e-5}),
        ("float32", (2, 3, 65), most, {"normalized_shape": (3, 65)}),
        ("float32", (3, 1), 2, {}),
        ("float32", (6,), 2, {}),
        ("float32", (0, 3), 1, {}),
        ("bfloat16", (5, 130), most, {"eps": 1e-6}),
        ("bfloat16", (5, 130), 1, {}),
        ("float64", (5, 7), most, {}),
    ]
    out = []
    for dtype, shape, operands, attrs in rows:
        inner = attrs.get("normalized_shape", shape[-1:])
        types = [TensorType.of(dtype, shape), *[TensorType.of(dtype, inner)] * (operands - 1)]
        out.append(Sample(tuple(types), attrs, -2.0, 2.0))
    return tuple(out)


def _norm(name: str, centre: bool, eps: float | None) -> OpDef:
    most = 3 if centre else 2

    def reference(inputs: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
        extra = dict(zip(("weight", "bias"), inputs[1:], strict=False))
        function = getattr(functional, name)
        return (function(inputs[0], list(attrs["normalized_shape"]), eps=attrs["eps"], **extra),)

    return OpDef(
        name=name, infer=_infer_norm, reference=reference, vjp=_vjp_norm(centre),
        lowering=Composite(_expand_norm(centre)), samples=_norm_samples(most), arity=(1, most),
        params=(
            Attr("normalized_shape", "shape", None, doc="trailing sizes to normalise; null: the last axis"),
            Attr("eps", "float", eps, doc="added to the mean square; null: the machine epsilon of the dtype"),
        ),
        cost=lambda i, o, a: o[0].numel * (8 if centre else 5), resolve=_resolve_norm,
        doc=f"torch.nn.functional.{name}(x, weight{', bias' if centre else ''})",
    )  # fmt: skip


OPS = (
    _along("softmax", _softmax, _vjp_softmax, 5),
    _along("log_softmax", _log_softmax, _vjp_log_softmax, 5),
    _norm("rms_norm", False, None),
    _norm("layer_norm", True, 1e-5),
)
