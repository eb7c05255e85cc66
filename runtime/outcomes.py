"""What became of artifacts in this process, told to the library: a failure in use is an outcome.

Written where it can be: to the file that ESPER_SPOOL names (JSON lines, taken in by `esper-library import
--spool`), else into the library itself when it can be written, else kept in memory. Telling never fails a
step.
"""

from __future__ import annotations

import json
import logging
import os
import time
import uuid
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from esper_ir.diagnostics import EsperError
from library.contracts import FieldReport
from library.outcomes import SPOOL_SCHEMA
from library.store import Library

log = logging.getLogger("esper.runtime")
CRASHED = "CRASHED"
WAIT_S = 2.0  # for another writer of the library; a training step is waiting
memory: list[FieldReport] = []
"""Outcomes that could be written nowhere."""


def tell(report: FieldReport, home: Path | str | None) -> str:
    """Write one outcome; "spool", "library" or "memory": where it went. `home`: the artifact's library."""
    spool = os.environ.get("ESPER_SPOOL")
    if spool and _append(Path(spool), report):
        return "spool"
    if not spool and _take(report, home):
        return "library"
    memory.append(report)
    return "memory"


def _append(path: Path, report: FieldReport) -> bool:
    line = {"schema": SPOOL_SCHEMA, "kind": "outcome", "key": uuid.uuid4().hex, "report": asdict(report)}
    data = (json.dumps({**line, "time": time.time()}) + "\n").encode()
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, data)  # one write: lines of several processes do not mix
        finally:
            os.close(descriptor)
    except OSError as error:
        log.warning("outcomes are kept in memory: %s: %s", path, error)
        return False
    return True


def _take(report: FieldReport, home: Path | str | None) -> bool:
    try:
        with Library.open(home, create=False, roles=(), wait_s=WAIT_S) as library:
            library.record_outcomes([report])
    except (EsperError, OSError) as error:
        log.warning("outcomes are kept in memory: %s", error)
        return False
    return True


def spooled() -> list[tuple[Mapping[str, Any], float]]:
    """Reports in the spool with their times; the library has perhaps not seen them. Torn lines are left
    out."""
    spool = os.environ.get("ESPER_SPOOL")
    try:
        lines = Path(spool).read_bytes().split(b"\n") if spool else []
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            record = json.loads(line) if line else {}
        except ValueError:
            continue
        if isinstance(record, dict) and record.get("schema") == SPOOL_SCHEMA and "report" in record:
            found.append((record["report"], float(record.get("time", 0.0))))
    return found


def failed_before(library: Library, blueprint: str) -> frozenset[str]:
    """Artifacts of a blueprint that failed in use in an earlier process and were not proven since."""
    told = [(r, t) for r, t in spooled() if r.get("outcome") == CRASHED]
    ids = {
        str(r.get("kernel_artifact_id"))
        for r, t in told
        if r.get("blueprint_id") == blueprint and t > _proven(library, str(r.get("kernel_artifact_id")))
    }
    return frozenset(library.troubled(blueprint)) | ids


def _proven(library: Library, artifact_id: str) -> float:
    """When the newest verdict was signed; 0 without one."""
    try:
        verdict = library.verdict(artifact_id)
    except EsperError:  # the spool may speak of another library's
        return 0.0
    return verdict.time if verdict is not None else 0.0
