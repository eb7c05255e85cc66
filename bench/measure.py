"""One block at one size: every implementation, forward and forward with backward, interleaved in one process.

Wall: events around one call after the second-level cache was overwritten, host gaps included (the protocol of
`triton.testing.do_bench`). Device: the same work replayed from a CUDA graph. Host: calls enqueued in a row.
Every figure is the median over repeats of the median of a repeat, with its 95 % order-statistic interval.
While it runs, nothing else uses the card (`held`); long work has fewer rounds.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from runtime import timing
from runtime.timing import Timing

Work = Callable[[], Any]
Held = Callable[[], AbstractContextManager[Any]]
PHASES = ("f", "fb")
DEPTH = 17  # one block and sixteen more


@dataclass(frozen=True)
class Effort:
    """`repeats` medians of `rounds` samples; on a card also `host_rounds` rounds of `host_calls` calls.
    `span_ms`: of one implementation and quantity; fewer rounds where the calls would take longer.
    """

    repeats: int = 9
    rounds: int = 10
    host_rounds: int = 9
    host_calls: int = 20
    span_ms: float = 150.0

    def within(self, call_ms: float) -> Effort:
        """For calls that take this long."""
        rounds = math.floor(self.span_ms / self.repeats / max(call_ms, 1e-3))
        calls = math.floor(self.span_ms / self.host_rounds / max(call_ms, 1e-3))
        return replace(
            self,
            rounds=max(min(self.rounds, rounds), 2),
            host_calls=max(min(self.host_calls, calls), 2),
        )


QUICK = Effort(3, 3, 3, 3)


@dataclass
class Figures:
    """Timings in microseconds by implementation; empty where something cannot be measured. `replay`: host
    time of replaying the graph of the whole call."""

    wall: dict[str, Timing] = field(default_factory=dict)
    wall_iqr: dict[str, float] = field(default_factory=dict)
    dev: dict[str, Timing] = field(default_factory=dict)
    host: dict[str, Timing] = field(default_factory=dict)
    replay: dict[str, Timing] = field(default_factory=dict)

    def graphed(self, already: Collection[str] = ()) -> Figures:
        """The same work in one CUDA graph: what a step then costs is its replay. `already`: those that bring
        graphs of their own, whose calls are what they are."""
        own = {name: self.wall[name] for name in already if name in self.wall}
        host = {name: self.host[name] for name in own if name in self.host}
        return Figures({**self.dev, **own}, {}, dict(self.dev), {**self.replay, **host})

    def row(self, impl: str) -> dict[str, Any]:
        """The timing fields of a row, milliseconds and for the host microseconds."""
        out: dict[str, Any] = {}
        for name, found in (("wall", self.wall.get(impl)), ("dev", self.dev.get(impl))):
            shown = (found.median / 1e3, found.low / 1e3, found.high / 1e3) if found else (None,) * 3
            out |= dict(zip((f"{name}_ms", f"{name}_lo", f"{name}_hi"), shown, strict=True))
        out["wall_iqr"] = self.wall_iqr[impl] / 1e3 if impl in self.wall_iqr else None
        host = self.host.get(impl)
        shown = (host.median, host.low, host.high) if host else (None,) * 3
        return out | dict(zip(("host_us", "host_lo", "host_hi"), shown, strict=True))


def steps(fn: Callable[..., Any], args: list[Tensor], cotangent: Tensor, depth: int = 1) -> dict[str, Work]:
    """The two phases as calls without arguments; `depth` blocks feed each other's first leaf."""
    wanted = [t for t in args if t.requires_grad]

    def forward() -> Tensor:
        value = args[0]
        for _ in range(depth):
            value = fn(value, *args[1:])
        return value

    def both() -> Any:
        return torch.autograd.grad(forward(), wanted, cotangent)

    return {"f": forward, "fb": both}


def measured(
    work: Mapping[str, Work],
    effort: Effort,
    device: torch.device,
    phase: str,
    *,
    held: Held = nullcontext,
    graphs: Collection[str] = (),
) -> Figures:
    """All figures of one phase for several implementations; those in `graphs` are not captured, since they
    bring CUDA graphs of their own or can have none."""
    with torch.set_grad_enabled(phase == "fb"):
        return _on_card(work, effort, held, graphs) if device.type == "cuda" else _on_cpu(work, effort)


def _on_cpu(work: Mapping[str, Work], effort: Effort) -> Figures:
    measure = functools.partial(timing.cpu_times, work, at_least_us=200.0)
    once = measure(rounds=1)  # warm, and how long they take
    effort = effort.within(sum(t.median for t in once.values()) / 1e3 / max(len(once), 1))
    measure = functools.partial(measure, rounds=effort.rounds, warm=1)
    wall, spread = repeated(measure, effort.repeats)
    return Figures(wall=wall, wall_iqr=spread)


def _on_card(work: Mapping[str, Work], effort: Effort, held: Held, graphs: Collection[str]) -> Figures:
    found = Figures()
    with held():  # one call of each, so that all are warm, and how long they take
        once = timing.wall_times(work, rounds=1, inner=2, device=torch.device("cuda"))
    effort = effort.within(sum(t.median for t in once.values()) / 1e3 / max(len(once), 1))
    run = functools.partial(timing.device_times, rounds=effort.rounds, graph=False)
    found.wall, found.wall_iqr = repeated(functools.partial(run, work), effort.repeats, held)
    hosts = functools.partial(timing.host_times, calls=effort.host_calls, rounds=effort.host_rounds)
    with held():
        found.host = hosts(work)
        replays = _captured({n: fn for n, fn in work.items() if n not in graphs})
    if replays:
        found.dev, _ = repeated(functools.partial(run, replays), effort.repeats, held)
        with held():
            found.replay = hosts(replays)
    return found


def _captured(work: Mapping[str, Work]) -> dict[str, Work]:
    """Replays of what can be captured."""
    replays = {}
    for name, fn in work.items():
        replay, graphed = timing.captured(fn)
        if graphed:
            replays[name] = replay
    return replays


def repeated(
    measure: Callable[[], dict[str, Timing]], repeats: int, held: Held = nullcontext
) -> tuple[dict[str, Timing], dict[str, float]]:
    """Per name: the medians of the repeats as samples; the interquartile range of all samples together."""
    medians: dict[str, list[float]] = {}
    samples: dict[str, list[float]] = {}
    for _ in range(repeats):
        with held():
            once = measure()
        for name, found in once.items():
            medians.setdefault(name, []).append(found.median)
            samples.setdefault(name, []).extend(found.samples)
    spread = {name: Timing(tuple(found)).iqr for name, found in samples.items()}
    return {name: Timing(tuple(found)) for name, found in medians.items()}, spread


def marginal(one: Figures, deep: Figures) -> Figures:
    """What each of the blocks after the first costs, repeat by repeat; the deep stack may have fewer
    repeats."""

    def each(first: Mapping[str, Timing], last: Mapping[str, Timing]) -> dict[str, Timing]:
        return {
            name: Timing(
                tuple(
                    (b - a) / (DEPTH - 1)
                    for a, b in zip(first[name].samples, last[name].samples, strict=False)
                )
            )
            for name in first.keys() & last.keys()
        }

    return Figures(each(one.wall, deep.wall), {}, each(one.dev, deep.dev), each(one.host, deep.host))


def ceilings(device: torch.device, effort: Effort = QUICK) -> dict[str, float]:
    """Bytes read plus written per second by copies, and on a card the rate of a large bf16 product."""
    cuda = device.type == "cuda"
    big, small, n = (1 << 30, 64 << 20, 8192) if cuda else (1 << 28, 4 << 20, 1024)
    kind = torch.bfloat16 if cuda else torch.float32
    found: dict[str, float] = {}
    for name, size in (("copy_TBps", big), ("copy_small_TBps", small)):
        source = torch.empty(size, dtype=torch.uint8, device=device).random_(0, 255)
        target = torch.empty_like(source)
        # Not from a graph: a copy there is the copy engine's, slower than the kernel a stream runs.
        copied = _median(lambda a=target, b=source: a.copy_(b), device, effort, graph=False)
        found[name] = 2 * size / (copied * 1e6)
        del source, target
    a, b = (torch.randn(n, n, device=device).to(kind) for _ in range(2))
    rate = 2 * n**3 / (_median(lambda: a @ b, device, effort) * 1e6)
    found["bf16_TFLOPs" if cuda else "fp32_TFLOPs"] = rate
    return {**found, "copy_small_MiB": small / (1 << 20)}


def _median(fn: Work, device: torch.device, effort: Effort, graph: bool = True) -> float:
    """Microseconds."""
    work = {"": fn}
    if device.type == "cuda":
        measure = functools.partial(timing.device_times, work, rounds=20, graph=graph)
    else:
        measure = functools.partial(timing.cpu_times, work, rounds=effort.rounds)
    return repeated(measure, effort.repeats)[0][""].median
