"""A library with a trust home of its own. Most tests are about logic and use memory as their disk where there
is one: a sync then costs nothing. Those about crashes and durability use `disk_home`."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from library.store import Library

SHM = Path("/dev/shm")


@pytest.fixture
def fast_tmp(tmp_path: Path) -> Iterator[Path]:
    """A private directory, in memory where possible."""
    if not os.access(SHM, os.W_OK):
        yield tmp_path
        return
    place = Path(tempfile.mkdtemp(prefix="esper-test-", dir=SHM))
    yield place
    shutil.rmtree(place, ignore_errors=True)


@pytest.fixture
def home(fast_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the library of this test will be; keys beside it."""
    return _alone(fast_tmp, monkeypatch)


@pytest.fixture
def disk_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same on a real disk."""
    return _alone(tmp_path, monkeypatch)


def _alone(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ESPER_KEYS", str(place / "keys"))
    monkeypatch.setenv("ESPER_LIBRARY", str(place / "library"))
    for name in ("ESPER_PASSPHRASE_FILE", "ESPER_PASSPHRASE_FD"):
        monkeypatch.delenv(name, raising=False)
    return place / "library"


@pytest.fixture
def lib(home: Path) -> Iterator[Library]:
    """Open for reading, storing and proving."""
    with Library.open(home) as opened:
        yield opened
