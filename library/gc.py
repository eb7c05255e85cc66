"""Collection: bytes that no row names are removed, in two steps with a grace period between them. Rows stay
for good.

Step one marks, step two looks again inside the transaction that unlinks. A writer leases its digests, which
lifts marks, before it publishes or reuses bytes: whichever transaction comes first, the bytes a row will name
survive.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

from esper_ir.diagnostics import EsperError
from library import leases, ledger, rows
from library.blobs import RESERVE
from library.core import Core
from library.layout import make_reserve
from library.paths import os_error

GRACE_S = 3600.0
_BATCH = 64


@dataclass(frozen=True)
class GcReport:
    """`marked` objects newly without a name, `removed` objects and their `bytes`, `staged` leftovers
    removed.
    """

    marked: int
    removed: int
    bytes: int
    staged: int
    dry_run: bool

    def to_json(self) -> dict[str, Any]:
        return dict(self.__dict__)


def collect(core: Core, *, grace_s: float = GRACE_S, dry_run: bool = True) -> GcReport:
    """Mark and remove. `grace_s` is the least age of a mark before its bytes go, and of a staging leftover.

    On a full disk the reserved file is given back first, and taken again at the end if there is room.
    """
    core.refuse_readonly()
    if dry_run:
        return _what_would_go(core)
    try:
        return _collect(core, grace_s)
    except EsperError as error:
        if error.code != "E0703":
            raise
        _give_back(core)
        return _collect(core, grace_s)


def _what_would_go(core: Core) -> GcReport:
    named = set(rows.referenced_digests(core.index))
    loose = [d for d in core.blobs.digests() if d not in named and not leases.live(core.index, d)]
    old = sum(age > leases.LEASE_S for _, age in core.blobs.staged())
    return GcReport(len(loose), 0, sum(core.blobs.size(d) for d in loose), old, True)


def _collect(core: Core, grace_s: float) -> GcReport:
    staged = _drop_staged(core, max(grace_s, 0.0))
    marked = _mark(core)
    removed, freed = 0, 0
    while True:
        count, size = _sweep(core, grace_s)
        removed, freed = removed + count, freed + size
        if count < _BATCH:
            break
    core.index.shrink_log()
    if not (core.home / RESERVE).exists():
        _reserve_again(core)
    return GcReport(marked, removed, freed, staged, False)


def _give_back(core: Core) -> None:
    try:
        (core.home / RESERVE).unlink(missing_ok=True)
    except OSError as error:
        raise os_error(error, "cannot give back the reserve of", core.home) from error


def _reserve_again(core: Core) -> None:
    try:
        make_reserve(core.home)
    except EsperError:
        _give_back(core)  # still full: the next collection tries again


def _drop_staged(core: Core, least_age: float) -> int:
    """Staging files of writers that are gone: old, or of a process on this machine that no longer runs."""
    dropped = 0
    for name, age in core.blobs.staged():
        dated_ahead = age < 0  # the clock was set back since
        gone = (age >= least_age or dated_ahead) and not _runs(name)
        if age > max(least_age, leases.LEASE_S) or gone:
            core.blobs.drop_staged(name)
            dropped += 1
    return dropped


def _runs(staged: str) -> bool:
    """Whether the process that a staging name carries is alive; in doubt yes."""
    try:
        os.kill(int(staged.split("-")[1]), 0)
    except ProcessLookupError:
        return False
    except (OSError, ValueError, IndexError, OverflowError):
        return True
    return True


def _mark(core: Core) -> int:
    present = list(core.blobs.digests())
    now = time.time()
    with core.index.write():
        leases.expire(core.index)
        named = set(rows.referenced_digests(core.index)) | rows.leased_digests(core.index)
        rows.lift_tombstones(core.index, named)
        rows.lift_tombstones_but(core.index, set(present))
        rows.date_tombstones(core.index, now)
        return sum(rows.add_tombstone(core.index, d, now) for d in present if d not in named)


def _sweep(core: Core, grace_s: float) -> tuple[int, int]:
    """One transaction's worth of removals: (objects, bytes)."""
    freed, gone = 0, []
    with core.index.write():
        for digest in rows.ripe_tombstones(core.index, time.time() - grace_s, _BATCH):
            if not rows.referenced(core.index, digest) and not leases.live(core.index, digest):
                freed += core.blobs.remove(digest)
                gone.append(digest)
            rows.lift_tombstone(core.index, digest)
        if gone:
            ledger.append(core.index, "objects.collected", core.origin, {"digests": gone, "bytes": freed})
    return len(gone), freed
