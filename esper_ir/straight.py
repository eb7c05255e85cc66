"""A graph as one Python function: the same torch calls as the reference, in a straight line.

The reference walks nodes and looks up sizes by name, which a compiler of Python frames takes for new code at
every node. Here that is done once and written out, so that `torch.compile` sees nothing but torch calls.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from esper_ir.graph import Graph, Node
from esper_ir.lazy import fill, torch
from esper_ir.reference import accept, narrowed, unmoved
from esper_ir.registry import lookup
from esper_ir.types import Dim, DType

Run = Callable[..., tuple[Any, ...]]


def straight(graph: Graph) -> Run:
    """`run(*leaves)`: a tensor per input of the graph, in order; returns its outputs in order, as
    `reference.evaluate` with declared dtypes does. Raises EsperError E0402 when a tensor does not fit.

    Under `torch.compile` it is one graph, unless float32 products are set to be narrower: setting that right
    is a break before it.
    """
    fill()
    run = _Writer(graph).function()

    def held(*leaves: Any) -> tuple[Any, ...]:
        if narrowed():
            with unmoved(_device(leaves)):
                return run(*leaves)
        return run(*leaves)

    def call(*leaves: Any) -> tuple[Any, ...]:
        kind = _device(leaves).type
        if torch.is_autocast_enabled(kind):
            with torch.autocast(kind, enabled=False):
                return held(*leaves)
        return held(*leaves)

    return call


def _device(leaves: Sequence[Any]) -> Any:
    return leaves[0].device if leaves else torch.device("cpu")


class _Writer:
    """Source of one function. Names of the graph are numbered, never spelt: they may be anything."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._known: dict[str, Any] = {"torch": torch, "DType": DType}
        self._values = {name: f"v{i}" for i, name in enumerate(graph.inputs)}
        self._sizes: dict[str, str] = {}

    def function(self) -> Run:
        graph = self._graph

        def refuse(*leaves: Any) -> None:
            accept(graph.inputs, dict(zip(graph.inputs, leaves, strict=True)))

        self._known["refuse"] = refuse
        body = [*self._checks(), *[line for node in graph.nodes for line in self._call(node)]]
        body.append(f"return {_tuple(self._values[name] for name in graph.outputs)}")
        given = ", ".join(self._values[name] for name in graph.inputs)
        text = f"def run({given}):\n" + "".join(f"    {line}\n" for line in body)
        exec(compile(text, "<esper graph>", "exec"), self._known)
        return self._known["run"]

    def _checks(self) -> list[str]:
        """Sizes of the dims, and a call of `refuse`, which says what is wrong, where a leaf does not fit."""
        leaves = [(self._values[name], kind) for name, kind in self._graph.inputs.items()]
        refuse = f"refuse({', '.join(name for name, _ in leaves)})"
        kinds = [f"{v}.dim() != {t.rank} or {v}.dtype is not torch.{t.dtype.value}" for v, t in leaves]
        lines, sizes = [], []
        for name, kind in leaves:
            for at, dim in enumerate(kind.shape):
                symbol, size = str(dim), f"{name}.shape[{at}]"
                if dim == Dim.sym(symbol) and symbol not in self._sizes:
                    self._sizes[symbol] = f"s{len(self._sizes)}"
                    lines.append(f"{self._sizes[symbol]} = {size}")
                else:
                    sizes.append((size, dim))
        if any(not d.symbols() <= set(self._sizes) for _, d in sizes):
            return [refuse]
        wrong = [f"{size} != {self._size(dim)}" for size, dim in sizes]
        found = [f"if {' or '.join(kinds)}: {refuse}"] if kinds else []
        return [*found, *lines, *([f"if {' or '.join(wrong)}: {refuse}"] if wrong else [])]

    def _call(self, node: Node) -> list[str]:
        record = lookup(node.op)
        self._known[f"op_{node.op}"] = record.reference
        operands = [self._values[r] if isinstance(r, str) else self._literal(r) for r in node.inputs]
        attrs = ", ".join(f"{name!r}: {self._literal(value)}" for name, value in node.attrs)
        names = [f"v{len(self._values) + i}" for i in range(len(node.outputs))]
        self._values.update(zip(node.outputs, names, strict=True))
        lines = [f"{_tuple(names)} = op_{node.op}([{', '.join(operands)}], {{{attrs}}})"]
        if not node.tensors and self._graph.inputs:
            lines += [f"{name} = {name}.to(v0.device)" for name in names]
        return lines

    def _literal(self, value: Any) -> str:
        if isinstance(value, Dim):
            return self._size(value)
        if isinstance(value, DType):
            return f"DType.{value.name}"
        if isinstance(value, tuple):
            return _tuple(self._literal(e) for e in value)
        if isinstance(value, float) and not math.isfinite(value):
            return f"float({str(value)!r})"
        if value is None or isinstance(value, (bool, int, float, str)):
            return repr(value)
        raise TypeError(f"an attribute of type {type(value).__name__}")

    def _size(self, dim: Dim) -> str:
        parts = []
        for monomial, coefficient in dim.terms:
            atoms = [
                self._sizes[a] if isinstance(a, str) else f"(({self._size(a.numerator)}) // {a.divisor})"
                for a in monomial
            ]
            parts.append(" * ".join([*atoms, str(coefficient)] if coefficient != 1 or not atoms else atoms))
        return " + ".join(parts) or "0"


def _tuple(items: Iterable[str]) -> str:
    return f"({''.join(f'{item}, ' for item in items)})"
