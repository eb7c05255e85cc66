"""What failed in use is judged first."""

from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner

from esper_ir.diagnostics import EsperError
from gauntlet.cli import main
from library.contracts import FieldReport
from library.store import Library
from tests.runtime.conftest import Put, put

assert put


def test_what_failed_in_use_is_judged_first(put: Put, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = put(version="34" * 32, validated=False)
    sound, crashed = put(), put(pipeline="standard")
    with Library.open() as library:
        library.record_outcomes([FieldReport("ab" * 32, crashed, "", 0.0, 0.0, "CRASHED", {"code": "E0820"})])
        library.record_outcomes([FieldReport("ab" * 32, sound, "", 0.0, 0.0, "EXPOSED", {})])
    judged: list[str] = []

    def prove(artifact_id: str, **_: Any) -> Any:
        judged.append(artifact_id)
        raise EsperError("E0906", "not judged here", exit_code=16)

    monkeypatch.setattr("gauntlet.runner.prove", prove)
    CliRunner().invoke(main, ["bench", "--pending"])
    assert judged == [crashed, waiting]
