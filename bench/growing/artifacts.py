"""The seeds that hosts grow with: compiled, proven and tagged by rule before any training begins."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from forge.service import compile_file
from gauntlet.isolate import ForkServer
from gauntlet.runner import prove
from gauntlet.sampling import BRIEF
from library.store import Library

EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples"
WIDE = ("seed_mlp_64", "seed_lora_64")
ALL = (*WIDE, "seed_conv_16")
STABLE = 0.5  # share of the tolerance that may be used


def rule_tags(report: Mapping[str, Any], differentiable: bool) -> tuple[str, ...]:
    """Tags that follow from one report alone; percentiles among peers need peers."""
    profile, stages = report["wep"], {stage["name"]: stage for stage in report["stages"]}
    faster = report.get("baseline_comparison", {}).values()
    used = profile.get("tolerance_used")
    found = {
        "trainable": differentiable,
        "deterministic": stages.get("determinism", {}).get("outcome") == "passed",
        "numerically_stable": isinstance(used, int | float) and used <= STABLE,
        "faster_than_eager": bool(faster) and min(faster) > 0,
    }
    return tuple(tag for tag, holds in found.items() if holds)


def stock(
    library: Library, names: tuple[str, ...] = ALL, say: Callable[[str], None] = print
) -> dict[str, str]:
    """Artifact id by example: compiled for this processor, proven, tagged. Raises when one is rejected."""
    found: dict[str, str] = {}
    with ForkServer() as server:
        for name in names:
            (made,) = compile_file(EXAMPLES / f"{name}.json", targets=("cpu",), library=library)
            verdict = prove(made.artifact_id, library=library, server=server, quick=True, effort=BRIEF)
            if not verdict.passed:
                raise RuntimeError(f"{name}: {verdict.state} {verdict.reason}")
            signed = library.verdict(made.artifact_id)
            assert signed is not None
            interface = library.load(made.artifact_id).container.manifest["launch"]["interface"]
            learns = any(
                s["kind"] == "param" and s["name"] in interface["differentiable"] for s in interface["inputs"]
            )
            tags = rule_tags(signed.report, learns)
            library.annotate(made.artifact_id, {"generated_tags": list(tags)})
            say(f"{name}: {made.artifact_id} {verdict.state}, {', '.join(tags)}")
            found[name] = made.artifact_id
    return found


@contextmanager
def stocked(
    folder: Path, names: tuple[str, ...] = ALL, say: Callable[[str], None] = print
) -> Iterator[Library]:
    """A library with keys of its own in `folder`, filled with these seeds; filled once."""
    with Library.open(folder / "library", trust=folder / "trust") as library:
        have = {record.name for record in library.artifacts(state="VALIDATED")}
        missing = tuple(name for name in names if name not in have)
        if missing:
            stock(library, missing, say)
        yield library
