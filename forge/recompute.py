"""Compute a value again where it is read, when that moves fewer bytes than storing it and reading it back.

Works on finished groups. A candidate is a stored value that pointwise work makes from other stored values: in
every group that reads it, its chain of nodes is repeated under new names, with the placements that the loads
would have had. What nobody reads afterwards is dropped. A step is kept when the bytes that all groups move
together become fewer; the largest values are tried first, until nothing helps.

Bits stay: the same operators round to the same types in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from esper_ir.diagnostics import Rejected
from esper_ir.graph import Graph, Node
from esper_ir.opdef import Movement, Pointwise
from esper_ir.registry import OPS
from esper_ir.scalar import Cast, Expr, Prim
from forge.groups import Group, Placement, aligned, lowering_kind
from forge.partition import Partition, Refusal
from forge.passes.clean import eliminate_dead
from forge.target import Target
from forge.templates.choice import SLOW
from forge.views import ONE, permutation, views

LONGEST = 32  # nodes of a chain
WORTH = 0.01  # of all bytes moved, and at least LEAST
LEAST = 1 << 16
FEW = 8  # nodes of a group that is not worth a launch


def recompute(parts: Partition, target: Target, sizes: Mapping[str, int]) -> Partition:
    """The partition with values computed again where that pays; refusals say what was tried in vain."""
    refused: dict[str, Refusal] = {}
    while True:
        before = moved_bytes(parts, sizes)
        better = _first_better(parts, target, sizes, before, refused)
        if better is None:
            return replace(parts, refusals=[*parts.refusals, *refused.values()])
        parts = better


def _first_better(
    parts: Partition, target: Target, sizes: Mapping[str, int], before: int, refused: dict[str, Refusal]
) -> Partition | None:
    stored = _stored(parts)
    for value, group in sorted(_candidates(parts), key=lambda v: -_bytes(parts.graph, v[0], sizes)):
        small = _bytes(parts.graph, value, sizes) < LEAST
        if small and (value in refused or not _vanishes(group, value, stored)):
            continue
        made = _Rewrite(parts, value, target, stored).made()
        if isinstance(made, Rejected) and target.kind == "cpu" and not small:
            made = _Rewrite(parts, value, target, stored, narrow=True).made()
        if isinstance(made, Rejected):
            refused[value] = Refusal(value, "recompute", made)
            continue
        spared = before - moved_bytes(made, sizes)
        fewer = len(made.groups) < len(parts.groups) and spared > -LEAST
        if (small and fewer) or (not small and spared > 0 and spared >= max(LEAST, WORTH * before)):
            refused.pop(value, None)
            return made
        why = Rejected("bytes", f"computing it again spares {spared} bytes")
        refused[value] = Refusal(value, "recompute", why)
    return None


def _vanishes(group: Group, value: str, stored: set[str]) -> bool:
    """The group makes this value alone, with little work: a launch less where its readers make it."""
    return group.values() & stored == {value} and len(group.nodes) <= FEW


def _candidates(parts: Partition) -> Iterator[tuple[str, Group]]:
    """Pointwise values of one group that another reads."""
    by_output, readers = parts.graph.by_output, _readers(parts)
    for at, group in enumerate(parts.groups):
        for value in sorted(v for v in group.values() if readers.get(v, set()) - {at}):
            if lowering_kind(by_output[value]) == "pointwise" and value not in group.columns:
                yield value, group


def _readers(parts: Partition) -> dict[str, set[int]]:
    """For values with memory, the numbers of the groups that read them."""
    out: dict[str, set[int]] = {}
    for at, group in enumerate(parts.groups):
        for base in _reads(parts, group):
            out.setdefault(base, set()).add(at)
    return out


def _reads(parts: Partition, group: Group) -> set[str]:
    return {parts.views[v].base for n in group.nodes for v in n.tensors}


def _stored(parts: Partition) -> set[str]:
    """Values of groups that outputs or other groups read."""
    outputs, readers = {parts.views[o].base for o in parts.graph.outputs}, _readers(parts)
    return outputs | {
        v for at, g in enumerate(parts.groups) for v in g.values() if readers.get(v, set()) - {at}
    }


def _bytes(graph: Graph, value: str, sizes: Mapping[str, int]) -> int:
    kind = graph.types[value]
    return kind.numel.value(sizes) * kind.dtype.itemsize


def moved_bytes(parts: Partition, sizes: Mapping[str, int]) -> int:
    """Bytes that the groups read and write, each value once a group."""
    total = 0
    free = {n.id for n in parts.graph if lowering_kind(n) == "creation"}
    stored = _stored(parts)
    for group in parts.groups:
        own = group.values()
        moved = (_reads(parts, group) - own - free) | (own & stored)
        total += sum(_bytes(parts.graph, v, sizes) for v in moved)
    return total


@dataclass
class _Rewrite:
    """One value computed again in every group that reads it. `narrow`: from what its own group makes on the
    way to it and a narrower type holds, which is then stored in its place.
    """

    parts: Partition
    value: str
    target: Target
    stored: set[str]
    narrow: bool = False
    renamed: dict[int, dict[str, str]] = field(default_factory=dict)
    clones: dict[int, list[Node]] = field(default_factory=dict)
    placements: dict[int, dict[str, Placement]] = field(default_factory=dict)

    def made(self) -> Partition | Rejected:
        """The new partition, or why not."""
        readers = [
            at for at, g in enumerate(self.parts.groups)
            if self.value not in g.values() and any(self._reads(n) for n in g.nodes)
        ]  # fmt: skip
        for at in readers:
            why = self._into(at)
            if why is not None:
                return why
        return self._assembled()

    def _reads(self, node: Node) -> bool:
        return any(self.parts.views[v].base == self.value for v in node.tensors)

    # One group -------------------------------------------------------------------------------------

    def _into(self, at: int) -> Rejected | None:
        group = self.parts.groups[at]
        if self.parts.closed(group) or any(n.id in self.parts.alone for n in group.nodes):
            return Rejected("closed", f"{group.name} is a library call, or stands alone")
        chain: dict[str, Node] = {}
        places: dict[str, Placement] = {}
        for user in group.nodes:
            roots = [v for v in user.tensors if self.parts.views[v].base == self.value]
            if roots and (user is group.contraction or lowering_kind(user) not in ("pointwise", "reduction")):
                return Rejected("operand", f"{user.id} reads it as stored")
            for root in roots:
                placement = self._placement(group, user, root)
                why = self._follow(root, placement, chain, places)
                if why is not None:
                    return why
        order = {n.id: i for i, n in enumerate(self.parts.graph)}
        nodes = sorted(chain.values(), key=lambda n: order[n.id])
        names = {n.id: self._name(n.id) for n in nodes}
        self.renamed[at] = names
        self.clones[at] = [_renamed(n, names) for n in nodes]
        self.placements[at] = {names[v]: p for v, p in places.items()}
        return None

    def _name(self, base: str) -> str:
        taken = {*self.parts.graph.types, *(v for names in self.renamed.values() for v in names.values())}
        n = 1 + len(self.renamed)
        while f"{base}~{n}" in taken:
            n += 1
        return f"{base}~{n}"

    def _placement(self, group: Group, user: Node, operand: str) -> Placement:
        """Where the operand's axes lie in the group: as its load would have it."""
        shape = self.parts.graph.types[operand].shape
        if lowering_kind(user) == "reduction":
            lead = len(group.space) - len(shape)
            return tuple(None if size == ONE else lead + axis for axis, size in enumerate(shape))
        return aligned(group.placements[user.id], shape)

    def _follow(
        self, name: str, placement: Placement, chain: dict[str, Node], places: dict[str, Placement]
    ) -> Rejected | None:
        """Add the node of a value and of everything under it that is not in memory anyway."""
        if name in places:
            return None if places[name] == placement else Rejected("placement", f"{name} lies in two ways")
        node = self.parts.graph.by_output[name]
        if len(node.outputs) > 1 or len(chain) >= LONGEST:
            return Rejected("chain", f"{node.id} has several results, or the chain is too long")
        if lowering_kind(node) == "pointwise" and self.target.kind == "cpu" and _slow(node):
            return Rejected("slow", f"{node.op} costs more than the bytes it spares")
        chain[name], places[name] = node, placement
        for operand in node.tensors:
            if self._in_memory(operand):
                continue
            below = self._below(node, operand, placement)
            if isinstance(below, Rejected):
                return below
            why = self._follow(operand, below, chain, places)
            if why is not None:
                return why
        return None

    def _in_memory(self, name: str) -> bool:
        """An input, a number, or what is stored whether or not this value is."""
        base = self.parts.views[name].base
        maker = self.parts.graph.by_output.get(base)
        if maker is None or lowering_kind(maker) not in ("pointwise", "movement"):
            return True
        return base != self.value and (base in self.stored or (self.narrow and self._narrower(base)))

    def _narrower(self, name: str) -> bool:
        types = self.parts.graph.types
        own, other = types[self.value], types[name]
        return other.shape == own.shape and other.dtype.itemsize < own.dtype.itemsize

    def _below(self, node: Node, operand: str, placement: Placement) -> Placement | Rejected:
        shape = self.parts.graph.types[operand].shape
        low = OPS[node.op].lowering
        if isinstance(low, Pointwise):
            return aligned(placement, shape)
        assert isinstance(low, Movement)
        if low.kind == "permute":
            order = permutation(node, len(shape))
            return tuple(placement[order.index(axis)] for axis in range(len(shape)))
        if low.kind == "expand":
            return aligned(placement, shape)
        made = node.types[0].shape
        if low.kind != "reshape" or [s for s in shape if s != ONE] != [s for s in made if s != ONE]:
            return Rejected("view", f"{node.id} moves data in a way that cannot be followed backwards")
        kept = iter([a for a, size in zip(placement, made, strict=True) if size != ONE])
        return tuple(None if size == ONE else next(kept) for size in shape)

    # The whole -------------------------------------------------------------------------------------

    def _assembled(self) -> Partition:
        old = self.parts
        owner = {id(n): at for at, g in enumerate(old.groups) for n in g.nodes}
        nodes: list[Node] = []
        fresh: dict[int, list[Node]] = {at: [] for at in range(len(old.groups))}
        waiting = dict(self.clones)
        for node in old.graph:
            at = owner.get(id(node), -1)
            if at in waiting and self._reads(node):
                nodes += waiting[at]
                fresh[at] += waiting.pop(at)
            made = _reading(node, self.renamed.get(at, {}))
            nodes.append(made)
            if at >= 0:
                fresh[at].append(made)
        graph = eliminate_dead(replace(old.graph, nodes=tuple(nodes)))
        alive = {n.id for n in graph}
        groups = [self._group(at, [n for n in fresh[at] if n.id in alive]) for at in range(len(old.groups))]
        kept = [g for g in groups if g.nodes]
        return Partition(graph, dict(views(graph)), kept, set(old.externs), list(old.refusals), old.alone)

    def _group(self, at: int, nodes: list[Node]) -> Group:
        old = self.parts.groups[at]
        first = [n for n in nodes if old.contraction is not None and n.id == old.contraction.id]
        alive = {n.id for n in nodes}
        return Group(
            old.space,
            [*first, *(n for n in nodes if n not in first)],
            {**old.placements, **self.placements.get(at, {})},
            old.split,
            first[0] if first else None,
            old.columns & alive,
            old.finishers & alive,
            scan=old.scan,
        )


def _renamed(node: Node, names: Mapping[str, str]) -> Node:
    return replace(_reading(node, names), id=names[node.id])


def _reading(node: Node, names: Mapping[str, str]) -> Node:
    """The node with operands under their new names."""
    if not any(r in names for r in node.inputs if isinstance(r, str)):
        return node
    return replace(node, inputs=tuple(names.get(r, r) if isinstance(r, str) else r for r in node.inputs))


def _slow(node: Node) -> bool:
    low = OPS[node.op].lowering
    assert isinstance(low, Pointwise)
    return _names(low.body(dict(node.attrs))) & SLOW != set()


def _names(expr: Expr) -> set[str]:
    if isinstance(expr, Prim):
        return {expr.name}.union(*(_names(a) for a in expr.args))
    return _names(expr.arg) if isinstance(expr, Cast) else set()
