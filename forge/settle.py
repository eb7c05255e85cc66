"""Which form of a graph is taken where several mean the same: the one whose groups move the fewest bytes."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain

from esper_ir.graph import Graph
from forge.partition import partition
from forge.passes.across import reordered
from forge.passes.inside import inside
from forge.recompute import moved_bytes, recompute
from forge.target import Target


def settled(graph: Graph, target: Target, sizes: Mapping[str, int]) -> Graph:
    """The graph, or another form of it that moves fewer bytes, or as many in fewer kernels."""
    best: tuple[int, int] | None = None
    found: Graph | None = graph
    while found is not None:
        graph, found = found, None
        for other in chain(inside(graph), reordered(graph)):
            best = best or _cost(graph, target, sizes)
            cost = _cost(other, target, sizes)
            if cost < best:
                best, found = cost, other
    return graph


def _cost(graph: Graph, target: Target, sizes: Mapping[str, int]) -> tuple[int, int]:
    parts = recompute(partition(graph, target), target, sizes)
    return moved_bytes(parts, sizes), len(parts.groups)
