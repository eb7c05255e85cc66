"""Growth: what dormant slots cost, what seeds cost, whether bottlenecks are found, what must never pass.

    python -m bench.harness growth [--only WORD]

WORD is a part: overhead, commands, decision, stalls, trap, rollbacks, planted (the long one).
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
from bench.growing import artifacts, lives, overhead, planted
from bench.results import device_here
from library.store import Library

PARTS = ("overhead", "commands", "decision", "stalls", "trap", "rollbacks", "planted")

Part = Callable[[Library, str, Path, Callable[[str], None]], dict[str, Any]]


def measure(only: tuple[str, ...], say: Callable[[str], None]) -> dict[str, Any]:
    """Rows (one per plant) and figures of the parts named (default: all); with what was left out."""
    wanted = [part for part in PARTS if not only or any(word in part for word in only)]
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # small layers: a second thread waits more than it works
    made: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    notes: list[str] = [f"left out: {part}" for part in PARTS if part not in wanted]
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="esper-growth-") as folder:
        place = Path(folder)
        with artifacts.stocked(place, artifacts.WIDE, say) as library:
            mlp = next(r.id for r in library.artifacts(state="VALIDATED") if r.name == "seed_mlp_64")
            for part in wanted:
                say(f"growth: {part}")
                found, why = _tried(_PARTS[part], library, mlp, place)
                rows += found.pop("rows", [])
                made |= found
                notes += [f"{part} failed: {why}"] if why else []
    torch.set_num_threads(before)
    loads = (load, os.getloadavg()[0])
    notes.append(
        f"load average {loads[0]:.1f} when it began, {loads[1]:.1f} when it ended, {os.cpu_count()} cores"
    )
    return {"rows": rows, "figures": made, "notes": notes}


def _tried(part: Part, library: Library, mlp: str, place: Path) -> tuple[dict[str, Any], str]:
    """What a part gave, and why it broke if it did: one that breaks must not cost the others."""
    try:
        return part(library, mlp, place, say), ""
    except Exception as error:
        why = f"{type(error).__name__}: {str(error)[:300]}"
        say(f"failed: {why}")
        return {}, why


def alone(only: tuple[str, ...], out: Path) -> int:
    """The whole bench and its results file; how many parts broke."""
    found = measure(only, say)
    document = {**results.header("growth"), **found}
    say(f"written: {results.write(document, out)}")
    figures.show(document)
    return sum("failed" in note for note in found["notes"])


def _planted(library: Library, mlp: str, place: Path, say: Callable[[str], None]) -> dict[str, Any]:
    lines = planted.together(place, min(len(os.sched_getaffinity(0)), 16))
    return {**planted.figures(lines), "rows": planted.judged(lines)}


_PARTS: Mapping[str, Part] = {
    "overhead": lambda library, mlp, place, say: overhead.measure(device_here(), say),
    "commands": lambda library, mlp, place, say: lives.commands(library, mlp),
    "decision": lambda library, mlp, place, say: lives.decision(),
    "stalls": lambda library, mlp, place, say: lives.stalls(library, mlp, say=say),
    "trap": lambda library, mlp, place, say: lives.trap(library, place),
    "rollbacks": lambda library, mlp, place, say: lives.rollbacks(),
    "planted": _planted,
}
