"""Two products in a row through a narrow value: bottlenecks, low-rank branches and small perceptrons.

x [m, k] times a [k, r], pointwise work on [m, r], times b [r, n], pointwise work on [m, n], as one kernel:
the narrow value stays on chip (it is stored only where somebody else reads it), and what both ends read of
the rows is met in the cache. Pays while both right operands are small, since every program reads them whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from esper_ir.diagnostics import Rejected
from esper_ir.graph import Graph, Node
from esper_ir.types import Dim
from forge.body import Body
from forge.groups import Group, lowering_kind
from forge.lowered import Launch, Lowered, ceildiv, size_of, symbols
from forge.plan import Access, Chain, ChainTile, Compute, KernelPlan, Load, MatmulSpec, Stmt, Store, next_pow2
from forge.target import Target
from forge.templates.choice import rows_as_one
from forge.templates.matmul import far, left, precision, two_axes
from forge.templates.rows import RowsInput
from forge.views import View, dense_strides

WIDEST = 256
"""Columns of the narrow value: its tile lies in registers."""
WEIGHTS = 1 << 17
"""Elements of both right operands together: every program reads them from the L2."""
NARROW = 64
"""Columns of a value between the products up to which their right operands are small."""
ALONE, ONCE, HELD = 132, 256, 1 << 17
"""Programs that a card runs one to a multiprocessor; columns of a row that one block holds; bytes of both
right operands that a program does."""


def candidates(graph: Graph, views: Mapping[str, View], target: Target) -> dict[str, str]:
    """Second product to first, by node, where shapes allow a chain; a product is in one chain at most."""
    out: dict[str, str] = {}
    taken: set[str] = set()
    for node in graph:
        if lowering_kind(node) != "contraction" or node.id in taken:
            continue
        first = _first(node, graph, views)
        if first is None or first.id in taken or not rows_as_one(views[first.tensors[0]]):
            continue
        if not isinstance(_fits(first, node, graph, target), Dim):
            continue
        out[node.id] = first.id
        taken |= {node.id, first.id}
    return out


def _first(node: Node, graph: Graph, views: Mapping[str, View]) -> Node | None:
    """The one product that the left operand is made from by pointwise work of its shape."""
    makers, shape = graph.by_output, graph.types[node.tensors[0]].shape
    found: dict[str, Node] = {}
    stack, seen = [node.tensors[0]], set[str]()
    while stack:
        value = stack.pop()
        maker = makers.get(views[value].base)
        if maker is None or maker.id in seen or maker.types[0].shape != shape:
            continue
        seen.add(maker.id)
        kind = lowering_kind(maker)
        if kind == "contraction":
            found[maker.id] = maker
        elif kind == "pointwise":
            stack += maker.tensors
    return next(iter(found.values())) if len(found) == 1 else None


def _fits(first: Node, second: Node, graph: Graph, target: Target) -> Dim | Rejected:
    """The width of the narrow value, or why the two make no chain."""
    kinds = {graph.types[v].dtype for n in (first, second) for v in n.tensors[:2]}
    if target.contractions != "template" or len(kinds) != 1 or not kinds <= set(target.dot_dtypes):
        return Rejected("dtype", "both products need one type that the tensor cores take")
    if any(graph.types[n.tensors[1]].rank != 2 for n in (first, second)):
        return Rejected("rank", "batched products are library calls")
    width = first.types[0].shape[-1]
    depth, columns = graph.types[first.tensors[0]].shape[-1], second.types[0].shape[-1]
    weights = (depth * width + width * columns).static
    if width.static is None or width.static > WIDEST or weights is None or weights > WEIGHTS:
        return Rejected("size", f"a value {width} wide between {depth} and {columns} columns stays in memory")
    return width


def merged(groups: list[Group], pairs: Mapping[str, str], views: Mapping[str, View]) -> list[Group]:
    """Groups of both products made one wherever the second reads nothing else of the first."""
    for second, first in pairs.items():
        head, tail = (
            next((i for i, g in enumerate(groups) if starts(g, name)), -1) for name in (first, second)
        )
        if min(head, tail) < 0 or not _chains(groups, head, tail, views):
            continue
        a, b = groups[head], groups[tail]
        made = replace(b, nodes=[*a.nodes, *b.nodes], chain=(a, b))
        groups = [made if g is b else g for g in groups if g is not a]
    return groups


def starts(group: Group, name: str) -> bool:
    """Whether a group is built around this product alone."""
    return (
        group.contraction is not None and group.contraction.id == name and not (group.chain or group.second)
    )


def _chains(groups: list[Group], a: int, b: int, views: Mapping[str, View]) -> bool:
    first, second = groups[a], groups[b]
    own, product = first.values(), second.contraction
    assert product is not None
    left = views[product.tensors[0]]
    whole = left.offset == Dim() and left.strides == dense_strides(left.shape) and not left.windows
    others = {views[v].base for n in second.nodes for v in n.tensors if n is not product}
    others.add(views[product.tensors[1]].base)
    if left.base not in own or not whole or others & own or first.space[:-1] != second.space[:-1]:
        return False
    return not _between(groups, a, b, views)


def _between(groups: list[Group], a: int, b: int, views: Mapping[str, View]) -> bool:
    """Whether a third group reads the first and feeds the second, or the second feeds the first."""
    reads = [{views[v].base for n in g.nodes for v in n.tensors} for g in groups]
    makes = [g.values() for g in groups]
    stack, seen = [a], {a}
    while stack:
        at = stack.pop()
        for other in (i for i in range(len(groups)) if i not in seen and reads[i] & makes[at]):
            if other == b and at != a:
                return True
            if other != b:
                seen.add(other)
                stack.append(other)
    return bool(reads[a] & makes[b])


@dataclass(frozen=True)
class Half:
    """One product of a chain: its group ready for a template, and its operands' views."""

    given: RowsInput
    a: View
    b: View
    node: Node


def lower(first: Half, second: Half, link: str) -> Lowered:
    """The chain as one kernel; `link` is the statement of the first body that the second product reads."""
    head_space, head_accesses = two_axes(first.given, first.a)
    space, accesses = two_axes(second.given, second.a)
    (m, r), n = head_space, space[1]
    kinds = [h.given.graph.types[v.base].dtype for h in (first, second) for v in (h.a, h.b)]
    spec = MatmulSpec(
        Access(first.a.base, kinds[0], left(first.a), offset=first.a.offset),
        Access(first.b.base, kinds[1], (first.b.strides[-2], first.b.strides[-1]), offset=first.b.offset),
        first.a.shape[-1], precision(first.node),
    )  # fmt: skip
    b = Access(second.b.base, kinds[3], (second.b.strides[-2], second.b.strides[-1]), offset=second.b.offset)
    stmts = tuple(renamed(first.given.body))
    sizes = first.given.sizes
    held = min(second.given.target.shared_bytes * 3 // 4, HELD) // kinds[0].itemsize
    reads = [head_accesses[s.access] for s in stmts if isinstance(s, Load)]
    if r.value(sizes) > NARROW and not any(a.letters() == "rc" for a in reads):
        held = 0
    prior = _tile(m.value(sizes), r.value(sizes), n.value(sizes), spec.k.value(sizes), held)
    tile = second.given.choose(space, accesses, prior, (spec, stmts, tuple(head_accesses), b))
    head = KernelPlan("head", head_space, tuple(head_accesses), stmts, tile, (), spec)
    chain = Chain(head, _new(link), b, precision(second.node))
    walked = (*accesses, *head_accesses, spec.a, spec.b, b)
    used = symbols(m, r, n, spec.k, *(s for x in walked for s in x.dims))
    wide = far(second.given, space, r) or far(first.given, head_space, spec.k)
    body = tuple(second.given.body.stmts)
    plan = KernelPlan(first.given.name, space, tuple(accesses), body, tile, used, wide=wide, chain=chain)
    return Lowered("matmul chain", (Launch(plan, (size_of(ceildiv(m, tile.block_m)), 1, 1)),))


def renamed(body: Body) -> Iterator[Stmt]:
    """The statements under names that the second body does not use."""
    for s in body.stmts:
        if isinstance(s, Store):
            yield replace(s, value=_new(s.value))
        elif isinstance(s, Load):
            yield replace(s, name=_new(s.name))
        elif isinstance(s, Compute):
            yield replace(s, name=_new(s.name), args=tuple(_new(a) for a in s.args))
        else:
            raise TypeError(f"{type(s).__name__} in the body of a product")


def _new(name: str) -> str:
    return name if name == "acc" else f"h{name}"


def _tile(m: int, r: int, n: int, k: int, held: int) -> ChainTile:
    """A prior by shape, measured on an H200 (8192 x 4096 x 16 and 1024 x 64 x 256): rows in small blocks,
    since many programs hide each other's waits; a wide value between the products wants more warps for its
    tile. Programs that are alone on a multiprocessor ask for everything before they compute, where that is
    more than the right operands or these are small; `held`: elements of them that may be kept on chip.
    """
    wide = r > NARROW
    if m <= 16 * ALONE and max(n, k) <= ONCE and next_pow2(r) * (next_pow2(n) + next_pow2(k)) <= held:
        warps = 8 if wide else 4 if max(n, k) > 128 else 2
        return ChainTile(16, max(next_pow2(k), 16), max(next_pow2(n), 16), warps, 1)
    block_n = min(max(next_pow2(n), 16), 64 if wide else 128)
    return ChainTile(16, min(max(next_pow2(k), 16), 128), block_n, 8 if wide else 2, 2 if wide else 4)
