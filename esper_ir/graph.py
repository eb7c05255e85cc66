"""Blueprint (what the text says) and Graph (the same, typed and in order). The door to networkx."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from esper_ir.opdef import Number
from esper_ir.types import DimSpec, DType, TensorType

if TYPE_CHECKING:
    import networkx

Ref = str | Number
"""An operand in a node: the name of a value ("x", "node", "node.1") or a Python number."""


def value_name(node_id: str, output: int = 0) -> str:
    """Name of output number `output` of a node."""
    return node_id if output == 0 else f"{node_id}.{output}"


@dataclass(frozen=True)
class Node:
    """One operation. `attrs` is sorted by name, values hashable; `types` are the output types.

    In a Blueprint attributes stand as in the text (numbers, strings, tuples) and `types` is empty; in a Graph
    they are resolved (defaults filled, DType and Dim values, axes counted from the front).
    """

    id: str
    op: str
    inputs: tuple[Ref, ...]
    attrs: tuple[tuple[str, Any], ...] = ()
    types: tuple[TensorType, ...] = ()

    def attr(self, name: str) -> Any:
        return dict(self.attrs)[name]

    # Asked for hundreds of thousands of times while a block is compiled.
    @cached_property
    def outputs(self) -> tuple[str, ...]:
        return tuple(value_name(self.id, i) for i in range(len(self.types)))

    @cached_property
    def tensors(self) -> tuple[str, ...]:
        """The operands that are values, in order."""
        return tuple(r for r in self.inputs if isinstance(r, str))


@dataclass(frozen=True)
class Leaf:
    """A named tensor from outside. `kind`: input, param, buffer, constant.

    `compute` (params): the dtype in which the graph sees it when it differs from the stored one; the cast is
    part of the meaning. `init` (params, buffers): {"kind": "normal", "std": 0.02}, "zeros", "ones",
    "uniform", ... `data` (constants): nested lists, or {"sha256": ..., "file": ...}.
    """

    name: str
    kind: str
    type: TensorType
    init: Mapping[str, Any] | None = None
    compute: DType | None = None
    data: Any = None


@dataclass(frozen=True)
class Blueprint:
    """The text form as data. `nodes` in any order; order of leaves, outputs, `differentiable` is meaning.

    `values`: tensors by leaf name that an importer found. They are in no text and no hash; the eager twin
    starts from them, and `esper_ir.importers.torch_values.save` writes them to a file.

    How a block is called, which no id but the interface's covers: `updates`, buffer -> the output that is its
    value after a training step (the last outputs, which callers do not see); `random`, inputs that callers do
    not give: whole numbers drawn anew for every call.
    """

    name: str
    leaves: tuple[Leaf, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[str, ...]
    dims: Mapping[str, DimSpec] = field(default_factory=dict)
    differentiable: tuple[str, ...] | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    updates: Mapping[str, str] = field(default_factory=dict)
    random: tuple[str, ...] = ()

    def leaf(self, name: str) -> Leaf | None:
        return next((v for v in self.leaves if v.name == name), None)

    def of_kind(self, kind: str) -> tuple[Leaf, ...]:
        return tuple(v for v in self.leaves if v.kind == kind)

    @cached_property
    def graph(self) -> networkx.MultiDiGraph:
        """networkx view: a vertex per leaf and node, an edge per tensor operand keyed by its position."""
        import networkx

        out = networkx.MultiDiGraph()
        for leaf in self.leaves:
            out.add_node(leaf.name, leaf=leaf)
        for node in self.nodes:
            out.add_node(node.id, node=node)
        for node in self.nodes:
            for position, ref in enumerate(node.inputs):
                if isinstance(ref, str):
                    out.add_edge(producer(ref, out), node.id, key=position, value=ref)
        return out


def producer(ref: str, names: Any) -> str:
    """The leaf or node that a reference means: "id.1" is of node "id" unless something is called "id.1"."""
    if ref in names:
        return ref
    head, _, tail = ref.rpartition(".")
    return head if head and tail.isdigit() else ref


@dataclass(frozen=True)
class Graph:
    """A typed graph in topological order: what gradients and the forge work on.

    `inputs` maps every leaf (and, in a joint graph, every cotangent) to its type, in order.
    """

    inputs: Mapping[str, TensorType]
    nodes: tuple[Node, ...]
    outputs: tuple[str, ...]
    dims: Mapping[str, DimSpec] = field(default_factory=dict)

    @cached_property
    def types(self) -> Mapping[str, TensorType]:
        """Type of every value by name."""
        out = dict(self.inputs)
        for node in self.nodes:
            out.update(zip(node.outputs, node.types, strict=True))
        return out

    @cached_property
    def by_output(self) -> Mapping[str, Node]:
        """The node that makes each value."""
        return {name: node for node in self.nodes for name in node.outputs}

    @cached_property
    def users(self) -> Mapping[str, tuple[Node, ...]]:
        """The nodes that read each value."""
        out: dict[str, list[Node]] = {}
        for node in self.nodes:
            for name in dict.fromkeys(node.tensors):
                out.setdefault(name, []).append(node)
        return {name: tuple(nodes) for name, nodes in out.items()}

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes)
