"""What every part of the library works with: an open directory, its rows, its keys,
and the way to publish."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from esper_ir.diagnostics import EsperError
from library import crypto, leases, ledger, seen
from library.backends import BlobStore
from library.blobs import Blobs
from library.disk import Disk
from library.dsse import Signer
from library.errors import fail
from library.index import Index
from library.layout import open_layout
from library.measurements import Measurements
from library.paths import library_home, trust_home
from library.schema import MIGRATIONS
from library.trust import TrustStore

_ORIGIN = re.compile(r"[0-9a-f]{32}\Z")


def _refuse_nested(home: Path, trust: Path) -> None:
    """Whoever writes a library must not reach the keys that say what it is worth."""
    real = Path(os.path.realpath(trust))
    if Path(os.path.realpath(home)) in (real, *real.parents):
        raise fail(
            "E0704",
            f"the trust home {trust} lies inside the library {home}",
            node=str(trust),
            hint="ESPER_KEYS names another place",
        )


def _warn_of_strangers(index: Index, keys: Path) -> None:
    """Keys made just now signed nothing of what the library holds."""
    ((count,),) = index.rows("SELECT count(*) FROM artifacts")
    if count:
        print(
            f"esper: WARNING: the library {index.home} holds artifacts ({count}) that other keys signed than "
            f"those just made in {keys}: under these none of them loads (E0744)\n"
            "esper: if they are yours, put the old keys back: set ESPER_KEYS to their folder, and remove "
            f"{keys}; if they are somebody else's, `esper-library trust add` their keys",
            file=sys.stderr,
        )


class Core:
    """An open library. Safe to use from several threads; each process opens its own."""

    def __init__(
        self, home: Path, index: Index, blobs: BlobStore, trust: TrustStore, roles: Collection[str]
    ) -> None:
        self.home, self.index, self.blobs, self.trust = home, index, blobs, trust
        self.roles = frozenset(roles)
        self.readonly = index.readonly
        row = index.row("SELECT value FROM meta WHERE key = 'origin'")
        if row is None or not _ORIGIN.match(row[0]):  # it names a file of the trust home
            raise fail("E0709", f"{home}: esper.db does not say which library it is")
        self.origin: str = row[0]
        self._timings: Measurements | None = None

    @classmethod
    def open(
        cls,
        path: Path | str | None = None,
        *,
        create: bool = True,
        readonly: bool = False,
        roles: Collection[str] = ("compiler", "validator"),
        trust: Path | str | None = None,
        wait_s: float = 30.0,
        disk: Disk | None = None,
    ) -> Self:
        """Open, and with `create` first make, the library at `path`. `roles`: whose keys this handle may
        open.

        `wait_s` bounds the wait for another writer (E0708). Without any trust store a writing open makes a
        local one.
        """
        place, keys = library_home(path), TrustStore(trust_home(trust))
        _refuse_nested(place, keys.home)
        home = open_layout(place, create=create and not readonly)
        fresh = bool(roles) and not readonly and keys.bootstrap()
        blobs = Blobs(home, disk)
        index: Index | None = None
        try:
            index = Index(home, readonly=readonly, wait_s=wait_s)
            index.migrate(MIGRATIONS)
            if fresh:
                _warn_of_strangers(index, keys.home)
            return cls(home, index, blobs, keys, () if readonly else roles)
        except BaseException:
            blobs.close()
            if index is not None:
                index.close()
            raise

    def close(self) -> None:
        """Sign the ledger's head if this handle may, and give everything back."""
        if not self.readonly and self.roles and self.index.connection_open():
            with suppress(EsperError):  # without a usable key the head stays unsigned, which audit shows
                self.sign_head(every=1)
        if self._timings is not None:
            self._timings.close()
        self.index.close()
        self.blobs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.close()

    def warm(self) -> None:
        """Import the signature code and verify the trust store now,
        so that the first load does not pay for it."""
        crypto.warm()
        self.trust.document()

    def signer(self, role: str) -> Signer:
        """The local key of `role`, if this handle was opened for it: E0752 otherwise."""
        if role not in self.roles:
            open_for = ", ".join(sorted(self.roles)) or "none"
            raise fail("E0752", f"this process may not sign as {role} (open roles: {open_for})")
        return self.trust.signer(role)

    @contextmanager
    def publishing(self, contents: Mapping[str, bytes], purpose: str) -> Iterator[None]:
        """Make objects (by digest) durable under a lease, then run the body in the transaction that names
        them.

        Anything that goes wrong leaves at most objects without a row, which collection removes.
        """
        self.refuse_readonly()
        owner = leases.new_owner()
        leases.take(self.index, owner, contents, purpose)
        try:
            self.blobs.put_many(contents.values())
            with self.index.write():
                leases.check(self.index, owner, contents)
                yield
                leases.drop(self.index, owner)
        except BaseException:
            leases.abandon(self.index, owner)
            raise
        self.after_write()

    @contextmanager
    def snapshot(self) -> Iterator[Index]:
        """The rows of one moment, through a connection of its own: writers go on meanwhile, unseen."""
        self.index.version()  # refuses a handle that was closed or inherited
        view = Index(self.home, readonly=True, wait_s=self.index.wait_s)
        try:
            view.hold()
            yield view
        finally:
            view.close()

    def refuse_readonly(self) -> None:
        """E0712 on a handle that may not write, before anything is prepared."""
        if self.readonly:
            raise fail(
                "E0712", f"library {self.home} is opened read-only", hint="open it with readonly=False"
            )

    def timings(self) -> Measurements:
        """The measurement store, opened when first wanted."""
        if self._timings is None:
            self._timings = Measurements(self.home, readonly=self.readonly, wait_s=self.index.wait_s)
        return self._timings

    def after_write(self) -> None:
        """After a commit: remember how long the ledger is, and now and then sign its head."""
        size, frontier = ledger.state(self.index)
        seen.note(self.trust.home, self.origin, size, frontier.root())
        with suppress(EsperError):  # what was committed stays done, whoever may sign the head
            self.sign_head(every=ledger.CHECKPOINT_EVERY)

    def sign_head(self, every: int) -> None:
        """Sign a checkpoint when the ledger grew by `every` entries, with whichever role this handle has."""
        size, _ = ledger.state(self.index)
        role = next((r for r in ("validator", "compiler") if r in self.roles), None)
        if role is not None and size - ledger.last_checkpoint(self.index) >= every:
            ledger.checkpoint(self.index, self.origin, self.signer(role))
