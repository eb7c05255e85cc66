"""A blueprint as a picture: the graph of every phase, coloured by kernel, and what each costs at least.

One SVG without scripts or fonts of its own. Nodes stand in layers, each below all it reads; within a layer
they are put near their operands (barycentres, swept down and up: Sugiyama et al. 1981). Above a phase stands
a table: bytes, operations and floor of every kernel or library call, and its share of the phase's floor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from esper_ir.graph import Graph
from esper_ir.show import short
from forge.explain import explain, shown
from forge.lower import PhaseLowering
from forge.work import Work

WIDE, HIGH, GAP_X, GAP_Y, EDGE = 156, 36, 14, 26, 20
ROW, TABLE = 20, 640
SWEEPS = 6
LETTERS = 22  # of a node's line
PLAIN = "#f1f1f1"
COLUMNS = (("kernel", 24), ("MB", 350), ("FLOP", 420), ("us", 490), ("share", 548))
STYLE = (
    "text{font:12px ui-sans-serif,system-ui,sans-serif;fill:#222}.small{font-size:10.5px;fill:#555}"
    ".title{font-size:15px;font-weight:600}.right{text-anchor:end}"
    ".edge{fill:none;stroke:#9a9a9a;stroke-width:1}.node{stroke:#444;stroke-width:.8}"
    ".call{stroke-dasharray:4 2;stroke-width:1.4}.leaf{stroke:#999;stroke-width:.8}"
)


@dataclass(frozen=True)
class Box:
    """What is drawn for one value: two lines, a colour, a note for the pointer."""

    name: str
    lines: tuple[str, str]
    colour: str
    kind: str
    note: str


def svg(work: Work) -> str:
    """Forward and the backward of every gradient, one below the other, or inference where there is no
    gradient; of several buckets that of the largest sizes."""
    made = explain(work)
    parts: list[str] = []
    top, width = 2 * EDGE, 0
    title = f"{work.blueprint.name} for {work.target.name} ({work.pipeline}, {work.objective})"
    for at in shown(made["phases"]):
        drawn, wide, high = _phase(work.lowerings[at], made["phases"][at], top, made["floors"])
        parts += drawn
        top, width = top + high + 2 * EDGE, max(width, wide)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {top}" width="{width}" height="{top}"'
        f' role="img" aria-label="{escape(title)}"><title>{escape(title)}</title><style>{STYLE}</style>'
        f'<rect width="100%" height="100%" fill="#fff"/>'
    )
    return "\n".join([head, _text(EDGE, EDGE + 6, title, "title"), *parts, "</svg>"]) + "\n"


def _phase(low: PhaseLowering, made: Mapping[str, Any], top: int, floors: str) -> tuple[list[str], int, int]:
    """(elements, width, height) of one phase: its table, then its graph."""
    groups = made["groups"]
    colours = {g["group"]: _colour(at) for at, g in enumerate(groups)}
    sizes = ", ".join(f"{n}={v}" for n, v in made["sizes"].items())
    wanted = f" of {', '.join(made['wanted'])}" if made["wanted"] else ""
    total = made["total"]["floor_us"]
    title = f"{made['phase']}{wanted}{f' at {sizes}' if sizes else ''}: {floors} {total:.1f} us"
    out = [_text(EDGE, top + 16, title, "title")]
    for name, x in COLUMNS:
        label = f"{floors} us" if name == "us" else name
        out.append(_text(EDGE + x, top + 38, label, "small" if x == 24 else "small right"))
    for at, group in enumerate(groups):
        out += _row(group, colours[group["group"]], total, top + 38 + ROW * (at + 1))
    below = top + 38 + ROW * (len(groups) + 1)
    layers = _layers(low.parts.graph)
    boxes = _boxes(low, groups, colours)
    places = _placed(layers, below)
    out += _edges(low.parts.graph, places)
    out += [_box(boxes[name], *places[name]) for layer in layers for name in layer]
    wide = max([TABLE, *(x + WIDE for x, _ in places.values())]) + EDGE
    return out, wide, max([below, *(y + HIGH for _, y in places.values())]) - top


def _row(group: Mapping[str, Any], colour: str, total: float, y: int) -> list[str]:
    moved, share = group["bytes_read"] + group["bytes_written"], group["floor_us"] / total if total else 0.0
    calls = ", ".join(group["externs"])
    name = f"{group['group']}: {calls or group['template']}"
    cells = (
        name if len(name) <= 44 else f"{name[:43]}…", f"{moved / 1e6:.2f}",
        short(group["flops"]) if group["flops"] else "", f"{group['floor_us']:.1f}", f"{share:.0%}",
    )  # fmt: skip
    kind = "call" if calls else "node"
    out = [f'<rect class="node {kind}" x="{EDGE}" y="{y - 11}" width="14" height="13" fill="{colour}"/>']
    out += [
        _text(EDGE + x, y, cell, "" if x == 24 else "right")
        for cell, (_, x) in zip(cells, COLUMNS, strict=True)
    ]
    out.append(f'<rect x="{EDGE + 556}" y="{y - 9}" width="{share * 80:.1f}" height="9" fill="{colour}"/>')
    return out


def _colour(at: int) -> str:
    """Neighbours differ: hues by the golden angle, two tones."""
    return f"hsl({at * 137.508 % 360:.0f} 70% {86 if at % 2 else 76}%)"


def _boxes(
    low: PhaseLowering, groups: Sequence[Mapping[str, Any]], colours: Mapping[str, str]
) -> dict[str, Box]:
    graph = low.parts.graph
    owner = {n.id: made for made, (group, _) in zip(groups, low.lowered, strict=True) for n in group.nodes}
    out = {
        name: Box(name, (name, _kind(graph, name)), "#fff", "leaf", f"{name}: {kind}")
        for name, kind in graph.inputs.items()
    }
    for node in graph:
        group = owner.get(node.id)
        label = f"in {group['group']}" if group else "a view or a constant: no kernel"
        colour = colours[group["group"]] if group else PLAIN
        kind = "node call" if group and group["externs"] else "node" if group else "leaf"
        note = f"{node.id} = {node.op}({', '.join(map(str, node.inputs))}): {node.types[0]}; {label}"
        out[node.id] = Box(node.id, (f"{node.op}  {node.id}", _kind(graph, node.id)), colour, kind, note)
    return out


def _kind(graph: Graph, name: str) -> str:
    return str(graph.types[name])


def _layers(graph: Graph) -> list[list[str]]:
    """Names by depth; a leaf stands just above its first reader."""
    depth: dict[str, int] = {}
    for node in graph:
        depth[node.id] = 1 + max((depth.get(_maker(graph, v), 0) for v in node.tensors), default=0)
    for name in graph.inputs:
        readers = [depth[n.id] for n in graph if name in n.tensors]
        depth[name] = min(readers, default=1) - 1
    out: list[list[str]] = [[] for _ in range(max(depth.values(), default=0) + 1)]
    for name, at in depth.items():
        out[at].append(name)
    return _ordered([layer for layer in out if layer], graph)


def _maker(graph: Graph, value: str) -> str:
    """The node, or the leaf, that a value is of."""
    return value if value in graph.inputs else graph.by_output[value].id


def _ordered(layers: list[list[str]], graph: Graph) -> list[list[str]]:
    """Layers with every name near the mean position of what it is joined to."""
    above = {n.id: [_maker(graph, v) for v in n.tensors] for n in graph}
    below: dict[str, list[str]] = {}
    for name, operands in above.items():
        for operand in operands:
            below.setdefault(operand, []).append(name)
    for sweep in range(SWEEPS):
        joined = above if sweep % 2 == 0 else below
        at = {name: i - len(layer) / 2 for layer in layers for i, name in enumerate(layer)}
        for layer in layers if sweep % 2 == 0 else reversed(layers):
            layer.sort(key=lambda n: (_mean([at[j] for j in joined.get(n, ()) if j in at], at[n]), at[n]))
            at |= {name: i - len(layer) / 2 for i, name in enumerate(layer)}
    return layers


def _mean(values: Sequence[float], otherwise: float) -> float:
    return sum(values) / len(values) if values else otherwise


def _placed(layers: Iterable[Sequence[str]], top: int) -> dict[str, tuple[int, int]]:
    """Upper left corners: layers are centred above each other."""
    rows = list(layers)
    most = max(map(len, rows), default=1)
    return {
        name: (EDGE + (most - len(row)) * (WIDE + GAP_X) // 2 + i * (WIDE + GAP_X), top + at * (HIGH + GAP_Y))
        for at, row in enumerate(rows)
        for i, name in enumerate(row)
    }


def _edges(graph: Graph, places: Mapping[str, tuple[int, int]]) -> list[str]:
    out = []
    for node in graph:
        for value in dict.fromkeys(node.tensors):
            (x, y), (u, v) = places[_maker(graph, value)], places[node.id]
            x, y, u = x + WIDE // 2, y + HIGH, u + WIDE // 2
            bend = max((v - y) // 2, GAP_Y // 2)
            out.append(f'<path class="edge" d="M{x} {y}C{x} {y + bend} {u} {v - bend} {u} {v}"/>')
    return out


def _box(box: Box, x: int, y: int) -> str:
    lines = [line if len(line) <= LETTERS else f"{line[: LETTERS - 1]}…" for line in box.lines]
    return (
        f'<g><title>{escape(box.note)}</title><rect class="{box.kind}" x="{x}" y="{y}" width="{WIDE}"'
        f' height="{HIGH}" rx="{HIGH // 2 if box.colour == "#fff" else 4}" fill="{box.colour}"/>'
        f"{_text(x + 8, y + 15, lines[0])}{_text(x + 8, y + 29, lines[1], 'small')}</g>"
    )


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    style = f' class="{kind}"' if kind else ""
    return f'<text x="{x:g}" y="{y:g}"{style}>{escape(text)}</text>'
