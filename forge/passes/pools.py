"""Pooling as library calls, for targets whose library is faster than windows written out.

Measured on one core: the gradient of a maximum over windows takes a hundred times as long as torch's, since a
loop over columns asks every window anew; means take up to twice the time in channels-last memory.
"""

from __future__ import annotations

from esper_ir.graph import Graph
from esper_ir.graphbuilder import replay

CALLED = {
    **{f"max_pool{n}d": f"max_pool{n}d_with_indices" for n in (2, 3)},
    **{f"avg_pool{n}d": f"avg_pool{n}d_whole" for n in (2, 3)},
}


def pools_called(graph: Graph) -> Graph:
    """The graph with every pooling as an operator that is a library call; names stay."""
    if not any(node.op in CALLED for node in graph):
        return graph
    builder, values = replay(graph)
    for node in graph.nodes:
        operands = [values[r] if isinstance(r, str) else r for r in node.inputs]
        made = builder.emit_named(node.id, CALLED.get(node.op, node.op), operands, dict(node.attrs))
        values.update(zip(node.outputs, made, strict=False))
    return builder.graph({name: values[name] for name in graph.outputs})
