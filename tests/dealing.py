"""How `pytest -n 3 --dist loadscope` deals tests to workers: what shares expensive fixtures stays together,
and what takes longest comes first.

Dealt one by one, every worker would make the fixtures of a module or of the session for itself, and a long
test at the end would leave the other workers idle.
"""

from __future__ import annotations

from typing import Any

import pytest

TOGETHER = ("tests/promises/", "tests/runtime/seeds/", "tests/runtime/")
"""Folders whose files share what is compiled once for a session; of several that match, the first counts."""
FIRST = (
    "tests/test_docs.py", "tests/runtime/", "tests/promises/", "tests/faults/test_planted.py",
    "tests/forge/test_tune.py", "tests/esper_ir/test_import_torch.py", "tests/runtime/seeds/",
    "tests/forge/test_graphs.py", "tests/test_lint.py", "tests/forge/test_interpreter.py",
    "tests/gauntlet/test_restart.py", "tests/gauntlet/test_prove.py",
)  # fmt: skip
"""The longest, longest first; all others follow in the order in which they are collected."""


def unit_of(nodeid: str) -> str:
    """The tests of one unit run in one worker, one after another: those of a file, or of a folder."""
    file = nodeid.partition("::")[0]
    return next((folder for folder in TOGETHER if file.startswith(folder)), file)


def rank(item: pytest.Item) -> int:
    """Tests are sorted by it."""
    unit = unit_of(item.nodeid)
    return FIRST.index(unit) if unit in FIRST else len(FIRST)


def scheduler(config: pytest.Config, log: Any) -> Any:
    """xdist's, with these units, in the order of their first tests, each to the first worker that is about to
    be done. Imported here: a machine that runs tests one by one needs no xdist."""
    from xdist.scheduler import LoadScopeScheduling

    class Dealing(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return unit_of(nodeid)

    config.option.loadscopereorder = False
    return Dealing(config, log)
