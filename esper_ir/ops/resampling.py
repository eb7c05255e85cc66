"""Pooling to a given size, over one axis and by powers: written with primitives.

A mean over windows of uneven size is a product with a matrix per axis, which positions alone make. There 0
times an infinity is NaN: unlike in torch, a value that is not finite reaches its whole row.
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
    Tolerance,
    Val,
)
from esper_ir.ops.convolution import FORMAT
from esper_ir.ops.gradients import to, up, val
from esper_ir.ops.pooling import CEIL, COUNT, axes_of, first, image, last, pooled, resolver, without
from esper_ir.ops.rules import ONE, numel, tensor
from esper_ir.ops.volume import tuned
from esper_ir.types import Dim, DType, TensorType

Types = Sequence[TensorType | Number]


def along(emit: Emit, x: Val, axis: int, matrix: Val) -> Val:
    """The matrix [out, in] applied along one axis, in the compute type."""
    rank = x.type.rank
    order = (*(i for i in range(rank) if i != axis), axis)
    moved = emit("permute", x, dims=order)
    flat = emit("reshape", moved, shape=(numel(moved.type.shape[:-1]), moved.type.shape[-1]))
    made = emit("matmul", flat, emit("permute", matrix, dims=(1, 0)))
    made = emit("reshape", made, shape=(*moved.type.shape[:-1], matrix.type.shape[0]))
    return emit("permute", made, dims=tuple(order.index(i) for i in range(rank)))


def positions(emit: Emit, size: Dim) -> Val:
    return emit("arange", end=size, dtype=DType.int64)


def _divided(emit: Emit, x: Val, divisor: int, up_: bool) -> Val:
    """floor(x / n), or ceil(x / n), of positions, exactly: in float64."""
    wide = emit("cast", x, dtype=DType.float64)
    return emit("ceil" if up_ else "floor", emit("div", wide, float(divisor)))


def _mean_matrix(emit: Emit, size: Dim, count: int, dtype: DType) -> Val:
    """[count, size]: row i has 1 / n at the positions floor(i size / count) to ceil((i + 1) size / count)."""
    rows = emit("reshape", positions(emit, Dim.of(count)), shape=(count, 1))
    scale: Operand = size.static if size.static is not None else emit("full", shape=(), value=size,
                                                                       dtype=DType.int64)  # fmt: skip
    start = _divided(emit, emit("mul", rows, scale), count, False)
    end = _divided(emit, emit("mul", emit("add", rows, 1), scale), count, True)
    column = emit("cast", positions(emit, size), dtype=DType.float64)
    inside = emit("logical_and", emit("ge", column, start), emit("lt", column, end))
    share = emit("div", 1.0, emit("sub", end, start))
    return to(emit, emit("where", inside, share, 0.0), dtype)


# Adaptive means.


def _equal_windows(x: TensorType, rank: int, attrs: Attrs) -> tuple[int, ...] | None:
    """Size of a window per axis when all are equal, else None."""
    found = []
    for axis, count in zip(axes_of(rank, attrs), attrs["output_size"], strict=True):
        size = x.shape[axis].static
        if size is None or size % count:
            return None
        found.append(size // count)
    return tuple(found)


def _resolve_adaptive(rank: int) -> Any:
    def resolve(operands: Types, attrs: Attrs) -> dict[str, Any]:
        return {**attrs, "output_size": tuned(attrs["output_size"], "output_size", 1, rank)}

    return resolve


def _infer_adaptive(rank: int, outputs: int = 1) -> Any:
    def infer(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
        x = image(operands[0], rank)
        shape = list(x.shape)
        for axis, count in zip(axes_of(rank, attrs), attrs["output_size"], strict=True):
            shape[axis] = Dim.of(count)
        places = TensorType(DType.int64, tuple(shape))
        return (TensorType(x.dtype, tuple(shape)), places)[:outputs]

    return infer


def _expand_adaptive(rank: int) -> Any:
    def expand(emit: Emit, inputs: Sequence[Operand], attrs: Attrs) -> Sequence[Val]:
        x = val(inputs[0])
        axes = axes_of(rank, attrs)
        if attrs["output_size"] == (1,) * rank:
            return (emit("mean", x, dims=axes, keepdim=True),)
        size = _equal_windows(x.type, rank, attrs)
        if size is not None:
            order = {"data_format": attrs["data_format"]} if rank == 2 else {}
            return (emit(f"avg_pool{rank}d", x, kernel=size, **order),)
        y = up(emit, x)
        for axis, count in zip(axes, attrs["output_size"], strict=True):
            y = along(emit, y, axis, _mean_matrix(emit, x.type.shape[axis], count, y.type.dtype))
        return (to(emit, y, x.type.dtype),)

    return expand


def _adaptive_reference(rank: int) -> Any:
    def reference(inputs: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
        call = getattr(functional, f"adaptive_avg_pool{rank}d")
        return (last(call(first(inputs[0], attrs), attrs["output_size"]), attrs),)

    return reference


def _cost(operands: Types, outputs: Sequence[TensorType], attrs: Attrs) -> Dim:
    return tensor(operands[0]).numel * 2


ADAPTIVE: dict[int, tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]] = {
    1: (((2, 3, 8), (4,)), ((2, 3, 7), (3,)), ((2, 3, 7), (1,)), ((1, 2, 3), (5,))),
    2: (((2, 3, 6, 4), (3, 2)), ((2, 3, 7, 5), (3, 2)), ((2, 3, 7, 5), (1,)), ((1, 2, 3, 4), (5, 6))),
    3: (((1, 2, 4, 6, 4), (2, 3, 2)), ((1, 2, 5, 6, 3), (2, 4, 2)), ((1, 2, 3, 4, 3), (1,))),
}


def adaptive_samples(rank: int) -> tuple[Sample, ...]:
    rows = [
        Sample((TensorType.of(dtype, shape),), {"output_size": size})
        for dtype in ("float32", "bfloat16", "float64")
        for shape, size in ADAPTIVE[rank][: None if dtype == "float32" else 2]
    ]
    if rank == 2:
        x = TensorType.of("float32", (2, 6, 4, 3))
        rows += [Sample((x,), {"output_size": s, "data_format": "NHWC"}) for s in ((1,), (3, 2), (4, 3))]
    return tuple(rows)


def _adaptive(rank: int, expand: Any) -> OpDef:
    name = f"adaptive_avg_pool{rank}d"
    return OpDef(
        name=name, infer=_infer_adaptive(rank), reference=_adaptive_reference(rank), vjp=ByExpansion(),
        lowering=Composite(expand), samples=adaptive_samples(rank), arity=(1, 1),
        params=(Attr("output_size", "ints"), *((FORMAT,) if rank == 2 else ())), cost=_cost,
        resolve=_resolve_adaptive(rank),
        doc=f"torch.nn.functional.{name}; where windows are uneven, what is not finite reaches its row",
    )  # fmt: skip


# One axis: a picture of height 1.


def _tall(emit: Emit, x: Val) -> Val:
    n, c, w = x.type.shape
    return emit("reshape", x, shape=(n, c, ONE, w))


def _flat(emit: Emit, y: Val) -> Val:
    n, c, _, w = y.type.shape
    return emit("reshape", y, shape=(n, c, w))


def _planar(attrs: Attrs) -> dict[str, Any]:
    out = dict(attrs)
    for name, flat in (("kernel", 1), ("stride", 1), ("padding", 0), ("dilation", 1)):
        if name in attrs:
            out[name] = (flat, *attrs[name])
    return out


def _infer_line(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    return (pooled(image(operands[0], 1), 1, attrs),)


def _expand_line(name: str) -> Callable[[Emit, Sequence[Operand], Attrs], Sequence[Val]]:
    def expand(emit: Emit, inputs: Sequence[Operand], attrs: Attrs) -> Sequence[Val]:
        return (_flat(emit, emit(name, _tall(emit, val(inputs[0])), **_planar(attrs))),)

    return expand


def _line_reference(name: str) -> Any:
    def reference(inputs: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
        numbers = [attrs[k] for k in ("kernel", "stride", "padding")]
        if name == "avg_pool1d":
            return (
                functional.avg_pool1d(inputs[0], *numbers, attrs["ceil_mode"], attrs["count_include_pad"]),
            )
        return (functional.max_pool1d(inputs[0], *numbers, attrs["dilation"], attrs["ceil_mode"]),)

    return reference


LINES: tuple[dict[str, Any], ...] = (
    {"kernel": (3,)},
    {"kernel": (3,), "stride": (2,), "padding": (1,)},
    {"kernel": (2,), "stride": (2,), "ceil_mode": True},
)


def _lines(extra: dict[str, Any]) -> tuple[Sample, ...]:
    kinds = [TensorType.of(d, (2, 3, 9)) for d in ("float32", "bfloat16", "float64")]
    return tuple(
        Sample((t,), a)
        for t in kinds
        for a in (*LINES, {**LINES[1], **extra})[: None if t is kinds[0] else 2]
    )


def _line(name: str, extra: dict[str, Any], *own: Attr) -> OpDef:
    params = (Attr("kernel", "ints"), Attr("stride", "ints", None, doc="null: the kernel"),
              Attr("padding", "ints", (0,)), CEIL, *own)  # fmt: skip
    return OpDef(
        name=name, infer=_infer_line, reference=_line_reference(name), vjp=ByExpansion(),
        lowering=Composite(_expand_line(name.replace("1d", "2d"))), samples=_lines(extra), arity=(1, 1),
        params=params, resolve=resolver(1), cost=lambda i, o, a: o[0].numel * a["kernel"][0],
        doc=f"torch.nn.functional.{name}",
    )  # fmt: skip


# Means of powers.


def _resolve_power(rank: int) -> Any:
    inner = resolver(rank)

    def resolve(operands: Types, attrs: Attrs) -> dict[str, Any]:
        if attrs["p"] == 0:
            raise EsperError("E0203", "p is 0", hint="any other number")
        return without(inner(operands, {**attrs, "padding": (0,)}), "padding")

    return resolve


def _infer_power(rank: int) -> Any:
    return lambda i, a: (pooled(image(i[0], rank), rank, {**a, "padding": (0,) * rank}),)


def _expand_power(rank: int) -> Any:
    """(sum of x^p over the window)^(1/p); a sum of 0 passes no gradient, as in torch."""

    def expand(emit: Emit, inputs: Sequence[Operand], attrs: Attrs) -> Sequence[Val]:
        x, p = val(inputs[0]), attrs["p"]
        wide = up(emit, x)
        mean = emit(f"avg_pool{rank}d", emit("pow", wide, p), **without(attrs, "p"))
        total = 1
        for size in attrs["kernel"]:
            total *= size
        kept = emit("where", emit("eq", mean, 0.0), 0.0, mean)
        return (to(emit, emit("pow", emit("mul", kept, float(total)), 1.0 / p), x.type.dtype),)

    return expand


def _power(rank: int) -> OpDef:
    name, size = f"lp_pool{rank}d", {1: (2, 3, 8), 2: (2, 3, 6, 8), 3: (1, 2, 4, 6, 4)}[rank]
    params = (Attr("p", "float"), Attr("kernel", "ints"), Attr("stride", "ints", None), CEIL)

    def reference(inputs: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
        x = inputs[0].float() if inputs[0].dtype.itemsize == 2 else inputs[0]
        kernel, stride = (attrs[k][0] if rank == 1 else attrs[k] for k in ("kernel", "stride"))
        made = getattr(functional, name)(x, attrs["p"], kernel, stride, attrs["ceil_mode"])
        return (made.to(inputs[0].dtype),)

    return OpDef(
        name=name, infer=_infer_power(rank), reference=reference, vjp=ByExpansion(),
        lowering=Composite(_expand_power(rank)), arity=(1, 1), params=params, resolve=_resolve_power(rank),
        samples=tuple(
            Sample((TensorType.of(d, size),), a, 0.2, 2.0)
            for d, a in (("float32", {"p": 2.0, "kernel": (2,)}), ("float32", {"p": 3.0, "kernel": (3,),
                         "stride": (1,)}), ("bfloat16", {"p": 2.0, "kernel": (2,)}))
        ),
        cost=_cost, tolerance=Tolerance(4.0, "powers magnify the rounding of their operands"),
        doc=f"torch.nn.functional.{name}",
    )  # fmt: skip


OPS = (
    _adaptive(1, _expand_adaptive(1)),
    *(_adaptive(rank, _expand_adaptive(rank)) for rank in (2, 3)),
    _line("max_pool1d", {"dilation": (2,)}, Attr("dilation", "ints", (1,))),
    _line("avg_pool1d", {"count_include_pad": False}, COUNT),
    *(_power(rank) for rank in (1, 2, 3)),
)  # fmt: skip
