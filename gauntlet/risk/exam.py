"""A weak examination of an artifact: a few cases of the judge's own stages, drawn by a seed.

Everything that passes the whole judgement works, as far as anybody can see, so that nothing could be learned
from it. What passes a few cases may fail in use, and the more it was tested, the less. The report has the
form of a verdict's, so that features mean the same there.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

from gauntlet.judge import all_stages
from gauntlet.stage import Context, Stage, Sweep

WHOLE = ("integrity", "loads")
"""Stages without a choice of cases."""
DRAWN = {"numerics": (1.0, 24), "gradients": (0.6, 24), "memory": (0.3, 4), "determinism": (0.2, 2),
         "soak": (0.2, 1)}  # fmt: skip
"""Stage: (chance that it takes place, most cases). The number is drawn evenly in its logarithm."""


def drawn(context: Context, seed: int) -> Iterator[Stage]:
    """The stages of one examination, in their order, each with the cases that were drawn."""
    rng = random.Random(seed)
    for stage in all_stages():
        chance, most = DRAWN.get(stage.name, (0.0, 0))
        takes_place, count = rng.random() < chance, int(most ** rng.random())
        if stage.name in WHOLE:
            yield stage
        elif takes_place and isinstance(stage, Sweep):
            recipes = list(stage.recipes(context))
            chosen = sorted(rng.sample(range(len(recipes)), min(count, len(recipes))))
            cases = tuple(recipes[at] for at in chosen)
            yield replace(stage, recipes=lambda _, cases=cases: cases, shrink=False)
