"""Reductions in the two forms that kernels have: over the last axes, or over the first ones.

Axes of size 1 are not reduced at all; first and last axes together are two sums; any other set is moved to
the end by a permutation, which is a view. A few long rows are reduced in parts, since one program goes
through a row and most of the device would wait.
"""

from __future__ import annotations

from collections.abc import Mapping

from esper_ir.graph import Graph, Node
from esper_ir.graphbuilder import GraphBuilder, rewritten
from esper_ir.opdef import Reduction, Val
from esper_ir.registry import OPS
from esper_ir.types import Dim, DType
from forge.templates.choice import tuned_sizes

ONE = Dim.of(1)
ONE_PROGRAM = 1 << 16
FEW_ROWS = 128
SHORT_PART = 1 << 12
"""Elements of a part, at least, and `ONE_PROGRAM` at most."""


def straighten(graph: Graph) -> Graph:
    """The graph with every reduction over its first or its last axes; names of outputs stay."""
    sizes = tuned_sizes(graph)
    return rewritten(_countable(graph), lambda b, node, values: _rewritten(b, node, values, sizes))


def _countable(graph: Graph) -> Graph:
    """Extrema of truth values are those of integers: an accumulator in memory is wider than a truth value."""
    if not any(_of_truth(node) for node in graph.nodes):
        return graph
    return rewritten(graph, _counted)


def _counted(b: GraphBuilder, node: Node, values: dict[str, Val]) -> tuple[Val, ...] | None:
    if not _of_truth(node):
        return None
    wide = b("cast", values[node.tensors[0]], dtype=DType.int32)
    return b.emit_named(node.id, "cast", [b(node.op, wide, **dict(node.attrs))], {"dtype": DType.bool})


def _of_truth(node: Node) -> bool:
    low = OPS[node.op].lowering
    return isinstance(low, Reduction) and low.combine in ("max", "min") and node.types[0].dtype is DType.bool


def _rewritten(
    b: GraphBuilder, node: Node, values: dict[str, Val], sizes: Mapping[str, int]
) -> tuple[Val, ...] | None:
    """The value of a reduction in other nodes, None when it is well as it is. Integers are summed in the type
    of the result.
    """
    low = OPS[node.op].lowering
    if not isinstance(low, Reduction):
        return None
    x, kind = values[node.tensors[0]], node.types[0]
    shape = x.type.shape
    long = [axis for axis, size in enumerate(shape) if size != ONE]
    reduced = [axis for axis in node.attr("dims") if shape[axis] != ONE]
    kept = [axis for axis in long if axis not in reduced]
    first, last = long[: len(reduced)], long[len(kept) :]
    b.scope = node.id
    try:
        if not reduced:
            return (_as(b, x, kind.dtype, kind.shape),)
        if not kept and len(reduced) > 1 and low.combine in ("sum", "max", "min") and _many(shape):
            return (_as(b, _rows_first(b, node, x, reduced), kind.dtype, kind.shape),)
        parts = _parts(shape, sorted(reduced), last, sizes) if low.combine in ("sum", "max", "min") else None
        if parts is not None:
            return (_as(b, _in_parts(b, node, x, reduced[0], *parts), kind.dtype, kind.shape),)
        if sorted(reduced) in (first, last):
            narrow = low.combine == "sum" and not x.type.dtype.is_floating and x.type.dtype is not kind.dtype
            if not narrow:
                return None
            wide = b("cast", x, dtype=kind.dtype)
            return b.emit_named(node.id, node.op, (wide,), dict(node.attrs))
        run = kept == list(range(kept[0], kept[-1] + 1))
        if run and low.combine == "sum" and not low.mean:
            return (_as(b, _twice(b, x, sorted(reduced), kept), kind.dtype, kind.shape),)
        rest = [axis for axis in range(len(shape)) if axis not in reduced]
        if low.combine == "sum" and not x.type.dtype.is_floating:
            x = _as(b, x, kind.dtype, shape)
        moved = b("permute", x, dims=(*rest, *sorted(reduced)))
        ends = tuple(range(len(rest), len(shape)))
        return (_as(b, b(node.op, moved, dims=ends, keepdim=False), kind.dtype, kind.shape),)
    finally:
        b.scope = ""


def _many(shape: tuple[Dim, ...]) -> bool:
    """More elements than one program should go through."""
    count = ONE
    for size in shape:
        count = count * size
    return count.static is None or count.static > ONE_PROGRAM


def _parts(
    shape: tuple[Dim, ...], reduced: list[int], last: list[int], sizes: Mapping[str, int]
) -> tuple[tuple[Dim, ...], int] | None:
    """(shape, first axis of a part) of the parts that few long rows are reduced in; None where rows are many
    or short, or no part is a whole number of elements."""
    rows, long = ONE, 1
    for axis, size in enumerate(shape):
        if axis in reduced:
            long *= size.static or 0
        else:
            rows = rows * size
    if reduced != last or long <= ONE_PROGRAM or rows.value(sizes) >= FEW_ROWS:
        return None
    inner, at = 1, len(reduced)
    while inner * (shape[reduced[at - 1]].static or 0) <= ONE_PROGRAM:
        at -= 1
        inner *= shape[reduced[at]].static or 0
    if inner >= SHORT_PART:
        return shape, reduced[at]
    cut = reduced[at - 1]
    size = shape[cut].static or 0
    part = next(p for p in range(ONE_PROGRAM // inner, 0, -1) if size % p == 0)
    if part * inner < SHORT_PART:
        return None
    return (*shape[:cut], Dim.of(size // part), Dim.of(part), *shape[cut + 1 :]), cut + 1


def _in_parts(b: GraphBuilder, node: Node, x: Val, first: int, shape: tuple[Dim, ...], start: int) -> Val:
    """A reduction of rows in two: of `shape` the axes from `start` on, then those between `first` and it."""
    wide = _added(b, node, x)
    inner = b(
        node.op, _as(b, wide, wide.type.dtype, shape), dims=tuple(range(start, len(shape))), keepdim=False
    )
    return b(node.op, inner, dims=tuple(range(first, start)), keepdim=False)


def _added(b: GraphBuilder, node: Node, x: Val) -> Val:
    """The operand in the type that sums are made in; of an extremum as it is."""
    low = OPS[node.op].lowering
    assert isinstance(low, Reduction)
    if low.combine != "sum":
        return x
    return _as(b, x, x.type.dtype.compute if x.type.dtype.is_floating else DType.int64, x.type.shape)


def _rows_first(b: GraphBuilder, node: Node, x: Val, reduced: list[int]) -> Val:
    """All of a tensor: first along its last axis, row by row, then the rows, in the same way where one
    program should not go through them all; sums in the type that sums are made in.
    """
    x = _added(b, node, x)
    *others, last = sorted(reduced)
    rows = b(node.op, x, dims=(last,), keepdim=True)
    if len(others) > 1 and _many(rows.type.shape):
        return _rows_first(b, node, rows, others)
    return b(node.op, rows, dims=tuple(others), keepdim=True)


def _twice(b: GraphBuilder, x: Val, reduced: list[int], kept: list[int]) -> Val:
    """Sum over the axes behind the kept ones, then over those before, in the type that sums are made in."""
    wide = x.type.dtype.compute if x.type.dtype.is_floating else DType.int64
    behind = tuple(axis for axis in reduced if axis > kept[-1])
    before = tuple(axis for axis in reduced if axis < kept[0])
    inner = b("sum", _as(b, x, wide, x.type.shape), dims=behind, keepdim=True)
    return b("sum", inner, dims=before, keepdim=True)


def _as(b: GraphBuilder, x: Val, dtype: DType, shape: tuple[Dim, ...]) -> Val:
    """The value with another type and with axes of size 1 more or less."""
    if x.type.dtype is not dtype:
        x = b("cast", x, dtype=dtype)
    return x if x.type.shape == shape else b("reshape", x, shape=shape)
