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
    """Device time of graphs, cold. Works that cannot be captured are called."""

    def __init__(self, device: torch.device, card: Card, dtype: torch.dtype) -> None:
        self.device, self.card = device, card
        size = CANARY["cuda"]
        a, b, out = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(3))
        self._scratch = torch.empty(timing.FLUSH_BYTES, dtype=torch.uint8, device=device)
        self._canary, _ = timing.captured(lambda: torch.mm(a, b, out=out))
        self._runs: dict[int, Work] = {}
        # Works on several sets of inputs: nobody reads what they give, and a pool each is many times as much.
        self._pool = torch.cuda.graph_pool_handle()

    def now(self) -> float:
        return time.monotonic()

    def launches(self, works: Works, turns: Iterable[int]) -> dict[str, list[float]]:
        events: dict[str, list[tuple[Any, Any]]] = {name: [] for name in works}
        for turn in turns:
            for name in rotated(list(works), turn):
                run = self._captured(works[name][turn % len(works[name])])
                events[name].append(self._sample(run))
        torch.cuda.synchronize(self.device)
        return {n: [a.elapsed_time(b) * 1000 for a, b in pairs] for n, pairs in events.items()}

    def _captured(self, fn: Work) -> Work:
        if id(fn) not in self._runs:
            self._runs[id(fn)] = timing.captured(fn, self._pool)[0]
        return self._runs[id(fn)]

    def _sample(self, run: Work) -> tuple[Any, Any]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._scratch.zero_()
        start.record()
        run()
        end.record()
        return start, end

    def canary(self) -> float:
        pairs = [self._sample(self._canary) for _ in range(CANARY_CALLS)]
        torch.cuda.synchronize(self.device)
        return min(a.elapsed_time(b) for a, b in pairs) * 1000

    def reading(self) -> Reading:
        return self.card.reading()
