"""Which forward values the backward keeps: a minimum cut over the joint graph, priced in bytes of memory
traffic.

An edge's capacity is what saving that value costs: a leaf, a result of the block, and what a product or a
library call reads or a library call writes are in memory anyway and are only read again (their bytes once),
another computed value is written and read (twice). Contractions and reductions are never recomputed;
pointwise values and views are recomputed for nothing, since they land in a kernel that reads their operands
anyway. Ties go to leaves, so that no kernel writes what exists already. (Chen et al. 2016; the min-cut form
is that of torch's functorch partitioner.)

The objective `memory` prices what stays in memory between forward and backward instead: parameters are there
anyway, everything else counts its bytes once, and everything may be computed again, products too. A budget
between the two adds both prices, a kept byte weighing as much as it takes until the budget is kept (the
Lagrange multiplier of that limit): what is chosen is then the least traffic for the bytes it keeps. Products
and libraries' operators are done again at the price of the bytes that a copy moves in their time.

The objective `power` prices both sides in joules (forge.energy): a saved value the bytes that it moves, one
that is computed again its operations and, of products and reductions, the operands that they read; static
power flows for the time of either. Libraries' operators and running values are not repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import networkx

from esper_ir.graph import Graph, Node
from esper_ir.opdef import Pointwise
from esper_ir.registry import OPS
from esper_ir.scalar import Prim, walk
from esper_ir.show import flops
from forge.energy import Energy
from forge.groups import lowering_kind
from forge.objectives import share_of
from forge.target import Target
from forge.templates.choice import SLOW
from forge.views import movement, views

RECOMPUTED = ("pointwise", "movement", "creation")
HEAVIEST = 2.0**40
"""Bytes moved for a byte less kept, beyond which no choice differs."""


def saved_values(
    joint: Graph, cotangents: frozenset[str], sizes: Mapping[str, int], target: Target,
    objective: str = "speed", resident: frozenset[str] = frozenset(),
) -> tuple[str, ...]:  # fmt: skip
    """Names of the forward values to hand to the backward, in graph order. `sizes` binds dims for the
    prices; `resident` are the leaves that are in memory anyway. On a card a kernel reads rows of a table
    itself, so that it does so again for nothing; on a processor a convolution takes the bias that is added to
    it, and its result has no memory.
    """
    late = depends_on(joint, cotangents)
    needed = {v for n in joint if n.id in late for v in n.tensors if v not in late and v not in cotangents}
    needed |= {o for o in joint.outputs if o in needed}
    if not needed:
        return ()
    card = target.kind != "cpu"
    moved = _traffic(joint, sizes, _stored(joint, late, card))
    cut = partial(_cut, joint, late, needed)
    if objective == "power" and target.energy is not None:
        a_byte = target.energy.moved(1.0, target.copy_TBps)
        redone = _redone(joint, sizes, target, target.energy, late)
        return cut(redone, lambda name: round(moved(name) * a_byte))
    kept = _kept(joint, sizes, resident)
    share, fewest = share_of(objective), lambda: cut(lambda node: 0, kept)
    if share == 0.0:
        return fewest()
    gathered = _gathered(joint)
    fastest = cut(_free((*RECOMPUTED, *(("lookup",) if card else ())), gathered), moved)
    if share == 1.0:
        return fastest
    timed = _timed(joint, sizes, target, gathered)
    return _budgeted(fastest, fewest(), share, kept, lambda weight, paid: cut(
        timed, lambda name: moved(name) + (0 if name in paid else round(weight * kept(name)))
    ))  # fmt: skip


def _cut(
    joint: Graph, late: frozenset[str], needed: set[str], again: Callable[[Node], int | None],
    price: Callable[[str], int],
) -> tuple[str, ...]:  # fmt: skip
    flow = _network(joint, late, needed, again, price)
    _, (reachable, _) = networkx.minimum_cut(flow, "source", "sink")
    order = [*joint.inputs, *(o for n in joint for o in n.outputs)]
    return tuple(
        v for v in order if ("in", v) in reachable and ("out", v) in flow and ("out", v) not in reachable
    )


def _budgeted(
    fastest: tuple[str, ...], fewest: tuple[str, ...], share: float, kept: Callable[[str], int],
    weighed: Callable[[float, frozenset[str]], tuple[str, ...]],
) -> tuple[str, ...]:  # fmt: skip
    """What keeps no more bytes than the budget: by the smallest weight of a kept byte that does, within one
    part in a thousand; the fewest bytes where no weight does. What a smaller weight would keep beside it is
    then taken, the largest first, as far as there is room: values of one price come and go together."""

    def total(values: tuple[str, ...]) -> int:
        return sum(map(kept, values))

    limit = total(fewest) + share * (total(fastest) - total(fewest))
    if total(fastest) <= limit:
        return fastest
    none = frozenset[str]()
    low, high, over, best = 0.0, 1.0, fastest, weighed(1.0, none)
    while total(best) > limit:
        if high > HEAVIEST:
            best = fewest
            break
        low, high, over = high, 4 * high, best
        best = weighed(high, none)
    while high - low > high / 1000:
        middle = (low + high) / 2
        found = weighed(middle, none)
        if total(found) > limit:
            low, over = middle, found
        else:
            high, best = middle, found
    paid = none
    for value in sorted(set(over) - set(best), key=lambda v: (-kept(v), v)):
        found = weighed(high, paid | {value})
        if total(found) <= limit:
            best, paid = found, paid | {value}
    return best


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


def _timed(
    joint: Graph, sizes: Mapping[str, int], target: Target, gathered: set[str]
) -> Callable[[Node], int | None]:
    """Bytes that a copy moves in the time of computing a node again; element-by-element work costs nothing,
    since it lands in a kernel that reads its operands anyway."""
    free = RECOMPUTED if target.kind == "cpu" else (*RECOMPUTED, "lookup")

    def price(node: Node) -> int:
        if lowering_kind(node) in free and node.id not in gathered:
            return 0
        read = sum(_bytes(joint, v, sizes) for v in dict.fromkeys(node.tensors))
        written = sum(_bytes(joint, v, sizes) for v in node.outputs)
        busy = flops(joint, node).value(sizes) * target.copy_TBps / max(target.bf16_TFLOPs, target.copy_TBps)
        return max(read + written, round(busy)) + 1

    return price


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
            for operand in node.tensors:
                flow.add_edge(("out", operand), ("in", name))
        redo, first = again(node), ("in", node.id)
        if redo != 0:
            flow.add_edge("source", first, **({} if redo is None else {"capacity": redo}))
        for other in node.outputs[1:]:
            # All results of a node are made on the same side.
            flow.add_edge(first, ("in", other))
            flow.add_edge(("in", other), first)
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
