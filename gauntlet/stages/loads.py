"""The machine code is loaded and every phase launched once, in this fresh and limited process."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

import torch

from esper_ir.diagnostics import EsperError
from gauntlet import inputs
from gauntlet.stage import Context, Failed, Outcome, Passed, Recipe, Sweep
from gauntlet.subject import Subject
from library.launch import Plan, evaluate
from runtime import system
from runtime.loader import check_machine


def _recipes(context: Context) -> Iterator[Recipe]:
    yield Recipe("loads", context.subject.base_dims(), cotangent="normal", seed=context.seed)


def _check(context: Context, recipe: Recipe) -> Outcome:
    subject = context.subject
    _fits(subject)
    values, flowing = inputs.values(subject, recipe), inputs.cotangents(subject, recipe)
    with context.launching():
        began = time.perf_counter()
        program = subject.program
        load_us = (time.perf_counter() - began) * 1e6
        subject.infer(values)
        if subject.launch.interface.differentiable:
            _, saved = subject.forward(values)
            subject.backward(saved, flowing, recipe.dims, subject.launch.interface.differentiable)
    uncovered = [f"{phase} at {dims}" for phase, dims in _corners(context) if not subject.plans(phase, dims)]
    if uncovered:
        return Failed(f"no plan for {uncovered[0]}")
    workspace = max(_workspace(plan, recipe.dims) for plan in subject.launch.plans)
    kernels = program.launch.kernels
    profile: dict[str, float] = {"load_us": round(load_us, 1), "workspace_bytes": workspace}
    if subject.device.type == "cuda":
        profile["registers"] = max((k.registers for k in kernels), default=0)
        profile["spills"] = max((k.spills for k in kernels), default=0)
        profile["shared_memory_bytes"] = max((k.shared for k in kernels), default=0)
    return Passed({"profile": profile})


def _fits(subject: Subject) -> None:
    """E0903 where this machine cannot run code for the declared architecture: nothing is said about the
    artifact then."""
    machine = system.machine(subject.device.type, subject.device.index or 0)
    try:
        check_machine(subject.manifest, machine, refuse=False)
    except EsperError as error:
        raise EsperError("E0903", f"{error.message}; prove it on a machine that it is for") from error


def _corners(context: Context) -> Iterator[tuple[str, dict[str, int]]]:
    """Every phase at the sizes where buckets could leave a gap."""
    subject = context.subject
    interface = subject.launch.interface
    phases = ["inference", *(["forward", "backward"] if interface.differentiable else [])]
    edges: list[dict[str, int]] = [
        {d.name: d.min for d in interface.dims},
        {d.name: d.max for d in interface.dims},
    ]
    for plan in subject.launch.plans:
        for bound in plan.bucket:
            dim = next(d for d in interface.dims if d.name == bound.dim)
            near = (bound.low - dim.multiple_of, bound.low, bound.high, bound.high + dim.multiple_of)
            edges += [{**edge, dim.name: n} for n in near if dim.min <= n <= dim.max for edge in edges[:2]]
    for dims in edges:
        yield from ((phase, dims) for phase in phases)


def _workspace(plan: Plan, dims: Mapping[str, int]) -> int:
    total = 0
    for buffer in plan.buffers:
        if buffer.source in ("temp", "zeroed"):
            count = 1
            for size in buffer.shape:
                count *= evaluate(size, dims)
            total += count * getattr(torch, buffer.dtype).itemsize
    return total


STAGE = Sweep("loads", 10, _recipes, _check, shrink=False)
