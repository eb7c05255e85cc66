"""Audit: the whole ledger read again, compared with signed checkpoints, with what was seen before and with
the rows.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from esper_ir.diagnostics import EsperError
from library import dsse, ledger, seen
from library.audit import CORRUPT, Finding, finding_of
from library.canon import parse_json, sha256_hex
from library.core import Core
from library.errors import fail
from library.ledger import GENESIS
from library.merkle import Frontier, Tree, leaf_hash
from library.records import (
    ARTIFACT_MOVES,
    BLUEPRINT_MOVES,
    PENDING_BENCHMARKING,
    UNVALIDATED,
    VALIDATED,
    LedgerEntry,
)

_PAGE = 2000


@dataclass(frozen=True)
class AuditReport:
    """`entries` read, the tree head over them, how many checkpoints were verified, and what is wrong;
    `first_bad` is the sequence number of the first entry that does not hold."""

    entries: int
    root: str
    checkpoints: int
    seconds: float
    findings: tuple[Finding, ...]
    first_bad: int | None

    def to_json(self) -> dict[str, Any]:
        return {**self.__dict__, "findings": [f.__dict__ for f in self.findings], "ok": not self.findings}


@dataclass
class _Replay:
    """The states that the ledger's entries lead to."""

    artifacts: dict[str, list[Any]] = field(
        default_factory=dict
    )  # id -> [digest, state, put sequence, envelope]
    blueprints: dict[str, str] = field(default_factory=dict)
    signed: dict[int, str] = field(
        default_factory=dict
    )  # sequence -> digest of a verdict's or annotation's envelope
    findings: list[Finding] = field(default_factory=list)


def audit(core: Core) -> AuditReport:
    """Verify everything that the ledger promises; changes nothing, continues after the first finding."""
    began = time.perf_counter()
    replay = _Replay()
    heads = _Heads(core)
    frontier, previous, first_bad = Frontier(), GENESIS, None
    for seq, body, leaf in _pages(core):
        problem = _check_link(core, frontier.size + 1, seq, body, leaf, previous, replay)
        if problem is not None:
            first_bad = seq if first_bad is None else first_bad
            replay.findings.append(problem)
        previous = leaf_hash(body)
        frontier = frontier.append(previous)
        heads.at(frontier)
    replay.findings += heads.finish(frontier)
    replay.findings += _check_state(core, frontier, previous)
    if first_bad is None:
        replay.findings += _check_rows(core, replay)
    seconds = time.perf_counter() - began
    found = tuple(replay.findings)
    return AuditReport(frontier.size, frontier.root().hex(), heads.checked, seconds, found, first_bad)


def _pages(core: Core) -> Iterator[tuple[int, bytes, bytes]]:
    after = 0
    text = "SELECT seq, body, leaf FROM ledger WHERE seq > ? ORDER BY seq LIMIT ?"
    while True:
        page = core.index.rows(text, (after, _PAGE))
        yield from page
        if len(page) < _PAGE:
            return
        after = page[-1][0]


def _bad(code: str, subject: str, message: str) -> Finding:
    return Finding(CORRUPT, code, subject, message)


def _check_link(
    core: Core, expected: int, seq: int, body: bytes, leaf: bytes, previous: bytes, replay: _Replay
) -> Finding | None:
    """One entry: its place, its hash, its link to the one before, and what it does."""
    if seq != expected:
        return _bad("E0760", str(seq), f"ledger entry {expected} is missing, {seq} follows")
    if leaf_hash(body) != leaf:
        return _bad("E0760", str(seq), f"ledger entry {seq} does not match its hash")
    try:
        value = parse_json(body)
        entry = LedgerEntry(value["seq"], value["kind"], value["subject"], value["time"], value["data"], body)
        linked = value["prev"] == previous.hex() and entry.seq == seq
    except (EsperError, KeyError, TypeError) as error:
        return _bad("E0760", str(seq), f"ledger entry {seq} cannot be read: {error}")
    if not linked:
        return _bad("E0760", str(seq), f"ledger entry {seq} does not continue the one before it")
    if seq == 1 and (entry.kind, entry.subject) != ("library.created", core.origin):
        return _bad("E0761", str(seq), "the ledger is another library's")
    return _apply(replay, entry)


def _apply(replay: _Replay, entry: LedgerEntry) -> Finding | None:
    apply = _KINDS.get(entry.kind)
    try:
        problem = apply(replay, entry) if apply else None
    except (KeyError, TypeError) as error:
        problem = f"lacks {error}"
    return _bad("E0760", str(entry.seq), f"ledger entry {entry.seq}: {problem}") if problem else None


def _put_blueprint(replay: _Replay, entry: LedgerEntry) -> str | None:
    replay.blueprints[entry.subject] = UNVALIDATED
    return None


def _move_blueprint(replay: _Replay, entry: LedgerEntry) -> str | None:
    old, new = replay.blueprints[entry.subject], entry.data["to"]
    replay.blueprints[entry.subject] = new
    return None if new in BLUEPRINT_MOVES[old] else f"blueprint became {new} from {old}"


def _put_artifact(replay: _Replay, entry: LedgerEntry) -> str | None:
    known = entry.subject in replay.artifacts
    data = entry.data
    replay.artifacts[entry.subject] = [data["digest"], PENDING_BENCHMARKING, entry.seq, data["envelope"]]
    return f"{entry.subject} was stored twice" if known else None


def _verdict(replay: _Replay, entry: LedgerEntry) -> str | None:
    row, result = replay.artifacts[entry.subject], entry.data["result"]
    replay.signed[entry.seq] = entry.data["envelope"]
    legal = row[1] == PENDING_BENCHMARKING or (row[1], result) == (VALIDATED, VALIDATED)
    row[1] = result
    return None if legal else f"verdict {result} on {entry.subject} out of turn"


def _move_artifact(replay: _Replay, entry: LedgerEntry) -> str | None:
    row, new = replay.artifacts[entry.subject], entry.data["to"]
    old, row[1] = row[1], new
    return None if new in ARTIFACT_MOVES[old] else f"artifact became {new} from {old}"


def _annotated(replay: _Replay, entry: LedgerEntry) -> str | None:
    replay.signed[entry.seq] = entry.data["envelope"]
    return None


_KINDS = {
    "blueprint.put": _put_blueprint,
    "blueprint.state": _move_blueprint,
    "artifact.put": _put_artifact,
    "artifact.verdict": _verdict,
    "artifact.state": _move_artifact,
    "artifact.annotated": _annotated,
}


class _Heads:
    """Known tree heads by size: signed checkpoints, the trust home's memory; compared as the tree grows."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.checked = 0
        self.findings: list[Finding] = []
        self.roots: dict[int, list[tuple[str, str, bytes]]] = {}  # size -> (code, what, root)
        size, root = seen.recall(core.trust.home, core.origin)
        if size:
            self.roots[size] = [("E0761", f"the ledger of {size} entries that was seen before", root)]
        for size, envelope in core.index.rows("SELECT size, envelope FROM checkpoints ORDER BY size"):
            self._checkpoint(size, envelope)

    def _checkpoint(self, size: int, envelope: bytes) -> None:
        try:
            root = open_checkpoint(self.core, size, envelope)
        except EsperError as error:
            self.findings.append(finding_of(f"checkpoint {size}", error))
            return
        self.checked += 1
        self.roots.setdefault(size, []).append(("E0762", f"the checkpoint at {size}", root))

    def at(self, frontier: Frontier) -> None:
        for code, what, root in self.roots.pop(frontier.size, ()):
            if frontier.root() != root:
                text = f"entries 1 to {frontier.size} are not those of {what}"
                self.findings.append(_bad(code, str(frontier.size), text))

    def finish(self, frontier: Frontier) -> list[Finding]:
        for size, rest in sorted(self.roots.items()):
            for _, what, _ in rest:
                text = f"the ledger has {frontier.size} entries, fewer than {what}: cut or rolled back"
                self.findings.append(_bad("E0761", str(size), text))
        return self.findings


def open_checkpoint(core: Core, size: int, envelope: bytes) -> bytes:
    """Root of a signed checkpoint of this library at `size`: E0744, E0745, E0762."""
    document = core.trust.document()
    keys = {**document.role_keys("compiler"), **document.role_keys("validator")}
    opened = dsse.open_envelope(envelope, dsse.CHECKPOINT, keys, what=f"checkpoint {size}")
    value = parse_json(opened.payload)
    if value.get("origin") != core.origin or value.get("size") != size:
        raise fail(
            "E0762", f"checkpoint stored at {size} is about {value.get('origin')} at {value.get('size')}"
        )
    return bytes.fromhex(value["root"])


def _check_state(core: Core, frontier: Frontier, head: bytes) -> list[Finding]:
    row = core.index.row("SELECT size, head, frontier FROM ledger_state")
    if row != (frontier.size, head, frontier.pack()):
        return [_bad("E0760", "state", "the ledger's state row does not follow from its entries")]
    return []


def _check_rows(core: Core, replay: _Replay) -> list[Finding]:
    """Rows edited outside the library: states, digests and signed envelopes that the ledger does not know."""
    found: list[Finding] = []
    text = "SELECT id, digest, state, seq, envelope FROM artifacts"
    artifacts = {row[0]: row[1:] for row in core.index.rows(text)}
    for artifact_id, (digest, state, seq, envelope) in artifacts.items():
        known = replay.artifacts.get(artifact_id)
        if known is None or known != [digest, state, seq, sha256_hex(envelope)]:
            has = f"{known[1]} {known[0]}" if known else "nothing"
            message = f"row says {state} {digest}, the ledger {has}"
            found.append(_bad("E0763", artifact_id, message))
    found += _missing(replay.artifacts, artifacts, "artifact")
    states = dict(core.index.rows("SELECT id, state FROM blueprints"))
    for blueprint_id, state in states.items():
        if replay.blueprints.get(blueprint_id) != state:
            message = f"row says {state}, the ledger {replay.blueprints.get(blueprint_id, 'nothing')}"
            found.append(_bad("E0763", blueprint_id, message))
    found += _missing(replay.blueprints, states, "blueprint")
    both = "SELECT seq, envelope FROM verdicts UNION ALL SELECT seq, envelope FROM annotations"
    signed = {seq: sha256_hex(envelope) for seq, envelope in core.index.rows(both)}
    for seq in sorted(signed.keys() | replay.signed.keys()):
        if signed.get(seq) != replay.signed.get(seq):
            message = f"signed row of entry {seq} is not the one the ledger recorded"
            found.append(_bad("E0763", str(seq), message))
    return found


def _missing(recorded: Mapping[str, Any], rows: Mapping[str, Any], what: str) -> list[Finding]:
    return [
        _bad("E0763", name, f"the ledger has this {what}, but its row is gone")
        for name in recorded
        if name not in rows
    ]


def prove_entry(core: Core, seq: int) -> dict[str, Any]:
    """Inclusion proof of entry `seq` under the newest checkpoint, as data for others to verify. E0721."""
    size = ledger.last_checkpoint(core.index)
    if not 1 <= seq <= size:
        raise fail("E0721", f"entry {seq} is not under a checkpoint (the newest covers {size} entries)")
    tree = Tree(
        [row[0] for row in core.index.rows("SELECT leaf FROM ledger WHERE seq <= ? ORDER BY seq", (size,))]
    )
    body = core.index.row("SELECT body FROM ledger WHERE seq = ?", (seq,))
    envelope = core.index.row("SELECT envelope FROM checkpoints WHERE size = ?", (size,))
    return {
        "entry": parse_json(body[0]) if body else None,
        "index": seq - 1,
        "size": size,
        "path": [node.hex() for node in tree.inclusion(seq - 1, size)],
        "checkpoint": parse_json(envelope[0]) if envelope else None,
    }


def prove_growth(core: Core, old: int) -> dict[str, Any]:
    """Consistency proof from the tree of `old` entries to the newest checkpoint."""
    size = ledger.last_checkpoint(core.index)
    if not 1 <= old <= size:
        raise fail("E0721", f"no tree of {old} entries lies under the newest checkpoint ({size})")
    tree = Tree(
        [row[0] for row in core.index.rows("SELECT leaf FROM ledger WHERE seq <= ? ORDER BY seq", (size,))]
    )
    heads = {"old_root": tree.head(0, old).hex(), "new_root": tree.head(0, size).hex()}
    return {"old": old, "new": size, **heads, "path": [node.hex() for node in tree.consistency(old, size)]}
