"""Products, convolutions, attention, lookups."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from esper_ir.builder import Value
from esper_ir.importers.context import Context, Rule, Scalar, each, static, unsupported
from esper_ir.opdef import Number
from esper_ir.types import Dim, DType

ONE = Dim.of(1)


def _product(b: Context, x: Value, y: Value) -> Value:
    """torch.matmul: vectors become rows or columns, and the axis goes again."""
    if not x.type.dtype.is_floating:
        raise unsupported(f"a product of {x.type.dtype.value}", "cast to a floating type first")
    wide, tall = x.type.rank == 1, y.type.rank == 1
    left = b.reshape(x, (ONE, *x.type.shape)) if wide else x
    right = b.reshape(y, (*y.type.shape, ONE)) if tall else y
    made = b.op("matmul", left, right, precision=b.precision.matmul)
    shape = made.type.shape
    if tall:
        shape = shape[:-1]
    if wide:
        shape = (*shape[:-2], shape[-1]) if not tall else shape[:-1]
    return b.reshape(made, shape)


def _linear(b: Context, x: Value, weight: Value, bias: Value | None = None) -> Value:
    if weight.type.rank == 1:
        made = _product(b, x, weight)
        return made if bias is None else b.op("add", made, bias)
    operands = (x, weight) if bias is None else (x, weight, bias)
    return b.op("linear", *operands, precision=b.precision.matmul)


def _added(b: Context, base: Value, x: Value, y: Value, *, beta: Number = 1, alpha: Number = 1) -> Value:
    """beta base + alpha x y; with beta 0 the base has no influence, NaN or not."""
    made = _product(b, x, y)
    if alpha != 1:
        made = b.op("mul", made, alpha)
    if beta == 0:
        return made
    return b.op("add", base if beta == 1 else b.op("mul", base, beta), made)


def _outer(b: Context, x: Value, y: Value) -> Value:
    if x.type.dtype is not y.type.dtype:
        return b.op("mul", b.reshape(x, (*x.type.shape, ONE)), y)
    return b.op("outer", x, y)


def _addr(b: Context, base: Value, x: Value, y: Value, *, beta: Number = 1, alpha: Number = 1) -> Value:
    made = _outer(b, x, y)
    made = made if alpha == 1 else b.op("mul", made, alpha)
    return b.op("add", base if beta == 1 else b.op("mul", base, beta), made)


def _einsum(b: Context, equation: str, operands: Sequence[Value], path: Any = None) -> Value:
    return b.op("einsum", *operands, equation=equation.replace(" ", ""), precision=b.precision.matmul)


def _tensordot(b: Context, x: Value, y: Value, dims_self: Sequence[int], dims_other: Sequence[int]) -> Value:
    letters = iter("abcdefghijklmnopqrstuvwxyz")
    s = [next(letters) for _ in range(x.type.rank)]
    t = [next(letters) for _ in range(y.type.rank)]
    for i, j in zip(dims_self, dims_other, strict=True):
        t[j] = s[i]
    inner = {s[i] for i in dims_self}
    right = [c for c in (*s, *t) if c not in inner]
    return _einsum(b, f"{''.join(s)},{''.join(t)}->{''.join(right)}", (x, y))


def _bilinear(b: Context, x: Value, y: Value, weight: Value, bias: Value | None = None) -> Value:
    made = _einsum(b, "...i,oij,...j->...o", (x, weight, y))
    return made if bias is None else b.op("add", made, bias)


def _distances(b: Context, x: Value, y: Value, p: float = 2.0, compute_mode: int | None = None) -> Value:
    """Lengths of all differences of rows."""
    apart = b.op("sub", _unsqueezed(b, x, -2), _unsqueezed(b, y, -3))
    if p in (1.0, 2.0):
        return b.op("norm", apart, p=float(p), dims=(-1,))
    if p == float("inf"):
        return b.op("amax", b.op("abs", apart), dims=(-1,))
    return b.op("pow", b.op("sum", b.op("pow", b.op("abs", apart), float(p)), dims=(-1,)), 1.0 / p)


def _unsqueezed(b: Context, x: Value, at: int) -> Value:
    place = at % (x.type.rank + 1)
    return b.reshape(x, (*x.type.shape[:place], ONE, *x.type.shape[place:]))


# Cells.


def _lstm_cell(
    b: Context,
    x: Value,
    state: Sequence[Value],
    w: Value,
    u: Value,
    v: Value | None = None,
    z: Value | None = None,
) -> tuple[Value, ...]:
    held = [t for t in (x, *state, w, u, v, z) if t is not None]
    return b.many("lstm_cell", *held, precision=b.precision.matmul)


def _cell(op: str, **attrs: Any) -> Callable[..., Value]:
    def convert(
        b: Context, x: Value, state: Value, w: Value, u: Value, v: Value | None = None, z: Value | None = None
    ) -> Value:
        held = [t for t in (x, state, w, u, v, z) if t is not None]
        return b.op(op, *held, precision=b.precision.matmul, **attrs)

    return convert


# Convolutions.


def _numbers(value: Any, rank: int) -> tuple[int, ...]:
    found = (value,) if isinstance(value, int) else tuple(value)
    return found * rank if len(found) == 1 else found


def _batched(b: Context, x: Value, rank: int, make: Callable[[Value], Value]) -> Value:
    """One image without a batch axis gets one."""
    if x.type.rank == rank + 2:
        return make(x)
    made = make(b.reshape(x, (ONE, *x.type.shape)))
    return b.reshape(made, made.type.shape[1:])


def _conv(rank: int) -> Callable[..., Value]:
    def convert(
        b: Context,
        x: Value,
        weight: Value,
        bias: Value | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Value:
        given = {"stride": _numbers(stride, rank), "dilation": _numbers(dilation, rank), "groups": groups}
        sides = _numbers(padding, rank)
        return _batched(
            b, x, rank, lambda v: _convolved(b, rank, v, weight, bias, {**given, "padding": sides})
        )

    return convert


def _convolved(
    b: Context, rank: int, x: Value, weight: Value, bias: Value | None, given: dict[str, Any]
) -> Value:
    operands = (x, weight) if bias is None else (x, weight, bias)
    return b.op(f"conv{rank}d", *operands, **given, precision=b.precision.convolution)


def _conv_padded(rank: int) -> Callable[..., Value]:
    """`padding`: "valid", or "same", whose odd zero stands at the end."""

    def convert(
        b: Context,
        x: Value,
        weight: Value,
        bias: Value | None = None,
        stride: Any = 1,
        padding: str = "valid",
        dilation: Any = 1,
        groups: int = 1,
    ) -> Value:
        spread = _numbers(dilation, rank)
        total = [d * ((k.static or 1) - 1) for d, k in zip(spread, weight.type.shape[2:], strict=True)]
        total = total if padding == "same" else [0] * rank
        sides = tuple(t // 2 for t in total)
        given = {"stride": _numbers(stride, rank), "dilation": spread, "groups": groups, "padding": sides}

        def make(v: Value) -> Value:
            odd = tuple(t % 2 for t in total)
            if any(odd):
                v = b.op("pad", v, before=(0,) * (rank + 2), after=(0, 0, *odd))
            return _convolved(b, rank, v, weight, bias, given)

        return _batched(b, x, rank, make)

    return convert


def _conv_transpose(rank: int) -> Callable[..., Value]:
    def convert(
        b: Context,
        x: Value,
        weight: Value,
        bias: Value | None = None,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: int = 1,
        dilation: Any = 1,
    ) -> Value:
        given = {
            "stride": _numbers(stride, rank), "padding": _numbers(padding, rank), "groups": groups,
            "output_padding": _numbers(output_padding, rank), "dilation": _numbers(dilation, rank),
            "precision": b.precision.convolution,
        }  # fmt: skip
        operands = (weight,) if bias is None else (weight, bias)
        return _batched(b, x, rank, lambda v: b.op(f"conv_transpose{rank}d", v, *operands, **given))

    return convert


def _convolution(
    b: Context,
    x: Value,
    weight: Value,
    bias: Value | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
) -> Value:
    rank = weight.type.rank - 2
    if transposed:
        return _conv_transpose(rank)(b, x, weight, bias, stride, padding, output_padding, groups, dilation)
    return _conv(rank)(b, x, weight, bias, stride, padding, dilation, groups)


# Attention and lookups.


def _attention(
    b: Context,
    query: Value,
    key: Value,
    value: Value,
    attn_mask: Value | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Value:
    """Leading axes beyond [batch, heads] are one; fewer than those get an axis of size 1."""
    shape = query.type.shape
    q, k, v = (_four(b, t) for t in (query, key, value))
    if dropout_p:
        out = _dropped_attention(b, q, k, v, attn_mask, dropout_p, is_causal, scale)
        return b.reshape(out, (*shape[:-1], value.type.shape[-1]))
    mask = None if attn_mask is None else _mask(b, attn_mask, q)
    operands = (q, k, v) if mask is None else (q, k, v, mask)
    if scale is not None:
        scale = float(scale)
    made = b.op("scaled_dot_product_attention", *operands, is_causal=is_causal, scale=scale)
    return b.reshape(made, (*shape[:-1], value.type.shape[-1]))


def _dropped_attention(
    b: Context, q: Value, k: Value, v: Value, mask: Value | None, p: float, causal: bool, scale: float | None
) -> Value:
    """Attention written out, with weights dropped between softmax and the second product."""
    heads = [t.type.shape[1] for t in (q, k)]
    if heads[0] != heads[1]:
        raise unsupported("grouped heads whose weights are dropped", "use eval mode, or dropout_p=0")
    factor = 1.0 / math.sqrt(static(q.type.shape[-1], "the width")) if scale is None else float(scale)
    scores = b.op("mul", _product(b, q, b.permute(k, (0, 1, 3, 2))), factor)
    if causal:
        rows, columns = (t.type.shape[2] for t in (q, k))
        ones = b.full((rows, columns), 1, DType.int32)
        mask = b.cast(b.op("tril", ones), DType.bool)
    if mask is not None and mask.type.dtype is DType.bool:
        scores = b.op("where", mask, scores, -math.inf)
    elif mask is not None:
        scores = b.op("add", scores, mask)
    seed, place = b.drawn()
    weights = b.op("dropout", b.op("softmax", scores, dim=-1), seed, p=float(p), offset=place)
    return _product(b, weights, v)


def _four(b: Context, t: Value) -> Value:
    *lead, length, width = t.type.shape
    if len(lead) == 2:
        return t
    if len(lead) < 2:
        return b.reshape(t, (*(ONE,) * (2 - len(lead)), *lead, length, width))
    batch = ONE
    for d in lead[:-1]:
        batch = batch * d
    return b.reshape(t, (batch, lead[-1], length, width))


def _mask(b: Context, mask: Value, q: Value) -> Value:
    if mask.type.dtype not in (DType.bool, q.type.dtype):
        mask = b.cast(mask, q.type.dtype)
    if mask.type.rank <= 4:
        return mask
    if any(d != ONE for d in mask.type.shape[:-2]):
        raise unsupported("a mask of more than four axes", "flatten the leading axes")
    return b.reshape(mask, mask.type.shape[-2:])


def _embedding(
    b: Context,
    weight: Value,
    indices: Value,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Value:
    if scale_grad_by_freq:
        raise unsupported("gradients divided by the frequency of rows")
    rows = indices if indices.type.dtype in (DType.int32, DType.int64) else b.cast(indices, DType.int64)
    if padding_idx is None or padding_idx < 0:
        return b.op("embedding", rows, weight)
    return _padded_rows(b, weight, rows, padding_idx)


def _padded_rows(b: Context, weight: Value, rows: Value, padding_idx: int) -> Value:
    """The row of padding gets no gradient: its value is read apart from it."""
    made = b.op("embedding", rows, weight)
    hit = b.reshape(b.op("eq", rows, padding_idx), (*rows.type.shape, ONE))
    return b.op("where", hit, b.op("detach", made), made)


MEAN, MAX = 1, 2


def _embedding_bag(
    b: Context, weight: Value, indices: Value, offsets: Value,
    scale_grad_by_freq: bool = False, mode: int = 0,
    sparse: bool = False, weights: Value | None = None, include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> tuple[Value | None, ...]:  # fmt: skip
    """Rows of a table reduced bag by bag. Bag i begins at offset i of the flat indices."""
    if scale_grad_by_freq:
        raise unsupported("gradients divided by the frequency of rows")
    if mode == MAX:
        raise unsupported("the largest of a bag whose size depends on the data", "use embedding and amax")
    rows = indices if indices.type.dtype is DType.int64 else b.cast(indices, DType.int64)
    count = rows.type.shape[0]
    starts = b.cast(offsets, DType.int64)
    if include_last_offset:
        starts = b.op("slice", starts, dim=0, start=0, end=offsets.type.shape[0] - 1)
    bags = starts.type.shape[0]
    place = b.reshape(b.builder.op("arange", end=count), (count, 1))
    bag = b.op("sub", b.op("sum", b.cast(b.op("ge", place, starts), DType.int64), dims=(1,)), 1)
    parts = b.cast(b.op("embedding", rows, weight), weight.type.dtype.compute)
    kept = None if padding_idx is None or padding_idx < 0 else b.op("ne", rows, padding_idx)
    if weights is not None:
        parts = b.op("mul", parts, b.reshape(weights, (count, 1)))
    if kept is not None:
        parts = b.op("where", b.reshape(kept, (count, 1)), parts, 0.0)
    total = b.op("index_add", b.full((bags, weight.type.shape[1]), 0.0, parts.type.dtype), bag, parts, dim=0)
    if mode == MEAN:
        one = b.full((count,), 1.0, parts.type.dtype) if kept is None else b.cast(kept, parts.type.dtype)
        size = b.op("index_add", b.full((bags,), 0.0, parts.type.dtype), bag, one, dim=0)
        total = b.op("div", total, b.reshape(b.op("maximum", size, 1.0), (bags, 1)))
    return b.cast(total, weight.type.dtype), None, None, None


def _one_hot(b: Context, x: Value, num_classes: Scalar = -1) -> Value:
    if num_classes == -1:
        raise unsupported("the number of classes depends on the data", "give num_classes")
    return b.op("one_hot", x, num_classes=num_classes)


RULES: tuple[Rule, ...] = (
    *each(_product, "matmul.default", "mm.default", "bmm.default", "mv.default", "dot.default",
          "vdot.default",
          "linalg_matmul.default"),
    *each(_linear, "linear.default"), *each(_added, "addmm.default", "baddbmm.default", "addmv.default"),
    *each(_outer, "outer.default", "ger.default"), *each(_addr, "addr.default"),
    *each(_einsum, "einsum.default"), *each(_tensordot, "tensordot.default"),
    *each(_bilinear, "bilinear.default"), *each(_distances, "_cdist_forward.default", "cdist.default"),
    *each(_lstm_cell, "lstm_cell.default"), *each(_cell("gru_cell"), "gru_cell.default"),
    *each(_cell("rnn_cell"), "rnn_tanh_cell.default"),
    *each(_cell("rnn_cell", nonlinearity="relu"), "rnn_relu_cell.default"),
    *(r for n in (1, 2, 3) for r in (
        *each(_conv(n), f"conv{n}d.default"), *each(_conv_padded(n), f"conv{n}d.padding"),
        *each(_conv_transpose(n), f"conv_transpose{n}d.{'default' if n == 1 else 'input'}"))),
    *each(_convolution, "convolution.default"),
    *each(_attention, "scaled_dot_product_attention.default"),
    *each(_embedding, "embedding.default"), *each(_embedding_bag, "embedding_bag.padding_idx"),
    *each(_one_hot, "one_hot.default"),
)  # fmt: skip
