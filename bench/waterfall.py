"""What each step of an artifact's plans costs: kernel or library call, bytes, operations, the floor of both,
time on its own, and the share of that floor which it reaches."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bench import flops
from bench.measure import Effort, repeated
from library.launch import ExternStep, KernelStep, Plan, View, evaluate
from runtime import timing
from runtime.binding import Block
from runtime.executor import Dims, Program


@dataclass(frozen=True)
class Plans:
    """The plans that a call with these sizes and gradients runs."""

    program: Program
    dims: Dims
    wanted: tuple[str, ...]

    def plan(self, phase: str) -> Plan:
        return self.program.plan_for(phase, self.dims, self.wanted if phase == "backward" else ())


def plans(block: Block, args: list[Tensor]) -> Plans:
    program = block.program
    specs = program.interface.inputs
    wanted = [s.name for s, t in zip(specs, args, strict=True) if t.requires_grad]
    kept = tuple(n for n in wanted if n in program.interface.differentiable)
    return Plans(program, program.dims_of([t.shape for t in args]), kept)


def counts(found: Plans) -> dict[str, dict[str, int]]:
    """Kernels and library calls per phase of a measurement: "f" without gradients, "fb" forward and
    backward."""
    phases = {"f": ("inference",), "fb": ("forward", "backward")}
    out = {}
    for name, needed in phases.items():
        steps = [s for phase in needed for s in found.plan(phase).steps]
        externs = sum(isinstance(s, ExternStep) for s in steps)
        out[name] = {"kernels": len(steps) - externs, "externs": externs}
    return out


def measure(
    block: Block,
    args: list[Tensor],
    cotangent: Tensor,
    effort: Effort,
    rates: Mapping[str, float],
    known: Mapping[str, int],
) -> list[dict[str, Any]]:
    """A row per step of inference, forward and backward, each step alone with a cold cache. Their sum is
    above the time of the whole, where a step finds in the cache what the one before left there.

    `rates`: the ceilings of the machine; `known`: operations of kernels, by "phase group".
    """
    found = plans(block, args)
    program, rows = found.program, []
    with torch.no_grad(), program.current():
        feeds = [t.detach() for t in args]
        forward = program.run(found.plan("forward"), feeds)
        saved = forward[len(program.interface.outputs) :]
        for phase in ("inference", "forward", "backward"):
            given = [*saved, cotangent.contiguous()] if phase == "backward" else feeds
            rows += _phase(found, phase, given, effort, rates, known)
    return rows


def _phase(
    found: Plans,
    phase: str,
    feeds: list[Tensor],
    effort: Effort,
    rates: Mapping[str, float],
    known: Mapping[str, int],
) -> list[dict[str, Any]]:
    plan, program = found.plan(phase), found.program
    sizes = dict(zip(program.dim_names, found.dims, strict=True))
    work: dict[str, Callable[[], Any]] = {"all": _runner(program, plan, found.dims, feeds)}
    for at, step in enumerate(plan.steps):
        alone = replace(plan, steps=(step,))
        work[str(at)] = _runner(program, alone, found.dims, feeds)
    timed = _times(work, effort, program.device)
    counted = operations(plan, sizes, {n: count for n, count in known.items() if n.startswith(f"{phase} ")})
    rows = []
    for name in work:
        at = None if name == "all" else int(name)
        steps, done = (plan.steps, sum(counted)) if at is None else ((plan.steps[at],), counted[at])
        moved, ms = least_bytes(plan, steps, sizes), timed[name] / 1e3
        row = {"phase": phase, "step": "all" if at is None else steps[0].group, **_kind(steps, at)}
        rows.append({**row, "bytes": moved, "flops": done, **bounded(moved, done, ms, rates)})
    return rows


def _kind(steps: tuple[KernelStep | ExternStep, ...], at: int | None) -> dict[str, str]:
    if at is None:
        return {"kind": ""}
    step = steps[0]
    return {"kind": "extern", "op": step.op} if isinstance(step, ExternStep) else {"kind": "kernel"}


def bounded(moved: int, done: int, ms: float, rates: Mapping[str, float]) -> dict[str, Any]:
    """The floor by bytes and by operations, and how much of it is reached."""
    copy = 1e3 * moved / (rates["copy_TBps"] * 1e12)
    rate = rates.get("bf16_TFLOPs", rates.get("fp32_TFLOPs", 0.0)) * 1e12
    compute = 1e3 * done / rate if rate else 0.0
    floor = max(copy, compute)
    return {
        "floor_ms": floor,
        "bound": "bytes" if copy >= compute else "flops",
        "ms": ms,
        "share": floor / ms if ms else None,
    }


def operations(plan: Plan, sizes: Mapping[str, int], known: Mapping[str, int]) -> list[int]:
    """Floating-point operations per step. Of several launches of one group the first multiplies."""
    found, seen = [], set[str]()
    for step in plan.steps:
        if isinstance(step, ExternStep):
            shapes = [[_shape(plan, view, sizes) for view in views] for views in (step.inputs, step.outs)]
            found.append(flops.of_call(step, *shapes))
            continue
        first = step.group not in seen
        found.append(known.get(f"{plan.phase} {step.group}", 0) if first else 0)
        seen.add(step.group)
    return found


def _shape(plan: Plan, view: View, sizes: Mapping[str, int]) -> list[int]:
    shape = [evaluate(s, sizes) for s in view.shape or plan.buffers[view.buffer].shape]
    return [shape[axis] for axis in view.permute] if view.permute else shape


def _runner(program: Program, plan: Plan, dims: Dims, feeds: list[Tensor]) -> Callable[[], Any]:
    ready = program.prepare(plan, dims)
    return lambda: ready(list(feeds))


def _times(work: Mapping[str, Callable[[], Any]], effort: Effort, device: torch.device) -> dict[str, float]:
    if device.type == "cuda":
        run = {name: timing.captured(fn)[0] for name, fn in work.items()}
        once = timing.device_times(run, rounds=1, graph=False)
        effort = effort.within(sum(t.median for t in once.values()) / 1e3 / len(once))
        measure_once = functools.partial(timing.device_times, run, rounds=effort.rounds, graph=False)
    else:
        measure_once = functools.partial(timing.cpu_times, work, rounds=effort.rounds)
    return {name: t.median for name, t in repeated(measure_once, effort.repeats)[0].items()}


def least_bytes(plan: Plan, steps: tuple[KernelStep | ExternStep, ...], sizes: Mapping[str, int]) -> int:
    """Every buffer that the steps touch once; memory that stays inside the steps does not count unless it is
    one step."""
    touched: dict[int, int] = {}
    for step in steps:
        for number in set(_buffers(step)):
            touched[number] = touched.get(number, 0) + 1
    inner = {n for n in touched if plan.buffers[n].source in ("temp", "zeroed")} if len(steps) > 1 else set()
    return sum(_nbytes(plan, n, sizes) for n in touched if n not in inner)


def _buffers(step: KernelStep | ExternStep) -> list[int]:
    if isinstance(step, ExternStep):
        return [v.buffer for v in (*step.inputs, *step.outs)]
    return [a.value for a in step.args if a.kind == "buffer" and isinstance(a.value, int)]


def _nbytes(plan: Plan, number: int, sizes: Mapping[str, int]) -> int:
    buffer = plan.buffers[number]
    item = torch.empty((), dtype=getattr(torch, buffer.dtype)).element_size()
    return math.prod(evaluate(s, sizes) for s in buffer.shape) * item
