"""Windows move to the leaves: element-by-element work that only windows read is done for what each window
reads, so that its result never lies in memory.

f(c, b) at moved positions is f of c and b at moved positions; where a window has no element, its number is
put in afterwards. Pays where the work is cheap and reads few tensors: a window of 3 by 3 does it nine times.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from esper_ir.graph import Graph, Node
from esper_ir.graphbuilder import GraphBuilder, replay
from esper_ir.opdef import Creation, Operand, Pointwise, Val
from esper_ir.registry import OPS
from esper_ir.scalar import Prim, walk
from esper_ir.types import Dim, DType
from forge.passes.clean import eliminate_dead
from forge.views import movement

ONE = Dim.of(1)
CHEAP = frozenset(
    "neg abs add sub mul div maximum minimum eq ne lt le gt ge and or xor not where isnan sign".split()
)
STEPS = 6  # operators between the window and the leaves
LEAVES = 2  # of the size of the result

Steps = tuple[tuple[tuple[str, Any], ...], ...]
"""Attributes of a chain of windows, the first one applied first."""


def windows_to_leaves(graph: Graph) -> Graph:
    """The graph in which no window reads cheap element-by-element work that nothing else reads."""
    movable = _movable(graph)
    if not any(movement(n) == "window" and n.tensors[0] in movable for n in graph):
        return graph
    return eliminate_dead(_Pusher(graph, movable).pushed())


def _movable(graph: Graph) -> frozenset[str]:
    """Cheap work that only windows, or movable work, reads."""
    readers: dict[str, list[Node]] = {}
    for node in graph:
        for value in node.tensors:
            readers.setdefault(value, []).append(node)
    out: set[str] = set()
    for node in reversed(graph.nodes):
        users = readers.get(node.id, [])
        alone = bool(users) and all(movement(u) == "window" or u.id in out for u in users)
        if alone and node.id not in graph.outputs and is_cheap(node):
            out.add(node.id)
    return frozenset(v for v in out if _small(v, graph.by_output, out, graph))


def is_cheap(node: Node) -> bool:
    low = OPS[node.op].lowering
    if not isinstance(low, Pointwise) or len(node.outputs) > 1:
        return False
    return {e.name for e in walk(low.body(dict(node.attrs))) if isinstance(e, Prim)} <= CHEAP


def _small(value: str, made: Mapping[str, Node], movable: set[str], graph: Graph) -> bool:
    """Few operators, and few leaves of the size of the result."""
    seen, leaves, stack = set[str](), set[str](), [value]
    while stack:
        name = stack.pop()
        if name in seen:
            continue
        if name in movable:
            seen.add(name)
            stack += made[name].tensors
        elif _is_number(name, graph):
            return False
        elif len(graph.types[name].shape) == len(graph.types[value].shape):
            leaves.add(name)
    return len(seen) <= STEPS and len(leaves) <= LEAVES


def _is_number(name: str, graph: Graph) -> bool:
    """Positions, or one number for many elements: of these there are no windows in memory."""
    maker = graph.by_output.get(name)
    while maker is not None and movement(maker):
        maker = graph.by_output.get(maker.tensors[0])
    if maker is None or not isinstance(OPS[maker.op].lowering, Creation):
        return False
    return any(size != ONE for size in graph.types[name].shape)


@dataclass
class _Pusher:
    graph: Graph
    movable: frozenset[str]
    builder: GraphBuilder = field(init=False)
    values: dict[str, Val] = field(init=False)

    def __post_init__(self) -> None:
        self.builder, self.values = replay(self.graph)
        self.made = self.graph.by_output

    def pushed(self) -> Graph:
        for node in self.graph.nodes:
            root, steps = self._chain(node)
            if steps and root in self.movable:
                self.builder.scope = node.id
                self.values[node.id] = self._filled(root, steps, node)
                self.builder.scope = ""
                continue
            operands = [self.values[r] if isinstance(r, str) else r for r in node.inputs]
            made = self.builder.emit_named(node.id, node.op, operands, dict(node.attrs))
            self.values.update(zip(node.outputs, made, strict=True))
        return self.builder.graph({name: self.values[name] for name in self.graph.outputs})

    def _chain(self, node: Node) -> tuple[str, Steps]:
        """What a chain of windows reads, and their attributes: one window an axis, so that the positions of
        each are those of the last."""
        name, steps = node.id, list[tuple[tuple[str, Any], ...]]()
        while name in self.made and movement(self.made[name]) == "window":
            attrs = self.made[name].attrs
            if any(dict(attrs)["dim"] == dict(step)["dim"] for step in steps):
                break
            steps.insert(0, tuple(attrs))
            name = self.made[name].tensors[0]
        return name, tuple(steps)

    def _filled(self, root: str, steps: Steps, node: Node) -> Val:
        """The work at moved positions, and the windows' number outside."""
        emit, kind = self.builder, node.types[0]
        value = self._moved(root, steps, len(kind.shape))
        inside: Val | None = None
        sizes = self._sizes(root, steps)
        for step, size in zip(steps, sizes, strict=True):
            for mask in self._within(dict(step), size, len(kind.shape)):
                inside = mask if inside is None else emit("logical_and", inside, mask)
        if value.type.shape != kind.shape:  # one position read by all
            value = emit("expand", value, shape=kind.shape)
        if inside is None:
            return value
        if dict(steps[0])["outside"] == "zero" or not kind.dtype.is_floating:
            return emit("where", inside, value, 0.0 if kind.dtype.is_floating else 0)
        # No attribute may be infinite: the least number is a logarithm.
        least = emit("log", emit("full", shape=(), value=0.0, dtype=kind.dtype))
        return emit("where", inside, value, least)

    def _sizes(self, root: str, steps: Steps) -> list[Dim]:
        shape, out = list(self.graph.types[root].shape), []
        for step in map(dict, steps):
            out.append(shape[step["dim"]])
            shape[step["dim"]] = step["size"]
        return out

    def _within(self, step: dict[str, Any], size: Dim, rank: int) -> list[Val]:
        """Where a window has an element; nothing where it always has."""
        emit, count = self.builder, step["size"]
        shape = tuple(count if i == step["dim"] else ONE for i in range(rank))
        number = emit("reshape", emit("arange", end=count, dtype=DType.int32), shape=shape)
        place = number if step["mul"] == 1 else emit("mul", number, step["mul"])
        place = emit("add", place, step["add"]) if step["add"] else place
        out: list[Val] = []
        if step["add"] < 0:
            out.append(emit("ge", place, 0))
        least = size * step["div"] - (count - 1) * step["mul"] - step["add"]
        if least.static is None or least.static <= 0:
            bound: Operand = emit("full", shape=(), value=size * step["div"], dtype=DType.int32)
            out.append(emit("lt", place, bound))
        return out

    def _moved(self, name: str, steps: Steps, rank: int) -> Val:
        """A value at moved positions; an operand that is the same along their axes stays."""
        shape = self.graph.types[name].shape
        lead = rank - len(shape)
        own = [s for s in map(dict, steps) if s["dim"] >= lead and shape[s["dim"] - lead] != ONE]
        if not own and name not in self.movable:
            return self.values[name]
        if name in self.movable:
            node = self.made[name]
            operands = [self._moved(r, steps, rank) if isinstance(r, str) else r for r in node.inputs]
            return self.builder(node.op, *operands, **dict(node.attrs))
        value = self.values[name]
        for step in own:
            value = self.builder("window", value, **{**step, "dim": step["dim"] - lead, "outside": "zero"})
        return value
