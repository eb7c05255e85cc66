"""Caught and planted by class, with the confidence bound of the share that was missed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import comb


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
