"""The one way in which anything is timed: device time from replayed CUDA graphs, host time, and time on
the cpu.

Candidates are interleaved round by round, so that drift of clocks and neighbours falls on all of them
alike, and what is reported is the median with its 95 % order-statistic interval. Before each device sample
the second-level cache is flushed; the flush keeps the card busy while the host enqueues the sample, so
that no host gap lies inside it.
"""

from __future__ import annotations

import functools
import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

Work = Callable[[], Any]
FLUSH_BYTES = 256 << 20  # several times the largest second-level cache known (H200: 50 MiB)
WARM_CALLS = 3
LEAST_ROUNDS = 6
MOST_FLUSHES = 64  # 4 ms on an H200: longer than the host needs to enqueue a block, kernel by kernel
ON_TIME = 50  # samples in a row after which a shorter delay is tried again


@dataclass(frozen=True)
class Timing:
    """Microseconds. `low` and `high` bound the median (95 %); `graphed`: replayed from a CUDA graph."""

    samples: tuple[float, ...]
    graphed: bool = False

    @property
    def median(self) -> float:
        return self.quantile(0.5)

    @property
    def low(self) -> float:
        return self._rank(-1)

    @property
    def high(self) -> float:
        return self._rank(1)

    @property
    def p99(self) -> float:
        return self.quantile(0.99)

    @property
    def iqr(self) -> float:
        """Distance of the quartiles."""
        return self.quantile(0.75) - self.quantile(0.25)

    def quantile(self, q: float) -> float:
        """Linear between order statistics."""
        ordered = sorted(self.samples)
        at = q * (len(ordered) - 1)
        below = math.floor(at)
        above = min(below + 1, len(ordered) - 1)
        return ordered[below] + (at - below) * (ordered[above] - ordered[below])

    def _rank(self, sign: int) -> float:
        # The median's rank is binomial(n, 1/2): 0.98 sqrt(n) covers 95 % (David and Nagaraja, Order
        # Statistics, 7.1).
        ordered, n = sorted(self.samples), len(self.samples)
        at = round((n - 1) / 2 + sign * 0.98 * math.sqrt(n))
        return ordered[max(0, min(n - 1, at))]

    def to_json(self) -> dict[str, Any]:
        return {
            "median_us": self.median,
            "low_us": self.low,
            "high_us": self.high,
            "iqr_us": self.iqr,
            "p99_us": self.p99,
            "n": len(self.samples),
            "graphed": self.graphed,
        }


def faster(a: Timing, b: Timing, margin: float = 0.02) -> bool:
    """Whether `a` is at least `margin` faster than `b` and their intervals do not meet."""
    return a.median < b.median * (1 - margin) and a.high < b.low


@contextmanager
def quiet() -> Iterator[None]:
    """No garbage collection inside a measurement."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def cpu_times(
    work: Mapping[str, Work], *, rounds: int = 30, at_least_us: float = 50.0, warm: int = WARM_CALLS
) -> dict[str, Timing]:
    """Wall time per call on the cpu. Short calls are repeated inside a sample until it takes
    `at_least_us`."""
    inner = {name: _inner(fn, at_least_us, warm) for name, fn in work.items()}
    samples: dict[str, list[float]] = {name: [] for name in work}
    with quiet():
        for turn in range(rounds):
            for name in _rotated(list(work), turn):
                samples[name].append(_span(work[name], inner[name]))
    return {name: Timing(tuple(found)) for name, found in samples.items()}


def _inner(fn: Work, at_least_us: float, warm: int) -> int:
    for _ in range(warm):
        fn()
    count = 1
    while count < 1 << 16 and _span(fn, count) * count < at_least_us:
        count *= 2
    return count


def _span(fn: Work, count: int) -> float:
    start = time.perf_counter_ns()
    for _ in range(count):
        fn()
    return (time.perf_counter_ns() - start) / count / 1000


def _rotated(names: Sequence[str], turn: int) -> list[str]:
    at = turn % len(names) if names else 0
    return [*names[at:], *names[:at]]


def host_times(
    work: Mapping[str, Work], *, calls: int = 200, rounds: int = 15, synchronise: Work | None = None
) -> dict[str, Timing]:
    """Host time per call: `calls` enqueued in a row, the device waited for only between rounds."""
    wait = synchronise or _waiter()
    samples: dict[str, list[float]] = {name: [] for name in work}
    for fn in work.values():
        for _ in range(max(WARM_CALLS, calls // 4)):
            fn()
    with quiet():
        for turn in range(rounds):
            for name in _rotated(list(work), turn):
                wait()
                samples[name].append(_span(work[name], calls))
    wait()
    return {name: Timing(tuple(found)) for name, found in samples.items()}


@dataclass(frozen=True)
class Calls:
    """Calls in a row: `host`, until all were enqueued; `wall`, until the device was done with them, of the
    same samples, so that it is never the smaller one. On the cpu they are one."""

    host: Timing
    wall: Timing


def call_times(
    work: Mapping[str, Work],
    *,
    device: torch.device,
    rounds: int = 20,
    seconds: float = 10.0,
    at_least_us: float = 200.0,
) -> dict[str, Calls]:
    """Times per call. A sample is as many calls as take `at_least_us`; a round has one of each candidate.
    After `seconds` no round is begun, but there are `LEAST_ROUNDS` (if asked), so that intervals can be told.
    """
    inner = {name: _inner(fn, at_least_us, WARM_CALLS) for name, fn in work.items()}
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in work}
    wait = (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else None
    began = time.monotonic()
    with quiet():
        for turn in range(rounds):
            if turn >= LEAST_ROUNDS and time.monotonic() - began > seconds:
                break
            for name in _rotated(list(work), turn):
                samples[name].append(_both(work[name], inner[name], wait))
    return {
        name: Calls(Timing(tuple(h for h, _ in found)), Timing(tuple(w for _, w in found)))
        for name, found in samples.items()
    }


def _both(fn: Work, count: int, wait: Work | None) -> tuple[float, float]:
    """(host, wall) per call."""
    if wait is None:
        once = _span(fn, count)
        return once, once
    wait()
    start = time.perf_counter_ns()
    host = _span(fn, count)
    wait()
    return host, (time.perf_counter_ns() - start) / count / 1000


def ratios(a: Timing, b: Timing) -> Timing:
    """`a` over `b` round by round: what slowed a round slowed both."""
    return Timing(tuple(x / y for x, y in zip(a.samples, b.samples, strict=True)))


def _waiter() -> Work:
    return torch.cuda.synchronize if torch.cuda.is_available() else lambda: None


def device_times(
    work: Mapping[str, Work],
    *,
    device: torch.device | int | None = None,
    rounds: int = 50,
    flush: bool = True,
    graph: bool = True,
) -> dict[str, Timing]:
    """Device time per call. What can be captured is replayed from a CUDA graph; what cannot is called
    (`graphed` says which). The caller keeps inputs alive; results of a captured call are overwritten by
    each replay. Without `graph`, works are called behind one flush, and where that is shorter than the host
    needs for them, what it needs is in their times."""
    index = torch.device(device).index if isinstance(device, (str, torch.device)) else device
    with torch.cuda.device(torch.cuda.current_device() if index is None else index), quiet():
        run = {name: captured(fn) if graph else (fn, False) for name, fn in work.items()}
        sampler = Sampler(flush, most=MOST_FLUSHES if graph and flush else 1)
        found: dict[str, list[Sample]] = {name: [] for name in work}
        for turn in range(rounds):
            for name in _rotated(list(work), turn):
                found[name].append(sampler.sample(run[name][0]))
            torch.cuda.synchronize()
    return {n: Timing(tuple(spans(samples)), graphed=run[n][1]) for n, samples in found.items()}


@dataclass(frozen=True)
class Sample:
    """Two events. `late`: the device reached the first one before the host had enqueued all that is between
    them, so that what the host took is in the time."""

    start: Any
    end: Any
    late: bool


def spans(samples: Sequence[Sample]) -> list[float]:
    """Microseconds of those that were not late; of all where every one was."""
    kept = [s for s in samples if not s.late] or samples
    return [s.start.elapsed_time(s.end) * 1000 for s in kept]


@dataclass
class Delay:
    """How many flushes the samples of one work are behind: after a late one twice as many, up to `most`;
    after ON_TIME in a row half as many."""

    most: int
    flushes: int = 1
    on_time: int = 0

    def late(self, reached: bool) -> bool:
        """Whether a sample was. `reached`: the device was at its start when all of it was enqueued. Behind as
        many flushes as there may be none is late: such a work waits for the device itself."""
        if not reached:
            self.on_time += 1
            if self.on_time >= ON_TIME and self.flushes > 1:
                self.flushes, self.on_time = self.flushes // 2, 0
            return False
        excused = self.flushes >= self.most
        self.flushes, self.on_time = min(2 * self.flushes, self.most), 0
        return not excused


class Sampler:
    """Samples behind flushes of the second-level cache, which keep the device busy while the host
    enqueues."""

    def __init__(self, flush: bool = True, most: int = MOST_FLUSHES) -> None:
        self._scratch = torch.empty(FLUSH_BYTES if flush else 1, dtype=torch.uint8, device="cuda")
        self._most = most
        self._delays: dict[int, Delay] = {}

    def sample(self, fn: Work) -> Sample:
        """One call, enqueued; the caller holds on to `fn`."""
        delay = self._delays.setdefault(id(fn), Delay(self._most))
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(delay.flushes):
            self._scratch.zero_()
        start.record()
        fn()
        end.record()
        return Sample(start, end, delay.late(start.query()))


class Replay:
    """A graph with the work it was captured from, which holds on to what the graph reads and writes."""

    def __init__(self, graph: Any, work: Work) -> None:
        self.graph, self.work = graph, work

    def __call__(self) -> None:
        self.graph.replay()


@functools.cache
def _side(device: int) -> Any:
    """The stream that work is warmed up on. torch's allocator keeps what is freed on a stream for that
    stream: with another one for every work, each keeps as much memory as it ever took."""
    return torch.cuda.Stream(device)


class Graphs:
    """Graphs that lie in the same memory: their results last until the next replay of any of them."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def captured(self, fn: Work) -> tuple[Work, bool]:
        """As `captured`."""
        run, graphed = captured(fn, self._pool)
        if not graphed:  # torch's allocator takes that capture for unfinished and refuses all others there
            self._pool = torch.cuda.graph_pool_handle()
        return run, graphed


def captured(fn: Work, pool: Any = None) -> tuple[Work, bool]:
    """(replay, True) of a CUDA graph of one call, or (fn, False) when the call cannot be captured. `pool`:
    the memory that it lies in, one of its own where there is none."""
    side = _side(torch.cuda.current_device())
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_CALLS):
            fn()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, pool=pool):
            fn()
    except RuntimeError:
        torch.cuda.synchronize()
        return fn, False
    return Replay(graph, fn), True


def wall_times(
    work: Mapping[str, Work], *, rounds: int = 30, inner: int = 10, device: torch.device | None = None
) -> dict[str, Timing]:
    """What a training loop sees: events around `inner` calls in a row, host gaps included; on the cpu
    `cpu_times`."""
    if device is None or device.type == "cpu":
        return cpu_times(work, rounds=rounds)
    samples: dict[str, list[float]] = {name: [] for name in work}
    for fn in work.values():
        for _ in range(WARM_CALLS):
            fn()
    with torch.cuda.device(device), quiet():
        for turn in range(rounds):
            for name in _rotated(list(work), turn):
                samples[name].append(_wall_sample(work[name], inner))
    return {name: Timing(tuple(found)) for name, found in samples.items()}


def _wall_sample(fn: Work, inner: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(inner):
        fn()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1000 / inner
