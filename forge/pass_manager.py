"""Runs a pipeline: one loop, each step timed, failures named after the step."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from forge.pipelines import Pipeline
from forge.work import Work


def run(pipeline: Pipeline, work: Work, *, progress: Callable[[str], None] = lambda step: None) -> Work:
    """The work after every step; `progress` is told the name of each step as it starts."""
    for name, step in pipeline.steps:
        progress(name)
        started = time.perf_counter()
        work = step(work)
        work = replace(work, seconds={**work.seconds, name: time.perf_counter() - started})
    return work
