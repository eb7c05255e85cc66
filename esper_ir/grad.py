"""Reverse mode on the graph: a joint graph that computes the outputs and the gradients of chosen inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from esper_ir.diagnostics import EsperError
from esper_ir.expand import expand
from esper_ir.graph import Graph, Node
from esper_ir.graphbuilder import GraphBuilder, replay
from esper_ir.opdef import ByExpansion, NotDifferentiable, Val
from esper_ir.registry import OPS, lookup
from esper_ir.types import TensorType

NAMED = frozenset(name for name, op in OPS.items() if not isinstance(op.vjp, ByExpansion))
"""Operators that reverse mode sees whole."""


@dataclass(frozen=True)
class Joint:
    """Forward and backward in one graph.

    `graph.inputs`: those of the forward graph, then one cotangent per floating output, named "grad:<output>".
    `graph.outputs`: the forward outputs, then the distinct gradient values. `cotangents`: output -> cotangent
    input. `gradients`: wanted input -> value that holds its gradient (equal gradients share one value, which
    may be a cotangent itself), or None when it is identically zero.
    """

    graph: Graph
    cotangents: Mapping[str, str]
    gradients: Mapping[str, str | None]


def _dependent(graph: Graph, wanted: Sequence[str]) -> set[str]:
    """Floating values that depend on a wanted input, by ways on which nothing counts as a constant."""
    found = set(wanted)
    for node in graph.nodes:
        rule = lookup(node.op).vjp
        if isinstance(rule, NotDifferentiable) and rule.constant:
            continue
        if any(r in found for r in node.tensors):
            pairs = zip(node.outputs, node.types, strict=True)
            found.update(name for name, kind in pairs if kind.dtype.is_floating)
    return found


def _check(graph: Graph, wanted: Sequence[str]) -> None:
    for name in wanted:
        kind = graph.inputs.get(name)
        if kind is None:
            raise EsperError(
                "E0310", f"no input {name!r} to differentiate", hint=f"one of {', '.join(graph.inputs)}"
            )
        if not kind.dtype.is_floating:
            raise EsperError(
                "E0310", f"{name} is {kind}", node=name, hint="only floating inputs have gradients"
            )


class _Reverse:
    """One reverse sweep over a builder that holds the forward nodes."""

    def __init__(self, builder: GraphBuilder, values: dict[str, Val], dependent: set[str]) -> None:
        self.builder, self.values, self.dependent = builder, values, dependent
        self.cotangent: dict[str, Val] = {}

    def accumulate(self, name: str, part: Val | None) -> None:
        """Sum in the dtype of the value."""
        if part is None:
            return
        have = self.cotangent.get(name)
        self.cotangent[name] = part if have is None else self.builder("add", have, part)

    def visit(self, node: Node) -> None:
        given = [self.cotangent.get(name) for name in node.outputs]
        wanted = [isinstance(r, str) and r in self.dependent for r in node.inputs]
        if not any(wanted) or all(g is None for g in given):
            return
        rule = lookup(node.op).vjp
        assert not isinstance(rule, ByExpansion), f"{node.op} was not expanded"
        if isinstance(rule, NotDifferentiable):
            hint = "take its input out of `differentiable`, or keep it off the path"
            raise EsperError("E0401", f"{node.op} has no gradient: {rule.reason}", node=node.id, hint=hint)
        operands = [self.values[r] if isinstance(r, str) else r for r in node.inputs]
        outputs = [self.values[name] for name in node.outputs]
        self.builder.scope = f"d:{node.id}"
        parts = rule(self.builder, operands, outputs, given, dict(node.attrs), wanted)
        for ref, part, asked in zip(node.inputs, parts, wanted, strict=True):
            if asked and isinstance(ref, str):
                self._checked(node, ref, part)
        self.builder.scope = ""

    def _checked(self, node: Node, ref: str, part: Val | None) -> None:
        if part is not None and part.type != self.values[ref].type:
            raise AssertionError(f"{node.op}: cotangent {part.type} of operand {self.values[ref].type}")
        self.accumulate(ref, part)


def joint(graph: Graph, wanted: Sequence[str]) -> Joint:
    """The joint graph for the gradients of the inputs `wanted`.

    Cotangents and gradients have the type of the value they belong to; broadcasting is undone by sums. Raises
    E0310 for an input that is missing or not floating, E0401 when a path runs through an operator without a
    gradient.
    """
    _check(graph, wanted)
    graph = expand(graph, keep=NAMED)
    dependent = _dependent(graph, wanted)
    builder, values = replay(graph)
    types: Mapping[str, TensorType] = graph.types
    cotangents = {name: f"grad:{name}" for name in graph.outputs if types[name].dtype.is_floating}
    seeds = {name: builder.add_input(label, types[name]) for name, label in cotangents.items()}
    for node in graph.nodes:
        operands = [values[r] if isinstance(r, str) else r for r in node.inputs]
        made = builder.emit_named(node.id, node.op, operands, dict(node.attrs))
        values.update(zip(node.outputs, made, strict=True))
    sweep = _Reverse(builder, values, dependent)
    for name, seed in seeds.items():
        if name in dependent:
            sweep.accumulate(name, seed)
    for node in reversed(graph.nodes):
        sweep.visit(node)
    gradients = {name: sweep.cotangent.get(name) for name in wanted}
    outputs = {name: values[name] for name in graph.outputs}
    outputs |= {v.name: v for v in gradients.values() if v is not None}
    return Joint(builder.graph(outputs), cotangents, {n: v.name if v else None for n, v in gradients.items()})
