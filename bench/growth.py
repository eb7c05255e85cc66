"""Growth: what dormant slots cost, what seeds cost, whether bottlenecks are found, what must never pass.

    python -m bench.harness growth [--only WORD]

WORD is a part: overhead, commands, decision, stalls, trap, rollbacks, planted (the long one). What is timed
is measured first, one after the other and alone on a core; the last three are trials, made side by side.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from bench import figures, results
from bench.crew import say
from bench.growing import artifacts, cores, crowd, lives, overhead, planted
from bench.results import device_here
from library.store import Library

TRIALS = ("planted", "rollbacks", "trap")
PIECE = 60  # rollbacks of one job
MOST_WORKERS = 32

Part = Callable[[Library, str, Callable[[str], None]], dict[str, Any]]


def measure(only: tuple[str, ...], say: Callable[[str], None]) -> dict[str, Any]:
    """Rows (one per plant) and figures of the parts named (default: all); with what was left out."""
    parts = (*_TIMED, *TRIALS)
    wanted = [part for part in parts if not only or any(word in part for word in only)]
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # small layers: a second thread waits more than it works
    made: dict[str, Any] = {}
    notes: list[str] = [f"left out: {part}" for part in parts if part not in wanted]
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="esper-growth-") as folder:
        with artifacts.stocked(Path(folder), artifacts.WIDE, say) as library:
            mlp = next(r.id for r in library.artifacts(state="VALIDATED") if r.name == "seed_mlp_64")
            for part in (part for part in wanted if part in _TIMED):
                say(f"growth: {part}")
                found, why = _tried(_TIMED[part], library, mlp)
                made |= found
                notes += [f"{part} failed: {why}"] if why else []
        torch.set_num_threads(before)
        found, broke = _trials([part for part in wanted if part in TRIALS], Path(folder))
    rows = found.pop("rows", [])
    loads = (load, os.getloadavg()[0])
    notes += [f"{name} failed: {why}" for name, why in broke.items()]
    notes.append(
        f"load average {loads[0]:.1f} when it began, {loads[1]:.1f} when it ended, {os.cpu_count()} cores"
    )
    return {"rows": rows, "figures": made | found, "notes": notes}


def _tried(part: Part, library: Library, mlp: str) -> tuple[dict[str, Any], str]:
    """What a part gave, and why it broke if it did: one that breaks must not cost the others."""
    try:
        return part(library, mlp, say), ""
    except Exception as error:
        why = f"{type(error).__name__}: {str(error)[:300]}"
        say(f"failed: {why}")
        return {}, why


def _trials(wanted: list[str], folder: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Figures and rows of trials, all their jobs in one crowd, and the jobs that broke. A figure is over what
    was done, and says of how many."""
    workers = min(len(os.sched_getaffinity(0)), MOST_WORKERS)
    jobs: dict[str, crowd.Job] = {}
    if "trap" in wanted:
        (folder / "trap").mkdir()
        jobs["trap"] = lives.trap, (str(folder / "trap"),)
    if "planted" in wanted:
        jobs |= planted.jobs(folder)
    if "rollbacks" in wanted:
        for first in range(0, lives.ROLLBACKS, PIECE):
            end = min(first + PIECE, lives.ROLLBACKS)
            jobs[f"rollbacks {first} to {end}"] = lives.rollbacks, (first, end)
    if jobs:
        say(f"growth: {', '.join(wanted)}: {len(jobs)} jobs, {workers} at a time")
    gave, broke = crowd.together(jobs, workers)
    for name, why in broke.items():
        say(f"{name} failed: {why}")
    found: dict[str, Any] = dict(gave.get("trap", {}))
    done = [name for name in gave if name.startswith("rollbacks")]
    if done:
        many = sum(jobs[name][1][1] - jobs[name][1][0] for name in done)
        found |= lives.rolled_back([wrong for name in done for wrong in gave[name]], many)
    if "planted" in wanted:
        lines = planted.lines()
        found |= {**planted.figures(lines), "rows": planted.judged(lines)}
    return found, broke


def alone(only: tuple[str, ...], out: Path) -> int:
    """The whole bench and its results file; how many parts broke."""
    found = measure(only, say)
    document = {**results.header("growth"), **found}
    say(f"written: {results.write(document, out)}")
    figures.show(document)
    return sum("failed" in note for note in found["notes"])


def _on_a_core(part: Part) -> Part:
    def alone_there(library: Library, mlp: str, say: Callable[[str], None]) -> dict[str, Any]:
        with cores.pinned():
            return part(library, mlp, say)

    return alone_there


_TIMED: Mapping[str, Part] = {
    "overhead": lambda library, mlp, say: overhead.measure(device_here(), say),
    "commands": _on_a_core(lambda library, mlp, say: lives.commands(library, mlp)),
    "decision": _on_a_core(lambda library, mlp, say: lives.decision()),
    "stalls": lambda library, mlp, say: lives.stalls(library, mlp, say),
}
