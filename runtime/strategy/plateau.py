"""Whether progress has stopped, from the validation losses so far."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from runtime.strategy.settings import PlateauSettings


@dataclass(frozen=True)
class Plateau:
    """`improvement`: how much lower the best loss of the window is than the best before it, relative; NaN
    when there is too little history, or a loss of the window is not finite. `unrest`: mean absolute change
    from epoch to epoch in the window, relative to its mean."""

    reached: bool
    improvement: float
    unrest: float


def plateau(history: Sequence[float], epochs_since_change: int, settings: PlateauSettings) -> Plateau:
    """`epochs_since_change`: since a graft last changed the function; a window that spans one says
    nothing."""
    window = settings.window
    if len(history) < max(settings.warmup, window + 1) or epochs_since_change < window:
        return Plateau(False, float("nan"), float("nan"))
    recent, before = history[-window:], [loss for loss in history[:-window] if math.isfinite(loss)]
    if not before or not all(map(math.isfinite, recent)):  # a host that diverged is not one that stands still
        return Plateau(False, float("nan"), float("nan"))
    best, past = min(recent), min(before)
    improvement = (past - best) / abs(past) if past else 0.0
    mean = abs(sum(recent)) / window
    steps = [abs(b - a) for a, b in zip(recent, recent[1:], strict=False)]
    unrest = sum(steps) / (len(steps) * mean) if steps and mean > 0.0 else 0.0
    return Plateau(improvement < settings.min_improvement, improvement, unrest)
