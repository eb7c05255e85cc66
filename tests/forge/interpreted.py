"""Run the plans of a compilation through Triton's interpreter, step by step, on CPU tensors.

Start the process with TRITON_INTERPRET=1. Used as a program: reads a case (JSON) and prints the comparison.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import esper_ir.text as text
from esper_ir.eager import EagerTwin
from forge.emit.triton import emit
from forge.lower import PhaseLowering
from forge.pipelines import FAST
from forge.service import front
from forge.work import Work
from library.launch import ExternStep, KernelStep, Plan, View, evaluate


def load_kernel(source: str, name: str) -> Any:
    path = Path(tempfile.mkdtemp()) / f"{name}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


class Machine:
    """Executes plans of one work, general variants (`variant` "g") or aligned ones."""

    def __init__(self, work: Work, variant: str) -> None:
        plans = {s.plan.name: s.plan for s in work.kernels.by_key.values()}
        self.kernels = {
            name: (plan, load_kernel(emit(plan, interpreted=True), name)) for name, plan in plans.items()
        }
        self.variant = variant

    def run(self, plan: Plan, given: dict[str, torch.Tensor], dims: dict[str, int]) -> list[torch.Tensor]:
        memory: list[torch.Tensor] = []
        for buffer in plan.buffers:
            if buffer.source in ("input", "saved", "cotangent"):
                memory.append(given[buffer.name])
                continue
            shape = [evaluate(s, dims) for s in buffer.shape]
            fresh = torch.empty(shape, dtype=getattr(torch, buffer.dtype))
            memory.append(fresh.fill_(float("nan")) if fresh.is_floating_point() else fresh.fill_(1))
        for step in plan.steps:
            if isinstance(step, KernelStep):
                self.launch(step, memory, dims)
            else:
                call(step, memory, dims)
        return memory

    def launch(self, step: KernelStep, memory: list[torch.Tensor], dims: dict[str, int]) -> None:
        name = next(
            (v.kernel for v in step.variants if v.kernel.endswith(self.variant)), step.variants[-1].kernel
        )
        args = [memory[a.value] if a.kind == "buffer" else evaluate(a.value, dims) for a in step.args]
        self.kernels[name][1][tuple(evaluate(g, dims) for g in step.grid)](*args)


def view(v: View, memory: list[torch.Tensor], dims: dict[str, int]) -> torch.Tensor:
    out = memory[v.buffer].reshape([evaluate(s, dims) for s in v.shape]) if v.shape else memory[v.buffer]
    return out.permute(v.permute) if v.permute else out


def call(step: ExternStep, memory: list[torch.Tensor], dims: dict[str, int]) -> None:
    a, b = (view(v, memory, dims) for v in step.inputs)
    view(step.out, memory, dims).copy_(torch.matmul(a, b))


def pick(lowerings: tuple[PhaseLowering, ...], phase: str, dims: dict[str, int]) -> PhaseLowering:
    fit = [
        x
        for x in lowerings
        if x.phase.name == phase and all(b.low <= dims[b.dim] <= b.high for b in x.plan.bucket)
    ]
    return max(fit, key=lambda x: len(x.phase.wanted))


def compare(path: Path, dims: dict[str, int], target: str, variant: str) -> dict[str, float]:
    """Largest relative RMS difference of outputs and gradients against the eager twin."""
    blueprint = text.load(path)
    work = front(blueprint, target, FAST.name)
    machine = Machine(work, variant)
    torch.manual_seed(0)
    twin = EagerTwin(blueprint)
    values: dict[str, torch.Tensor] = {}
    for leaf in blueprint.leaves:
        shape = [s.value(dims) for s in leaf.type.shape]
        values[leaf.name] = torch.randn(shape).to(getattr(torch, leaf.type.dtype.value))
    with torch.no_grad():
        for name, parameter in twin.named_parameters():
            values[name] = parameter.copy_(values[name] * 0.3).clone()
    inputs = [values[v.name].clone().requires_grad_() for v in blueprint.of_kind("input")]
    result = twin(*inputs)
    cotangent = torch.randn(result.shape).to(result.dtype)
    leaves = [*inputs, *twin.parameters()]
    names = [v.name for v in blueprint.of_kind("input")] + [n for n, _ in twin.named_parameters()]
    wanted = dict(zip(names, torch.autograd.grad(result, leaves, cotangent), strict=True))
    forward = pick(work.lowerings, "forward", dims)
    memory = machine.run(forward.plan, values, dims)
    out = {"y": error(memory[forward.plan.outputs[0]], result.detach())}
    backward = pick(work.lowerings, "backward", dims)
    saved = {n: memory[i] for n, i in zip(forward.phase.saved, forward.plan.saved, strict=True)}
    given = {**saved, f"grad:{blueprint.outputs[0]}": cotangent}
    memory = machine.run(backward.plan, given, dims)
    for name, number in zip(backward.plan.wanted, backward.plan.gradients, strict=True):
        out[name] = error(memory[number], wanted[name])
    return out


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert found.shape == expected.shape and found.dtype == expected.dtype, (found.shape, expected.shape)
    a, b = found.double(), expected.double()
    return float(((a - b).pow(2).mean().sqrt() / b.pow(2).mean().sqrt().clamp_min(1e-30)).nan_to_num(1e9))


def small(path: Path, **sizes: int) -> Path:
    """The blueprint with some static sizes replaced, so that the interpreter is quick."""
    data = json.loads(path.read_text())
    shapes = [v for part in ("inputs", "params") for v in data.get(part, {}).values()]
    for leaf in shapes:
        leaf["shape"] = [sizes.get(str(s), s) for s in leaf["shape"]]
    out = Path(tempfile.mkdtemp()) / path.name
    out.write_text(json.dumps(data))
    return out


if __name__ == "__main__":
    case = json.loads(sys.argv[1])
    file = small(Path(case["path"]), **case.get("sizes", {}))
    print(json.dumps(compare(file, case["dims"], case.get("target", "h100"), case.get("variant", "g"))))
