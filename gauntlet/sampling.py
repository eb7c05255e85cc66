"""How one process samples: launch by launch, everything interleaved, between readings of a canary.

A round launches every work once, in an order that rotates and on inputs that rotate. Rounds come in batches;
before and after each a canary (a fixed product) is timed. A batch during which the canary moved by more than
`MOVED`, or the card was throttled, is void. Where that leaves too little, the void batches are used after all
and the result says so: a number with a reason is worth more than none.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gauntlet import statistics
from gauntlet.nvml import Reading
from gauntlet.report import UNMEASURED, Number

Work = Callable[[], Any]
Works = Mapping[str, Sequence[Work]]
"""Works by name, each on several sets of inputs."""
MOVED = 0.02
"""The canary may move by so much during a batch."""
MOST_ROUNDS = 4000
LEAST_PROCESSES = 3
ENOUGH = 30
"""Fewer samples than this outside void batches are too few."""
STEADY = "steady"


@dataclass(frozen=True)
class Effort:
    """What a process spends. It stops with `samples` of every work whose interval of the median (95 %) is at
    most `width` wide; it waits for that width no longer than `patience_s`, and in no case goes on after
    `seconds`. `heat_s`: of work before the first sample. `processes`: fresh ones; once
    `LEAST_PROCESSES` have measured none is begun that would end after `enough_s` if it took as long as the
    ones before. `together`: that many make ready side by side (each holds its tensors meanwhile), and measure
    one at a time, at one size."""

    samples: int = 300
    width: float = 0.01
    patience_s: float = 6.0
    seconds: float = 15.0
    heat_s: float = 1.0
    processes: int = 5
    rounds: int = 20
    enough_s: float = math.inf
    together: bool = False


FULL = Effort()
QUICK = Effort(samples=60, width=0.05, patience_s=0.4, seconds=1.2, heat_s=0.05, enough_s=8.0, together=True)
BRIEF = Effort(samples=10, width=1.0, patience_s=0.0, seconds=0.2, heat_s=0.0, processes=1)
"""For those who want a verdict and no numbers."""


@dataclass(frozen=True)
class Batch:
    """`samples`: microseconds by work; `moved`: of the canary, as a share; `reading`: of the card after
    it."""

    samples: Mapping[str, tuple[float, ...]]
    moved: float
    reading: Reading

    @property
    def why_void(self) -> str:
        if self.reading.throttled:
            return f"throttled ({', '.join(self.reading.throttled)})"
        return "the canary moved" if self.moved > MOVED else ""


@dataclass(frozen=True)
class Series:
    """What a process sampled. `conditions`: STEADY, or what spoiled it; `readings`: after every batch;
    `voided`: batches that were dropped; `canary_us`: the fastest that the canary was."""

    samples: Mapping[str, tuple[float, ...]]
    conditions: str
    batches: int
    voided: int
    canary_us: float
    readings: tuple[Reading, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "samples": {n: [round(s, 3) for s in found] for n, found in self.samples.items()},
            "conditions": self.conditions,
            "batches": self.batches,
            "voided": self.voided,
            "canary_us": round(self.canary_us, 3),
            "clock_mhz": _span([r.clock_mhz for r in self.readings]),
            "temperature_c": _span([r.temperature_c for r in self.readings]),
            "throttled": dict(Counter(why for r in self.readings for why in r.throttled)),
        }


def _span(values: Sequence[Number]) -> list[float] | str:
    """[least, most] of what was read after the batches."""
    known = [v for v in values if not isinstance(v, str)]
    return [min(known), max(known)] if known else UNMEASURED


class Clock(Protocol):
    """Where and how launches are timed. `told`: what is worth knowing about how it went."""

    told: dict[str, Any]

    def now(self) -> float:
        """Seconds."""
        ...

    def launches(self, works: Works, turns: Iterable[int]) -> dict[str, list[float]]:
        """Microseconds by work, one round per turn."""
        ...

    def canary(self) -> float:
        """Microseconds of the fastest of a few fixed products."""
        ...

    def reading(self) -> Reading:
        """Clock, temperature and throttle reasons."""
        ...


def rotated(names: Sequence[str], turn: int) -> list[str]:
    """The names from another one on in every turn."""
    at = turn % len(names) if names else 0
    return [*names[at:], *names[:at]]


def sample(works: Works, clock: Clock, effort: Effort, primary: str) -> Series:
    """Samples of every work by the rule of the module. `primary`: the work whose interval is waited for."""
    heat(works, clock, effort)
    began, turn, batches = clock.now(), 0, list[Batch]()
    before = fastest = clock.canary()
    while not batches or _goes_on(batches, effort, primary, clock.now() - began):
        samples, turn = _batch(works, clock, effort, turn)
        after = clock.canary()
        moved = abs(after - before) / before if before else 0.0
        batches.append(Batch(samples, moved, clock.reading()))
        before, fastest = after, min(after, fastest)
    return _kept(batches, fastest)


def heat(works: Works, clock: Clock, effort: Effort) -> None:
    """Work until two readings of the canary in a row agree to a percent, for `heat_s` at least and three
    times that at most."""
    began, turn, last = clock.now(), 0, clock.canary()
    while (spent := clock.now() - began) < 3 * effort.heat_s or not turn:
        clock.launches(works, [turn])
        turn += 1
        if spent >= effort.heat_s:
            here = clock.canary()
            if abs(here - last) <= 0.01 * last:
                return
            last = here


def _batch(works: Works, clock: Clock, effort: Effort, turn: int) -> tuple[dict[str, tuple[float, ...]], int]:
    """Up to `rounds` rounds, fewer where they are long: a batch should see one state of the machine."""
    found: dict[str, list[float]] = {name: [] for name in works}
    began, end = clock.now(), turn + effort.rounds
    while turn < end and (clock.now() - began) < effort.seconds / 8:
        for name, values in clock.launches(works, range(turn, turn + 5)).items():
            found[name] += values
        turn += 5
    return {name: tuple(values) for name, values in found.items()}, turn


def _goes_on(batches: Sequence[Batch], effort: Effort, primary: str, spent: float) -> bool:
    if spent >= effort.seconds or sum(len(b.samples[primary]) for b in batches) >= MOST_ROUNDS:
        return False
    good = [s for b in batches if not b.why_void for s in b.samples[primary]]
    if spent >= effort.patience_s:
        good = good if len(good) >= effort.samples else [s for b in batches for s in b.samples[primary]]
        return len(good) < effort.samples
    return len(good) < effort.samples or statistics.width(good) > effort.width


def _kept(batches: Sequence[Batch], canary_us: float) -> Series:
    good = [b for b in batches if not b.why_void]
    enough = sum(len(next(iter(b.samples.values()))) for b in good) >= ENOUGH
    used = good if enough else batches
    reasons = Counter(b.why_void for b in batches if b.why_void)
    conditions = STEADY
    if not enough and reasons:
        conditions = "; ".join(f"{why} in {n} of {len(batches)} batches" for why, n in reasons.most_common())
    samples = {name: tuple(s for b in used for s in b.samples[name]) for name in batches[0].samples}
    readings = tuple(b.reading for b in batches)
    return Series(samples, conditions, len(batches), len(batches) - len(used), canary_us, readings)
