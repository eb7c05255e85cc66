"""The ways to do a product, as one choice of the journal: a library call with kernels around it, or a kernel
of ours with what follows folded in, alone or with a product of the same left operand. Without a measured
choice the rule of templates/choice.py holds.
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
from forge.templates import dual
from forge.templates.choice import own_matmul
from forge.templates.matmul import both, independent, prior_of
from forge.tune.journal import Choices
from forge.tune.shapes import Shape
from forge.views import View

UNMEASURED = ("rule",)
"""Codes of refusals by an estimate; any other says that no kernel of ours can do the product."""


@dataclass(frozen=True)
class Ways:
    """Products by node: those that are kernels of ours and those that are library calls whatever the rule
    says, the tiles that were chosen with it, and the key of each choice. `pairs`: products that could be one
    kernel, second to first; `dual`: those that are asked to be one. The choice is that of the first."""

    own: set[str] = field(default_factory=set)
    library: set[str] = field(default_factory=set)
    tiles: dict[str, MatmulTile] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    pairs: dict[str, str] = field(default_factory=dict)
    dual: dict[str, str] = field(default_factory=dict)


def chosen(
    graph: Graph, views: Mapping[str, View], target: Target, sizes: Mapping[str, int], choices: Choices
) -> Ways:
    """The way of every product of a phase that could be done in two. Of a pair that is one kernel the first
    has a choice; where the first is a library call, so is the second unless it has a choice of its own.
    """
    out = Ways()
    readers: dict[str, list[Node]] = {}
    for node in graph:
        for value in node.tensors:
            readers.setdefault(value, []).append(node)
    products = [n for n in graph if lowering_kind(n) == "contraction"]
    rules = {n.id: own_matmul(n, graph, views, target) for n in products}
    possible = {n for n, r in rules.items() if isinstance(r, Accepted) or r.code in UNMEASURED}
    pairs = dual.candidates(graph, views, readers)
    out.pairs.update((b, a) for b, a in pairs.items() if {a, b} <= possible)
    partners = {a: b for b, a in out.pairs.items()}
    for node in (n for n in products if n.id in possible):
        first, partner = out.pairs.get(node.id, ""), partners.get(node.id, "")
        if node.id in out.dual:
            out.own.add(node.id)
            continue
        accepted = isinstance(rules[node.id], Accepted) and first not in out.library
        joins = bool(partner) and isinstance(rules[partner], Accepted) and _unsplit(node, graph, sizes)
        key, shape = _key(node, graph, views, target, sizes, _follows(node, graph, readers))
        way = choices.pick(key, ProductWay(accepted, dual=accepted and joins), shape)
        out.keys[node.id] = key
        (out.own if way.own else out.library).add(node.id)
        if partner and way.own and way.dual:
            out.dual[partner] = node.id
        tile = tile_of_way(way)
        if tile is not None:
            out.tiles[name_of(way, node.id, partner)] = tile
    return out


def name_of(way: ProductWay, node: str, partner: str) -> str:
    """Under which name the template asks for the tile of a way."""
    return both(node, partner) if way.dual else node


def _unsplit(node: Node, graph: Graph, sizes: Mapping[str, int]) -> bool:
    """Whether a pair has enough tiles as one kernel: sums in parts are made apart."""
    m, n, k = _extents(node, graph, sizes)
    itemsize = graph.types[node.tensors[0]].dtype.itemsize
    return prior_of(m, n, k, itemsize, independent(node, graph), True).split_k == 1


def _extents(node: Node, graph: Graph, sizes: Mapping[str, int]) -> tuple[int, int, int]:
    n = node.types[0].shape[-1].value(sizes)
    k = graph.types[node.tensors[0]].shape[-1].value(sizes)
    return node.types[0].numel.value(sizes) // max(n, 1), n, k


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
    extents = _extents(node, graph, sizes)
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
    reached = {node.id} | dual.reached(node.id, readers)
    number = {name: at for at, name in enumerate(n.id for n in graph if n.id in reached)}
    rows: list[tuple[object, ...]] = []
    for name in number:
        user = graph.by_output[name]
        read = [number.get(v, -1) for v in user.tensors] if name != node.id else []
        types = [(str(t.shape), t.dtype.value) for t in user.types]
        others = any(r.id not in reached for r in readers.get(name, ()))
        rows.append((user.op, read, types, name in graph.outputs or others))
    return rows
