"""compute-sanitizer as the gauntlet runs it, played by a script: what it finds is a verdict, what it cannot
do is not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gauntlet import sanitizer
from gauntlet.runner import Judgement, followed_by
from library.manifest import unpack
from tests.faults import handmade, toys

SCRIPT = """#!/bin/sh
tool=$2
shift 6
"$@" || exit 1
{end}
"""


def _script(folder: Path, end: str) -> str:
    path = folder / "compute-sanitizer"
    path.write_text(SCRIPT.format(end=end))
    path.chmod(0o755)
    return str(path)


@pytest.fixture(scope="module")
def container() -> bytes:
    return handmade.build(toys.softmax())


def test_a_finding_is_a_rejection(container: bytes, tmp_path: Path) -> None:
    (kernel, *_) = unpack(container, verified=True).manifest["launch"]["kernels"]
    found_at = f"Error: Race reported between Write access at {kernel['entry']}+0x10"
    race = f"========= COMPUTE-SANITIZER\n========= {found_at}"
    end = f"[ $tool != racecheck ] || {{ printf '{race}'; exit 86; }}"
    found = sanitizer.checks(container, "cpu", _script(tmp_path, end))
    assert found.outcome == "failed" and found.reason.startswith("racecheck: Error: Race reported")
    judged = followed_by(Judgement(True, "", (), {}, 1.0), found)
    assert judged.passed is False and judged.reason.startswith("sanitizer: racecheck")


def test_a_race_inside_a_library_is_not_the_artifacts(container: bytes, tmp_path: Path) -> None:
    """Also: the tools that ran are named, and the one that could not."""
    race = (
        "========= COMPUTE-SANITIZER\n========= Error: Race reported between Read access at nvjet_sm90+0xb30"
    )
    end = (
        f"[ $tool != racecheck ] || {{ printf '{race}'; exit 86; }}\n"
        "[ $tool != initcheck ] || { echo '========= no such tool'; exit 3; }"
    )
    found = sanitizer.checks(container, "cpu", _script(tmp_path, end))
    assert found.outcome == "passed" and found.metrics["tools"] == ["memcheck", "racecheck"]
    assert found.metrics["not_finished"] == ["initcheck"]
    assert "nvjet_sm90" in found.metrics["in_libraries"][0]


def test_where_it_is_absent_or_broken_nobody_is_blamed(
    container: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    absent = sanitizer.checks(container, "cpu")
    assert absent.outcome == "skipped" and "not installed" in absent.reason
    monkeypatch.setenv("PATH", os.defpath)
    path = tmp_path / "compute-sanitizer"
    path.write_text("#!/bin/sh\necho cannot attach >&2\nexit 5\n")
    path.chmod(0o755)
    broken = sanitizer.checks(container, "cpu", str(path))
    assert broken.outcome == "skipped" and "cannot attach" in broken.reason
    assert followed_by(Judgement(True, "", (), {}, 1.0), broken).passed
