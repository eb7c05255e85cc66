"""Split a joint graph into what runs when: forward (with saved values), inference, and one backward per wanted set."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from esper_ir.grad import Joint
from esper_ir.graph import Graph, Node
from forge.passes.clean import eliminate_dead, merge_equal
from forge.passes.save import saved_values
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


def forward_phases(forward: Graph, saved: tuple[str, ...]) -> tuple[Phase, Phase]:
    """The plan that saves and the plan that does not."""
    graph, results = _owned(forward, forward.outputs, frozenset())
    inner = tuple(s for s in saved if s not in forward.inputs)
    training = eliminate_dead(replace(graph, outputs=tuple(dict.fromkeys((*results, *inner)))))
    inference = eliminate_dead(replace(graph, outputs=tuple(dict.fromkeys(results))))
    return Phase("forward", training, results, saved), Phase("inference", inference, results)


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
    """Give every output memory of its own: a view or a leaf is copied, unless the leaf is in `shared`."""
    known = views(graph)
    nodes = list(graph.nodes)
    out: dict[str, str] = {}
    for name in outputs:
        if name in out or name in shared:
            continue
        if known[name].base == name and name not in graph.inputs:
            continue
        kind = graph.types[name]
        copy = Node(f"{name}:copy", "cast", (name,), (("dtype", kind.dtype),), (kind,))
        nodes.append(copy)
        out[name] = copy.id
    return replace(graph, nodes=tuple(nodes)), tuple(out.get(n, n) for n in outputs)
