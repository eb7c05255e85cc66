"""What became of artifacts, with what was known about them before: an append-only file of JSON lines.

A line is one training with an artifact, or one artifact that an examination refused (so that nobody trains
with it again). A last line without an end was never finished: it is left out, and cut off before the next is
written.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from esper_ir.diagnostics import EXIT_CONFLICT, EXIT_INTEGRITY, EXIT_NOT_FOUND, EsperError
from gauntlet.confidence import FAILURES
from gauntlet.risk import features
from library.contracts import OUTCOMES

SCHEMA = "esper-outcome/1"
REFUSED = "REFUSED"
"""Instead of an outcome: an examination refused the artifact."""
PRIOR, SIMULATED, FIELD = "prior", "simulated", "field"


@dataclass(frozen=True)
class Outcome:
    """`artifact`: digest of its bytes, or its id; `family`, `op_class`, `pattern`: see
    `gauntlet.risk.features`; `planted`: the class of the fault that was put in, empty for a sound one;
    `basis`: SIMULATED or FIELD; `time`: seconds since 1970; `features`: by name, all known before the
    training."""

    key: str
    artifact: str
    name: str
    family: str
    op_class: str
    pattern: str
    outcome: str
    reason: str
    planted: str
    basis: str
    time: float
    features: Mapping[str, float]

    @property
    def failed(self) -> bool:
        return self.outcome in FAILURES


FIELDS = {f.name for f in fields(Outcome)}


def line(outcome: Outcome) -> bytes:
    """As it is written: NaN becomes null."""
    known = {n: None if math.isnan(v) else float(f"{v:.6g}") for n, v in outcome.features.items()}
    data = {"schema": SCHEMA, "features_schema": features.SCHEMA, **asdict(outcome), "features": known}
    return json.dumps(data, sort_keys=True, allow_nan=False).encode() + b"\n"


class Log:
    """The file, open for more. One writer at a time."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        data = path.read_bytes()
        os.ftruncate(self.descriptor, data.rfind(b"\n") + 1)

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *details: object) -> None:
        os.close(self.descriptor)

    def append(self, outcomes: Iterable[Outcome]) -> None:
        """In one write."""
        os.write(self.descriptor, b"".join(map(line, outcomes)))


def read(path: Path) -> list[Outcome]:
    """Every line, refused artifacts included, in the order of the file. E0951 for what is no outcome,
    E0952 for another schema of features, E0953 for features that are not known or are missing."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise EsperError(
            "E0951", f"{path}: {error.strerror}", node=str(path), exit_code=EXIT_NOT_FOUND
        ) from None
    lines = data[: data.rfind(b"\n") + 1].splitlines()
    return [_outcome(text, f"{path}, line {number}") for number, text in enumerate(lines, 1) if text.strip()]


def _outcome(text: bytes, where: str) -> Outcome:
    try:
        data = json.loads(text)
    except ValueError:
        data = None
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise _malformed(where, f"no line of {SCHEMA}")
    same_schema(data.get("features_schema"), where)
    found = {name: value for name, value in data.items() if name in FIELDS}
    if found.keys() != FIELDS or data.keys() - FIELDS != {"schema", "features_schema"}:
        raise _malformed(where, f"fields {sorted(data.keys() ^ FIELDS)} are missing or too many")
    if found["outcome"] not in (*OUTCOMES, REFUSED) or found["basis"] not in (SIMULATED, FIELD):
        raise _malformed(where, f"outcome {found['outcome']!r} by {found['basis']!r}")
    return Outcome(**{**found, "features": checked(found["features"], where)})


def _malformed(where: str, what: str) -> EsperError:
    return EsperError("E0951", f"{where}: {what}", node=where, exit_code=EXIT_INTEGRITY)


def same_schema(found: Any, where: str) -> None:
    """E0952."""
    if found == features.SCHEMA:
        return
    raise EsperError(
        "E0952",
        f"{where} has features of {found!r}, this version computes {features.SCHEMA}",
        node=where,
        hint="collect and train again with this version; the old file is left as it is",
        exit_code=EXIT_CONFLICT,
    )


def checked(values: Any, where: str) -> dict[str, float]:
    """Features by name in the order of the schema; null is missing. E0951, E0953."""
    if not isinstance(values, dict):
        raise _malformed(where, "features are no object")
    same_names(values, where)
    if bad := [n for n, v in values.items() if v is not None and type(v) not in (int, float)]:
        raise _malformed(where, f"features {sorted(bad)} are no numbers")
    return {n: math.nan if values[n] is None else float(values[n]) for n in features.NAMES}


def same_names(found: Iterable[str], where: str) -> None:
    """E0953."""
    unknown = sorted(set(found) - set(features.NAMES))
    missing = sorted(set(features.NAMES) - set(found))
    if unknown or missing:
        parts = [
            f"{what} {', '.join(names)}"
            for what, names in (("unknown", unknown), ("missing", missing))
            if names
        ]
        raise EsperError(
            "E0953", f"{where}: features {'; '.join(parts)}", node=where, exit_code=EXIT_CONFLICT
        )


def trainings(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Those with an outcome, in the order of time."""
    return sorted((o for o in outcomes if o.outcome != REFUSED), key=lambda o: o.time)
