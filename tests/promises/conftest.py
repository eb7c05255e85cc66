"""One library for the session, so that each example is compiled once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from library.store import Library
from tests.promises.shelf import Shelf


@pytest.fixture(scope="session")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shelf]:
    """A library of its own in which examples are compiled when a test first asks for them, proven or not."""
    home = tmp_path_factory.mktemp("shelf")
    with Library.open(home / "library", trust=home / "trust") as library:
        yield Shelf(library, home / "trust")
