"""Every block of the examples is proven, by all stages: what is right is not refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from forge.service import compile_file
from gauntlet.isolate import ForkServer
from gauntlet.runner import judge
from library.store import Library
from tests.source import ROOT

EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("*.json"))
DEAR = ("linear_cross_entropy",)
"""Minutes, and 14 GiB."""


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in EXAMPLES if name not in DEAR])
def test_an_example_is_proven(name: str, server: ForkServer, tmp_path: Path) -> None:
    with Library.open(tmp_path / "library", trust=tmp_path / "trust") as library:
        (made,) = compile_file(ROOT / "examples" / f"{name}.json", ("fast",), ("cpu",), library=library)
        assert made.artifact_id is not None, made
        container = library.read(made.artifact_id)
    found = judge(container, "cpu", server)
    assert found.passed, found.reason
    assert {stage.outcome for stage in found.stages} <= {"passed", "skipped"}
