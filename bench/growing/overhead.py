"""What slots that hold nothing cost: forward and backward of a wrapped model beside its unwrapped copy.

A round is EVERY steps of each model, as many as it takes to observe each layer once, in turns of a few. A
step before each turn is not counted, because it finds the caches full of what the other models left there,
as in no training; observed steps are among the uncounted as often as others. On the processor the thread's
own time is taken, which others on the machine disturb least. The figure is the median of the rounds' ratios
with a bootstrap interval, beside the same for the bare model and a copy of it: the noise. Models are built
several times, because where memory lies makes a difference of its own.

glibc gives the free end of its heap back to the system, and the next step faults it in again: 4,064 pages or
a fifth of a step at width 1024, paid by whichever model's gradients lie last, bare or wrapped. The process
that measures keeps its heap.
"""

from __future__ import annotations

import copy
import ctypes
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import runtime
from bench.growing import cores
from bench.results import figure
from runtime.seeds.telemetry import DRAWN, HealthObserver

EVERY = 50
TURN = 5  # steps
LAYERS = 4
ROWS = {64: 64, 512: 128, 1024: 128}
TARGET = {64: 5.0}  # percent; wider layers
WIDE = 1.0
ROUNDS = {64: 60, 512: 12, 1024: 6}  # wide layers take long and scatter little
BUILDS = 3
DRAWS = 2000
MEMORY = 5.0  # percent of the model
TRIM, MMAP = -1, -3  # of mallopt

Step = Callable[[], None]


def keep_heap() -> bool:
    """Have freed memory stay with the process; whether the C library could be told."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    return mallopt is not None and bool(mallopt(MMAP, 1 << 30)) and bool(mallopt(TRIM, (1 << 31) - 1))


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


def turn(step: Step, device: torch.device) -> float:
    """Seconds of TURN steps, after one that is not counted."""
    step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        for _ in range(TURN):
            step()
        torch.cuda.synchronize(device)
        return time.perf_counter() - began
    began = time.thread_time()
    for _ in range(TURN):
        step()
    return time.thread_time() - began


def rounds(steps: Mapping[str, Step], device: torch.device, many: int) -> list[dict[str, float]]:
    """Seconds of each side, round by round; who goes first changes from turn to turn. A turn of each
    before them is not counted."""
    found: list[dict[str, float]] = []
    order = list(steps)
    for step in steps.values():
        turn(step, device)
    for _ in range(many):
        spent = dict.fromkeys(steps, 0.0)
        for _ in range(EVERY // TURN):
            for name in order:
                spent[name] += turn(steps[name], device)
            order = order[1:] + order[:1]
        found.append(spent)
    return found


def percent(found: list[dict[str, float]], name: str) -> dict[str, float]:
    """By how much a side is slower than the bare one, with the 95 % interval of the median."""
    ratios = [spent[name] / spent["bare"] for spent in found]
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(DRAWS))
    low, high = medians[DRAWS // 40], medians[-DRAWS // 40]
    return {
        k: 100.0 * (v - 1.0) for k, v in (("value", statistics.median(ratios)), ("lo", low), ("hi", high))
    }


def measure(device: torch.device, say: Callable[[str], None]) -> dict[str, Any]:
    """Figures for every width, eager and compiled."""
    found: dict[str, Any] = {}
    kept = keep_heap()
    for width in ROWS:
        for mode in ("eager", "compiled"):
            spent = [
                line for _ in range(BUILDS) for line in _build(width, mode, device, ROUNDS[width] // BUILDS)
            ]
            noise, cost = percent(spent, "twin"), percent(spent, "grown")
            say(f"dormant, width {width}, {mode}: {cost['value']:+.2f} % (noise {noise['value']:+.2f} %)")
            found[f"dormant_percent_{width}_{mode}"] = figure(
                cost["value"], "%", TARGET.get(width, WIDE), lo=cost["lo"], hi=cost["hi"],
                noise=noise["value"], rows=ROWS[width], heap_kept=kept,
            )  # fmt: skip
        found[f"memory_percent_{width}"] = figure(memory(width, device), "%", MEMORY)
    return found


def _build(width: int, mode: str, device: torch.device, many: int) -> list[dict[str, float]]:
    """Rounds of three models made anew: bare, its copy, and one with slots."""
    torch.compiler.reset()  # what was compiled for models that are gone counts towards dynamo's limit
    x = torch.randn(ROWS[width], width, device=device)
    bare, grown = model_of(width).to(device), wrapped(width, device)
    models = {"bare": bare, "twin": copy.deepcopy(bare), "grown": grown}
    grown(x)
    steps = {
        name: step_of(model, torch.compile(model) if mode == "compiled" else model, x)
        for name, model in models.items()
    }
    for step in steps.values():  # compiled on all cores
        step()
    with cores.pinned():
        return rounds(steps, device, many)


def memory(width: int, device: torch.device) -> float:
    """Bytes that slots and telemetry hold, and what a sampled step holds from its forward to its backward, by
    those of the model's parameters, gradients and Adam's two moments; percent. What layers share counts
    once."""
    model = wrapped(width, device)
    growth = runtime.growth_of(model)
    x = torch.randn(ROWS[width], width, device=device)
    step = step_of(model, model, x)
    for _ in range(EVERY):
        step()
    host = 4 * sum(p.numel() * p.element_size() for p in model.parameters())
    observer: Any = growth.observer
    held = [t for site in growth.sites.values() for t in (site.state._bytes, site.state._mirror)]
    for branch in observer._branches.values():
        held += [t for t in vars(branch).values() if isinstance(t, Tensor)]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}
    at_once = max((len(sites) for sites, _ in growth._due.values()), default=0)
    return 100.0 * (sum(storages.values()) + at_once * 4 * DRAWN * len(x)) / host
