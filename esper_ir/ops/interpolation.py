"""Resampling to another size: a product with a matrix per axis, which positions alone make.

There 0 times an infinity is NaN: unlike in torch, a value that is not finite reaches its whole row.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from esper_ir.diagnostics import EsperError
from esper_ir.lazy import torch
from esper_ir.opdef import (
    Attr,
    Attrs,
    ByExpansion,
    Composite,
    Emit,
    Number,
    OpDef,
    Operand,
    Sample,
    Tolerance,
    Val,
)
from esper_ir.ops.gradients import to, up, val
from esper_ir.ops.pooling import image
from esper_ir.ops.resampling import along, positions
from esper_ir.ops.rules import ONE, tensor
from esper_ir.ops.volume import tuned
from esper_ir.types import Dim, DType, TensorType

Types = Sequence[TensorType | Number]


def _cost(operands: Types, outputs: Sequence[TensorType], attrs: Attrs) -> Dim:
    return tensor(operands[0]).numel * 2


def _resolve_scaled(operands: Types, attrs: Attrs) -> dict[str, Any]:
    rank, mode = tensor(operands[0]).rank - 2, attrs["mode"]
    if rank not in (1, 2, 3):
        raise EsperError("E0204", f"{tensor(operands[0])} is no batch of images", hint="rank 3 to 5")
    if rank != 2 and (mode == "cubic" or attrs["antialias"]):
        raise EsperError("E0204", f"{tensor(operands[0])} is no picture", hint="cubic, antialias: rank 4")
    if attrs["antialias"] and mode not in BETWEEN:
        raise EsperError("E0203", f"antialias of mode {mode}", hint="linear or cubic")
    if attrs["scale"] is not None and attrs["scale"] <= 0.0:
        raise EsperError("E0203", f"scale is {attrs['scale']}", hint="a positive number")
    if mode in BETWEEN and attrs["align_corners"] is None:
        attrs = {**attrs, "align_corners": False}
    return {**attrs, "size": tuned(attrs["size"], "size", 1, rank)}


def _infer_scaled(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x = tensor(operands[0])
    image(x, x.rank - 2)
    if any(d.static is None for d in x.shape[2:]):
        raise EsperError("E0206", f"resampling of {x} of symbolic size", hint="sizes of images are static")
    return (TensorType(x.dtype, (*x.shape[:2], *(Dim.of(n) for n in attrs["size"]))),)


def _weights(emit: Emit, size: int, count: int, attrs: Attrs, dtype: DType) -> Val:
    """[count, size]: where each result lies among the operands. torch.nn.functional.interpolate's rules:
    centres at half positions, or the first and last centres together (`align_corners`).
    """
    if attrs["mode"] not in BETWEEN:
        return to(emit, _picked(emit, size, count, attrs), dtype)
    row = emit("cast", emit("reshape", positions(emit, Dim.of(count)), shape=(count, 1)), dtype=DType.float64)
    column = emit("cast", positions(emit, Dim.of(size)), dtype=DType.float64)
    step = size / count if attrs["scale"] is None else 1.0 / attrs["scale"]
    if attrs["align_corners"]:
        step = (size - 1) / (count - 1) if count > 1 else 0.0
    if attrs["antialias"]:
        return to(emit, _smooth(emit, row, column, step, attrs), dtype)
    if attrs["align_corners"]:
        at = emit("mul", row, step)
    else:
        at = emit("sub", emit("mul", emit("add", row, 0.5), step), 0.5)
    if attrs["mode"] == "cubic":
        return to(emit, _cubic(emit, at, column, size), dtype)
    at = emit("clamp", at, min=0.0, max=float(size - 1))
    return to(emit, _triangle(emit, emit("sub", column, at)), dtype)


def _single(value: float) -> float:
    """Rounded to float32."""
    return struct.unpack("f", struct.pack("f", value))[0]


def _step(size: int, count: int, attrs: Attrs) -> float:
    """From one nearest result to the next, in float32 as torch has it."""
    return _single(size / count if attrs["scale"] is None else 1.0 / attrs["scale"])


def _picked(emit: Emit, size: int, count: int, attrs: Attrs) -> Val:
    """[count, size]: which operand a result is. torch multiplies positions in float32, whose rounding decides
    where a product is almost whole.
    """
    row = emit("cast", emit("reshape", positions(emit, Dim.of(count)), shape=(count, 1)), dtype=DType.float32)
    if attrs["mode"] == "nearest-exact":
        row = emit("add", row, 0.5)
    at = emit("floor", emit("mul", row, _step(size, count, attrs)))
    at = emit("clamp", at, max=float(size - 1))
    return emit("eq", emit("cast", positions(emit, Dim.of(size)), dtype=DType.float32), at)


def _triangle(emit: Emit, away: Val) -> Val:
    return emit("clamp", emit("sub", 1.0, emit("abs", away)), min=0.0)


def _bend(emit: Emit, away: Val, a: float) -> Val:
    """Keys' cubic convolution (1981): two polynomials of the distance, 0 from 2 on."""
    d = emit("abs", away)
    near = emit("mul", emit("mul", emit("sub", emit("mul", d, a + 2.0), a + 3.0), d), d)
    far = emit("sub", emit("mul", emit("add", emit("mul", emit("sub", d, 5.0), d), 8.0), d), 4.0)
    outside = emit("where", emit("lt", d, 2.0), emit("mul", far, a), 0.0)
    return emit("where", emit("le", d, 1.0), emit("add", near, 1.0), outside)


def _cubic(emit: Emit, at: Val, column: Val, size: int) -> Val:
    """Four neighbours; those outside are the last ones inside."""
    base = emit("floor", at)
    total: Val | None = None
    for tap in (-1.0, 0.0, 1.0, 2.0):
        place = emit("add", base, tap)
        hit = emit("eq", column, emit("clamp", place, min=0.0, max=float(size - 1)))
        share = emit("where", hit, _bend(emit, emit("sub", place, at), -0.75), 0.0)
        total = share if total is None else emit("add", total, share)
    assert total is not None
    return total


def _smooth(emit: Emit, row: Val, column: Val, step: float, attrs: Attrs) -> Val:
    """Where the result is smaller, the filter is as wide as a result is; shares add up to 1."""
    centre = emit("mul", emit("add", row, 0.5), step)
    away = emit("div", emit("add", emit("sub", column, centre), 0.5), max(step, 1.0))
    share = _triangle(emit, away) if attrs["mode"] == "linear" else _bend(emit, away, -0.5)
    return emit("div", share, emit("sum", share, dims=(1,), keepdim=True))


def _plain(size: int, count: int, attrs: Attrs) -> bool:
    """Every element repeated, or every n-th one taken: but for a product that float32 rounds down, as 41
    times the 41st part of 1 is.
    """
    if attrs["mode"] != "nearest" or (size % count and count % size):
        return False
    step = _step(size, count, attrs)
    return all(min(int(_single(i * step)), size - 1) == i * size // count for i in range(count))


def _nearest(emit: Emit, x: Val, axis: int, count: int) -> Val:
    """Sizes that divide each other."""
    shape = x.type.shape
    size = shape[axis].static
    assert size is not None
    if size % count == 0:
        return emit("slice", x, dim=axis, step=size // count)
    apart = emit("reshape", x, shape=(*shape[: axis + 1], ONE, *shape[axis + 1 :]))
    wide = emit("expand", apart, shape=(*shape[: axis + 1], Dim.of(count // size), *shape[axis + 1 :]))
    return emit("reshape", wide, shape=(*shape[:axis], Dim.of(count), *shape[axis + 1 :]))


def _expand_scaled(emit: Emit, inputs: Sequence[Operand], attrs: Attrs) -> Sequence[Val]:
    x = val(inputs[0])
    y = up(emit, x)
    for axis, count in enumerate(attrs["size"], 2):
        size = x.type.shape[axis].static
        assert size is not None
        if size == count and attrs["scale"] is None:
            continue
        if _plain(size, count, attrs):
            y = _nearest(emit, y, axis, count)
        else:
            y = along(emit, y, axis, _weights(emit, size, count, attrs, y.type.dtype))
    return (to(emit, y, x.type.dtype),)


MODES = {1: "linear", 2: "bilinear", 3: "trilinear"}
BETWEEN = ("linear", "cubic")
ATEN = {"nearest": "upsample_nearest", "nearest-exact": "_upsample_nearest_exact"}


def _scaled_reference(inputs: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
    """A scale beside the size has no way through interpolate: the operators below it are called."""
    x, size, rank = inputs[0], list(attrs["size"]), inputs[0].dim() - 2
    scales = [attrs["scale"]] * rank
    if attrs["mode"] in ATEN:
        return (getattr(torch.ops.aten, f"{ATEN[attrs['mode']]}{rank}d")(x, size, *scales),)
    smooth = attrs["antialias"]
    kind = "bicubic" if attrs["mode"] == "cubic" else MODES[rank]
    name = f"{'_' if smooth else ''}upsample_{kind}{rank}d{'_aa' if smooth else ''}"
    return (getattr(torch.ops.aten, name)(x, size, attrs["align_corners"], *scales),)


SCALED = tuple(
    Sample((TensorType.of(d, s),), {"size": size, "mode": mode, **more})
    for d, s, size in (
        ("float32", (2, 3, 5), (10,)), ("float32", (1, 2, 4, 6), (7, 3)), ("float32", (1, 2, 3, 4,
            3), (6, 2, 3)),
        ("bfloat16", (1, 2, 4, 4), (8, 8)), ("float64", (1, 2, 4, 6), (5, 9)),
    )
    for mode, more in (("nearest", {}), ("linear", {}), ("linear", {"align_corners": True}))
) + tuple(
    Sample((TensorType.of("float32", s),), {"size": size, "mode": mode, **more})
    for s, size, mode, more in (
        ((2, 3, 11), (22,), "nearest", {"scale": 2.0}), ((2, 3, 5), (9,), "nearest", {"scale": 1.9}),
        ((1, 2, 29), (58,), "nearest-exact", {}), ((1, 2, 4, 6), (7, 3), "nearest-exact", {}),
        ((1, 2, 4, 6), (6, 9), "linear", {"scale": 1.55}), ((1, 2, 4, 6), (7, 3), "cubic", {}),
        ((1, 2, 4, 6), (9, 12), "cubic", {"align_corners": True}),
        ((1, 2, 4, 6), (2, 9), "linear", {"antialias": True}),
        ((1, 2, 7, 6), (3, 9), "cubic", {"antialias": True}),
    )
)  # fmt: skip

OPS = (
    OpDef(
        name="interpolate", infer=_infer_scaled, reference=_scaled_reference, vjp=ByExpansion(),
        lowering=Composite(_expand_scaled), samples=SCALED, arity=(1, 1), resolve=_resolve_scaled, cost=_cost,
        params=(
            Attr("size", "ints", doc="sizes of the result"),
            Attr("mode", "str", "nearest", ("nearest", "nearest-exact", "linear", "cubic"),
                 "linear: bilinear and trilinear as well; cubic: of pictures"),
            Attr("align_corners", "bool", None, doc="linear, cubic: the first and last centres stay; "
                 "null: false"),
            Attr("scale", "float", None, doc="how much larger the result is, where that is not the ratio of "
                 "the sizes"),
            Attr("antialias", "bool", False, doc="of pictures that get smaller, linear or cubic"),
        ),
        tolerance=Tolerance(2.0, "torch computes the weights in the type of the operand"),
        doc="torch.nn.functional.interpolate to a size; between elements what is not finite reaches its row",
    ),
)  # fmt: skip
