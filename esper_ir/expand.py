"""Composites written out in primitives."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from esper_ir.graph import Graph
from esper_ir.graphbuilder import GraphBuilder, replay
from esper_ir.infer import infer
from esper_ir.opdef import Composite, Operand, Val
from esper_ir.registry import lookup
from esper_ir.types import declared


def expand(graph: Graph, keep: Container[str] = ()) -> Graph:
    """Replace every composite operator not in `keep` by its primitives, until none is left.

    The names of the graph's outputs stay; equal primitives become one node, so that what a gradient
    recomputes is shared with the forward pass. Nodes that nothing reads are dropped.
    """
    builder, values = replay(graph)
    for node in graph.nodes:
        operands = [values[r] if isinstance(r, str) else r for r in node.inputs]
        op = lookup(node.op)
        if isinstance(op.lowering, Composite) and node.op not in keep:
            builder.scope = node.id
            made = tuple(op.lowering.expand(_Expanding(builder, keep), operands, dict(node.attrs)))
            builder.scope = ""
        else:
            made = builder.emit_named(node.id, node.op, operands, dict(node.attrs))
        values.update(zip(node.outputs, made, strict=True))
    return builder.graph({name: values[name] for name in graph.outputs})


class _Expanding:
    """Emit that writes out composites met inside the expansion of another."""

    def __init__(self, builder: GraphBuilder, keep: Container[str]) -> None:
        self.builder, self.keep = builder, keep

    def __call__(self, op: str, *operands: Operand, **attrs: Any) -> Val:
        return self.many(op, *operands, **attrs)[0]

    def many(self, op: str, *operands: Operand, **attrs: Any) -> tuple[Val, ...]:
        record = lookup(op)
        if not isinstance(record.lowering, Composite) or op in self.keep:
            return self.builder.many(op, *operands, **attrs)
        types = [o.type if isinstance(o, Val) else o for o in operands]
        with declared(self.builder.dims):
            resolved, _ = infer(record, types, attrs)
        return tuple(record.lowering.expand(self, operands, dict(resolved)))
