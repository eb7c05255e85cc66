"""Means over windows and their gradient, as windows and element-by-element work."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from esper_ir.opdef import Attrs, Emit, Operand, Val
from esper_ir.ops.gradients import to, up, val
from esper_ir.ops.reach import MOST, at_place, numbered, taps
from esper_ir.ops.rules import ONE
from esper_ir.types import Dim, DType

Size = Val | int
"""A number per position along one axis, or the same number everywhere."""


def few(attrs: Attrs) -> bool:
    """Windows of few enough elements to write out."""
    return prod(attrs["kernel"]) <= MOST


def _count(emit: Emit, axis: int, at: int, whole: Dim, out: Dim, rank: int, attrs: Attrs) -> Size:
    """Elements that a window counts along one axis, by torch's rule: of the padded image, or of the image."""
    kernel, stride, pad = attrs["kernel"][at], attrs["stride"][at], attrs["padding"][at]
    padded = attrs["count_include_pad"]
    least = 0 if not padded else -pad
    most = whole + (pad if padded else 0)
    inside = not attrs["ceil_mode"] and (padded or pad == 0)
    if inside:
        return kernel
    if out == ONE and most.static is not None:
        return min(kernel - pad, most.static) - max(-pad, least)
    start = emit("sub", emit("mul", numbered(emit, axis, rank, out), stride), pad)
    bound = emit("full", shape=(), value=most, dtype=DType.int32)
    end = emit("minimum", emit("add", start, kernel), bound)
    return emit("sub", end, emit("maximum", start, least))


def _divisor(emit: Emit, axes: Sequence[int], x: Sequence[Dim], out: Sequence[Dim], attrs: Attrs) -> Size:
    if attrs["divisor_override"] is not None:
        return attrs["divisor_override"]
    total: Size = 1
    for at, axis in enumerate(axes):
        count = _count(emit, axis, at, x[axis], out[axis], len(out), attrs)
        if isinstance(count, int):
            total = total * count if isinstance(total, int) else emit("mul", total, count)
        else:
            total = count if total == 1 and isinstance(total, int) else emit("mul", count, total)
    return total


def _divided(emit: Emit, x: Val, by: Size) -> Val:
    if isinstance(by, int):
        return x if by == 1 else emit("div", x, float(by))
    return emit("div", x, to(emit, by, x.type.dtype))


def mean(emit: Emit, x: Val, axes: Sequence[int], shape: tuple[Dim, ...], attrs: Attrs) -> Sequence[Val]:
    """The sum in the compute type, divided once."""
    total: Val | None = None
    for tap in taps(attrs["kernel"]):
        value: Val | None = x
        for axis, k, stride, pad in zip(axes, tap, attrs["stride"], attrs["padding"], strict=True):
            if value is not None:
                value = at_place(emit, value, axis, stride, k - pad, 1, shape[axis])
        if value is not None:
            total = up(emit, value) if total is None else emit("add", total, up(emit, value))
    assert total is not None, "a window has an element"
    made = _divided(emit, total, _divisor(emit, axes, x.type.shape, shape, attrs))
    return (to(emit, made, x.type.dtype),)


def mean_gradient(
    emit: Emit, operands: Sequence[Operand], axes: Sequence[int], size: tuple[Dim, ...], attrs: Attrs
) -> Sequence[Val]:
    """Every element adds up the shares of the windows that hold it."""
    g = val(operands[0])
    share = _divided(emit, up(emit, g), _divisor(emit, axes, size, g.type.shape, attrs))
    spans = [-(-k // s) for k, s in zip(attrs["kernel"], attrs["stride"], strict=True)]
    total: Val | None = None
    for tap in taps(spans):
        given: Val | None = share
        for at, (axis, back) in enumerate(zip(axes, tap, strict=True)):
            stride, pad = attrs["stride"][at], attrs["padding"][at]
            if given is not None:
                given = at_place(emit, given, axis, 1, pad - back * stride, stride, size[axis])
        for at, (axis, back) in enumerate(zip(axes, tap, strict=True)):
            given = None if given is None else _held(emit, given, axis, back, at, attrs)
        if given is not None:
            total = given if total is None else emit("add", total, given)
    if total is None:
        return (emit("full", shape=size, value=0.0, dtype=g.type.dtype),)
    return (to(emit, total, g.type.dtype),)


def _held(emit: Emit, given: Val, axis: int, back: int, at: int, attrs: Attrs) -> Val | None:
    """Zero where the window that lies `back` before the last ends before the element."""
    kernel, stride, pad = attrs["kernel"][at], attrs["stride"][at], attrs["padding"][at]
    if (back + 1) * stride <= kernel:
        return given
    count = given.type.shape[axis]
    if count == ONE:
        return given if pad % stride + back * stride < kernel else None
    number = numbered(emit, axis, given.type.rank, count)
    place = emit("remainder", emit("add", number, pad) if pad else number, stride)
    return emit("where", emit("lt", place, kernel - back * stride), given, 0.0)
