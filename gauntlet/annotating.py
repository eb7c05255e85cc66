"""Signs tags, risk, confidence and interest over validated artifacts, from all that the library knows of
their peers.

Nothing is overwritten: an annotation is a new version, an entry of the ledger, and the older ones stay.
What has not changed is not signed again. The distributions behind the tags are written beside, in
`peers.json`.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from esper_ir.diagnostics import EXIT_INTEGRITY, EsperError
from gauntlet import confidence, tags
from gauntlet.confidence import Evidence
from gauntlet.interest import interest
from gauntlet.peers import Peers, Report, cohort
from gauntlet.report import UrabraskValidationReport
from gauntlet.risk.score import Scorer
from library.paths import writes_to
from library.records import VALIDATED
from library.store import Library

PEERS, SCHEMA = "peers.json", "esper-peers/1"


@dataclass
class Known:
    """What the library says: reports of the validated artifacts by id, and by id why a report cannot be
    used."""

    reports: dict[str, Report] = field(default_factory=dict)
    problems: dict[str, EsperError] = field(default_factory=dict)
    evidence: Mapping[tuple[str, str], Evidence] = field(default_factory=dict)


def read(library: Library) -> Known:
    """Every report that holds; a damaged one is named and costs nothing but itself."""
    known = Known()
    groups: dict[tuple[str, str], Evidence] = defaultdict(Evidence)
    for record in library.artifacts(state=VALIDATED):
        try:
            verdict = library.verdict(record.id)
            if verdict is None:
                continue
            UrabraskValidationReport.of(verdict.report)
            known.reports[record.id] = verdict.report
            groups[cohort(verdict.report)] += confidence.evidence(library.outcomes(record.id))
        except EsperError as error:
            known.problems[record.id] = error
    known.evidence = groups
    return known


def annotate(library: Library, ids: Iterable[str] = ()) -> tuple[dict[str, dict[str, Any]], Known]:
    """What is now signed over each artifact (without ids: all validated ones). E0721, E0724; E0910 for an
    artifact that was asked for and whose report is damaged; E0952, E0956 for a damaged model of risk."""
    known, scorer = read(library), Scorer(library)
    peers = Peers(known.reports.values())
    asked = [library.resolve(name).id for name in ids]
    for name in asked:
        if name in known.problems:
            raise known.problems[name]
    said = {}
    for name in asked or known.reports:
        found = {}
        if name in known.reports:
            found = {**_said(known, peers, name), **_scored(scorer, known, name)}
        said[name] = _signed(library, name, found)
    write_peers(library.home, peers)
    return said, known


def _scored(scorer: Scorer, known: Known, name: str) -> dict[str, Any]:
    """The risk; an artifact that cannot be scored is named, and tagged all the same."""
    try:
        return scorer.of(name).annotation()
    except EsperError as error:
        known.problems[name] = error
        return {}


def _said(known: Known, peers: Peers, name: str) -> dict[str, Any]:
    report = known.reports[name]
    others = [r for other, r in known.reports.items() if other != name]
    far = interest(report, others)
    return {
        "generated_tags": list(tags.of(report, peers)),
        "conf_level": confidence.level(known.evidence.get(cohort(report), Evidence())),
        **({"urabrask_interest": far} if far is not None else {}),
    }


def _signed(library: Library, name: str, said: Mapping[str, Any]) -> dict[str, Any]:
    """With what an earlier annotation said and this one does not."""
    known = library.annotation(name)
    merged = {**known, **said}
    if not said or merged != known:
        library.annotate(name, merged)
    return merged


def write_peers(home: Path, peers: Peers) -> Path:
    """The distributions as they were when tags were last given. E0702, E0703, E0710."""
    path = home / PEERS
    staged = path.with_suffix(f".{os.getpid()}")
    with writes_to(path):
        staged.write_text(json.dumps({"schema": SCHEMA, "distributions": peers.to_json()}, indent=1), "utf-8")
        return staged.replace(path)


def read_peers(home: Path) -> list[dict[str, Any]]:
    """[] before the first annotation. E0912 for a file that is damaged."""
    path = home / PEERS
    if not path.exists():
        return []
    try:
        document = json.loads(path.read_text("utf-8"))
        if document["schema"] != SCHEMA:
            raise ValueError(f"schema {document['schema']!r}")
        return list(document["distributions"])
    except (ValueError, KeyError, TypeError) as error:
        raise EsperError(
            "E0912",
            f"{path} does not hold the distributions of tags: {error}",
            node=str(path),
            hint="`esper-gauntlet annotate` writes it anew from the signed reports",
            exit_code=EXIT_INTEGRITY,
        ) from error
