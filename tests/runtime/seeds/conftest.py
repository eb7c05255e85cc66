"""One library of small seeds per session, and copies of it for tests that damage one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from library.store import Library
from runtime import loader, outcomes
from tests.runtime.seeds import garden

Ids = dict[str, str]


@pytest.fixture(scope="session")
def garden_home(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ids]:
    home = tmp_path_factory.mktemp("garden")
    home.chmod(0o700)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ESPER_LIBRARY", str(home / "library"))
        patch.setenv("ESPER_KEYS", str(home / "keys"))
        return home, garden.fill(home)


def _fresh(patch: pytest.MonkeyPatch, home: Path) -> None:
    patch.setenv("ESPER_LIBRARY", str(home / "library"))
    patch.setenv("ESPER_KEYS", str(home / "keys"))
    patch.delenv("ESPER_STRICT", raising=False)
    loader.cache().release()
    loader._meant.clear()
    loader._libraries.clear()
    loader._faulty.clear()
    outcomes.memory.clear()


@pytest.fixture
def ids(garden_home: tuple[Path, Ids], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Ids:
    """Artifact ids by name; outcomes go to a spool, so that the session's library is only read."""
    _fresh(monkeypatch, garden_home[0])
    monkeypatch.setenv("ESPER_SPOOL", str(tmp_path / "spool.jsonl"))
    return garden_home[1]


@pytest.fixture
def own(
    garden_home: tuple[Path, Ids], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[tuple[Library, Ids]]:
    """A copy of the library that a test may revoke from, cut or write to."""
    home = tmp_path / "own"
    shutil.copytree(garden_home[0], home)
    home.chmod(0o700)
    _fresh(monkeypatch, home)
    with Library.open() as library:
        yield library, garden_home[1]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Bits do not depend on it; a machine that others use runs the little kernels faster so."""
    many = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(many)
