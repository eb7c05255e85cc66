"""In what two blueprints differ: by what they compute, not by the order or the names of nodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from esper_ir.canonical import blueprint_id, differentiable, interface_digest
from esper_ir.graph import Blueprint, Graph, Leaf, Node
from esper_ir.registry import lookup
from esper_ir.types import Dim, DType
from esper_ir.verify import typed


@dataclass(frozen=True)
class Row:
    """One difference: `what` (dim, input, param, buffer, constant, node, outputs, differentiable, name), its
    name, the field, and the value on either side; None where it does not exist.
    """

    what: str
    name: str
    field: str
    first: Any
    second: Any


@dataclass(frozen=True)
class Comparison:
    """`ids` and `interfaces` of both; `rows`: every difference."""

    ids: tuple[str, str]
    interfaces: tuple[str, str]
    rows: tuple[Row, ...]

    @property
    def same_meaning(self) -> bool:
        return self.ids[0] == self.ids[1]

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": "esper-diff/1",
            "same_meaning": self.same_meaning,
            "ids": list(self.ids),
            "differences": [dict(row.__dict__) for row in self.rows],
        }


def compare(first: Blueprint, second: Blueprint) -> Comparison:
    """Every difference of meaning and of interface; none when only the order or names of nodes (or metadata)
    differ. Raises EsperError when one of them does not verify.
    """
    pair = (first, second)
    ids = (blueprint_id(first), blueprint_id(second))
    faces = (interface_digest(first), interface_digest(second))
    rows: list[Row] = []
    if first.name != second.name:
        rows.append(Row("name", "", "name", first.name, second.name))
    dims = [{n: _spec(s) for n, s in bp.dims.items()} for bp in pair]
    rows += _keyed("dim", dims[0], dims[1])
    leaves = [{v.name: _leaf(v) for v in bp.leaves} for bp in pair]
    rows += _keyed("leaf", leaves[0], leaves[1])
    first_order, second_order = ([v.name for v in bp.leaves] for bp in pair)
    if first_order != second_order and set(first_order) == set(second_order):
        rows.append(Row("leaf", "", "order", first_order, second_order))
    if ids[0] != ids[1]:
        rows += _nodes(typed(first), typed(second))
    rows += _lists("outputs", first.outputs, second.outputs, ids[0] == ids[1])
    rows += _lists("differentiable", differentiable(first), differentiable(second), False)
    updates = [[f"{k}: {v}" for k, v in bp.updates.items()] for bp in pair]
    rows += _lists("updates", updates[0], updates[1], False)
    rows += _lists("random", first.random, second.random, False)
    return Comparison(ids, faces, tuple(rows))


def _spec(spec: Any) -> dict[str, Any]:
    return {k: list(v) if isinstance(v, tuple) else v for k, v in spec.__dict__.items()}


def _leaf(leaf: Leaf) -> dict[str, Any]:
    compute = leaf.compute.value if leaf.compute else None
    init = dict(leaf.init) if leaf.init else None
    return {"kind": leaf.kind, "type": str(leaf.type), "compute": compute, "init": init, "data": leaf.data}


def _keyed(what: str, first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[Row]:
    """Entries by name: missing on one side, or with other fields."""
    for name in dict.fromkeys((*first, *second)):
        a, b = first.get(name), second.get(name)
        if a is None or b is None:
            kind = (a or b or {}).get("kind", what)
            yield Row(kind, name, "exists", _brief(a), _brief(b))
            continue
        for field in a:
            if a[field] != b[field]:
                yield Row(a.get("kind", what), name, field, a[field], b[field])


def _brief(entry: Mapping[str, Any] | None) -> Any:
    return None if entry is None else entry.get("type", dict(entry))


def _lists(what: str, first: Any, second: Any, only_names: bool) -> Iterator[Row]:
    if tuple(first) != tuple(second):
        yield Row(what, "", "names" if only_names else "list", list(first), list(second))


# Nodes: what both compute is left out; the rest is paired by name, then by what it does.


def _told(value: Any) -> Any:
    if isinstance(value, (Dim, DType)):
        return str(value) if isinstance(value, Dim) else value.value
    return [_told(v) for v in value] if isinstance(value, tuple) else value


def _shallow(node: Node, labels: Mapping[str, str]) -> dict[str, Any]:
    """The fields of a node, its operands under the names they have on both sides."""
    operands = [labels.get(r, r) if isinstance(r, str) else r for r in node.inputs]
    attrs = {k: _told(v) for k, v in node.attrs}
    return {"op": node.op, "inputs": operands, "attrs": attrs, "types": [str(t) for t in node.types]}


def _key(node: Node, known: Mapping[str, Any]) -> tuple[Any, ...]:
    """Equal for nodes that compute the same from the same values."""
    operands = [known[r] if isinstance(r, str) else (type(r).__name__, repr(r)) for r in node.inputs]
    if lookup(node.op).commutative:
        operands.sort(key=repr)
    attrs = tuple((k, repr(_told(v))) for k, v in node.attrs)
    return node.op, tuple(operands), attrs, tuple(str(t) for t in node.types)


def _labels(graph: Graph, numbers: dict[Any, str], side: str) -> dict[str, str]:
    """A label per value: that of the first one computed in the same way from leaves of the same names."""
    known: dict[str, Any] = {name: ("leaf", name, str(kind)) for name, kind in graph.inputs.items()}
    out = {}
    for node in graph.nodes:
        label = numbers.setdefault(_key(node, known), f"{side}{node.id}")
        for i, name in enumerate(node.outputs):
            known[name] = (label, i)
            out[name] = label if i == 0 else f"{label}.{i}"
    return out


def _nodes(first: Graph, second: Graph) -> Iterator[Row]:
    numbers: dict[Any, str] = {}
    ours, theirs = _labels(first, numbers, ""), _labels(second, numbers, "second:")
    shared = {theirs[n.id] for n in second.nodes} & {ours[n.id] for n in first.nodes}
    left = {n.id: n for n in first.nodes if ours[n.id] not in shared}
    right = {n.id: n for n in second.nodes if theirs[n.id] not in shared}
    theirs = {name: name if label.startswith("second:") else label for name, label in theirs.items()}
    for name in dict.fromkeys((*left, *right)):
        a, b = left.get(name), right.get(name)
        if a is None or b is None:
            yield Row("node", name, "exists", a and a.op, b and b.op)
            continue
        sides = _shallow(a, ours), _shallow(b, theirs)
        yield from (Row("node", name, f, v, sides[1][f]) for f, v in sides[0].items() if v != sides[1][f])


def render(found: Comparison) -> str:
    """One line per difference."""
    if not found.rows:
        return f"no difference: {found.ids[0]}"
    meaning = "the same meaning" if found.same_meaning else "another meaning"
    lines = [f"{meaning}: {found.ids[0][:12]} {found.ids[1][:12]}"]
    for row in found.rows:
        head = f"  {row.what} {row.name}".rstrip()
        if row.first is None or row.second is None:
            sign, shown = ("+", row.second) if row.first is None else ("-", row.first)
            lines.append(f"{head}: {sign} {shown}")
        else:
            lines.append(f"{head}: {row.field} {row.first} -> {row.second}")
    return "\n".join(lines)
