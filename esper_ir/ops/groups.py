"""Norms over groups of channels and over the length of vectors. Composites, float32 inside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from esper_ir.diagnostics import EsperError
from esper_ir.lazy import functional, torch
from esper_ir.opdef import (
    Attr,
    Attrs,
    ByExpansion,
    Composite,
    Cotangents,
    Emit,
    NotDifferentiable,
    Number,
    OpDef,
    Operand,
    Operands,
    Sample,
    Val,
    Vals,
    Wanted,
)
from esper_ir.ops.gradients import to, up, val
from esper_ir.ops.movement import divide
from esper_ir.ops.reduction import DIMS, KEEPDIM, amount, only, reduction_samples
from esper_ir.ops.rules import ONE, accept, axis, demand, numel, reduced, resolve_dims, same, tensor
from esper_ir.types import Dim, DType, TensorType

Types = Sequence[TensorType | Number]


def _infer_channels(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    """x [batch, channels, ...], weight and bias [channels]."""
    accept(operands, "float")
    x = tensor(operands[0])
    if x.rank < 2:
        raise EsperError("E0204", f"{x} has no channels", hint="the operand is [batch, channels, ...]")
    for i, operand in enumerate(operands[1:], 1):
        part = tensor(operand, i)
        if part.rank != 1:
            raise EsperError("E0204", f"{part} is not [channels]", hint="weight and bias have one axis")
        same(part.shape[0], x.shape[1], "weight and bias are [channels]", part.shape, x.shape)
    _grouped(x, attrs)
    return (x,)


def _grouped(x: TensorType, attrs: Attrs) -> tuple[Dim, Dim]:
    """(groups, elements of a group); E0206 when the groups do not divide the channels."""
    groups = x.shape[1] if attrs.get("num_groups") is None else Dim.of(attrs["num_groups"])
    if groups.static is not None and not 0 < groups.static < 2**31:
        raise EsperError("E0203", f"num_groups is {groups}", hint="from 1 to the number of channels")
    inner = divide(x.shape[1], groups)
    if inner is None:
        raise EsperError("E0206", f"cannot prove that {groups} groups divide the channels of {x}")
    return groups, numel((inner, *x.shape[2:]))


def _by_group(emit: Emit, value: Val, x: Val, attrs: Attrs) -> Val:
    """One value per channel, [batch, channels, 1, ...], as [batch, groups, channels of a group]."""
    groups, _ = _grouped(x.type, attrs)
    inner = divide(x.type.shape[1], groups)
    assert inner is not None
    return emit("reshape", value, shape=(value.type.shape[0], groups, inner))


def _by_channel(emit: Emit, value: Val, x: Val, attrs: Attrs) -> Val:
    """[batch, groups, 1] repeated for every channel of a group, [batch, channels, 1, ...]."""
    batch, groups, _ = value.type.shape
    inner = divide(x.type.shape[1], groups)
    assert inner is not None
    wide = emit("expand", value, shape=(batch, groups, inner))
    return emit("reshape", wide, shape=(batch, x.type.shape[1], *[ONE] * (x.type.rank - 2)))


def _spatial_axes(x: Val) -> tuple[int, ...]:
    return tuple(range(2, x.type.rank))


def _statistics(emit: Emit, x: Val, attrs: Attrs) -> tuple[Val, Val]:
    """(mean, 1 / sigma) of each channel's group, [batch, channels, 1, ...], in the compute type.

    First per channel, then over the channels of a group: with equal counts the variance of the whole is the
    mean of the variances plus the variance of the means (Chan, Golub and LeVeque 1979). So the large tensor
    keeps its axes, and only one number per channel is regrouped.
    """
    wide, dims = up(emit, x), _spatial_axes(x)
    means, spread = wide, None
    if dims:
        means = emit("mean", wide, dims=dims, keepdim=True)
        away = emit("sub", wide, means)
        spread = emit("mean", emit("mul", away, away), dims=dims, keepdim=True)
    if spread is not None and _grouped(x.type, attrs)[0] == x.type.shape[1]:
        return means, emit("rsqrt", emit("add", spread, attrs["eps"]))
    means = _by_group(emit, means, x, attrs)
    mean = emit("mean", means, dims=(2,), keepdim=True)
    away = emit("sub", means, mean)
    square = emit("mul", away, away)
    if spread is not None:
        square = emit("add", _by_group(emit, spread, x, attrs), square)
    variance = emit("mean", square, dims=(2,), keepdim=True)
    rstd = emit("rsqrt", emit("add", variance, attrs["eps"]))
    return _by_channel(emit, mean, x, attrs), _by_channel(emit, rstd, x, attrs)


def _per_channel(emit: Emit, part: Operand, x: Val) -> Val:
    """Weight or bias in the compute type, broadcast against x."""
    part = up(emit, val(part))
    return emit("reshape", part, shape=(x.type.shape[1], *[ONE] * (x.type.rank - 2)))


def _expand_groups(emit: Emit, inputs: Sequence[Operand], attrs: Attrs) -> Sequence[Val]:
    """Each group to mean 0 and variance 1, then weight and bias per channel."""
    x = only(inputs)
    mean, rstd = _statistics(emit, x, attrs)
    out = emit("mul", emit("sub", up(emit, x), mean), rstd)
    for op, operand in zip(("mul", "add"), inputs[1:], strict=False):
        out = emit(op, out, _per_channel(emit, operand, x))
    return (to(emit, out, x.type.dtype),)


def _group_mean(emit: Emit, value: Val, x: Val, attrs: Attrs) -> Val:
    """Of one value per channel, its mean over a group, [batch, channels, 1, ...]; `value` may be a sum over
    the other axes.
    """
    size = amount(emit, _grouped(x.type, attrs)[1], value.type.dtype)
    total = emit("sum", _by_group(emit, value, x, attrs), dims=(2,), keepdim=True)
    return _by_channel(emit, emit("div", total, size), x, attrs)


def _from_sums(
    emit: Emit, h: Val, hat: Val, sums: Sequence[Val], weight: Val | None, x: Val, attrs: Attrs
) -> Val:
    """h - mean(h) - x_hat mean(h x_hat), from the sums per channel of g and g x_hat."""
    weighted = [emit("mul", v, weight) if weight is not None else v for v in sums]
    plain, turned = (_group_mean(emit, v, x, attrs) for v in weighted)
    return emit("sub", emit("sub", h, plain), emit("mul", hat, turned))


def _vjp_groups(
    emit: Emit, inputs: Operands, outputs: Vals, cotangents: Cotangents, attrs: Attrs, wanted: Wanted
) -> Cotangents:
    """With h = g weight: rstd (h - mean(h) - x_hat mean(h x_hat)), means over a group. The weight is the same
    along a channel, so both means come from the sums of g and of g x_hat per channel, which the gradients of
    weight and bias need too.
    """
    found: list[Val | None] = [None] * len(inputs)
    if cotangents[0] is None:
        return found
    x, g = only(inputs), up(emit, cotangents[0])
    mean, rstd = _statistics(emit, x, attrs)
    hat = emit("mul", emit("sub", up(emit, x), mean), rstd)
    dims, along = _spatial_axes(x), emit("mul", g, hat)
    sums = [emit("sum", v, dims=dims, keepdim=True) if dims else v for v in (g, along)]
    weight = _per_channel(emit, inputs[1], x) if len(inputs) > 1 else None
    if wanted[0]:
        h = emit("mul", g, weight) if weight is not None else g
        if dims:
            inner = _from_sums(emit, h, hat, sums, weight, x, attrs)
        else:
            turned = _group_mean(emit, emit("mul", h, hat), x, attrs)
            inner = emit("sub", h, emit("mul", hat, turned))
            inner = emit("sub", inner, _group_mean(emit, inner, x, attrs))
        found[0] = to(emit, emit("mul", inner, rstd), x.type.dtype)
    for i, total in ((1, sums[1]), (2, sums[0])):
        if i < len(inputs) and wanted[i]:
            part = val(inputs[i]).type
            flat_total = emit("reshape", total, shape=x.type.shape[:2])
            found[i] = to(emit, emit("sum", flat_total, dims=(0,), keepdim=False), part.dtype)
    return found


def _channel_samples(attrs: Attrs) -> tuple[Sample, ...]:
    rows: list[tuple[str, tuple[int, ...], int]] = [
        ("float32", (2, 6, 5), 3), ("float32", (2, 6, 5), 1), ("float32", (3, 6, 4, 3), 2),
        ("bfloat16", (2, 6, 33), 3), ("float64", (2, 6, 5), 3),
    ]  # fmt: skip
    return tuple(
        Sample((TensorType.of(d, s), *[TensorType.of(d, s[1:2])] * (n - 1)), attrs) for d, s, n in rows
    )


def _group_reference(inputs: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
    return (functional.group_norm(inputs[0], attrs["num_groups"], *inputs[1:], eps=attrs["eps"]),)


def _instance_reference(inputs: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
    extra = dict(zip(("weight", "bias"), inputs[1:], strict=False))
    return (functional.instance_norm(inputs[0], **extra, eps=attrs["eps"]),)


def _spatial(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x = tensor(operands[0])
    if x.rank < 3 or all(d == ONE for d in x.shape[2:]):
        raise EsperError(
            "E0204", f"{x} has one value per channel", hint="the operand is [batch, channels, ...]"
        )
    return _infer_channels(operands, attrs)


def _channels(name: str, infer: Any, reference: Any, params: tuple[Attr, ...], attrs: Attrs) -> OpDef:
    return OpDef(
        name=name, infer=infer, reference=reference, vjp=_vjp_groups, lowering=Composite(_expand_groups),
        samples=_channel_samples(attrs), arity=(1, 3), params=(*params, Attr("eps", "float", 1e-5)),
        cost=lambda i, o, a: o[0].numel * 8,
        doc=f"torch.nn.functional.{name}(x, weight, bias), channels at axis 1",
    )  # fmt: skip


# The length of vectors.


def _infer_norm(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x = tensor(operands[0])
    accept(operands, "float")
    return (TensorType(x.dtype, reduced(x.shape, attrs["dims"], attrs["keepdim"])),)


def _length(emit: Emit, x: Val, p: float, dims: tuple[int, ...], keepdim: bool) -> Val:
    """Sum of absolute values, root of the sum of squares, or (sum |x|^p)^(1/p), in the compute type."""
    if p == 1:
        return emit("sum", emit("abs", x), dims=dims, keepdim=keepdim)
    if p != 2:
        total = emit("sum", emit("pow", emit("abs", x), p), dims=dims, keepdim=keepdim)
        return emit("pow", total, 1.0 / p)
    return emit("sqrt", emit("sum", emit("mul", x, x), dims=dims, keepdim=keepdim))


def _expand_norm(emit: Emit, inputs: Sequence[Operand], attrs: Attrs) -> Sequence[Val]:
    x = only(inputs)
    return (to(emit, _length(emit, up(emit, x), attrs["p"], attrs["dims"], attrs["keepdim"]), x.type.dtype),)


def _vjp_norm(
    emit: Emit, inputs: Operands, outputs: Vals, cotangents: Cotangents, attrs: Attrs, wanted: Wanted
) -> Cotangents:
    """p 1: g sign(x). p 2: g x / |x|. Others: g sign(x) (|x| / |x|_p)^(p - 1). 0 where the length is 0."""
    g, x = cotangents[0], only(inputs)
    if g is None or not wanted[0]:
        return [None]
    kept = tuple(ONE if i in attrs["dims"] else d for i, d in enumerate(x.type.shape))
    g, y = (emit("reshape", up(emit, v), shape=kept) for v in (g, outputs[0]))
    if attrs["p"] == 1:
        return [to(emit, emit("mul", g, emit("sign", up(emit, x))), x.type.dtype)]
    if attrs["p"] != 2:
        wide = up(emit, x)
        ratio = emit("where", emit("eq", y, 0.0), 0.0, emit("div", emit("abs", wide), y))
        slope = emit("where", emit("eq", ratio, 0.0), 0.0, emit("pow", ratio, attrs["p"] - 1.0))
        return [to(emit, emit("mul", g, emit("mul", emit("sign", wide), slope)), x.type.dtype)]
    scale = emit("where", emit("eq", y, 0.0), 0.0, emit("div", g, y))
    return [to(emit, emit("mul", up(emit, x), scale), x.type.dtype)]


def _norm_reference(inputs: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
    return (torch.linalg.vector_norm(inputs[0], attrs["p"], dim=attrs["dims"], keepdim=attrs["keepdim"]),)


def _resolve_vectors(operands: Types, attrs: Attrs) -> dict[str, Any]:
    return demand(_known, KNOWN)(operands, resolve_dims(operands, attrs))


def _resolve_normalize(operands: Types, attrs: Attrs) -> dict[str, Any]:
    at = axis(attrs["dim"], tensor(operands[0]).rank)
    return demand(_known, KNOWN)(operands, {**attrs, "dim": at})


def _known(attrs: Attrs) -> bool:
    return attrs["p"] != 0


KNOWN = "p is not 0"
P = Attr("p", "float", 2.0, doc="1: sum of absolute values, 2: Euclidean length, else (sum |x|^p)^(1/p)")


def _infer_normalize(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    accept(operands, "float")
    return (tensor(operands[0]),)


def _expand_normalize(emit: Emit, inputs: Sequence[Operand], attrs: Attrs) -> Sequence[Val]:
    """x / max(|x|, eps)."""
    x = only(inputs)
    dims = (attrs["dim"],) if x.type.rank else ()
    wide = up(emit, x)
    length = emit("norm", wide, p=attrs["p"], dims=dims, keepdim=True)
    return (to(emit, emit("div", wide, emit("clamp", length, min=attrs["eps"])), x.type.dtype),)


# Truth and counts.


NOT = NotDifferentiable("the result is a truth value or a count")


def _truth(name: str, compare: str | None) -> OpDef:
    """any and all by counting what is (not) zero; integers, so exact."""

    def infer(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
        x = tensor(operands[0])
        keepdim = attrs.get("keepdim", False)
        return (TensorType(DType.bool if compare else DType.int64, reduced(x.shape, attrs["dims"], keepdim)),)

    def expand(emit: Emit, inputs: Sequence[Operand], attrs: Attrs) -> Sequence[Val]:
        x = only(inputs)
        hit = emit("eq" if name == "all" else "ne", x, 0)
        total = emit("sum", hit, dims=attrs["dims"], keepdim=attrs.get("keepdim", False))
        return (emit(compare, total, 0) if compare else total,)

    def reference(inputs: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
        if compare is None:
            return (torch.count_nonzero(inputs[0], attrs["dims"] or None),)
        return (getattr(torch, name)(inputs[0], dim=attrs["dims"], keepdim=attrs["keepdim"]),)

    params = (DIMS, KEEPDIM) if compare else (DIMS,)
    cases = [
        s
        for s in reduction_samples(-1.0, 1.0, ("bool", "int64", "bfloat16"))
        if compare or "keepdim" not in s.attrs
    ]
    return OpDef(
        name=name, infer=infer, reference=reference, vjp=NOT, lowering=Composite(expand),
        samples=tuple(cases), arity=(1, 1), params=params, resolve=resolve_dims,
        cost=lambda i, o, a: tensor(i[0]).numel,
        doc=f"torch.{name}",
    )  # fmt: skip


def _vectors(dtype: str, *shape: int, **attrs: Any) -> Sample:
    return Sample((TensorType.of(dtype, shape),), attrs)


NORMALIZE = tuple(
    _vectors(d, 5, 7, p=p, dim=dim)
    for d in ("float32", "bfloat16")
    for p, dim in ((2.0, 1), (1.0, -1), (2.0, 0))
)

NORMS = (
    *reduction_samples(0.1, 2.0),
    *reduction_samples(0.1, 2.0, extra={"p": 1.0}),
    *reduction_samples(0.1, 2.0, empty=False, extra={"p": 3.0}),
)

OPS = (
    _channels("group_norm", _infer_channels, _group_reference, (Attr("num_groups", "int"),),
              {"num_groups": 3}),
    _channels("instance_norm", _spatial, _instance_reference, (), {}),
    OpDef(
        name="norm", infer=_infer_norm, reference=_norm_reference, vjp=_vjp_norm,
        lowering=Composite(_expand_norm), samples=NORMS, arity=(1, 1),
        params=(P, DIMS, KEEPDIM), resolve=_resolve_vectors, cost=lambda i, o, a: tensor(i[0]).numel * 2,
        doc="torch.linalg.vector_norm",
    ),
    OpDef(
        name="normalize", infer=_infer_normalize,
        reference=lambda i, a: (functional.normalize(i[0], p=a["p"], dim=a["dim"], eps=a["eps"]),),
        vjp=ByExpansion(), lowering=Composite(_expand_normalize), samples=NORMALIZE, arity=(1, 1),
        params=(P, Attr("dim", "int", 1), Attr("eps", "float", 1e-12)), resolve=_resolve_normalize,
        cost=lambda i, o, a: o[0].numel * 4, doc="torch.nn.functional.normalize",
    ),
    _truth("any", "ne"),
    _truth("all", "eq"),
    _truth("count_nonzero", None),
)  # fmt: skip
