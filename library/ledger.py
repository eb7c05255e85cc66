"""History that shows edits, cuts, rollbacks and forks: entries hash-chained and in an RFC 9162 tree with
signed heads.

An entry is canonical JSON {seq, prev, time, kind, subject, data}; `prev` is the leaf hash of the entry
before, entry 1 names the library. Appending happens in the transaction of the change itself. A checkpoint is
a signed {origin, size, root, time}; the largest one this user has seen is kept in the trust home, outside the
library.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from esper_ir.diagnostics import EsperError
from library import dsse
from library.canon import canonical_json, parse_json
from library.dsse import Signer
from library.errors import fail
from library.index import Index
from library.merkle import Frontier, leaf_hash
from library.records import LedgerEntry

GENESIS = b"\0" * 32
CHECKPOINT_EVERY = 256
CHECKPOINT_TYPE = "esper-checkpoint/1"


def begin(index: Index, origin: str) -> None:
    """The first entry of a new library, inside its first transaction."""
    index.run("INSERT INTO ledger_state VALUES (1, 0, ?, ?)", (GENESIS, b""))
    append(index, "library.created", origin, {})


def append(index: Index, kind: str, subject: str, data: Mapping[str, Any]) -> int:
    """Add an entry inside the caller's transaction; its sequence number, from 1."""
    ((size, head, packed),) = index.run("SELECT size, head, frontier FROM ledger_state")
    seq = size + 1
    body = entry_body(seq, head, kind, subject, data, time.time())
    leaf = leaf_hash(body)
    frontier = Frontier.unpack(size, packed).append(leaf)
    index.run("INSERT INTO ledger VALUES (?, ?, ?)", (seq, body, leaf))
    index.run("UPDATE ledger_state SET size = ?, head = ?, frontier = ?", (seq, leaf, frontier.pack()))
    return seq


def entry_body(seq: int, prev: bytes, kind: str, subject: str, data: Mapping[str, Any], when: float) -> bytes:
    """The bytes of an entry."""
    return canonical_json(
        {"seq": seq, "prev": prev.hex(), "time": when, "kind": kind, "subject": subject, "data": dict(data)}
    )


def state(index: Index) -> tuple[int, Frontier]:
    """Size and frontier as the database has them. E0760 when they do not fit together."""
    row = index.row("SELECT size, frontier FROM ledger_state")
    if row is None:
        raise fail("E0760", "the ledger has no state row")
    try:
        return row[0], Frontier.unpack(row[0], row[1])
    except ValueError as error:
        raise fail("E0760", f"ledger state is damaged: {error}") from error


def size(index: Index) -> int:
    """How many entries the database says there are. E0760 when it does not say."""
    row = index.row("SELECT size FROM ledger_state")
    if row is None:
        raise fail("E0760", "the ledger has no state row")
    return row[0]


def entries(index: Index, *, after: int = 0, subject: str | None = None) -> Iterator[LedgerEntry]:
    """Entries with sequence above `after`, in order, of one subject where given."""
    step = 1000
    while True:
        page = index.rows("SELECT seq, body FROM ledger WHERE seq > ? ORDER BY seq LIMIT ?", (after, step))
        for seq, body in page:
            entry = read_entry(seq, body)
            if subject is None or entry.subject == subject:
                yield entry
        if len(page) < step:
            return
        after = page[-1][0]


def read_entry(seq: int, body: bytes) -> LedgerEntry:
    """Parse one row; E0760 names it when it is not an entry."""
    try:
        value = parse_json(body)
        return LedgerEntry(value["seq"], value["kind"], value["subject"], value["time"], value["data"], body)
    except (EsperError, KeyError, TypeError) as error:
        raise fail("E0760", f"ledger entry {seq} cannot be read: {error}", node=str(seq)) from error


def checkpoint_payload(origin: str, frontier: Frontier) -> bytes:
    """What a checkpoint signs."""
    return canonical_json(
        {
            "type": CHECKPOINT_TYPE,
            "origin": origin,
            "size": frontier.size,
            "root": frontier.root().hex(),
            "time": time.time(),
        }
    )


@dataclass(frozen=True)
class Head:
    """What a checkpoint says."""

    origin: str
    size: int
    root: bytes


def read_checkpoint(payload: bytes, what: str) -> Head:
    """The parts of a payload whose signature holds; E0745 for another form."""
    try:
        value = parse_json(payload)
        if value.keys() != {"type", "origin", "size", "root", "time"} or value["type"] != CHECKPOINT_TYPE:
            raise ValueError("fields or type not known")
        if type(value["size"]) is not int or not isinstance(value["origin"], str):
            raise ValueError("size or origin of another kind")
        return Head(value["origin"], value["size"], bytes.fromhex(value["root"]))
    except (ValueError, TypeError, AttributeError) as error:
        raise fail("E0745", f"{what} is malformed: {error}") from error


def checkpoint(index: Index, origin: str, signer: Signer) -> int:
    """Sign the present head unless this key did already; the size it covers. An earlier signature by another
    key, perhaps void by now, gives way.
    """
    with index.write():
        size, frontier = state(index)
        known = index.run("SELECT envelope FROM checkpoints WHERE size = ?", (size,))
        if not known or signer.keyid.encode() not in known[0][0]:
            envelope = dsse.seal(checkpoint_payload(origin, frontier), dsse.CHECKPOINT, [signer])
            index.run("INSERT OR REPLACE INTO checkpoints VALUES (?, ?)", (size, envelope))
    return size


def last_checkpoint(index: Index) -> int:
    """Size of the newest checkpoint, 0 without one."""
    row = index.row("SELECT max(size) FROM checkpoints")
    return row[0] or 0 if row else 0
