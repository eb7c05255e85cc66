"""Mean and variance down the columns in one reading of the data.

sum((x - mean(x))^2) waits for the mean and so reads x again. As one operator it is made beside sum(x), from
the squares about the mean of each block of rows (Chan, Golub and LeVeque 1979), as exactly as in two passes.
Only sums over the first axes: the elements of a row are on chip, and a second look at them costs little.
"""

from __future__ import annotations

from collections.abc import Mapping

from esper_ir.graph import Graph, Node, Ref
from esper_ir.graphbuilder import GraphBuilder, rewritten
from esper_ir.opdef import Val
from esper_ir.ops.reduction import count
from esper_ir.ops.rules import numel, reduced
from esper_ir.types import Dim

ONE = Dim.of(1)
OPERATOR = "squared_deviations"


def one_reading(graph: Graph) -> Graph:
    """The graph with such sums as `squared_deviations`; names and types of outputs stay."""
    made = graph.by_output
    found = {n.id: x for n in graph if (x := _squared(graph, made, n)) is not None}
    if not found:
        return graph

    def change(b: GraphBuilder, node: Node, values: dict[str, Val]) -> tuple[Val, ...] | None:
        if node.id not in found:
            return None
        x, attrs = values[found[node.id]], dict(node.attrs)
        if node.op == "sum":
            return b.emit_named(node.id, OPERATOR, (x,), attrs)
        b.scope = node.id
        total = b(OPERATOR, x, **attrs)
        size = count(b, x.type, attrs["dims"], total.type.dtype)
        b.scope = ""
        return b.emit_named(node.id, "div", (total, size), {})

    return rewritten(graph, change)


def two_readings(graph: Graph) -> Graph:
    """The graph with `squared_deviations` as a mean and a sum where no kernel makes it at once."""
    if not any(n.op == OPERATOR and not _down_columns(graph, n) for n in graph):
        return graph

    def change(b: GraphBuilder, node: Node, values: dict[str, Val]) -> tuple[Val, ...] | None:
        if node.op != OPERATOR or _down_columns(graph, node):
            return None
        x, attrs, kind = values[node.tensors[0]], dict(node.attrs), node.types[0].dtype
        b.scope = node.id
        wide = x if kind is kind.compute else b("cast", x, dtype=kind.compute)
        away = b("sub", wide, b("mean", wide, dims=attrs["dims"], keepdim=True))
        square = b("mul", away, away)
        total = b("sum", square, **attrs) if kind is not kind.compute else square
        b.scope = ""
        if kind is kind.compute:
            return b.emit_named(node.id, "sum", (square,), attrs)
        return b.emit_named(node.id, "cast", (total,), {"dtype": kind})

    return rewritten(graph, change)


def _down_columns(graph: Graph, node: Node) -> bool:
    """Over the first axes and not over all, in the type that sums are made in."""
    kind = graph.types[node.tensors[0]]
    long = [axis for axis, size in enumerate(kind.shape) if size != ONE]
    dims = [axis for axis in node.attr("dims") if axis in long]
    first = sorted(dims) == long[: len(dims)] and 0 < len(dims) < len(long)
    return first and kind.dtype is kind.dtype.compute and kind.dtype.is_floating


def _squared(graph: Graph, made: Mapping[str, Node], node: Node) -> str | None:
    """x where the node adds up the squares of x - mean(x) over the axes of the mean."""
    if node.op not in ("sum", "mean") or not _down_columns(graph, node):
        return None
    square = made.get(node.tensors[0])
    away = made.get(_root(square)) if square is not None else None
    if away is None or away.op != "sub" or len(away.tensors) != 2:
        return None
    x, mean = away.tensors
    dims = tuple(sorted(node.attr("dims")))
    if graph.types[x].shape != away.types[0].shape or _mean_of(graph, made, mean, x) != dims:
        return None
    return x


def _root(node: Node) -> str:
    """What a node squares, else nothing."""
    if node.op == "mul" and len(node.tensors) == 2 and node.inputs[0] == node.inputs[1]:
        return node.tensors[0]
    power = node.op == "square" or (node.op == "pow" and node.inputs[1] == 2)
    return node.tensors[0] if power else ""


def _mean_of(graph: Graph, made: Mapping[str, Node], name: str, x: str) -> tuple[int, ...] | None:
    """The axes that a value is the mean of x over, where it lies along the others as x does."""
    shape, kind = graph.types[name].shape, graph.types[x]
    node, size = made.get(name), None
    while node is not None and node.op == "reshape":
        node = made.get(node.tensors[0])
    if node is not None and node.op == "div":
        size = node.inputs[1]
        node = made.get(node.tensors[0])
        while node is not None and node.op == "reshape":
            node = made.get(node.tensors[0])
    if node is None or node.op != ("mean" if size is None else "sum") or node.tensors[0] != x:
        return None
    dims = tuple(sorted(node.attr("dims")))
    if size is not None and not _is_size(made, size, numel([kind.shape[d] for d in dims])):
        return None
    along = reduced(kind.shape, dims, True)
    return dims if (ONE,) * (len(along) - len(shape)) + shape == along else None


def _is_size(made: Mapping[str, Node], operand: Ref, size: Dim) -> bool:
    """Whether an operand is this number."""
    if not isinstance(operand, str):
        return size.static is not None and operand == size.static
    node = made.get(operand)
    while node is not None and node.op in ("reshape", "expand"):
        node = made.get(node.tensors[0])
    return node is not None and node.op == "full" and Dim.of(node.attr("value")) == size
