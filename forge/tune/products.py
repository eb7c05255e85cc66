"""Products in two ways, timed as whole groups: a library call with the kernels around it against a kernel of
ours with what follows folded in.

The phase is planned both ways; the groups that are not the same in both are what is timed, beginning from the
values that both read and compared by the values that both write. The choice is one "tile" of the search
(`ProductWay`): it is measured, kept, shipped and replayed as any other.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from forge.lower import Kernels, Site, together
from forge.lowered import Call, Launch, Lowered
from forge.plan import ProductWay, Tile
from forge.templates.ways import tile_of_way
from forge.tune.journal import Choices
from forge.tune.trials import Hunt
from library.launch import Plan, evaluate

BYTES_PER_US, FLOPS_PER_US = 3.0e6, 7.0e8
"""About an H100's copy and product: a floor, to share the trials."""


@dataclass(frozen=True)
class WaySite:
    """A product that can be done in two ways: `sides` are the groups of each way that the other has not."""

    key: str
    node: str
    given: Mapping[str, Tile]
    sides: Mapping[bool, tuple[Site, ...]]
    values: tuple[str, ...] = field(default=())

    @property
    def sizes(self) -> Mapping[str, int]:
        return self.sides[True][0].low.sizes

    def plan(self, choices: Choices) -> tuple[Plan, Kernels]:
        """The groups of the way that is given, and their kernels."""
        way = choices.given[self.key]
        assert isinstance(way, ProductWay)
        tile = tile_of_way(way)
        used = Choices(dict(choices.given), products={self.node: tile} if tile else {})
        return together(self.sides[way.own], used)


def way_sites(kernels: Kernels, keys: Collection[str] | None = None) -> dict[str, WaySite]:
    """Every product of a finished plan that can be done in two ways; `keys`: only these. One for which both
    ways are the same groups (its chain stands in any case) is left out.
    """
    out: dict[str, WaySite] = {}
    for key, (draft, node) in sorted(kernels.drafts.items()):
        if keys is not None and key not in keys:
            continue
        given = kernels.choices.given
        both = {own: draft.groups(Choices({**given, key: ProductWay(own)})) for own in (True, False)}
        sides = {own: _only(both[own], both[not own]) for own in (True, False)}
        if all(sides.values()):
            bare = WaySite(key, node, given, sides)
            out[key] = replace(bare, values=_shared(bare))
    return out


def _only(mine: Sequence[tuple[Site, Lowered]], other: Sequence[tuple[Site, Lowered]]) -> tuple[Site, ...]:
    """Groups of the first plan that the second has not; the order of rows does not count."""
    known = {_signature(lowered) for _, lowered in other}
    return tuple(site for site, lowered in mine if _signature(lowered) not in known)


def _signature(lowered: Lowered) -> tuple[str, ...]:
    return tuple(_step(step) for step in lowered.steps)


def _step(step: Launch | Call) -> str:
    if isinstance(step, Call):
        return repr(step)
    tile: Any = step.plan.tile
    if getattr(tile, "reverse", False):
        tile = replace(tile, reverse=False)
    return replace(step.plan, tile=tile).digest


def _shared(site: WaySite) -> tuple[str, ...]:
    """Names of the values that both ways keep in memory."""
    names = [
        {b.name for b in site.plan(Choices({**site.given, site.key: ProductWay(own)}))[0].buffers}
        for own in (True, False)
    ]
    return tuple(sorted(names[0] & names[1]))


def way_hunts(sites: Mapping[str, WaySite], choices: Choices) -> list[Hunt]:
    """A hunt for every one, from the way that is planned now."""
    out = []
    for key, site in sites.items():
        prior, origin = choices.made[key]
        shape = choices.shapes.get(key)
        group = f"{site.node} {site.sides[True][0].low.phase.name}"
        out.append(Hunt(key, group, prior, _floor_us(site), shape=shape, origin=origin))
    return out


def _floor_us(site: WaySite) -> float:
    """Least time of the values that both ways read or write and of the product itself."""
    graph, sizes = site.sides[True][0].low.graph, site.sizes
    plan, _ = site.plan(Choices({**site.given, site.key: ProductWay(True)}))
    used = {a.value for s in plan.steps for a in getattr(s, "args", ()) if a.kind == "buffer"}
    moved = 0
    for number, buffer in enumerate(plan.buffers):
        if number in used and buffer.name in graph.types:
            count = math.prod(int(evaluate(s, sizes)) for s in buffer.shape)
            moved += count * graph.types[buffer.name].dtype.itemsize
    node = graph.by_output[site.node]
    depth = graph.types[node.tensors[0]].shape[-1].value(dict(sizes))
    flops = 2 * node.types[0].numel.value(dict(sizes)) * depth
    return max(moved / BYTES_PER_US, flops / FLOPS_PER_US)
