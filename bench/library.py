"""`python -m bench.library [FOLDER]`: run the library's benches and write their results file."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench import results

TESTS = Path(__file__).with_name("test_library_bench.py")


def figures_of(report: dict[str, Any]) -> dict[str, Any]:
    """Figures that the tests left in pytest-benchmark's report."""
    found: dict[str, Any] = {}
    for row in report["benchmarks"]:
        for name, figure in row["extra_info"].get("figures", {}).items():
            at_least = figure.pop("at_least", False)
            found[name] = results.figure(figure["value"], figure["unit"], figure["target"], at_least=at_least)
    return dict(sorted(found.items()))


def main(folder: Path = results.RESULTS) -> int:
    """Exit code 1 when a target is not met, so that a regression shows."""
    with tempfile.TemporaryDirectory() as place:
        report = Path(place) / "report.json"
        command = [sys.executable, "-m", "pytest", str(TESTS), "-q", "-p", "no:cacheprovider"]
        done = subprocess.run([*command, f"--benchmark-json={report}", "--benchmark-disable-gc"])
        if done.returncode:
            return done.returncode
        figures = figures_of(json.loads(report.read_text(encoding="utf-8")))
    path = results.write({**results.header("library"), "figures": figures}, folder)
    for name, figure in figures.items():
        target = "" if figure["target"] is None else f"  target {figure['target']:g} met {figure['met']}"
        print(f"{name:32} {figure['value']:10.4g} {figure['unit']}{target}")
    print(path)
    return 1 if any(figure["met"] is False for figure in figures.values()) else 0


if __name__ == "__main__":
    sys.exit(main(*(Path(a) for a in sys.argv[1:2])))
