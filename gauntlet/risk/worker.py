"""The worker of a simulated deployment: examine the artifact, then train with it, once per seed.

It runs candidate code, so it is started like a judge (`gauntlet.isolate`). Events: those of a judge while it
examines, then `deploy` before each training and `became` after it.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence

from gauntlet.judge import opened, run_stage
from gauntlet.risk import exam, host
from gauntlet.stage import Context


def run(arguments: int, result: int, spill: int) -> None:
    """The job: `seed` of the examination; `seeds` of the trainings; `examined`: it was passed before."""
    job, context = opened(arguments, result)
    try:
        if job["examined"] or _passes(context, job["seed"], spill):
            _train(context, job["seeds"])
    except Exception as error:
        context.emit({"event": "broke", "what": f"{type(error).__name__}: {error}"})
        traceback.print_exc()
        raise
    context.emit({"event": "done"})


def _passes(context: Context, seed: int, spill: int) -> bool:
    """Every stage that was drawn, up to the first that fails."""
    return all(run_stage(stage, context, None, spill) for stage in exam.drawn(context, seed))


def _train(context: Context, seeds: Sequence[int]) -> None:
    context.emit({"event": "examined"})
    for seed in seeds:
        chosen = host.draw(context.subject, seed)
        context.emit({"event": "deploy", "seed": seed, "deployment": chosen.to_json()})
        outcome, reason = host.deployed(context, chosen)
        context.emit({"event": "became", "seed": seed, "outcome": outcome, "reason": reason[:300]})
