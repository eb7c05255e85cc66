"""Shared fixtures: goldens with one update flag, a library of one's own, card tests skipped aloud."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.dealing import rank, scheduler

NO_CARD = "no CUDA card here: this test did NOT run (make test-gpu on a machine with one)"
os.environ.setdefault("ESPER_SEED", "0")  # verdicts that repeat, of commands in processes of their own too
# Threads of OpenMP that wait spin by default. With more workers than processors each holds up those that it
# waits for: small operators then take ten times as long. It has to be said before torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
GOLDENS = Path(__file__).with_name("goldens")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="rewrite the golden files instead of comparing"
    )


def _card() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """`--dist loadscope` deals the units of `tests.dealing`."""
    return scheduler(config, log) if config.getoption("dist") == "loadscope" else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        items.sort(key=rank)
    wanted = [item for item in items if item.get_closest_marker("gpu")]
    # With ESPER_REQUIRE_GPU=1 (`make test-gpu`) they run and fail without a card instead of being skipped.
    if not wanted or os.environ.get("ESPER_REQUIRE_GPU") == "1" or _card():
        return
    for item in wanted:
        item.add_marker(pytest.mark.skip(reason=NO_CARD))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Recorded counters, and every skipped test with its reason: a skip is never silent."""
    counted = [
        (report.nodeid, value)
        for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed")
        for name, value in getattr(report, "user_properties", ())
        if name == "counters" and report.when == "call"
    ]
    if counted:
        terminalreporter.section("counters")
    for test, counters in counted:
        terminalreporter.line(f"{test}: {counters}")
    skipped = terminalreporter.getreports("skipped")
    if not skipped:
        return
    terminalreporter.section("skipped: these tests did not run")
    for report in skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        terminalreporter.line(f"{report.nodeid}: {reason.removeprefix('Skipped: ')}")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden(name, text)` compares text with tests/goldens/<name>; `--update-golden` rewrites the file."""

    def check(name: str, text: str) -> None:
        path = GOLDENS / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.exists(), (
            f"no golden {path}: run pytest --update-golden and read the result before committing"
        )
        assert text == path.read_text(encoding="utf-8"), (
            f"{path.name} differs; --update-golden if it is meant to"
        )

    return check


@pytest.fixture
def esper_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty library with a key home of its own; nothing of the user's is read or written.

    Yields the library's path (not yet created). Child processes inherit the setting.
    """
    for name in ("DATA", "CONFIG", "STATE", "CACHE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name.lower()))
    monkeypatch.setenv("ESPER_LIBRARY", str(tmp_path / "library"))
    monkeypatch.setenv("ESPER_KEYS", str(tmp_path / "keys"))
    monkeypatch.delenv("ESPER_STRICT", raising=False)
    yield tmp_path / "library"
