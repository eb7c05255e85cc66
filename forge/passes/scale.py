"""A power of two that scales an operand of a product scales the product instead, where that is smaller.

(c x) y = c (x y) bit for bit in types with float32's range, but where numbers overflow or are too small to be
normal; the pass over x, and its copy in memory, are saved.
"""

from __future__ import annotations

import math

from esper_ir.graph import Graph, Node
from esper_ir.graphbuilder import GraphBuilder, rewritten
from esper_ir.opdef import Val
from esper_ir.types import DType
from forge.templates.choice import tuned_sizes

WIDE = (DType.bfloat16, DType.float32, DType.float64)


def carry(graph: Graph) -> Graph:
    """The graph with such factors behind their products; names and types of outputs stay."""
    moved = _movable(graph)
    if not moved:
        return graph

    def change(builder: GraphBuilder, node: Node, values: dict[str, Val]) -> tuple[Val, ...] | None:
        scaled = [(at, moved[r]) for at, r in enumerate(node.inputs) if isinstance(r, str) and r in moved]
        if not scaled:
            return None
        operands, factor = [values[r] if isinstance(r, str) else r for r in node.inputs], 1.0
        for at, (source, by) in scaled:
            operands[at], factor = values[source], factor * by
        builder.scope = node.id
        product = builder(node.op, *operands, **dict(node.attrs))
        builder.scope = ""
        assert isinstance(product, Val)
        return builder.emit_named(node.id, "mul", [product, factor], {})

    return rewritten(graph, change)


def _movable(graph: Graph) -> dict[str, tuple[str, float]]:
    """Scaled value to what it scales and by how much, where every reader is a product with fewer elements."""
    sizes = tuned_sizes(graph)
    readers: dict[str, list[Node]] = {}
    for node in graph:
        for value in node.tensors:
            readers.setdefault(value, []).append(node)
    out: dict[str, tuple[str, float]] = {}
    for node in graph:
        found = _scaling(node)
        if found is None or node.id in graph.outputs or node.id not in readers:
            continue
        count = node.types[0].numel.value(sizes)
        if all(r.op == "matmul" and r.types[0].numel.value(sizes) < count for r in readers[node.id]):
            out[node.id] = found
    return out


def _scaling(node: Node) -> tuple[str, float] | None:
    """The tensor and the power of two that a `mul` multiplies it by."""
    if node.op != "mul" or len(node.tensors) != 1 or node.types[0].dtype not in WIDE:
        return None
    (by,) = [r for r in node.inputs if not isinstance(r, str)]
    if not isinstance(by, (int, float)) or isinstance(by, bool) or by == 0 or not math.isfinite(by):
        return None
    return (node.tensors[0], float(by)) if abs(math.frexp(by)[0]) == 0.5 else None
