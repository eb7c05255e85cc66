"""Style and types, with the versions of the environment that runs the tests."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.source import PACKAGES, ROOT


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, timeout=540
    )


def test_ruff_check() -> None:
    done = _run("ruff", "check", "--no-cache", "--output-format=concise", ".")
    assert done.returncode == 0, done.stdout + done.stderr


def test_ruff_format() -> None:
    done = _run("ruff", "format", "--no-cache", "--check", ".")
    assert done.returncode == 0, done.stdout + done.stderr


def test_pyright() -> None:
    done = _run("pyright", "--pythonpath", sys.executable, "--outputjson", *PACKAGES)
    try:
        report = json.loads(done.stdout)
    except json.JSONDecodeError:
        raise AssertionError(
            "pyright did not run (it needs node, from the system or from `pyright[nodejs]`):\n"
            f"{done.stdout}{done.stderr}"
        ) from None
    assert report["summary"]["filesAnalyzed"] > 0, "pyright looked at no file"
    found = [
        f"{row['file']}:{row['range']['start']['line'] + 1}: {row['message']}"
        for row in report["generalDiagnostics"]
        if row["severity"] == "error"
    ]
    assert not found, "\n".join(found)
