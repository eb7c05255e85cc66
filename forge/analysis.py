"""Static analysis before compiling: patterns that are legal and usually a mistake. Warnings unless denied."""

from __future__ import annotations

from collections.abc import Iterator

from esper_ir.diagnostics import Diagnostic
from esper_ir.graph import Blueprint, Graph


def analyse(blueprint: Blueprint, graph: Graph) -> tuple[Diagnostic, ...]:
    """All findings, in the order of the checks."""
    return tuple(f for check in CHECKS for f in check(blueprint, graph))


def _dead_parameters(blueprint: Blueprint, graph: Graph) -> Iterator[Diagnostic]:
    reached = set(graph.outputs)
    for node in reversed(graph.nodes):
        if reached & set(node.outputs):
            reached |= set(node.tensors)
    for leaf in blueprint.of_kind("param"):
        if leaf.name not in reached:
            yield Diagnostic("E0501", "no output depends on this parameter", node=leaf.name, level="warning")


def _log_of_softmax(blueprint: Blueprint, graph: Graph) -> Iterator[Diagnostic]:
    for node in graph:
        made = graph.by_output.get(node.tensors[0]) if node.tensors else None
        if node.op == "log" and made is not None and made.op == "softmax":
            yield Diagnostic(
                "E0502", "log of softmax loses small probabilities", node=node.id, level="warning",
                hint="use log_softmax",
            )  # fmt: skip


def _long_half_accumulation(blueprint: Blueprint, graph: Graph) -> Iterator[Diagnostic]:
    for node in graph:
        if node.op == "cumsum" and node.types[0].dtype.itemsize == 2:
            yield Diagnostic(
                "E0503", "a running sum in 16 bits", node=node.id, level="warning", hint="cast first"
            )


CHECKS = (_dead_parameters, _log_of_softmax, _long_half_accumulation)
