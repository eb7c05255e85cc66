"""Processes that make ready together measure one at a time."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gauntlet import profile, waves
from gauntlet.isolate import CRASH, FINISHED, ILLEGAL, Ending, Errand, ForkServer
from gauntlet.jobs import decode_job
from tests.faults import handmade, toys
from tests.gauntlet.test_measuring import SHORT
from tests.source import ROOT

TOGETHER = replace(SHORT, processes=5, together=True)
THREE = profile.Job("cpu", effort=replace(TOGETHER, processes=3))


def test_none_before_all_are_ready_and_none_beside_another(tmp_path: Path) -> None:
    turns = waves.Turns(tmp_path, (0, 1, 2, 3))
    with turns.opened():
        ends = {n: os.open(turns.pipe(n), os.O_RDONLY | os.O_NONBLOCK) for n in range(4)}

        def may() -> list[int]:
            return [n for n, end in ends.items() if select.select([end], [], [], 0)[0]]

        turns.ready(2)
        turns.ready(0)
        turns.ended(3)  # while it made ready
        assert may() == []
        turns.ready(1)
        assert may() == [2]
        turns.ready(2)  # said once more
        turns.ended(0)  # while it waited
        assert may() == [2]
        turns.ended(2)
        assert may() == [1, 2]
    with pytest.raises(SystemExit):
        for _ in range(2):
            waves.wait(ends[0])
    assert list(tmp_path.iterdir()) == []


def test_on_a_processor(server: ForkServer) -> None:
    told: list[Mapping[str, Any]] = []
    measuring = most = 0

    def tell(event: Mapping[str, Any]) -> None:
        nonlocal measuring, most
        told.append(event)
        measuring += {"launch": 1, "landed": -1}.get(event["event"], 0)
        if Counter(e["event"] for e in told)[waves.READY] == 3:
            most = max(most, measuring)

    said = profile.measure(handmade.build(toys.norm()), THREE, server, tell)
    assert said.outcome == "passed" and said.metrics["processes"] == 3, said.reason
    assert said.metrics["failed_processes"] == []
    names = [e["event"] for e in told]
    assert names.count("measured") == names.count(waves.READY) == names.count(waves.STARTED) == 3
    assert names.index("measured") > [i for i, name in enumerate(names) if name == waves.READY][2]
    assert most == 1
    parts = [e["part"] for e in told if e["event"] == "stage"]
    assert parts[0] == 1 and sorted(parts[1:]) == [1, 2, 3], "a turn is told when it begins"


@pytest.mark.parametrize(
    ("narrow", "dies", "runs", "measured"),
    [
        ((), (), ["012+", "34+"], 5),
        ((1,), (), ["012+", "1", "3", "4"], 5),
        ((), (0,), ["012+", "0", "3", "4"], 4),
        ((), (0, 1, 2), ["012+", "0", "1", "2", "3", "4"], 2),
    ],
)
def test_what_fails_beside_others_is_run_alone(
    monkeypatch: pytest.MonkeyPatch,
    narrow: Sequence[int],
    dies: Sequence[int],
    runs: list[str],
    measured: int,
) -> None:
    """For want of memory some end with an error, some with a signal."""
    seen: list[str] = []

    def ending(number: int, alone: bool) -> Ending:
        if number in dies:
            return Ending(ILLEGAL, "SIGSEGV in candidate code", (), "", 0.0)
        if number in narrow and not alone:
            return Ending(CRASH, "exit code 1", (), "OutOfMemoryError: no room", 0.0)
        return Ending(FINISHED, "", ({"event": "measured"},), "", 0.0)

    def run_all(server: ForkServer, errands: Sequence[Errand]) -> list[Ending]:
        jobs = [decode_job(e.arguments)[0] for e in errands]
        assert all(bool(job["turn"]) == (len(jobs) > 1) for job in jobs)
        seen.append("".join(str(job["number"]) for job in jobs) + "+" * (len(jobs) > 1))
        return [ending(job["number"], len(jobs) == 1) for job in jobs]

    monkeypatch.setattr(ForkServer, "run_all", run_all)
    monkeypatch.setattr(profile, "metrics_of", lambda found, job: {"n": len(found)})
    said = profile.measure(b"", profile.Job("cpu", effort=TOGETHER), ForkServer())
    assert seen == runs
    if len(dies) > 1:
        assert said.outcome == "failed"
    else:
        assert said.outcome == "passed" and said.metrics["n"] == measured
        assert len(said.metrics["failed_processes"]) == len(dies)


def _of_worker(pid: int) -> list[int]:
    """The workers of a fork server and their nannies."""
    listed = subprocess.run(["ps", "-eo", "pid,ppid"], capture_output=True, text=True).stdout.split()[2:]
    parents = {int(a): int(b) for a, b in zip(listed[::2], listed[1::2], strict=True)}
    found, grown = {pid}, True
    while grown:
        more = {child for child, parent in parents.items() if parent in found} - found
        found, grown = found | more, bool(more)
    return sorted(found)


def _gone(pids: Sequence[int], within_s: float = 20.0) -> bool:
    end = time.monotonic() + within_s
    while time.monotonic() < end and any(Path(f"/proc/{pid}").exists() for pid in pids):
        time.sleep(0.05)
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.parametrize("when", [waves.READY, waves.STARTED])
def test_what_the_listener_raises_ends_all(server: ForkServer, when: str) -> None:
    running: list[int] = []

    def tell(event: Mapping[str, Any]) -> None:
        if event["event"] == when:
            running.extend(_of_worker(server.pid or 0))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        profile.measure(handmade.build(toys.norm()), THREE, server, tell)
    assert len(running) >= 3 and server.pid is None and _gone(running)


@pytest.mark.parametrize("victim", ["server", "worker"])
def test_killed_while_they_wait(server: ForkServer, victim: str) -> None:
    """Whatever ends without having measured is run again, alone."""
    killed: list[int] = []

    def tell(event: Mapping[str, Any]) -> None:
        if event["event"] == waves.STARTED and not killed:
            found = _of_worker(server.pid or 0)
            killed.append(found[0] if victim == "server" else found[-1])
            os.kill(killed[0], signal.SIGKILL)

    said = profile.measure(handmade.build(toys.norm()), THREE, server, tell)
    assert killed and said.outcome == "passed", said.reason
    assert said.metrics["processes"] == 3 and said.metrics["failed_processes"] == []


SUPERVISOR = """
import signal
from gauntlet import profile, waves
from gauntlet.isolate import ForkServer
from tests.faults import handmade, toys
from tests.gauntlet.test_waves import THREE, _of_worker
signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background begin without
with ForkServer() as server:
    def tell(event):
        if event["event"] == waves.READY:
            print(*_of_worker(server.pid), flush=True)
    profile.measure(handmade.build(toys.norm()), THREE, server, tell)
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_supervisor_that_is_ended_leaves_nothing(how: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout
        running = [int(word) for word in process.stdout.readline().split()]
        process.send_signal(how)
        assert running and process.wait(30) == (-how if how == signal.SIGKILL else -signal.SIGINT)
    assert _gone(running)


def _full(write: Callable[[], Any]) -> None:
    raise OSError(28, "No space left on device")


def test_a_full_disk_holds_up_nobody(server: ForkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns need no room: files that are written while processes wait would."""
    monkeypatch.setattr(Path, "write_bytes", lambda self, data: _full(lambda: data))
    monkeypatch.setattr(Path, "write_text", lambda self, data: _full(lambda: data))
    said = profile.measure(handmade.build(toys.norm()), THREE, server)
    assert said.outcome == "passed" and said.metrics["processes"] == 3
