"""Medians, intervals and interleaving, on the cpu."""

from __future__ import annotations

import time
import weakref
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from runtime import timing
from runtime.timing import Timing


def test_order_statistics() -> None:
    t = Timing(tuple(float(i) for i in range(101)))
    assert (t.median, t.quantile(0.25), t.p99, t.iqr) == (50, 25, 99, 50)
    assert (t.low, t.high) == (40, 60)
    one = Timing((3.0,))
    assert (one.median, one.low, one.high, one.p99) == (3, 3, 3, 3)


def test_the_interval_covers_the_median() -> None:
    generator = torch.Generator().manual_seed(0)
    hits = 0
    for _ in range(400):
        t = Timing(tuple(torch.rand(51, generator=generator).tolist()))
        hits += t.low <= 0.5 <= t.high
    assert 0.92 < hits / 400 < 0.99


def test_faster_needs_a_margin_and_apart_intervals() -> None:
    slow, fast = Timing((100.0, 101.0, 102.0)), Timing((90.0, 91.0, 92.0))
    assert timing.faster(fast, slow) and not timing.faster(slow, fast)
    assert not timing.faster(Timing((99.5, 100.5, 101.5)), slow)
    assert not timing.faster(Timing((10.0, 91.0, 200.0)), slow)


def test_cpu_times_tell_a_sleep() -> None:
    found = timing.cpu_times({"nap": lambda: time.sleep(0.002), "none": lambda: None}, rounds=5)
    assert 1900 < found["nap"].median < 20_000 and found["none"].median < 50
    assert len(found["nap"].samples) == 5 and not found["nap"].graphed
    assert found["nap"].to_json()["n"] == 5


def test_candidates_are_interleaved() -> None:
    order: list[str] = []
    timing.cpu_times({n: (lambda n=n: order.append(n)) for n in "abc"}, rounds=3, at_least_us=0, warm=0)
    assert order[-9:] == list("abcbcacab")


def test_a_call_is_timed_to_its_enqueuing_and_to_its_end() -> None:
    """By the same samples: what a loop sees is never less than what the host does in it."""
    order: list[str] = []
    work = {n: (lambda n=n: order.append(n)) for n in "abc"}
    timing.call_times(work, device=torch.device("cpu"), rounds=3, at_least_us=0)
    assert order[-9:] == list("abcbcacab")
    host, wall = timing._both(lambda: time.sleep(0.002), 3, lambda: time.sleep(0.06))
    assert 1900 < host < 20_000 and host + 19_000 < wall
    busy = {"nap": lambda: time.sleep(0.002)}
    found = timing.call_times(busy, device=torch.device("cpu"), rounds=1000, seconds=0.05)["nap"]
    assert timing.LEAST_ROUNDS <= len(found.wall.samples) < 200 and found.wall == found.host


def test_ratios_are_of_one_round() -> None:
    """A machine that is slow in half of the rounds changes every time and no ratio."""
    slow = [1.0 if turn % 2 else 400.0 for turn in range(20)]
    found = timing.ratios(Timing(tuple(300 * s for s in slow)), Timing(tuple(200 * s for s in slow)))
    assert (found.low, found.median, found.high) == (1.5, 1.5, 1.5)


def test_host_times_wait_only_between_rounds() -> None:
    calls: list[str] = []
    timing.host_times(
        {"f": lambda: calls.append("f")}, calls=4, rounds=2, synchronise=lambda: calls.append("|")
    )
    assert "".join(calls).endswith("|ffff|ffff|")


def test_a_replay_keeps_what_it_reads() -> None:
    """A graph knows addresses only: tensors that nothing else holds would be given to somebody else."""
    read = torch.ones(3)
    known = weakref.ref(read)
    replay = timing.Replay(SimpleNamespace(replay=lambda: None), partial(torch.neg, read))
    del read
    replay()
    assert known() is not None
    del replay
    assert known() is None


def test_the_delay_before_a_sample_follows_what_the_host_needs() -> None:
    """A host that takes as long as three flushes: two samples are late, then one of every ON_TIME."""
    delay = timing.Delay(most=8)
    late = [delay.late(reached=delay.flushes <= 3) for _ in range(3 * timing.ON_TIME)]
    assert late[:3] == [True, True, False] and delay.flushes in (2, 4)
    assert sum(late) == 2 + 2, "shorter delays are tried again"
    quick = timing.Delay(most=8)
    assert not any(quick.late(reached=False) for _ in range(200)) and quick.flushes == 1


def test_a_work_that_waits_for_the_device_has_samples_all_the_same() -> None:
    delay = timing.Delay(most=8)
    late = [delay.late(reached=True) for _ in range(10)]
    assert late == [True] * 3 + [False] * 7 and delay.flushes == 8


def test_late_samples_are_left_out_where_others_are_there() -> None:
    class At:
        def __init__(self, ms: float) -> None:
            self.ms = ms

        def elapsed_time(self, end: At) -> float:
            return end.ms - self.ms

    late, good = timing.Sample(At(0.0), At(9.0), True), timing.Sample(At(1.0), At(3.0), False)
    assert timing.spans([late, good, late]) == [2000.0] and timing.spans([late]) == [9000.0]


@pytest.mark.gpu
def test_what_the_host_takes_is_in_no_sample() -> None:
    """A call that the host is a millisecond late with, of work that takes the device a few microseconds."""
    x = torch.ones(1 << 10, device="cuda")

    def slowly() -> None:
        x.add_(1)
        time.sleep(0.001)
        x.add_(1)

    sampler = timing.Sampler()
    taken = [sampler.sample(slowly) for _ in range(40)]
    torch.cuda.synchronize()
    assert taken[0].late and not taken[-1].late
    assert max(timing.spans(taken)) < 500.0 < timing.spans(taken[:1])[0]


@pytest.mark.gpu
def test_what_cannot_be_captured_leaves_others_their_graphs() -> None:
    x, graphs = torch.ones(8, device="cuda"), timing.Graphs()
    assert graphs.captured(lambda: x + 1)[1]
    assert not graphs.captured(lambda: (x + 1).sum().item())[1], "it waits for the device"
    assert graphs.captured(lambda: x + 1)[1]


@pytest.mark.gpu
def test_what_is_captured_again_and_again_takes_no_more_memory() -> None:
    """Many works of a large block, on several sets of inputs, would fill any card otherwise."""
    x = torch.ones(1 << 24, device="cuda")  # 64 MiB, and as much for each of three results

    def work() -> torch.Tensor:
        return (x + 1).mul(2).sin()

    graphs = timing.Graphs()
    kept = [graphs.captured(work)]
    once = torch.cuda.memory_reserved()
    kept += [graphs.captured(work) for _ in range(8)]
    assert all(graphed for _, graphed in kept)
    assert torch.cuda.memory_reserved() < once + 2 * x.nbytes
