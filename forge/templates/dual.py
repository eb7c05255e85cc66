"""Two products of one left operand that pointwise work joins (gate and up of SwiGLU), as one kernel.

One loop over the contracted axis loads the left tile once and a tile of either right operand, and adds to two
accumulators; what joins them runs on both tiles. Neither product is read again from memory, and only what
somebody else reads of them is stored.
"""

from __future__ import annotations

from collections.abc import Mapping

from esper_ir.graph import Graph, Node
from forge.fuse import Fuser
from forge.groups import Group, Matcher, lowering_kind
from forge.templates.chain import starts
from forge.templates.matmul import precision
from forge.views import View


def candidates(
    graph: Graph, views: Mapping[str, View], readers: Mapping[str, list[Node]]
) -> dict[str, str]:  # fmt: skip
    """Second product to first, by node, where operands allow one kernel and one pointwise node reads both; a
    product is in one pair at most."""
    out: dict[str, str] = {}
    products = [n for n in graph if lowering_kind(n) == "contraction"]
    taken: set[str] = set()
    for at, node in enumerate(products):
        for other in products[:at]:
            alike = _operands(node, graph, views) == _operands(other, graph, views)
            free = not taken & {node.id, other.id}
            if alike and free and reached(node.id, readers) & reached(other.id, readers):
                out[node.id] = other.id
                taken |= {node.id, other.id}
    return out


def _operands(node: Node, graph: Graph, views: Mapping[str, View]) -> tuple[object, ...]:
    """What two products of one kernel have in common."""
    a, b = (views[v] for v in node.tensors[:2])
    right = (b.shape, b.strides, b.windows, graph.types[b.base].dtype)
    return (a, *right, node.types[0], precision(node))


def reached(name: str, readers: Mapping[str, list[Node]]) -> set[str]:
    """Pointwise nodes that are computed from a value, up to the next work that is no loop over elements."""
    found, stack = set[str](), [name]
    while stack:
        for user in readers.get(stack.pop(), ()):
            if lowering_kind(user) == "pointwise" and user.id not in found:
                found.add(user.id)
                stack.append(user.id)
    return found


def merged(
    groups: list[Group], pairs: Mapping[str, str], graph: Graph, views: Mapping[str, View]
) -> list[Group]:  # fmt: skip
    """Groups of both products of the pairs (second to first) made one, wherever one reads what the other
    makes and nothing stands between them."""
    fuser = Fuser(Matcher(graph), views, set())
    for second, first in pairs.items():
        found = [g for name in (first, second) for g in groups if starts(g, name)]
        made = fuser.twins(groups, *found) if len(found) == 2 else None
        if made is not None:
            groups = [made if g is found[1] else g for g in groups if g is not found[0]]
    return groups
