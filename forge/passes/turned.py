"""A gradient that is a product turned over is the product of the turned operands: memory is written once.

The weight of a linear layer is stored as [out, in] and read transposed, so that its gradient comes out as
[in, out]; turning that over afterwards would be a copy as large as the weight.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Set

from esper_ir.graph import Graph, Node
from esper_ir.types import TensorType
from forge.passes.clean import eliminate_dead
from forge.passes.fold import fold
from forge.views import movement, permutation


def turned(graph: Graph, gradients: Set[str]) -> Graph:
    """The graph in which no value of `gradients` is a permuted product that nothing else reads. The results
    of a forward stay as they are: with and without a backward they have the same bits.
    """
    reads = Counter([v for n in graph for v in n.tensors] + list(graph.outputs))
    made, nodes = graph.by_output, dict[str, list[Node]]()
    for name in gradients & set(graph.outputs):
        node = _permute(graph, name, reads)
        product = made.get(node.tensors[0]) if node is not None else None
        if node is not None and product is not None and reads[product.id] == 1 and _plain(graph, product):
            nodes[node.id] = _swapped(graph, node, product)
    if not nodes:
        return graph
    rewritten = [new for n in graph for new in nodes.get(n.id, [n])]
    return fold(eliminate_dead(Graph(graph.inputs, tuple(rewritten), graph.outputs, graph.dims)))


def _permute(graph: Graph, name: str, reads: Counter[str]) -> Node | None:
    """The exchange of two axes behind a value, maybe under other shapes, when nothing else reads it."""
    node = graph.by_output.get(name)
    while node is not None and movement(node) == "reshape" and reads[node.id] == 1:
        node = graph.by_output.get(node.tensors[0])
    if node is None or movement(node) != "permute" or reads[node.id] != 1:
        return None
    return node if permutation(node, len(node.types[0].shape)) == (1, 0) else None


def _plain(graph: Graph, product: Node) -> bool:
    return product.op == "matmul" and all(graph.types[v].rank == 2 for v in product.tensors)


def _swapped(graph: Graph, node: Node, product: Node) -> list[Node]:
    """(A B) transposed is B transposed times A transposed."""
    out: list[Node] = []
    for at, name in enumerate(reversed(product.tensors)):
        kind = graph.types[name]
        shape = TensorType(kind.dtype, kind.shape[::-1])
        out.append(Node(f"{node.id}:side{at}", "permute", (name,), (("dims", (1, 0)),), (shape,)))
    sides = tuple(n.id for n in out)
    return [*out, Node(node.id, product.op, sides, product.attrs, node.types)]
