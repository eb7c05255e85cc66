"""Pooling in two dimensions, in either memory order."""

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
    Opaque,
    OpDef,
    Operand,
    Operands,
    Sample,
    Val,
    Vals,
    Wanted,
)
from esper_ir.ops.convolution import FORMAT, SIZE, first, last, ordered, pair, sized, spatial
from esper_ir.ops.gradients import val
from esper_ir.ops.reduction import only
from esper_ir.ops.rules import ONE, accept, same, tensor
from esper_ir.types import Dim, DType, TensorType

Types = Sequence[TensorType | Number]
WINDOW = (
    Attr("kernel", "ints"), Attr("stride", "ints", None, doc="null: the kernel"),
    Attr("padding", "ints", (0, 0)), FORMAT,
)  # fmt: skip
COUNT = Attr("count_include_pad", "bool", True, doc="divide by the whole window at the border too")


def _resolve(operands: Types, attrs: Attrs) -> dict[str, Any]:
    kernel = pair(attrs["kernel"], "kernel", 1)
    stride = kernel if attrs["stride"] is None else pair(attrs["stride"], "stride", 1)
    padding = pair(attrs["padding"], "padding", 0)
    if any(2 * p > k for p, k in zip(padding, kernel, strict=True)):
        raise EsperError("E0203", f"padding {padding} of a window {kernel}", hint="at most half the window")
    return {**attrs, "kernel": kernel, "stride": stride, "padding": padding}


def _image(operand: TensorType | Number) -> TensorType:
    x = tensor(operand)
    accept([x], "float")
    if x.rank != 4:
        raise EsperError("E0204", f"{x} is no batch of images", hint="rank 4")
    if any(d.static == 0 for d in x.shape[1:]):
        raise EsperError("E0204", f"{x} has images of nothing", hint="only the batch may be empty")
    return x


def _pooled(x: TensorType, attrs: Attrs) -> TensorType:
    n, c, *sizes = spatial(x.shape, attrs)
    out = []
    for size, kernel, stride, padding in zip(
        sizes, attrs["kernel"], attrs["stride"], attrs["padding"], strict=True
    ):
        made = (size + (2 * padding - kernel)) // stride + 1
        if made.static is not None and made.static < 1:
            raise EsperError("E0204", f"the window {attrs['kernel']} does not fit into {x}")
        out.append(made)
    return TensorType(x.dtype, ordered(n, c, out[0], out[1], attrs))


def _infer(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    return (_pooled(_image(operands[0]), attrs),)


def _infer_indices(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    out = _pooled(_image(operands[0]), attrs)
    return out, TensorType(DType.int64, out.shape)


def _infer_max_gradient(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    g, x, places = (tensor(o, i) for i, o in enumerate(operands))
    made, indices = _infer_indices((x,), attrs)
    if g != made or places != indices:
        raise EsperError("E0204", f"{g} and {places} are not of this pooling", hint=f"{made} and {indices}")
    return (x,)


def _infer_avg_gradient(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    g = _image(operands[0])
    x = sized(g, attrs, 4)
    for a, b in zip(_pooled(x, attrs).shape, g.shape, strict=True):
        same(a, b, "the cotangent has the shape of the pooling", g.shape, x.shape)
    return (x,)


def _vjp_max(
    emit: Emit, inputs: Operands, outputs: Vals, cotangents: Cotangents, attrs: Attrs, wanted: Wanted
) -> Cotangents:
    if cotangents[0] is None or not wanted[0]:
        return [None]
    return [emit("max_pool2d_grad", cotangents[0], only(inputs), outputs[1], **attrs)]


def _vjp_avg(
    emit: Emit, inputs: Operands, outputs: Vals, cotangents: Cotangents, attrs: Attrs, wanted: Wanted
) -> Cotangents:
    if cotangents[0] is None or not wanted[0]:
        return [None]
    return [emit("avg_pool2d_grad", cotangents[0], size=only(inputs).type.shape, **attrs)]


def _vjp_avg_gradient(
    emit: Emit, inputs: Operands, outputs: Vals, cotangents: Cotangents, attrs: Attrs, wanted: Wanted
) -> Cotangents:
    if cotangents[0] is None or not wanted[0]:
        return [None]
    return [emit("avg_pool2d", cotangents[0], **{k: v for k, v in attrs.items() if k != "size"})]


def _window(attrs: Attrs) -> tuple[Any, ...]:
    return attrs["kernel"], attrs["stride"], attrs["padding"]


def _max_reference(inputs: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
    made = functional.max_pool2d(first(inputs[0], attrs), *_window(attrs), return_indices=True)
    return tuple(last(t, attrs) for t in made)


def _max_gradient_reference(inputs: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
    g, x, places = (first(t, attrs) for t in inputs)
    backward = torch.ops.aten.max_pool2d_with_indices_backward
    return (last(backward(g, x, *_window(attrs), (1, 1), False, places), attrs),)


def _avg_reference(inputs: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
    made = functional.avg_pool2d(
        first(inputs[0], attrs), *_window(attrs), count_include_pad=attrs["count_include_pad"]
    )
    return (last(made, attrs),)


def _avg_gradient_reference(inputs: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
    g, like = first(inputs[0], attrs), first(inputs[0].new_zeros(attrs["size"]), attrs)
    backward = torch.ops.aten.avg_pool2d_backward
    return (last(backward(g, like, *_window(attrs), False, attrs["count_include_pad"], None), attrs),)


def _expand_max(emit: Emit, inputs: Sequence[Operand], attrs: Attrs) -> Sequence[Val]:
    return emit.many("max_pool2d_with_indices", inputs[0], **attrs)[:1]


# Adaptive: windows of one size.


def _adaptive_window(x: TensorType, attrs: Attrs) -> tuple[int, int] | None:
    """Size of a window, or None for the mean over the whole image."""
    if attrs["output_size"] == (1, 1):
        return None
    sizes = [s.static for s in spatial(x.shape, attrs)[2:]]
    found = []
    for size, count in zip(sizes, attrs["output_size"], strict=True):
        if size is None or size % count:
            raise EsperError("E0206", f"cannot prove that {count} equal windows make {size} of {x}")
        found.append(size // count)
    return found[0], found[1]


def _resolve_adaptive(operands: Types, attrs: Attrs) -> dict[str, Any]:
    return {**attrs, "output_size": pair(attrs["output_size"], "output_size", 1)}


def _infer_adaptive(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x = _image(operands[0])
    _adaptive_window(x, attrs)
    n, c, _, _ = spatial(x.shape, attrs)
    height, width = (Dim.of(s) for s in attrs["output_size"])
    return (TensorType(x.dtype, ordered(n, c, height, width, attrs)),)


def _expand_adaptive(emit: Emit, inputs: Sequence[Operand], attrs: Attrs) -> Sequence[Val]:
    x = val(inputs[0])
    window = _adaptive_window(x.type, attrs)
    if window is not None:
        return (emit("avg_pool2d", x, kernel=window, data_format=attrs["data_format"]),)
    dims = (1, 2) if attrs["data_format"] == "NHWC" else (2, 3)
    n, c, _, _ = spatial(x.type.shape, attrs)
    mean = emit("mean", x, dims=dims)
    return (emit("reshape", mean, shape=ordered(n, c, ONE, ONE, attrs)),)


def _adaptive_reference(inputs: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
    return (last(functional.adaptive_avg_pool2d(first(inputs[0], attrs), attrs["output_size"]), attrs),)


def _cost(operands: Types, outputs: Sequence[TensorType], attrs: Attrs) -> Dim:
    kernel = attrs.get("kernel", (1, 1))
    return outputs[0].numel * kernel[0] * kernel[1]


ROWS: tuple[tuple[str, tuple[int, ...], tuple[int, ...], Attrs], ...] = (
    ("float32", (2, 3, 6, 8), (2, 3, 3, 4), {"kernel": (2, 2)}),
    ("float32", (2, 3, 7, 8), (2, 3, 4, 4), {"kernel": (3, 3), "stride": (2, 2), "padding": (1, 1)}),
    ("float32", (2, 7, 8, 3), (2, 4, 4, 3),
     {"kernel": (3, 3), "stride": (2, 2), "padding": (1, 1), "data_format": "NHWC"}),
    ("bfloat16", (2, 6, 6, 8), (2, 5, 3, 8), {"kernel": (2, 3), "stride": (1, 2), "padding": (0, 1),
     "data_format": "NHWC"}),
    ("float64", (1, 2, 4, 4), (1, 2, 2, 2), {"kernel": (2, 2)}),
)  # fmt: skip


def _samples(backward: bool = False, extra: Attrs | None = None) -> tuple[Sample, ...]:
    out = []
    for dtype, x, y, attrs in ROWS:
        more = {**attrs, **(extra or {}), **({"size": x} if backward else {})}
        out.append(Sample((TensorType.of(dtype, y if backward else x),), more))
    return tuple(out)


def _max_gradient_samples() -> tuple[Sample, ...]:
    """Whatever lies in 0..3 is a position."""
    return tuple(
        Sample((TensorType.of(d, y), TensorType.of(d, x), TensorType.of("int64", y)), a, 0.0, 2.0)
        for d, x, y, a in ROWS
    )


OPS = (
    OpDef(
        name="max_pool2d", infer=_infer, reference=lambda i, a: _max_reference(i, a)[:1], vjp=ByExpansion(),
        lowering=Composite(_expand_max), samples=_samples(), arity=(1, 1), params=WINDOW, resolve=_resolve,
        cost=_cost, doc="torch.nn.functional.max_pool2d",
    ),
    OpDef(
        name="max_pool2d_with_indices", infer=_infer_indices, reference=_max_reference, vjp=_vjp_max,
        lowering=Opaque("max_pool2d"), samples=_samples(), arity=(1, 1), params=WINDOW, resolve=_resolve,
        cost=_cost, doc="torch.nn.functional.max_pool2d with the positions of the maxima",
    ),
    OpDef(
        name="max_pool2d_grad", infer=_infer_max_gradient, reference=_max_gradient_reference,
        vjp=NotDifferentiable("second derivatives of a max pool are not implemented"),
        lowering=Opaque("max_pool2d_grad"), samples=_max_gradient_samples(), arity=(3, 3), params=WINDOW,
        resolve=_resolve, cost=_cost, doc="gradient of max_pool2d from (cotangent, operand, positions)",
    ),
    OpDef(
        name="avg_pool2d", infer=_infer, reference=_avg_reference, vjp=_vjp_avg,
        lowering=Opaque("avg_pool2d"), arity=(1, 1),
        samples=(*_samples(), *_samples(extra={"count_include_pad": False})), params=(*WINDOW, COUNT),
        resolve=_resolve, cost=_cost, doc="torch.nn.functional.avg_pool2d",
    ),
    OpDef(
        name="avg_pool2d_grad", infer=_infer_avg_gradient, reference=_avg_gradient_reference,
        vjp=_vjp_avg_gradient, lowering=Opaque("avg_pool2d_grad"), samples=_samples(True), arity=(1, 1),
        params=(*WINDOW, COUNT, SIZE), resolve=_resolve, cost=_cost,
        doc="gradient of avg_pool2d from its cotangent",
    ),
    OpDef(
        name="adaptive_avg_pool2d", infer=_infer_adaptive, reference=_adaptive_reference, vjp=ByExpansion(),
        lowering=Composite(_expand_adaptive), arity=(1, 1), params=(Attr("output_size", "ints"), FORMAT),
        resolve=_resolve_adaptive, cost=_cost,
        samples=tuple(
            Sample((TensorType.of("float32", (2, 6, 4, 3)),), {"output_size": size, "data_format": order})
            for size, order in (((1,), "NHWC"), ((3, 2), "NHWC"), ((1, 1), "NCHW"), ((2, 3), "NCHW"))
        ),
        doc="torch.nn.functional.adaptive_avg_pool2d to one value, or with windows of equal size",
    ),
)  # fmt: skip
