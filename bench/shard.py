"""The card's tests in shares, with a line per outcome at once, so that a time limit still tells what passed.

    SHARD=0/2 SHARD_LOG=lines.jsonl python -m pytest -m gpu -p bench.shard FILES...
    python -m bench.shard lines-*.jsonl > tests.json

A pytest plugin: of the tests in the order given, a process runs every second (of `0/2`) from the first.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

LONG = ("test_card.py", "test_determinism.py")


def _tell(**fields: Any) -> None:
    place = os.environ.get("SHARD_LOG")
    if place:
        with Path(place).open("a", encoding="utf-8") as file:
            file.write(json.dumps(fields) + "\n")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """After the marks have chosen. Files whose tests take minutes come last: at a time limit they alone are
    left over."""
    at, count = (int(n) for n in os.environ.get("SHARD", "0/1").split("/"))
    items.sort(key=lambda item: item.path.name in LONG)
    mine, others = items[at::count], [item for n, item in enumerate(items) if n % count != at]
    if others:
        config.hook.pytest_deselected(items=others)
    items[:] = mine
    _tell(collected=[item.nodeid for item in items])


def pytest_runtest_logstart(nodeid: str) -> None:
    _tell(started=nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A test's call, or a set-up or tear-down that went wrong."""
    if report.when == "call" or report.outcome != "passed":
        why = "" if report.outcome == "passed" else str(report.longrepr)[-1500:]
        _tell(test=report.nodeid, outcome=report.outcome, seconds=round(report.duration, 3), why=why)


def summary(texts: Sequence[str]) -> dict[str, Any]:
    """Of the lines of all shares: outcomes by test; what was running at the end; what was never begun."""
    collected: list[str] = []
    started: list[str] = []
    outcomes: dict[str, dict[str, Any]] = {}
    for line in (json.loads(line) for text in texts for line in text.splitlines() if line.endswith("}")):
        collected += line.get("collected", [])
        started += [line["started"]] if "started" in line else []
        if "test" in line:
            before = outcomes.get(line["test"], {}).get("outcome")
            if before != "failed":  # a tear-down that passes does not mend a call that failed
                outcomes[line["test"]] = {k: v for k, v in line.items() if k != "test"}
    kinds = {
        kind: sum(o["outcome"] == kind for o in outcomes.values()) for kind in ("passed", "failed", "skipped")
    }
    return {
        "schema": "esper-tests/1",
        "collected": len(collected),
        **kinds,
        "stopped_in": [test for test in started if test not in outcomes],
        "not_begun": [test for test in collected if test not in started],
        "seconds": round(sum(o["seconds"] for o in outcomes.values()), 1),
        "tests": outcomes,
    }


def main() -> int:
    """The summary on standard output, the outcome in a line on standard error. 1 unless all passed."""
    found = summary([Path(name).read_text(encoding="utf-8") for name in sys.argv[1:] if Path(name).exists()])
    json.dump(found, sys.stdout, indent=1)
    open_ends = len(found["stopped_in"]), len(found["not_begun"])
    told = f"{found['passed']} passed, {found['failed']} failed, {found['skipped']} skipped"
    print(f"{told}, {open_ends[0]} stopped, {open_ends[1]} not begun", file=sys.stderr)
    for test, one in found["tests"].items():
        if one["outcome"] == "failed":
            print(f"FAILED {test}", file=sys.stderr)
    return int(bool(found["failed"] or any(open_ends) or not found["passed"]))


if __name__ == "__main__":
    sys.exit(main())
