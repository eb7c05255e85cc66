"""Every library call of the language on the samples of its operator: what the step of a plan gives, on the
processor and (with a card) on the card, against the reference of the operator in float64.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from esper_ir.infer import bind
from esper_ir.opdef import Opaque, OpDef, Sample
from esper_ir.oracle import index_limits
from esper_ir.reference import evaluate
from esper_ir.registry import OPS
from forge.templates.extern import _scalars
from runtime.calls import CALLS
from runtime.externs import prepare
from tests.esper_ir.cases import values_of, whole_graph

CASES = [
    pytest.param(op, s, id=f"{op.name}-{i}")
    for op in OPS.values()
    if isinstance(op.lowering, Opaque)
    for i, s in enumerate(op.samples)
]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
UNORDERED = ("scatter",)
"""Of equal positions any one stays: samples have some."""


def drawn(op: OpDef, sample: Sample) -> dict[str, torch.Tensor]:
    """Values of the sample, positions inside what they point into; those of a pooling are the ones it gives
    (torch's kernels for cards look nowhere else).
    """
    graph = whole_graph(op, sample)
    values = values_of(graph, sample)
    for name, limit in index_limits(graph).items():
        values[name] = values[name].clamp(0, max(limit.value({}) - 1, 0))
    if op.name.startswith("max_pool") and op.name.endswith("_grad"):
        (node,) = graph.nodes
        _, x, places = (values[r] for r in node.tensors)
        pool = prepare(op.name.removesuffix("_grad"), bind(_scalars(node), {}), 1)
        made = pool([x], [torch.empty_like(places)])
        assert made is not None and made[1].shape == places.shape
        values[node.tensors[2]] = made[1].to(places.dtype)
    return values


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("op", "sample"), CASES)
def test_call_gives_what_the_operator_means(op: OpDef, sample: Sample, device: str) -> None:
    graph = whole_graph(op, sample)
    (node,) = graph.nodes
    values = drawn(op, sample)
    eager, wide = (evaluate(graph, values, precision=p) for p in ("declared", "float64"))
    inputs = [values[r].to(device) for r in node.tensors]
    outs = [torch.empty_like(eager[n], device=device) for n in graph.outputs]
    attrs: dict[str, Any] = bind(_scalars(node), {})
    assert isinstance(op.lowering, Opaque)
    made = prepare(op.lowering.template, attrs, len(inputs))(inputs, outs)
    for found, name in zip(made if made is not None else outs, graph.outputs, strict=False):
        want, kind = wide[name], eager[name].dtype
        assert found.shape == want.shape and found.device.type == device
        if op.name in UNORDERED and device == "cuda":
            continue
        if not kind.is_floating_point:
            assert torch.equal(found.cpu(), want)
            continue
        slack = 16 * torch.finfo(kind).eps * op.tolerance.factor
        scale = max(float(want.abs().max()) if want.numel() else 0.0, 1.0)
        torch.testing.assert_close(found.cpu().double(), want, rtol=slack, atol=slack * scale)


def test_every_call_belongs_to_an_operator() -> None:
    used = {op.lowering.template for op in OPS.values() if isinstance(op.lowering, Opaque)}
    assert used == set(CALLS)
