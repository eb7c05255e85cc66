"""Values by position: gathers, scatters, indexing by tensors, parts written into a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from esper_ir.builder import Value
from esper_ir.importers.context import Context, Rule, Scalar, Tensor, dim_of, each, plain, static, unsupported
from esper_ir.types import Dim, DType

ONE = Dim.of(1)


def _positions(b: Context, index: Value) -> Value:
    return index if index.type.dtype in (DType.int64, DType.int32) else b.cast(index, DType.int64)


def _gather(b: Context, x: Value, dim: int, index: Value, *, sparse_grad: bool = False) -> Value:
    return b.op("gather", x, _positions(b, index), dim=dim)


def _index_select(b: Context, x: Value, dim: int, index: Value) -> Value:
    flat = b.reshape(_positions(b, index), (index.type.numel,))
    return b.op("index_select", x, flat, dim=dim)


def _take_along(b: Context, x: Value, indices: Value, dim: int | None = None) -> Value:
    if dim is None:
        flat = b.reshape(x, (x.type.numel,))
        return b.op("gather", flat, b.reshape(indices, (indices.type.numel,)), dim=0)
    return b.op("take_along_dim", x, _positions(b, indices), dim=dim)


def _source(b: Context, x: Value, index: Value, src: Tensor) -> Value:
    if not isinstance(src, Value):
        return b.full(index.type.shape, src, x.type.dtype)
    return b.cast(src, x.type.dtype)


def _scatter(b: Context, x: Value, dim: int, index: Value, src: Tensor) -> Value:
    return b.op("scatter", x, index, _source(b, x, index, src), dim=dim)


def _scatter_add(b: Context, x: Value, dim: int, index: Value, src: Value) -> Value:
    return b.op("scatter_add", x, index, _source(b, x, index, src), dim=dim)


def _scatter_reduce(
    b: Context, x: Value, dim: int, index: Value, src: Value, reduce: str, *, include_self: bool = True
) -> Value:
    """Sums and means of what meets at a place, with what stands there or without."""
    if reduce not in ("sum", "mean"):
        raise unsupported(
            f"scatter_reduce by {reduce}", "sum and mean have one; amax of rows: one_hot and where"
        )
    source = _source(b, x, index, src)
    zeros = b.full(index.type.shape, 0.0 if x.type.dtype.is_floating else 0, x.type.dtype)
    base = x if include_self else b.op("scatter", x, index, zeros, dim=dim)
    total = b.op("scatter_add", base, index, source, dim=dim)
    if reduce == "sum":
        return total
    ones = b.full(index.type.shape, 1.0, DType.float32)
    first = b.full(x.type.shape, 1.0, DType.float32)
    if not include_self:
        first = b.op("scatter", first, index, b.full(index.type.shape, 0.0, DType.float32), dim=dim)
    count = b.op("maximum", b.op("scatter_add", first, index, ones, dim=dim), 1.0)
    wide = b.op("div", total, b.cast(count, x.type.dtype if x.type.dtype is DType.float64 else DType.float32))
    return b.cast(wide, x.type.dtype)


def _put(b: Context, x: Value, index: Value, source: Value, accumulate: bool = False) -> Value:
    """Places in the flattened tensor, from the end where negative."""
    size = x.type.numel
    flat = b.reshape(x, (size,))
    places = b.reshape(_wrapped(b, index, size), (index.type.numel,))
    values = b.cast(b.reshape(source, (source.type.numel,)), x.type.dtype)
    made = b.op("scatter_add" if accumulate else "scatter", flat, places, values, dim=0)
    return b.reshape(made, x.type.shape)


def _index_add(b: Context, x: Value, dim: int, index: Value, source: Value, *, alpha: Any = 1) -> Value:
    return b.op("index_add", x, index, source, dim=dim, alpha=float(alpha))


def _wrapped(b: Context, index: Value, size: Dim) -> Value:
    """Positions from the end are negative in torch."""
    index = _positions(b, index)
    end = size.static if size.static is not None else b.size(size, index.type.dtype)
    return b.op("where", b.op("lt", index, 0), b.op("add", index, end), index)


def _gathered(b: Context, x: Value, indices: Sequence[Value | None]) -> tuple[Value, Value, int, list[int]]:
    """x with the axes indexed as one, the positions on it (i * size(j) + j), its place, the order of axes."""
    if any(v is not None and v.type.dtype in (DType.bool, DType.uint8) for v in indices):
        raise unsupported(
            "the size of a selection by truth values depends on the data", "use where or masked_fill"
        )
    axes = [i for i, v in enumerate(indices) if v is not None]
    given = [v for v in indices if v is not None]
    together = axes == list(range(axes[0], axes[0] + len(axes)))
    first = axes[0] if together else 0
    rest = [i for i in range(x.type.rank) if i not in axes]
    order = [*rest[:first], *axes, *rest[first:]]
    x = b.permute(x, order)
    shape = x.type.shape
    sizes = shape[first : first + len(axes)]
    flat = _wrapped(b, given[0], sizes[0])
    whole = sizes[0]
    for index, size in zip(given[1:], sizes[1:], strict=True):
        flat = b.op("add", b.op("mul", flat, _number(b, size)), _wrapped(b, index, size))
        whole = whole * size
    return b.reshape(x, (*shape[:first], whole, *shape[first + len(axes) :])), flat, first, order


def _index(b: Context, x: Value, indices: Sequence[Value | None]) -> Value:
    """x[.., i, j, ..]."""
    table, flat, first, _ = _gathered(b, x, indices)
    picked = b.op("index_select", table, b.reshape(flat, (flat.type.numel,)), dim=first)
    return b.reshape(picked, (*table.type.shape[:first], *flat.type.shape, *table.type.shape[first + 1 :]))


def _number(b: Context, size: Dim) -> Tensor:
    return size.static if size.static is not None else b.size(size)


def _index_put(
    b: Context, x: Value, indices: Sequence[Value | None], values: Value, accumulate: bool = False
) -> Value:
    """x with x[.., i, j, ..] replaced or added to; a truth value per element is `where`."""
    given = [v for v in indices if v is not None]
    if len(given) == 1 and given[0].type.dtype is DType.bool and indices[0] is given[0]:
        return _masked(b, x, given[0], values)
    table, flat, first, order = _gathered(b, x, indices)
    before, after = table.type.shape[:first], table.type.shape[first + 1 :]
    rows = b.reshape(flat, (flat.type.numel,))
    source, shape = b.cast(values, x.type.dtype), (*before, *flat.type.shape, *after)
    source = source if source.type.shape == shape else b.op("expand", source, shape=shape)
    source = b.reshape(source, (*before, flat.type.numel, *after))
    if accumulate:
        made = b.op("index_add", table, rows, source, dim=first)
    else:
        index = b.reshape(rows, (*[ONE] * first, flat.type.numel, *[ONE] * len(after)))
        made = b.op("scatter", table, b.op("expand", index, shape=source.type.shape), source, dim=first)
    made = b.reshape(made, tuple(x.type.shape[i] for i in order))
    return b.permute(made, [order.index(i) for i in range(x.type.rank)])


def _masked(b: Context, x: Value, mask: Value, values: Value) -> Value:
    if values.type.numel != ONE:
        raise unsupported(
            "values for a selection by truth values", "use where with a tensor of the full shape"
        )
    wide = b.reshape(mask, (*mask.type.shape, *[ONE] * (x.type.rank - mask.type.rank)))
    value = b.cast(b.reshape(values, ()), x.type.dtype)
    return b.cast(b.op("where", wide, value, x), x.type.dtype)


def _slice_scatter(
    b: Context,
    x: Value,
    src: Value,
    dim: int = 0,
    start: Scalar | None = None,
    end: Scalar | None = None,
    step: int = 1,
) -> Value:
    """x with x[start:end] along `dim` replaced."""
    size = x.type.shape[dim]
    begin = 0 if start is None else start
    if step != 1:
        return _stepped_scatter(b, x, src, dim, static(begin, "start"), step)
    if isinstance(begin, int) and begin < 0:
        begin = plain(size + begin)
    stop = dim_of(begin) + src.type.shape[dim]
    parts = [b.cast(src, x.type.dtype)]
    if begin != 0:
        parts.insert(0, b.op("slice", x, dim=dim, start=0, end=begin))
    if stop != size:
        parts.append(b.op("slice", x, dim=dim, start=plain(stop), end=None))
    return b.op("cat", *parts, dim=dim) if len(parts) > 1 else parts[0]


def _stepped_scatter(b: Context, x: Value, src: Value, dim: int, start: int, step: int) -> Value:
    count = static(src.type.shape[dim], "the part")
    at = dim % x.type.rank
    index = b.op("add", b.op("mul", b.builder.op("arange", end=count), step), start)
    index = b.reshape(index, [Dim.of(count) if i == at else ONE for i in range(x.type.rank)])
    return b.op("scatter", x, b.op("expand", index, shape=src.type.shape), b.cast(src, x.type.dtype), dim=at)


def _select_scatter(b: Context, x: Value, src: Value, dim: int, index: int) -> Value:
    at = dim % x.type.rank
    shape = x.type.shape
    wide = b.reshape(src, (*shape[:at], ONE, *shape[at + 1 :]))
    return _slice_scatter(b, x, wide, at, index, None)


def _nothing(b: Context, *rest: Any, **more: Any) -> Value:
    raise unsupported("the size of the result depends on the data", "use where or masked_fill")


RULES: tuple[Rule, ...] = (
    *each(_gather, "gather.default"), *each(_index_select, "index_select.default"),
    *each(_take_along, "take_along_dim.default"),
    *each(_scatter, "scatter.src", "scatter.value"), *each(_scatter_add, "scatter_add.default"),
    *each(_scatter_reduce, "scatter_reduce.two"), *each(_put, "put.default"),
    *each(_index_add, "index_add.default"), *each(_index, "index.Tensor", "_unsafe_index.Tensor"),
    *each(_index_put, "index_put.default", "_unsafe_index_put.default"),
    *each(_slice_scatter, "slice_scatter.default"), *each(_select_scatter, "select_scatter.default"),
    *each(_nothing, "nonzero.default", "masked_select.default", "_unique2.default",
          "nonzero_numpy.default", "argwhere.default"),
)  # fmt: skip
