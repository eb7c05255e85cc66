"""Which inputs hold positions, and the sizes that these lie below."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from esper_ir.graph import Graph
from esper_ir.registry import lookup
from esper_ir.types import Dim


def index_limits(graph: Graph) -> dict[str, Dim]:
    """Inputs that an operator takes positions from, as they are or moved about, and the size that they lie
    below: the least of several, where they can be compared.
    """
    found: dict[str, Dim] = {}
    made = {name: node for node in graph.nodes for name in node.outputs}
    for node in graph.nodes:
        operands = [graph.types[r] if isinstance(r, str) else r for r in node.inputs]
        for place, limit in lookup(node.op).indices.items():
            for name in _sources(node.inputs[place], graph, made):
                size: Dim = limit(operands, dict(node.attrs))
                kept: Dim = found.get(name, size)
                old, new = kept.static, size.static
                found[name] = size if old is not None and new is not None and new < old else kept
    return found


CARRIED: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys(
        "reshape flatten permute transpose movedim expand squeeze unsqueeze slice select narrow split chunk "
        "flip reverse roll repeat tile cast detach pad_border window diagonal".split(), (0,),
    ),
    **dict.fromkeys(("cat", "stack"), tuple(range(64))), "where": (1, 2),
}  # fmt: skip
"""Operators whose results are among the values of these operands."""


def _sources(value: Any, graph: Graph, made: Mapping[str, Any]) -> Iterator[str]:
    """Inputs whose values a value holds, unchanged."""
    stack, seen = [value], set()
    while stack:
        name = stack.pop()
        if not isinstance(name, str) or name in seen:
            continue
        seen.add(name)
        if name in graph.inputs:
            yield name
        elif name in made:
            node = made[name]
            stack += [node.inputs[i] for i in CARRIED.get(node.op, ()) if i < len(node.inputs)]
