"""Pooling over two axes, in either memory order, and over three: the primitives and their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
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
from esper_ir.ops.convolution import FORMAT, SIZE, sized
from esper_ir.ops.means import few, mean, mean_gradient
from esper_ir.ops.reach import MOST
from esper_ir.ops.reduction import only
from esper_ir.ops.rules import accept, same, tensor
from esper_ir.ops.volume import tuned
from esper_ir.types import Dim, DType, TensorType

Types = Sequence[TensorType | Number]
CEIL = Attr("ceil_mode", "bool", False, doc="a last window that lies partly outside counts too")
COUNT = Attr("count_include_pad", "bool", True, doc="divide by the whole window at the border too")
DIVISOR = Attr("divisor_override", "int", None, doc="divide by this number")


def window(rank: int, dilated: bool) -> tuple[Attr, ...]:
    """Attributes of a pooling over `rank` axes."""
    own = (
        Attr("kernel", "ints"), Attr("stride", "ints", None, doc="null: the kernel"),
        Attr("padding", "ints", (0,) * rank), CEIL,
    )  # fmt: skip
    spread = (Attr("dilation", "ints", (1,) * rank),) if dilated else (COUNT, DIVISOR)
    return (*own, *spread, *((FORMAT,) if rank == 2 else ()))


def resolver(rank: int) -> Any:
    """Attributes with one number per axis; E0203 for padding over half a window."""

    def resolve(operands: Types, attrs: Attrs) -> dict[str, Any]:
        kernel = tuned(attrs["kernel"], "kernel", 1, rank)
        stride = kernel if not attrs["stride"] else tuned(attrs["stride"], "stride", 1, rank)
        padding = tuned(attrs["padding"], "padding", 0, rank)
        if any(2 * p > k for p, k in zip(padding, kernel, strict=True)):
            hint = "at most half the window"
            raise EsperError("E0203", f"padding {padding} of a window {kernel}", hint=hint)
        out = {**attrs, "kernel": kernel, "stride": stride, "padding": padding}
        if "dilation" in attrs:
            out["dilation"] = tuned(attrs["dilation"], "dilation", 1, rank)
        if attrs.get("divisor_override") == 0:
            raise EsperError("E0203", "divisor_override is 0", hint="any other number")
        return out

    return resolve


def axes_of(rank: int, attrs: Attrs) -> tuple[int, ...]:
    """The axes that windows move along."""
    return tuple(range(1, rank + 1) if attrs.get("data_format") == "NHWC" else range(2, rank + 2))


def image(operand: TensorType | Number, rank: int) -> TensorType:
    x = tensor(operand)
    accept([x], "float")
    if x.rank != rank + 2:
        raise EsperError("E0204", f"{x} is no batch of images", hint=f"rank {rank + 2}")
    if any(d.static == 0 for d in x.shape[1:]):
        raise EsperError("E0204", f"{x} has images of nothing", hint="only the batch may be empty")
    return x


def _length(size: Dim, at: int, attrs: Attrs) -> Dim:
    """Windows along one axis; a last one that starts in the padding does not count (torch's rule)."""
    kernel, stride, padding = attrs["kernel"][at], attrs["stride"][at], attrs["padding"][at]
    reach = attrs["dilation"][at] * (kernel - 1) + 1 if "dilation" in attrs else kernel
    if not attrs["ceil_mode"] or stride == 1:
        return (size + (2 * padding - reach)) // stride + 1
    if size.static is None:
        raise EsperError("E0206", f"ceil_mode along the symbolic size {size}", hint="make it a number")
    count = (size.static + 2 * padding - reach + stride - 1) // stride + 1
    return Dim.of(count - ((count - 1) * stride >= size.static + padding))


def pooled(x: TensorType, rank: int, attrs: Attrs) -> TensorType:
    shape = list(x.shape)
    for at, axis in enumerate(axes_of(rank, attrs)):
        made = _length(x.shape[axis], at, attrs)
        if made.static is not None and made.static < 1:
            raise EsperError("E0204", f"the window {attrs['kernel']} does not fit into {x}")
        shape[axis] = made
    return TensorType(x.dtype, tuple(shape))


def first(x: Any, attrs: Attrs) -> Any:
    """A torch tensor with channels at axis 1."""
    return x.permute(0, 3, 1, 2) if attrs.get("data_format") == "NHWC" else x


def last(x: Any, attrs: Attrs) -> Any:
    return x.permute(0, 2, 3, 1) if attrs.get("data_format") == "NHWC" else x


def without(attrs: Attrs, name: str) -> dict[str, Any]:
    return {k: v for k, v in attrs.items() if k != name}


def _whole(x: TensorType, attrs: Attrs) -> None:
    """torch's mean over three axes takes no image that is smaller than the window, whatever the padding."""
    for size, kernel, padding in zip(x.shape[2:], attrs["kernel"], attrs["padding"], strict=True):
        if size.static is None and padding:
            raise EsperError("E0206", f"cannot prove {size} >= {kernel} for {x}", hint="make it a number")
        if size.static is not None and size.static < kernel:
            raise EsperError("E0204", f"the window {attrs['kernel']} does not fit into {x}")


def window_cost(operands: Types, outputs: Sequence[TensorType], attrs: Attrs) -> Dim:
    out = outputs[0].numel
    for size in attrs["kernel"]:
        out = out * size
    return out


# Maxima.


def max_call(x: Any, rank: int, attrs: Attrs) -> Any:
    call = getattr(functional, f"max_pool{rank}d")
    return call(
        x, attrs["kernel"], attrs["stride"], attrs["padding"], attrs["dilation"],
        ceil_mode=attrs["ceil_mode"], return_indices=True,
    )  # fmt: skip


def _max_reference(rank: int) -> Any:
    return lambda i, a: tuple(last(t, a) for t in max_call(first(i[0], a), rank, a))


def _max_gradient_reference(rank: int) -> Any:
    def reference(inputs: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
        g, x, places = (first(t, attrs) for t in inputs)
        return (last(max_gradient(g, x, places, rank, attrs), attrs),)

    return reference


def max_gradient(g: Any, x: Any, places: Any, rank: int, attrs: Attrs) -> Any:
    """torch's gradient from positions in the whole plane; channels at axis 1."""
    backward = getattr(torch.ops.aten, f"max_pool{rank}d_with_indices_backward")
    numbers = (attrs[k] for k in ("kernel", "stride", "padding", "dilation", "ceil_mode"))
    return backward(g, x, *numbers, places)


def _infer(rank: int, indices: bool) -> Any:
    def infer(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
        x = image(operands[0], rank)
        out = pooled(x, rank, attrs)
        if rank == 3 and "dilation" not in attrs:
            _whole(x, attrs)
        return (out, TensorType(DType.int64, out.shape)) if indices else (out,)

    return infer


def _infer_max_gradient(rank: int) -> Any:
    def infer(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
        g, x, places = (tensor(o, i) for i, o in enumerate(operands))
        made = pooled(image(x, rank), rank, attrs)
        if g != made or places != TensorType(DType.int64, made.shape):
            raise EsperError("E0204", f"{g} and {places} are not of this pooling", hint=f"{made} and int64")
        return (x,)

    return infer


def _vjp_max(rank: int) -> Any:
    def vjp(
        emit: Emit, inputs: Operands, outputs: Vals, cotangents: Cotangents, attrs: Attrs, wanted: Wanted
    ) -> Cotangents:
        if cotangents[0] is None or not wanted[0]:
            return [None]
        return [emit(f"max_pool{rank}d_grad", cotangents[0], only(inputs), outputs[1], **attrs)]

    return vjp


def _expand_max(rank: int) -> Any:
    def expand(emit: Emit, inputs: Sequence[Operand], attrs: Attrs) -> Sequence[Val]:
        close = all(d == 1 for d in attrs["dilation"]) and prod(attrs["kernel"]) <= MOST
        spans = [-(-k // s) * s for k, s in zip(attrs["kernel"], attrs["stride"], strict=True)]
        kind = "placed" if close and prod(spans) <= 255 else "with_indices"
        return emit.many(f"max_pool{rank}d_{kind}", inputs[0], **attrs)[:1]

    return expand


# Means.


def _avg_numbers(attrs: Attrs) -> tuple[Any, ...]:
    names = ("kernel", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override")
    return tuple(attrs[k] for k in names)


def _wide(x: Any, rank: int) -> Any:
    """torch has no three-dimensional mean of 16-bit numbers on the CPU; float32 rounds once as well."""
    return x.float() if rank == 3 and x.dtype.itemsize == 2 else x


def _avg_reference(rank: int) -> Any:
    def reference(inputs: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
        call = getattr(functional, f"avg_pool{rank}d")
        made = call(_wide(first(inputs[0], attrs), rank), *_avg_numbers(attrs))
        return (last(made, attrs).to(inputs[0].dtype),)

    return reference


def _avg_gradient_reference(rank: int) -> Any:
    def reference(inputs: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
        own = (inputs[0], inputs[0].new_zeros(attrs["size"]))
        g, like = (_wide(first(t, attrs), rank) for t in own)
        backward = getattr(torch.ops.aten, f"avg_pool{rank}d_backward")
        return (last(backward(g, like, *_avg_numbers(attrs)), attrs).to(inputs[0].dtype),)

    return reference


def _infer_avg_gradient(rank: int) -> Any:
    def infer(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
        g = image(operands[0], rank)
        x = sized(g, attrs, rank + 2)
        if rank == 3:
            _whole(x, attrs)
        for a, b in zip(pooled(x, rank, attrs).shape, g.shape, strict=True):
            same(a, b, "the cotangent has the shape of the pooling", g.shape, x.shape)
        return (x,)

    return infer


def _vjp_avg(rank: int, part: str) -> Any:
    def vjp(
        emit: Emit, inputs: Operands, outputs: Vals, cotangents: Cotangents, attrs: Attrs, wanted: Wanted
    ) -> Cotangents:
        if cotangents[0] is None or not wanted[0]:
            return [None]
        return [emit(f"avg_pool{rank}d{part}_grad", cotangents[0], size=only(inputs).type.shape, **attrs)]

    return vjp


def _expand_avg(rank: int) -> Any:
    def expand(emit: Emit, inputs: Sequence[Operand], attrs: Attrs) -> Sequence[Val]:
        x, axes = only(inputs), axes_of(rank, attrs)
        if not few(attrs):
            return (emit(f"avg_pool{rank}d_whole", x, **attrs),)
        return mean(emit, x, axes, pooled(x.type, rank, attrs).shape, attrs)

    return expand


def _expand_avg_gradient(rank: int) -> Any:
    def expand(emit: Emit, inputs: Sequence[Operand], attrs: Attrs) -> Sequence[Val]:
        if not few(attrs):
            return (emit(f"avg_pool{rank}d_whole_grad", inputs[0], **attrs),)
        return mean_gradient(emit, inputs, axes_of(rank, attrs), tuple(attrs["size"]), attrs)

    return expand


def _vjp_avg_gradient(rank: int) -> Any:
    def vjp(
        emit: Emit, inputs: Operands, outputs: Vals, cotangents: Cotangents, attrs: Attrs, wanted: Wanted
    ) -> Cotangents:
        if cotangents[0] is None or not wanted[0]:
            return [None]
        return [emit(f"avg_pool{rank}d", cotangents[0], **without(attrs, "size"))]

    return vjp


# Samples: dtype, operand, result, attributes.

Row = tuple[str, tuple[int, ...], tuple[int, ...], dict[str, Any]]
ROWS: dict[int, tuple[Row, ...]] = {
    2: (
        ("float32", (2, 3, 6, 8), (2, 3, 3, 4), {"kernel": (2, 2)}),
        ("float32", (2, 3, 7, 8), (2, 3, 4, 4), {"kernel": (3, 3), "stride": (2, 2), "padding": (1, 1)}),
        ("float32", (2, 7, 8, 3), (2, 4, 4, 3),
         {"kernel": (3, 3), "stride": (2, 2), "padding": (1, 1), "data_format": "NHWC"}),
        ("bfloat16", (2, 6, 6, 8), (2, 5, 3, 8), {"kernel": (2, 3), "stride": (1, 2), "padding": (0, 1),
         "data_format": "NHWC"}),
        ("float64", (1, 2, 4, 4), (1, 2, 2, 2), {"kernel": (2, 2)}),
        ("float32", (1, 2, 6, 5), (1, 2, 3, 3), {"kernel": (2, 2), "ceil_mode": True}),
    ),
    3: (
        ("float32", (2, 2, 4, 6, 4), (2, 2, 2, 3, 2), {"kernel": (2,)}),
        ("float32", (1, 2, 5, 6, 4), (1, 2, 3, 3, 2), {"kernel": (3, 3, 3), "stride": (2,), "padding": (1,)}),
        ("bfloat16", (1, 2, 5, 4, 4), (1, 2, 3, 3, 2), {"kernel": (2, 2, 2), "stride": (2, 1, 2),
         "ceil_mode": True}),
        ("float64", (1, 2, 4, 4, 4), (1, 2, 2, 2, 2), {"kernel": (2, 2, 2)}),
    ),
}  # fmt: skip
SPREAD: dict[int, Row] = {
    2: ("float32", (1, 2, 7, 6), (1, 2, 5, 4), {"kernel": (2,), "stride": (1,), "dilation": (2,)}),
    3: ("float32", (1, 2, 5, 6, 5), (1, 2, 3, 4, 3), {"kernel": (2,), "stride": (1,), "dilation": (2,)}),
}


def _samples(rows: Sequence[Row], backward: bool = False, extra: Attrs | None = None) -> tuple[Sample, ...]:
    out = []
    for dtype, x, y, attrs in rows:
        more = {**attrs, **(extra or {}), **({"size": x} if backward else {})}
        out.append(Sample((TensorType.of(dtype, y if backward else x),), more))
    return tuple(out)


def _max_gradient_samples(rows: Sequence[Row]) -> tuple[Sample, ...]:
    """Whatever lies in 0..3 is a position."""
    return tuple(
        Sample((TensorType.of(d, y), TensorType.of(d, x), TensorType.of("int64", y)), a, 0.0, 2.0)
        for d, x, y, a in rows
    )


def _family(rank: int) -> tuple[OpDef, ...]:
    dilated, plain = window(rank, True), window(rank, False)
    rows = ROWS[rank]
    max_rows, name = (*rows, SPREAD[rank]), f"max_pool{rank}d"
    means = (*_samples(rows), *_samples(rows, extra={"count_include_pad": False}),
             *_samples(rows[1:2], extra={"divisor_override": 3}))  # fmt: skip
    return (
        OpDef(
            name=name, infer=_infer(rank, False), reference=lambda i, a: _max_reference(rank)(i, a)[:1],
            vjp=ByExpansion(), lowering=Composite(_expand_max(rank)), samples=_samples(max_rows),
            arity=(1, 1), params=dilated, resolve=resolver(rank), cost=window_cost,
            doc=f"torch.nn.functional.{name}",
        ),
        OpDef(
            name=f"{name}_with_indices", infer=_infer(rank, True), reference=_max_reference(rank),
            vjp=_vjp_max(rank), lowering=Opaque(name), samples=_samples(max_rows), arity=(1, 1),
            params=dilated, resolve=resolver(rank), cost=window_cost,
            doc=f"torch.nn.functional.{name} with the positions of the maxima",
        ),
        OpDef(
            name=f"{name}_grad", infer=_infer_max_gradient(rank), reference=_max_gradient_reference(rank),
            vjp=NotDifferentiable("second derivatives of a max pool are not implemented"),
            lowering=Opaque(f"{name}_grad"), samples=_max_gradient_samples(max_rows), arity=(3, 3),
            params=dilated, resolve=resolver(rank), cost=window_cost,
            doc=f"gradient of {name} from (cotangent, operand, positions)",
        ),
        *(
            OpDef(
                name=f"avg_pool{rank}d{part}", infer=_infer(rank, False), reference=_avg_reference(rank),
                vjp=_vjp_avg(rank, part), lowering=low, arity=(1, 1), samples=means, params=plain,
                resolve=resolver(rank), cost=window_cost, doc=f"torch.nn.functional.avg_pool{rank}d{note}",
            )
            for part, low, note in (
                ("", Composite(_expand_avg(rank)), ""),
                ("_whole", Opaque(f"avg_pool{rank}d"), ", of windows of many elements"),
            )
        ),
        *(
            OpDef(
                name=f"avg_pool{rank}d{part}_grad", infer=_infer_avg_gradient(rank),
                reference=_avg_gradient_reference(rank), vjp=_vjp_avg_gradient(rank), lowering=low,
                samples=_samples(rows, True), arity=(1, 1), params=(*plain, SIZE), resolve=resolver(rank),
                cost=window_cost, doc=f"gradient of avg_pool{rank}d from its cotangent{note}",
            )
            for part, low, note in (
                ("", Composite(_expand_avg_gradient(rank)), ""),
                ("_whole", Opaque(f"avg_pool{rank}d_grad"), ", of windows of many elements"),
            )
        ),
    )  # fmt: skip


OPS = (*_family(2), *_family(3))
