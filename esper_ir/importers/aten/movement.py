"""Data movement: shapes, parts, joins, borders, triangles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

from esper_ir.builder import Value
from esper_ir.importers.context import Context, Rule, Scalar, dim_of, each, plain, static, unsupported
from esper_ir.types import Dim, DType, promote

ONE = Dim.of(1)
END = 2**62
"""torch writes 2**63 - 1 for "to the end"."""


def _view(b: Context, x: Value, shape: Sequence[Scalar], *rest: Any, **more: Any) -> Value:
    return b.reshape(x, b.shape(shape))


def _view_as(b: Context, x: Value, other: Value) -> Value:
    return b.reshape(x, other.type.shape)


def _found(b: Context, x: Value, *rest: Any, **more: Any) -> Value:
    """A reshape to the shape that torch found."""
    shape = b.shapes[0] if b.shapes else None
    if shape is None:
        raise unsupported("the shape of the result has no counterpart")
    return b.reshape(x, shape)


def _flatten(b: Context, x: Value, start_dim: int = 0, end_dim: int = -1) -> Value:
    return _found(b, x)


def _transpose(b: Context, x: Value, dim0: int, dim1: int) -> Value:
    order = list(range(x.type.rank))
    if order:
        order[dim0], order[dim1] = order[dim1], order[dim0]
    return b.permute(x, order)


def _turned(b: Context, x: Value) -> Value:
    return _transpose(b, x, -2, -1) if x.type.rank > 1 else x


def _reversed(b: Context, x: Value) -> Value:
    return b.permute(x, range(x.type.rank)[::-1])


def _movedim(b: Context, x: Value, source: Sequence[int] | int, destination: Sequence[int] | int) -> Value:
    rank = x.type.rank
    pairs = [[v] if isinstance(v, int) else list(v) for v in (source, destination)]
    at = {d % rank: s % rank for s, d in zip(*pairs, strict=True)}
    rest = iter(i for i in range(rank) if i not in at.values())
    return b.permute(x, [at[i] if i in at else next(rest) for i in range(rank)])


def _expand(b: Context, x: Value, size: Sequence[Scalar], *, implicit: bool = False) -> Value:
    shape = b.shape(size)
    return x if x.type.shape == shape else b.op("expand", x, shape=shape)


def _expand_as(b: Context, x: Value, other: Value) -> Value:
    return x if x.type.shape == other.type.shape else b.op("expand", x, shape=other.type.shape)


def _broadcast_tensors(b: Context, tensors: Sequence[Value]) -> tuple[Value, ...]:
    out = []
    for x, shape in zip(tensors, b.shapes, strict=True):
        wanted = x.type.shape if shape is None else shape
        out.append(x if x.type.shape == wanted else b.op("expand", x, shape=wanted))
    return tuple(out)


def _repeat(b: Context, x: Value, repeats: Sequence[Scalar]) -> Value:
    """Every axis beside one of its copies: [1, n] stretched to [r, n], and flat again."""
    lead = len(repeats) - x.type.rank
    sizes = ((ONE,) * max(lead, 0) + x.type.shape) if lead >= 0 else x.type.shape
    times = [Dim.of(1)] * max(-lead, 0) + [dim_of(r) for r in repeats]
    if all(t.static is not None for t in times):
        return b.op("repeat", x, repeats=tuple(t.static for t in times))
    apart = [d for t, n in zip(times, sizes, strict=True) for d in ((ONE, n) if t != ONE else (n,))]
    wide = [d for t, n in zip(times, sizes, strict=True) for d in ((t, n) if t != ONE else (n,))]
    made = b.op("expand", b.reshape(x, apart), shape=tuple(wide))
    return b.reshape(made, [t * n for t, n in zip(times, sizes, strict=True)])


def _repeat_interleave(b: Context, x: Value, repeats: Scalar, dim: int | None = None, **more: Any) -> Value:
    if dim is None:
        x, dim = b.reshape(x, (x.type.numel,)), 0
    at = dim % x.type.rank
    shape, times = x.type.shape, dim_of(repeats)
    apart = b.reshape(x, (*shape[: at + 1], ONE, *shape[at + 1 :]))
    wide = b.op("expand", apart, shape=(*shape[: at + 1], times, *shape[at + 1 :]))
    return b.reshape(wide, (*shape[:at], shape[at] * times, *shape[at + 1 :]))


def _squeeze(b: Context, x: Value, dim: Any = None) -> Value:
    return _found(b, x)


def _unsqueeze(b: Context, x: Value, dim: int) -> Value:
    at = dim % (x.type.rank + 1)
    return b.reshape(x, (*x.type.shape[:at], ONE, *x.type.shape[at:]))


def _slice(
    b: Context, x: Value, dim: int = 0, start: Scalar | None = None, end: Scalar | None = None, step: int = 1
) -> Value:
    size = x.type.shape[dim]
    last = None if end is None or (isinstance(end, int) and end >= END) or end == size else end
    first = 0 if start is None else start
    if first == 0 and last is None and step == 1:
        return x
    return b.op("slice", x, dim=dim, start=first, end=last, step=step)


def _select(b: Context, x: Value, dim: int, index: Scalar) -> Value:
    at = dim % x.type.rank
    if isinstance(index, int):
        return b.op("select", x, dim=at, index=index)
    cut = b.op("slice", x, dim=at, start=index, end=dim_of(index) + 1)
    return b.reshape(cut, (*x.type.shape[:at], *x.type.shape[at + 1 :]))


def _narrow(b: Context, x: Value, dim: int, start: Scalar, length: Scalar) -> Value:
    begin = dim_of(start)
    if begin.static is not None and begin.static < 0:
        begin = x.type.shape[dim] + begin
    return b.op("slice", x, dim=dim, start=plain(begin), end=plain(begin + dim_of(length)))


def _parts(b: Context, x: Value, ends: Sequence[Dim], dim: int) -> tuple[Value, ...]:
    out, begin = [], Dim()
    for end in ends:
        whole = begin == Dim() and end == x.type.shape[dim]
        out.append(x if whole else b.op("slice", x, dim=dim, start=plain(begin), end=plain(end)))
        begin = end
    return tuple(out)


def _ends(b: Context, dim: int) -> list[Dim]:
    """Where the parts end that torch found."""
    out: list[Dim] = []
    for shape in b.shapes:
        if shape is None:
            raise unsupported("the sizes of the parts have no counterpart")
        out.append((out[-1] if out else Dim()) + shape[dim])
    return out


def _split(b: Context, x: Value, sizes: Any, dim: int = 0) -> tuple[Value, ...]:
    return _parts(b, x, _ends(b, dim), dim)


def _unbind(b: Context, x: Value, dim: int = 0) -> tuple[Value, ...]:
    return tuple(_select(b, x, dim, i) for i in range(static(x.type.shape[dim], "the axis")))


def _common(b: Context, tensors: Sequence[Value]) -> list[Value]:
    """torch promotes what it joins."""
    wide = reduce(promote, (t.type.dtype for t in tensors))
    return [b.cast(t, wide) for t in tensors]


def _cat(b: Context, tensors: Sequence[Value], dim: int = 0) -> Value:
    """Flat empty tensors are left out, as torch does."""
    kept = [t for t in tensors if t.type.shape != (Dim(),)] or list(tensors)[:1]
    return _joined(b, "cat", _common(b, kept), dim)


def _joined(b: Context, op: str, parts: Sequence[Value], dim: int) -> Value:
    """At most 64 at a time."""
    if len(parts) == 1 and op == "cat":
        return parts[0]
    if len(parts) <= 64:
        return b.op(op, *parts, dim=dim)
    if op == "stack":
        at = dim % (parts[0].type.rank + 1)
        return _joined(b, "cat", [_unsqueeze(b, p, at) for p in parts], at)
    groups = [parts[i : i + 64] for i in range(0, len(parts), 64)]
    return _joined(b, op, [_joined(b, op, g, dim) for g in groups], dim)


def _stack(b: Context, tensors: Sequence[Value], dim: int = 0) -> Value:
    return _joined(b, "stack", _common(b, tensors), dim)


def _flip(b: Context, x: Value, dims: Sequence[int]) -> Value:
    return b.op("flip", x, dims=tuple(dims)) if dims and x.type.rank else x


def _roll(b: Context, x: Value, shifts: Sequence[int], dims: Sequence[int] = ()) -> Value:
    moved = [x.type.shape[d] for d in dims] or [x.type.numel]
    if all(d.static is not None for d in moved):
        return b.op("roll", x, shifts=tuple(shifts), dims=tuple(dims) or None)
    if not dims:
        flat = _rolled(b, b.reshape(x, (x.type.numel,)), shifts[0], 0)
        return b.reshape(flat, x.type.shape)
    for shift, dim in zip(shifts, dims, strict=True):
        x = _rolled(b, x, shift, dim)
    return x


def _rolled(b: Context, x: Value, shift: int, dim: int) -> Value:
    """The last elements first, along an axis of symbolic size."""
    if not shift:
        return x
    size = x.type.shape[dim]
    cut = size - shift if shift > 0 else Dim.of(-shift)
    head = b.op("slice", x, dim=dim, start=plain(cut), end=None)
    return b.op("cat", head, b.op("slice", x, dim=dim, start=0, end=plain(cut)), dim=dim)


def _bordered(b: Context, x: Value, pad: Sequence[Scalar], value: Any, op: str = "pad", **more: Any) -> Value:
    """torch lists (before, after) from the last axis on; negative ones cut."""
    rank = x.type.rank
    pairs = [(pad[2 * i], pad[2 * i + 1]) for i in range(len(pad) // 2)]
    before, after = [0] * rank, [Dim()] * rank
    for i, (first, last) in enumerate(pairs):
        at = rank - 1 - i
        start, end = static(first, "a border"), dim_of(last)
        cut = end.static is not None and end.static < 0
        if start < 0 or cut:
            stop = x.type.shape[at] + end if cut else x.type.shape[at]
            x = b.op("slice", x, dim=at, start=max(-start, 0), end=plain(stop))
        before[at], after[at] = max(start, 0), Dim() if cut else end
    if not any(before) and all(a == Dim() for a in after):
        return x
    given = {"before": tuple(before), "after": tuple(after)}
    if isinstance(value, float) and not abs(value) < float("inf"):
        kept = b.op("pad", b.full(x.type.shape, 1.0, x.type.dtype), **given, value=0.0)
        return b.op("where", b.op("ne", kept, 0.0), b.op("pad", x, **given, value=0.0), value)
    number = float(value) if x.type.dtype.is_floating else value
    return b.op("pad", x, **given, value=number)


def _constant_pad(b: Context, x: Value, pad: Sequence[Scalar], value: Any = 0) -> Value:
    return _bordered(b, x, pad, value)


def _pad(b: Context, x: Value, pad: Sequence[Scalar], mode: str = "constant", value: Any = None) -> Value:
    if mode == "constant":
        return _bordered(b, x, pad, 0 if value is None else value)
    return _mirrored(b, x, pad, mode)


def _mirrored(b: Context, x: Value, pad: Sequence[Scalar], mode: str) -> Value:
    """Borders made of the tensor's own elements."""
    before, after = [0] * x.type.rank, [0] * x.type.rank
    for i in range(len(pad) // 2):
        at = x.type.rank - 1 - i
        before[at], after[at] = (static(p, "a border") for p in (pad[2 * i], pad[2 * i + 1]))
    return b.op("pad_border", x, mode=mode, before=tuple(before), after=tuple(after))


def _border(mode: str) -> Callable[..., Value]:
    return lambda b, x, padding: _mirrored(b, x, padding, mode)


def _triangle(op: str) -> Callable[..., Value]:
    def convert(b: Context, x: Value, diagonal: int = 0) -> Value:
        if x.type.dtype is DType.bool:
            return b.cast(b.op(op, b.cast(x, DType.int32), diagonal=diagonal), DType.bool)
        return b.op(op, x, diagonal=diagonal)

    return convert


def _pixels(op: str) -> Callable[..., Value]:
    """Over the last three axes; others count as one batch."""

    def convert(b: Context, x: Value, factor: int) -> Value:
        *lead, c, h, w = x.type.shape
        n = ONE
        for d in lead:
            n = n * d
        made = b.op(op, b.reshape(x, (n, c, h, w)), factor=factor)
        return b.reshape(made, (*lead, *made.type.shape[1:]))

    return convert


def _channel_shuffle(b: Context, x: Value, groups: Any) -> Value:
    n, c, *rest = x.type.shape
    parts = b.reshape(x, (n, dim_of(groups), c // static(groups, "groups"), *rest))
    return b.reshape(b.permute(parts, (0, 2, 1, *range(3, x.type.rank + 1))), x.type.shape)


def _unfold(b: Context, x: Value, dimension: int, size: int, step: int) -> Value:
    """Windows along one axis, stacked: their places last."""
    at = dimension % x.type.rank
    count = (static(x.type.shape[at], "the axis") - size) // step + 1
    columns = [
        b.op("slice", x, dim=at, start=i, end=i + (count - 1) * step + 1, step=step) for i in range(size)
    ]
    return _joined(b, "stack", columns, -1)


def _diagonal(b: Context, x: Value, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Value:
    return b.op("diagonal", x, offset=offset, dim1=dim1, dim2=dim2)


RULES: tuple[Rule, ...] = (
    *each(_view, "view.default", "reshape.default", "_unsafe_view.default", "_reshape_alias.default"),
    *each(_view_as, "view_as.default", "reshape_as.default"),
    *each(_flatten, "flatten.using_ints", "ravel.default"), *each(_found, "unflatten.int",
          "atleast_1d.default",
          "atleast_2d.default", "atleast_3d.default"),
    *each(_transpose, "transpose.int", "swapaxes.default", "swapdims.default"),
    *each(lambda b, x, dims: b.permute(x, dims), "permute.default"),
    *each(_turned, "t.default", "mT.default", "adjoint.default", "mH.default"), *each(_reversed,
          "numpy_T.default"),
    *each(_movedim, "movedim.intlist", "movedim.int", "moveaxis.intlist", "moveaxis.int"),
    *each(_expand, "expand.default", "broadcast_to.default"), *each(_expand_as, "expand_as.default"),
    *each(_broadcast_tensors, "broadcast_tensors.default"),
    *each(_repeat, "repeat.default", "tile.default"), *each(_repeat_interleave, "repeat_interleave.self_int"),
    *each(_squeeze, "squeeze.default", "squeeze.dim", "squeeze.dims"), *each(_unsqueeze, "unsqueeze.default"),
    *each(_slice, "slice.Tensor"), *each(_select, "select.int"), *each(_narrow, "narrow.default"),
    *each(_split, "split.Tensor", "split.sizes", "split_with_sizes.default", "chunk.default",
          "tensor_split.sections",
          "tensor_split.indices", "unsafe_split.Tensor", "unsafe_chunk.default", "split_copy.Tensor",
          "unsafe_split_with_sizes.default", "split_with_sizes_copy.default"),
    *each(_unbind, "unbind.int"), *each(_cat, "cat.default", "concat.default", "concatenate.default"),
    *each(_stack, "stack.default"), *each(_flip, "flip.default"), *each(_roll, "roll.default"),
    *each(_constant_pad, "constant_pad_nd.default"), *each(_pad, "pad.default"),
    *each(_border("reflect"), "reflection_pad1d.default", "reflection_pad2d.default",
          "reflection_pad3d.default"),
    *each(_border("replicate"), "replication_pad1d.default", "replication_pad2d.default",
          "replication_pad3d.default"),
    *each(_border("circular"), "_pad_circular.default"),
    *each(_triangle("tril"), "tril.default"), *each(_triangle("triu"), "triu.default"),
    *each(_pixels("pixel_shuffle"), "pixel_shuffle.default"),
    *each(_pixels("pixel_unshuffle"), "pixel_unshuffle.default"),
    *each(_channel_shuffle, "channel_shuffle.default", "native_channel_shuffle.default"),
    *each(_unfold, "unfold.default"), *each(_diagonal, "diagonal.default"),
)  # fmt: skip
