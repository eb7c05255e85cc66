"""Split a joint graph into what runs when: forward (with saved values), inference, and one backward per
wanted set.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, replace

from esper_ir.grad import Joint
from esper_ir.graph import Graph, Node
from esper_ir.types import TensorType
from forge.groups import lowering_kind
from forge.passes.clean import eliminate_dead, merge_equal
from forge.passes.save import depends_on, saved_values
from forge.target import Target
from forge.views import View, is_dense, movement, views


@dataclass(frozen=True)
class Phase:
    """`graph.outputs` are, in order: results then saved (forward), results (inference), gradients (backward).

    `gradients` maps each wanted name to its value; two names may share one. `saved` names the forward's
    values.
    """

    name: str
    graph: Graph
    results: tuple[str, ...] = ()
    saved: tuple[str, ...] = ()
    wanted: tuple[str, ...] = ()
    gradients: Mapping[str, str] | None = None


def forward_phases(forward: Graph, joint: Joint | None, saved: tuple[str, ...]) -> tuple[Phase, Phase]:
    """The plan that saves and the plan that does not.

    The first is cut from the joint graph: what the backward keeps may be a value that only it needs.
    """
    graph, results = _owned(forward, forward.outputs, frozenset(), True)
    inference = eliminate_dead(replace(graph, outputs=tuple(dict.fromkeys(results))))
    plain = Phase("inference", inference, results)
    if joint is None:
        return replace(plain, name="forward"), plain
    late = depends_on(joint.graph, frozenset(joint.cotangents.values()))
    early = tuple(n for n in joint.graph if n.id not in late)
    both = Graph(forward.inputs, early, joint.graph.outputs[: len(forward.outputs)], forward.dims)
    graph, results = _owned(both, both.outputs, frozenset(), True, frozenset(saved))
    inner = tuple(s for s in saved if s not in forward.inputs)
    training = eliminate_dead(replace(graph, outputs=tuple(dict.fromkeys((*results, *inner)))))
    return Phase("forward", training, results, saved), plain


def backward_phase(joint: Joint, saved: tuple[str, ...], wanted: Iterable[str]) -> Phase:
    """The gradients of `wanted`, from the saved values and the cotangents."""
    names = tuple(wanted)
    types = joint.graph.types
    cotangents = tuple(joint.cotangents.values())
    values = [joint.gradients[n] or "" for n in names]
    given = {**{s: types[s] for s in saved}, **{c: types[c] for c in cotangents}}
    nodes = tuple(n for n in joint.graph if not set(n.outputs) & set(given))
    graph = Graph(given, nodes, tuple(values), joint.graph.dims)
    graph = merge_equal(eliminate_dead(graph))
    graph, owned = _owned(graph, graph.outputs, frozenset(cotangents), False)
    graph = eliminate_dead(replace(graph, outputs=tuple(dict.fromkeys(owned))))
    return Phase("backward", graph, saved=saved, wanted=names, gradients=dict(zip(names, owned, strict=True)))


def with_dense_operands(graph: Graph, names: set[str]) -> Graph:
    """The reductions in `names` read dense memory: views are copied before."""
    known = views(graph)
    nodes: list[Node] = []
    for node in graph:
        source = known[node.tensors[0]] if node.id in names and lowering_kind(node) == "reduction" else None
        if source is not None and not is_dense(source):
            kind = graph.types[node.tensors[0]]
            copy = Node(f"{node.id}:dense", "cast", node.tensors[:1], (("dtype", kind.dtype),), (kind,))
            nodes.append(copy)
            node = replace(node, inputs=(copy.id, *node.inputs[1:]))
        nodes.append(node)
    return replace(graph, nodes=tuple(nodes))


def moved_in_place(graph: Graph) -> Graph:
    """The graph in which every movement is a view: what none can be made of is copied first. A copy changes
    what the movements after it are views of.
    """
    while True:
        known = views(graph)
        at = next((i for i, n in enumerate(graph.nodes) if movement(n) and known[n.id].base == n.id), None)
        if at is None:
            return graph
        node = graph.nodes[at]
        kind = graph.types[node.tensors[0]]
        copy = Node(f"{node.id}:whole", "cast", node.tensors[:1], (("dtype", kind.dtype),), (kind,))
        moved = replace(node, inputs=(copy.id, *node.inputs[1:]))
        graph = replace(graph, nodes=(*graph.nodes[:at], copy, moved, *graph.nodes[at + 1 :]))


def _source(graph: Graph, made: Mapping[str, Node], name: str) -> str:
    """What a cast to the same type casts: the result of a library call keeps its memory."""
    node = made.get(name)
    while node is not None and node.op == "cast" and node.types[0] == graph.types[node.tensors[0]]:
        if node.tensors[0] not in made:
            return name
        name, node = node.tensors[0], made.get(node.tensors[0])
    return name


def _spells(view: View, made: Mapping[str, Node], others: Set[str]) -> bool:
    """Nothing but another shape for a computed value that nobody else outside sees: its memory will do."""
    maker = made.get(view.base)
    if maker is None or lowering_kind(maker) in ("movement", "creation") or view.base in others:
        return False
    whole = dict(zip(maker.outputs, maker.types, strict=True))[view.base]
    return is_dense(view) and TensorType(whole.dtype, view.shape).numel == whole.numel


def choose_saved(
    joint: Joint, sizes: Mapping[str, int], target: Target, objective: str, resident: frozenset[str]
) -> tuple[str, ...]:
    """What the forward hands to the backward (forge.passes.save)."""
    cotangents = frozenset(joint.cotangents.values())
    return saved_values(joint.graph, cotangents, sizes, target, objective, resident)


def _owned(
    graph: Graph, outputs: tuple[str, ...], shared: frozenset[str], apart: bool,
    kept: frozenset[str] = frozenset(),
) -> tuple[Graph, tuple[str, ...]]:  # fmt: skip
    """Give memory of its own to every output (a leaf, a number, and a view that is more than another shape
    are copied, unless the leaf is in `shared`), to numbers that a contraction or a reduction reads, and to
    what is reshaped without being a view.

    With `apart` no two outputs share it. Values in `kept` are handed on under their own names.
    """
    known, made = views(graph), graph.by_output
    nodes: list[Node] = []
    out: dict[str, str] = {}

    def copy(name: str, again: int = 0) -> str:
        kind, label = graph.types[name], f"{name}:copy{again or ''}"
        if label not in out:
            nodes.append(Node(label, "cast", (name,), (("dtype", kind.dtype),), (kind,)))
        return out.setdefault(label, label)

    def numbers(name: str) -> bool:
        base = made.get(known[name].base)
        return base is not None and lowering_kind(base) == "creation"

    def solid(node: Node, name: str) -> bool:
        kind = lowering_kind(node)
        return (
            (kind in ("contraction", "reduction", "scan", "lookup", "opaque") and numbers(name))
            or (kind == "contraction" and known[name].windows != ())
            or (kind == "movement" and known[node.id].base == node.id)
        )

    for node in graph:
        inputs = tuple(copy(r) if isinstance(r, str) and solid(node, r) else r for r in node.inputs)
        nodes.append(replace(node, inputs=inputs))
    names: list[str] = []
    sources = [_source(graph, made, o) for o in outputs]
    for at, name in enumerate(sources):
        whole = name in shared or (name in made and lowering_kind(made[name]) not in ("movement", "creation"))
        others = {known[o].base for o in (*sources[:at], *sources[at + 1 :])} | kept
        again = sources[:at].count(name) if apart else 0
        names.append(
            copy(name, again) if again or not (whole or _spells(known[name], made, others)) else name
        )
    return replace(graph, nodes=tuple(nodes)), tuple(names)
