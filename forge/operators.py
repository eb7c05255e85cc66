"""The operators of the language as a table: gradient, or the reason for none, and what each target runs."""

from __future__ import annotations

from typing import Any

from esper_ir.expand import expand
from esper_ir.graph import Graph
from esper_ir.graphbuilder import GraphBuilder
from esper_ir.opdef import (
    ByExpansion,
    Composite,
    Contraction,
    Lookup,
    NotDifferentiable,
    Opaque,
    OpDef,
    Operand,
    Scan,
)
from esper_ir.registry import OPS
from esper_ir.types import TensorType
from forge.target import Target, targets


def rows() -> list[dict[str, Any]]:
    """One row per operator, by name. `gradient`: "rule" (its own), "expansion" (of its primitives) or null
    with a `reason`; `lowering`: target -> what runs there.
    """
    known = sorted(targets().items())
    return [_row(name, op, known) for name, op in sorted(OPS.items())]


def _row(name: str, op: OpDef, known: list[tuple[str, Target]]) -> dict[str, Any]:
    none = isinstance(op.vjp, NotDifferentiable)
    gradient = None if none else "expansion" if isinstance(op.vjp, ByExpansion) else "rule"
    parts = primitives(op)
    return {
        "op": name,
        "kind": type(op.lowering).__name__.lower(),
        "gradient": gradient,
        "reason": op.vjp.reason if isinstance(op.vjp, NotDifferentiable) else None,
        "lowering": {label: _lowering(parts, target) for label, target in known},
        "primitives": list(parts),
        "doc": op.doc,
    }


def primitives(op: OpDef) -> tuple[str, ...]:
    """The operators that its first sample becomes."""
    if not isinstance(op.lowering, Composite):
        return (op.name,)
    return tuple(sorted({node.op for node in expand(_first(op))}))


def _first(op: OpDef) -> Graph:
    sample = op.samples[0]
    types = {f"a{i}": t for i, t in enumerate(sample.operands) if isinstance(t, TensorType)}
    builder = GraphBuilder(types)
    given: list[Operand] = [
        builder.value(f"a{i}") if isinstance(t, TensorType) else t for i, t in enumerate(sample.operands)
    ]
    return builder.graph(builder.emit_named("y", op.name, given, sample.attrs))


def _lowering(parts: tuple[str, ...], target: Target) -> str:
    """What runs: kernel, product (our template or a library call, whichever is faster), call NAME."""
    found: dict[str, None] = {}
    for name in parts:
        low = OPS[name].lowering
        ours = isinstance(low, Lookup) or name == "embedding_grad"
        if isinstance(low, Scan) or (ours and target.kind != "cpu"):
            found["kernel"] = None
        elif isinstance(low, Opaque):
            found[f"call {low.template}"] = None
        elif isinstance(low, Contraction):
            found["product" if target.contractions == "template" else "call mm"] = None
        else:
            found["kernel"] = None
    return " + ".join(sorted(found, key=lambda f: (f != "kernel", f)))
