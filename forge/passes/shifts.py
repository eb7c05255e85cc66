"""Running sums that begin later: zeros beside a part of a running sum are the running sum of shifted values.

`cat(zeros, cumsum(x)[:-1])` writes the sums, copies all but the last and writes them again; read through a
window that finds zeros before the first value, the same sums are written once, where they belong. Zeros put
around what running sums read, as in the gradient of that, are such a window too.
"""

from __future__ import annotations

from collections import Counter

from esper_ir.graph import Graph, Node
from esper_ir.graphbuilder import GraphBuilder, rewritten
from esper_ir.opdef import Val
from esper_ir.types import Dim
from forge.passes.clean import eliminate_dead

ZERO = Dim()
SUM = "running_sum"


def shifted(graph: Graph) -> Graph:
    """The graph without such zeros beside running sums that nothing else reads."""
    reads = Counter([v for n in graph for v in n.tensors] + list(graph.outputs))
    padded = {n.id for n in graph if _pads(graph, n)}
    if not padded and not any(_parts(graph, n, reads) for n in graph):
        return graph

    def change(b: GraphBuilder, node: Node, values: dict[str, Val]) -> tuple[Val, ...] | None:
        if node.id in padded:
            return (_windowed(b, node, values[node.tensors[0]]),)
        found = _parts(graph, node, reads)
        if found is None:
            return None
        (count, first), scan, part = found
        b.scope = node.id
        x, dim = values[scan.tensors[0]], node.attr("dim")
        if part is not None:
            x = b("slice", x, **dict(part.attrs))
        size, add = node.types[0].shape[dim], -count if first else 0
        x = b("window", x, dim=dim, mul=1, add=add, div=1, size=size, outside="zero")
        b.scope = ""
        return b.emit_named(node.id, SUM, [x], dict(scan.attrs))

    return eliminate_dead(rewritten(graph, change))


def _pads(graph: Graph, node: Node) -> bool:
    """Zeros around what running sums alone read."""
    if node.op != "pad" or node.attr("value") != 0 or node.id in graph.outputs:
        return False
    return all(n.op == SUM for n in graph if node.id in n.tensors)


def _windowed(b: GraphBuilder, node: Node, x: Val) -> Val:
    b.scope = node.id
    for dim, (before, size) in enumerate(zip(node.attr("before"), node.types[0].shape, strict=True)):
        if x.type.shape[dim] != size:
            x = b("window", x, dim=dim, mul=1, add=-int(before), div=1, size=size, outside="zero")
    b.scope = ""
    return x


def _parts(
    graph: Graph, node: Node, reads: Counter[str]
) -> tuple[tuple[int, bool], Node, Node | None] | None:
    """((zeros, whether they come first), running sum, part of it that is taken) of such a node."""
    if node.op != "cat" or len(node.tensors) != 2:
        return None
    dim, made = int(node.attr("dim")), graph.by_output
    first = _is_zero(graph, node.tensors[0])
    zeros, rest = node.tensors if first else node.tensors[::-1]
    count, scan, part = graph.types[zeros].shape[dim].static, made.get(rest), None
    if not _is_zero(graph, zeros) or count is None or scan is None or reads[rest] > 1:
        return None
    if scan.op == "slice" and scan.attr("dim") == dim and scan.attr("step") == 1:
        part, scan = scan, made.get(scan.tensors[0])
    if scan is None or scan.op != SUM or reads[scan.id] > 1:
        return None
    if scan.attr("dim") != dim or bool(scan.attr("reverse")) is first:
        return None
    whole = graph.types[scan.id].shape[dim]
    begins = part is None or (part.attr("start") == ZERO if first else part.attr("end") == whole)
    return ((count, first), scan, part) if begins else None


def _is_zero(graph: Graph, name: str) -> bool:
    maker = graph.by_output.get(name)
    while maker is not None and maker.op in ("cast", "expand", "reshape"):
        maker = graph.by_output.get(maker.tensors[0])
    return maker is not None and maker.op == "full" and maker.attr("value") == 0
