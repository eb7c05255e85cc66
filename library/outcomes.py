"""What became of artifacts in training, taken in from reports and spools; successes and exposures count like
failures.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from library import ledger, rows
from library.bundle import read_file
from library.canon import canonical_json, parse_json, sha256_hex
from library.contracts import OUTCOMES, FieldReport, decode
from library.core import Core
from library.errors import fail
from library.verdicts import known

SPOOL_SCHEMA = "esper-spool/1"


def record_outcomes(core: Core, reports: Iterable[FieldReport], *, keys: Iterable[str] | None = None) -> int:
    """Keep field reports, each once (by its key, else by its content); how many were new. E0720, E0721."""
    core.refuse_readonly()
    bodies = [(report, canonical_json(asdict(report))) for report in reports]
    names = list(keys) if keys is not None else [sha256_hex(body) for _, body in bodies]
    for report, _ in bodies:
        if report.outcome not in OUTCOMES:
            raise fail("E0720", f"outcome {report.outcome!r} is not one of {', '.join(OUTCOMES)}")
        known(core, report.kernel_artifact_id)
    taken = 0
    with core.index.write():
        fresh = [
            (r, b, k) for (r, b), k in zip(bodies, names, strict=True) if not rows.has_outcome(core.index, k)
        ]
        if fresh:
            data = {"count": len(fresh), "digest": sha256_hex(b"".join(b for _, b, _ in fresh))}
            seq = ledger.append(core.index, "outcomes.taken", core.origin, data)
            for report, body, key in fresh:
                num = rows.artifact_num(core.index, report.kernel_artifact_id)
                taken += rows.add_outcome(core.index, num, report.seed_id, report.outcome, key, body, seq)
    core.after_write()
    return taken


def outcomes(core: Core, artifact_id: str) -> list[FieldReport]:
    """Field reports about one artifact, in the order they came."""
    found = rows.outcome_bodies(core.index, known(core, artifact_id).id)
    return [decode(FieldReport, parse_json(body)) for body in found]


def note_use(core: Core, artifact_id: str, loads: int = 1, *, compile_seconds: float | None = None) -> None:
    """Count loads, and remember what compiling it cost, for retention."""
    with core.index.write():
        num = rows.artifact_num(core.index, known(core, artifact_id).id)
        rows.add_use(core.index, num, loads, compile_seconds, time.time())


def set_interest(
    core: Core, artifact_id: str, *, tamiyo: float | None = None, urabrask: float | None = None
) -> None:
    """Strategic and scientific interest in [0, 1]; what is interesting is not archived for lack of use."""
    for value in (tamiyo, urabrask):
        if value is not None and not 0.0 <= value <= 1.0:
            raise fail("E0720", f"interest must lie in [0, 1], not {value}")
    with core.index.write():
        num = rows.artifact_num(core.index, known(core, artifact_id).id)
        rows.add_use(core.index, num, 0, None, time.time())
        rows.set_interest(core.index, num, tamiyo, urabrask)


def take_spool(core: Core, place: Path) -> tuple[int, int]:
    """Take in a spool of JSON lines {schema, kind: "outcome" | "use", key, ...}: (new records, lines of
    others).

    A torn last line is left; a record taken before is skipped, so the same spool may be given again.
    """
    lines = read_file(place).split(b"\n")
    whole = lines[:-1] if lines and lines[-1] else lines
    taken, strange = 0, 0
    for line in filter(None, whole):
        record = parse_json(line)
        if not isinstance(record, Mapping) or record.get("schema") != SPOOL_SCHEMA:
            strange += 1
        elif record.get("kind") == "outcome":
            taken += record_outcomes(core, [decode(FieldReport, record["report"])], keys=[str(record["key"])])
        elif record.get("kind") == "use":
            taken += _take_use(core, record)
        else:
            strange += 1
    return taken, strange


def _take_use(core: Core, record: Mapping[str, Any]) -> int:
    """A count of loads, once per key: its key is kept with the outcomes as an exposure."""
    artifact = known(core, str(record["artifact_id"]))
    loads = int(record.get("loads", 1))
    report = FieldReport(artifact.blueprint, artifact.id, "", 0.0, 0.0, "EXPOSED", {"loads": loads})
    new = record_outcomes(core, [report], keys=[str(record["key"])])
    if new:
        note_use(core, artifact.id, loads)
    return new
