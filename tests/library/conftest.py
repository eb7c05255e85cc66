"""A library with a trust home of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from library.store import Library


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the library of this test will be; keys beside it."""
    monkeypatch.setenv("ESPER_KEYS", str(tmp_path / "keys"))
    monkeypatch.delenv("ESPER_PASSPHRASE_FILE", raising=False)
    return tmp_path / "library"


@pytest.fixture
def lib(home: Path) -> Iterator[Library]:
    """Open for reading, storing and proving."""
    with Library.open(home) as opened:
        yield opened
