"""Caught and planted by class, with the confidence bound of the share that was missed."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from pathlib import Path
from typing import Any

from bench import results


@dataclass(frozen=True)
class Row:
    kind: str
    caught: bool


def bound(missed: int, planted: int, confidence: float = 0.95) -> float:
    """Upper limit of the share missed (Clopper and Pearson 1934, one-sided), by bisection on the binomial
    tail."""
    if missed >= planted:
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(60):
        p = (low + high) / 2
        tail = sum(comb(planted, k) * p**k * (1 - p) ** (planted - k) for k in range(missed + 1))
        low, high = (p, high) if tail > 1 - confidence else (low, p)
    return high


def table(rows: Sequence[Row]) -> str:
    """One line per class, and the sum with its bound."""
    planted, caught = Counter(r.kind for r in rows), Counter(r.kind for r in rows if r.caught)
    lines = [f"{kind:34} {caught[kind]:4} of {planted[kind]:4}" for kind in sorted(planted)]
    missed = len(rows) - caught.total()
    lines.append(
        f"{'all':34} {caught.total():4} of {len(rows):4}; "
        f"at most {bound(missed, len(rows)):.2%} missed (95 %)"
    )
    return "\n".join(lines)


def document(rows: Sequence[Row], clean: int, refused: int) -> dict[str, Any]:
    """As a results file of bench "faults": caught and planted by class, and the bound of what was missed."""
    planted, caught = Counter(r.kind for r in rows), Counter(r.kind for r in rows if r.caught)
    missed = len(rows) - caught.total()
    figures = {
        "faults_planted": results.figure(len(rows), "count", 300, at_least=True),
        "faults_missed": results.figure(missed, "count", 0),
        "faults_missed_share_at_most_95": results.figure(bound(missed, len(rows)), "share", 0.01),
        "clean_judged": results.figure(clean, "count"),
        "clean_refused": results.figure(refused, "count", 0),
    }
    by_class = [{"class": k, "planted": planted[k], "caught": caught[k]} for k in sorted(planted)]
    return {**results.header("faults"), "rows": by_class, "figures": figures, "notes": []}


def keep(rows: Sequence[Row], clean: int, refused: int) -> None:
    """Writes the document into the folder $ESPER_FAULTS_OUT, when that is set."""
    if folder := os.environ.get("ESPER_FAULTS_OUT"):
        results.write(document(rows, clean, refused), Path(folder))
