"""The two clocks of `gauntlet.sampling`.

On a card a sample is device time: a replayed graph between two events, behind a flush of the second-level
cache that keeps the card busy while the host enqueues. On the CPU it is the wall time of one call.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch

from gauntlet.nvml import Card, Reading
from gauntlet.sampling import Work, Works, rotated
from runtime import timing

CANARY_CALLS = 7
CANARY = {"cpu": 256, "cuda": 4096}
"""Rows of the canary's square matrices."""


class CpuClock:
    """Wall time of every call."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.told: dict[str, Any] = {}
        size = CANARY["cpu"]
        self._a, self._b, self._out = (torch.ones(size, size, dtype=dtype) for _ in range(3))

    def now(self) -> float:
        return time.monotonic()

    def launches(self, works: Works, turns: Iterable[int]) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {name: [] for name in works}
        for turn in turns:
            for name in rotated(list(works), turn):
                found[name].append(_call(works[name][turn % len(works[name])]))
        return found

    def canary(self) -> float:
        work = lambda: torch.mm(self._a, self._b, out=self._out)  # noqa: E731
        return min(_call(work) for _ in range(CANARY_CALLS))

    def reading(self) -> Reading:
        return Reading()


def _call(fn: Work) -> float:
    start = time.perf_counter_ns()
    fn()
    return (time.perf_counter_ns() - start) / 1000


class CardClock:
    """Device time of graphs, cold. Works that cannot be captured are called (`told["called"]`); samples that
    the host was late for are left out (`told["late"]` of them)."""

    def __init__(self, device: torch.device, card: Card, dtype: torch.dtype) -> None:
        self.device, self.card = device, card
        size = CANARY["cuda"]
        a, b, out = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(3))
        self._sampler = timing.Sampler()
        self._canary, _ = timing.captured(lambda: torch.mm(a, b, out=out))
        self._runs: dict[int, Work] = {}
        # Works on several sets of inputs: nobody reads what they give, and memory each is many times as much.
        self._graphs = timing.Graphs()
        self.told: dict[str, Any] = {"called": [], "late": 0}

    def now(self) -> float:
        return time.monotonic()

    def launches(self, works: Works, turns: Iterable[int]) -> dict[str, list[float]]:
        samples: dict[str, list[timing.Sample]] = {name: [] for name in works}
        for turn in turns:
            for name in rotated(list(works), turn):
                run = self._captured(name, works[name][turn % len(works[name])])
                samples[name].append(self._sampler.sample(run))
        torch.cuda.synchronize(self.device)
        found = {name: timing.spans(taken) for name, taken in samples.items()}
        self.told["late"] += sum(len(samples[name]) - len(kept) for name, kept in found.items())
        return found

    def _captured(self, name: str, fn: Work) -> Work:
        if id(fn) not in self._runs:
            self._runs[id(fn)], graphed = self._graphs.captured(fn)
            if not graphed and name not in self.told["called"]:
                self.told["called"].append(name)
        return self._runs[id(fn)]

    def canary(self) -> float:
        samples = [self._sampler.sample(self._canary) for _ in range(CANARY_CALLS)]
        torch.cuda.synchronize(self.device)
        return min(timing.spans(samples))

    def reading(self) -> Reading:
        return self.card.reading()
