"""GraphBuilder: adds nodes to a typed graph, applies shape rules at once, and never makes the same node
twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from esper_ir.graph import Graph, Node, Ref, value_name
from esper_ir.infer import Inference, exact
from esper_ir.opdef import Operand, Val
from esper_ir.registry import lookup
from esper_ir.types import DimSpec, TensorType


class GraphBuilder:
    """Implements `opdef.Emit`. All operators are pure, so equal operator, operands and attributes give the
    one value.

    `scope` prefixes the names of new nodes ("d:y" gives "d:y:mul"); names are unique within the graph.
    """

    def __init__(self, inputs: Mapping[str, TensorType], dims: Mapping[str, DimSpec] | None = None) -> None:
        self.inputs: dict[str, TensorType] = dict(inputs)
        self.dims: dict[str, DimSpec] = dict(dims or {})
        self.scope = ""
        self._nodes: dict[str, Node] = {}
        self._made: dict[Any, Node] = {}
        self._taken: set[str] = set(self.inputs)
        self._counter: dict[str, int] = {}
        self._infer = Inference(self.dims)

    def value(self, name: str) -> Val:
        """A graph input by name."""
        return Val(name, self.inputs[name])

    def add_input(self, name: str, kind: TensorType) -> Val:
        if name in self._taken:
            raise ValueError(f"name {name!r} is taken")
        self.inputs[name] = kind
        self._taken.add(name)
        return Val(name, kind)

    def reserve(self, names: Iterable[str]) -> None:
        """Keep names free for `emit_named`."""
        self._taken.update(names)

    def fresh(self, base: str) -> str:
        """A name that nothing has yet."""
        stem = f"{self.scope}:{base}" if self.scope else base
        number = self._counter.get(stem, 0)
        while True:
            name = f"{stem}_{number}" if number else stem
            number += 1
            if name not in self._taken:
                self._counter[stem] = number
                self._taken.add(name)
                return name

    def __call__(self, op: str, *operands: Operand, **attrs: Any) -> Val:
        return self.many(op, *operands, **attrs)[0]

    def emit(self, op: str, *operands: Operand, **attrs: Any) -> Val:
        """Same as calling the builder."""
        return self.many(op, *operands, **attrs)[0]

    def many(self, op: str, *operands: Operand, **attrs: Any) -> tuple[Val, ...]:
        """All outputs of a node."""
        return self._add(op, operands, attrs, None)

    def emit_named(
        self, name: str, op: str, operands: Sequence[Operand], attrs: Mapping[str, Any]
    ) -> tuple[Val, ...]:
        """A node called `name`, unless the same node exists already under another name."""
        return self._add(op, operands, attrs, name)

    def _add(
        self, op: str, operands: Sequence[Operand], attrs: Mapping[str, Any], name: str | None
    ) -> tuple[Val, ...]:
        types = [o.type if isinstance(o, Val) else o for o in operands]
        resolved, outputs = self._infer(lookup(op), types, attrs)
        refs: tuple[Ref, ...] = tuple(o.name if isinstance(o, Val) else o for o in operands)
        key = (op, exact(refs), tuple((k, exact(v)) for k, v in resolved))
        node = self._made.get(key)
        if node is None:
            node = Node(name or self.fresh(op), op, refs, resolved, outputs)
            self._made[key] = self._nodes[node.id] = node
            self._taken.update(node.outputs)
        return tuple(Val(n, t) for n, t in zip(node.outputs, node.types, strict=True))

    def graph(self, outputs: Mapping[str, Val] | Sequence[Val]) -> Graph:
        """The nodes that `outputs` need, in the order in which they were added.

        A mapping gives every output its name: the node is renamed, or copied by a cast to its own type when
        its value already serves as an input or as another output.
        """
        named = outputs if isinstance(outputs, Mapping) else {v.name: v for v in outputs}
        final: dict[str, str] = {}
        for name, val in named.items():
            if val.name != name and self._must_copy(name, val, named, final):
                (copy,) = self._add_copy(val)
                final[copy.name] = name
            else:
                final.setdefault(val.name, name)
        return self._finish(final, tuple(named))

    def _must_copy(self, name: str, val: Val, named: Mapping[str, Val], final: Mapping[str, str]) -> bool:
        first = next(n for n, v in named.items() if v.name == val.name)
        kept = val.name in named and named[val.name].name == val.name
        whole = val.name in self._nodes and len(self._nodes[val.name].types) == 1
        return not whole or kept or first != name or val.name in final

    def _add_copy(self, val: Val) -> tuple[Val, ...]:
        node = Node(self.fresh("copy"), "cast", (val.name,), (("dtype", val.type.dtype),), (val.type,))
        self._nodes[node.id] = node
        return (Val(node.id, val.type),)

    def _finish(self, final: Mapping[str, str], outputs: tuple[str, ...]) -> Graph:
        producers = {name: node for node in self._nodes.values() for name in node.outputs}
        live: set[str] = set()
        stack = [producers[name].id for name in final if name in producers]
        while stack:
            node = self._nodes[stack.pop()]
            if node.id not in live:
                live.add(node.id)
                stack += [producers[r].id for r in node.tensors if r in producers]
        clash = set(final.values()) & live - set(final)
        rename: dict[str, str] = {n: self.fresh(n) for n in clash} | dict(final)
        nodes = tuple(_renamed(n, rename.get) for n in self._nodes.values() if n.id in live)
        return Graph(dict(self.inputs), nodes, outputs, dict(self.dims))


def _renamed(node: Node, rename: Callable[[str, str], str]) -> Node:
    name = rename(node.id, node.id) if len(node.types) == 1 else node.id
    inputs = tuple(rename(r, r) if isinstance(r, str) else r for r in node.inputs)
    if name == node.id and inputs == node.inputs:
        return node
    return Node(name, node.op, inputs, node.attrs, node.types)


Change = Callable[[GraphBuilder, Node, dict[str, Val]], Sequence[Val] | None]
"""(builder, node, values so far by name) -> what stands for the node's outputs; None to keep it."""


def rewritten(graph: Graph, change: Change) -> Graph:
    """The graph anew, node by node; names of outputs stay."""
    builder, values = replay(graph)
    for node in graph.nodes:
        made = change(builder, node, values)
        if made is None:
            operands = [values[r] if isinstance(r, str) else r for r in node.inputs]
            made = builder.emit_named(node.id, node.op, operands, dict(node.attrs))
        values.update(zip(node.outputs, made, strict=True))
    return builder.graph({name: values[name] for name in graph.outputs})


def replay(graph: Graph) -> tuple[GraphBuilder, dict[str, Val]]:
    """A builder with the inputs of `graph`, names of its nodes kept free, and its input values by name."""
    builder = GraphBuilder(graph.inputs, graph.dims)
    builder.reserve(value_name(n.id, i) for n in graph.nodes for i in range(len(n.types)))
    return builder, {name: Val(name, kind) for name, kind in graph.inputs.items()}
