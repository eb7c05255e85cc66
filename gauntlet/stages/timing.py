"""How long the artifact takes beside eager torch: forward, backward, both; interleaved in one run.

On a card: device time from replayed graphs with the second-level cache flushed. On the CPU: wall time on all
threads. Nothing is judged here; the numbers go into the evaluation profile, and what was not measured says
so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from esper_ir import reference
from gauntlet import inputs
from gauntlet.stage import Context, Outcome, Passed, Recipe
from gauntlet.subject import Subject
from runtime import timing

ROUNDS, QUICK_ROUNDS = 40, 10
ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 27}
UNRESOLVED_MS = 0.005
"""Device times below five microseconds say more about the launch than about the kernel."""
Work = Callable[[], Any]


@dataclass(frozen=True)
class Timed:
    name: str = "timing"
    order: int = 80
    quick: bool = True

    def run(self, context: Context) -> Outcome:
        subject = context.subject
        recipe = Recipe("timing", _dims(subject, context.quick), cotangent="normal", seed=context.seed)
        return self.check(context, recipe)

    def check(self, context: Context, recipe: Recipe) -> Outcome:
        context.at(recipe)
        before = torch.get_num_threads()
        if context.subject.device.type == "cpu":
            torch.set_num_threads(max(before, context.threads))
        try:
            with context.launching(20 * ROUNDS):
                found = _measure(context, recipe)
        finally:
            torch.set_num_threads(before)
        return Passed({"dims": dict(recipe.dims), "profile": found})


STAGE = Timed()


def _dims(subject: Subject, quick: bool) -> dict[str, int]:
    """The largest tuned sizes that fit a measurement here, else the largest sizes that do."""
    most = ELEMENTS[subject.device.type] // (4 if quick else 1)
    dims = subject.launch.interface.dims
    rows = max((len(d.tune) for d in dims), default=0)
    tuned = [
        {d.name: d.tune[min(at, len(d.tune) - 1)] if d.tune else d.max for d in dims} for at in range(rows)
    ]
    fitting = [t for t in tuned if subject.admits(t, most)]
    return max(fitting, key=subject.elements) if fitting else subject.largest_dims(most)


def _measure(context: Context, recipe: Recipe) -> dict[str, Any]:
    subject = context.subject
    rounds = QUICK_ROUNDS if context.quick else ROUNDS
    work = dict(_work(subject, recipe))
    cuda = subject.device.type == "cuda"
    found = timing.device_times(work, rounds=rounds) if cuda else timing.cpu_times(work, rounds=rounds)
    profile: dict[str, Any] = {}
    for ours, name in (("forward", "forward_ms_median"), ("backward", "backward_ms_median")):
        if ours in found:
            profile[name] = _resolved(found[ours].median / 1e3, cuda)
            profile[f"eager_{name}"] = round(found[f"eager {ours}"].median / 1e3, 6)
    both = found["both"] if "both" in found else found["forward"]
    profile |= {
        "latency_ms_mean": round(sum(both.samples) / len(both.samples) / 1e3, 6),
        "latency_ms_median": _resolved(both.median / 1e3, cuda),
        "latency_interval_ms": [round(both.low / 1e3, 6), round(both.high / 1e3, 6)],
        "throughput_ops_per_sec": round(1e6 / both.median, 3),
        "bytes_moved": _least_bytes(subject, recipe),
    }
    if len(both.samples) >= 299:  # fewer cannot bound a 99th percentile from above with 95 % confidence
        profile["latency_ms_p99"] = round(both.p99 / 1e3, 6)
    if cuda:
        hosts = timing.host_times({"call": work["both" if "both" in work else "forward"]})
        profile["host_us_per_call"] = round(hosts["call"].median, 3)
        profile["memory_mb_peak"] = _peak(work["both" if "both" in work else "forward"], subject.device)
    return profile


def _resolved(ms: float, cuda: bool) -> float | str:
    return "unresolved" if cuda and ms < UNRESOLVED_MS else round(ms, 6)


def _work(subject: Subject, recipe: Recipe) -> Iterator[tuple[str, Work]]:
    """Launch-ready plans against the reference, each with its autograd graph built before."""
    program, dims = subject.program, subject.dims_tuple(recipe.dims)
    values = inputs.values(subject, recipe)
    ordered = [values[s.name] for s in subject.launch.interface.inputs]
    wanted = subject.launch.interface.differentiable
    eager_values = {n: t.detach().requires_grad_(n in wanted) for n, t in values.items()}
    phase = "forward" if wanted else "inference"
    forward = program.ready(phase, dims)
    yield "forward", lambda: forward(list(ordered))
    yield "eager forward", lambda: _eager(subject, eager_values)
    if not wanted:
        return
    saved = subject.forward(values)[1]
    flowing = [c.contiguous() for c in inputs.cotangents(subject, recipe) if c is not None]
    if len(flowing) != len(subject.results):
        return
    backward = program.ready("backward", dims, tuple(sorted(wanted)))
    leaves = [eager_values[n] for n in wanted]
    outputs = _eager(subject, eager_values)

    def both() -> None:
        slots = forward(list(ordered))
        backward([*[slots[i] for i in forward.layout.saved], *flowing])

    yield "backward", lambda: backward([*saved, *flowing])
    yield (
        "eager backward",
        lambda: torch.autograd.grad(outputs, leaves, flowing, retain_graph=True, allow_unused=True),
    )
    yield "both", both


def _eager(subject: Subject, values: Mapping[str, Tensor]) -> Sequence[Tensor]:
    return list(reference.evaluate(subject.graph, values).values())


def _least_bytes(subject: Subject, recipe: Recipe) -> int:
    """Every input read once and every output written once; with gradients, cotangents read and gradients
    written too."""
    types = [t for _, _, t in (*subject.leaves, *subject.results)]
    total = sum(t.nbytes.value(recipe.dims) for t in types)
    return 2 * total if subject.launch.interface.differentiable else total


def _peak(work: Work, device: torch.device) -> float:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work()
    torch.cuda.synchronize(device)
    return round((torch.cuda.max_memory_allocated(device) - before) / 1e6, 6)
