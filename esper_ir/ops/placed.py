"""Maxima over windows with their place in the window as one byte, and the gradient from it.

Both are windows and element-by-element work, so that what comes before and after shares their kernel. The
gradient is gathered: every element of the operand asks the windows that hold it whether they chose it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from esper_ir.diagnostics import EsperError
from esper_ir.lazy import torch
from esper_ir.opdef import (
    Attrs,
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
from esper_ir.ops.convolution import SIZE, sized
from esper_ir.ops.gradients import to, val
from esper_ir.ops.pooling import (
    ROWS,
    axes_of,
    first,
    image,
    last,
    max_call,
    max_gradient,
    pooled,
    resolver,
    window,
    window_cost,
)
from esper_ir.ops.reach import MOST, at_place, numbered, taps
from esper_ir.ops.reduction import only
from esper_ir.ops.rules import ONE, tensor
from esper_ir.types import Dim, DType, TensorType

Types = Sequence[TensorType | Number]
Place = Val | int
"""A number per position along one axis, or the one number where the axis has one position."""


def _spans(attrs: Attrs) -> tuple[int, ...]:
    """Per axis one more than the largest place that a window reaching an element could name."""
    pairs = zip(attrs["kernel"], attrs["stride"], strict=True)
    return tuple(-(-k // s) * s for k, s in pairs)


def eligible(attrs: Attrs) -> bool:
    """Windows without gaps whose places fit into a byte, and few enough elements to write out."""
    close = all(d == 1 for d in attrs["dilation"])
    return close and prod(attrs["kernel"]) <= MOST and prod(_spans(attrs)) <= 255


def _weights(attrs: Attrs) -> tuple[int, ...]:
    spans = _spans(attrs)
    return tuple(prod(spans[i + 1 :]) for i in range(len(spans)))


def _code(emit: Emit, places: Sequence[Place], weights: Sequence[int]) -> Place:
    """One number for the places along all axes."""
    total: Place = sum(p * w for p, w in zip(places, weights, strict=True) if isinstance(p, int))
    for place, weight in zip(places, weights, strict=True):
        if isinstance(place, Val):
            scaled = place if weight == 1 else emit("mul", place, weight)
            total = scaled if total == 0 and isinstance(total, int) else emit("add", scaled, total)
    return total


# Maxima.


def _infer(rank: int) -> Any:
    def infer(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
        out = pooled(image(operands[0], rank), rank, attrs)
        if not eligible(attrs):
            hint = f"max_pool{rank}d takes any window"
            raise EsperError(
                "E0203", f"places in a window {attrs['kernel']} do not fit into a byte", hint=hint
            )
        return out, TensorType(DType.uint8, out.shape)

    return infer


def _expand(rank: int) -> Any:
    def expand(emit: Emit, inputs: Sequence[Operand], attrs: Attrs) -> Sequence[Val]:
        x, axes, weights = only(inputs), axes_of(rank, attrs), _weights(attrs)
        shape = pooled(x.type, rank, attrs).shape
        best: Val | None = None
        chosen = _beginning(emit, attrs, axes, shape, weights)
        for tap in taps(attrs["kernel"]):
            value: Val | None = x
            for axis, k, stride, pad in zip(axes, tap, attrs["stride"], attrs["padding"], strict=True):
                if value is not None:
                    value = at_place(emit, value, axis, stride, k - pad, 1, shape[axis], "least")
            if value is None or best is None:
                best = value if best is None else best
                continue
            better = emit("logical_or", emit("gt", value, best), emit("isnan", value))
            best = emit("where", better, value, best)
            chosen = emit("where", better, sum(k * w for k, w in zip(tap, weights, strict=True)), chosen)
        assert best is not None, "a window has an element"
        return best, emit("cast", chosen, dtype=DType.uint8)

    return expand


def _beginning(
    emit: Emit, attrs: Attrs, axes: Sequence[int], shape: tuple[Dim, ...], weights: Sequence[int]
) -> Val:
    """The first element of each window that lies inside: it is chosen where none is larger than -inf."""
    places: list[Place] = []
    for axis, stride, pad in zip(axes, attrs["stride"], attrs["padding"], strict=True):
        if shape[axis] == ONE or pad == 0:
            places.append(pad)
            continue
        number = numbered(emit, axis, len(shape), shape[axis])
        places.append(emit("maximum", emit("sub", pad, emit("mul", number, stride)), 0))
    code = _code(emit, places, weights)
    if isinstance(code, int):
        return emit("full", shape=shape, value=code, dtype=DType.int32)
    return code


def _vjp(rank: int) -> Any:
    def vjp(
        emit: Emit, inputs: Operands, outputs: Vals, cotangents: Cotangents, attrs: Attrs, wanted: Wanted
    ) -> Cotangents:
        g = cotangents[0]
        if g is None or not wanted[0]:
            return [None]
        x = only(inputs).type
        return [emit(f"max_pool{rank}d_placed_grad", g, outputs[1], size=x.shape, **attrs)]

    return vjp


def _places_of(indices: Any, x: Any, rank: int, attrs: Attrs) -> Any:
    """Codes from torch's positions in the whole plane; channels at axis 1."""
    code, rest = torch.zeros_like(indices), indices
    for i in reversed(range(rank)):
        size = x.shape[i + 2]
        shape = [-1 if a == i + 2 else 1 for a in range(rank + 2)]
        start = torch.arange(indices.shape[i + 2]).reshape(shape) * attrs["stride"][i] - attrs["padding"][i]
        code = code + (rest % size - start.to(rest.device)) * _weights(attrs)[i]
        rest = rest // size
    return code.to(torch.uint8)


def _reference(rank: int) -> Any:
    def reference(inputs: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
        x = first(inputs[0], attrs)
        best, indices = max_call(x, rank, attrs)
        return last(best, attrs), last(_places_of(indices, x, rank, attrs), attrs)

    return reference


# The gradient.


def _infer_gradient(rank: int) -> Any:
    def infer(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
        g, places = tensor(operands[0]), tensor(operands[1], 1)
        x = sized(g, attrs, rank + 2)
        made = pooled(image(x, rank), rank, attrs)
        if g.shape != made.shape or places != TensorType(DType.uint8, made.shape) or not eligible(attrs):
            raise EsperError("E0204", f"{g} and {places} are not of this pooling", hint=f"{made} and uint8")
        return (x,)

    return infer


def _expand_gradient(rank: int) -> Any:
    def expand(emit: Emit, inputs: Sequence[Operand], attrs: Attrs) -> Sequence[Val]:
        g, places = val(inputs[0]), val(inputs[1])
        size, axes, weights = tuple(attrs["size"]), axes_of(rank, attrs), _weights(attrs)
        spans = [-(-k // s) for k, s in zip(attrs["kernel"], attrs["stride"], strict=True)]
        total: Val | None = None
        for tap in taps(spans):
            given: Val | None = g
            chosen: Val | None = places
            own: list[Place] = []
            numbers = zip(axes, tap, attrs["stride"], attrs["padding"], strict=True)
            for axis, back, stride, pad in numbers:
                add = pad - back * stride
                if given is not None and chosen is not None:
                    given = at_place(emit, given, axis, 1, add, stride, size[axis])
                    chosen = at_place(emit, chosen, axis, 1, add, stride, size[axis])
                own.append(_own(emit, axis, rank + 2, size[axis], stride, pad, back))
            if given is None or chosen is None:
                continue
            hit = emit("eq", chosen, _code(emit, own, weights))
            for place, back, k, stride in zip(own, tap, attrs["kernel"], attrs["stride"], strict=True):
                # No window names such a place; where it is known beforehand, nothing has to be read.
                if isinstance(place, Val) and (back + 1) * stride > k:
                    hit = emit("logical_and", hit, emit("lt", place, k))
            part = emit("where", hit, to(emit, given, g.type.dtype.compute), 0.0)
            total = part if total is None else emit("add", total, part)
        if total is None:
            return (emit("full", shape=size, value=0.0, dtype=g.type.dtype),)
        return (to(emit, total, g.type.dtype),)

    return expand


def _own(emit: Emit, axis: int, rank: int, size: Dim, stride: int, pad: int, back: int) -> Place:
    """Place of every element in the window that lies `back` windows before the last that holds it."""
    if size == ONE:
        return pad % stride + back * stride
    if stride == 1:
        return back
    number = numbered(emit, axis, rank, size)
    moved = emit("add", number, pad) if pad else number
    place = emit("remainder", moved, stride)
    return emit("add", place, back * stride) if back else place


def _gradient_reference(rank: int) -> Any:
    def reference(inputs: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
        g, places = (first(t, attrs) for t in inputs)
        x = first(inputs[0].new_zeros([int(s) for s in attrs["size"]]), attrs)
        position, rest = torch.zeros_like(places, dtype=torch.int64), places.long()
        for i, (weight, stride, pad) in enumerate(
            zip(_weights(attrs), attrs["stride"], attrs["padding"], strict=True)
        ):
            shape = [-1 if a == i + 2 else 1 for a in range(rank + 2)]
            start = torch.arange(g.shape[i + 2], device=g.device).reshape(shape) * stride - pad
            position = position * x.shape[i + 2] + start + rest // weight
            rest = rest % weight
        return (last(max_gradient(g, x, position, rank, attrs), attrs),)

    return reference


def _gradient_samples(rank: int) -> tuple[Sample, ...]:
    """Places 0 and 1 lie inside of every window that has no padding."""
    rows = [r for r in ROWS[rank] if not {"padding", "ceil_mode"} & r[3].keys()]
    return tuple(
        Sample((TensorType.of(d, y), TensorType.of("uint8", y)), {**a, "size": x}, 0.0, 0.9)
        for d, x, y, a in rows
    )


def _family(rank: int) -> tuple[OpDef, ...]:
    name, params = f"max_pool{rank}d_placed", window(rank, True)
    return (
        OpDef(
            name=name, infer=_infer(rank), reference=_reference(rank), vjp=_vjp(rank),
            lowering=Composite(_expand(rank)), arity=(1, 1), params=params, resolve=resolver(rank),
            samples=tuple(Sample((TensorType.of(d, x),), a) for d, x, _, a in ROWS[rank]),
            cost=window_cost, doc=f"max_pool{rank}d with the places of the maxima in their windows",
        ),
        OpDef(
            name=f"{name}_grad", infer=_infer_gradient(rank), reference=_gradient_reference(rank),
            vjp=NotDifferentiable("second derivatives of a max pool are not implemented"),
            lowering=Composite(_expand_gradient(rank)), arity=(2, 2), params=(*params, SIZE),
            resolve=resolver(rank), samples=_gradient_samples(rank),
            cost=window_cost, doc=f"gradient of max_pool{rank}d from (cotangent, places)",
        ),
    )  # fmt: skip


OPS = (*_family(2), *_family(3))
