"""Convolution in two dimensions, in either memory order, and its gradients. Accumulation is float32.

`data_format` NHWC: the operand is [n, h, w, c] and the weight [out, kh, kw, in / groups], both dense, which
is what torch calls channels-last. 1x1 in NHWC is a matrix product.
"""

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
    Number,
    Opaque,
    OpDef,
    Operand,
    Operands,
    Sample,
    Val,
    Vals,
    Wanted,
)
from esper_ir.ops.gradients import val
from esper_ir.ops.reduction import only
from esper_ir.ops.rules import ONE, Shape, accept, numel, same, tensor
from esper_ir.types import Dim, TensorType

Types = Sequence[TensorType | Number]
FORMAT = Attr("data_format", "str", "NCHW", ("NCHW", "NHWC"), "order of the axes in memory")
PARAMS = (
    Attr("stride", "ints", (1, 1)),
    Attr("padding", "ints", (0, 0), doc="zeros on both sides"),
    Attr("dilation", "ints", (1, 1)),
    Attr("groups", "int", 1),
    FORMAT,
    Attr("precision", "str", "ieee", ("ieee", "tf32"), "multiplication of float32 operands"),
)


def pair(value: Sequence[int], name: str, least: int) -> tuple[int, int]:
    """One number for both axes, or two."""
    found = tuple(value) * (2 if len(value) == 1 else 1)
    if len(found) != 2 or min(found) < least:
        raise EsperError("E0203", f"{name} is {list(value)}", hint=f"one or two numbers from {least} on")
    return found[0], found[1]


def spatial(shape: Shape, attrs: Attrs) -> tuple[Dim, Dim, Dim, Dim]:
    """(n, c, h, w) of a shape in its memory order."""
    n, a, b, c = shape
    return (n, c, a, b) if attrs["data_format"] == "NHWC" else (n, a, b, c)


def ordered(n: Dim, c: Dim, h: Dim, w: Dim, attrs: Attrs) -> Shape:
    return (n, h, w, c) if attrs["data_format"] == "NHWC" else (n, c, h, w)


def first(x: Any, attrs: Attrs) -> Any:
    """A torch tensor with channels at axis 1."""
    return x.permute(0, 3, 1, 2) if attrs["data_format"] == "NHWC" else x


def last(x: Any, attrs: Attrs) -> Any:
    return x.permute(0, 2, 3, 1) if attrs["data_format"] == "NHWC" else x


def _resolve(operands: Types, attrs: Attrs) -> dict[str, Any]:
    out = dict(attrs)
    for name, least in (("stride", 1), ("padding", 0), ("dilation", 1)):
        out[name] = pair(attrs[name], name, least)
    if attrs["groups"] < 1:
        raise EsperError("E0203", f"groups is {attrs['groups']}", hint="at least 1")
    return out


def _images(x: TensorType, other: TensorType) -> None:
    accept([x, other], "float")
    if x.rank != 4 or other.rank != 4:
        raise EsperError("E0204", f"{x} and {other} are not both of rank 4", hint="images and a weight")
    if x.dtype is not other.dtype:
        raise EsperError("E0205", f"{x} and {other} differ in dtype", hint="add a cast")


def _length(size: Dim, kernel: Dim, axis: int, attrs: Attrs) -> Dim:
    """floor((size + 2 padding - dilation (kernel - 1) - 1) / stride) + 1."""
    if kernel.static is None or kernel.static < 1:
        raise EsperError("E0206", f"a window of {kernel} is no number", hint="windows are static")
    reach = attrs["dilation"][axis] * (kernel.static - 1) + 1
    return (size + (2 * attrs["padding"][axis] - reach)) // attrs["stride"][axis] + 1


def _out(x: TensorType, w: TensorType, attrs: Attrs) -> TensorType:
    n, c, height, width = spatial(x.shape, attrs)
    out, part, kh, kw = spatial(w.shape, attrs)
    groups = attrs["groups"]
    same(part * groups, c, "channels of the weight times groups are those of the operand", w.shape, x.shape)
    if not out.static or out.static % groups:
        raise EsperError("E0206", f"cannot prove that {groups} groups divide {out} channels of the result")
    sizes = (_length(height, kh, 0, attrs), _length(width, kw, 1, attrs))
    if any(s.static is not None and s.static < 1 for s in sizes):
        raise EsperError("E0204", f"the window of {w} does not fit into {x}")
    return TensorType(x.dtype, ordered(n, out, *sizes, attrs))


def _infer(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x, w = tensor(operands[0]), tensor(operands[1], 1)
    _images(x, w)
    out = _out(x, w, attrs)
    if len(operands) > 2:
        bias, channels = tensor(operands[2], 2), spatial(out.shape, attrs)[1]
        if bias.rank != 1 or bias.dtype is not x.dtype:
            raise EsperError("E0204", f"{bias} is not a bias [out] of {x.dtype.value}")
        same(bias.shape[0], channels, "bias is [out]", bias.shape, out.shape)
    return (out,)


def _infer_input(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    g, w = tensor(operands[0]), tensor(operands[1], 1)
    _images(g, w)
    x = sized(g, attrs, 4)
    _same_result(_out(x, w, attrs), g)
    return (x,)


def _infer_weight(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    g, x = tensor(operands[0]), tensor(operands[1], 1)
    _images(g, x)
    w = sized(g, attrs, 4)
    _same_result(_out(x, w, attrs), g)
    return (w,)


def sized(g: TensorType, attrs: Attrs, rank: int) -> TensorType:
    """The type that attribute `size` tells."""
    if len(attrs["size"]) != rank:
        raise EsperError("E0203", f"size has {len(attrs['size'])} axes", hint=f"{rank}")
    return TensorType(g.dtype, attrs["size"])


def _same_result(made: TensorType, g: TensorType) -> None:
    for a, b in zip(made.shape, g.shape, strict=True):
        same(a, b, "the cotangent has the shape of the convolution", made.shape, g.shape)


def _is_product(x: TensorType, w: TensorType, attrs: Attrs) -> bool:
    """1x1 in NHWC without stride, padding and groups."""
    plain = attrs["stride"] == (1, 1) and attrs["padding"] == (0, 0) and attrs["groups"] == 1
    return attrs["data_format"] == "NHWC" and plain and w.shape[1:3] == (ONE, ONE)


def _expand(emit: Emit, inputs: Sequence[Operand], attrs: Attrs) -> Sequence[Val]:
    x, w = only(inputs), only(inputs[1:])
    if _is_product(x.type, w.type, attrs):
        out, channels = w.type.shape[0], w.type.shape[3]
        rows = emit("reshape", x, shape=(numel(x.type.shape[:3]), channels))
        flat = emit("permute", emit("reshape", w, shape=(out, channels)), dims=(1, 0))
        y = emit("matmul", rows, flat, precision=attrs["precision"])
        y = emit("reshape", y, shape=(*x.type.shape[:3], out))
    else:
        y = emit("convolution", x, w, **attrs)
    if len(inputs) < 3:
        return (y,)
    bias = val(inputs[2])
    if attrs["data_format"] == "NCHW":
        bias = emit("reshape", bias, shape=(bias.type.shape[0], ONE, ONE))
    return (emit("add", y, bias),)


def _vjp(
    emit: Emit, inputs: Operands, outputs: Vals, cotangents: Cotangents, attrs: Attrs, wanted: Wanted
) -> Cotangents:
    g, x, w = cotangents[0], val(inputs[0]), val(inputs[1])
    if g is None:
        return [None] * len(inputs)
    found = [
        emit("conv2d_input_grad", g, w, size=x.type.shape, **attrs) if wanted[0] else None,
        emit("conv2d_weight_grad", g, x, size=w.type.shape, **attrs) if wanted[1] else None,
    ]
    if len(inputs) > 2:
        dims = (0, 1, 2) if attrs["data_format"] == "NHWC" else (0, 2, 3)
        found.append(emit("sum", g, dims=dims) if wanted[2] else None)
    return found


def _vjp_input(
    emit: Emit, inputs: Operands, outputs: Vals, cotangents: Cotangents, attrs: Attrs, wanted: Wanted
) -> Cotangents:
    """Linear in the cotangent and in the weight."""
    h, g, w = cotangents[0], val(inputs[0]), val(inputs[1])
    if h is None:
        return [None, None]
    own = {k: v for k, v in attrs.items() if k != "size"}
    return [
        emit("convolution", h, w, **own) if wanted[0] else None,
        emit("conv2d_weight_grad", g, h, size=w.type.shape, **own) if wanted[1] else None,
    ]


def _vjp_weight(
    emit: Emit, inputs: Operands, outputs: Vals, cotangents: Cotangents, attrs: Attrs, wanted: Wanted
) -> Cotangents:
    """Linear in the cotangent and in the operand."""
    h, g, x = cotangents[0], val(inputs[0]), val(inputs[1])
    if h is None:
        return [None, None]
    own = {k: v for k, v in attrs.items() if k != "size"}
    return [
        emit("convolution", x, h, **own) if wanted[0] else None,
        emit("conv2d_input_grad", g, h, size=x.type.shape, **own) if wanted[1] else None,
    ]


# References.


def _geometry(attrs: Attrs) -> tuple[Any, ...]:
    return attrs["stride"], attrs["padding"], attrs["dilation"], attrs["groups"]


def _reference(inputs: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
    x, w, *bias = inputs
    y = functional.conv2d(first(x, attrs), first(w, attrs), bias[0] if bias else None, *_geometry(attrs))
    return (last(y, attrs),)


def _reference_gradient(which: int) -> Any:
    def reference(inputs: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
        g, other = (first(t, attrs) for t in inputs)
        own = first(inputs[0].new_zeros(attrs["size"]), attrs)
        x, w = (own, other) if which == 0 else (other, own)
        stride, padding, dilation, groups = _geometry(attrs)
        mask = [which == 0, which == 1, False]
        made = torch.ops.aten.convolution_backward(
            g, x, w, None, stride, padding, dilation, False, [0, 0], groups, mask
        )
        return (last(made[which], attrs),)

    return reference


def _flops(weight: int) -> Any:
    """Two per element of the smaller image, tap and channel; `weight`: which operand is the weight."""

    def cost(operands: Types, outputs: Sequence[TensorType], attrs: Attrs) -> Dim:
        taps = outputs[0] if weight < 0 else tensor(operands[1], 1)
        _, part, kh, kw = spatial(taps.shape, attrs)
        image = outputs[0] if weight == 1 else tensor(operands[0])
        return image.numel * part * kh * kw * 2

    return cost


Case = tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...], Attrs]
"""dtype, operand, weight, result, attributes."""
ROWS: tuple[Case, ...] = (
    ("float32", (2, 3, 5, 6), (4, 3, 3, 3), (2, 4, 5, 6), {"padding": (1, 1)}),
    ("float32", (2, 4, 7, 6), (6, 2, 3, 2), (2, 6, 3, 4),
     {"stride": (2, 1), "dilation": (1, 2), "groups": 2}),
    ("float32", (2, 5, 6, 4), (4, 3, 3, 1), (2, 5, 6, 4),
     {"padding": (1, 1), "groups": 4, "data_format": "NHWC"}),
    ("float32", (1, 5, 4, 3), (4, 1, 1, 3), (1, 5, 4, 4), {"data_format": "NHWC"}),
    ("bfloat16", (2, 5, 6, 8), (4, 3, 3, 8), (2, 3, 3, 4),
     {"padding": (1, 1), "stride": (2, 2), "data_format": "NHWC"}),
    ("float64", (1, 2, 4, 4), (3, 2, 2, 2), (1, 3, 3, 3), {}),
)  # fmt: skip


def _samples(*order: int, size: int | None = None) -> tuple[Sample, ...]:
    """Operands of the cases by their place in (operand, weight, result)."""
    out = []
    for dtype, *shapes, attrs in ROWS:
        more = {} if size is None else {"size": shapes[size]}
        out.append(Sample(tuple(TensorType.of(dtype, shapes[i]) for i in order), {**attrs, **more}))
    return tuple(out)


def _biased() -> tuple[Sample, ...]:
    out = []
    for dtype, x, w, _, attrs in ROWS[:4]:
        kinds = tuple(TensorType.of(dtype, s) for s in (x, w, (w[0],)))
        out.append(Sample(kinds, attrs))
    return tuple(out)


SIZE = Attr("size", "shape", doc="shape of the result")

OPS = (
    OpDef(
        name="conv2d", infer=_infer, reference=_reference, vjp=ByExpansion(), lowering=Composite(_expand),
        samples=(*_samples(0, 1), *_biased()), arity=(2, 3), params=PARAMS, resolve=_resolve, cost=_flops(1),
        doc="torch.nn.functional.conv2d(x, weight, bias)",
    ),
    OpDef(
        name="convolution", infer=_infer, reference=_reference, vjp=_vjp, lowering=Opaque("conv2d"),
        samples=(*_samples(0, 1), *_biased()), arity=(2, 3), params=PARAMS, resolve=_resolve, cost=_flops(1),
        doc="torch.nn.functional.conv2d(x, weight, bias), as a primitive",
    ),
    OpDef(
        name="conv2d_input_grad", infer=_infer_input, reference=_reference_gradient(0), vjp=_vjp_input,
        lowering=Opaque("conv2d_input_grad"), samples=_samples(2, 1, size=0), arity=(2, 2),
        params=(*PARAMS, SIZE), resolve=_resolve, cost=_flops(0),
        doc="gradient of conv2d with respect to its operand, from (cotangent, weight)",
    ),
    OpDef(
        name="conv2d_weight_grad", infer=_infer_weight, reference=_reference_gradient(1), vjp=_vjp_weight,
        lowering=Opaque("conv2d_weight_grad"), samples=_samples(2, 0, size=1), arity=(2, 2),
        params=(*PARAMS, SIZE), resolve=_resolve, cost=_flops(-1),
        doc="gradient of conv2d with respect to its weight, from (cotangent, operand)",
    ),
)  # fmt: skip
