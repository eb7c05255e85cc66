"""Dead code and common subexpressions: what is not read is dropped, what is computed twice is computed
once.
"""

from __future__ import annotations

from dataclasses import replace

from esper_ir.graph import Graph, Node, Ref


def eliminate_dead(graph: Graph) -> Graph:
    """Keep the nodes that some output needs."""
    needed = set(graph.outputs)
    kept: list[Node] = []
    for node in reversed(graph.nodes):
        if needed & set(node.outputs):
            kept.append(node)
            needed |= set(node.tensors)
    return replace(graph, nodes=tuple(reversed(kept)))


def merge_equal(graph: Graph, *, apart: bool = False) -> Graph:
    """One node per (op, operands, attributes); later equal nodes become names of the first.

    Outputs keep their order. With `apart` they keep their names too: an output equal to another value becomes
    a copy of it, since results, unlike gradients, share no memory.
    """
    first: dict[tuple[object, ...], Node] = {}
    renamed: dict[str, str] = {}
    kept: list[Node] = []

    def ref(r: Ref) -> Ref:
        return renamed.get(r, r) if isinstance(r, str) else r

    for node in graph:
        inputs = tuple(ref(r) for r in node.inputs)
        # A Python number's type is part of what it means: 1 and 1.0 and True differ.
        key = (node.op, tuple((type(r), r) for r in inputs), node.attrs)
        seen = first.get(key)
        if seen is not None and apart and set(node.outputs) & set(graph.outputs):
            kind = node.types[0]
            kept.append(Node(node.id, "cast", (seen.id,), (("dtype", kind.dtype),), (kind,)))
            continue
        if seen is not None:
            renamed.update(zip(node.outputs, seen.outputs, strict=True))
            continue
        first[key] = replace(node, inputs=inputs)
        kept.append(first[key])
    outputs = tuple(renamed.get(o, o) for o in graph.outputs)
    return replace(graph, nodes=tuple(kept), outputs=outputs)
