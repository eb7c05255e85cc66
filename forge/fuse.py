"""Second look at groups: merge pairs that the greedy pass kept apart only because of the order of nodes.

A pair is merged when one reads what the other makes, or both read the same value, every node of both can be
placed in one iteration space, and no third group stands between them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from esper_ir.diagnostics import Rejected
from esper_ir.graph import Node
from esper_ir.types import Dim
from forge.groups import Group, Matcher, Placement, aligned, everywhere, lowering_kind
from forge.templates.choice import tuned_sizes
from forge.views import View

LITTLE = 1 << 16  # elements of a space
Pairs = Callable[[list[Group], list[set[int]]], Iterator[tuple[int, int]]]


class Fuser:
    """Works on the groups of one graph; those of the nodes `closed` never merge."""

    def __init__(self, matcher: Matcher, views: Mapping[str, View], closed: set[str]) -> None:
        self.matcher = matcher
        self.views = views
        self.closed = closed
        self.position = {n.id: i for i, n in enumerate(matcher.graph)}
        self.sizes = tuned_sizes(matcher.graph)
        # Pairs that cannot be placed together, by identity; held, so that no identity comes back.
        self.hopeless: dict[tuple[int, int], tuple[Group, Group]] = {}

    def fuse(self, groups: list[Group]) -> list[Group]:
        """Groups after merging, until nothing changes."""
        return self._merged(groups, self._pairs)

    def gather(self, groups: list[Group]) -> list[Group]:
        """Little groups over one space made one, related or not: each launch costs more than its work."""
        return self._merged(groups, self._little_pairs)

    def _merged(self, groups: list[Group], pairs: Pairs) -> list[Group]:
        merged = self._once(groups, pairs)
        while merged is not None:
            groups, merged = merged, self._once(merged, pairs)
        return groups

    def _once(self, groups: list[Group], pairs: Pairs) -> list[Group] | None:
        edges = self._edges(groups)
        for a, b in pairs(groups, edges):
            made = self._merge(groups, edges, a, b)
            if made is not None:
                return [made if i == a else g for i, g in enumerate(groups) if i != b]
        return None

    def _little_pairs(self, groups: list[Group], edges: list[set[int]]) -> Iterator[tuple[int, int]]:
        little = [self._little(g) for g in groups]
        for b in (b for b in range(len(groups)) if little[b]):
            yield from ((a, b) for a in range(b) if little[a] and groups[a].space == groups[b].space)

    def _pairs(self, groups: list[Group], edges: list[set[int]]) -> Iterator[tuple[int, int]]:
        """Producer and consumer first, then groups that read the same value."""
        reads = [self._reads(g) for g in groups]
        for b in range(len(groups)):
            yield from ((a, b) for a in range(len(groups)) if b in edges[a])
        for b in range(len(groups)):
            yield from ((a, b) for a in range(b) if b not in edges[a] and reads[a] & reads[b])

    def _reads(self, group: Group) -> set[str]:
        """Full-sized values read from memory (small operands are no reason to merge)."""
        own = group.values()
        bases = {self.views[v].base for n in group.nodes for v in n.tensors if v not in own}
        types = self.matcher.types
        return {b for b in bases if types[b].rank >= len(group.space) > 0}

    def _little(self, group: Group) -> bool:
        if group.contraction is not None:
            return False
        count = Dim.of(1)
        for size in group.space:
            count = count * size
        return count.value(self.sizes) <= LITTLE

    def _edges(self, groups: list[Group]) -> list[set[int]]:
        """For each group the groups that read what it makes."""
        maker = {v: i for i, g in enumerate(groups) for v in g.values()}
        out: list[set[int]] = [set() for _ in groups]
        for i, group in enumerate(groups):
            values = [v for node in group.nodes for v in node.tensors]
            for source in (maker.get(v, maker.get(self.views[v].base)) for v in values):
                if source is not None and source != i:
                    out[source].add(i)
        return out

    def _between(self, edges: list[set[int]], a: int, b: int) -> bool:
        """A path from a to b, or from b to a, through a third group."""
        for start, end in ((a, b), (b, a)):
            stack = [n for n in edges[start] if n != end]
            seen: set[int] = set()
            while stack:
                at = stack.pop()
                if at == end:
                    return True
                if at not in seen:
                    seen.add(at)
                    stack += edges[at]
        return False

    def _merge(self, groups: list[Group], edges: list[set[int]], a: int, b: int) -> Group | None:
        first, second = groups[a], groups[b]
        products = [g for g in (first, second) if g.contraction is not None]
        if len(products) == 2 or any(g.nodes[0].id in self.closed for g in (first, second)):
            return None
        if (id(first), id(second)) in self.hopeless or self._between(edges, a, b):
            return None
        nodes = sorted([*first.nodes, *second.nodes], key=lambda n: self.position[n.id])
        spaces = [products[0].space] if products else list(dict.fromkeys((second.space, first.space)))
        cores = [g.contraction for g in products if g.contraction is not None]
        for space in spaces:
            made = self._place(nodes, Group(space), cores)
            if made is None and not cores:
                wanted = self._wanted(nodes, space)
                made = self._place(nodes, Group(space, wanted=wanted)) if wanted else None
            if made is not None:
                return made
        self.hopeless[id(first), id(second)] = (first, second)
        return None

    def _wanted(self, nodes: list[Node], space: tuple[Dim, ...]) -> dict[str, Placement]:
        """Where values with operands from outside alone should lie: as those who read them do."""
        trial, missing = Group(space), set[str]()
        for node in nodes:
            placement = self.matcher.place(trial, node)
            if not isinstance(placement, Rejected):
                self.matcher.join(trial, node, placement)
                continue
            placed = any(v in trial.placements for v in node.tensors)
            if placed or placement.code != "space" or lowering_kind(node) != "pointwise":
                return {}
            missing |= set(node.outputs)
        wanted: dict[str, Placement] = {}
        for node in reversed(nodes):
            place = wanted.get(node.id) or trial.placements.get(node.id)
            if place is None or lowering_kind(node) != "pointwise":
                continue
            for operand in missing & set(node.tensors):
                shape = self.matcher.types[operand].shape
                wanted[operand] = aligned(place, shape)
        return wanted

    def twins(self, groups: list[Group], a: Group, b: Group) -> Group | None:
        """Two groups around a product each as one around both, where one reads what the other makes."""
        edges, cores = self._edges(groups), [g.contraction for g in (a, b) if g.contraction is not None]
        one, other = (next(i for i, g in enumerate(groups) if g is x) for x in (a, b))
        related = other in edges[one] or one in edges[other]
        if not related or a.space != b.space or self._between(edges, one, other):
            return None
        nodes = sorted([*a.nodes, *b.nodes], key=lambda n: self.position[n.id])
        return self._place(nodes, Group(a.space), cores)

    def _place(self, nodes: list[Node], made: Group, cores: Sequence[Node] = ()) -> Group | None:
        """The nodes as one group around the products `cores`, two at most."""
        inside = {o for n in nodes for o in n.outputs}
        for node in cores:
            if any(v in inside or self.views[v].base in inside for v in node.tensors):
                return None
            made.nodes.append(node)
            made.placements[node.id] = everywhere(made.space)
        made.contraction, made.second = (*cores, None, None)[:2]
        for node in nodes:
            if any(node is core for core in cores):
                continue
            if lowering_kind(node) == "movement" and node.tensors[0] not in made.placements:
                return None
            placement = self.matcher.place(made, node)
            if isinstance(placement, Rejected) or self._outside(made, node, inside):
                return None
            self.matcher.join(made, node, placement)
        return made

    def _outside(self, made: Group, node: Node, inside: set[str]) -> bool:
        """An operand that is a view of a value of this very group (`inside`) which could not be followed."""
        return any(v not in made.placements and self.views[v].base in inside for v in node.tensors)
