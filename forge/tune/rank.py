"""Which untried tiles to try first: by a classifier of what was measured, else by nearness to the best."""

from __future__ import annotations

import math
import random
from collections.abc import Collection
from typing import Any, Protocol

from forge.plan import Tile
from forge.tune import space

ENOUGH = 12
"""Trials before a model is fitted."""
BEST = 0.1
EXPLORED = 0.2
"""Of every batch, drawn at random: a model that is wrong is found out."""


class Measured(Protocol):
    tile: Tile
    us: float
    wrong: str


def ranked(tiles: list[Tile], trials: Collection[Any], rng: random.Random) -> list[Tile]:
    """Most promising first, some drawn at random between them."""
    if not tiles:
        return []
    scores = _scores(tiles, trials) if len(trials) >= ENOUGH else None
    order = list(range(len(tiles)))
    if scores is not None:
        order.sort(key=lambda i: (-scores[i], i))
    out: list[Tile] = []
    while order:
        pick = rng.randrange(len(order)) if scores is not None and rng.random() < EXPLORED else 0
        out.append(tiles[order.pop(pick)])
    return out


def _scores(tiles: list[Tile], trials: Collection[Any]) -> list[float] | None:
    """Probability of being among the best tenth by a random forest (failures are not); by distance to the
    good ones where scikit-learn is not installed.
    """
    times = sorted(t.us for t in trials if not t.wrong)
    if not times:
        return None
    limit = times[max(math.ceil(BEST * len(times)) - 1, 0)] * 1.02
    labels = [not t.wrong and t.us <= limit for t in trials]
    try:
        from sklearn.ensemble import RandomForestClassifier
    except ImportError:
        good = [t.tile for t, label in zip(trials, labels, strict=True) if label]
        return [-float(min(space.distance(tile, g) for g in good)) for tile in tiles]
    if all(labels) or not any(labels):
        return None
    model = RandomForestClassifier(n_estimators=64, max_depth=6, random_state=0, n_jobs=1)
    model.fit([space.features(t.tile) for t in trials], labels)
    return [float(p[1]) for p in model.predict_proba([space.features(t) for t in tiles])]
