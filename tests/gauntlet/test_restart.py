"""Killed at any moment and started again, or run twice at once: one verdict for each, the right one."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from gauntlet import quarantine, runner
from gauntlet.exclusive import exclusive
from gauntlet.isolate import ForkServer
from gauntlet.sampling import BRIEF
from library.store import Library
from tests.faults import handmade, planted, toys
from tests.gauntlet.conftest import put
from tests.gauntlet.test_prove import WRONG_MASK

BENCH = [sys.executable, "-m", "gauntlet.cli", "bench", "--quick", "--json", "--library"]
LONG = 900.0
"""Seconds within which anything ends, however busy the machine is."""


def _start(home: Path, *ids: str) -> subprocess.Popen[bytes]:
    """Those artifacts, or all that are pending."""
    command = [*BENCH, str(home), *(ids or ("--pending",))]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _states(home: Path) -> dict[str, str]:
    with Library.open(home, readonly=True) as library:
        return {record.id: record.state for record in library.artifacts()}


def _verdicts(home: Path) -> int:
    with Library.open(home, readonly=True) as library:
        return len(library.index.rows("SELECT seq FROM verdicts"))


def _reasons(home: Path) -> dict[str, str]:
    with Library.open(home, readonly=True) as library:
        found = {record.id: library.verdict(record.id) for record in library.artifacts()}
    return {name: verdict.reason for name, verdict in found.items() if verdict and not verdict.passed}


def _until_one_more(home: Path, process: subprocess.Popen[bytes]) -> None:
    before, deadline = _verdicts(home), time.monotonic() + LONG
    while _verdicts(home) == before and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)


def test_killed_and_run_twice_at_once(home: Path) -> None:
    good = [put(home, make()) for make in (toys.affine, toys.norm)]
    bad = [
        put(home, handmade.edit(toys.affine(), WRONG_MASK)),
        put(home, handmade.edit(toys.softmax(), ("c < cols; c++) sum +=", "c < cols - 1; c++) sum +="))),
    ]
    process = _start(home, bad[0], good[0])  # not all: something is left to do, whoever is quick
    _until_one_more(home, process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert "PENDING_BENCHMARKING" in _states(home).values()
    both = [_start(home), _start(home)]
    assert [p.wait(LONG) for p in both] != [0, 0]
    expected = {**dict.fromkeys(good, "VALIDATED"), **dict.fromkeys(bad, "REJECTED")}
    assert _states(home) == expected, _reasons(home)
    assert _verdicts(home) == len(good) + len(bad)


def _mixed() -> dict[str, tuple[handmade.Toy, str]]:
    """Twenty artifacts by name, with the verdict each deserves: ten sound ones, ten faults of as many
    classes."""
    makers = list(toys.ALL.values())
    sound = [replace(makers[i % len(makers)](), name=f"sound {i}") for i in range(10)]
    faulty: dict[str, handmade.Toy] = {}
    for fault in planted.faults():
        if fault.kind not in (*faulty, "endless loop") and len(faulty) < 10:
            faulty[fault.kind] = replace(fault.toy, name=f"faulty {fault.name}")
    return {t.name: (t, "VALIDATED") for t in sound} | {t.name: (t, "REJECTED") for t in faulty.values()}


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_twenty_of_mixed_quality_killed_twice(home: Path) -> None:
    """Once between two artifacts, once in the middle of one; nothing is lost, nothing judged twice."""
    wanted = {put(home, toy): state for toy, state in _mixed().values()}
    assert len(wanted) == 20
    for delay in (0.0, 0.7):
        process = _start(home)
        for _ in range(3):
            _until_one_more(home, process)
        time.sleep(delay)
        assert process.poll() is None, "it was done before it was killed: the test says nothing"
        process.send_signal(signal.SIGKILL)
        process.wait()
    before = _verdicts(home)
    assert 6 <= before < 20
    assert _start(home).wait(LONG) == 1
    assert _states(home) == wanted, _reasons(home)
    assert _verdicts(home) == 20
    with Library.open(home, readonly=True) as library:
        for artifact, state in wanted.items():
            verdict = library.verdict(artifact)
            assert verdict is not None and verdict.passed is (state == "VALIDATED")
            failed = [s for s in verdict.report["stages"] if s["outcome"] == "failed"]
            assert len(failed) == (state == "REJECTED")


def _below(pid: int) -> list[int]:
    """Processes that a process started, and theirs, in that order: the fork server, nannies, workers."""
    parents: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            told = Path(f"/proc/{name}/stat").read_text(encoding="utf-8", errors="replace")
            parents.setdefault(int(told.rpartition(")")[2].split()[1]), []).append(int(name))
    found, open_ = [], [pid]
    while open_:
        found += (children := parents.get(open_.pop(0), []))
        open_ += children
    return found


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_killed_at_any_moment(home: Path) -> None:
    """The supervisor, the fork server, a nanny or a worker, at a moment drawn at random; then the rest. What
    was judged stays judged, and right; what was not is still pending; nobody else's death is blamed on an
    artifact."""
    good = [put(home, make()) for make in (toys.affine, toys.norm, toys.dense)]
    bad = [put(home, handmade.edit(toys.affine(), WRONG_MASK))]
    wanted = {**dict.fromkeys(good, "VALIDATED"), **dict.fromkeys(bad, "REJECTED")}
    rng, cut = random.Random(6), 0
    for turn in range(12):
        process = _start(home)
        time.sleep(rng.uniform(0.3, 4.0))
        others = _below(process.pid)
        victim = process.pid if turn % 3 == 0 or not others else rng.choice(others)
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
        time.sleep(rng.uniform(0.0, 0.5))
        cut += process.poll() is None or victim == process.pid
        process.kill()
        process.wait()
        now = _states(home)
        assert all(state in ("PENDING_BENCHMARKING", wanted[name]) for name, state in now.items()), (
            now, _reasons(home),
        )  # fmt: skip
    assert cut, "every run was done before it was cut: the test says nothing"
    _start(home).wait(LONG)
    assert _states(home) == wanted, _reasons(home)
    assert _verdicts(home) == len(wanted)


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    if not (child := os.fork()):
        with exclusive(tmp_path, "artifact"):
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    with exclusive(tmp_path, "artifact", "cuda:0"):
        pass


def test_a_card_that_is_not_there_is_not_put_aside(home: Path) -> None:
    artifact = put(home, toys.affine())
    with ForkServer() as server:
        try:
            runner.prove(artifact, library=home, server=server, device="cuda:99")
        except runner.EsperError as error:
            assert error.code == "E0903" and error.exit_code == 16 and "cuda:99" in error.message
            assert error.hint and "machine that has the card" in error.hint
        else:
            raise AssertionError("judged on a card that does not exist")
    assert _states(home)[artifact] == "PENDING_BENCHMARKING"
    assert not quarantine.place(home, "cuda:99").exists()


def test_a_device_that_is_put_aside_judges_nothing(home: Path) -> None:
    """A server that runs no probe stands for a card that answers nobody."""
    artifact = put(home, toys.affine())
    path = quarantine.place(home, "cpu")
    path.parent.mkdir()
    path.write_text('{"reason": "it hung"}')
    with ForkServer(packages=("tests",)) as deaf:
        try:
            runner.prove(artifact, library=home, server=deaf)
        except runner.EsperError as error:
            assert error.code == "E0906" and error.exit_code == 16
        else:
            raise AssertionError("judged on a device that is put aside")
    assert _states(home)[artifact] == "PENDING_BENCHMARKING" and path.exists()
    with ForkServer() as back:
        assert runner.prove(artifact, library=home, server=back, quick=True, effort=BRIEF).passed
    assert not path.exists(), "it answers again, so it is taken back"
