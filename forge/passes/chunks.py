"""What is computed from a large product, in chunks of its rows, so that only a chunk of it is ever there.

The logits of a vocabulary are many times as large as what they are computed from, and as what is computed
from them: a loss per row, gradients of the operands. So the product, what follows it, and the products of the
backward that read their gradient are done for some rows after the other; results by rows are put together,
sums over the rows are added up, by the library while it multiplies (`forge/accumulate.py`). (Liger does so:
Hsu et al., "Liger Kernel: Efficient Triton Kernels for LLM Training", 2024.)

It is for objectives that keep few bytes: the number of launches grows, and a sum in a narrow type is rounded
once for every chunk.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any

from esper_ir.graph import Graph, Node
from esper_ir.graphbuilder import GraphBuilder, rewritten
from esper_ir.opdef import Val
from esper_ir.types import Dim, DType, TensorType
from forge.groups import IN_CHUNK, lowering_kind
from forge.passes.clean import eliminate_dead
from forge.passes.fold import fold
from forge.views import movement
from library.launch import Bound

WHOLE = 1 << 27
"""Bytes of a product from which on it comes in chunks."""
CHUNK = 1 << 26
"""Bytes of a chunk, about: enough work for every multiprocessor."""
MOST = 16
STEP = 16
"""Rows of a chunk are a multiple of this, so that every chunk begins at an aligned address."""


def chunked(graph: Graph, sizes: Mapping[str, int], least: Mapping[str, int]) -> Graph:
    """The graph with what comes of its first large product in chunks of rows, where it can be. `sizes` are
    those to be fast at, `least` the smallest ones that the plan serves."""
    if not any(_large(node, sizes) for node in graph):
        return graph
    flat = _in_rows(graph)
    for node in flat:
        if not _large(node, sizes) or node.id in flat.outputs:
            continue
        rows = node.types[0].shape[0]
        parts = min(-(-node.types[0].nbytes.value(sizes) // CHUNK), MOST, rows.value(least) // STEP)
        region = _Region(flat, node, sizes)
        if parts > 1 and region.fits():
            return _in_chunks(region, _lengths(rows, parts))
    return graph


def _large(node: Node, sizes: Mapping[str, int]) -> bool:
    return lowering_kind(node) == "contraction" and node.types[0].nbytes.value(sizes) >= WHOLE


def _in_rows(graph: Graph) -> Graph:
    """The graph in which a product of a stack of matrices with one matrix is one of rows, of batch and
    sequence alike, and so is what goes on with it element by element or row by row."""
    flat: dict[str, Val] = {}

    def change(b: GraphBuilder, node: Node, values: dict[str, Val]) -> tuple[Val, ...] | None:
        given = [values[v] for v in node.tensors]
        if movement(node) == "reshape" and _unfolds(given[0].type.shape, node.types[0].shape):
            flat[node.id] = given[0]
            return None
        lead = given[0].type.shape[:-1] if given and lowering_kind(node) == "contraction" else ()
        if len(lead) > 1 and len(given[1].type.shape) == 2:
            made = b(node.op, _flattened(b, given[0], lead), given[1], **dict(node.attrs))
        else:
            lead = next((node_lead(v) for v in node.tensors if v in flat), ())
            operands = _by_rows(b, node, [flat.get(v, values[v]) for v in node.tensors], given, lead)
            if operands is None:
                return None
            refs = iter(operands)
            made = b(
                node.op, *[next(refs) if isinstance(r, str) else r for r in node.inputs], **_attrs(node, lead)
            )
        if node.types[0].shape[: len(lead)] == lead:
            flat[node.id] = made
        return b.emit_named(node.id, "reshape", (made,), {"shape": node.types[0].shape})

    def node_lead(value: str) -> tuple[Dim, ...]:
        kept = len(flat[value].type.shape) - 1
        shape = graph.types[value].shape
        return shape[: len(shape) - kept]

    return eliminate_dead(fold(rewritten(graph, change)))


def _unfolds(old: tuple[Dim, ...], new: tuple[Dim, ...]) -> bool:
    """Whether the first axis becomes several, and nothing else happens."""
    count = len(new) - len(old) + 1
    return (
        count > 1 and len(old) > 1 and new[count:] == old[1:] and prod(new[:count], start=Dim.of(1)) == old[0]
    )


def _flattened(b: GraphBuilder, x: Val, lead: tuple[Dim, ...]) -> Val:
    return b("reshape", x, shape=(prod(lead, start=Dim.of(1)), *x.type.shape[len(lead) :]))


def _by_rows(
    b: GraphBuilder, node: Node, known: list[Val], given: list[Val], lead: tuple[Dim, ...]
) -> list[Val] | None:
    """The operands with the axes `lead` as one; None where the node does something else with these."""
    if not lead or lowering_kind(node) not in ("pointwise", "reduction") or len(node.types) != 1:
        return None
    if lowering_kind(node) == "reduction":
        inside = {d for d in node.attr("dims") if d < len(lead)}
        if inside and len(inside) < len(lead):
            return None
        return known
    rank, out = len(node.types[0].shape), list[Val]()
    for flat, whole in zip(known, given, strict=True):
        shape = whole.type.shape
        if flat is whole and len(shape) == rank and shape[: len(lead)] == lead:
            flat = _flattened(b, whole, lead)
        elif flat is whole and len(shape) > rank - len(lead):
            return None
        out.append(flat)
    return out


def _attrs(node: Node, lead: tuple[Dim, ...]) -> dict[str, Any]:
    attrs = dict(node.attrs)
    if lowering_kind(node) == "reduction":
        attrs["dims"] = tuple(sorted({max(d - len(lead) + 1, 0) for d in attrs["dims"]}))
    return attrs


def pieces(graph: Graph, bucket: Mapping[str, Bound], sizes: Mapping[str, int]) -> list[dict[str, Bound]]:
    """The bucket, in parts where its smaller sizes are too small for chunks: the last one has rows enough
    whatever else is as it should be. Rows of several sizes (batch and sequence) have each its share."""
    for node in graph:
        if not _large(node, sizes):
            continue
        names = sorted(frozenset[str]().union(*(size.symbols() for size in node.types[0].shape[:-1])))
        share = (WHOLE / node.types[0].nbytes.value(sizes)) ** (1 / max(len(names), 1))
        cuts = {name: math.ceil(sizes[name] * share) for name in names if name in bucket}
        return list(_cut(bucket, {n: at for n, at in cuts.items() if bucket[n].low < at <= sizes[n]}))
    return [dict(bucket)]


def _cut(bucket: Mapping[str, Bound], cuts: Mapping[str, int]) -> Iterator[dict[str, Bound]]:
    """What lies below the first cut; of the rest what lies below the second; and so on."""
    left = dict(bucket)
    for name, at in cuts.items():
        yield {**left, name: replace(left[name], high=at - 1)}
        left[name] = replace(left[name], low=at)
    yield left


def _lengths(rows: Dim, parts: int) -> list[Dim]:
    """Of every chunk; the last one has what is left."""
    each = (rows // (STEP * parts)) * STEP
    return [each] * (parts - 1) + [rows - each * (parts - 1)]


@dataclass(frozen=True)
class _Region:
    """What is done in chunks: everything as large as the product `head`, what lies between such values, and
    small work by rows that follows at once."""

    graph: Graph
    head: Node
    sizes: Mapping[str, int]

    @property
    def rows(self) -> Dim:
        return self.head.types[0].shape[0]

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        wide = {n.id for n in self.graph if self._wide(n)} | {self.head.id}
        after = self.reached(wide)
        before = self.reaching(wide | {n.id for n in self.graph if self._reads(n, wide)})
        inside = {n.id for n in self.graph if self._reads(n, wide)} | wide | (after & before)
        for node in self.graph:
            ready = not any(v in after and v not in inside for v in node.tensors)
            small = lowering_kind(node) == "pointwise" and self.axis(node.types[0]) is not None
            if ready and small and self._reads(node, inside):
                inside.add(node.id)
        for node in reversed(self.graph.nodes):
            places = [self.axis(self.graph.types[v]) for v in (*node.outputs, *node.tensors)]
            read = any(node.id in n.tensors for n in self.graph if n.id in inside)
            if read and movement(node) and None not in places and not self._reads(node, after):
                inside.add(node.id)
        late = self._late(inside)
        return tuple(
            n for n in self.graph if n.id in inside and (n.id in late or self.axis(n.types[0]) is not None)
        )

    def _late(self, inside: Set[str]) -> set[str]:
        """What comes of the products of the region."""
        products = {n.id for n in self.graph if lowering_kind(n) == "contraction"}
        return self.reached(products & inside)

    @cached_property
    def first(self) -> frozenset[str]:
        """Values of the region that are also made whole, before: what all chunks read is computed from them,
        as is a sum of weights that a mean is divided by."""
        read = {v for n in self.nodes for v in n.tensors if v not in self.made}
        return frozenset(self.reaching(read) & self.made)

    def _wide(self, node: Node) -> bool:
        """As large as the product, with its rows."""
        large = 2 * node.types[0].numel.value(self.sizes) >= self.head.types[0].numel.value(self.sizes)
        return large and self.axis(node.types[0]) is not None

    def _reads(self, node: Node, values: Set[str]) -> bool:
        return any(v in values for v in node.tensors)

    def reached(self, start: Set[str]) -> set[str]:
        found = set(start)
        for node in self.graph:
            if self._reads(node, found):
                found.update(node.outputs)
        return found

    def reaching(self, ends: Set[str]) -> set[str]:
        found = set(ends)
        for node in reversed(self.graph.nodes):
            if found & set(node.outputs):
                found.update(node.tensors)
        return found

    def axis(self, kind: TensorType) -> int | None:
        """Where the rows lie in a tensor; None where they are not, or not in one place."""
        places = [at for at, size in enumerate(kind.shape) if size == self.rows]
        return places[0] if len(places) == 1 else None

    @cached_property
    def made(self) -> frozenset[str]:
        return frozenset(o for n in self.nodes for o in n.outputs)

    @cached_property
    def seen(self) -> tuple[str, ...]:
        """Values of the region that are used outside, behind it, in order."""
        outside = {v for n in self.graph if n.id not in self.made for v in n.tensors}
        used = outside.union(self.graph.outputs) - self.first
        return tuple(n.id for n in self.nodes if n.id in used)

    def fits(self) -> bool:
        """Whether every node can be done for some rows alone, and nothing as large as the product is seen
        outside."""
        return (
            all(self._part(n) for n in self.nodes)
            and not self.first & self._late(self.made)
            and not any(self._wide(self.graph.by_output[v]) for v in self.seen)
            and all(self.rowless(v) or self.axis(self.graph.types[v]) is not None for v in self.seen)
            and not any(self.rowless(v) and self._reads(n, {v}) for v in self.made for n in self.nodes)
        )

    def rowless(self, value: str) -> bool:
        """A sum over the rows."""
        node = self.graph.by_output[value]
        return lowering_kind(node) in ("reduction", "contraction") and self._summed(node)

    def _summed(self, node: Node) -> bool:
        """Whether the rows are summed over, and nothing else is done with them."""
        kinds = [self.graph.types[v] for v in node.tensors]
        if lowering_kind(node) == "reduction":
            return node.op == "sum" and self.axis(kinds[0]) in node.attr("dims")
        a, b = (self.axis(k) for k in kinds)
        return a == kinds[0].rank - 1 and b == kinds[1].rank - 2

    def _part(self, node: Node) -> bool:
        kinds, out = [self.graph.types[v] for v in node.tensors], node.types[0]
        places = [self.axis(k) for k in kinds]
        if len(node.types) != 1 or any(
            p is None and self.rows in k.shape for p, k in zip(places, kinds, strict=True)
        ):
            return False
        what, at = lowering_kind(node), self.axis(out)
        if what in ("reduction", "contraction") and self._summed(node):
            return self.rows not in out.shape and _exact(node, out)
        if at is None:
            return False
        if what == "pointwise":
            return all(p is None or p - k.rank == at - out.rank for p, k in zip(places, kinds, strict=True))
        if what == "reduction":
            return places[0] not in node.attr("dims")
        if what == "contraction":
            a, b = kinds
            return places[0] is not None and places[0] < a.rank - 1 and places[1] is None and b.rank == 2
        if places and places[0] is not None and movement(node) == "reshape":
            return _before(kinds[0], places[0]) == _before(out, at)
        return movement(node) == "expand" or (movement(node) == "permute" and places[0] is not None)


def _before(kind: TensorType, axis: int) -> Dim:
    """How often the rows come one after the other: elements of the axes before theirs."""
    return prod(kind.shape[:axis], start=Dim.of(1))


def _exact(node: Node, out: TensorType) -> bool:
    """Sums that are put together from sums: products, and what is added up in the type of the result."""
    return lowering_kind(node) == "contraction" or out.dtype in (DType.float32, DType.float64)


def _in_chunks(region: _Region, lengths: list[Dim]) -> Graph:
    """The graph with the region once per chunk."""
    graph, inside = region.graph, region.made - region.first
    behind, others = region.reached(inside), [n for n in graph if n.id not in inside]
    nodes = [n for n in others if n.id not in behind]
    chunks, start = list[_Chunk](), Dim()
    for number, length in enumerate(lengths):
        chunks.append(_Chunk(region, number, start, length))
        nodes += chunks[-1].copies()
        start = start + length
    for value in region.seen:
        nodes += _together(region, value, [c.names[value] for c in chunks])
    return replace(graph, nodes=(*nodes, *(n for n in others if n.id in behind)))


def _together(region: _Region, value: str, parts: list[str]) -> Iterator[Node]:
    """The value from what the chunks give: their sum, or one after the other."""
    kind, total = region.graph.types[value], parts[0]
    if not region.rowless(value):
        yield Node(value, "cat", tuple(parts), (("dim", region.axis(kind)),), (kind,))
        return
    for at, part in enumerate(parts[1:], 2):
        name = value if at == len(parts) else f"{value}:chunks_{at}"
        yield Node(name, "add", (total, part), (), (kind,))
        total = name


@dataclass
class _Chunk:
    """The region for `length` rows from `start` on. `names`: of its values, and of what it reads, there."""

    region: _Region
    number: int
    start: Dim
    length: Dim
    names: dict[str, str] = field(default_factory=dict)

    def copies(self) -> Iterator[Node]:
        for node in self.region.nodes:
            for value in node.tensors:
                if value not in self.names:
                    yield from self._given(value)
            self.names[node.id] = f"{node.id}{IN_CHUNK}{self.number}"
            inputs = tuple(self.names[r] if isinstance(r, str) else r for r in node.inputs)
            attrs = tuple((name, self._attr(name, value)) for name, value in node.attrs)
            yield Node(self.names[node.id], node.op, inputs, attrs, (self._type(node.types[0]),))

    def _given(self, value: str) -> Iterator[Node]:
        """The rows of what comes from outside, as memory of its own: the library reads nothing that begins
        inside a tensor, and kernels that read at no offset are the same for all chunks."""
        kind = self.region.graph.types[value]
        at = self.region.axis(kind)
        self.names[value] = value
        if at is None:
            return
        part, self.names[value] = (f"{value}{word}{IN_CHUNK}{self.number}" for word in (":rows", ""))
        attrs = (("dim", at), ("end", self.start + self.length), ("start", self.start), ("step", 1))
        yield Node(part, "slice", (value,), attrs, (self._type(kind),))
        yield Node(self.names[value], "cast", (part,), (("dtype", kind.dtype),), (self._type(kind),))

    def _type(self, kind: TensorType) -> TensorType:
        return TensorType(kind.dtype, self._shape(kind.shape))

    def _shape(self, shape: tuple[Dim, ...]) -> tuple[Dim, ...]:
        return tuple(self.length if size == self.region.rows else size for size in shape)

    def _attr(self, name: str, value: Any) -> Any:
        return self._shape(value) if name == "shape" else value
