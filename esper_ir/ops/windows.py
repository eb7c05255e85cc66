"""Positions moved, spread or thinned along an axis, with a number where nothing lies: what shifts, pooling
and their gradients read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from esper_ir.diagnostics import EsperError
from esper_ir.lazy import torch
from esper_ir.opdef import (
    Attr,
    Attrs,
    Cotangents,
    Emit,
    Movement,
    Number,
    OpDef,
    Operands,
    Sample,
    Val,
    Vals,
    Wanted,
)
from esper_ir.ops.reduction import only
from esper_ir.ops.rules import ONE, axis, tensor
from esper_ir.types import Dim, DType, TensorType

Types = Sequence[TensorType | Number]


def outside(attrs: Attrs, dtype: DType) -> float | int:
    """The number where the operand has no position."""
    if attrs["outside"] == "zero":
        return 0.0 if dtype.is_floating else 0
    if dtype.is_floating:
        return -float("inf")
    return 0 if dtype in (DType.uint8, DType.bool) else -(1 << (8 * dtype.itemsize - 1))


def _resolve(operands: Types, attrs: Attrs) -> dict[str, Any]:
    x = tensor(operands[0])
    if not x.rank:
        raise EsperError("E0207", "a window needs an axis", hint="reshape to [1]")
    if attrs["mul"] < 1 or attrs["div"] < 1:
        raise EsperError("E0203", f"mul {attrs['mul']} and div {attrs['div']}", hint="positive numbers")
    at = axis(attrs["dim"], x.rank)
    size = x.shape[at] if attrs["size"] is None else Dim.of(attrs["size"])
    return {**attrs, "dim": at, "size": size}


def _infer(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x, at, size = tensor(operands[0]), attrs["dim"], attrs["size"]
    if size == ONE or size == Dim():
        raise EsperError("E0203", f"a window of {size} positions", hint="a slice, or a number")
    return (TensorType(x.dtype, (*x.shape[:at], size, *x.shape[at + 1 :])),)


def _reference(inputs: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
    x, at = inputs[0], attrs["dim"]
    place = torch.arange(int(attrs["size"]), device=x.device) * attrs["mul"] + attrs["add"]
    place = torch.div(place, attrs["div"], rounding_mode="floor")
    inside = (place >= 0) & (place < x.shape[at])
    shape = [-1 if i == at else 1 for i in range(x.dim())]
    number = outside(attrs, DType(str(x.dtype).removeprefix("torch.")))
    if not x.shape[at]:
        return (x.new_full([len(place) if i == at else n for i, n in enumerate(x.shape)], number),)
    made = x.index_select(at, place.clamp(0, x.shape[at] - 1))
    return (torch.where(inside.reshape(shape), made, torch.full_like(made, number)),)


def _vjp(
    emit: Emit, inputs: Operands, outputs: Vals, cotangents: Cotangents, attrs: Attrs, wanted: Wanted
) -> Cotangents:
    """dx[q] is g at the position p with p mul + add = q, where there is one."""
    g, x, at = cotangents[0], only(inputs), attrs["dim"]
    if g is None or not wanted[0]:
        return [None]
    if attrs["div"] != 1:
        raise EsperError("E0204", "no gradient of a window that repeats positions", hint="div 1")
    size = x.type.shape[at]
    zero = emit("full", shape=x.type.shape, value=0.0, dtype=g.type.dtype)
    if size == ONE or size == Dim():
        return [_single(emit, g, attrs, zero)]
    made = emit("window", g, dim=at, mul=1, add=-attrs["add"], div=attrs["mul"], size=size)
    if attrs["mul"] == 1:
        return [made]
    place = emit("add", emit("arange", end=size, dtype=DType.int64), -attrs["add"])
    exact = emit("eq", emit("remainder", place, attrs["mul"]), 0)
    shape = tuple(size if i == at else ONE for i in range(x.type.rank))
    return [emit("where", emit("reshape", exact, shape=shape), made, zero)]


def _single(emit: Emit, g: Val, attrs: Attrs, zero: Val) -> Val:
    """Of an operand with one position along the axis: the one that reads it, where there is one."""
    place, rest = divmod(-attrs["add"], attrs["mul"])
    size = g.type.shape[attrs["dim"]]
    if rest or place < 0 or size.static is None or place >= size.static:
        return zero
    return emit("slice", g, dim=attrs["dim"], start=place, end=place + 1)


def _samples() -> tuple[Sample, ...]:
    rows: tuple[tuple[str, tuple[int, ...], dict[str, Any]], ...] = (
        ("float32", (4, 5), {"dim": 1, "add": -1}),
        ("float32", (2, 5, 3), {"dim": -2, "add": 2}),
        ("bfloat16", (3, 7, 4), {"dim": 1, "mul": 2, "size": 4, "outside": "least"}),
        ("float64", (6, 3), {"dim": 0, "mul": 3, "add": 1, "size": 3}),
        ("float32", (1, 3), {"dim": 0, "mul": 2, "add": -2, "size": 4}),
        ("int64", (4, 5), {"dim": 0, "add": 1, "outside": "least"}),
        ("bool", (3, 4), {"dim": 1, "add": -1}),
    )
    return tuple(Sample((TensorType.of(d, s),), a) for d, s, a in rows)


OPS = (
    OpDef(
        name="window", infer=_infer, reference=_reference, vjp=_vjp, lowering=Movement("window"),
        samples=_samples(), arity=(1, 1), resolve=_resolve, cost=lambda i, o, a: Dim(),
        params=(
            Attr("dim", "int"), Attr("mul", "int", 1), Attr("add", "int", 0), Attr("div", "int", 1),
            Attr("size", "scalar", None, doc="positions of the result; null: those of the operand"),
            Attr("outside", "str", "zero", ("zero", "least"), "where the operand has no such position"),
        ),
        doc="x at floor((position * mul + add) / div) along an axis, 0 or the least number outside",
    ),
)  # fmt: skip
