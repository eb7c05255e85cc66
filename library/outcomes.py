"""What became of artifacts in training, taken in from reports and spools; successes and exposures count like
failures.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from esper_ir.diagnostics import EsperError
from library import ledger, rows
from library.bundle import read_file
from library.canon import JsonLimits, canonical_json, parse_json, sha256_hex
from library.contracts import OUTCOMES, FieldReport, decode
from library.core import Core
from library.errors import fail
from library.verdicts import known

SPOOL_SCHEMA = "esper-spool/1"
_LINE = JsonLimits(max_bytes=1 << 20, max_depth=32)
_MAX_KEY, _MAX_LOADS = 200, 1 << 31
_NOT_OURS = ("E0720", "E0721", "E0734", "E0735")  # malformed, or about what is not here


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
        offered = {key: (report, body) for key, (report, body) in zip(names, bodies, strict=True)}
        fresh = {key: both for key, both in offered.items() if not rows.has_outcome(core.index, key)}
        if fresh:
            data = {"count": len(fresh), "digest": sha256_hex(b"".join(b for _, b in fresh.values()))}
            seq = ledger.append(core.index, "outcomes.taken", core.origin, data)
            for key, (report, body) in fresh.items():
                num = rows.artifact_num(core.index, report.kernel_artifact_id)
                taken += rows.add_outcome(core.index, num, report.seed_id, report.outcome, key, body, seq)
    core.after_write()
    return taken


def outcomes(core: Core, artifact_id: str) -> list[FieldReport]:
    """Field reports about one artifact, in the order they came."""
    found = rows.outcome_bodies(core.index, known(core, artifact_id).id)
    return [decode(FieldReport, parse_json(body)) for body in found]


def timed_outcomes(core: Core, artifact_id: str) -> list[tuple[float, FieldReport]]:
    """The same, each with the time it was taken in (seconds since 1970)."""
    found = rows.timed_outcomes(core.index, known(core, artifact_id).id)
    return [(when, decode(FieldReport, parse_json(body))) for when, body in found]


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
    """Take in a spool of JSON lines {schema, kind: "outcome" | "use", key, ...}: (new records, other lines).

    A torn last line is left; a record taken before is skipped, so the same spool may be given again. A line
    that is malformed, somebody else's, or about an artifact that is not here does not keep the others out.
    """
    core.refuse_readonly()
    lines = read_file(place).split(b"\n")
    whole = lines[:-1] if lines and lines[-1] else lines
    taken, strange = 0, 0
    for line in filter(None, whole):
        try:
            taken += _take(core, parse_json(line, _LINE))
        except EsperError as error:
            if error.code not in _NOT_OURS:
                raise
            strange += 1
    return taken, strange


def _take(core: Core, record: Any) -> int:
    if not isinstance(record, Mapping) or record.get("schema") != SPOOL_SCHEMA:
        raise fail("E0720", "a line of another schema")
    key, kind = record.get("key"), record.get("kind")
    if not isinstance(key, str) or not 0 < len(key) <= _MAX_KEY:
        raise fail("E0720", "a spooled record without a key")
    if kind == "outcome":
        return record_outcomes(core, [decode(FieldReport, record.get("report"))], keys=[key])
    if kind == "use":
        return _take_use(core, key, str(record.get("artifact_id")), record.get("loads", 1))
    raise fail("E0720", f"a spooled record of kind {kind!r}")


def _take_use(core: Core, key: str, artifact_id: str, loads: Any) -> int:
    """A count of loads, once per key: its key is kept with the outcomes as an exposure."""
    if type(loads) is not int or not 0 < loads <= _MAX_LOADS:
        raise fail("E0720", f"loads must be 1 to {_MAX_LOADS}, not {loads!r}")
    artifact = known(core, artifact_id)
    report = FieldReport(artifact.blueprint, artifact.id, "", 0.0, 0.0, "EXPOSED", {"loads": loads})
    new = record_outcomes(core, [report], keys=[key])
    if new:
        note_use(core, artifact.id, loads)
    return new
