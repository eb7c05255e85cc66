"""Cross-compiling for a card that is not here: seconds and memory of every example, on two cores.

    python -m bench.cross [--only WORD] [--target h100] [--out DIR]

Each example is compiled by the command in a process of its own, bound to two cores. Its memory is that of the
command and of all workers below it together, looked at every 50 ms: what each has for itself and its share of
what several have (PSS of /proc). Where the machine does other work too, seconds count that as well; the
processor's seconds beside them do not.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import click

from bench import results
from bench.crew import say
from bench.results import figure

CORES = 2
LIMIT_S, MOST_BYTES = 60.0, 1 << 30
EVERY_S = 0.05
PATIENCE = 10.0
"""Times the limit, after which a compilation is stopped."""


def children_of(root: int) -> list[int]:
    """A process and all below it."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            after_name = (entry / "stat").read_text().rpartition(")")[2].split()
        except (OSError, ValueError):
            continue
        parents.setdefault(int(after_name[1]), []).append(int(entry.name))
    found, stack = [], [root]
    while stack:
        found.append(stack.pop())
        stack += parents.get(found[-1], ())
    return found


def memory_of(pids: Iterable[int]) -> int:
    """Bytes of these processes together; what several share counts once."""
    total = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue  # it has ended
        total += sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total


def compiled(path: Path, target: str, cores: set[int]) -> dict[str, Any]:
    """One row: {"block", "target", "seconds", "cpu_s", "peak_bytes", "kernels", "stages"} or {"why"}."""
    with tempfile.TemporaryDirectory(prefix="esper-cross-") as folder:
        command = [sys.executable, "-m", "forge.cli", "compile", str(path), "--target", target]
        command += ["--pipeline", "fast", "--library", f"{folder}/library", "--json"]
        environment = {**os.environ, "ESPER_KEYS": f"{folder}/trust", "ESPER_LIBRARY": f"{folder}/library"}
        before, started = os.times(), time.monotonic()
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            process = subprocess.Popen(
                command, stdout=out, stderr=err, env=environment, cwd=results.ROOT,
                preexec_fn=lambda: os.sched_setaffinity(0, cores),
            )  # fmt: skip
            peak = watched(process, started)
            seconds, after = time.monotonic() - started, os.times()
            out.seek(0)
            text = out.read()
            err.seek(0)
            said = err.read().decode("utf-8", "replace").strip()
        spent = after.children_user + after.children_system - before.children_user - before.children_system
        row = {"block": path.stem, "target": target, "seconds": seconds, "cpu_s": spent, "peak_bytes": peak}
        if process.returncode:
            return {**row, "why": said[-300:] or f"exit code {process.returncode}"}
        (made,) = json.loads(text)["artifacts"]
        return {**row, "kernels": made["kernels"], "bytes": made["size_bytes"], "stages": made["seconds"]}


def watched(process: subprocess.Popen[bytes], started: float) -> int:
    """Peak bytes of a process and its workers, until it ends or is stopped."""
    peak = 0
    while process.poll() is None:
        peak = max(peak, memory_of(children_of(process.pid)))
        if time.monotonic() - started > PATIENCE * LIMIT_S:
            process.kill()
        time.sleep(EVERY_S)
    return peak


def figures(rows: list[Mapping[str, Any]]) -> dict[str, Any]:
    done = [r for r in rows if "why" not in r]
    slow = max((r["seconds"] for r in done), default=None)
    large = max((r["peak_bytes"] / 2**30 for r in done), default=None)
    whole = bool(done) and len(done) == len(rows)
    return {
        "compiled": figure(len(done), "blocks", len(rows), at_least=True),
        "seconds_max": figure(slow if whole else None, "s", LIMIT_S),
        "seconds_p50": figure(statistics.median(r["seconds"] for r in done) if done else None, "s"),
        "cpu_s_max": figure(max((r["cpu_s"] for r in done), default=None), "s"),
        "peak_GiB_max": figure(large if whole else None, "GiB", MOST_BYTES / 2**30),
        "load_average": figure(os.getloadavg()[0], "processes"),
    }


def measured(only: tuple[str, ...], target: str) -> dict[str, Any]:
    """The results document."""
    cores = set(sorted(os.sched_getaffinity(0))[:CORES])
    rows: list[Mapping[str, Any]] = []
    for path in sorted((results.ROOT / "examples").glob("*.json")):
        if only and not any(word in path.stem for word in only):
            continue
        rows.append(compiled(path, target, cores))
        row = rows[-1]
        told = row.get("why") or f"{row['seconds']:.1f} s, {row['peak_bytes'] / 2**20:.0f} MiB"
        say(f"{path.stem}: {told}")
    return {**results.header("cross"), "cores": len(cores), "rows": rows, "figures": figures(rows)}


@click.command()
@click.option("--only", multiple=True, help="Words in the names of examples.")
@click.option("--target", default="h100", show_default=True)
@click.option("--out", type=click.Path(path_type=Path), default=results.RESULTS, show_default=False)
def main(only: tuple[str, ...], target: str, out: Path) -> None:
    """Compile the examples and write the results file."""
    document = measured(only, target)
    for name, one in document["figures"].items():
        say(f"{name}: {one['value']} {one['unit']}")
    say(f"written: {results.write(document, out)}")


if __name__ == "__main__":
    main()
