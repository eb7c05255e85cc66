"""Whole compilations on CPU tensors: the plans of a blueprint run step by step, beside what the graph means.

Backends: "plans" runs kernel plans in plain torch, "c" the C made from them. Library calls are the runtime's
own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from esper_ir.expand import expand
from esper_ir.graph import Blueprint, Node
from esper_ir.ops.rules import torch_dtype
from esper_ir.oracle import index_limits
from esper_ir.reference import evaluate, evaluate_all
from esper_ir.types import DType
from esper_ir.verify import typed
from forge.lower import PhaseLowering
from forge.pipelines import FAST, Work
from forge.service import front
from library.launch import Bound, Buffer, ExternStep, KernelStep, Plan
from library.launch import evaluate as size_value
from runtime.externs import prepare, strided
from tests.forge.native import call, library
from tests.forge.plan_interpreter import run_plan

Tensors = dict[str, torch.Tensor]
Sizes = Mapping[str, int]


class Machine:
    """Executes plans of one work. Fresh memory holds NaN (or 1): what no kernel writes shows."""

    every_mask = True

    def __init__(self, work: Work, backend: str = "plans") -> None:
        self.work = work
        self.kernels = {s.plan.name: s.plan for s in work.kernels.by_key.values()}
        self.code = library(tuple(self.kernels.values())) if backend == "c" and self.kernels else None

    def run(self, plan: Plan, given: Tensors, dims: Sizes) -> list[torch.Tensor]:
        """Memory of every buffer after the last step. Inputs are watched: no step may write them."""
        memory = [self.memory(b, given, dims) for b in plan.buffers]
        before = {i: memory[i].clone() for i, b in enumerate(plan.buffers) if b.name in given}
        for step in plan.steps:
            if isinstance(step, KernelStep):
                self.launch(step, memory, dims)
            else:
                extern(step, memory, dims)
        for i, value in before.items():
            assert torch.equal(memory[i].nan_to_num(7.0), value.nan_to_num(7.0)), (
                f"{plan.buffers[i].name} written"
            )
        return memory

    def memory(self, buffer: Buffer, given: Tensors, dims: Sizes) -> torch.Tensor:
        shape = [size_value(s, dims) for s in buffer.shape]
        dtype = getattr(torch, buffer.dtype)
        if buffer.source in ("input", "saved", "cotangent"):
            found = given[buffer.name]
            assert list(found.shape) == shape and found.dtype is dtype, (buffer, found.shape, found.dtype)
            return found.contiguous()
        fresh = torch.empty(shape, dtype=dtype)
        return fresh.fill_(math.nan) if dtype.is_floating_point else fresh.fill_(1)

    def launch(self, step: KernelStep, memory: list[torch.Tensor], dims: Sizes) -> None:
        plan = self.kernels[step.variants[-1].kernel]
        numbers = [a.value for a in step.args if a.kind == "buffer"]
        buffers = {b: memory[n] for b, n in zip(plan.buffers, numbers, strict=True) if isinstance(n, int)}
        sizes = [size_value(a.value, dims) for a in step.args if a.kind == "size"]
        bound = dict(zip(plan.sizes, sizes, strict=True))
        if self.code is not None:
            call(self.code, plan, buffers, bound)
        else:
            run_plan(plan, buffers, bound)


def extern(step: ExternStep, memory: list[torch.Tensor], dims: Sizes) -> None:
    inputs, outs = (
        [strided(v, tuple(memory[v.buffer].shape), dims).of(memory[v.buffer]) for v in side]
        for side in (step.inputs, step.outs)
    )
    made = prepare(step.op, dict(step.attrs), len(inputs))(inputs, outs)
    for value, out in zip(made or (), outs, strict=False):
        out.copy_(value)


def inside(bucket: tuple[Bound, ...], dims: Sizes) -> bool:
    return all(b.low <= dims[b.dim] <= b.high for b in bucket)


def pick(work: Work, phase: str, dims: Sizes, wanted: frozenset[str] = frozenset()) -> PhaseLowering:
    """The first plan that the runtime would choose."""
    return next(
        low
        for low in work.lowerings
        if low.phase.name == phase and inside(low.plan.bucket, dims) and wanted <= set(low.plan.wanted)
    )


def draw(blueprint: Blueprint, dims: Sizes, seed: int = 0) -> Tensors:
    """A value per leaf; away from zero and below two in size, so that logarithms and quotients stay tame."""
    gen = torch.Generator().manual_seed(seed)
    out = {}
    limits = index_limits(typed(blueprint))
    for leaf in blueprint.leaves:
        shape = [s.value(dims) for s in leaf.type.shape]
        out[leaf.name] = random(shape, leaf.type.dtype, gen)
        if leaf.name in limits:
            out[leaf.name] = torch.randint(limits[leaf.name].value(dims), shape, generator=gen)
    return out


def random(shape: list[int], dtype: DType, gen: torch.Generator) -> torch.Tensor:
    if dtype is DType.bool:
        return torch.randint(0, 2, shape, generator=gen).bool()
    if not dtype.is_floating:
        return torch.randint(-3 if dtype is not DType.uint8 else 0, 5, shape, generator=gen).to(
            torch_dtype(dtype)
        )
    return (torch.rand(shape, generator=gen) * 1.5 + 0.25).to(torch_dtype(dtype))


def expected(
    blueprint: Blueprint, values: Tensors, cotangents: Tensors, wanted: tuple[str, ...], wide: bool
) -> Tensors:
    """Outputs, and gradients as "grad:<leaf>", by torch's autograd over the graph's meaning."""
    held = {k: v.double().clone() if wide and v.is_floating_point() else v.clone() for k, v in values.items()}
    for name in wanted:
        held[name] = held[name].requires_grad_()
    found = evaluate(blueprint, held, precision="float64" if wide else "declared")
    out = {name: found[name].detach() for name in found}
    roots = [n for n in found if found[n].requires_grad]
    if wanted and roots:
        given = [cotangents[n].to(found[n].dtype) for n in roots]
        made = torch.autograd.grad(
            [found[n] for n in roots], [held[n] for n in wanted], given, allow_unused=True
        )
        out |= {f"grad:{n}": g for n, g in zip(wanted, made, strict=True) if g is not None}
    return out


def ours(work: Work, machine: Machine, values: Tensors, cotangents: Tensors, dims: Sizes) -> Tensors:
    """The same from the plans; inference and forward must agree to the bit."""
    names = work.blueprint.outputs
    plain = pick(work, "inference", dims)
    memory = machine.run(plain.plan, values, dims)
    out = {n: memory[i] for n, i in zip(names, plain.plan.outputs, strict=True)}
    if work.joint is None:
        return out
    forward = pick(work, "forward", dims)
    memory = machine.run(forward.plan, values, dims)
    for name, number in zip(names, forward.plan.outputs, strict=True):
        assert torch.equal(memory[number].nan_to_num(7.0), out[name].nan_to_num(7.0)), (
            f"{name} differs when saving"
        )
    saved = {n: memory[i] for n, i in zip(forward.phase.saved, forward.plan.saved, strict=True)}
    given = saved | {f"grad:{n}": c for n, c in cotangents.items()}
    masks = [x for x in work.lowerings if x.phase.name == "backward" and inside(x.plan.bucket, dims)]
    masks.sort(key=lambda x: len(x.phase.wanted))
    for low in masks if machine.every_mask else masks[-1:]:
        memory = machine.run(low.plan, given, dims)
        for name, number in zip(low.plan.wanted, low.plan.gradients, strict=True):
            before = out.setdefault(f"grad:{name}", memory[number])
            assert close(memory[number], before.double(), before), f"gradient of {name} depends on the mask"
    return out


def rms(x: torch.Tensor) -> float:
    return float(x.detach().double().pow(2).mean().sqrt()) if x.numel() else 0.0


UNIT, SHAKES = 2.0**-24, 8
SMALL = 0.05  # cotangents are of the size of 1; what cancels to nothing keeps roundings of its parts


def close(found: torch.Tensor, wide: torch.Tensor, eager: torch.Tensor) -> bool:
    """No further from float64 than a few times eager, or a few roundings of the result's type."""
    if not found.is_floating_point():
        return torch.equal(found, eager)
    if found.dtype is not eager.dtype or found.shape != eager.shape or not bool(found.isfinite().all()):
        return bool(torch.equal(found.nan_to_num(7.0), eager.nan_to_num(7.0)))
    slack = 4 * torch.finfo(found.dtype).eps * (rms(wide) + SMALL)
    return rms(found.double() - wide) <= 4 * rms(eager.double() - wide) + slack


def flowing(blueprint: Blueprint, values: Tensors) -> Tensors:
    """A cotangent per floating output."""
    gen = torch.Generator().manual_seed(1)
    found = evaluate(blueprint, values)
    floating = {n: v for n, v in found.items() if v.is_floating_point()}
    return {n: torch.randn(v.shape, generator=gen).to(v.dtype) for n, v in floating.items()}


def known(work: Work, values: Tensors, cotangents: Tensors, name: str) -> float:
    """How far a rounding to float32 of every value on the way moves a result, in float64: the largest root
    mean square of a few draws. What cancels to almost nothing is known no better (docs/bounds.md)."""
    assert work.joint is not None
    joint, gen = work.joint, torch.Generator().manual_seed(2)
    graph, given = (
        expand(joint.graph),
        {n: t.double() if t.is_floating_point() else t for n, t in values.items()},
    )
    given |= {joint.cotangents[n]: c.double() for n, c in cotangents.items()}
    wanted = joint.gradients[name.removeprefix("grad:")] if name.startswith("grad:") else name
    assert wanted is not None

    def rounded(node: Node, made: tuple[torch.Tensor, ...], sizes: Sizes) -> tuple[torch.Tensor, ...]:
        noise = [1 + UNIT * (2 * torch.rand(t.shape, generator=gen).double() - 1) for t in made]
        return tuple(t * n if t.is_floating_point() else t for t, n in zip(made, noise, strict=True))

    plain = evaluate_all(graph, given, precision="float64")[wanted]
    draws = (evaluate_all(graph, given, precision="float64", after=rounded)[wanted] for _ in range(SHAKES))
    return max(rms(draw - plain) for draw in draws)


def compared(
    work: Work, machine: Machine, dims: Sizes, given: Tensors | None = None
) -> tuple[Tensors, Tensors, Tensors]:
    """Results of the plans, of float64 and of eager, on these values or on random ones."""
    blueprint = work.blueprint
    values = draw(blueprint, dims) if given is None else given
    cotangents = flowing(blueprint, values)
    wanted = tuple(work.joint.gradients) if work.joint else ()
    wide = expected(blueprint, values, cotangents, wanted, True)
    eager = expected(blueprint, values, cotangents, wanted, False)
    found = ours(work, machine, values, cotangents, dims)
    for name in set(found) - set(eager):  # autograd has none where nothing depends on a value: zero
        assert name.startswith("grad:") and not found[name].any(), name
        wide[name] = eager[name] = torch.zeros_like(found[name])
    assert set(found) == set(eager), (set(found), set(eager))
    return found, wide, eager


def check(
    blueprint: Blueprint, dims: Sizes | None = None, target: str = "h100", backend: str = "plans",
    aim: str = "speed",
) -> Work:  # fmt: skip
    """Compile up to the plans, run them, compare everything; the work, for looking at its groups."""
    return checked(front(blueprint, target, FAST.name, aim), dims, backend)


def checked(work: Work, dims: Sizes | None = None, backend: str = "plans") -> Work:
    """The same for what is compiled so far."""
    blueprint = work.blueprint
    found, wide, eager = compared(work, Machine(work, backend), dict(dims or {}))
    assert found, "nothing was compared"
    for name, value in found.items():
        if close(value, wide[name], eager[name]):
            continue
        off, values = rms(value.double() - wide[name].double()), draw(blueprint, dict(dims or {}))
        moved = known(work, values, flowing(blueprint, values), name) if work.joint else 0.0
        assert off <= 2 * moved, (name, off, moved, rms(wide[name]), list(value.shape))
    return work
