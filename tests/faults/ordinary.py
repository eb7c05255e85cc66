"""How far a mutant is off on ordinary values, over the bound.

What refuses a fault first says little about its size: an infinity may stand before any sum. So the error is
measured by a run of its own: normal draws with normal cotangents (and what else a class is about), at the
sizes that most cases use, at sizes that no tile divides, and where other plans and kernels take over; the
outputs, and the gradients of every plan, by the checks of the judge's own stages.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from esper_ir.diagnostics import EsperError
from gauntlet.isolate import FINISHED, ForkServer, Limits
from gauntlet.jobs import decode_job, encode_job
from gauntlet.judge import settle
from gauntlet.stage import Context, Failed, Passed, Recipe, Sweep
from gauntlet.stages import gradients, numerics
from gauntlet.subject import Subject
from library.manifest import unpack

MOST = 2
"""Regions of sizes beside the base sizes."""


def cases(subject: Subject, cotangents: Sequence[str], seed: int) -> Iterator[tuple[Sweep, Recipe]]:
    """(stage, case)."""
    every = subject.launch.interface.differentiable
    for dims in (subject.base_dims(), numerics.odd_dims(subject), *subject.regions[1 : MOST + 1]):
        base = Recipe("numerics", dims, "normal", seed=seed)
        yield numerics.STAGE, base
        asked = [tuple(n for n in every if n in p.wanted) for p in subject.plans("backward", dims)]
        for cotangent in cotangents:
            for wanted in dict.fromkeys(asked):
                yield gradients.STAGE, replace(base, stage="gradients", cotangent=cotangent, wanted=wanted)


def margin(context: Context, stage: Sweep, recipe: Recipe) -> float:
    """The largest error of a case over its bound; infinite where a result is no number."""
    try:
        found = stage.check(context, recipe)
    except EsperError:
        return math.inf
    if isinstance(found, Failed):
        return float(found.metrics.get("margin", math.inf))
    return float(found.metrics.get("tolerance_used", 0.0)) if isinstance(found, Passed) else 0.0


def measure(arguments: int, result: int, spill: int) -> None:
    """A worker: the mutant is the artifact of the job."""
    job, _, mutant = decode_job(os.pread(arguments, os.fstat(arguments).st_size, 0))
    device = settle(job["device"])
    torch.set_num_threads(1)
    subject = Subject(unpack(mutant), device)

    def say(**event: object) -> None:
        os.write(result, json.dumps(event).encode() + b"\n")

    context = Context(subject, lambda event: None)
    say(event="launch", limit=job["seconds"])
    worst = max(margin(context, *case) for case in cases(subject, job["cotangents"], job["seed"]))
    say(event="landed")
    say(event="ordinary", margin=worst if math.isfinite(worst) else None)
    say(event="done")


def error(
    mutant: bytes, device: str, server: ForkServer, cotangents: Sequence[str], *, seed: int = 0
) -> float | None:
    """Over the bound; None where it is no number, or where the run did not come to its end. The server must
    be allowed to run `tests`."""
    job = {"device": device, "seed": seed, "cotangents": list(cotangents), "seconds": 60.0}
    limits = Limits(seconds=120.0, address_space=device == "cpu")
    ending = server.run("tests.faults.ordinary:measure", encode_job(job, mutant), limits)
    said = ending.last("ordinary") if ending.kind == FINISHED else None
    return said["margin"] if said else None
