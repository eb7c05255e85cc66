"""Workers: what reaches them, what they cannot do, and how their ends are named."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from runtime import sandbox
from runtime.sandbox import Limits, ask, run_worker
from tests.runtime.test_executor import refusal

WORKER = "tests.runtime.worker"
SHORT = Limits(seconds=30)
AUTOGROUP = Path("/proc/self/autogroup")
LEVELS = sandbox.levels_here()
FILES = pytest.mark.skipif("landlock" not in LEVELS, reason="this kernel has no Landlock")
CALLS = pytest.mark.skipif("full" not in LEVELS, reason="this kernel has no seccomp")


def work(do: str, limits: Limits = SHORT, **request: Any) -> Any:
    return run_worker(WORKER, {"do": do, **request}, limits)


def test_answers_travel_as_json() -> None:
    found = ask(WORKER, {"do": "echo", "value": {"a": [1, None, "ü"]}}, SHORT)
    assert found.value == {"a": [1, None, "ü"]} and found.level == LEVELS[-1]
    assert found.peak_bytes > 1 << 20 and found.seconds > 0
    assert work("compile_c") > 1000


def test_nothing_of_the_environment_leaks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TRITON_X", "TORCH_X", "LD_PRELOAD_X", "CUDA_X", "ESPER_KEYS", "PYTHONSTARTUP", "SECRET"):
        monkeypatch.setenv(name, "1")
    found = work("environment")
    assert not [n for n in found if n.split("_")[0] in ("TRITON", "TORCH", "LD", "CUDA", "ESPER", "SECRET")]
    assert found["HOME"] == found["TMPDIR"] and not Path(found["HOME"]).exists()
    given = work("environment", Limits(seconds=30, environment=(("A", "b"),), threads=3))
    assert given["A"] == "b" and given["OMP_NUM_THREADS"] == "3"


@FILES
def test_files_outside_are_closed(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("secret")
    for do in ("read", "write"):
        error = refusal("E0834", work, do, path=str(tmp_path / "key"))
        assert "PermissionError" in error.message
    assert (tmp_path / "key").read_text() == "secret"
    assert work("read", Limits(seconds=30, readable=(str(tmp_path),)), path=str(tmp_path / "key")) == "secret"
    allowed = Limits(seconds=30, writable=(str(tmp_path),))
    assert work("write", allowed, path=str(tmp_path / "new")) == 1 and (tmp_path / "new").exists()


def test_written_files_are_bounded(tmp_path: Path) -> None:
    limits = Limits(seconds=30, file_bytes=1000, writable=(str(tmp_path),))
    assert work("write", limits, path=str(tmp_path / "a"), size=900) == 900
    refusal("E0834", work, "write", limits, path=str(tmp_path / "b"), size=5000)


@CALLS
def test_no_network() -> None:
    assert "PermissionError" in refusal("E0834", work, "connect").message


def test_ends_are_named() -> None:
    assert "SIGSEGV" in refusal("E0830", work, "crash").message
    assert refusal("E0830", work, "leave").details["returncode"] == 3
    assert refusal("E0832", work, "hoard", Limits(seconds=30, memory_bytes=4 << 30)).exit_code == 15
    named = refusal("E0312", work, "refuse")
    assert (named.node, named.hint, named.exit_code) == ("n", "h", 15)
    stumbled = refusal("E0834", work, "stumble")
    assert "no such thing" in stumbled.message and "worker.py" in stumbled.details["traceback"]
    refusal("E0834", run_worker, "no.such.module", {}, SHORT)


def test_time_is_bounded_and_nothing_is_left(tmp_path: Path) -> None:
    mark, started = tmp_path / "pid", time.monotonic()
    limits = Limits(seconds=2, writable=(str(tmp_path),))
    assert refusal("E0831", work, "spin", limits, mark=str(mark)).exit_code == 15
    assert time.monotonic() - started < 60
    deadline = time.monotonic() + 20
    while _session(int(mark.read_text())) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _session(int(mark.read_text()))


def _session(leader: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            found += _member(entry, leader)
    return found


def _member(entry: Path, leader: int) -> list[int]:
    try:
        fields = (entry / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
    return [int(entry.name)] if int(fields[3]) == leader and fields[0] != "Z" else []


def test_a_level_can_be_required(monkeypatch: pytest.MonkeyPatch) -> None:
    refusal("E0833", work, "echo", Limits(level="unheard-of"), value=1)
    assert work("echo", Limits(seconds=30, level=LEVELS[-1]), value=1) == 1
    # A kernel that reaches less than was asked for: the answer is thrown away.
    text = b'{"level": "limits", "peak_bytes": 1, "value": 1}'
    monkeypatch.setattr(sandbox, "_communicate", lambda *_: text)
    assert refusal("E0833", work, "echo", Limits(level="full"), value=1).exit_code == 16


def test_the_parent_is_not_confined(tmp_path: Path) -> None:
    work("echo", value=1)
    (tmp_path / "free").write_text("x")
    assert os.environ.get("HOME") is not None


def test_a_thread_that_gives_way_and_what_it_starts_run_last() -> None:
    found: list[tuple[str, int, int]] = []

    def give_way() -> None:
        reached = sandbox.give_way()
        found.append((reached, os.getpriority(os.PRIO_PROCESS, threading.get_native_id()), work("niceness")))

    before = os.getpriority(os.PRIO_PROCESS, 0)
    thread = threading.Thread(target=give_way)
    thread.start()
    thread.join()
    assert found == [(found[0][0], sandbox.LEAST_PRIORITY, sandbox.LEAST_PRIORITY)] and found[0][0]
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


@pytest.mark.skipif(not AUTOGROUP.exists(), reason="this kernel does not group by sessions")
def test_the_sessions_of_what_gives_way_do_too() -> None:
    """And no other: not this one, nor those of workers beside it."""
    found: list[str] = []

    def give_way() -> None:
        sandbox.give_way()
        found.append(work("session", until=sandbox.LEAST_PRIORITY))

    own = AUTOGROUP.read_text(encoding="ascii")
    thread = threading.Thread(target=give_way)
    thread.start()
    thread.join()
    assert found[0].endswith(f"nice {sandbox.LEAST_PRIORITY}\n")
    assert work("session", until=0).endswith("nice 0\n")
    assert AUTOGROUP.read_text(encoding="ascii") == own


@pytest.mark.skipif(not AUTOGROUP.exists(), reason="this kernel does not group by sessions")
@pytest.mark.parametrize("leads", [True, False])
def test_a_process_that_gives_way_as_a_whole_speaks_for_a_session_it_leads(leads: bool) -> None:
    code = "from runtime.sandbox import *; give_way(whole=True); print(open('/proc/self/autogroup').read())"
    own = AUTOGROUP.read_text(encoding="ascii")
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                           start_new_session=leads)  # fmt: skip
    assert (f"nice {sandbox.LEAST_PRIORITY}" in found.stdout) is leads
    assert AUTOGROUP.read_text(encoding="ascii") == own
