"""Which forward values the backward keeps: a minimum cut over the joint graph, priced in bytes of memory
traffic.

An edge's capacity is what saving that value costs: a leaf, a result of the block, and what a product or a
library call reads or a library call writes are in memory anyway and are only read again (their bytes once),
another computed value is written and read (twice). Contractions and reductions are never recomputed;
pointwise values and views are recomputed for nothing, since they land in a kernel that reads their operands
anyway. Ties go to leaves, so that no kernel writes what exists already. (Chen et al. 2016; the min-cut form
is that of torch's functorch partitioner.)

The objective `memory` prices what stays in memory between forward and backward instead: parameters are there
anyway, everything else counts its bytes once, and everything may be computed again, products too.

The objective `power` prices both sides in joules (forge.energy): a saved value the bytes that it moves, one
that is computed again its operations and, of products and reductions, the operands that they read; static
power flows for the time of either. Libraries' operators and running values are not repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import networkx

from esper_ir.graph import Graph, Node
from esper_ir.opdef import Pointwise
from esper_ir.registry import OPS
from esper_ir.scalar import Prim, walk
from forge.energy import Energy
from forge.groups import lowering_kind
from forge.target import Target
from forge.templates.choice import SLOW
from forge.views import movement, views

RECOMPUTED = ("pointwise", "movement", "creation")


def saved_values(
    joint: Graph, cotangents: frozenset[str], sizes: Mapping[str, int], card: bool = True,
    resident: frozenset[str] | None = None, power: Target | None = None,
) -> tuple[str, ...]:  # fmt: skip
    """Names of the forward values to hand to the backward, in graph order. `sizes` binds dims for the
    prices. With `resident`, the leaves that are in memory anyway, the fewest bytes are kept; with `power` the
    fewest joules are spent on that target. On a `card` a
    kernel reads rows of a table itself, so that it does so again for nothing; on a processor a convolution
    takes the bias that is added to it, and its result has no memory.
    """
    late = depends_on(joint, cotangents)
    needed = {v for n in joint if n.id in late for v in n.tensors if v not in late and v not in cotangents}
    needed |= {o for o in joint.outputs if o in needed}
    if not needed:
        return ()
    again = (*RECOMPUTED, *(("lookup",) if card else ()))
    moved = _traffic(joint, sizes, _stored(joint, late, card))
    if power is not None and power.energy is not None:
        a_byte = power.energy.moved(1.0, power.copy_TBps)
        redone = _redone(joint, sizes, power, power.energy, late)
        flow = _network(joint, late, needed, redone, lambda name: round(moved(name) * a_byte))
    elif resident is not None:
        flow = _network(joint, late, needed, lambda node: 0, _kept(joint, sizes, resident))
    else:
        flow = _network(joint, late, needed, _free(again, _gathered(joint)), moved)
    _, (reachable, _) = networkx.minimum_cut(flow, "source", "sink")
    order = [*joint.inputs, *(o for n in joint for o in n.outputs)]
    cut = [v for v in order if ("in", v) in reachable and ("out", v) in flow and ("out", v) not in reachable]
    return tuple(cut)


def depends_on(graph: Graph, roots: frozenset[str]) -> frozenset[str]:
    """Values that need one of the roots."""
    out = set(roots)
    for node in graph:
        if out & set(node.tensors):
            out |= set(node.outputs)
    return frozenset(out)


def _traffic(joint: Graph, sizes: Mapping[str, int], stored: set[str]) -> Callable[[str], int]:
    """Bytes written and read because a value is kept."""

    def price(name: str) -> int:
        if name in joint.inputs:
            return _read(joint, name, sizes)
        size = _bytes(joint, name, sizes)
        # What has memory anyway is preferred where it is about as cheap: no kernel has to make it.
        return size + 1 if name in stored else 2 * size + size // 64 + 2

    return price


def _kept(joint: Graph, sizes: Mapping[str, int], resident: frozenset[str]) -> Callable[[str], int]:
    """Bytes that stay in memory; of equals leaves, then results."""

    def price(name: str) -> int:
        if name in resident:
            return 1
        return _bytes(joint, name, sizes) + (0 if name in joint.inputs else 1 if name in joint.outputs else 2)

    return price


def _free(again: tuple[str, ...], gathered: set[str]) -> Callable[[Node], int | None]:
    """What computing a node again costs: nothing for these kinds of work, all others are not repeated."""
    return lambda node: 0 if lowering_kind(node) in again and node.id not in gathered else None


def _redone(
    joint: Graph, sizes: Mapping[str, int], target: Target, energy: Energy, late: frozenset[str]
) -> Callable[[Node], int | None]:
    """Picojoules of computing a node again; None for what is not. What the forward has no use for itself is
    computed once in any case.
    """
    gathered, useful = _gathered(joint), {o for o in joint.outputs if o not in late}
    for node in reversed(list(joint)):
        if useful & set(node.outputs):
            useful |= set(node.tensors)

    def price(node: Node) -> int | None:
        kind = lowering_kind(node)
        if kind in ("movement", "creation"):
            return 0
        if node.id in gathered or kind not in ("pointwise", "lookup", "reduction", "contraction"):
            return None
        if not useful & set(node.outputs):
            return 0
        count = node.types[0].numel.value(sizes)
        read = sum(_bytes(joint, v, sizes) for v in dict.fromkeys(node.tensors))
        if kind == "contraction":
            flops = 2 * count * joint.types[node.tensors[0]].shape[-1].value(sizes)
            return round(energy.multiplied(flops, target.bf16_TFLOPs) + energy.moved(read, target.copy_TBps))
        if kind == "reduction":
            ops = joint.types[node.tensors[0]].numel.value(sizes)
            return round(energy.computed(ops) + energy.moved(read, target.copy_TBps))
        return round(energy.computed(count * _operations(node)))

    return price


def _operations(node: Node) -> int:
    """On one element, about: eight for what is no single instruction."""
    low = OPS[node.op].lowering
    if not isinstance(low, Pointwise):
        return 1
    names = [e.name for e in walk(low.body(dict(node.attrs))) if isinstance(e, Prim)]
    return max(len(names) + 7 * sum(name in SLOW for name in names), 1)


def _network(
    joint: Graph, late: frozenset[str], needed: set[str], again: Callable[[Node], int | None],
    price: Callable[[str], int],
) -> networkx.DiGraph:  # fmt: skip
    """`price` of keeping a value; what it costs to make a node's values `again`, None where they cannot be:
    what is cut between the source and a value is that it is computed on the far side.
    """
    flow = networkx.DiGraph()
    for name in (v for v in joint.inputs if v not in late):
        flow.add_edge("source", ("in", name))
        flow.add_edge(("in", name), ("out", name), capacity=price(name))
    for node in joint:
        if node.id in late:
            continue
        kind = lowering_kind(node)
        for name in node.outputs:
            # A view has no memory of its own to keep: without a capacity it is never cut.
            cost = {} if kind == "movement" else {"capacity": price(name)}
            flow.add_edge(("in", name), ("out", name), **cost)
            redo = again(node)
            if redo != 0:
                flow.add_edge("source", ("in", name), **({} if redo is None else {"capacity": redo}))
            for operand in node.tensors:
                flow.add_edge(("out", operand), ("in", name))
    for name in needed:
        flow.add_edge(("out", name), "sink")
    return flow


def _read(joint: Graph, leaf: str, sizes: Mapping[str, int]) -> int:
    """Of a table only the rows that are looked up."""
    readers = [n for n in joint if leaf in n.tensors]
    whole = _bytes(joint, leaf, sizes)
    if not readers or any(lowering_kind(n) != "lookup" or n.tensors[0] == leaf for n in readers):
        return whole
    return min(whole, sum(_bytes(joint, n.id, sizes) for n in readers))


def _gathered(joint: Graph) -> set[str]:
    """Work on several windows of one value, as pooling is: to do it again is another pass over the data."""
    seen: dict[str, frozenset[tuple[str, str]]] = {}
    out: set[str] = set()
    for node in joint:
        before = frozenset[tuple[str, str]]().union(*(seen.get(v, frozenset()) for v in node.tensors))
        if movement(node) == "window":
            roots = {root for root, _ in before} or {node.tensors[0]}
            seen[node.id] = frozenset((root, node.id) for root in roots)
        elif lowering_kind(node) == "pointwise" and len(before) > len({root for root, _ in before}):
            out.add(node.id)
        elif lowering_kind(node) in ("pointwise", "movement"):
            seen[node.id] = before
    return out


def _stored(joint: Graph, late: frozenset[str], card: bool) -> set[str]:
    """Values of the forward that have memory whatever the backward wants."""
    known = views(joint)
    out = {known[o].base for o in joint.outputs if o not in late}
    for node in (n for n in joint if n.id not in late):
        kind = lowering_kind(node)
        if kind in ("contraction", "opaque"):
            out |= {known[v].base for v in node.tensors}
        if kind == "opaque" and (card or node.op != "convolution"):
            out |= set(node.outputs)
    return out


def _bytes(joint: Graph, name: str, sizes: Mapping[str, int]) -> int:
    return max(joint.types[name].nbytes.value(sizes), 1)
