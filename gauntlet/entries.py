"""What the report shows of each artifact: its records, read once, with every text still as it was signed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from esper_ir.diagnostics import EsperError
from gauntlet.peers import Report, number
from gauntlet.report import UrabraskValidationReport
from library.records import PENDING_BENCHMARKING, ArtifactRecord, VerdictRecord
from library.store import Library

STAGE = "measurement"


@dataclass(frozen=True)
class Entry:
    """One artifact. `verdicts`: oldest first; `annotations` as {version, time, annotation}, oldest first;
    `toolchain` as the compiler signed it; `problem`: why it cannot be shown."""

    record: ArtifactRecord
    verdicts: tuple[VerdictRecord, ...] = ()
    annotations: tuple[Mapping[str, Any], ...] = ()
    toolchain: Mapping[str, str] = field(default_factory=dict)
    problem: str = ""

    @property
    def report(self) -> Report | None:
        """The newest."""
        return self.verdicts[-1].report if self.verdicts else None

    @property
    def annotation(self) -> Mapping[str, Any]:
        """The newest; {} without one."""
        return self.annotations[-1]["annotation"] if self.annotations else {}

    @property
    def tags(self) -> tuple[str, ...]:
        """As annotated, else as the verdict gave them."""
        given = self.annotation.get("generated_tags")
        return tuple(given if given is not None else (self.report or {}).get("generated_tags", ()))

    def of(self, name: str) -> float | None:
        """A measured number of the profile."""
        return number(self.report, name) if self.report else None

    @property
    def measurement(self) -> Mapping[str, Any]:
        """Of the newest report: works, dims, conditions; {} where it was not measured."""
        stages = self.report["stages"] if self.report else []
        return next((s["metrics"] for s in stages if s["name"] == STAGE), {})


def read(library: Library, ids: Iterable[str] = ()) -> list[Entry]:
    """Every artifact that was judged (or those asked for), by blueprint, target and time. What is damaged is
    there by name."""
    asked = [library.resolve(name) for name in ids]
    records = asked or [r for r in library.artifacts() if r.state != PENDING_BENCHMARKING]
    return [_entry(library, r) for r in sorted(records, key=lambda r: (r.name, r.target, r.created))]


def _entry(library: Library, record: ArtifactRecord) -> Entry:
    try:
        verdicts = tuple(reversed(library.verdicts(record.id)))
        for verdict in verdicts:
            UrabraskValidationReport.of(verdict.report)
        return Entry(record, verdicts, tuple(library.annotations(record.id)), _toolchain(library, record.id))
    except EsperError as error:
        return Entry(record, problem=error.render())


def _toolchain(library: Library, artifact_id: str) -> dict[str, str]:
    try:
        told = json.loads(library.side_file(artifact_id, "provenance.json"))["toolchain"]
        return {str(k): str(v) for k, v in told.items()}
    except (EsperError, ValueError, KeyError, TypeError, AttributeError):
        return {}
