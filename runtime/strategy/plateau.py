"""Whether progress has stopped, from the validation losses so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from runtime.strategy.settings import PlateauSettings


@dataclass(frozen=True)
class Plateau:
    """`improvement`: how much lower the best loss of the window is than the best before it, relative; NaN
    when there is too little history. `unrest`: mean absolute change from epoch to epoch in the window,
    relative to its mean."""

    reached: bool
    improvement: float
    unrest: float


def plateau(history: Sequence[float], epochs_since_change: int, settings: PlateauSettings) -> Plateau:
    """`epochs_since_change`: since a graft last changed the function; a window that spans one says
    nothing."""
    window = settings.window
    if len(history) < max(settings.warmup, window + 1) or epochs_since_change < window:
        return Plateau(False, float("nan"), float("nan"))
    recent, before = history[-window:], history[:-window]
    best, past = min(recent), min(before)
    improvement = (past - best) / past if past > 0.0 else 0.0
    mean = sum(recent) / window
    steps = [abs(b - a) for a, b in zip(recent, recent[1:], strict=False)]
    unrest = sum(steps) / (len(steps) * mean) if steps and mean > 0.0 else 0.0
    return Plateau(improvement < settings.min_improvement, improvement, unrest)
