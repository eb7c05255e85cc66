"""Convolution in three dimensions and its gradients: operands [n, c, d, h, w], accumulation float32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from esper_ir.diagnostics import EsperError
from esper_ir.lazy import functional, torch
from esper_ir.opdef import (
    Attr,
    Attrs,
    Cotangents,
    Emit,
    Number,
    Opaque,
    OpDef,
    Operands,
    Sample,
    Vals,
    Wanted,
)
from esper_ir.ops.convolution import SIZE, sized
from esper_ir.ops.gradients import val
from esper_ir.ops.rules import accept, same, tensor
from esper_ir.types import Dim, TensorType

Types = Sequence[TensorType | Number]
PRECISION = Attr("precision", "str", "ieee", ("ieee", "tf32"), "multiplication of float32 operands")


def tuned(value: Sequence[int], name: str, least: int, rank: int) -> tuple[int, ...]:
    """One number for all axes, or one per axis; E0203 otherwise."""
    found = tuple(value) * (rank if len(value) == 1 else 1)
    if len(found) != rank or min(found) < least:
        raise EsperError("E0203", f"{name} is {list(value)}", hint=f"one or {rank} numbers from {least} on")
    return found


def geometry(rank: int) -> tuple[Attr, ...]:
    """Attributes of a convolution over `rank` axes."""
    return (
        Attr("stride", "ints", (1,) * rank),
        Attr("padding", "ints", (0,) * rank, doc="zeros on both sides"),
        Attr("dilation", "ints", (1,) * rank),
        Attr("groups", "int", 1),
        PRECISION,
    )


def resolver(rank: int) -> Any:
    """Attributes with one number per axis."""

    def resolve(operands: Types, attrs: Attrs) -> dict[str, Any]:
        out = dict(attrs)
        for name, least in (("stride", 1), ("padding", 0), ("dilation", 1)):
            out[name] = tuned(attrs[name], name, least, rank)
        if attrs["groups"] < 1:
            raise EsperError("E0203", f"groups is {attrs['groups']}", hint="at least 1")
        return out

    return resolve


def images(x: TensorType, other: TensorType, rank: int) -> None:
    """Both floating, of one dtype and of `rank` axes beside two."""
    accept([x, other], "float")
    if x.rank != rank + 2 or other.rank != rank + 2:
        raise EsperError(
            "E0204", f"{x} and {other} are not both of rank {rank + 2}", hint="images and a weight"
        )
    if x.dtype is not other.dtype:
        raise EsperError("E0205", f"{x} and {other} differ in dtype", hint="add a cast")


def convolved(x: TensorType, w: TensorType, attrs: Attrs) -> TensorType:
    """Type of it; per axis floor((size + 2 padding - dilation (kernel - 1) - 1) / stride) + 1."""
    groups, out = attrs["groups"], w.shape[0]
    same(w.shape[1] * groups, x.shape[1], "channels of the weight times groups are the operand's", w.shape,
         x.shape)  # fmt: skip
    if not out.static or out.static % groups:
        raise EsperError("E0206", f"cannot prove that {groups} groups divide {out} channels of the result")
    sizes: list[Dim] = []
    for axis, (size, kernel) in enumerate(zip(x.shape[2:], w.shape[2:], strict=True)):
        if kernel.static is None or kernel.static < 1:
            raise EsperError("E0206", f"a window of {kernel} is no number", hint="windows are static")
        reach = attrs["dilation"][axis] * (kernel.static - 1) + 1
        made = (size + (2 * attrs["padding"][axis] - reach)) // attrs["stride"][axis] + 1
        if made.static is not None and made.static < 1:
            raise EsperError("E0204", f"the window of {w} does not fit into {x}")
        sizes.append(made)
    return TensorType(x.dtype, (x.shape[0], out, *sizes))


def with_bias(out: TensorType, operands: Types) -> TensorType:
    """Checks the bias [out] that may follow the operand and the weight."""
    if len(operands) > 2:
        bias = tensor(operands[2], 2)
        if bias.rank != 1 or bias.dtype is not out.dtype:
            raise EsperError("E0204", f"{bias} is not a bias [out] of {out.dtype.value}")
        same(bias.shape[0], out.shape[1], "bias is [out]", bias.shape, out.shape)
    return out


def _infer(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x, w = tensor(operands[0]), tensor(operands[1], 1)
    images(x, w, 3)
    return (with_bias(convolved(x, w, attrs), operands),)


def _fits(made: TensorType, g: TensorType) -> None:
    for a, b in zip(made.shape, g.shape, strict=True):
        same(a, b, "the cotangent has the shape of the convolution", made.shape, g.shape)


def _infer_input(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    g, w = tensor(operands[0]), tensor(operands[1], 1)
    images(g, w, 3)
    x = sized(g, attrs, 5)
    _fits(convolved(x, w, attrs), g)
    return (x,)


def _infer_weight(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    g, x = tensor(operands[0]), tensor(operands[1], 1)
    images(g, x, 3)
    w = sized(g, attrs, 5)
    _fits(convolved(x, w, attrs), g)
    return (w,)


def _vjp(
    emit: Emit, inputs: Operands, outputs: Vals, cotangents: Cotangents, attrs: Attrs, wanted: Wanted
) -> Cotangents:
    g, x, w = cotangents[0], val(inputs[0]), val(inputs[1])
    if g is None:
        return [None] * len(inputs)
    found = [
        emit("conv3d_input_grad", g, w, size=x.type.shape, **attrs) if wanted[0] else None,
        emit("conv3d_weight_grad", g, x, size=w.type.shape, **attrs) if wanted[1] else None,
    ]
    if len(inputs) > 2:
        found.append(emit("sum", g, dims=(0, 2, 3, 4)) if wanted[2] else None)
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
        emit("convolution3d", h, w, **own) if wanted[0] else None,
        emit("conv3d_weight_grad", g, h, size=w.type.shape, **own) if wanted[1] else None,
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
        emit("convolution3d", x, h, **own) if wanted[0] else None,
        emit("conv3d_input_grad", g, h, size=x.type.shape, **own) if wanted[1] else None,
    ]


def _numbers(attrs: Attrs) -> tuple[Any, ...]:
    return attrs["stride"], attrs["padding"], attrs["dilation"], attrs["groups"]


def _reference(inputs: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
    x, w, *bias = inputs
    return (functional.conv3d(x, w, bias[0] if bias else None, *_numbers(attrs)),)


def _reference_gradient(which: int) -> Any:
    def reference(inputs: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
        g, other = inputs
        own = g.new_zeros(attrs["size"])
        x, w = (own, other) if which == 0 else (other, own)
        stride, padding, dilation, groups = _numbers(attrs)
        made = torch.ops.aten.convolution_backward(
            g, x, w, None, stride, padding, dilation, False, [0], groups, [which == 0, which == 1, False]
        )
        return (made[which],)

    return reference


def _flops(weight: int) -> Any:
    """Two per element of the smaller image, tap and channel; `weight`: which operand is the weight."""

    def cost(operands: Types, outputs: Sequence[TensorType], attrs: Attrs) -> Dim:
        taps = outputs[0] if weight < 0 else tensor(operands[1], 1)
        image = outputs[0] if weight == 1 else tensor(operands[0])
        out = image.numel * 2
        for size in taps.shape[1:]:
            out = out * size
        return out

    return cost


ROWS: tuple[tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...], Attrs], ...] = (
    ("float32", (2, 3, 4, 5, 4), (4, 3, 3, 3, 3), (2, 4, 4, 5, 4), {"padding": (1, 1, 1)}),
    ("float32", (1, 4, 5, 6, 4), (6, 2, 2, 3, 2), (1, 6, 2, 2, 3),
     {"stride": (2, 2, 1), "dilation": (1, 2, 1), "padding": (0, 1, 0), "groups": 2}),
    ("bfloat16", (1, 2, 4, 4, 4), (3, 2, 2, 2, 2), (1, 3, 3, 3, 3), {}),
    ("float64", (1, 2, 4, 4, 4), (3, 2, 2, 2, 2), (1, 3, 3, 3, 3), {}),
)  # fmt: skip


def _samples(*order: int, size: int | None = None) -> tuple[Sample, ...]:
    """Operands of the cases by their place in (operand, weight, result)."""
    out = []
    for dtype, *shapes, attrs in ROWS:
        more = {} if size is None else {"size": shapes[size]}
        out.append(Sample(tuple(TensorType.of(dtype, shapes[i]) for i in order), {**attrs, **more}))
    return tuple(out)


GEOMETRY = geometry(3)

OPS = (
    OpDef(
        name="convolution3d", infer=_infer, reference=_reference, vjp=_vjp, lowering=Opaque("conv3d"),
        samples=_samples(0, 1), arity=(2, 3), params=GEOMETRY, resolve=resolver(3), cost=_flops(1),
        doc="torch.nn.functional.conv3d(x, weight, bias), as a primitive",
    ),
    OpDef(
        name="conv3d_input_grad", infer=_infer_input, reference=_reference_gradient(0), vjp=_vjp_input,
        lowering=Opaque("conv3d_input_grad"), samples=_samples(2, 1, size=0), arity=(2, 2),
        params=(*GEOMETRY, SIZE), resolve=resolver(3), cost=_flops(0),
        doc="gradient of conv3d with respect to its operand, from (cotangent, weight)",
    ),
    OpDef(
        name="conv3d_weight_grad", infer=_infer_weight, reference=_reference_gradient(1), vjp=_vjp_weight,
        lowering=Opaque("conv3d_weight_grad"), samples=_samples(2, 0, size=1), arity=(2, 2),
        params=(*GEOMETRY, SIZE), resolve=resolver(3), cost=_flops(-1),
        doc="gradient of conv3d with respect to its weight, from (cotangent, operand)",
    ),
)  # fmt: skip
