"""The class of a block: what its peers are chosen by. The dearest kind of work in it decides."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from esper_ir import text, verify
from esper_ir.expand import expand
from esper_ir.graph import Graph
from esper_ir.opdef import Contraction, Creation, Movement, Pointwise, Reduction, Scan
from esper_ir.registry import lookup
from library.manifest import blueprint_text

CLASSES = (
    "attention", "convolution", "product", "pooling", "scan", "lookup", "reduction", "pointwise", "movement",
)  # fmt: skip
"""Dearest first."""
_BY_NAME = (("attention", "attention"), ("conv", "convolution"), ("pool", "pooling"))
_BY_LOWERING = ((Contraction, "product"), (Scan, "scan"), (Reduction, "reduction"), (Pointwise, "pointwise"))


def of_manifest(manifest: Mapping[str, Any]) -> tuple[str, str]:
    """(class, dtype) of a container's blueprint; the dtype is that of the first floating input, else
    output."""
    graph = verify.typed(text.parse(blueprint_text(manifest)))
    types = [*graph.inputs.values(), *(graph.types[name] for name in graph.outputs)]
    floating = (t.dtype.value for t in types if t.dtype.is_floating)
    return of_graph(graph), next(floating, "int")


def of_graph(graph: Graph) -> str:
    """The first of CLASSES that one of its primitives belongs to."""
    found = {_class(node.op) for node in expand(graph).nodes}
    return next((name for name in CLASSES if name in found), "movement")


def _class(op: str) -> str:
    named = next((kind for word, kind in _BY_NAME if word in op), "")
    if named:
        return named
    lowering = lookup(op).lowering
    if isinstance(lowering, Movement | Creation) or op in ("cat", "pad"):
        return "movement"
    # What is left has a template of its own: gathers, sorts.
    return next((kind for type_, kind in _BY_LOWERING if isinstance(lowering, type_)), "lookup")
