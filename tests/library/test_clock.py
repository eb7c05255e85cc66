"""A clock that is set back, or ahead: order comes from sequence numbers, and nothing waits for a time that is
far away.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from esper_ir.diagnostics import EsperError
from library import history, jobs, leases
from library.audit import verify_library
from library.records import VALIDATED
from library.store import Library
from tests.library.helpers import make_container, validated

YEAR = 365 * 86400.0
Clock = Callable[[float], None]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Set the clock of this process to so many seconds from the real time."""
    real = time.time

    def move(seconds: float) -> None:
        monkeypatch.setattr("library.leases.time.time", lambda: real() + seconds)

    return move


@pytest.mark.parametrize("seconds", [-YEAR, -1.0, YEAR])
def test_order_and_verdicts_hold(lib: Library, clock: Clock, seconds: float) -> None:
    first = validated(lib, 1)
    clock(seconds)
    second = validated(lib, 2)
    lib.annotate(first, {"risk_score": 0.5})
    assert lib.annotate(first, {"risk_score": 0.25}) == 2
    clock(0)
    third = validated(lib, 3)
    assert [lib.load(i).record.id for i in (first, second, third)] == [first, second, third]
    assert lib.annotation(first) == {"risk_score": 0.25}, "the newest by number, not by time"
    assert [r.id for r in lib.artifacts(state=VALIDATED)] == [first, second, third]
    assert history.audit(lib).findings == ()
    assert verify_library(lib, lib.artifacts(), contents=True).findings == ()


def test_a_later_verdict_wins_though_its_time_is_earlier(lib: Library, clock: Clock) -> None:
    artifact = validated(lib)
    clock(-YEAR)
    lib.record_verdict(artifact, {"policy": "q"}, passed=True, card="other")
    verdict = lib.verdict(artifact)
    assert verdict is not None and verdict.card == "other"


def test_marks_of_the_future_ripen(lib: Library, clock: Clock) -> None:
    clock(YEAR)
    loose = lib.blobs.put(b"x")
    assert lib.collect(grace_s=100, dry_run=False).marked == 1
    clock(0)
    assert lib.collect(grace_s=100, dry_run=False).removed == 0
    clock(101)
    assert lib.collect(grace_s=100, dry_run=False).removed == 1 and not lib.blobs.has(loose)


def test_a_lease_of_the_future_runs_out(lib: Library, clock: Clock) -> None:
    """Left by a process that died while the clock was a year ahead."""
    loose = lib.blobs.put(b"x")
    clock(YEAR)
    leases.take(lib.index, "dead", [loose], "put")
    clock(0)
    assert lib.collect(grace_s=0, dry_run=False).removed == 0, "as long as any lease"
    clock(leases.LEASE_S + 1)
    assert lib.collect(grace_s=0, dry_run=False).removed == 1


def test_a_writer_over_whom_the_clock_jumps(
    lib: Library, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ahead: its lease is over, it is told to run again, nothing is half there. Back: it just succeeds."""
    put = lib.blobs.put_many
    for seconds, refused in ((YEAR, True), (-YEAR, False)):

        def slow(items: object, seconds: float = seconds) -> list[str]:
            done = put(items)  # type: ignore[arg-type]
            clock(seconds)
            lib.collect(grace_s=0, dry_run=False)
            return done

        monkeypatch.setattr(lib.blobs, "put_many", slow)
        data = make_container(7 + refused)
        if refused:
            with pytest.raises(EsperError) as error:
                lib.put_artifact(data)
            assert error.value.code == "E0726"
        else:
            assert lib.read(lib.put_artifact(data).id) == data
        monkeypatch.setattr(lib.blobs, "put_many", put)
        clock(0)
    assert len(lib.artifacts()) == 1
    assert verify_library(lib, lib.artifacts(), contents=True).findings == ()


def test_staging_leftovers_of_the_future(lib: Library, home: Path) -> None:
    dead = home / "staging" / "1-999999999-dead"
    alive = home / "staging" / f"1-{os.getpid()}-alive"
    for file in (dead, alive):
        file.write_bytes(b"half")
        os.utime(file, (time.time() + YEAR, time.time() + YEAR))
    lib.collect(dry_run=False)
    assert not dead.exists() and alive.exists()


def test_a_job_is_not_done_twice_when_the_clock_goes_back(lib: Library, clock: Clock) -> None:
    """The fence decides, not the time."""
    jobs.file_job(lib, "compile", "b", {})
    first = jobs.claim(lib, "compile", "one")
    clock(YEAR)
    second = jobs.claim(lib, "compile", "two")
    clock(-YEAR)
    assert first is not None and second is not None
    with pytest.raises(EsperError) as error:
        jobs.finish(lib, first)
    assert error.value.code == "E0726"
    jobs.finish(lib, second)


def test_trust_expires_by_the_clock_and_comes_back_with_it(lib: Library, clock: Clock) -> None:
    artifact = validated(lib)
    clock(10 * YEAR)
    with pytest.raises(EsperError) as error:
        lib.load(artifact)
    assert (error.value.code, error.value.exit_code) == ("E0749", 13)
    clock(0)
    assert lib.load(artifact).record.id == artifact
