"""A library with hand-made artifacts, and one fork server for all tests of a module."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gauntlet.isolate import ForkServer
from library.store import Library
from tests.faults import handmade, toys


@pytest.fixture(scope="session")
def server() -> Iterator[ForkServer]:
    with ForkServer(packages=("gauntlet", "tests")) as found:
        found.start()
        yield found


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty library directory; the trust home lies beside it."""
    monkeypatch.setenv("ESPER_KEYS", str(tmp_path / "trust"))
    with Library.open(tmp_path / "library", roles=("compiler", "validator")):
        return tmp_path / "library"


def put(home: Path, toy: handmade.Toy) -> str:
    """Store a hand-made artifact as the forge would; its id."""
    with Library.open(home, roles=("compiler",)) as library:
        return library.put_artifact(handmade.build(toy)).id


def affine() -> handmade.Toy:
    return toys.affine()
