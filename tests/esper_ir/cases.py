"""One-operator graphs and random values from the samples of the records."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from esper_ir.graph import Graph
from esper_ir.graphbuilder import GraphBuilder
from esper_ir.opdef import OpDef, Sample, Val
from esper_ir.registry import OPS
from esper_ir.types import DType, TensorType

CASES = [pytest.param(op, s, id=f"{op.name}-{i}") for op in OPS.values() for i, s in enumerate(op.samples)]


def graph_of(op: OpDef, sample: Sample) -> Graph:
    """The graph of one node `y` over inputs a0, a1, ...; its first output alone."""
    return whole_graph(op, sample, ("y",))


def whole_graph(op: OpDef, sample: Sample, wanted: tuple[str, ...] = ()) -> Graph:
    """The same with all outputs, or with these."""
    types = {f"a{i}": t for i, t in enumerate(sample.operands) if isinstance(t, TensorType)}
    builder = GraphBuilder(types)
    operands = [builder.value(f"a{i}") if f"a{i}" in types else t for i, t in enumerate(sample.operands)]
    outputs = builder.emit_named("y", op.name, operands, sample.attrs)
    return builder.graph([v for v in outputs if not wanted or v.name in wanted])


def random_tensor(kind: TensorType, sample: Sample, generator: torch.Generator) -> torch.Tensor:
    shape = [d.value({}) for d in kind.shape]
    dtype = getattr(torch, kind.dtype.value)
    if kind.dtype is DType.bool:
        return torch.randint(0, 2, shape, generator=generator).to(torch.bool)
    if not kind.dtype.is_floating:
        low, high = math.ceil(max(sample.low, -4)), int(sample.high) + 2
        return torch.randint(low, high, shape, generator=generator).to(dtype)
    unit = torch.rand(shape, generator=generator, dtype=torch.float64)
    return (unit * (sample.high - sample.low) + sample.low).to(dtype)


def values_of(graph: Graph, sample: Sample, seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {name: random_tensor(kind, sample, generator) for name, kind in graph.inputs.items()}


def outputs_of(graph: Graph) -> list[Val]:
    return [Val(name, graph.types[name]) for name in graph.outputs]
