"""Work beside a reduction over axes in the middle is done in the reduction's own order of axes.

A reduction over channels of [batch, channels, pixels] reads its operand through an exchange of axes, a view,
so that what it reduces is last. Where the work before and after it is in that order too, its result never
lies in memory between them: leaves are read through the same view, and results are written through it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from esper_ir.graph import Graph, Node
from esper_ir.graphbuilder import GraphBuilder, replay
from esper_ir.opdef import Val
from forge.groups import lowering_kind
from forge.passes.clean import eliminate_dead, merge_equal
from forge.passes.fold import fold
from forge.views import ONE, movement, permutation

Order = tuple[int, ...]


def reordered(graph: Graph) -> Iterator[Graph]:
    """The graph rewritten, once for each order of axes in which a reduction reads element-by-element work or
    what such work reads. None is better in itself: that shows in the groups they make.
    """
    readers = _readers(graph)
    seen: set[tuple[str, Order]] = set()
    for node in graph:
        order = _order(node, graph, readers)
        if order is None or (node.tensors[0], order) in seen:
            continue
        region = _region(graph, node.tensors[0], readers)
        seen |= {(value, order) for value in (*region, node.tensors[0])}
        if region:
            made = _Turner(graph, region, order).made()
            yield eliminate_dead(merge_equal(fold(made), apart=True))


def _readers(graph: Graph) -> Mapping[str, list[Node]]:
    out: dict[str, list[Node]] = {}
    for node in graph:
        for value in node.tensors:
            out.setdefault(value, []).append(node)
    return out


def _order(node: Node, graph: Graph, readers: Mapping[str, list[Node]]) -> Order | None:
    """The order of axes of an exchange that a reduction over the last ones reads."""
    if movement(node) != "permute" or not any(_over_last(n) for n in readers.get(node.id, [])):
        return None
    order = permutation(node, graph.types[node.id].rank)
    return None if order == tuple(sorted(order)) else order


def _over_last(node: Node) -> bool:
    return lowering_kind(node) == "reduction"


def _region(graph: Graph, seed: str, readers: Mapping[str, list[Node]]) -> frozenset[str]:
    """Element-by-element work of the seed's shape that shares values of that shape with it."""
    shape, made = graph.types[seed].shape, graph.by_output
    out, seen, stack = set[str](), set[str](), [seed]
    while stack:
        value = stack.pop()
        if value in seen:
            continue
        seen.add(value)
        maker = made.get(value)
        if maker is not None and lowering_kind(maker) == "pointwise" and len(maker.outputs) == 1:
            out.add(value)
            stack += [v for v in maker.tensors if graph.types[v].shape == shape]
        stack += [
            u.id for u in readers.get(value, [])
            if lowering_kind(u) == "pointwise" and u.types[0].shape == shape and len(u.outputs) == 1
        ]  # fmt: skip
    return frozenset(out)


@dataclass
class _Turner:
    """`values` have the shapes of the graph, `turned` those of the region in the other order of axes."""

    graph: Graph
    region: frozenset[str]
    order: Order
    builder: GraphBuilder = field(init=False)
    values: dict[str, Val] = field(init=False)
    turned: dict[str, Val] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.builder, self.values = replay(self.graph)
        self.back = tuple(self.order.index(axis) for axis in range(len(self.order)))

    def made(self) -> Graph:
        for node in self.graph:
            self._node(node)
        return self.builder.graph({name: self._plain(name) for name in self.graph.outputs})

    def _node(self, node: Node) -> None:
        emit = self.builder
        if node.id in self.region:
            emit.scope = node.id
            operands = [self._other(r) if isinstance(r, str) else r for r in node.inputs]
            self.turned[node.id] = emit(node.op, *operands, **dict(node.attrs))
            emit.scope = ""
            return
        if movement(node) == "permute" and node.tensors[0] in self.turned and self._same(node):
            self.values[node.id] = self.turned[node.tensors[0]]
            return
        operands = [self._plain(r) if isinstance(r, str) else r for r in node.inputs]
        made = emit.emit_named(node.id, node.op, operands, dict(node.attrs))
        self.values.update(zip(node.outputs, made, strict=True))

    def _same(self, node: Node) -> bool:
        return permutation(node, len(self.order)) == self.order

    def _other(self, name: str) -> Val:
        """A value in the other order of axes, with axes of size 1 in front where it has fewer."""
        if name in self.turned:
            return self.turned[name]
        maker, emit = self.graph.by_output.get(name), self.builder
        if maker is not None and movement(maker) == "expand":
            whole = (ONE,) * (len(self.order) - maker.types[0].rank) + maker.types[0].shape
            shape = tuple(whole[axis] for axis in self.order)
            self.turned[name] = emit("expand", self._other(maker.tensors[0]), shape=shape)
            return self.turned[name]
        value = self.values[name]
        shape = value.type.shape
        if all(size == ONE for size in shape):
            return value
        lead = len(self.order) - len(shape)
        if lead:
            value = emit("reshape", value, shape=((ONE,) * lead + shape))
        made = emit("permute", value, dims=self.order)
        self.turned[name] = made
        return made

    def _plain(self, name: str) -> Val:
        """A value in the graph's own order, in memory of its own: a view would leave it in the other."""
        if name not in self.values:
            self.builder.scope = name
            moved = self.builder("permute", self.turned[name], dims=self.back)
            self.builder.scope = ""
            attrs = {"dtype": moved.type.dtype}
            (self.values[name],) = self.builder.emit_named(name, "cast", [moved], attrs)
        return self.values[name]
