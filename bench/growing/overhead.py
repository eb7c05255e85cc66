"""What slots that hold nothing cost: forward and backward of a wrapped model beside its unwrapped copy.

Blocks of EVERY steps, so that each holds one sampled step of telemetry, alternate between the two; on the
processor the thread's own time is taken, which others on the machine disturb least. The figure is the median
of the paired ratios with a bootstrap interval, beside the same for the bare model and a copy of it: the
noise.
"""

from __future__ import annotations

import copy
import random
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import runtime
from bench.results import figure
from runtime.seeds.telemetry import HealthObserver

EVERY = 50
LAYERS = 4
ROWS = {64: 64, 512: 128, 1024: 128}
TARGET = {64: 5.0}  # percent; wider layers
WIDE = 1.0
PAIRS = {64: 25, 512: 15, 1024: 7}  # of blocks; wide layers take long and scatter little
DRAWS = 2000
MEMORY = 5.0  # percent of the model

Step = Callable[[], None]


def model_of(width: int, seed: int = 0) -> nn.Sequential:
    """LAYERS times Linear and ReLU; sites are the linear layers."""
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(LAYERS)))


def wrapped(width: int, device: torch.device) -> nn.Module:
    """The same with slots and telemetry."""
    model = runtime.wrap(model_of(width).to(device), "*.0")
    runtime.growth_of(model).observe(HealthObserver(), every=EVERY)
    return model


def step_of(model: nn.Module, called: Any, x: Tensor) -> Step:
    """Forward and backward; with slots also what their optimizer hook does."""
    growth = model.__dict__.get("_esper_growth")
    parameters = list(model.parameters())

    def step() -> None:
        for parameter in parameters:
            parameter.grad = None
        called(x).square().mean().backward()
        if growth is not None:
            growth.tick()

    return step


def block(step: Step, device: torch.device) -> float:
    """Seconds of EVERY steps."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        for _ in range(EVERY):
            step()
        torch.cuda.synchronize(device)
        return time.perf_counter() - began
    began = time.thread_time()
    for _ in range(EVERY):
        step()
    return time.thread_time() - began


def percent(bare: Step, other: Step, device: torch.device, pairs: int) -> dict[str, float]:
    """By how much `other` is slower, with its 95 % interval; order turns round from pair to pair."""
    for step in (bare, other):
        block(step, device)
    ratios = []
    for number in range(pairs):
        pair = {}
        for step in (bare, other) if number % 2 else (other, bare):
            pair[step] = block(step, device)
        ratios.append(pair[other] / pair[bare])
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(DRAWS))
    low, high = medians[DRAWS // 40], medians[-DRAWS // 40]
    return {
        k: 100.0 * (v - 1.0) for k, v in (("value", statistics.median(ratios)), ("lo", low), ("hi", high))
    }


def measure(device: torch.device, say: Callable[[str], None]) -> dict[str, Any]:
    """Figures for every width, eager and compiled."""
    found: dict[str, Any] = {}
    for width in ROWS:
        x = torch.randn(ROWS[width], width, device=device)
        bare, grown = model_of(width).to(device), wrapped(width, device)
        twin = copy.deepcopy(bare)
        grown(x)
        target = TARGET.get(width, WIDE)
        for mode in ("eager", "compiled"):
            calls: Mapping[str, Any] = {"bare": bare, "twin": twin, "grown": grown}
            if mode == "compiled":
                calls = {name: torch.compile(model) for name, model in calls.items()}
            steps = {
                n: step_of(m, calls[n], x) for n, m in (("bare", bare), ("twin", twin), ("grown", grown))
            }
            noise = percent(steps["bare"], steps["twin"], device, PAIRS[width])
            cost = percent(steps["bare"], steps["grown"], device, PAIRS[width])
            say(f"dormant, width {width}, {mode}: {cost['value']:+.2f} % (noise {noise['value']:+.2f} %)")
            found[f"dormant_percent_{width}_{mode}"] = figure(
                cost["value"],
                "%",
                target,
                lo=cost["lo"],
                hi=cost["hi"],
                noise=noise["value"],
                rows=ROWS[width],
            )
        found[f"memory_percent_{width}"] = figure(memory(grown), "%", MEMORY)
        torch.compiler.reset()
    return found


def memory(model: nn.Module) -> float:
    """Bytes of state tensors, mirrors and telemetry by those of the model's parameters, gradients and Adam's
    two moments, percent."""
    growth = runtime.growth_of(model)
    host = 4 * sum(p.numel() * p.element_size() for p in model.parameters())
    own = sum(2 * site.state._bytes.numel() for site in growth.sites.values())
    observer: Any = growth.observer
    for branch in observer._branches.values():
        own += sum(
            t.numel() * t.element_size() for t in (branch.inward, branch.outward, branch.halves, branch.scale)
        )
    return 100.0 * own / host
