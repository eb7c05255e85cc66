"""Why the kernels are what they are: groups with bytes and floating-point operations, templates, refusals."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import forge.templates
from esper_ir.graph import Graph
from esper_ir.show import flops as cost
from esper_ir.show import short
from esper_ir.types import Dim
from forge.groups import Group, lowering_kind
from forge.lower import PhaseLowering
from forge.lowered import Call, Launch, Lowered
from forge.plan import JoinedTile, Store, Tile
from forge.target import Target
from forge.templates.choice import tuned_sizes
from forge.work import Work

FLOOR, ESTIMATE = "floor", "estimate"
"""What the times are: from the rates of the target's memory and matrix instructions, or, on a processor, from
assumed ones."""


def explain(work: Work) -> dict[str, Any]:
    """A document: per phase and bucket the groups, then what was refused and why."""
    assert work.graph is not None
    return {
        "schema": "esper-explain/1",
        "blueprint": work.blueprint.name,
        "target": work.target.name,
        "pipeline": work.pipeline,
        "saved": list(work.saved),
        "floors": ESTIMATE if work.target.kind == "cpu" else FLOOR,
        "phases": [_phase(low, work.target) for low in work.lowerings],
        "warnings": [f.to_json() for f in work.findings],
    }


def _phase(low: PhaseLowering, target: Target) -> dict[str, Any]:
    sizes = _sizes(low)
    groups = [_group(low.parts.graph, g, made, target, sizes) for g, made in low.lowered]
    home = {node.id: group.name for group, _ in low.lowered for node in group.nodes}
    return {
        "phase": low.phase.name,
        "wanted": list(low.phase.wanted),
        "bucket": {b.dim: [b.low, b.high] for b in low.plan.bucket},
        "sizes": sizes,
        "groups": groups,
        "total": {
            "bytes": sum(g["bytes_read"] + g["bytes_written"] for g in groups),
            "flops": sum(g["flops"] for g in groups),
            "floor_us": round(sum(g["floor_us"] for g in groups), 3),
        },
        "refused": [
            {"node": r.node, "group": r.group, "code": r.why.code, "reason": r.why.reason}
            for r in low.parts.refusals
            if r.group not in home or home.get(r.node) != home[r.group]  # not put together later
        ],
    }


def _sizes(low: PhaseLowering) -> dict[str, int]:
    dims = low.parts.graph.dims
    largest = tuned_sizes(low.parts.graph)
    return {
        b.dim: max((t for t in dims[b.dim].tune if b.low <= t <= b.high), default=min(largest[b.dim], b.high))
        for b in low.plan.bucket
    }


def _group(
    graph: Graph, group: Group, made: Lowered, target: Target, sizes: Mapping[str, int]
) -> dict[str, Any]:
    read, written = group_traffic(graph, group, made, sizes)
    flops = sum(cost(graph, node).value(sizes) for node in group.nodes)
    computing = flops / (target.bf16_TFLOPs * 1e12) if target.bf16_TFLOPs else 0.0
    floor = max((read + written) / (target.copy_TBps * 1e12), computing)
    return {
        "group": group.name,
        "template": made.template,
        "nodes": [f"{n.id}: {n.op}" for n in group.nodes],
        "space": [str(s) for s in group.space],
        "kernels": [_tiles(s.plan.tile) for s in made.steps if isinstance(s, Launch)],
        "externs": [s.op for s in made.steps if isinstance(s, Call)],
        "bytes_read": read,
        "bytes_written": written,
        "flops": flops,
        "floor_us": round(floor * 1e6, 3),
    }


def _tiles(tile: Tile) -> str:
    """A tile, or those of the parts that are beside each other."""
    return " | ".join(str(p.tile) for p in tile.parts) if isinstance(tile, JoinedTile) else str(tile)


def group_traffic(graph: Graph, group: Group, made: Lowered, sizes: Mapping[str, int]) -> tuple[int, int]:
    """Least bytes (read, written) of a group: each buffer once, workspace included."""
    read: dict[str, int] = {}
    written: dict[str, int] = {}
    for step in made.steps:
        if isinstance(step, Call):
            for operand in step.inputs:
                read[operand.value] = _bytes(graph, operand.value, made, sizes)
            written |= {o.value: _bytes(graph, o.value, made, sizes) for o in step.outs}
            continue
        stores = {step.plan.accesses[s.access].buffer for s in step.plan.body if isinstance(s, Store)}
        for buffer in step.plan.buffers:
            (written if buffer in stores else read)[buffer] = _bytes(graph, buffer, made, sizes)
    return sum(read.values()), sum(written.values())


def _bytes(graph: Graph, name: str, made: Lowered, sizes: Mapping[str, int]) -> int:
    temp = made.temps.get(name)
    if temp is None and name not in graph.types:
        return 0
    dtype, shape = (temp.dtype, temp.shape) if temp else (graph.types[name].dtype, graph.types[name].shape)
    total = Dim.of(dtype.itemsize)
    for size in shape:
        total = total * size
    return total.value(sizes)


def group_flops(graph: Graph, group: Group, sizes: Mapping[str, int]) -> int:
    """Operations of the products that the group is built around: what benches hold its time against."""
    if group.chain is not None or group.beside:
        return sum(group_flops(graph, part, sizes) for part in group.chain or group.beside)
    node = group.contraction
    if node is None or lowering_kind(node) != "contraction":
        return 0
    times = 4 if group.second is not None else 2
    return (times * node.types[0].numel * graph.types[node.tensors[0]].shape[-1]).value(sizes)


def templates() -> list[dict[str, str]]:
    """Every file of forge/templates: its name, and the first paragraph of what it says of itself."""
    rows = []
    for path in sorted(Path(forge.templates.__file__ or "").parent.glob("*.py")):
        said = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        if path.stem != "__init__":
            rows.append({"template": path.stem, "does": " ".join(said.split("\n\n")[0].split())})
    return rows


def render(document: Mapping[str, Any]) -> str:
    """The document as readable text."""
    lines = [f"{document['blueprint']} for {document['target']} ({document['pipeline']})"]
    lines.append(f"saved for the backward: {', '.join(document['saved']) or 'nothing'}")
    for phase in document["phases"]:
        bucket = ", ".join(f"{d} {lo}..{hi}" for d, (lo, hi) in phase["bucket"].items()) or "all sizes"
        wanted = f" of {', '.join(phase['wanted'])}" if phase["wanted"] else ""
        at = ", ".join(f"{d}={size}" for d, size in phase["sizes"].items())
        lines.append(f"\n{phase['phase']}{wanted} [{bucket}]{f', figures at {at}' if at else ''}")
        for g in phase["groups"]:
            what = " + ".join([*g["kernels"], *g["externs"]])
            figures = {**g, "bytes": g["bytes_read"] + g["bytes_written"]}
            lines.append(f"  {g['group']}: {g['template']}, {_amounts(figures, document['floors'])}")
            lines.append(f"    nodes: {', '.join(g['nodes'])}")
            lines.append(f"    {what}")
        lines += [f"  refused: {r['node']} in {r['group']}: {r['reason']}" for r in phase["refused"]]
    totals = [_total(document["phases"][at], document["floors"]) for at in shown(document["phases"])]
    lines.append(f"\ntotal: {'; '.join(totals)}")
    if document["floors"] == ESTIMATE:
        lines.append("estimates are from rates assumed of a processor; what lies in its caches takes less")
    return "\n".join(lines)


def shown(phases: Sequence[Mapping[str, Any]]) -> list[int]:
    """Numbers of forward and the backward of every gradient, or of inference where there is no gradient.
    Buckets of one phase come in ascending order: the last one counts.
    """
    named = {p["phase"]: at for at, p in enumerate(phases)}
    if "forward" not in named:
        return [named["inference"]]
    back = [at for at, p in enumerate(phases) if p["phase"] == "backward"]
    return [named["forward"], max(back, key=lambda at: (len(phases[at]["wanted"]), at))]


def _total(phase: Mapping[str, Any], floors: str) -> str:
    at = ", ".join(f"{d}={size}" for d, size in phase["sizes"].items())
    return f"{phase['phase']}{f' at {at}' if at else ''} {_amounts(phase['total'], floors)}"


def _amounts(figures: Mapping[str, Any], floors: str) -> str:
    """Bytes, operations and the least time, as text."""
    done = f"{short(figures['flops'], 'FLOP')}, " if figures["flops"] else ""
    return f"{short(figures['bytes'], 'B')}, {done}{floors} {figures['floor_us']:.1f} us"
