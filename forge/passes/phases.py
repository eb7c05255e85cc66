"""Split a joint graph into what runs when: forward (with saved values), inference, and one backward per wanted set."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from esper_ir.grad import Joint
from esper_ir.graph import Graph, Node
from forge.groups import lowering_kind
from forge.passes.clean import eliminate_dead, merge_equal
from forge.passes.save import depends_on, saved_values
from forge.views import views


@dataclass(frozen=True)
class Phase:
    """`graph.outputs` are, in order: results then saved (forward), results (inference), gradients (backward).

    `gradients` maps each wanted name to its value; two names may share one. `saved` names the forward's values.
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
    graph, results = _owned(forward, forward.outputs, frozenset())
    inference = eliminate_dead(replace(graph, outputs=tuple(dict.fromkeys(results))))
    plain = Phase("inference", inference, results)
    if joint is None:
        return replace(plain, name="forward"), plain
    late = depends_on(joint.graph, frozenset(joint.cotangents.values()))
    early = tuple(n for n in joint.graph if n.id not in late)
    both = Graph(forward.inputs, early, joint.graph.outputs[: len(forward.outputs)], forward.dims)
    graph, results = _owned(both, both.outputs, frozenset())
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
    graph, owned = _owned(graph, graph.outputs, frozenset(cotangents))
    graph = eliminate_dead(replace(graph, outputs=tuple(dict.fromkeys(owned))))
    return Phase("backward", graph, saved=saved, wanted=names, gradients=dict(zip(names, owned, strict=True)))


def choose_saved(joint: Joint, sizes: Mapping[str, int]) -> tuple[str, ...]:
    return saved_values(joint.graph, frozenset(joint.cotangents.values()), sizes)


def _owned(graph: Graph, outputs: tuple[str, ...], shared: frozenset[str]) -> tuple[Graph, tuple[str, ...]]:
    """Give every output memory of its own: a view, a leaf or a number is copied, unless the leaf is in `shared`.
    What a contraction or a reduction reads gets memory too.
    """
    known, made = views(graph), graph.by_output
    nodes: list[Node] = []
    out: dict[str, str] = {}

    def copy(name: str) -> str:
        kind = graph.types[name]
        if name not in out:
            out[name] = f"{name}:copy"
            nodes.append(Node(out[name], "cast", (name,), (("dtype", kind.dtype),), (kind,)))
        return out[name]

    def numbers(name: str) -> bool:
        base = made.get(known[name].base)
        return base is not None and lowering_kind(base) == "creation"

    for node in graph:
        solid = lowering_kind(node) in ("contraction", "reduction")
        inputs = tuple(copy(r) if isinstance(r, str) and solid and numbers(r) else r for r in node.inputs)
        nodes.append(replace(node, inputs=inputs))
    owned = {o: o for o in outputs if o in shared or (o in made and known[o].base == o and not numbers(o))}
    names = tuple(owned.get(o) or copy(o) for o in outputs)
    return replace(graph, nodes=tuple(nodes)), names
