"""Batch normalisation: over every axis but the channels. A composite, float32 inside.

Training uses the statistics of the batch alone; running statistics are operands of the evaluation form and
never change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from esper_ir.diagnostics import EsperError
from esper_ir.lazy import functional, torch
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
from esper_ir.ops.convolution import FORMAT
from esper_ir.ops.gradients import to, up, val
from esper_ir.ops.reduction import count, only
from esper_ir.ops.rules import ONE, accept, numel, same, tensor
from esper_ir.types import TensorType

Types = Sequence[TensorType | Number]
LEAST_RUN = 32  # elements


def _axis(x: TensorType, attrs: Attrs) -> int:
    return x.rank - 1 if attrs["data_format"] == "NHWC" else 1


def _infer(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    accept(operands, "float")
    x = tensor(operands[0])
    if x.rank < 2:
        raise EsperError("E0204", f"{x} has no channels", hint="the operand is [batch, channels, ...]")
    least, most = (1, 3) if attrs["training"] else (3, 5)
    if not least <= len(operands) <= most:
        hint = "(x, weight, bias) in training, (x, mean, variance, weight, bias) otherwise"
        raise EsperError("E0201", f"batch_norm takes {least} to {most} operands here", hint=hint)
    if attrs["training"] and attrs["eps"] <= 0:
        raise EsperError("E0203", f"eps is {attrs['eps']}", hint="positive in training")
    for i, operand in enumerate(operands[1:], 1):
        part = tensor(operand, i)
        if part.rank != 1:
            raise EsperError("E0204", f"{part} is not [channels]", hint="one value per channel")
        same(part.shape[0], x.shape[_axis(x, attrs)], "one value per channel", part.shape, x.shape)
    return (x,)


def _wide(emit: Emit, part: Val, x: Val, attrs: Attrs) -> Val:
    """[channels] in the compute type, broadcast against x."""
    part = up(emit, part)
    after = x.type.rank - 1 - _axis(x.type, attrs)
    return emit("reshape", part, shape=(part.type.shape[0], *[ONE] * after)) if after else part


def _dims(x: Val, attrs: Attrs) -> tuple[int, ...]:
    return tuple(i for i in range(x.type.rank) if i != _axis(x.type, attrs))


def _mean(emit: Emit, value: Val, x: Val, attrs: Attrs) -> Val:
    return _average(emit, value, x.type, _dims(x, attrs))


def _average(emit: Emit, value: Val, x: TensorType, dims: Sequence[int]) -> Val:
    total = emit("sum", value, dims=tuple(dims), keepdim=True)
    return emit("div", total, count(emit, x, dims, total.type.dtype))


def statistics(emit: Emit, x: Val, at: int) -> tuple[Val, Val]:
    """(mean, variance) of each channel, axis `at`, in the compute type, the other axes kept at size 1.

    Where every channel's elements of an image are a run of memory, mean and variance of each run come first:
    with equal counts the variance of the whole is the mean of the variances plus the variance of the means
    (Chan, Golub and LeVeque 1979), and the tensor is read once. Else two passes.
    """
    wide, run = up(emit, x), _run(x.type, at)
    rest = tuple(i for i in range(x.type.rank) if i != at and i not in run)
    if not run:
        mean = _average(emit, wide, wide.type, rest)
        away = emit("sub", wide, mean)
        return mean, _average(emit, emit("mul", away, away), wide.type, rest)
    means = _average(emit, wide, wide.type, run)
    away = emit("sub", wide, means)
    spread = _average(emit, emit("mul", away, away), wide.type, run)
    mean = _average(emit, means, means.type, rest)
    off = emit("sub", means, mean)
    return mean, _average(emit, emit("add", spread, emit("mul", off, off)), means.type, rest)


def _run(x: TensorType, at: int) -> tuple[int, ...]:
    """The axes behind the channels, unless there are so few elements that their statistics are no less."""
    axes = tuple(range(at + 1, x.rank))
    size = numel([x.shape[i] for i in axes]).static
    return () if size is not None and size < LEAST_RUN else axes


def _normalised(emit: Emit, inputs: Sequence[Operand], attrs: Attrs) -> tuple[Val, Val]:
    """(x_hat, 1 / sigma), with the statistics of the batch or those given."""
    x = only(inputs)
    x32 = up(emit, x)
    if attrs["training"]:
        mean, variance = statistics(emit, x, _axis(x.type, attrs))
    else:
        mean, variance = (_wide(emit, val(v), x, attrs) for v in inputs[1:3])
    rstd = emit("rsqrt", emit("add", variance, attrs["eps"]))
    return emit("mul", emit("sub", x32, mean), rstd), rstd


def _expand(emit: Emit, inputs: Sequence[Operand], attrs: Attrs) -> Sequence[Val]:
    x = only(inputs)
    out, _ = _normalised(emit, inputs, attrs)
    for op, operand in zip(("mul", "add"), inputs[1 if attrs["training"] else 3 :], strict=False):
        out = emit(op, out, _wide(emit, val(operand), x, attrs))
    return (to(emit, out, x.type.dtype),)


def _vjp(
    emit: Emit, inputs: Operands, outputs: Vals, cotangents: Cotangents, attrs: Attrs, wanted: Wanted
) -> Cotangents:
    """With h = g weight: rstd (h - mean(h) - x_hat mean(h x_hat)) in training, else rstd h.

    The weight is the same along a channel, so both means are those of g and of g x_hat times the weight: the
    sums that the gradients of weight and bias are.
    """
    found: list[Val | None] = [None] * len(inputs)
    if cotangents[0] is None:
        return found
    x, g, training = only(inputs), up(emit, cotangents[0]), attrs["training"]
    own = 1 if training else 3
    hat, rstd = _normalised(emit, inputs, attrs)
    scale = rstd
    if len(inputs) > own:
        scale = emit("mul", _wide(emit, val(inputs[own]), x, attrs), rstd)
    if wanted[0]:
        inner = g
        if training:
            along = emit("mul", hat, _mean(emit, emit("mul", g, hat), x, attrs))
            inner = emit("sub", emit("sub", g, _mean(emit, g, x, attrs)), along)
        found[0] = to(emit, emit("mul", inner, scale), x.type.dtype)
    parts = {own: lambda: emit("mul", g, hat), own + 1: lambda: g}
    if not training:
        # d/dmean = -h rstd; d/dvariance = -0.5 h x_hat rstd^2.
        parts[1] = lambda: emit("neg", emit("mul", g, scale))
        parts[2] = lambda: emit("mul", emit("mul", emit("mul", g, hat), emit("mul", scale, rstd)), -0.5)
    for i, make in parts.items():
        if i < len(inputs) and wanted[i]:
            found[i] = _per_channel(emit, make(), x, val(inputs[i]), attrs)
    return found


def _per_channel(emit: Emit, value: Val, x: Val, part: Val, attrs: Attrs) -> Val:
    """Sum over all axes but the channels, as the means are made, so that equal sums are one."""
    total = emit("sum", value, dims=_dims(x, attrs), keepdim=True)
    return to(emit, emit("reshape", total, shape=part.type.shape), part.type.dtype)


def _reference(inputs: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
    x, *parts = inputs
    order = attrs["data_format"] == "NHWC" and x.dim() > 2
    x = x.movedim(-1, 1) if order else x
    if attrs["training"]:
        weight, bias = (*parts, None, None)[:2]
        # Not functional.batch_norm, which refuses one value per channel: its result is the bias.
        out = torch.batch_norm(x, weight, bias, None, None, True, 0.0, attrs["eps"], False)
    else:
        mean, variance, weight, bias = (*parts, None, None)[:4]
        if any(t is not None and t.requires_grad for t in (mean, variance)):
            return (_by_hand(x, (mean, variance, weight, bias), attrs, order),)
        out = functional.batch_norm(x, mean, variance, weight, bias, False, eps=attrs["eps"])
    return (out.movedim(1, -1) if order else out,)


def _by_hand(x: Any, parts: Sequence[Any], attrs: Attrs, order: bool) -> Any:
    """torch has no gradient for given statistics."""
    shape = (-1, *[1] * (x.dim() - 2))
    mean, variance, weight, bias = (None if t is None else t.view(shape) for t in parts)
    out = (x - mean) * (variance + attrs["eps"]).rsqrt()
    out = out if weight is None else out * weight
    out = out if bias is None else out + bias
    return out.movedim(1, -1) if order else out


def _samples() -> tuple[Sample, ...]:
    rows: list[tuple[str, tuple[int, ...], int, Attrs]] = [
        ("float32", (6, 5), 3, {}),
        ("float32", (3, 5, 4, 4), 3, {}),
        ("float32", (3, 4, 4, 5), 3, {"data_format": "NHWC"}),
        ("float32", (3, 4, 4, 5), 1, {"data_format": "NHWC"}),
        ("float32", (3, 5, 4), 2, {}),
        ("bfloat16", (3, 8, 4, 5), 3, {"data_format": "NHWC"}),
        ("float32", (3, 5, 4, 4), 5, {"training": False}),
        ("float32", (3, 4, 4, 5), 4, {"training": False, "data_format": "NHWC"}),
        ("float64", (6, 5), 3, {}),
    ]
    out = []
    for dtype, shape, operands, attrs in rows:
        channels = shape[-1] if attrs.get("data_format") == "NHWC" else shape[1]
        parts = [TensorType.of(dtype, (channels,))] * (operands - 1)
        out.append(Sample((TensorType.of(dtype, shape), *parts), attrs, 0.25, 2.0))
    return tuple(out)


OPS = (
    OpDef(
        name="batch_norm", infer=_infer, reference=_reference, vjp=_vjp, lowering=Composite(_expand),
        samples=_samples(), arity=(1, 5), cost=lambda i, o, a: o[0].numel * 8,
        params=(
            Attr("training", "bool", True, doc="statistics of the batch; else they are operands"),
            FORMAT, Attr("eps", "float", 1e-5),
        ),
        doc="torch.nn.functional.batch_norm: (x, weight, bias), or (x, mean, variance, weight, bias)",
    ),
)  # fmt: skip
