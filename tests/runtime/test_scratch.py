"""Folders of one use: gone afterwards, also what a killed process left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from runtime import scratch

HOLD = """
import sys, time
from runtime import scratch
with scratch.folder("esper-test-") as made:
    open(made + "/file", "w").close()
    print(made, flush=True)
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def _holder() -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True)
    assert process.stdout
    return process, Path(process.stdout.readline().strip())


def _old(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "YOUNG_S", -1.0)
    assert path.is_dir()


def test_it_is_gone_afterwards(place: Path) -> None:
    with pytest.raises(RuntimeError), scratch.folder("esper-test-") as made:
        (Path(made) / "file").touch()
        raise RuntimeError
    assert not list(place.iterdir())


def test_what_a_killed_process_left_goes_with_the_next(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process, left = _holder()
    process.send_signal(signal.SIGKILL)
    process.wait()
    with scratch.folder("esper-test-"):
        assert left.is_dir()  # younger than a minute
    _old(left, monkeypatch)
    with scratch.folder("esper-other-"):
        assert left.is_dir()  # of another kind
    with scratch.folder("esper-test-"):
        assert not left.exists()


def test_what_is_in_use_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    process, held = _holder()
    _old(held, monkeypatch)
    with scratch.folder("esper-test-") as own, scratch.folder("esper-test-") as other:
        assert (held / "file").exists() and Path(own).is_dir() and Path(other).is_dir()
    process.kill()
    process.wait()


def test_links_files_and_strangers_stay(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "kept").mkdir()
    (place / "kept" / "file").touch()
    (place / "esper-test-link").symlink_to(place / "kept")
    (place / "esper-test-file").touch()
    (place / "esper-test-strange").mkdir()
    monkeypatch.setattr(scratch, "YOUNG_S", -1.0)
    monkeypatch.setattr(os, "getuid", lambda: -5)
    with scratch.folder("esper-test-"):
        pass
    assert (place / "kept" / "file").exists()
    assert {p.name for p in place.glob("esper-test-*")} == {
        "esper-test-link",
        "esper-test-file",
        "esper-test-strange",
    }
