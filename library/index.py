"""The connection to esper.db: opened for durability, one writer at a time,
every SQLite failure a named refusal."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import apsw

from esper_ir.diagnostics import EsperError
from library.errors import fail
from library.paths import read_regular
from library.schema import FORMAT_VERSION, MIGRATIONS

DATABASE = "esper.db"
HOLDER = "writer"
_SCHEMA = "SELECT type, name, sql FROM sqlite_master WHERE name NOT LIKE 'sqlite_%'"
_LOG = 16 << 20  # what is left of a log that many writers and readers let grow
# The write-ahead-log reset bug can lose or corrupt committed pages; these versions carry the repair.
FIXED_SQLITE = (3, 51, 3)
BACKPORTED_SQLITE = ((3, 44, 6), (3, 50, 7))


def sqlite_is_safe(version: tuple[int, int, int]) -> bool:
    """Whether write-ahead logging may be used with this SQLite."""
    return version >= FIXED_SQLITE or any(version[:2] == b[:2] and version >= b for b in BACKPORTED_SQLITE)


def sqlite_version() -> tuple[int, int, int]:
    """Version of the SQLite inside apsw."""
    parts = [int(p) for p in apsw.sqlite_lib_version().split(".")]
    return parts[0], parts[1], parts[2]


def sql_error(error: apsw.Error, home: Path) -> EsperError:
    """The named refusal for a failure of SQLite."""
    text = f"{home / DATABASE}: {error}"
    if isinstance(error, apsw.BusyError | apsw.LockedError):
        return fail(
            "E0708", f"library is locked{holder(home)}", hint="wait, or end the process that holds it"
        )
    if isinstance(error, apsw.FullError):
        return fail("E0703", text, hint="free space, or run `esper-library gc`, which works on a full disk")
    if isinstance(error, apsw.ReadOnlyError | apsw.CantOpenError | apsw.PermissionsError | apsw.AuthError):
        return fail("E0702", text, hint="choose another place with --library or ESPER_LIBRARY")
    if isinstance(error, apsw.CorruptError | apsw.NotADBError | apsw.SQLError):
        return fail("E0709", text, hint="restore esper.db from a copy, or import a bundle into a new library")
    return fail("E0710", text, hint="check the disk; the transaction was rolled back")


def holder(home: Path) -> str:
    """ " by process P on HOST since T", from the note that the last writer left."""
    try:
        pid, host, since = read_regular(home / HOLDER).decode().split()
    except (OSError, ValueError, EsperError):
        return ""
    return f" by process {pid} on {host} since {since}"


class Index:
    """One connection; thread-safe by a lock, refused after fork.
    `wait_s` bounds the wait for the writer's place."""

    def __init__(self, home: Path, *, readonly: bool, wait_s: float = 30.0) -> None:
        self.home, self.readonly, self.wait_s = home, readonly, wait_s
        self.lock = threading.RLock()
        self._pid = os.getpid()
        self._deadline = 0.0
        self._closed = False
        if not sqlite_is_safe(sqlite_version()):
            version = ".".join(str(p) for p in sqlite_version())
            raise fail(
                "E0707",
                f"SQLite {version} can corrupt a write-ahead log",
                hint="upgrade apsw to 3.51.3 or newer",
            )
        try:
            self.connection = self._connect()
            self._prepare()
        except apsw.Error as error:
            raise sql_error(error, home) from error

    def _connect(self) -> apsw.Connection:
        # As a URI, since a name of a file may be bytes that no text spells.
        name, flags = (self.home / DATABASE).as_uri(), apsw.SQLITE_OPEN_URI | apsw.SQLITE_OPEN_NOFOLLOW
        if not self.readonly:
            return apsw.Connection(
                f"{name}?mode=rwc", flags=flags | apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE
            )
        # A log needs shared memory beside it. On a medium that cannot be written there is neither, and then
        # the file cannot change under us: only so may it be opened as immutable.
        frozen = not os.access(self.home, os.W_OK) and not self._has_log()
        kind = f"mode=ro{'&immutable=1' if frozen else ''}"
        return apsw.Connection(f"{name}?{kind}", flags=flags | apsw.SQLITE_OPEN_READONLY)

    def _has_log(self) -> bool:
        log, memory = (self.home / f"{DATABASE}{tail}" for tail in ("-wal", "-shm"))
        return log.exists() and (memory.exists() or log.stat().st_size > 0)

    def _prepare(self) -> None:
        self.connection.set_busy_handler(self._busy)
        self._deadline = time.monotonic() + self.wait_s
        self.connection.config(apsw.SQLITE_DBCONFIG_DEFENSIVE, 1)
        self.connection.config(apsw.SQLITE_DBCONFIG_TRUSTED_SCHEMA, 0)
        pragmas = ["PRAGMA temp_store=MEMORY", "PRAGMA cell_size_check=ON", "PRAGMA foreign_keys=ON"]
        if not self.readonly:
            pragmas += [
                "PRAGMA journal_mode=WAL",
                "PRAGMA synchronous=FULL",
                f"PRAGMA journal_size_limit={_LOG}",
            ]
        for pragma in pragmas:
            self._patiently(pragma)

    def _patiently(self, pragma: str) -> None:
        """A new file becomes one with a log under an exclusive lock. Of two that want it at once one is told
        that the file is busy without its handler being asked, since waiting with a lock in hand could last
        for ever: it lets go and tries again.
        """
        while True:
            try:
                self.connection.execute(pragma).fetchall()
                return
            except apsw.BusyError:
                if time.monotonic() > self._deadline:
                    raise
                time.sleep(random.uniform(0.001, 0.005))

    def _busy(self, attempt: int) -> bool:
        """Jittered back-off: SQLite's own steps make many writers wake together and starve one another."""
        if time.monotonic() >= self._deadline:
            return False
        time.sleep(random.uniform(0.0002, min(0.02, 0.001 * (attempt + 1))))
        return True

    def close(self) -> None:
        """Idempotent. A handle inherited through fork is left to its owner."""
        if self.connection_open():
            self._closed = True
            self.connection.close()

    def connection_open(self) -> bool:
        """Whether this handle can still be used by this process."""
        return not self._closed and self._pid == os.getpid()

    def _check_owner(self) -> None:
        if self._pid != os.getpid():
            raise fail(
                "E0711", "library handle was inherited through fork", hint="open the library in each process"
            )

    def rows(self, statement: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """All rows of a reading statement (prepared once, kept by apsw)."""
        self._check_owner()
        try:
            with self.lock:
                return self.connection.execute(statement, values).fetchall()
        except apsw.ConnectionClosedError as error:
            raise fail("E0711", "library handle is closed") from error
        except apsw.Error as error:
            raise sql_error(error, self.home) from error

    def row(self, statement: str, values: Sequence[Any] = ()) -> tuple[Any, ...] | None:
        """The first row, or None."""
        found = self.rows(statement, values)
        return found[0] if found else None

    def hold(self) -> None:
        """From now on read the rows of this moment, until this connection is closed."""
        self.rows("BEGIN")
        self.version()

    @contextmanager
    def write(self, *, durable: bool = True) -> Iterator[Index]:
        """BEGIN IMMEDIATE .. COMMIT; rolled back whole on any exception. `durable=False` only for what a
        power loss may take with the process that wanted it (leases). Nested use joins the outer
        transaction."""
        self._check_owner()
        if self.readonly:
            raise fail(
                "E0712", f"library {self.home} is opened read-only", hint="open it with readonly=False"
            )
        with self.lock:
            if self.connection.in_transaction:
                yield self
                return
            try:
                self._begin(durable)
                yield self
                self.connection.execute("COMMIT")
            except apsw.ConnectionClosedError as error:
                raise fail("E0711", "library handle is closed") from error
            except apsw.Error as error:
                raise sql_error(error, self.home) from error
            finally:
                self._roll_back()

    def _begin(self, durable: bool) -> None:
        self._deadline = time.monotonic() + self.wait_s
        self.connection.execute(f"PRAGMA synchronous={'FULL' if durable else 'NORMAL'}")
        self.connection.execute("BEGIN IMMEDIATE")
        self._note_holder()

    def _roll_back(self) -> None:
        try:
            if self.connection.in_transaction:
                self.connection.execute("ROLLBACK")
        except apsw.Error:
            return  # SQLite rolled back by itself, or will when the log is next read

    def shrink_log(self) -> None:
        """Move the log into the database and cut it, unless somebody reads from it all the time."""
        self._check_owner()
        with self.lock:
            self._deadline = time.monotonic() + min(0.25, self.wait_s)
            try:
                self.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            except apsw.Error:
                return  # the next collection tries again; nothing depends on it

    def _note_holder(self) -> None:
        note = f"{os.getpid()} {os.uname().nodename} {time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())}\n"
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
            fd = os.open(self.home / HOLDER, flags, 0o600)
        except OSError:
            return  # only a courtesy to whoever has to wait
        try:
            os.pwrite(fd, note.ljust(128).encode(), 0)
        except OSError:
            return
        finally:
            os.close(fd)

    def run(self, statement: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """One statement inside `write()`. E0720 for a number that no column holds."""
        try:
            return self.connection.execute(statement, values).fetchall()
        except OverflowError as error:
            raise fail("E0720", f"a number does not fit in 64 bits: {error}") from error

    def damage(self) -> list[str]:
        """What is wrong with the database itself: pages, indexes, and tables, triggers or views that are not
        those of its migrations.
        """
        found = [row[0] for row in self.rows("PRAGMA integrity_check(10)") if row[0] != "ok"]
        fresh = apsw.Connection(":memory:")
        for migration in MIGRATIONS[: self.version()]:
            fresh.execute(migration).fetchall()
        meant = set(fresh.execute(_SCHEMA).fetchall())
        present = set(self.rows(_SCHEMA))
        found += [f"{kind} {name} was not made by the library" for kind, name, _ in sorted(present - meant)]
        return found + [f"{kind} {name} is missing" for kind, name, _ in sorted(meant - present)]

    def migrate(self, migrations: Sequence[str] = MIGRATIONS) -> int:
        """Bring the tables up to the last migration, each in the one transaction; the version now reached."""
        version = self.version()
        if version > len(migrations):
            raise fail(
                "E0706",
                f"esper.db has schema {version}, this version knows {len(migrations)}",
                hint="use the version of the project that wrote it, or a newer one",
            )
        if version == len(migrations):
            return version
        if self.readonly:
            raise fail(
                "E0706",
                f"esper.db has the older schema {version}, this version reads {len(migrations)}",
                hint="open the library once with write access, which brings it up to date",
            )
        with self.write():
            for number in range(self.version(), len(migrations)):
                for _ in self.connection.execute(migrations[number]):
                    pass
                self.connection.execute(f"PRAGMA user_version={number + 1}")
        return self.version()

    def version(self) -> int:
        """Number of migrations applied."""
        found = self.row("PRAGMA user_version")
        return int(found[0]) if found else 0


assert FORMAT_VERSION == 1
