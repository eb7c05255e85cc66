"""A sum of the library's products, added up by the library: each after the first adds to what is there.

The gradient of what several products read is the sum of as many products. As a kernel of its own the sum
reads all of them and writes the result; the library reads what is there while it multiplies, and rounds once
less.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace

from esper_ir.graph import Graph, Node
from esper_ir.types import Dim, DType
from forge.groups import Group, lowering_kind
from forge.lowered import Call, Launch, Lowered, Operand
from forge.plan import Access, KernelPlan, Load, Store
from forge.templates.extern import sides
from forge.views import ONE, View, dense_strides

Done = tuple[Group, Lowered]
ADDING = {"mm": "addmm", "bmm": "baddbmm"}


def accumulated(done: Sequence[Done], graph: Graph, declared: Set[str]) -> list[Done]:
    """The groups of a phase without such sums; values in `declared` are seen outside."""
    out = list(done)
    at = 0
    while at < len(out):
        made = _without(out, at, graph, declared)
        at = at if made else at + 1
        out = made or out
    return out


def _without(done: list[Done], at: int, graph: Graph, declared: Set[str]) -> list[Done] | None:
    group, low = done[at]
    found = _sum(group, low)
    if found is None or len(set(found[0])) < 2:
        return None
    terms, result = found
    makers = [_maker(done[:at], value) for value in terms]
    kind = graph.types[result].dtype
    free = not any(v in declared or _readers(done, v) != 1 for v in terms)
    if not free or len(set(terms)) != len(terms) or any(m is None for m in makers):
        return None
    rows = sorted(m for m in makers if m is not None)
    calls = [done[row][1].steps[-1] for row in rows]
    if any(graph.types[v].dtype is not kind for v in terms):
        return None
    if not all(
        isinstance(c, Call) and _alike(c, done[r][1], graph, kind) for r, c in zip(rows, calls, strict=True)
    ):
        return None
    for first, row in enumerate(rows):
        done[row] = (_grown(done[row][0], group, row == rows[-1]), _adding(done[row][1], result, first > 0))
    return [*done[:at], *done[at + 1 :]]


def _sum(group: Group, low: Lowered) -> tuple[list[str], str] | None:
    """What a group adds up and the result, where it does nothing else, element by element."""
    step = low.steps[0]
    plain = all(n.op == "add" and len(n.tensors) == len(n.inputs) for n in group.nodes)
    types = {n.types[0] for n in group.nodes}
    if (
        len(low.steps) != 1
        or not isinstance(step, Launch)
        or group.contraction
        or not plain
        or len(types) > 1
    ):
        return None
    plan = step.plan
    reads = [plan.accesses[s.access] for s in plan.body if isinstance(s, Load)]
    writes = [plan.accesses[s.access] for s in plan.body if isinstance(s, Store)]
    # Each operand once: a term that is added twice is loaded once.
    once = len(reads) == len(group.nodes) + 1
    if len(writes) != 1 or not once or not all(_dense(a, plan) for a in (*reads, *writes)):
        return None
    return [a.buffer for a in reads], writes[0].buffer


def _dense(access: Access, plan: KernelPlan) -> bool:
    special = access.windows or access.parts or access.table or access.partial
    return not special and access.offset == Dim() and access.strides == dense_strides(plan.space)


def _maker(done: Sequence[Done], value: str) -> int | None:
    """The row whose last step is the product that gives a value."""
    for row, (_, low) in enumerate(done):
        step = low.steps[-1]
        if isinstance(step, Call) and step.op in ADDING and step.outs[0].value == value:
            return row
    return None


def _readers(done: Sequence[Done], value: str) -> int:
    """Steps that read a value."""
    steps = [step for _, low in done for step in low.steps]
    reads = sum(any(o.value == value for o in s.inputs) for s in steps if isinstance(s, Call))
    return reads + sum(value in s.plan.buffers for s in steps if isinstance(s, Launch))


def _alike(call: Call, low: Lowered, graph: Graph, kind: DType) -> bool:
    """Operands and result of one type: what the library adds to."""
    known = [low.temps.get(o.value) or graph.types[o.value] for o in call.inputs]
    return all(found.dtype is kind for found in known)


def _grown(product: Group, total: Group, last: bool) -> Group:
    """The additions belong to the last product."""
    return replace(product, nodes=[*product.nodes, *total.nodes]) if last else product


def _adding(low: Lowered, result: str, adds: bool) -> Lowered:
    call = low.steps[-1]
    assert isinstance(call, Call)
    out = replace(call.outs[0], value=result)
    if adds:
        call = replace(call, op=ADDING[call.op], inputs=(Operand(result, out.shape), *call.inputs))
    return replace(low, steps=(*low.steps[:-1], replace(call, outs=(out,))))


def biased(groups: Sequence[Group], graph: Graph, known: Mapping[str, View], calls: Set[str]) -> list[Group]:
    """Groups of products that are library `calls` with the addition of a bias that follows them: it costs the
    library nothing, and what a kernel would write for the backward is there already.
    """
    out = list(groups)
    reads = Counter(known[v].base for n in graph for v in n.tensors)
    reads.update(known[v].base for v in graph.outputs)
    for product in groups:
        node = product.contraction
        if (
            node is None
            or node.id not in calls
            or lowering_kind(node) != "contraction"
            or reads[node.id] != 1
        ):
            continue
        home = next((g for g in out if any(node.id in n.tensors for n in g.nodes)), None)
        if home is None or home.contraction is not None or not _matrices(node, graph, known):
            continue
        total = next(n for n in home.nodes if node.id in n.tensors)
        if total.id in home.columns or bias_of(total, node, graph, known) is None:
            continue
        left = replace(home, nodes=[n for n in home.nodes if n is not total])
        grown = replace(product, nodes=[*product.nodes, total])
        out = [
            grown if g is product else left if g is home else g for g in out if g is not home or left.nodes
        ]
    return out


def bias_of(total: Node, product: Node, graph: Graph, known: Mapping[str, View]) -> str | None:
    """The vector from outside that is added to the rows of a product, all of one type; None where the node
    does something else.
    """
    others = [v for v in total.inputs if v != product.id]
    if total.op != "add" or len(others) != 1 or not isinstance(others[0], str):
        return None
    view = known[others[0]]
    leaf = graph.inputs.get(view.base)
    kinds = {graph.types[v].dtype for v in (*product.tensors[:2], product.id, total.id, others[0])}
    whole = view.offset == Dim() and not view.windows and view.strides == (ONE,)
    alike = whole and leaf is not None and leaf.numel == view.shape[0] and len(kinds) == 1
    return (
        view.base
        if alike and total.types == product.types and view.shape == total.types[0].shape[-1:]
        else None
    )


def _matrices(node: Node, graph: Graph, known: Mapping[str, View]) -> bool:
    """Whether the library sees two matrices."""
    return all(len(side.shape) == 2 for side in sides(node, graph, known))
