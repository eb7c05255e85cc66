"""Convolution over one and three axes, and transposed over one to three, written with the primitives.

One axis is a picture of height 1. A transposed convolution is the gradient of a convolution with respect to
its operand, whose weight [in, out / groups, ...] it shares.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from esper_ir.diagnostics import EsperError
from esper_ir.lazy import functional
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
    Val,
)
from esper_ir.ops.gradients import val
from esper_ir.ops.rules import ONE, same, tensor
from esper_ir.ops.volume import convolved, geometry, images, resolver, tuned, with_bias
from esper_ir.types import Dim, TensorType

Types = Sequence[TensorType | Number]
Expand = Callable[[Emit, Sequence[Operand], Attrs], Sequence[Val]]
FLAT = {"stride": 1, "padding": 0, "dilation": 1}
"""What the added axis of height 1 has."""


def _tall(emit: Emit, x: Val) -> Val:
    """[n, c, w] as [n, c, 1, w]."""
    n, c, w = x.type.shape
    return emit("reshape", x, shape=(n, c, ONE, w))


def _planar(attrs: Attrs) -> dict[str, Any]:
    """Attributes of the two-dimensional call for one axis."""
    out = {name: (flat, *attrs[name]) for name, flat in FLAT.items()}
    return {**out, "groups": attrs["groups"], "precision": attrs["precision"]}


def _shifted(emit: Emit, y: Val, inputs: Sequence[Operand]) -> Val:
    """The bias per channel added."""
    if len(inputs) < 3:
        return y
    bias = val(inputs[2])
    return emit("add", y, emit("reshape", bias, shape=(bias.type.shape[0], *[ONE] * (y.type.rank - 2))))


def _expand_conv1d(emit: Emit, inputs: Sequence[Operand], attrs: Attrs) -> Sequence[Val]:
    x, w = (_tall(emit, val(o)) for o in inputs[:2])
    y = emit("convolution", x, w, **_planar(attrs))
    n, c, _, width = y.type.shape
    return (_shifted(emit, emit("reshape", y, shape=(n, c, width)), inputs),)


def _expand_conv3d(emit: Emit, inputs: Sequence[Operand], attrs: Attrs) -> Sequence[Val]:
    return (_shifted(emit, emit("convolution3d", *inputs[:2], **attrs), inputs),)


def _infer(rank: int) -> Any:
    def infer(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
        x, w = tensor(operands[0]), tensor(operands[1], 1)
        images(x, w, rank)
        return (with_bias(convolved(x, w, attrs), operands),)

    return infer


# Transposed.


def _resolve_transposed(rank: int) -> Any:
    inner = resolver(rank)

    def resolve(operands: Types, attrs: Attrs) -> dict[str, Any]:
        out = inner(operands, attrs)
        out["output_padding"] = tuned(attrs["output_padding"], "output_padding", 0, rank)
        if any(p >= s for p, s in zip(out["output_padding"], out["stride"], strict=True)):
            hint = "smaller than the stride"
            raise EsperError("E0203", f"output_padding is {list(out['output_padding'])}", hint=hint)
        return out

    return resolve


def _transposed(x: TensorType, w: TensorType, attrs: Attrs) -> TensorType:
    """(size - 1) stride - 2 padding + dilation (kernel - 1) + output_padding + 1 per axis."""
    same(w.shape[0], x.shape[1], "the weight is [in, out / groups, ...]", w.shape, x.shape)
    groups = attrs["groups"]
    if not x.shape[1].static or x.shape[1].static % groups:
        raise EsperError("E0206", f"cannot prove that {groups} groups divide {x.shape[1]} channels")
    if any(size.static == 0 for size in x.shape[2:]):
        raise EsperError("E0204", f"{x} has images of nothing", hint="only the batch may be empty")
    sizes: list[Dim] = []
    for axis, (size, kernel) in enumerate(zip(x.shape[2:], w.shape[2:], strict=True)):
        if kernel.static is None or kernel.static < 1:
            raise EsperError("E0206", f"a window of {kernel} is no number", hint="windows are static")
        reach = attrs["dilation"][axis] * (kernel.static - 1) + 1 + attrs["output_padding"][axis]
        made = (size - 1) * attrs["stride"][axis] + (reach - 2 * attrs["padding"][axis])
        if made.static is not None and made.static < 1:
            raise EsperError("E0204", f"nothing is left of {x} with padding {attrs['padding']}")
        sizes.append(made)
    return TensorType(x.dtype, (x.shape[0], w.shape[1] * groups, *sizes))


def _infer_transposed(rank: int) -> Any:
    def infer(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
        x, w = tensor(operands[0]), tensor(operands[1], 1)
        images(x, w, rank)
        return (with_bias(_transposed(x, w, attrs), operands),)

    return infer


def _expand_transposed(rank: int) -> Expand:
    def expand(emit: Emit, inputs: Sequence[Operand], attrs: Attrs) -> Sequence[Val]:
        x, w = val(inputs[0]), val(inputs[1])
        size = _transposed(x.type, w.type, attrs).shape
        own = {k: v for k, v in attrs.items() if k != "output_padding"}
        if rank == 3:
            y = emit("conv3d_input_grad", x, w, size=size, **own)
        elif rank == 2:
            y = emit("conv2d_input_grad", x, w, size=size, **own)
        else:
            tall = (*size[:2], ONE, size[2])
            y = emit("conv2d_input_grad", _tall(emit, x), _tall(emit, w), size=tall, **_planar(attrs))
            y = emit("reshape", y, shape=size)
        return (_shifted(emit, y, inputs),)

    return expand


def _call(name: str, transposed: bool) -> Any:
    def reference(inputs: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
        x, w, *bias = inputs
        extra = {k: attrs[k] for k in ("stride", "padding", "dilation", "groups")}
        if transposed:
            extra["output_padding"] = attrs["output_padding"]
        return (getattr(functional, name)(x, w, bias[0] if bias else None, **extra),)

    return reference


def _cost(operands: Types, outputs: Sequence[TensorType], attrs: Attrs) -> Dim:
    """Two per element of the smaller image, tap and channel."""
    x, w = tensor(operands[0]), tensor(operands[1], 1)
    forward = w.shape[0] == outputs[0].shape[1]
    out = (outputs[0] if forward else x).numel * 2
    for size in w.shape[1:]:
        out = out * size
    return out


Row = tuple[str, tuple[int, ...], tuple[int, ...], bool, dict[str, Any]]
PLAIN: dict[int, tuple[Row, ...]] = {
    1: (
        ("float32", (2, 3, 9), (4, 3, 3), True, {"padding": (1,)}),
        ("float32", (2, 4, 11), (6, 2, 3), False, {"stride": (2,), "dilation": (2,), "groups": 2}),
        ("bfloat16", (2, 3, 9), (4, 3, 4), True, {"stride": (3,), "padding": (2,)}),
        ("float64", (1, 2, 5), (3, 2, 1), False, {}),
    ),
    3: (
        ("float32", (2, 3, 4, 5, 4), (4, 3, 3, 3, 3), True, {"padding": (1,)}),
        ("float32", (1, 4, 5, 6, 4), (6, 2, 2, 3, 2), False, {"stride": (2, 2, 1), "groups": 2}),
        ("bfloat16", (1, 2, 4, 4, 4), (3, 2, 2, 2, 2), True, {}),
        ("float64", (1, 2, 4, 4, 4), (3, 2, 1, 2, 2), False, {"dilation": (1, 2, 1)}),
    ),
}
TRANSPOSED: dict[int, tuple[Row, ...]] = {
    1: (
        ("float32", (2, 4, 5), (4, 3, 3), True, {"stride": (2,), "padding": (1,), "output_padding": (1,)}),
        ("float32", (2, 4, 5), (4, 2, 3), False, {"dilation": (2,), "groups": 2}),
        ("bfloat16", (2, 4, 5), (4, 3, 3), True, {"stride": (2,)}),
        ("float64", (1, 2, 4), (2, 3, 2), False, {}),
    ),
    2: (
        ("float32", (2, 4, 5, 4), (4, 3, 3, 2), True,
         {"stride": (2, 1), "padding": (1, 0), "output_padding": (1, 0)}),
        ("float32", (2, 4, 3, 4), (4, 2, 3, 3), False, {"dilation": (1, 2), "groups": 2, "stride": (2,)}),
        ("bfloat16", (2, 4, 5, 4), (4, 3, 3, 3), True, {}),
        ("float64", (1, 2, 3, 3), (2, 3, 2, 2), False, {"stride": (2, 2)}),
    ),
    3: (
        ("float32", (1, 4, 3, 4, 3), (4, 3, 3, 2, 3), True,
         {"stride": (2, 1, 2), "padding": (1, 0, 1), "output_padding": (1, 0, 0)}),
        ("float32", (1, 4, 3, 3, 2), (4, 2, 2, 2, 2), False, {"groups": 2}),
        ("bfloat16", (1, 2, 3, 3, 3), (2, 3, 2, 2, 2), True, {"stride": (2,)}),
        ("float64", (1, 2, 3, 3, 3), (2, 3, 2, 2, 2), False, {}),
    ),
}  # fmt: skip


def _samples(rows: Sequence[Row], transposed: bool) -> tuple[Sample, ...]:
    out = []
    for dtype, x, w, biased, attrs in rows:
        channels = w[1] * attrs.get("groups", 1) if transposed else w[0]
        shapes = (x, w, (channels,)) if biased else (x, w)
        out.append(Sample(tuple(TensorType.of(dtype, s) for s in shapes), attrs))
    return tuple(out)


def _plain(rank: int, expand: Expand) -> OpDef:
    name = f"conv{rank}d"
    return OpDef(
        name=name, infer=_infer(rank), reference=_call(name, False), vjp=ByExpansion(),
        lowering=Composite(expand), samples=_samples(PLAIN[rank], False), arity=(2, 3),
        params=geometry(rank), resolve=resolver(rank), cost=_cost,
        doc=f"torch.nn.functional.{name}(x, weight, bias)",
    )  # fmt: skip


def _transpose(rank: int) -> OpDef:
    name = f"conv_transpose{rank}d"
    padding = Attr("output_padding", "ints", (0,) * rank, doc="added to one side of the result")
    return OpDef(
        name=name, infer=_infer_transposed(rank), reference=_call(name, True), vjp=ByExpansion(),
        lowering=Composite(_expand_transposed(rank)), samples=_samples(TRANSPOSED[rank], True), arity=(2, 3),
        params=(*geometry(rank), padding), resolve=_resolve_transposed(rank), cost=_cost,
        doc=f"torch.nn.functional.{name}(x, weight [in, out / groups, ...], bias)",
    )  # fmt: skip


OPS = (
    _plain(1, _expand_conv1d),
    _plain(3, _expand_conv3d),
    *(_transpose(rank) for rank in (1, 2, 3)),
)
