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

from forge.groups import Group
from forge.lower import Kernels, Site, together
from forge.lowered import Call, Launch, Lowered
from forge.plan import ProductWay, Tile
from forge.templates.ways import name_of, tile_of_way
from forge.tune.journal import Choices
from forge.tune.trials import Hunt
from library.launch import Plan, evaluate

BYTES_PER_US, FLOPS_PER_US = 3.0e6, 7.0e8
"""About an H100's copy and product: a floor, to share the trials."""
Side = tuple[bool, bool]
Made = Sequence[tuple[Site, Lowered]]
OWN, LIBRARY, DUAL = (True, False), (False, False), (True, True)


@dataclass(frozen=True)
class WaySite:
    """A product that can be done in several ways: `sides` are the groups of each that not all others have, by
    whether it is a kernel of ours and whether that is one with the product `partner`.
    """

    key: str
    node: str
    given: Mapping[str, Tile]
    sides: Mapping[Side, tuple[Site, ...]]
    partner: str = ""
    values: tuple[str, ...] = field(default=())

    @property
    def sizes(self) -> Mapping[str, int]:
        return self.sides[OWN][0].low.sizes

    def plan(self, choices: Choices) -> tuple[Plan, Kernels]:
        """The groups of the way that is given, and their kernels."""
        way = choices.given[self.key]
        assert isinstance(way, ProductWay)
        tile = tile_of_way(way)
        name = name_of(way, self.node, self.partner)
        used = Choices(dict(choices.given), products={name: tile} if tile else {}, priors=choices.priors)
        return together(self.sides.get((way.own, way.dual), self.sides[way.own, False]), used)


def way_sites(kernels: Kernels, keys: Collection[str] | None = None) -> dict[str, WaySite]:
    """Every product of a finished plan that can be done in several ways; `keys`: only these. One for which
    two ways are the same groups (its chain stands in any case) is left out.
    """
    out: dict[str, WaySite] = {}
    for key, (draft, node) in sorted(kernels.drafts.items()):
        if keys is not None and key not in keys:
            continue
        given, known = kernels.choices.given, kernels.choices.priors
        made = {
            side: draft.groups(Choices({**given, key: _way(side)}, priors=known)) for side in (OWN, LIBRARY)
        }
        partner = ""
        if node in made[OWN][0][0].low.ways.pairs.values():
            both = draft.groups(Choices({**given, key: _way(DUAL)}, priors=known))
            partner = next((g.second.id for g in _groups(both) if g.second and g.name == node), "")
            made |= {DUAL: both} if partner else {}
        sides = {side: _only(made[side], [o for s, o in made.items() if s != side]) for side in made}
        if all(sides.values()):
            bare = WaySite(key, node, given, sides, partner)
            out[key] = replace(bare, values=_shared(bare))
    return out


def _way(side: Side) -> ProductWay:
    return ProductWay(side[0], dual=side[1])


def _groups(made: Made) -> list[Group]:
    return [site.group for site, _ in made]


def _only(mine: Made, others: Sequence[Made]) -> tuple[Site, ...]:
    """Groups of the first plan that not every other has; the order of rows does not count."""
    known = set.intersection(*({_signature(lowered) for _, lowered in other} for other in others))
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
    """Names of the values that all ways keep in memory."""
    names = [
        {b.name for b in site.plan(Choices({**site.given, site.key: _way(side)}))[0].buffers}
        for side in site.sides
    ]
    return tuple(sorted(set.intersection(*names)))


def way_hunts(sites: Mapping[str, WaySite], choices: Choices) -> list[Hunt]:
    """A hunt for every one, from the way that is planned now."""
    out = []
    for key, site in sites.items():
        prior, origin = choices.made[key]
        shape = choices.shapes.get(key)
        group = f"{site.node} {site.sides[OWN][0].low.phase.name}"
        idle = () if site.partner else ("dual",)
        out.append(Hunt(key, group, prior, _floor_us(site), shape=shape, origin=origin, idle=idle))
    return out


def _floor_us(site: WaySite) -> float:
    """Least time of the values that both ways read or write and of the product itself."""
    graph, sizes = site.sides[OWN][0].low.graph, site.sizes
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
