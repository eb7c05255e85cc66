"""Where blueprints come from: edges between parent and child, walks over them, and what two texts differ
in.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from library import ledger, rows
from library.core import Core
from library.errors import fail

RELATIONS = ("mutation", "crossover", "specialisation", "copy")
MAX_DEPTH = 64


@dataclass(frozen=True)
class Edge:
    """`child` was made from `parent`; `distance` counts steps from where a walk began."""

    parent: str
    child: str
    relation: str
    mutation: str
    distance: int


def add_edge(core: Core, parent: str, child: str, relation: str, mutation: str = "") -> None:
    """Record that one blueprint came from another; E0721 unknown, E0720 relation, E0724 where it would be a
    cycle.
    """
    core.refuse_readonly()
    if relation not in RELATIONS:
        raise fail("E0720", f"relation {relation!r} is not one of {', '.join(RELATIONS)}")
    for blueprint_id in (parent, child):
        if rows.blueprint(core.index, blueprint_id) is None:
            raise fail("E0721", f"no blueprint {blueprint_id!r}", node=blueprint_id)
    with core.index.write():
        if parent == child or any(e.parent == child for e in ancestors(core, parent)):
            raise fail("E0724", f"{child} is an ancestor of {parent} already", node=child)
        data = {"child": child, "relation": relation, "mutation": mutation}
        seq = ledger.append(core.index, "lineage.edge", parent, data)
        rows.add_edge(core.index, parent, child, relation, mutation, seq)
    core.after_write()


def ancestors(core: Core, blueprint_id: str, depth: int = MAX_DEPTH) -> list[Edge]:
    """Edges upwards, nearest first."""
    return [Edge(*row) for row in rows.edges_from(core.index, blueprint_id, down=False, depth=depth)]


def descendants(core: Core, blueprint_id: str, depth: int = MAX_DEPTH) -> list[Edge]:
    """Edges downwards, nearest first."""
    return [Edge(*row) for row in rows.edges_from(core.index, blueprint_id, down=True, depth=depth)]


def tree_lines(core: Core, blueprint_id: str, depth: int = MAX_DEPTH) -> list[str]:
    """Descendants as an indented text; a blueprint reached twice is shown once and then named."""
    below: dict[str, list[Edge]] = {}
    for edge in descendants(core, blueprint_id, depth):
        below.setdefault(edge.parent, []).append(edge)
    return list(_lines(core, blueprint_id, "", below, set()))


def _lines(core: Core, at: str, indent: str, below: dict[str, list[Edge]], seen: set[str]) -> Iterator[str]:
    record = rows.blueprint(core.index, at)
    again = " (above)" if at in seen else ""
    yield f"{indent}{at[:12]} {record.name if record else '?'}{again}"
    if at in seen:
        return
    seen.add(at)
    for edge in below.get(at, ()):
        yield from _lines(core, edge.child, indent + "  ", below, seen)


def diff(core: Core, one: str, two: str) -> list[str]:
    """Lines `- path: value` and `+ path: value` for every leaf in which two blueprint texts differ."""
    a, b = (_leaves(core, blueprint_id) for blueprint_id in (one, two))
    lines = []
    for path in sorted(a.keys() | b.keys()):
        if a.get(path) == b.get(path):
            continue
        lines += [f"- {path}: {a[path]}"] if path in a else []
        lines += [f"+ {path}: {b[path]}"] if path in b else []
    return lines


def _leaves(core: Core, blueprint_id: str) -> dict[str, str]:
    record = rows.blueprint(core.index, blueprint_id)
    if record is None:
        raise fail("E0721", f"no blueprint {blueprint_id!r}", node=blueprint_id)
    return dict(_walk(json.loads(core.blobs.read(record.text_digest)), ""))


def _walk(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for key in value:
            yield from _walk(value[key], f"{path}.{key}" if path else key)
    elif isinstance(value, list) and value:
        for position, item in enumerate(value):
            yield from _walk(item, f"{path}[{_label(item, position)}]")
    else:
        yield path, json.dumps(value, ensure_ascii=False)


def _label(item: Any, position: int) -> str:
    """Nodes of a graph keep their name as their place, so that one inserted node is one difference."""
    name = (item.get("id") or item.get("name")) if isinstance(item, dict) else None
    return str(name) if isinstance(name, str) else str(position)


def picture(core: Core, blueprint_id: str, depth: int = 8) -> str:
    """Ancestors above, descendants below, as one self-contained SVG."""
    up, down = ancestors(core, blueprint_id, depth), descendants(core, blueprint_id, depth)
    level = {blueprint_id: 0}
    for edge in up:
        level.setdefault(edge.parent, -edge.distance)
    for edge in down:
        level.setdefault(edge.child, edge.distance)
    columns: dict[int, list[str]] = {}
    for name, row in level.items():
        columns.setdefault(row, []).append(name)
    top = min(columns)
    at = {
        n: (i * 180 + 90, (row - top) * 80 + 30)
        for row, names in columns.items()
        for i, n in enumerate(names)
    }
    parts = [_line(at[e.parent], at[e.child]) for e in (*up, *down)]
    parts += [_box(core, name, x, y, name == blueprint_id) for name, (x, y) in at.items()]
    width, height = max(x for x, _ in at.values()) + 90, max(y for _, y in at.values()) + 30
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif">'
    )
    return "\n".join([head, *parts, "</svg>", ""])


def _line(start: tuple[int, int], end: tuple[int, int]) -> str:
    return f'<line x1="{start[0]}" y1="{start[1] + 18}" x2="{end[0]}" y2="{end[1] - 18}" stroke="#667"/>'


def _box(core: Core, name: str, x: int, y: int, chosen: bool) -> str:
    record = rows.blueprint(core.index, name)
    label = html.escape(record.name[:22] if record else "?")
    fill = "#dde6ff" if chosen else "#f4f4f6"
    return (
        f'<rect x="{x - 80}" y="{y - 18}" width="160" height="36" rx="5" fill="{fill}" stroke="#667"/>'
        f'<text x="{x}" y="{y - 2}" text-anchor="middle" font-size="12">{label}</text>'
        f'<text x="{x}" y="{y + 12}" text-anchor="middle" font-size="10" fill="#555">{name[:12]}</text>'
    )
