"""What the ledger's entries lead to, entry by entry, and where the rows say otherwise.

Times in rows, counts of use, leases, marks and the progress of jobs are bookkeeping that no promise rests on;
everything else that a row says is in the ledger, or in a signed statement whose digest is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from esper_ir.diagnostics import EsperError
from library.audit import CORRUPT, Finding
from library.canon import parse_json, sha256_hex
from library.index import Index
from library.records import (
    ARTIFACT_MOVES,
    BLUEPRINT_MOVES,
    PENDING_BENCHMARKING,
    UNVALIDATED,
    VALIDATED,
    LedgerEntry,
)

# Reasons that the store gives by itself for a move; the row keeps none.
_OWN_REASONS = ("artifact", "restored")
_ARTIFACTS = """SELECT id, digest, size, state, seq, envelope, reason, previous_state, superseded_by
    FROM artifacts"""
_SIGNED = """SELECT v.seq, v.envelope, a.id FROM verdicts v JOIN artifacts a ON a.num = v.artifact
    UNION ALL SELECT n.seq, n.envelope, a.id FROM annotations n JOIN artifacts a ON a.num = n.artifact"""
_OUTCOMES = """SELECT o.seq, o.report, o.seed, o.outcome, a.id FROM outcomes o
    LEFT JOIN artifacts a ON a.num = o.artifact ORDER BY o.num"""


def bad(code: str, subject: str, message: str) -> Finding:
    """A finding about the ledger or a row."""
    return Finding(CORRUPT, code, subject, message)


@dataclass
class Artifact:
    """An artifact as its entries leave it."""

    digest: str
    size: int
    seq: int
    envelope: str
    state: str = PENDING_BENCHMARKING
    reason: str = ""
    previous: str = ""
    by: str = ""

    def become(self, state: str, reason: str) -> None:
        self.previous, self.state, self.reason = self.state, state, reason


@dataclass
class Block:
    """A blueprint as its entries leave it."""

    name: str
    text: str
    seq: int
    state: str = UNVALIDATED
    reason: str = ""


@dataclass
class Replay:
    """The states that the ledger's entries lead to."""

    artifacts: dict[str, Artifact] = field(default_factory=dict)
    blueprints: dict[str, Block] = field(default_factory=dict)
    # By sequence: (envelope's digest, artifact); (count, digest of the reports); (kind, subject, labels).
    signed: dict[int, tuple[str, str]] = field(default_factory=dict)
    outcomes: dict[int, tuple[int, str]] = field(default_factory=dict)
    jobs: dict[int, tuple[str, str, Any]] = field(default_factory=dict)
    edges: dict[tuple[str, str, str], tuple[str, int]] = field(default_factory=dict)

    def apply(self, entry: LedgerEntry) -> str:
        """Take one entry; what is wrong with it, or nothing."""
        step = _STEPS.get(entry.kind)
        try:
            return (step(self, entry) or "") if step else ""
        except (KeyError, TypeError) as error:
            return f"lacks {error}"

    def check_rows(self, index: Index) -> list[Finding]:
        """Rows edited outside the library."""
        checks = (_artifact_rows, _blueprint_rows, _signed_rows, _edge_rows, _outcome_rows, _job_rows)
        return [finding for check in checks for finding in check(self, index)]


def _reason(data: Mapping[str, Any]) -> str:
    given = data.get("reason", "")
    return "" if given in _OWN_REASONS else given


def _put_blueprint(replay: Replay, entry: LedgerEntry) -> None:
    replay.blueprints[entry.subject] = Block(entry.data["name"], entry.data["text"], entry.seq)


def _move_blueprint(replay: Replay, entry: LedgerEntry) -> str | None:
    block, new = replay.blueprints[entry.subject], entry.data["to"]
    old, block.state, block.reason = block.state, new, _reason(entry.data)
    return None if new in BLUEPRINT_MOVES[old] else f"blueprint became {new} from {old}"


def _text_blueprint(replay: Replay, entry: LedgerEntry) -> None:
    replay.blueprints[entry.subject].text = entry.data["text"]


def _put_artifact(replay: Replay, entry: LedgerEntry) -> str | None:
    known, data = entry.subject in replay.artifacts, entry.data
    replay.artifacts[entry.subject] = Artifact(data["digest"], data["size"], entry.seq, data["envelope"])
    return f"{entry.subject} was stored twice" if known else None


def _verdict(replay: Replay, entry: LedgerEntry) -> str | None:
    artifact, result = replay.artifacts[entry.subject], entry.data["result"]
    replay.signed[entry.seq] = entry.data["envelope"], entry.subject
    legal = artifact.state == PENDING_BENCHMARKING or (artifact.state, result) == (VALIDATED, VALIDATED)
    if artifact.state != result:
        artifact.become(result, entry.data.get("reason", ""))
    return None if legal else f"verdict {result} on {entry.subject} out of turn"


def _move_artifact(replay: Replay, entry: LedgerEntry) -> str | None:
    artifact, new = replay.artifacts[entry.subject], entry.data["to"]
    old = artifact.state
    artifact.become(new, _reason(entry.data))
    artifact.by = entry.data.get("by") or artifact.by
    return None if new in ARTIFACT_MOVES[old] else f"artifact became {new} from {old}"


def _annotated(replay: Replay, entry: LedgerEntry) -> None:
    replay.signed[entry.seq] = entry.data["envelope"], entry.subject


def _edge(replay: Replay, entry: LedgerEntry) -> None:
    key = (entry.subject, entry.data["child"], entry.data["relation"])
    replay.edges.setdefault(key, (entry.data["mutation"], entry.seq))


def _outcomes_taken(replay: Replay, entry: LedgerEntry) -> None:
    replay.outcomes[entry.seq] = entry.data["count"], entry.data["digest"]


def _job(replay: Replay, entry: LedgerEntry) -> None:
    replay.jobs[entry.seq] = entry.data["kind"], entry.subject, entry.data["labels"]


_STEPS: Mapping[str, Callable[[Replay, LedgerEntry], str | None]] = {
    "blueprint.put": _put_blueprint,
    "blueprint.state": _move_blueprint,
    "blueprint.text": _text_blueprint,
    "artifact.put": _put_artifact,
    "artifact.verdict": _verdict,
    "artifact.state": _move_artifact,
    "artifact.annotated": _annotated,
    "lineage.edge": _edge,
    "outcomes.taken": _outcomes_taken,
    "job.filed": _job,
}


def _differences(what: str, found: Mapping[Any, Any], known: Mapping[Any, Any]) -> Iterator[Finding]:
    """Rows that the ledger does not know, knows otherwise, or misses."""
    for key, row in found.items():
        if key not in known:
            yield bad("E0763", str(key), f"the ledger knows nothing of this {what}, which has a row")
        elif row != known[key]:
            yield bad("E0763", str(key), f"{what}: row says {row}, the ledger {known[key]}")
    for key in known.keys() - found.keys():
        yield bad("E0763", str(key), f"the ledger has this {what}, but its row is gone")


def _artifact_rows(replay: Replay, index: Index) -> Iterator[Finding]:
    found = {row[0]: (*row[1:5], sha256_hex(row[5]), *row[6:]) for row in index.rows(_ARTIFACTS)}
    known = {
        name: (a.digest, a.size, a.state, a.seq, a.envelope, a.reason, a.previous, a.by)
        for name, a in replay.artifacts.items()
    }
    return _differences("artifact", found, known)


def _blueprint_rows(replay: Replay, index: Index) -> Iterator[Finding]:
    rows = index.rows("SELECT id, name, text_digest, seq, state, reason FROM blueprints")
    known = {i: (b.name, b.text, b.seq, b.state, b.reason) for i, b in replay.blueprints.items()}
    return _differences("blueprint", {row[0]: row[1:] for row in rows}, known)


def _signed_rows(replay: Replay, index: Index) -> Iterator[Finding]:
    found = {seq: (sha256_hex(envelope), name) for seq, envelope, name in index.rows(_SIGNED)}
    return _differences("signed statement", found, replay.signed)


def _edge_rows(replay: Replay, index: Index) -> Iterator[Finding]:
    rows = index.rows("SELECT parent, child, relation, mutation, seq FROM edges")
    return _differences("edge", {row[:3]: row[3:] for row in rows}, replay.edges)


def _outcome_rows(replay: Replay, index: Index) -> Iterator[Finding]:
    bodies: dict[int, list[bytes]] = {}
    for seq, body, *columns in index.rows(_OUTCOMES):
        bodies.setdefault(seq, []).append(body)
        if _said(body) != columns:
            yield bad("E0763", str(seq), f"outcome: row says {columns}, its report {_said(body)}")
    found = {seq: (len(rows), sha256_hex(b"".join(rows))) for seq, rows in bodies.items()}
    yield from _differences("outcomes", found, replay.outcomes)


def _said(body: bytes) -> list[Any]:
    try:
        value = parse_json(body)
        return [value["seed_id"], value["outcome"], value["kernel_artifact_id"]]
    except (EsperError, KeyError, TypeError):
        return []


def _job_rows(replay: Replay, index: Index) -> Iterator[Finding]:
    rows = index.rows("SELECT seq, kind, subject, labels FROM jobs")
    found = {seq: (kind, subject, _labels(labels)) for seq, kind, subject, labels in rows}
    return _differences("job", found, replay.jobs)


def _labels(text: str) -> Any:
    try:
        return parse_json(text.encode())
    except EsperError:
        return text
