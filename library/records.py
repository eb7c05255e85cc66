"""What the library knows, as frozen values: rows, states and their legal transitions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

from library.errors import fail
from library.manifest import Container

# Blueprint states.
UNVALIDATED = "UNVALIDATED"
COMPILING = "COMPILING"
COMPILED = "COMPILED"
FAILED = "FAILED"
INVALID = "INVALID"
# Artifact states; ARCHIVED is shared.
PENDING_BENCHMARKING = "PENDING_BENCHMARKING"
VALIDATED = "VALIDATED"
REJECTED = "REJECTED"
SUPERSEDED = "SUPERSEDED"
REVOKED = "REVOKED"
ARCHIVED = "ARCHIVED"

BLUEPRINT_MOVES: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        UNVALIDATED: frozenset({COMPILING, INVALID, ARCHIVED}),
        COMPILING: frozenset({COMPILED, FAILED, INVALID}),
        COMPILED: frozenset({COMPILING, ARCHIVED}),
        FAILED: frozenset({COMPILING, ARCHIVED}),
        INVALID: frozenset({ARCHIVED}),
        ARCHIVED: frozenset({UNVALIDATED, COMPILED, FAILED, INVALID}),
    }
)
ARTIFACT_MOVES: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        PENDING_BENCHMARKING: frozenset({VALIDATED, REJECTED, REVOKED}),
        VALIDATED: frozenset({SUPERSEDED, REVOKED, ARCHIVED}),
        REJECTED: frozenset({REVOKED, ARCHIVED}),
        SUPERSEDED: frozenset({REVOKED, ARCHIVED}),
        ARCHIVED: frozenset({VALIDATED, REJECTED, SUPERSEDED, REVOKED}),
        REVOKED: frozenset(),
    }
)


def check_move(moves: Mapping[str, frozenset[str]], subject: str, old: str, new: str) -> None:
    """E0724 unless `old` may become `new`."""
    if new not in moves.get(old, frozenset()):
        allowed = ", ".join(sorted(moves.get(old, ()))) or "nothing"
        raise fail("E0724", f"{subject} is {old} and cannot become {new} (only {allowed})", node=subject)


@dataclass(frozen=True)
class BlueprintRecord:
    """A graph as submitted. `text_digest` names the object that holds its JSON;
    `created` is seconds since 1970."""

    id: str
    name: str
    text_digest: str
    state: str
    reason: str
    created: float
    seq: int


@dataclass(frozen=True)
class ArtifactRecord:
    """One compiled artifact. `digest` is the SHA-256 of its container, `size` its bytes,
    `seq` its ledger entry."""

    id: str
    digest: str
    size: int
    blueprint: str
    name: str
    target: str
    kind: str
    arch: str
    pipeline: str
    version: str
    objective: str
    determinism: str
    interface: str
    state: str
    reason: str
    previous_state: str
    superseded_by: str
    created: float
    seq: int

    @staticmethod
    def of(row: Sequence[Any]) -> ArtifactRecord:
        """From its values in order: what a frozen dataclass's __init__ does one by one, at once."""
        made = object.__new__(ArtifactRecord)
        made.__dict__.update(zip(_ARTIFACT, row, strict=True))
        return made

    @property
    def away(self) -> bool:
        """Whether its bytes lie in an archive and need not be here."""
        return ARCHIVED in (self.state, self.previous_state if self.state == REVOKED else "")

    def to_json(self) -> dict[str, Any]:
        """As data, for `--json`."""
        return dict(self.__dict__)


_ARTIFACT = tuple(f.name for f in fields(ArtifactRecord))


@dataclass(frozen=True)
class VerdictRecord:
    """What the gauntlet signed. `result` is VALIDATED or REJECTED; `report` the whole report;
    `card` the measured model."""

    artifact_id: str
    arch: str
    card: str
    result: str
    reason: str
    keyid: str
    time: float
    seq: int
    report: Mapping[str, Any] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return self.result == VALIDATED

    def to_json(self) -> dict[str, Any]:
        """As data, for `--json`."""
        return {**self.__dict__, "report": dict(self.report)}


@dataclass(frozen=True)
class Verdict:
    """What a validator signed, verified: no report, only its digest, and no second read."""

    artifact_id: str
    arch: str
    result: str
    keyid: str
    time: float
    card: str
    reason: str
    report: str

    @staticmethod
    def of(row: Sequence[Any]) -> Verdict:
        """As `ArtifactRecord.of`."""
        made = object.__new__(Verdict)
        made.__dict__.update(zip(_VERDICT, row, strict=True))
        return made


_VERDICT = tuple(f.name for f in fields(Verdict))


@dataclass(frozen=True)
class LoadedArtifact:
    """Bytes that were read once, hashed once and found under a trusted
    verdict (`verdict` None only if allowed)."""

    record: ArtifactRecord
    container: Container
    verdict: Verdict | None


@dataclass(frozen=True)
class SideFile:
    """Something kept beside an artifact: source text, PTX, tuning journal. Never part of its id or digest."""

    name: str
    digest: str
    size: int


@dataclass(frozen=True)
class LedgerEntry:
    """One line of history. `data` depends on `kind`; `body` are the exact bytes that were hashed."""

    seq: int
    kind: str
    subject: str
    time: float
    data: Mapping[str, Any]
    body: bytes
