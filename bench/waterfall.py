"""What each step of an artifact's plans costs: bytes, floor, time on its own, share of the copy rate
reached."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bench.measure import Effort, repeated
from library.launch import ExternStep, KernelStep, Plan, evaluate
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
    block: Block, args: list[Tensor], cotangent: Tensor, effort: Effort, copy_bytes: float
) -> list[dict[str, Any]]:
    """A row per step of inference, forward and backward, each step alone with a cold cache. Their sum is
    above the time of the whole, where a step finds in the cache what the one before left there."""
    found = plans(block, args)
    program, rows = found.program, []
    with torch.no_grad(), program.current():
        feeds = [t.detach() for t in args]
        forward = program.run(found.plan("forward"), feeds)
        saved = forward[len(program.interface.outputs) :]
        for phase in ("inference", "forward", "backward"):
            given = [*saved, cotangent.contiguous()] if phase == "backward" else feeds
            rows += _phase(found, phase, given, effort, copy_bytes)
    return rows


def _phase(
    found: Plans, phase: str, feeds: list[Tensor], effort: Effort, copy_bytes: float
) -> list[dict[str, Any]]:
    plan, program = found.plan(phase), found.program
    sizes = dict(zip(program.dim_names, found.dims, strict=True))
    work: dict[str, Callable[[], Any]] = {"all": _runner(program, plan, found.dims, feeds)}
    for at, step in enumerate(plan.steps):
        alone = replace(plan, steps=(step,))
        work[str(at)] = _runner(program, alone, found.dims, feeds)
    timed = _times(work, effort, program.device)
    rows = []
    for name in work:
        steps = plan.steps if name == "all" else (plan.steps[int(name)],)
        moved = least_bytes(plan, steps, sizes)
        ms, floor = timed[name] / 1e3, 1e3 * moved / copy_bytes
        what = "all" if name == "all" else steps[0].group
        kind = "" if name == "all" else "extern" if isinstance(steps[0], ExternStep) else "kernel"
        row = {"phase": phase, "step": what, "kind": kind, "bytes": moved, "floor_ms": floor, "ms": ms}
        rows.append({**row, "share_of_copy": floor / ms if ms else None})
    return rows


def _runner(program: Program, plan: Plan, dims: Dims, feeds: list[Tensor]) -> Callable[[], Any]:
    ready = program.prepare(plan, dims)
    return lambda: ready(list(feeds))


def _times(work: Mapping[str, Callable[[], Any]], effort: Effort, device: torch.device) -> dict[str, float]:
    if device.type == "cuda":
        run = {name: timing.captured(fn)[0] for name, fn in work.items()}
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
