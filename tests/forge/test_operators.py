"""Every operator, forward and backward: planned for a card and the CPU, and run as C beside its reference."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from esper_ir.builder import Builder
from esper_ir.graph import Blueprint
from esper_ir.opdef import NotDifferentiable, OpDef, Sample
from esper_ir.oracle import index_limits
from esper_ir.registry import OPS
from esper_ir.types import DType, TensorType
from esper_ir.verify import typed
from forge.emit.triton import emit
from forge.service import front
from forge.target import resolve
from forge.toolchain import request
from forge.work import Work
from runtime.sandbox import Limits, run_worker
from tests.esper_ir.cases import random_tensor
from tests.esper_ir.test_operators import FLOAT_CONSTANTS
from tests.forge.whole import Machine, close, compared

TARGETS = ("h100", "cpu")
FIRST = frozenset({"attention"})
"""Of their outputs only the first has a gradient."""


def blueprint(op: OpDef, samples: tuple[Sample, ...]) -> Blueprint:
    """One block that applies the operator to every sample."""
    b = Builder(op.name)
    made = []
    for i, sample in enumerate(samples):
        operands = [
            b.input(f"a{i}_{k}", t.dtype, t.shape) if isinstance(t, TensorType) else t
            for k, t in enumerate(sample.operands)
        ]
        outs = b.many(op.name, *operands, **sample.attrs)
        made += outs[:1] if op.name in FIRST else outs
    differentiable = [] if isinstance(op.vjp, NotDifferentiable) else None
    return b.build(*made, differentiable=differentiable)


def values(bp: Blueprint, samples: tuple[Sample, ...]) -> dict[str, torch.Tensor]:
    limits = index_limits(typed(bp))
    out = {}
    for leaf in bp.leaves:
        number = int(leaf.name[1:].split("_")[0])
        generator = torch.Generator().manual_seed(number)
        out[leaf.name] = random_tensor(leaf.type, samples[number], generator)
        if leaf.name in limits:
            size = limits[leaf.name].value({})
            shape = [d.value({}) for d in leaf.type.shape]
            low = max(int(samples[number].low), 0)
            out[leaf.name] = torch.randint(low, max(size, 1), shape, generator=generator).to(
                out[leaf.name].dtype
            )
    return out


def first(op: OpDef) -> tuple[Sample, ...]:
    return op.samples[:1]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", sorted(OPS))
def test_every_operator_is_planned(name: str, target: str) -> None:
    """Inference, forward and backward end in kernels or library calls; a differentiable operator has all
    three.
    """
    op = OPS[name]
    work = front(blueprint(op, first(op)), target)
    phases = {low.phase.name for low in work.lowerings}
    assert "inference" in phases and all(low.plan.outputs or low.plan.gradients for low in work.lowerings)
    floating = any(t.dtype.is_floating for t in first(op)[0].operands if isinstance(t, TensorType))
    if floating and not isinstance(op.vjp, NotDifferentiable) and name != "detach":
        assert {"forward", "backward"} <= phases


def _kept(op: OpDef) -> tuple[Sample, ...]:
    """Without float64 where torch's own kernels use constants rounded to float32."""
    if op.name not in FLOAT_CONSTANTS:
        return op.samples
    return tuple(
        s
        for s in op.samples
        if DType.float64 not in {t.dtype for t in s.operands if isinstance(t, TensorType)}
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(OPS))
def test_every_operator_as_c(name: str) -> None:
    """All samples compiled for the CPU and run, forward and backward, against float64 and eager."""
    op = OPS[name]
    samples = _kept(op)
    bp = blueprint(op, samples)
    work = front(bp, "cpu")
    found, wide, eager = compared(work, Machine(work, "c"), {}, values(bp, samples))
    for label, value in found.items():
        assert close(value, wide[label], eager[label]), (label, value, wide[label])


def kernels(names: list[str]) -> Iterator[Any]:
    for name in names:
        work: Work = front(blueprint(OPS[name], first(OPS[name])), "h100")
        made = [s for s in work.kernels.by_key.values() if s.variant == "a"]
        for number, source in enumerate(made):
            assert "def " in emit(source.plan)
            yield replace(source, plan=replace(source.plan, name=f"{name}_{number}"))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(12))
def test_every_operator_for_a_card(part: int) -> None:
    """Triton takes the text of all their kernels, forward and backward, for sm_90a."""
    target = resolve("h100")
    sources = tuple(kernels(sorted(OPS)[part::12]))
    asked: dict[str, Any] = {**request(sources, target), "stage": "compile"}
    done = run_worker("forge.build_worker", asked, Limits(seconds=540.0))
    assert done["code"].keys() == {s.plan.name for s in sources}


def test_samples_hold_the_types_that_training_uses() -> None:
    """Of the differentiable operators all but gradients of others have a bfloat16 or float64 sample."""
    kinds = {
        name: {t.dtype for s in op.samples for t in s.operands if isinstance(t, TensorType)}
        for name, op in OPS.items()
    }
    assert sum(DType.bfloat16 in k for k in kinds.values()) > 150
