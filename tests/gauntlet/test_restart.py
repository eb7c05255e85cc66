"""Killed at any moment and started again, or run twice at once: one verdict for each, the right one."""

from __future__ import annotations

import os
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

BENCH = [sys.executable, "-m", "gauntlet.cli", "bench", "--pending", "--quick", "--json", "--library"]


def _start(home: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([*BENCH, str(home)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


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
    before, deadline = _verdicts(home), time.monotonic() + 60
    while _verdicts(home) == before and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)


def test_killed_twice_and_run_twice_at_once(home: Path) -> None:
    good = [put(home, make()) for make in (toys.affine, toys.norm, toys.dense)]
    bad = [
        put(home, handmade.edit(toys.affine(), WRONG_MASK)),
        put(home, handmade.edit(toys.softmax(), ("c < cols; c++) sum +=", "c < cols - 1; c++) sum +="))),
    ]
    for _ in range(2):
        process = _start(home)
        _until_one_more(home, process)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert "PENDING_BENCHMARKING" in _states(home).values(), "nothing was left to do: the test says nothing"
    both = [_start(home), _start(home)]
    assert [p.wait(120) for p in both] != [0, 0]
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
    assert _start(home).wait(600) == 1
    assert _states(home) == wanted, _reasons(home)
    assert _verdicts(home) == 20
    with Library.open(home, readonly=True) as library:
        for artifact, state in wanted.items():
            verdict = library.verdict(artifact)
            assert verdict is not None and verdict.passed is (state == "VALIDATED")
            failed = [s for s in verdict.report["stages"] if s["outcome"] == "failed"]
            assert len(failed) == (state == "REJECTED")


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
