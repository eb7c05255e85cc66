"""Stored artifacts tuned further: on this machine, or built on one and timed on another."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import esper_ir.text as text
from esper_ir.diagnostics import EsperError
from esper_ir.graph import Blueprint
from forge.lower import Kernels
from forge.pass_manager import run
from forge.pipelines import EFFORTS, device_of, pipeline
from forge.service import CompileResult, compile_blueprint
from forge.target import resolve
from forge.toolchain import toolchain_of
from forge.tune import halves
from forge.tune.journal import read as read_journal
from forge.work import Work
from library.canon import parse_json
from library.manifest import blueprint_text
from library.records import ArtifactRecord
from library.store import Library

Tell = Callable[[str], None]


def quiet(step: str) -> None:
    """Nobody is told."""


def tune_artifact(
    library: Library, artifact_id: str, *, budget_s: float | None = None,
    measured: Path | None = None, progress: Tell = quiet,
) -> CompileResult:  # fmt: skip
    """A stored artifact's blueprint and target again, from its own tiles on: the result is a new artifact, or
    the same one where nothing beat them. `untimed` artifacts of a pipeline that measures become timed.
    `measured`: times from another machine (`time_candidates`) to take into account.
    """
    if measured is not None:
        halves.take(halves.read(measured, halves.TIMES), library)
    blueprint, record, journal = _again(library, artifact_id)
    name = record.pipeline if record.pipeline in EFFORTS else "standard"
    (result,) = compile_blueprint(
        blueprint, pipelines=(name,), targets=(record.target,), objectives=(record.objective,),
        library=library, progress=progress, incumbents=journal, budget_s=budget_s,
    )  # fmt: skip
    return result


def _again(library: Library, artifact_id: str) -> tuple[Blueprint, ArtifactRecord, Any]:
    """A stored artifact's blueprint, record and tuning journal."""
    record = library.resolve(artifact_id)
    manifest = library.load(record.id, allow_unvalidated=True).container.manifest
    blueprint = text.parse(blueprint_text(manifest).encode(), source=record.id)
    return blueprint, record, parse_json(library.side_file(record.id, "journal.json"))


def build_candidates(
    library: Library, artifact_id: str, path: Path, *, trials: int = 300, progress: Tell = quiet
) -> dict[str, Any]:
    """Write tiles around those of a stored artifact as code, about `trials` of them, to be timed where its
    target is (forge.tune.halves). A summary.
    """
    blueprint, record, journal = _again(library, artifact_id)
    chosen = pipeline(record.pipeline)
    steps = tuple(s for s in chosen.steps if s[0] not in ("tune", "build", "package"))
    kernels = Kernels(choices=read_journal(journal))
    work = Work(blueprint, resolve(record.target), chosen.name, record.objective, kernels=kernels)
    work = run(replace(chosen, steps=steps), work)
    found = halves.build_only(work.kernels, work.target, toolchain_of(work.target), trials, progress)
    halves.write(found, path)
    failed = sum("wrong" in row for row in found["candidates"])
    return {
        "schema": "esper-tune/1", "file": str(path), "bytes": path.stat().st_size,
        "groups": len(found["groups"]), "candidates": len(found["candidates"]), "failed": failed,
    }  # fmt: skip


def time_candidates(
    library: Library,
    path: Path,
    output: Path | None = None,
    *,
    budget_s: float | None = None,
    progress: Tell = quiet,
) -> dict[str, Any]:
    """Time the candidates of a file on this machine; the measurements are kept in the library and written to
    `output`. A summary. E0526 for a bad file, E0527 where its target is not here.
    """
    document = halves.read(path, halves.SCHEMA)
    target = resolve(str(document.get("target")))
    device = device_of(target)
    if device is None:
        raise EsperError("E0527", f"no {target.name} here", hint="time the candidates where their target is")
    found = halves.time_only(document, device, library, math.inf if budget_s is None else budget_s, progress)
    if output is not None:
        halves.write(found, output)
    trials = [t for group in found["groups"] for t in group["trials"]]
    return {
        "schema": "esper-tune/1", "file": str(output or ""), "groups": len(found["groups"]),
        "candidates": len(trials), "failed": sum("wrong" in t for t in trials),
    }  # fmt: skip
