"""Choose groups: every node of a phase graph lands in one fusion group, one extern step, or is a free view.

Greedy in topological order: a node joins the latest group it can, preferring groups that make its operands,
then groups that read the same values. Every refusal is kept for `explain`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from esper_ir.diagnostics import Accepted, EsperError, Rejected
from esper_ir.graph import Graph, Node
from esper_ir.opdef import Opaque
from esper_ir.registry import OPS
from forge.fuse import Fuser
from forge.groups import Group, Matcher, everywhere, lowering_kind
from forge.target import Target
from forge.templates.choice import own_lookup, own_lookup_gradient, own_matmul
from forge.views import View, views


@dataclass(frozen=True)
class Refusal:
    """`node` could not join `group` (or a template did not take it), and why."""

    node: str
    group: str
    why: Rejected


@dataclass
class Partition:
    """Groups in an order in which they can run; `externs` are nodes that become library calls."""

    graph: Graph
    views: dict[str, View]
    groups: list[Group] = field(default_factory=list)
    externs: set[str] = field(default_factory=set)
    refusals: list[Refusal] = field(default_factory=list)
    alone: frozenset[str] = frozenset()
    own: frozenset[str] = frozenset()
    library: frozenset[str] = frozenset()

    def closed(self, group: Group) -> bool:
        """Nothing joins a library call, a template of its own, or a node that has to stand alone."""
        name = group.nodes[0].id if group.nodes else ""
        core = group.contraction
        if core is not None and (core.id in self.externs or lowering_kind(core) == "opaque"):
            return True
        return name in self.alone

    @property
    def single(self) -> set[str]:
        """Nodes that are a group of their own for good."""
        return {g.nodes[0].id for g in self.groups if g.nodes and self.closed(g)}


def partition(
    graph: Graph, target: Target, alone: frozenset[str] = frozenset(), own: frozenset[str] = frozenset(),
    library: frozenset[str] = frozenset(),
) -> Partition:  # fmt: skip
    """Groups of one phase graph for one target; the nodes `alone` get a group each, the products `own` are
    kernels of ours, those of the `library` are not."""
    out = Partition(graph, dict(views(graph)), alone=alone, own=own, library=library)
    matcher = Matcher(graph)
    owner: dict[str, Group] = {}
    for node in graph:
        kind = lowering_kind(node)
        if kind == "creation" or (kind == "movement" and _moves_freely(node, matcher, out, owner)):
            continue
        group = _home(node, matcher, out, owner, target) or _start(node, matcher, out, target)
        for name in node.outputs:
            owner[name] = group
    out.groups = Fuser(matcher, out.views, out.single | alone).fuse(out.groups)
    out.groups = ordered(out.groups, out.views)
    return out


def gathered(parts: Partition) -> Partition:
    """The partition with little groups put together, after everything else has been chosen."""
    fuser = Fuser(Matcher(parts.graph), parts.views, parts.single | parts.alone)
    return replace(parts, groups=ordered(fuser.gather(parts.groups), parts.views))


def _moves_freely(node: Node, matcher: Matcher, out: Partition, owner: dict[str, Group]) -> bool:
    """A movement costs nothing when the group that makes its operand can follow it (a value of that group
    then), or when it is a view of memory that exists anyway (users read the stored value through the view).
    """
    is_view = out.views[node.id].base != node.id
    made = owner.get(node.tensors[0])
    if made is None:
        return is_view
    placement = matcher.place(made, node)
    if isinstance(placement, Rejected):
        out.refusals.append(Refusal(node.id, made.name, placement))
    else:
        matcher.join(made, node, placement)
    if is_view or not isinstance(placement, Rejected):
        owner[node.id] = made
        return True
    return False


def _home(
    node: Node, matcher: Matcher, out: Partition, owner: dict[str, Group], target: Target
) -> Group | None:
    kind = lowering_kind(node)
    if node.id in out.alone or kind not in ("pointwise", "reduction", "movement", "scan", "lookup"):
        return None
    if kind == "lookup" and isinstance(own_lookup(node, out.views, target), Rejected):
        return None
    for group in _candidates(node, out, owner):
        placement = matcher.place(group, node)
        if isinstance(placement, Rejected):
            out.refusals.append(Refusal(node.id, group.name, placement))
            continue
        if matcher.reaches(group, node, owner):
            out.refusals.append(
                Refusal(node.id, group.name, Rejected("cycle", "an operand needs the group's result"))
            )
            continue
        matcher.join(group, node, placement)
        return group
    return None


def _candidates(node: Node, out: Partition, owner: dict[str, Group]) -> list[Group]:
    """Groups that make an operand, latest first, then groups that read one of the operands."""
    open_groups = [g for g in reversed(out.groups) if not out.closed(g)]
    operands = {out.views[v].base for v in node.tensors} | set(node.tensors)
    making = [g for g in open_groups if any(owner.get(v) is g for v in operands)]
    reading = [
        g for g in open_groups if g not in making and any(v in operands for n in g.nodes for v in n.tensors)
    ]
    return making + reading


def _start(node: Node, matcher: Matcher, out: Partition, target: Target) -> Group:
    kind = lowering_kind(node)
    low = OPS[node.op].lowering
    if kind not in ("pointwise", "reduction", "movement", "contraction", "opaque", "scan", "lookup"):
        raise EsperError("E0530", f"no template lowers {node.op}", node=node.id)
    group = matcher.start(node)
    out.groups.append(group)
    if isinstance(low, Opaque) and kind != "scan":
        chosen = _template(node, out, target)
        if isinstance(chosen, Rejected):
            _library_call(group, node, out, chosen)
            return group
        if kind == "opaque":
            group.contraction = node
            group.nodes.append(node)
            group.placements[node.id] = everywhere(group.space)
            return group
    if kind == "contraction":
        group.contraction = node
        group.nodes.append(node)
        group.placements[node.id] = everywhere(group.space)
        chosen = own_matmul(node, matcher.graph, out.views, target)
        if node.id in out.library and not isinstance(chosen, Rejected):
            chosen = Rejected("measured", "the library call was measured to be faster")
        if isinstance(chosen, Rejected) and node.id not in out.own:
            out.externs.add(node.id)
            out.refusals.append(Refusal(node.id, "matmul", chosen))
        return group
    placement = matcher.place(group, node)
    if isinstance(placement, Rejected) and kind in ("scan", "lookup"):
        _library_call(group, node, out, placement)
        return group
    if isinstance(placement, Rejected):
        _single(group, node, matcher, placement)
        return group
    matcher.join(group, node, placement)
    return group


def _template(node: Node, out: Partition, target: Target) -> Accepted[str] | Rejected:
    """What lowers an operator that is no loop of its own."""
    if lowering_kind(node) == "lookup":
        return own_lookup(node, out.views, target)
    if node.op == "embedding_grad":
        return own_lookup_gradient(node, target)
    return Rejected("extern", f"{node.op} has no template, a library call")


def _library_call(group: Group, node: Node, out: Partition, why: Rejected) -> None:
    group.contraction = node
    group.nodes.append(node)
    group.placements[node.id] = everywhere(group.space)
    out.externs.add(node.id)
    out.refusals.append(Refusal(node.id, node.op, why))


def _single(group: Group, node: Node, matcher: Matcher, why: Rejected) -> None:
    """A movement that needs a copy, or a reduction over axes that are neither leading nor trailing."""
    if why.code == "combine":
        raise EsperError("E0530", f"no template lowers {node.op}: {why.reason}", node=node.id)
    if lowering_kind(node) == "reduction":
        raise EsperError(
            "E0531", f"{node.op} over axes {node.attr('dims')} is not supported yet ({why.reason})",
            node=node.id,
            hint="permute the operand so that the reduced axes are the last ones",
        )  # fmt: skip
    group.nodes.append(node)
    group.placements[node.id] = everywhere(group.space)


def ordered(groups: list[Group], known: dict[str, View]) -> list[Group]:
    """Topological order of groups (the graph of groups is acyclic by construction)."""
    owner = {v: g for g in groups for v in g.values()}
    done: list[Group] = []
    placed: set[int] = set()

    def visit(group: Group) -> None:
        if id(group) in placed:
            return
        placed.add(id(group))
        for value in (v for n in group.nodes for v in n.tensors):
            maker = owner.get(value) or owner.get(known[value].base)
            if maker is not None and maker is not group:
                visit(maker)
        done.append(group)

    for group in groups:
        visit(group)
    return done
