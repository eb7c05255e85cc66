"""The statistics, and the rule of sampling on a clock that does not tick by itself."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from gauntlet import sampling, statistics
from gauntlet.nvml import Reading
from gauntlet.sampling import FULL, STEADY, Effort, Works, sample


@pytest.mark.parametrize(("n", "q"), [(21, 0.5), (300, 0.5), (400, 0.99), (1500, 0.99)])
def test_intervals_hold_what_they_promise(n: int, q: float) -> None:
    draw, hits, tries = random.Random(n), 0, 2000
    for _ in range(tries):
        low, high = statistics.interval([draw.random() for _ in range(n)], q)
        hits += low <= q <= high
    assert 0.935 <= hits / tries <= 0.995


def test_known_ranks() -> None:
    """Tables of the sign test: 6th and 16th of 21 samples; all of five."""
    assert statistics.ranks(21, 0.5) == (5, 15)
    assert statistics.ranks(5, 0.5) == (0, 4)
    assert statistics.ranks(300, 0.99)[1] == 299, "300 samples bound a p99 from above by their largest only"


def test_spread_width_and_overlap() -> None:
    assert statistics.spread([1.0, 1.02, 0.99]) == pytest.approx(0.03)
    assert statistics.width([5.0] * 9) == 0.0
    assert statistics.overlap((1, 2), (2, 3)) and not statistics.overlap((1, 2), (2.1, 3))
    assert statistics.steps([0.0, 1.0], 4) == [0.0, 0.25, 0.5, 0.75, 1.0]
    low, high = statistics.wilson(30, 300)
    assert low < 0.1 < high and statistics.wilson(0, 0) == (0.0, 1.0)


def test_two_measurements_of_the_same_overlap() -> None:
    """Spans of five process medians each: they miss one another in one of 126 pairs."""
    draw, missed = random.Random(1), 0
    for _ in range(4000):
        a, b = ([draw.gauss(1, 0.1) for _ in range(5)] for _ in range(2))
        missed += not statistics.overlap((min(a), max(a)), (min(b), max(b)))
    assert missed / 4000 < 2 / 126


class Fake:
    """A clock on which a launch takes what `take` says, and the canary what `canaries` says."""

    def __init__(self, canaries: Iterable[float] = (), throttled: tuple[str, ...] = (), noise: float = 0.0):
        self.time, self.turns, self.told = 0.0, list[int](), dict[str, Any]()
        self.canaries, self.throttled, self.noise = iter(canaries), throttled, noise
        self.draw = random.Random(0)

    def now(self) -> float:
        return self.time

    def launches(self, works: Works, turns: Iterable[int]) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {name: [] for name in works}
        for turn in turns:
            self.turns.append(turn)
            for name in works:
                us = 1000.0 * (1 + self.noise * self.draw.random())
                found[name].append(us)
                self.time += us / 1e6
        return found

    def canary(self) -> float:
        return next(self.canaries, 100.0)

    def reading(self) -> Reading:
        return Reading(throttled=self.throttled)


WORKS: Works = {"both": [lambda: None], "eager both": [lambda: None]}


def test_it_stops_at_enough_samples_of_a_narrow_median() -> None:
    found = sample(WORKS, Fake(), FULL, "both")
    assert len(found.samples["both"]) == len(found.samples["eager both"]) == 300
    assert found.conditions == STEADY and found.voided == 0 and found.batches == 15


def test_it_heats_up_before_the_first_sample() -> None:
    clock = Fake()
    sample(WORKS, clock, FULL, "both")
    assert len(clock.turns) * 2e-3 >= FULL.heat_s + 0.6


def test_noise_is_waited_for_but_not_for_ever() -> None:
    clock = Fake(noise=3.0)
    found = sample(WORKS, clock, FULL, "both")
    assert len(found.samples["both"]) > 600, "300 of these are no narrow median"
    assert FULL.patience_s <= clock.time <= FULL.patience_s + 3 * FULL.heat_s + 1


def test_slow_works_end_by_the_clock() -> None:
    clock = Fake()
    clock.launches = lambda works, turns: _slowly(clock, works, turns)  # type: ignore[method-assign]
    found = sample(WORKS, clock, FULL, "both")
    assert 0 < len(found.samples["both"]) < 300 and clock.time < 4 * FULL.seconds


def _slowly(clock: Fake, works: Works, turns: Iterable[int]) -> dict[str, list[float]]:
    count = len(list(turns))
    clock.time += 0.5 * count
    return {name: [5e5] * count for name in works}


def test_batches_with_a_moving_canary_are_void_and_made_up_for() -> None:
    jumps = [100.0, 100.0, 100.0, 110.0, 110.0]  # during heat-up, before the first batch, after it, ..
    found = sample(WORKS, Fake(canaries=jumps), FULL, "both")
    assert found.voided >= 1 and len(found.samples["both"]) == 300 and found.conditions == STEADY


def test_a_canary_that_always_moves_spoils_and_loses_nothing() -> None:
    restless = (100.0 * (1 + at % 2) for at in range(10**6))
    found = sample(WORKS, Fake(canaries=restless), FULL, "both")
    assert "the canary moved in" in found.conditions and found.voided == 0
    assert len(found.samples["both"]) >= FULL.samples


def test_a_card_throttled_throughout_is_named() -> None:
    found = sample(WORKS, Fake(throttled=("power cap",)), FULL, "both")
    assert found.conditions.startswith("throttled (power cap) in") and found.samples["both"]
    told = found.to_json()
    assert told["conditions"] == found.conditions and told["throttled"] == {"power cap": found.batches}
    assert told["clock_mhz"] == "unmeasured"


def test_order_and_inputs_rotate() -> None:
    assert sampling.rotated(["a", "b", "c"], 4) == ["b", "c", "a"]
    assert Effort() == FULL and replace(FULL, processes=7).processes == 7
