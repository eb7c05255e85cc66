"""Leases: rows that keep collection away from objects which no row names yet,
and say who is at work on what."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterable

from esper_ir.diagnostics import EsperError
from library.errors import fail
from library.index import Index

LEASE_S = 3600.0


def new_owner() -> str:
    """host:process:random, so that a refusal can say who holds a lease."""
    return f"{os.uname().nodename}:{os.getpid()}:{uuid.uuid4().hex[:12]}"


def take(index: Index, owner: str, digests: Iterable[str], purpose: str, seconds: float = LEASE_S) -> None:
    """Lease objects before they are published or reused; a tombstone on one of them is lifted in the same
    transaction.

    Not durable: a lease lost to a power failure belonged to a process that the failure ended as well.
    """
    now = time.time()
    with index.write(durable=False):
        for digest in digests:
            values = (digest, owner, purpose, now, now + seconds)
            index.run("INSERT OR REPLACE INTO leases VALUES (?, ?, ?, ?, ?)", values)
            index.run("DELETE FROM tombstones WHERE digest = ?", (digest,))


def drop(index: Index, owner: str) -> None:
    """Give all leases of `owner` back; inside or outside a transaction."""
    with index.write(durable=False):
        index.run("DELETE FROM leases WHERE owner = ?", (owner,))


def abandon(index: Index, owner: str) -> None:
    """Give leases back after a failure, if that is still possible; else they run out."""
    try:
        drop(index, owner)
    except EsperError:
        return


def check(index: Index, owner: str, digests: Iterable[str]) -> None:
    """E0726 when collection may have taken an object since, because the lease ran out.
    Inside the final transaction."""
    now = time.time()
    held = {
        row[0] for row in index.run("SELECT digest FROM leases WHERE owner = ? AND expires > ?", (owner, now))
    }
    lost = sorted(set(digests) - held)
    if lost:
        raise fail(
            "E0726",
            f"lease on {len(lost)} objects ran out before they were recorded",
            hint="run the command again",
        )


def live(index: Index, digest: str) -> bool:
    """Whether somebody works with this object now."""
    return bool(holder(index, digest))


def holder(index: Index, digest: str) -> str:
    """Who works with this object now, at what, since when; "" for nobody."""
    text = "SELECT owner, purpose, taken FROM leases WHERE digest = ? AND expires > ? ORDER BY taken"
    row = index.row(text, (digest, time.time()))
    if row is None:
        return ""
    owner, purpose, taken = row
    host, process = (owner.split(":") + ["?"])[:2]
    since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(max(0, min(taken, 1 << 33))))
    return f"process {process} on {host} ({purpose}) since {since}"


def expire(index: Index) -> int:
    """Forget leases that ran out; how many. Inside a transaction.

    One that would last longer than a lease does was taken while the clock was ahead: it lasts as long as any.
    """
    longest = time.time() + LEASE_S
    index.run("UPDATE leases SET expires = ?1 WHERE expires > ?1", (longest,))
    return len(index.run("DELETE FROM leases WHERE expires <= ? RETURNING digest", (time.time(),)))
