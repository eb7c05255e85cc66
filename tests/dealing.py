"""How `pytest -n 2 --dist loadscope` deals tests to workers: what shares expensive fixtures stays together,
and what takes longest comes first.

Dealt one by one, every worker would make the fixtures of a module or of the session for itself, and a long
test at the end would leave the other workers idle.
"""

from __future__ import annotations

import pytest
from xdist.scheduler import LoadScopeScheduling

TOGETHER = ("tests/promises/", "tests/runtime/seeds/", "tests/runtime/")
"""Folders whose files share what is compiled once for a session; of several that match, the first counts."""
FIRST = ("tests/test_docs.py", "tests/runtime/seeds/", "tests/test_lint.py")
"""The longest, longest first; all others follow in the order in which they are collected."""


def unit_of(nodeid: str) -> str:
    """The tests of one unit run in one worker, one after another: those of a file, or of a folder."""
    file = nodeid.partition("::")[0]
    return next((folder for folder in TOGETHER if file.startswith(folder)), file)


def rank(item: pytest.Item) -> int:
    """Tests are sorted by it."""
    unit = unit_of(item.nodeid)
    return FIRST.index(unit) if unit in FIRST else len(FIRST)


class Dealing(LoadScopeScheduling):
    """Units in the order of their first tests, each to the first worker that is about to be done."""

    def __init__(self, config: pytest.Config, log: object = None) -> None:
        super().__init__(config, log)  # type: ignore[arg-type]
        config.option.loadscopereorder = False

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid)
