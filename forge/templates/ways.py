"""Both ways to do a product, as one choice of the journal: a library call with kernels around it, or a kernel
of ours with what follows folded in. Without a measured choice the rule of templates/choice.py holds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from esper_ir.diagnostics import Accepted
from esper_ir.graph import Graph, Node
from forge.groups import lowering_kind
from forge.plan import MatmulTile, ProductWay
from forge.target import Target
from forge.templates.choice import own_matmul
from forge.tune.journal import Choices
from forge.tune.shapes import Shape
from forge.views import View

UNMEASURED = ("rule",)
"""Codes of refusals by an estimate; any other says that no kernel of ours can do the product."""


@dataclass(frozen=True)
class Ways:
    """Products by node: those that are kernels of ours and those that are library calls whatever the rule
    says, the tiles that were chosen with it, and the key of each choice."""

    own: frozenset[str] = frozenset()
    library: frozenset[str] = frozenset()
    tiles: Mapping[str, MatmulTile] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)


def chosen(
    graph: Graph, views: Mapping[str, View], target: Target, sizes: Mapping[str, int], choices: Choices
) -> Ways:
    """The way of every product of a phase that could be done in two."""
    own, library = set[str](), set[str]()
    tiles: dict[str, MatmulTile] = {}
    keys: dict[str, str] = {}
    readers: dict[str, list[Node]] = {}
    for node in graph:
        for value in node.tensors:
            readers.setdefault(value, []).append(node)
    for node in (n for n in graph if lowering_kind(n) == "contraction"):
        rule = own_matmul(node, graph, views, target)
        if not isinstance(rule, Accepted) and rule.code not in UNMEASURED:
            continue
        follows = _follows(node, graph, readers)
        key, shape = _key(node, graph, views, target, sizes, follows)
        way = choices.pick(key, ProductWay(isinstance(rule, Accepted)), shape)
        keys[node.id] = key
        (own if way.own else library).add(node.id)
        tile = tile_of_way(way)
        if tile is not None:
            tiles[node.id] = tile
    return Ways(frozenset(own), frozenset(library), tiles, keys)


def tile_of_way(way: ProductWay) -> MatmulTile | None:
    """The tile that a way names; None where the template chooses it, or a library does the product."""
    if not way.own or not way.block_m:
        return None
    return MatmulTile(
        way.block_m, way.block_n, way.block_k, way.warps, way.stages, way.group_m, way.split_k,
        way.descriptors,
    )  # fmt: skip


def way_of_tile(tile: MatmulTile) -> ProductWay:
    """A kernel of ours with this tile."""
    return ProductWay(
        True, tile.block_m, tile.block_n, tile.block_k, tile.warps, tile.stages, tile.group_m, tile.split_k,
        tile.descriptors,
    )  # fmt: skip


def _key(
    node: Node, graph: Graph, views: Mapping[str, View], target: Target, sizes: Mapping[str, int],
    follows: list[tuple[object, ...]],
) -> tuple[str, Shape]:  # fmt: skip
    """Digest of the operands, the sizes and all pointwise work that follows, without names; and the same as a
    shape (m, n, k)."""
    sides = [views[v] for v in node.tensors[:2]]
    kinds = [graph.types[v].dtype.value for v in node.tensors[:2]]
    precision = str(dict(node.attrs).get("precision") or "ieee")
    walked = [([str(s) for s in v.shape], [str(s) for s in v.strides]) for v in sides]
    text = repr(("way", target.arch, kinds, walked, precision, follows, sorted(sizes.items())))
    k = graph.types[node.tensors[0]].shape[-1]
    n = node.types[0].shape[-1]
    extents = (node.types[0].numel.value(sizes) // max(n.value(sizes), 1), n.value(sizes), k.value(sizes))
    inner = [str(v.strides[-1]) == "1" for v in sides]
    family = repr(("way", kinds, inner, precision, [row[0] for row in follows]))
    digest = hashlib.sha256(text.encode()).hexdigest()
    return digest, Shape(target.arch, hashlib.sha256(family.encode()).hexdigest()[:32], extents)


def _follows(
    node: Node, graph: Graph, readers: Mapping[str, list[Node]]
) -> list[tuple[object, ...]]:  # fmt: skip
    """What is computed from the product up to the next work that is no loop over its elements: operators with
    their places among each other, and which results somebody else reads.
    """
    reached, stack = {node.id}, [node.id]
    while stack:
        for user in readers.get(stack.pop(), ()):
            if lowering_kind(user) == "pointwise" and user.id not in reached:
                reached.add(user.id)
                stack.append(user.id)
    number = {name: at for at, name in enumerate(n.id for n in graph if n.id in reached)}
    rows: list[tuple[object, ...]] = []
    for name in number:
        user = graph.by_output[name]
        read = [number.get(v, -1) for v in user.tensors] if name != node.id else []
        types = [(str(t.shape), t.dtype.value) for t in user.types]
        others = any(r.id not in reached for r in readers.get(name, ()))
        rows.append((user.op, read, types, name in graph.outputs or others))
    return rows
