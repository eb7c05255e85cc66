"""Attention on operands as its products made them: [batch, length, heads, width].

torch's kernels take heads and rows in either order and return memory in this one. A graph that splits heads
off a product, exchanges the axes and gathers them again would otherwise copy every operand, result and
gradient twice.
"""

from __future__ import annotations

from collections.abc import Sequence

from esper_ir.graph import Graph, Node
from esper_ir.graphbuilder import GraphBuilder, rewritten
from esper_ir.opdef import Val
from forge.views import movement, permutation

WHOLE = "scaled_dot_product_attention"
TURN = (0, 2, 1, 3)


def heads_inside(graph: Graph) -> Graph:
    """The graph with every attention between exchanges of heads and rows in the order of its neighbours;
    names stay."""
    found = {node.id for node in graph if _turned(graph, node)}
    if not found:
        return graph

    def change(builder: GraphBuilder, node: Node, values: dict[str, Val]) -> Sequence[Val] | None:
        if node.id not in found:
            return None
        sides = [builder.emit("permute", values[v], dims=TURN) for v in node.tensors]
        attrs = {**dict(node.attrs), "layout": "BSHD"}
        out = builder.many("attention", *sides, **attrs)[0]
        return builder.emit_named(node.id, "permute", [out], {"dims": TURN})

    return rewritten(graph, change)


def _turned(graph: Graph, node: Node) -> bool:
    """Attention without a mask, as many key as query heads, and an exchange of axes before or after."""
    if node.op != WHOLE or len(node.inputs) != 3:
        return False
    q, k = (graph.types[v].shape for v in node.tensors[:2])
    makers = [graph.by_output.get(v) for v in node.tensors]
    readers = [n for n in graph if node.id in n.tensors]
    return q[1] == k[1] and any(_turn(n) for n in (*makers, *readers) if n is not None)


def _turn(node: Node) -> bool:
    return movement(node) == "permute" and permutation(node, 4) == TURN
