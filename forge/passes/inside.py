"""Movement inside rows goes to the leaves, so that a row's work is one kernel with what moves its elements.

Where a reshape in the midst of work splits a row, or joins one from parts, all work on that row is done on
the parts: of leaves and results in memory a reshape is a view, and what a row gives as a whole does not see
how it is walked. A reversal, or a part, of element-by-element work is that work on operands that are
reversed, or parts, themselves; what is the same for the whole row stays.

Rotary positions after a norm are both: the row as halves, and the halves in the other order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from esper_ir.graph import Graph, Node
from esper_ir.graphbuilder import GraphBuilder, replay
from esper_ir.opdef import Operand, Val
from esper_ir.types import Dim
from forge.groups import lowering_kind
from forge.passes.clean import eliminate_dead, merge_equal
from forge.passes.fold import fold
from forge.passes.pushing import is_cheap
from forge.views import ONE, View, movement, views

STEPS = 10  # operators between what moves and the leaves
LEAVES = 2  # of the size of what moves
WORK = ("pointwise", "reduction")

Shape = tuple[Dim, ...]


@dataclass(frozen=True)
class Rows:
    """Values whose last axis, of size `whole`, is to be `parts`."""

    values: frozenset[str]
    whole: Dim
    parts: Shape


def inside(graph: Graph) -> Iterator[Graph]:
    """The graph rewritten, once for each set of rows that work both sides of a reshape; or for movement that
    can go to the leaves as it is. None is better in itself: that shows in the groups they make.
    """
    moved = leaves_moved(graph)
    if moved is not graph:
        yield moved
    for rows in _rows(graph):
        yield leaves_moved(_split(graph, rows))


# Rows in parts ------------------------------------------------------------------------------------


def _rows(graph: Graph) -> list[Rows]:
    found: list[Rows] = []
    for node in graph:
        seed = _regrouped(node, graph)
        if seed is None or any(seed[0] in r.values and seed[2] == r.parts for r in found):
            continue
        rows = Rows(frozenset(_grown(graph, *seed)), *seed[1:])
        if any(_between(graph, n, rows) for n in graph):
            found.append(rows)
    return found


def _regrouped(node: Node, graph: Graph) -> tuple[str, Dim, Shape] | None:
    """(value with the axis in one, its size, its parts) of a reshape that splits or joins the last axis."""
    if movement(node) != "reshape":
        return None
    source, made = graph.types[node.tensors[0]].shape, node.types[0].shape
    flat, apart = (source, made) if len(source) < len(made) else (made, source)
    lead = len(flat) - 1
    parts = apart[lead:]
    several = sum(size != ONE for size in parts) > 1
    if lead < 0 or flat[:lead] != apart[:lead] or not several:
        return None
    return (node.tensors[0] if flat is source else node.id), flat[-1], parts


def _grown(graph: Graph, seed: str, whole: Dim, parts: Shape) -> set[str]:
    """The value and all that share its rows through work on elements and sums over other axes."""
    readers: dict[str, list[Node]] = {}
    for node in graph:
        for value in node.tensors:
            readers.setdefault(value, []).append(node)
    out, stack = set[str](), [seed]
    while stack:
        value = stack.pop()
        if value in out:
            continue
        out.add(value)
        maker = graph.by_output.get(value)
        if maker is not None and _keeps(maker, graph):
            stack += [v for v in maker.tensors if graph.types[v].shape[-1:] == (whole,)]
        stack += [u.id for u in readers.get(value, []) if _keeps(u, graph)]
    return out


def _keeps(node: Node, graph: Graph) -> bool:
    """Work on the elements of rows that leaves them where they are."""
    kind = lowering_kind(node)
    if kind == "reduction":
        return graph.types[node.tensors[0]].rank - 1 not in node.attr("dims")
    return kind == "pointwise" and len(node.outputs) == 1


def _between(graph: Graph, node: Node, rows: Rows) -> bool:
    """A reshape of these rows that stands between work and work."""
    found = _regrouped(node, graph)
    if found is None or found[0] not in rows.values or found[2] != rows.parts:
        return False
    maker = graph.by_output.get(node.tensors[0])
    return maker is not None and lowering_kind(maker) in WORK and _worked_on(graph, node.id)


def _worked_on(graph: Graph, name: str) -> bool:
    """Work reads the value, maybe moved."""
    readers = [n for n in graph if name in n.tensors]
    if any(lowering_kind(n) in WORK for n in readers):
        return True
    return any(movement(n) is not None and _worked_on(graph, n.id) for n in readers)


def _split(graph: Graph, rows: Rows) -> Graph:
    made = _Splitter(graph, rows).made()
    return eliminate_dead(merge_equal(fold(made), apart=True))


@dataclass
class _Splitter:
    """`values` have the shapes of the graph, `apart` are the rows' values in parts."""

    graph: Graph
    rows: Rows
    builder: GraphBuilder = field(init=False)
    values: dict[str, Val] = field(init=False)
    apart: dict[str, Val] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.builder, self.values = replay(self.graph)
        self.whole = self._needed_whole()

    def made(self) -> Graph:
        for node in self.graph:
            self._node(node)
        return self.builder.graph({name: self._flat(name) for name in self.graph.outputs})

    def _needed_whole(self) -> set[str]:
        """Values of the rows that somebody needs in one."""
        out = set(self.graph.outputs)
        for node in self.graph:
            if not self._ours(node) and not self._reduces(node) and not self._regroups(node):
                out.update(node.tensors)
        return out

    def _ours(self, node: Node) -> bool:
        return node.id in self.rows.values and _keeps(node, self.graph)

    def _reduces(self, node: Node) -> bool:
        return lowering_kind(node) == "reduction" and node.tensors[0] in self.rows.values

    def _regroups(self, node: Node) -> bool:
        found = _regrouped(node, self.graph)
        return found is not None and found[0] in self.rows.values and found[2] == self.rows.parts

    def _node(self, node: Node) -> None:
        attrs = dict(node.attrs)
        if self._ours(node):
            operands = [self._parts(r) if isinstance(r, str) else r for r in node.inputs]
            self.apart[node.id] = self._emit(node, operands, attrs, own=node.id not in self.whole)
        elif self._reduces(node):
            self._reduced(node, attrs)
        elif self._regroups(node) and node.id in self.rows.values:
            self.apart[node.id] = self._flat(node.tensors[0])
        elif self._regroups(node) and node.id not in self.graph.outputs:
            self.values[node.id] = self._parts(node.tensors[0])
        else:
            operands = [self._flat(r) if isinstance(r, str) else r for r in node.inputs]
            made = self.builder.emit_named(node.id, node.op, operands, attrs)
            self.values.update(zip(node.outputs, made, strict=True))

    def _emit(self, node: Node, operands: list[Operand], attrs: dict[str, Any], own: bool) -> Val:
        """A node, under its own name where no other value needs it."""
        if own:
            return self.builder.emit_named(node.id, node.op, operands, attrs)[0]
        self.builder.scope = node.id
        made = self.builder(node.op, *operands, **attrs)
        self.builder.scope = ""
        return made

    def _reduced(self, node: Node, attrs: dict[str, Any]) -> None:
        """What a row gives as a whole, from its parts."""
        last = self.graph.types[node.tensors[0]].rank - 1
        dims = (*(d for d in node.attr("dims") if d != last), *range(last, last + len(self.rows.parts)))
        kept = bool(node.attr("keepdim"))
        made = self._emit(node, [self._parts(node.tensors[0])], {**attrs, "dims": dims}, own=not kept)
        if kept:
            shape = node.types[0].shape
            (made,) = self.builder.emit_named(node.id, "reshape", [made], {"shape": shape})
        self.values[node.id] = made

    def _parts(self, name: str) -> Val:
        """A value as work on the parts reads it."""
        if name in self.apart:
            return self.apart[name]
        value = self.values[name]
        shape = value.type.shape
        if not shape or name not in self.rows.values and shape[-1] != ONE:
            return value
        tail = self.rows.parts if shape[-1] != ONE else (ONE,) * len(self.rows.parts)
        return self.builder("reshape", value, shape=(*shape[:-1], *tail))

    def _flat(self, name: str) -> Val:
        if name not in self.values:
            kind = self.graph.types[name]
            attrs = {"shape": kind.shape}
            (self.values[name],) = self.builder.emit_named(name, "reshape", [self.apart[name]], attrs)
        return self.values[name]


# Movement to the leaves ---------------------------------------------------------------------------


def leaves_moved(graph: Graph) -> Graph:
    """The graph in which no reversal or part is of cheap element-by-element work; itself where there is none
    that can go.
    """
    known, made = views(graph), graph.by_output
    movable = {
        n.id for n in graph
        if movement(n) in ("flip", "slice") and n.tensors[0] in made and _Leaves(graph, known, n).may()
    }  # fmt: skip
    if not movable:
        return graph
    builder, values = replay(graph)
    for node in graph:
        if node.id in movable:
            builder.scope = node.id
            values[node.id] = _Leaves(graph, known, node).moved(builder, values, node.tensors[0])
            builder.scope = ""
            continue
        operands = [values[r] if isinstance(r, str) else r for r in node.inputs]
        emitted = builder.emit_named(node.id, node.op, operands, dict(node.attrs))
        values.update(zip(node.outputs, emitted, strict=True))
    return eliminate_dead(builder.graph({name: values[name] for name in graph.outputs}))


@dataclass
class _Leaves:
    """One movement, `node`, and what lies under it."""

    graph: Graph
    views: Mapping[str, View]
    node: Node
    seen: set[str] = field(default_factory=set)
    full: set[str] = field(default_factory=set)

    def may(self) -> bool:
        """Cheap work alone between the movement and few values in memory."""
        root = self.node.tensors[0]
        maker = self.graph.by_output[root]
        return lowering_kind(maker) == "pointwise" and self._follow(root) and len(self.full) <= LEAVES

    def _axis(self, name: str) -> int | None:
        """The axis of a value that moves; None where it is the same along it."""
        shape, whole = self.graph.types[name].shape, self.node.types[0].rank
        axis = int(self.node.attr("dim")) - whole + len(shape)
        return None if axis < 0 or shape[axis] == ONE else axis

    def _follow(self, name: str) -> bool:
        if name in self.seen or self._axis(name) is None:
            return True
        maker = self.graph.by_output.get(name)
        if maker is not None and lowering_kind(maker) == "pointwise":
            self.seen.add(name)
            few = len(self.seen) <= STEPS and is_cheap(maker)
            return few and all(self._follow(v) for v in maker.tensors)
        if self.graph.types[name].rank == self.node.types[0].rank:
            self.full.add(name)
        base = self.graph.by_output.get(self.views[name].base)
        return base is None or lowering_kind(base) in ("contraction", "creation", "opaque")

    def moved(self, builder: GraphBuilder, values: Mapping[str, Val], name: str) -> Val:
        axis, maker = self._axis(name), self.graph.by_output.get(name)
        if axis is None:
            return values[name]
        if maker is not None and lowering_kind(maker) == "pointwise":
            operands = [self.moved(builder, values, r) if isinstance(r, str) else r for r in maker.inputs]
            return builder(maker.op, *operands, **dict(maker.attrs))
        return builder(self.node.op, values[name], **{**dict(self.node.attrs), "dim": axis})
