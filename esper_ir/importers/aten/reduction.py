"""Reductions, scans and softmax: along axes, with torch's defaults."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from esper_ir.builder import Value
from esper_ir.importers.context import Context, Rule, each, unsupported
from esper_ir.opdef import Number
from esper_ir.types import DType

Dims = Sequence[int] | int | None


def _dims(dim: Dims) -> tuple[int, ...] | None:
    """None and the empty list mean all axes."""
    if dim is None:
        return None
    return (dim,) if isinstance(dim, int) else (tuple(dim) or None)


def _reduced(op: str) -> Callable[..., Value]:
    def convert(
        b: Context, x: Value, dim: Dims = None, keepdim: bool = False, dtype: DType | None = None
    ) -> Value:
        return b.op(_of_truths(op, x), b.cast(x, dtype), dims=_dims(dim), keepdim=keepdim)

    return convert


def _of_truths(op: str, x: Value) -> str:
    """The largest of truth values is whether any is true."""
    return {"amax": "any", "amin": "all"}.get(op, op) if x.type.dtype is DType.bool else op


def _ordered(b: Context, op: str, x: Value, **attrs: Any) -> tuple[Value, ...]:
    """Values and places; truth values are ordered as 0 and 1."""
    if x.type.dtype is not DType.bool:
        return b.many(op, x, **attrs)
    values, places = b.many(op, b.cast(x, DType.uint8), **attrs)
    return b.cast(values, DType.bool), places


def _total(op: str) -> Callable[..., Value]:
    return lambda b, x, dtype=None: b.op(_of_truths(op, x), b.cast(x, dtype))


def _prod(b: Context, x: Value, dim: int, keepdim: bool = False, dtype: DType | None = None) -> Value:
    return b.op("prod", b.cast(x, dtype), dims=(dim,), keepdim=keepdim)


def _place(op: str) -> Callable[..., Value]:
    """argmax and argmin; over all axes the operand counts as flat."""

    def convert(b: Context, x: Value, dim: int | None = None, keepdim: bool = False) -> Value:
        if dim is not None and x.type.rank:
            return b.op(op, x, dim=dim, keepdim=keepdim)
        flat = b.op(op, b.reshape(x, (x.type.numel,)), dim=0, keepdim=False)
        return b.reshape(flat, (1,) * x.type.rank) if keepdim else flat

    return convert


def _extremum(op: str) -> Callable[..., tuple[Value | None, ...]]:
    """(values, positions) along one axis: the gradient goes to the first of equal extrema, as in torch."""

    def convert(b: Context, x: Value, dim: int, keepdim: bool = False) -> tuple[Value | None, ...]:
        if not x.type.rank:
            return b.cast(x, x.type.dtype), b.full((), 0, DType.int64)
        return _ordered(b, op, x, dim=dim, keepdim=keepdim)

    return convert


def _aminmax(b: Context, x: Value, dim: int | None = None, keepdim: bool = False) -> tuple[Value, Value]:
    dims = _dims(dim)
    return b.op("amin", x, dims=dims, keepdim=keepdim), b.op("amax", x, dims=dims, keepdim=keepdim)


def _correction(unbiased: bool) -> int:
    return 1 if unbiased else 0


def _spread(op: str) -> Callable[..., Value]:
    return lambda b, x, unbiased=True: b.op(op, x, correction=_correction(unbiased))


def _spread_dims(op: str) -> Callable[..., Value]:
    def convert(b: Context, x: Value, dim: Dims, unbiased: bool = True, keepdim: bool = False) -> Value:
        return b.op(op, x, dims=_dims(dim), keepdim=keepdim, correction=_correction(unbiased))

    return convert


def _spread_correction(op: str) -> Callable[..., Value]:
    def convert(
        b: Context, x: Value, dim: Dims = None, *, correction: Number | None = None, keepdim: bool = False
    ) -> Value:
        by = 1 if correction is None else correction
        return b.op(op, x, dims=_dims(dim), keepdim=keepdim, correction=by)

    return convert


def _with_mean(op: str) -> Callable[..., tuple[Value, Value]]:
    def convert(
        b: Context, x: Value, dim: Dims = None, *, correction: Number | None = None, keepdim: bool = False
    ) -> tuple[Value, Value]:
        spread = _spread_correction(op)(b, x, dim, correction=correction, keepdim=keepdim)
        return spread, b.op("mean", x, dims=_dims(dim), keepdim=keepdim)

    return convert


def _with_mean_dims(op: str) -> Callable[..., tuple[Value, Value]]:
    def convert(b: Context, x: Value, dim: Dims, unbiased: bool = True, keepdim: bool = False) -> Any:
        return _with_mean(op)(b, x, dim, correction=_correction(unbiased), keepdim=keepdim)

    return convert


def _truth(op: str) -> Callable[..., Value]:
    return lambda b, x, dim=None, keepdim=False: b.op(op, x, dims=_dims(dim), keepdim=keepdim)


def _count_nonzero(b: Context, x: Value, dim: Dims = None) -> Value:
    return b.op("count_nonzero", x, dims=_dims(dim))


def _norm(
    b: Context,
    x: Value,
    ord: Number = 2,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: DType | None = None,
) -> Value:
    """Lengths 1, 2 and others; infinite ones are extrema of the absolute values, 0 counts what is not 0."""
    x = b.cast(x, dtype)
    dims = _dims(dim)
    if ord in (float("inf"), float("-inf")):
        return b.op("amax" if ord > 0 else "amin", b.op("abs", x), dims=dims, keepdim=keepdim)
    if ord == 0:
        return b.op("sum", b.cast(b.op("ne", x, 0.0), x.type.dtype), dims=dims, keepdim=keepdim)
    if ord in (1, 2):
        return b.op("norm", x, p=float(ord), dims=dims, keepdim=keepdim)
    total = b.op("sum", b.op("pow", b.op("abs", x), float(ord)), dims=dims, keepdim=keepdim)
    return b.op("pow", total, 1.0 / ord)


def _norm_all(b: Context, x: Value, p: Number = 2) -> Value:
    return _norm(b, x, p)


def _norm_dims(
    b: Context, x: Value, p: Number | None, dim: Dims, keepdim: bool = False, *, dtype: DType | None = None
) -> Value:
    return _norm(b, x, 2 if p is None else p, dim, keepdim, dtype=dtype)


def _frobenius(b: Context, x: Value, dim: Dims, keepdim: bool = False) -> Value:
    return _norm(b, x, 2, dim, keepdim)


def _along(op: str) -> Callable[..., Value]:
    def convert(b: Context, x: Value, dim: int, dtype: DType | bool | None = None) -> Value:
        wide = b.cast(x, dtype if isinstance(dtype, DType) else None)
        return b.op(op, wide, dim=dim)

    return convert


def _half_to_float(op: str) -> Callable[..., Value]:
    def convert(b: Context, x: Value, dim: int, half_to_float: bool) -> Value:
        return b.op(op, b.cast(x, DType.float32 if half_to_float else None), dim=dim)

    return convert


def _scan(op: str) -> Callable[..., Value]:
    def convert(b: Context, x: Value, dim: int, *, dtype: DType | None = None) -> Value:
        x = b.cast(x, dtype)
        if not x.type.rank:
            return b.cast(x, x.type.dtype)
        return b.op(op, x, dim=dim)

    return convert


def _scan_pair(op: str) -> Callable[..., tuple[Value, ...]]:
    return lambda b, x, dim: b.many(op, x, dim=dim)


def _topk(b: Context, x: Value, k: Any, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    return _ordered(b, "topk", x, k=k, dim=dim, largest=largest)


def _sort(b: Context, x: Value, dim: int = -1, descending: bool = False) -> Any:
    return _ordered(b, "sort", x, dim=dim, descending=descending)


def _sort_stable(
    b: Context, x: Value, *, stable: bool | None = None, dim: int = -1, descending: bool = False
) -> Any:
    return _ordered(b, "sort", x, dim=dim, descending=descending)


def _argsort(b: Context, x: Value, dim: int = -1, descending: bool = False, **more: Any) -> Value:
    return _ordered(b, "sort", x, dim=dim, descending=descending)[1]


def _median(b: Context, x: Value) -> Value:
    return b.many("median", b.reshape(x, (x.type.numel,)), dim=0)[0]


def _median_dim(b: Context, x: Value, dim: int, keepdim: bool = False) -> tuple[Value, ...]:
    return b.many("median", x, dim=dim, keepdim=keepdim)


def _kth(b: Context, x: Value, k: Any, dim: int = -1, keepdim: bool = False) -> tuple[Value, ...]:
    return b.many("kthvalue", x, k=k, dim=dim, keepdim=keepdim)


def _distance(b: Context, x: Value, y: Value, p: Number = 2) -> Value:
    return _norm(b, b.op("sub", x, y), p)


def _bucket(b: Context, x: Any, edges: Value, *, out_int32: bool = False, right: bool = False) -> Value:
    """How many edges lie below the value, or at it."""
    x = b.tensor(x, DType.float32)
    column = b.reshape(x, (*x.type.shape, 1))
    return _counted_edges(b, column, edges, out_int32, right)


def _searched(
    b: Context, edges: Value, x: Any, *, out_int32: bool = False, right: bool = False,
    side: str | None = None, sorter: Value | None = None
) -> Value:  # fmt: skip
    """Rows of edges, each for its row of values; or one for all."""
    if sorter is not None:
        raise unsupported("edges in another order", "sort them first")
    x = b.tensor(x, edges.type.dtype)
    column = b.reshape(x, (*x.type.shape, 1))
    if edges.type.rank > 1:
        *lead, count = edges.type.shape
        edges = b.reshape(edges, (*lead, 1, count))
    return _counted_edges(b, column, edges, out_int32, right or side == "right")


def _counted_edges(b: Context, column: Value, edges: Value, short: bool, right: bool) -> Value:
    """NaN lies behind all edges."""
    below = b.op("logical_not", b.op("gt" if right else "ge", edges, column))
    return b.cast(b.op("sum", below, dims=(-1,)), DType.int32 if short else DType.int64)


def _mode(b: Context, *rest: Any, **more: Any) -> Value:
    raise unsupported("the most frequent value has no counterpart", "use one_hot and argmax of the counts")


RULES: tuple[Rule, ...] = (
    *each(_total("sum"), "sum.default"), *each(_reduced("sum"), "sum.dim_IntList"),
    *each(_total("mean"), "mean.default"), *each(_reduced("mean"), "mean.dim"),
    *each(_total("prod"), "prod.default"), *each(_prod, "prod.dim_int"),
    *each(_reduced("amax"), "amax.default"), *each(_reduced("amin"), "amin.default"),
    *each(_total("amax"), "max.default"), *each(_total("amin"), "min.default"),
    *each(_extremum("max"), "max.dim"), *each(_extremum("min"), "min.dim"),
    *each(_aminmax, "aminmax.default"),
    *each(_place("argmax"), "argmax.default"), *each(_place("argmin"), "argmin.default"),
    *(r for n in ("var", "std") for r in (
        *each(_spread(n), f"{n}.default"), *each(_spread_dims(n), f"{n}.dim"),
        *each(_spread_correction(n), f"{n}.correction"), *each(_with_mean(n), f"{n}_mean.correction"),
        *each(_with_mean_dims(n), f"{n}_mean.dim"))),
    *each(_truth("any"), "any.default", "any.dim", "any.dims"),
    *each(_truth("all"), "all.default", "all.dim", "all.dims"),
    *each(_count_nonzero, "count_nonzero.default", "count_nonzero.dim_IntList"),
    *each(_norm, "linalg_vector_norm.default"), *each(_norm_all, "norm.Scalar"),
    *each(_norm_dims, "norm.ScalarOpt_dim", "norm.ScalarOpt_dim_dtype"), *each(_frobenius,
          "frobenius_norm.dim"),
    *each(_reduced("logsumexp"), "logsumexp.default"),
    *each(_along("softmax"), "softmax.int"), *each(_half_to_float("softmax"), "_softmax.default"),
    *each(_along("log_softmax"), "log_softmax.int"), *each(_half_to_float("log_softmax"),
          "_log_softmax.default"),
    *each(_scan("cumsum"), "cumsum.default"), *each(_scan("cumprod"), "cumprod.default"),
    *each(_scan("logcumsumexp"), "logcumsumexp.default"),
    *each(_scan_pair("cummax"), "cummax.default"), *each(_scan_pair("cummin"), "cummin.default"),
    *each(_topk, "topk.default"), *each(_sort, "sort.default"), *each(_sort_stable, "sort.stable"),
    *each(_argsort, "argsort.default", "argsort.stable"),
    *each(_median, "median.default"), *each(_median_dim, "median.dim"), *each(_kth, "kthvalue.default"),
    *each(_distance, "dist.default"), *each(_bucket, "bucketize.Tensor", "bucketize.Scalar"),
    *each(_searched, "searchsorted.Tensor", "searchsorted.Scalar"), *each(_mode, "mode.default"),
)  # fmt: skip
