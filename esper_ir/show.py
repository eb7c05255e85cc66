"""A blueprint to look at: leaves and nodes with their types, floating-point operations and bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from esper_ir.canonical import blueprint_id
from esper_ir.graph import Blueprint, Graph, Node
from esper_ir.registry import lookup
from esper_ir.text import to_json
from esper_ir.types import Dim
from esper_ir.verify import typed

UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
WIDEST = 56


def flops(graph: Graph, node: Node) -> Dim:
    """Floating-point operations of a node by the cost of its record; 0 where it has none."""
    cost = lookup(node.op).cost
    if cost is None:
        return Dim()
    operands = [graph.types[r] if isinstance(r, str) else r for r in node.inputs]
    return Dim.of(cost(operands, node.types, dict(node.attrs)))


def example_sizes(blueprint: Blueprint) -> dict[str, int]:
    """A size for every dim: the largest to tune for, else the smallest of at least 1024 that is allowed."""
    out = {}
    for name, spec in blueprint.dims.items():
        step = spec.multiple_of
        wanted = -(-max(spec.min, min(1024, spec.max)) // step) * step
        out[name] = (
            max(spec.tune) if spec.tune else (wanted if wanted <= spec.max else spec.max // step * step)
        )
    return out


def document(blueprint: Blueprint) -> dict[str, Any]:
    """What `esper-forge show --json` prints. `flops`: expressions per node; `total`: operations and bytes of
    leaves and outputs at the sizes in `at`. Raises EsperError as `typed`.
    """
    graph = typed(blueprint)
    sizes = example_sizes(blueprint)
    per_node = {node.id: flops(graph, node) for node in graph}
    written = {node.id: node.attrs for node in blueprint.nodes}
    traffic = [leaf.type.nbytes for leaf in blueprint.leaves] + [graph.types[o].nbytes for o in graph.outputs]
    return {
        "schema": "esper-show/1",
        "id": blueprint_id(blueprint),
        "blueprint": to_json(blueprint),
        "types": {name: str(kind) for name, kind in graph.types.items()},
        "flops": {name: cost.to_json() for name, cost in per_node.items()},
        "nodes": [_row(node, written.get(node.id, ()), per_node[node.id], sizes) for node in graph],
        "at": sizes,
        "total": {
            "flops": sum(cost.value(sizes) for cost in per_node.values()),
            "bytes": sum(size.value(sizes) for size in traffic),
        },
    }


def _row(node: Node, written: Any, cost: Dim, sizes: Mapping[str, int]) -> dict[str, Any]:
    """`call`: operands, and the attributes that the text gives."""
    given = [f"{k}={list(v) if isinstance(v, tuple) else v}" for k, v in written]
    return {
        "call": f"{node.op}({', '.join([*(str(r) for r in node.inputs), *given])})",
        "id": node.id,
        "op": node.op,
        "inputs": [str(r) for r in node.inputs],
        "types": [str(t) for t in node.types],
        "flops": cost.value(sizes),
    }


def _range(spec: Mapping[str, Any]) -> str:
    """A declared range: 1..256, tune 16, 64."""
    step = f", multiple of {spec['multiple_of']}" if spec.get("multiple_of", 1) != 1 else ""
    tune = f", tune {', '.join(map(str, spec['tune']))}" if spec.get("tune") else ""
    return f"{spec['min']}..{spec['max']}{step}{tune}"


def short(number: float, unit: str = "") -> str:
    """1234567 as 1.23 M."""
    for size, letter in UNITS:
        if number >= size:
            return f"{number / size:.3g} {letter}{unit}"
    return f"{number:.3g} {unit}".rstrip()


def render(made: Mapping[str, Any]) -> str:
    """The document as a table: one line per leaf and node."""
    blueprint, total = made["blueprint"], made["total"]
    rows = [(f"dim {name}", _range(spec), "") for name, spec in blueprint.get("dims", {}).items()]
    for section in ("inputs", "params", "buffers", "constants"):
        rows += [(f"{section[:-1]} {name}", made["types"][name], "") for name in blueprint.get(section, {})]
    for node in made["nodes"]:
        rows.append(
            (
                f"{node['id']} = {node['call']}",
                ", ".join(node["types"]),
                short(node["flops"]) if node["flops"] else "",
            )
        )
    left = min(max((len(a) for a, _, _ in rows), default=0), WIDEST)
    middle = min(max((len(b) for _, b, _ in rows), default=0), WIDEST)
    lines = [f"{blueprint['name']}  {made['id']}"]
    lines += [f"  {a:<{left}}  {b:<{middle}}  {c}".rstrip() for a, b, c in rows]
    lines.append(f"  outputs: {', '.join(blueprint['outputs'])}")
    at = ", ".join(f"{n}={v}" for n, v in made["at"].items())
    amount = f"{short(total['flops'], 'FLOP')}, {short(total['bytes'], 'B')} in leaves and outputs"
    lines.append(f"  forward: {amount}{f' at {at}' if at else ''}")
    return "\n".join(lines)
