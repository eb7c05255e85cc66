"""Pooling as library calls, for targets whose library is faster than windows written out.

Measured on one core: the gradient of a maximum over windows takes a hundred times as long as torch's, since a
loop over columns asks every window anew; means take up to twice the time in channels-last memory.
"""

from __future__ import annotations

from esper_ir.graph import Graph, Node
from esper_ir.graphbuilder import GraphBuilder, rewritten
from esper_ir.opdef import Val

CALLED = {
    **{f"max_pool{n}d": f"max_pool{n}d_with_indices" for n in (2, 3)},
    **{f"avg_pool{n}d": f"avg_pool{n}d_whole" for n in (2, 3)},
}


def pools_called(graph: Graph) -> Graph:
    """The graph with every pooling as an operator that is a library call; names stay."""
    if not any(node.op in CALLED for node in graph):
        return graph
    return rewritten(graph, _called)


def _called(builder: GraphBuilder, node: Node, values: dict[str, Val]) -> tuple[Val, ...] | None:
    if node.op not in CALLED:
        return None
    operands = [values[r] if isinstance(r, str) else r for r in node.inputs]
    # The library's operator has more results than the pooling.
    return builder.emit_named(node.id, CALLED[node.op], operands, dict(node.attrs))[: len(node.outputs)]
