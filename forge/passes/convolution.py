"""A bias added to a convolution goes into the call, whose own sum takes it with one rounding less.

For targets whose library adds it before it rounds; elsewhere the sum stays outside and joins the kernel that
follows.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from esper_ir.graph import Graph, Node
from esper_ir.types import Dim

ONE = Dim.of(1)


def bias_inside(graph: Graph) -> Graph:
    """`add(convolution(x, w), bias)` as one convolution, where nothing else reads the product."""
    reads = Counter([v for n in graph for v in n.tensors] + list(graph.outputs))
    made, gone = graph.by_output, set[str]()
    nodes: list[Node] = []
    for node in graph:
        found = _pattern(node, graph, reads)
        if found is None:
            nodes.append(node)
            continue
        product, bias = made[found[0]], found[1]
        gone.add(product.id)
        nodes.append(Node(node.id, product.op, (*product.inputs, bias), product.attrs, node.types))
    return replace(graph, nodes=tuple(n for n in nodes if n.id not in gone))


def _pattern(node: Node, graph: Graph, reads: Counter[str]) -> tuple[str, str] | None:
    """(convolution, bias as [channels]) of an addition that is one."""
    if node.op != "add" or len(node.tensors) != 2:
        return None
    for product, other in (node.tensors, node.tensors[::-1]):
        maker = graph.by_output.get(product)
        if maker is None or maker.op != "convolution" or len(maker.inputs) != 2 or reads[product] != 1:
            continue
        bias = _per_channel(other, graph, dict(maker.attrs)["data_format"])
        if bias is not None and graph.types[bias].dtype is node.types[0].dtype:
            return product, bias
    return None


def _per_channel(name: str, graph: Graph, order: str) -> str | None:
    """The vector behind an operand that has one value per channel."""
    shape, maker = graph.types[name].shape, graph.by_output.get(name)
    if order == "NHWC":
        return name if len(shape) == 1 else None
    reshaped = maker is not None and maker.op == "reshape" and len(shape) == 3 and shape[1:] == (ONE, ONE)
    source = maker.tensors[0] if reshaped and maker is not None else ""
    return source if source and graph.types[source].shape == shape[:1] else None
