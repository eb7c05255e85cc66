"""Outcomes that a library has been told about: use in the field, with what was known of the artifacts."""

from __future__ import annotations

from collections.abc import Iterator

from esper_ir.diagnostics import EsperError
from gauntlet import opclass
from gauntlet.risk import features
from gauntlet.risk.outcomes import FIELD, Outcome
from library.manifest import unpack
from library.store import Library

SIZES = "sizes"
"""Name in a report's `eval_metrics` of a list of {dim: size}: what the artifact was used at."""


def outcomes(library: Library) -> list[Outcome]:
    """Every one about an artifact with a verdict, in the order of time. Artifacts whose records are
    damaged are left out: `esper-gauntlet annotate` names them."""
    found = [o for record in library.artifacts() for o in of_artifact(library, record.id)]
    return sorted(found, key=lambda o: o.time)


def of_artifact(library: Library, artifact_id: str) -> Iterator[Outcome]:
    told = library.timed_outcomes(artifact_id)
    try:
        verdict = library.verdict(artifact_id) if told else None
        if verdict is None:
            return
        manifest = unpack(library.read(artifact_id)).manifest
    except EsperError:
        return
    graph = features.graph_of(manifest)
    for at, (when, report) in enumerate(told):
        used = report.eval_metrics.get(SIZES, ())
        yield Outcome(
            f"{artifact_id}:{at}", artifact_id, str(manifest["blueprint"]["name"]), features.family(graph),
            opclass.of_graph(graph), features.check_pattern(verdict.report), report.outcome,
            str(report.eval_metrics.get("reason", "")), "", FIELD, when,
            features.of(verdict.report, manifest, used),
        )  # fmt: skip
