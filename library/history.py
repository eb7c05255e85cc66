"""Audit: the whole ledger read again, compared with signed checkpoints, with what was seen before and with
the rows.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from esper_ir.diagnostics import EsperError
from library import dsse, ledger, seen
from library.audit import Finding, finding_of
from library.canon import parse_json
from library.core import Core
from library.errors import fail
from library.index import Index
from library.ledger import GENESIS
from library.loading import refuse_revoked
from library.merkle import Frontier, Tree, leaf_hash
from library.records import LedgerEntry
from library.replay import Replay, bad

_PAGE = 2000


@dataclass(frozen=True)
class AuditReport:
    """`entries` read, the tree head over them, how many checkpoints were verified and up to which entry the
    newest of them signs, and what is wrong; `first_bad` is the first entry that does not hold.
    """

    entries: int
    root: str
    checkpoints: int
    signed: int
    seconds: float
    findings: tuple[Finding, ...]
    first_bad: int | None

    def to_json(self) -> dict[str, Any]:
        return {**self.__dict__, "findings": [f.__dict__ for f in self.findings], "ok": not self.findings}


def audit(core: Core) -> AuditReport:
    """Verify all that the ledger promises, as of one moment; changes nothing, goes on after a finding."""
    began = time.perf_counter()
    remembered = seen.recall(core.trust.home, core.origin)  # before the moment: nothing seen may be later
    with core.snapshot() as index:
        return _audit(core, index, remembered, began)


def _audit(core: Core, index: Index, remembered: tuple[int, bytes], began: float) -> AuditReport:
    replay, found = Replay(), []
    heads = _Heads(core, index, remembered)
    frontier, previous, first_bad = Frontier(), GENESIS, None
    for seq, body, leaf in _pages(index):
        problem = _check_link(core, frontier.size + 1, seq, body, leaf, previous, replay)
        if problem is not None:
            first_bad = seq if first_bad is None else first_bad
            found.append(problem)
        previous = leaf_hash(body)
        frontier = frontier.append(previous)
        heads.at(frontier)
    found += heads.finish(frontier)
    found += _check_state(index, frontier, previous)
    found += [bad("E0709", "esper.db", problem) for problem in index.damage()]
    if first_bad is None:
        found += replay.check_rows(index)
    seconds, root = time.perf_counter() - began, frontier.root().hex()
    return AuditReport(frontier.size, root, heads.checked, heads.signed, seconds, tuple(found), first_bad)


def _pages(index: Index) -> Iterator[tuple[int, bytes, bytes]]:
    after = 0
    text = "SELECT seq, body, leaf FROM ledger WHERE seq > ? ORDER BY seq LIMIT ?"
    while True:
        page = index.rows(text, (after, _PAGE))
        yield from page
        if len(page) < _PAGE:
            return
        after = page[-1][0]


def _check_link(
    core: Core, expected: int, seq: int, body: bytes, leaf: bytes, previous: bytes, replay: Replay
) -> Finding | None:
    """One entry: its place, its hash, its link to the one before, and what it does."""
    if seq != expected:
        return bad("E0760", str(seq), f"ledger entry {expected} is missing, {seq} follows")
    if leaf_hash(body) != leaf:
        return bad("E0760", str(seq), f"ledger entry {seq} does not match its hash")
    try:
        value = parse_json(body)
        entry = LedgerEntry(value["seq"], value["kind"], value["subject"], value["time"], value["data"], body)
        linked = value["prev"] == previous.hex() and entry.seq == seq
    except (EsperError, KeyError, TypeError) as error:
        return bad("E0760", str(seq), f"ledger entry {seq} cannot be read: {error}")
    if not linked:
        return bad("E0760", str(seq), f"ledger entry {seq} does not continue the one before it")
    if seq == 1 and (entry.kind, entry.subject) != ("library.created", core.origin):
        return bad("E0761", str(seq), "the ledger is another library's")
    problem = replay.apply(entry)
    return bad("E0760", str(seq), f"ledger entry {seq}: {problem}") if problem else None


class _Heads:
    """Known tree heads by size: signed checkpoints, the trust home's memory; compared as the tree grows."""

    def __init__(self, core: Core, index: Index, remembered: tuple[int, bytes]) -> None:
        self.core = core
        self.checked = self.signed = 0
        self.findings: list[Finding] = []
        self.roots: dict[int, list[tuple[str, str, bytes]]] = {}  # size -> (code, what, root)
        size, root = remembered
        if size:
            self.roots[size] = [("E0761", f"the ledger of {size} entries that was seen before", root)]
        for size, envelope in index.rows("SELECT size, envelope FROM checkpoints ORDER BY size"):
            self._checkpoint(size, envelope)

    def _checkpoint(self, size: int, envelope: bytes) -> None:
        try:
            root = open_checkpoint(self.core, size, envelope)
        except EsperError as error:
            if error.code != "E0755":  # by a key that was void by then: nothing wrong, and nothing proven
                self.findings.append(finding_of(f"checkpoint {size}", error))
            return
        self.checked, self.signed = self.checked + 1, max(self.signed, size)
        self.roots.setdefault(size, []).append(("E0762", f"the checkpoint at {size}", root))

    def at(self, frontier: Frontier) -> None:
        for code, what, root in self.roots.pop(frontier.size, ()):
            if frontier.root() != root:
                text = f"entries 1 to {frontier.size} are not those of {what}"
                self.findings.append(bad(code, str(frontier.size), text))

    def finish(self, frontier: Frontier) -> list[Finding]:
        for size, rest in sorted(self.roots.items()):
            for _, what, _ in rest:
                text = f"the ledger has {frontier.size} entries, fewer than {what}: cut or rolled back"
                self.findings.append(bad("E0761", str(size), text))
        return self.findings


def open_checkpoint(core: Core, size: int, envelope: bytes) -> bytes:
    """Root of a signed checkpoint of this library at `size`: E0744, E0745, E0762."""
    document = core.trust.document()
    keys = {**document.role_keys("compiler"), **document.role_keys("validator")}
    opened = dsse.open_envelope(envelope, dsse.CHECKPOINT, keys, what=f"checkpoint {size}")
    refuse_revoked(document, opened.keyids, size, f"checkpoint {size}")
    head = ledger.read_checkpoint(opened.payload, f"checkpoint {size}")
    if (head.origin, head.size) != (core.origin, size):
        raise fail("E0762", f"checkpoint stored at {size} is about {head.origin} at {head.size}")
    return head.root


def _check_state(index: Index, frontier: Frontier, head: bytes) -> list[Finding]:
    row = index.row("SELECT size, head, frontier FROM ledger_state")
    if row != (frontier.size, head, frontier.pack()):
        return [bad("E0760", "state", "the ledger's state row does not follow from its entries")]
    return []


def _tree(core: Core, size: int) -> Tree:
    found = core.index.rows("SELECT leaf FROM ledger WHERE seq <= ? ORDER BY seq", (size,))
    if len(found) != size:
        raise fail("E0761", f"the ledger has {len(found)} of the {size} entries of its newest checkpoint")
    return Tree([row[0] for row in found])


def prove_entry(core: Core, seq: int) -> dict[str, Any]:
    """Inclusion proof of entry `seq` under the newest checkpoint, as data for others to verify. E0721."""
    size = ledger.last_checkpoint(core.index)
    if not 1 <= seq <= size:
        raise fail("E0721", f"entry {seq} is not under a checkpoint (the newest covers {size} entries)")
    tree = _tree(core, size)
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
    tree = _tree(core, size)
    heads = {"old_root": tree.head(0, old).hex(), "new_root": tree.head(0, size).hex()}
    return {"old": old, "new": size, **heads, "path": [node.hex() for node in tree.consistency(old, size)]}
