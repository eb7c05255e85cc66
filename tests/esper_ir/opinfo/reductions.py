"""Along axes: reductions, scans, norms, order, positions."""

from __future__ import annotations

import math
from typing import Any

from tests.esper_ir.opinfo.table import Excluded, Rule, flat, listed


def _cast(b: Any, x: Any, dtype: Any) -> Any:
    return x if dtype is None else b.op("cast", x, dtype=str(dtype).removeprefix("torch."))


def _dims(dim: Any) -> tuple[int, ...] | None:
    return None if dim is None else listed(dim)


def _reduction(name: str, **fixed: Any) -> Rule:
    def rule(b: Any, x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
        return b.op(name, _cast(b, x, dtype), dims=_dims(dim), keepdim=keepdim, **fixed)

    return flat0(rule)


def flat0(rule: Rule) -> Rule:
    """A number has the axes 0 and -1, which are none."""

    def wrapped(b: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        if x.type.rank or not (args or kwargs.get("dim") is not None):
            return rule(b, x, *args, **kwargs)
        made = rule(b, b.op("unsqueeze", x, dim=0), *args, **kwargs)
        return b.op("reshape", made, shape=[]) if made.type.rank else made

    return wrapped


def _count(b: Any, x: Any, dim: Any = None) -> Any:
    return b.op("count_nonzero", x, dims=_dims(dim))


def _spread(name: str) -> Rule:
    def rule(b: Any, x: Any, dim: Any = None, unbiased: Any = None, keepdim: bool = False, *,
             correction: Any = None) -> Any:  # fmt: skip
        if isinstance(dim, bool):
            dim, unbiased = None, dim
        less = correction if correction is not None else 1 if unbiased in (None, True) else 0
        return b.op(name, x, dims=_dims(dim), keepdim=keepdim, correction=less)

    return flat0(rule)


def _softmax(name: str) -> Rule:
    def rule(b: Any, x: Any, dim: int, dtype: Any = None, _stacklevel: int = 3) -> Any:
        return b.op(name, _cast(b, x, dtype), dim=dim)

    return rule


def _softmin(b: Any, x: Any, dim: int, _stacklevel: int = 3, dtype: Any = None) -> Any:
    return b.op("softmax", b.op("neg", _cast(b, x, dtype)), dim=dim)


def _scan(name: str) -> Rule:
    def rule(b: Any, x: Any, dim: int, *, dtype: Any = None) -> Any:
        return b.op(name, _cast(b, x, dtype), dim=dim)

    return flat(rule)


def _arg(name: str) -> Rule:
    def rule(b: Any, x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
        if dim is None:
            whole = b.op(name, b.op("flatten", x) if x.type.rank else x, dim=0, keepdim=False)
            return b.op("reshape", whole, shape=[1] * x.type.rank) if keepdim else whole
        return b.op(name, x, dim=dim, keepdim=keepdim)

    return rule


def _best(name: str, dims: str, two: str) -> Rule:
    def rule(b: Any, x: Any, dim: Any = None, keepdim: bool = False) -> Any:
        if dim is None:
            return b.op(dims, x)
        if hasattr(dim, "type"):
            return b.op(two, x, dim)
        return b.op(name, x, dim=dim, keepdim=keepdim)

    return rule


def _norm(
    b: Any, x: Any, ord: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    x, dims = _cast(b, x, dtype), _dims(dim)
    if math.isinf(ord):
        return b.op("amax" if ord > 0 else "amin", b.op("abs", x), dims=dims, keepdim=keepdim)
    if ord == 0:
        hit = b.op("cast", b.op("ne", x, 0.0), dtype=x.type.dtype.value)
        return b.op("sum", hit, dims=dims, keepdim=keepdim)
    return b.op("norm", x, p=float(ord), dims=dims, keepdim=keepdim)


def _sort(b: Any, x: Any, dim: int = -1, descending: bool = False, *, stable: bool = False) -> Any:
    _decided(x, stable)
    return b.op("sort", x, dim=dim, descending=descending)


def _decided(x: Any, stable: bool) -> None:
    """Where torch may put equal values in any order, samples in few digits have some."""
    if not stable and x.type.dtype.value == "bfloat16" and x.type.numel.value({}) > 64:
        raise Excluded("equal values in an order that torch leaves open")


def _topk(b: Any, x: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    _decided(x, False)
    return b.op("topk", x, k=k, dim=dim, largest=largest)


def _msort(b: Any, x: Any) -> Any:
    return b.op("sort", x, dim=0)[0]


def _argsort(b: Any, x: Any, dim: int = -1, descending: bool = False, stable: bool = False) -> Any:
    _decided(x, stable)
    return b.op("sort", x, dim=dim, descending=descending)[1]


def _long(b: Any, index: Any) -> Any:
    return index if index.type.dtype.value == "int64" else b.op("cast", index, dtype="int64")


def _gather(b: Any, x: Any, dim: int, index: Any, sparse_grad: bool = False) -> Any:
    if x.type.rank:
        return b.op("gather", x, _long(b, index), dim=dim)
    flat = b.op("reshape", _long(b, index), shape=[-1] if index.type.rank else [1])
    made = b.op("gather", b.op("reshape", x, shape=[1]), flat, dim=dim)
    return b.op("reshape", made, shape=[d.value({}) for d in index.type.shape])


def _pairwise(name: str) -> Rule:
    def rule(b: Any, x: Any, dim: int, index: Any, src: Any, reduce: Any = None) -> Any:
        if reduce is not None:
            raise Excluded("scatter with a reduction")
        if not hasattr(src, "type"):
            src = b.op("full", shape=list(index.type.shape), value=float(src), dtype=x.type.dtype.value)
        for axis, size in enumerate(index.type.shape):
            if size != src.type.shape[axis]:
                src = b.op("slice", src, dim=axis, end=size.value({}))
        return b.op(name, x, _long(b, index), src, dim=dim)

    def either(b: Any, x: Any, dim: int, index: Any, *args: Any, **kwargs: Any) -> Any:
        if not x.type.rank:
            return _number(b, rule, x, dim, index, args, kwargs)
        return rule(b, x, dim, index, *args, **_renamed(kwargs))

    return either


def _renamed(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {("src" if k == "value" else k): v for k, v in kwargs.items()}


def _number(b: Any, rule: Rule, x: Any, dim: int, index: Any, args: Any, kwargs: Any) -> Any:
    lifted = [b.op("reshape", v, shape=[1]) if hasattr(v, "type") else v for v in (x, index, *args)]
    made = rule(b, lifted[0], dim, *lifted[1:], **_renamed(kwargs))
    return b.op("reshape", made, shape=[])


def _take_along(b: Any, x: Any, index: Any, dim: int | None = None) -> Any:
    if dim is None:
        return b.op("gather", b.op("flatten", x), b.op("flatten", index), dim=0)
    size = x.type.shape[dim].value({})
    index = b.op("where", b.op("lt", index, 0), b.op("add", index, size), index)
    return b.op("take_along_dim", x, index, dim=dim)


def _index_select(b: Any, x: Any, dim: int, index: Any) -> Any:
    if not index.type.rank:
        index = b.op("reshape", index, shape=[1])
    if not x.type.rank:
        return b.op("reshape", b.op("index_select", b.op("reshape", x, shape=[1]), index, dim=0), shape=[])
    return b.op("index_select", x, index, dim=dim)


def _index_add(b: Any, x: Any, dim: int, index: Any, source: Any, *, alpha: Any = 1) -> Any:
    lift = [v if v.type.rank else b.op("reshape", v, shape=[1]) for v in (x, index, source)]
    made = b.op("index_add", *lift, dim=dim, alpha=float(alpha))
    return made if x.type.rank else b.op("reshape", made, shape=[])


REDUCTIONS: dict[str, Rule] = {
    **{n: _reduction(n) for n in ("sum", "mean", "prod", "amax", "amin", "any", "all", "logsumexp")},
    "count_nonzero": _count, "var": _spread("var"), "std": _spread("std"), "linalg.vector_norm": _norm,
    "softmax": _softmax("softmax"), "log_softmax": _softmax("log_softmax"), "nn.functional.softmin": _softmin,
    **{n: _scan(n) for n in ("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp")},
    "argmax": _arg("argmax"), "argmin": _arg("argmin"), "max": _best("max", "amax", "maximum"),
    "min": _best("min", "amin", "minimum"), "sort": flat(_sort), "topk": flat(_topk), "msort": flat(_msort),
    "argsort": flat(_argsort), "scatter": _pairwise("scatter"), "scatter_add": _pairwise("scatter_add"),
    "gather": _gather, "take_along_dim": _take_along, "index_select": _index_select, "index_add": _index_add,
}  # fmt: skip
