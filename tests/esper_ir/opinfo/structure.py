"""Shapes and parts, products, attention, norms over channels, creation."""

from __future__ import annotations

from typing import Any

from tests.esper_ir.opinfo.table import Excluded, Rule, flat, listed


def sizes(x: Any) -> list[int]:
    return [d.value({}) for d in x.type.shape]


def _shape(*given: Any) -> list[int]:
    return [int(v) for v in (given[0] if len(given) == 1 and isinstance(given[0], (tuple, list)) else given)]


def _reshape(b: Any, x: Any, *shape: Any) -> Any:
    return b.op("reshape", x, shape=_shape(*shape))


def _like(op: str) -> Rule:
    return lambda b, x, other: b.op(op, x, shape=sizes(other))


def _expand(b: Any, x: Any, *shape: Any, **kwargs: Any) -> Any:
    return b.op("expand", x, shape=_shape(*shape))


def _permute(b: Any, x: Any, dims: Any) -> Any:
    return b.op("permute", x, dims=_shape(dims)) if x.type.rank else x


def _transpose(b: Any, x: Any, a: int, c: int) -> Any:
    return b.op("transpose", x, dim0=a, dim1=c)


def _ranked(x: Any, low: int, high: int) -> bool:
    """Some names of an operator take fewer ranks than it does."""
    if not low <= x.type.rank <= high:
        raise Excluded("the name, not the operator, refuses this rank")
    return True


def _t(b: Any, x: Any) -> Any:
    return _turn(b, x) if _ranked(x, 0, 2) else x


def _turn(b: Any, x: Any) -> Any:
    return b.op("transpose", x, dim0=-2, dim1=-1) if x.type.rank > 1 else x


def _flatten(b: Any, x: Any, start_dim: int = 0, end_dim: int = -1) -> Any:
    if not x.type.rank:
        return b.op("reshape", x, shape=[1])
    return b.op("flatten", x, start_dim=start_dim, end_dim=end_dim)


def _squeeze(b: Any, x: Any, dim: Any = None) -> Any:
    dims = None if dim is None else listed(dim)
    if dims == ():
        return b.op("reshape", x, shape=sizes(x))
    return b.op("squeeze", x, dims=dims)


def _unflatten(b: Any, x: Any, dim: int, shape: Any) -> Any:
    whole, at = sizes(x), dim % max(x.type.rank, 1)
    return b.op("reshape", x, shape=[*whole[:at], *shape, *whole[at + 1 :]])


def _unsqueeze(b: Any, x: Any, dim: int) -> Any:
    return b.op("unsqueeze", x, dim=dim)


def _narrow(b: Any, x: Any, dim: int, start: Any, length: int) -> Any:
    if hasattr(start, "type"):
        raise Excluded("a start that is a tensor")
    return b.op("narrow", x, dim=dim, start=start, length=length)


def _select(b: Any, x: Any, dim: int, index: int) -> Any:
    return b.op("select", x, dim=dim, index=index)


def _split(b: Any, x: Any, size: Any, dim: int = 0) -> Any:
    whole = sizes(x)[dim]
    if isinstance(size, int):
        parts = [min(size, whole - at) for at in range(0, whole, size)] if whole else [0]
    else:
        parts = list(size)
    return b.op("split", x, dim=dim, sizes=parts)


def _chunk(b: Any, x: Any, chunks: int, dim: int = 0) -> Any:
    whole = sizes(x)[dim]
    return _split(b, x, -(-whole // chunks), dim)


def _unbind(b: Any, x: Any, dim: int = 0) -> Any:
    return tuple(b.op("select", x, dim=dim, index=i) for i in range(sizes(x)[dim]))


def _cat(b: Any, parts: Any, dim: int = 0) -> Any:
    kinds = {v.type.dtype for v in parts}
    if len(kinds) > 1:
        raise Excluded("joined tensors of several dtypes")
    kept = [v for v in parts if sizes(v) != [0]] or list(parts)[:1]
    return b.op("cat", *kept, dim=dim)


def _stack(b: Any, parts: Any, dim: int = 0) -> Any:
    return b.op("stack", *parts, dim=dim)


def _flip(b: Any, x: Any, dims: Any) -> Any:
    return b.op("flip", x, dims=_shape(dims))


def _roll(b: Any, x: Any, shifts: Any, dims: Any = None) -> Any:
    found = None if dims is None or dims == () else listed(dims)
    return b.op("roll", x, shifts=listed(shifts), dims=found)


def _repeat(b: Any, x: Any, *times: Any) -> Any:
    return b.op("repeat", x, repeats=_shape(*times))


def _tile(b: Any, x: Any, dims: Any) -> Any:
    return b.op("tile", x, dims=_shape(dims))


def _movedim(b: Any, x: Any, source: Any, destination: Any) -> Any:
    return b.op("movedim", x, source=listed(source), destination=listed(destination))


def _diagonal(b: Any, x: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    return b.op("diagonal", x, offset=offset, dim1=dim1, dim2=dim2)


def _diagonal_linalg(b: Any, x: Any, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Any:
    return b.op("diagonal", x, offset=offset, dim1=dim1, dim2=dim2)


def _trace(b: Any, x: Any) -> Any:
    _ranked(x, 2, 2)
    return b.op("sum", b.op("diagonal", x))


def _triangle(name: str) -> Rule:
    return lambda b, x, diagonal=0: b.op(name, x, diagonal=diagonal)


def _cut_negative(b: Any, x: Any, pairs: list[list[int]]) -> Any:
    for at, pair in enumerate(pairs):
        if min(pair) < 0:
            end = sizes(x)[at] + min(pair[1], 0)
            x = b.op("slice", x, dim=at, start=max(-pair[0], 0), end=end)
    return x


def _pad(b: Any, x: Any, pad: Any, mode: str = "constant", value: Any = None) -> Any:
    pairs = [[0, 0] for _ in range(x.type.rank)]
    for i in range(len(pad) // 2):
        pairs[-1 - i] = [pad[2 * i], pad[2 * i + 1]]
    if mode == "constant":
        x = _cut_negative(b, x, pairs)
    before, after = [max(p[0], 0) for p in pairs], [max(p[1], 0) for p in pairs]
    if mode == "constant":
        return b.op("pad", x, before=before, after=after, value=0.0 if value is None else float(value))
    if mode != "replicate" and any(min(p) < 0 for p in pairs):
        raise Excluded("a negative border of another kind than constant")
    return _cut_negative(b, b.op("pad_border", x, mode=mode, before=before, after=after), pairs)


def _like_number(name: str) -> Rule:
    def rule(b: Any, x: Any, *, dtype: Any = None, **kwargs: Any) -> Any:
        return b.op(name, x, dtype=None if dtype is None else str(dtype).removeprefix("torch."))

    return rule


# Products.


def _matmul(b: Any, x: Any, y: Any) -> Any:
    """A vector is a matrix with one row or column."""
    if x.type.rank == y.type.rank == 1:
        return b.op("dot", x, y)
    if x.type.rank == 1:
        made = b.op("matmul", b.op("unsqueeze", x, dim=0), y)
        return b.op("squeeze", made, dims=[-2])
    if y.type.rank == 1:
        made = b.op("matmul", x, b.op("unsqueeze", y, dim=1))
        return b.op("squeeze", made, dims=[-1])
    return b.op("matmul", x, y)


def _added(name: str) -> Rule:
    def rule(b: Any, x: Any, y: Any, z: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
        return b.op(name, x, y, z, beta=beta, alpha=alpha)

    return rule


def _addmv(b: Any, x: Any, m: Any, v: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    column = b.op("unsqueeze", v, dim=1)
    lifted = b.op("unsqueeze", x, dim=x.type.rank)
    return b.op("squeeze", b.op("addmm", lifted, m, column, beta=beta, alpha=alpha), dims=[1])


def _einsum(b: Any, operands: Any, equation: str) -> Any:
    return b.op("einsum", *operands, equation=equation)


def _inner(b: Any, x: Any, y: Any) -> Any:
    if not x.type.rank or not y.type.rank:
        return b.op("mul", x, y)
    a, c = "abcdefg"[: x.type.rank - 1], "hijklmn"[: y.type.rank - 1]
    return b.op("einsum", x, y, equation=f"{a}z,{c}z->{a}{c}")


def _linear(b: Any, x: Any, w: Any, bias: Any = None) -> Any:
    if w.type.rank == 1:
        made = _matmul(b, x, w)
        return made if bias is None else b.op("add", made, bias)
    return b.op("linear", x, w, *([] if bias is None else [bias]))


# Attention, norms, lookup.


def _attention(b: Any, q: Any, k: Any, v: Any, attn_mask: Any = None, dropout_p: float = 0.0,
               is_causal: bool = False, scale: Any = None, enable_gqa: bool = False) -> Any:  # fmt: skip
    if dropout_p:
        raise Excluded("dropout draws random numbers")
    given = [q, k, v]
    lead = sizes(q)[:-2]
    if q.type.rank != 4:
        given = [b.op("reshape", t, shape=[1, -1, *sizes(t)[-2:]]) for t in given]
    mask = [] if attn_mask is None else [attn_mask]
    attrs = {} if scale is None else {"scale": float(scale)}
    made = b.op("scaled_dot_product_attention", *given, *mask, is_causal=is_causal, **attrs)
    return made if q.type.rank == 4 else b.op("reshape", made, shape=[*lead, *sizes(made)[-2:]])


def _layer_norm(b: Any, x: Any, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Any:
    if weight is None and bias is not None:
        weight = b.op("full", shape=list(shape), value=1.0, dtype=x.type.dtype.value)
    given = [v for v in (weight, bias) if v is not None]
    return b.op("layer_norm", x, *given, normalized_shape=list(shape), eps=eps)


def _rms_norm(b: Any, x: Any, shape: Any, weight: Any = None, eps: Any = None) -> Any:
    made = b.op("rms_norm", x, normalized_shape=list(shape), **({} if eps is None else {"eps": eps}))
    return made if weight is None else b.op("mul", made, weight)


def _group_norm(b: Any, x: Any, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Any:
    if weight is None and bias is not None:
        weight = b.op("full", shape=sizes(bias), value=1.0, dtype=x.type.dtype.value)
    given = [v for v in (weight, bias) if v is not None]
    return b.op("group_norm", x, *given, num_groups=groups, eps=eps)


def _instance_norm(b: Any, x: Any, running_mean: Any = None, running_var: Any = None, weight: Any = None,
                   bias: Any = None, use_input_stats: bool = True, momentum: float = 0.1,
                   eps: float = 1e-5) -> Any:  # fmt: skip
    if not use_input_stats:
        raise Excluded("instance norm by running statistics")
    if weight is None and bias is not None:
        weight = b.op("full", shape=sizes(bias), value=1.0, dtype=x.type.dtype.value)
    given = [v for v in (weight, bias) if v is not None]
    return b.op("instance_norm", x, *given, eps=eps)


def _batch_norm(b: Any, x: Any, running_mean: Any, running_var: Any, weight: Any = None, bias: Any = None,
                training: bool = False, momentum: float = 0.1, eps: float = 1e-5) -> Any:  # fmt: skip
    if weight is None and bias is not None:
        weight = b.op("full", shape=sizes(bias), value=1.0, dtype=x.type.dtype.value)
    affine = [v for v in (weight, bias) if v is not None]
    if training or running_mean is None:
        return b.op("batch_norm", x, *affine, training=True, eps=eps)
    return b.op("batch_norm", x, running_mean, running_var, *affine, training=False, eps=eps)


def _normalize(b: Any, x: Any, p: float = 2.0, dim: Any = 1, eps: float = 1e-12, out: Any = None) -> Any:
    if not isinstance(dim, int):
        raise Excluded("normalize over several axes")
    return b.op("normalize", x, p=float(p), dim=dim, eps=eps)


def _local(b: Any, x: Any, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0) -> Any:
    return b.op("local_response_norm", x, size=size, alpha=float(alpha), beta=float(beta), k=float(k))


def _embedding(b: Any, rows: Any, weight: Any, padding_idx: Any = None, max_norm: Any = None,
               norm_type: float = 2.0, scale_grad_by_freq: bool = False,
               sparse: bool = False) -> Any:  # fmt: skip
    if max_norm is not None:
        raise Excluded("an embedding that changes its table")
    if padding_idx is not None or scale_grad_by_freq:
        raise Excluded("an embedding with another gradient than that of its value")
    return b.op("embedding", rows, weight)


def _one_hot(b: Any, x: Any, num_classes: int = -1) -> Any:
    if num_classes < 0:
        raise Excluded("the number of classes depends on values")
    return b.op("one_hot", x, num_classes=num_classes)


def _meshgrid(b: Any, first: Any, *rest: Any, indexing: str = "ij") -> Any:
    raise Excluded("no counterpart")


STRUCTURE: dict[str, Rule] = {
    "reshape": _reshape, "view": _reshape, "reshape_as": _like("reshape"), "view_as": _like("reshape"),
    "expand": _expand, "expand_as": _like("expand"), "broadcast_to": _expand, "permute": _permute,
    "transpose": flat(_transpose), "t": _t, "mT": _turn, "T": _turn, "flatten": _flatten,
    "ravel": lambda b, x: b.op("reshape", x, shape=[-1]) if sizes(x) else b.op("reshape", x, shape=[1]),
    "squeeze": _squeeze, "squeeze.multiple": _squeeze, "unsqueeze": _unsqueeze, "unflatten": _unflatten,
    "narrow": _narrow, "select": _select, "split": _split, "split.list_args": _split,
    "split_with_sizes": _split, "chunk": _chunk, "unbind": _unbind, "cat": _cat, "stack": _stack,
    "flip": _flip, "fliplr": lambda b, x: _flip(b, x, [1]),
    "flipud": lambda b, x: _flip(b, x, [0] if _ranked(x, 1, 99) else []),
    "roll": _roll, "repeat": _repeat, "tile": _tile, "movedim": _movedim, "diagonal": _diagonal,
    "linalg.diagonal": _diagonal_linalg, "trace": _trace, "tril": _triangle("tril"),
    "triu": _triangle("triu"), **{f"nn.functional.pad.{m}": _pad for m in (
        "constant", "reflect", "replicate", "circular", "replicate_negative")},
    "constant_pad_nd": lambda b, x, pad, value=0: _pad(b, x, pad, "constant", value),
    "zeros_like": _like_number("zeros_like"), "ones_like": _like_number("ones_like"),
    "nn.functional.pixel_shuffle": lambda b, x, upscale_factor: b.op(
        "pixel_shuffle", x, factor=upscale_factor),
    "nn.functional.pixel_unshuffle": lambda b, x, downscale_factor: b.op(
        "pixel_unshuffle", x, factor=downscale_factor),
    "matmul": _matmul, "__rmatmul__": lambda b, x, y: _matmul(b, y, x),
    "mm": lambda b, x, y: b.op("matmul", x, y), "bmm": lambda b, x, y: b.op("bmm", x, y),
    "mv": lambda b, x, y: b.op("mv", x, y), "dot": lambda b, x, y: b.op("dot", x, y),
    "vdot": lambda b, x, y: b.op("dot", x, y), "outer": lambda b, x, y: b.op("outer", x, y),
    "addmm": _added("addmm"), "addmm.decomposed": _added("addmm"), "baddbmm": _added("baddbmm"),
    "addmv": _addmv, "einsum": _einsum, "inner": _inner, "nn.functional.linear": _linear,
    "nn.functional.scaled_dot_product_attention": _attention, "nn.functional.layer_norm": _layer_norm,
    "nn.functional.rms_norm": _rms_norm, "nn.functional.group_norm": _group_norm,
    "nn.functional.instance_norm": _instance_norm, "nn.functional.batch_norm": _batch_norm,
    "nn.functional.batch_norm.without_cudnn": _batch_norm, "nn.functional.normalize": _normalize,
    "nn.functional.local_response_norm": _local,
    "nn.functional.embedding": lambda b, weight, rows, **k: _embedding(b, rows, weight, **k),
    "nn.functional.one_hot": _one_hot,
}  # fmt: skip
