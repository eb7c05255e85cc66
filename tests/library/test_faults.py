"""Dying or failing at every step, inside the process: the seam to the disk and SQLite's own file calls.

`test_strace.py` does the same from outside with real system calls; this one visits every point in
milliseconds.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import apsw
import pytest

from esper_ir.diagnostics import EsperError
from library.disk import Disk
from tests.library.world import OPERATIONS, World, check, in_child, prepare

KILLED = 77


class Stop(Disk):
    """The Nth call, and with `after` the moment after it, ends in `how`."""

    def __init__(self, at: int, how: Any) -> None:
        self.at, self.how, self.calls = at, how, 0

    def _step(self) -> None:
        self.calls += 1
        if self.calls == self.at:
            self.how()

    def make_dir(self, name: str, dir_fd: int) -> bool:
        self._step()
        return super().make_dir(name, dir_fd)

    def create(self, name: str, dir_fd: int) -> int:
        self._step()
        return super().create(name, dir_fd)

    def write(self, fd: int, data: bytes | memoryview) -> None:
        super().write(fd, bytes(data)[: len(data) // 2])
        self._step()
        super().write(fd, bytes(data)[len(data) // 2 :])

    def seal(self, fd: int) -> None:
        self._step()
        super().seal(fd)

    def sync_dir(self, fd: int) -> None:
        self._step()
        super().sync_dir(fd)

    def link(self, source: str, source_fd: int, target: str, target_fd: int) -> None:
        self._step()
        super().link(source, source_fd, target, target_fd)

    def rename(self, source: str, source_fd: int, target: str, target_fd: int) -> None:
        self._step()
        super().rename(source, source_fd, target, target_fd)

    def unlink(self, name: str, dir_fd: int) -> None:
        self._step()
        super().unlink(name, dir_fd)


class StopFile(apsw.VFSFile):
    """A database file whose Nth write, sync or truncate ends in `how`; a write gets half way first."""

    stop: StopVFS

    def __init__(self, stop: StopVFS, filename: Any, flags: list[int]) -> None:
        self.stop = stop
        super().__init__(stop.base_vfs, filename, flags)

    def xWrite(self, data: bytes, offset: int) -> None:
        if self.stop.due():
            super().xWrite(data[: len(data) // 2], offset)
            self.stop.how()
        super().xWrite(data, offset)

    def xSync(self, flags: int) -> None:
        if self.stop.due():
            self.stop.how()
        super().xSync(flags)

    def xTruncate(self, newsize: int) -> None:
        if self.stop.due():
            self.stop.how()
        super().xTruncate(newsize)


class StopVFS(apsw.VFS):
    """SQLite's system calls with a fault at the Nth."""

    def __init__(self, at: int, how: Any) -> None:
        self.at, self.how, self.calls, self.armed = at, how, 0, False
        self.base_vfs = "unix"
        super().__init__("esper-stop", "unix", makedefault=True)

    def due(self) -> bool:
        if self.armed:
            self.calls += 1
        return self.armed and self.calls == self.at

    def xOpen(self, name: Any, flags: list[int]) -> apsw.VFSFile:
        return StopFile(self, name, flags)


def die() -> None:
    os._exit(KILLED)


def refuse(number: int) -> Any:
    def how() -> None:
        raise OSError(number, os.strerror(number))

    return how


def sql_refuse(kind: type[apsw.Error]) -> Any:
    def how() -> None:
        raise kind("injected")

    return how


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> World:
    shm = Path("/dev/shm")
    root = shm if os.access(shm, os.W_OK) else tmp_path_factory.mktemp("faults")
    return prepare(root / f"esper-faults-{os.getpid()}")


@pytest.fixture(scope="module", autouse=True)
def clean(base: World) -> Any:
    yield
    import shutil

    shutil.rmtree(base.root, ignore_errors=True)


def visit(base: World, where: Path, operation: str, at: int, how: Any, database: bool) -> int:
    """Run one operation with a fault at point `at` in a child; its exit status: 0 when there is no such
    point.
    """
    world = base.copy(where)

    def work() -> None:
        vfs = StopVFS(at, how) if database else None
        lib = world.open(disk=None if database else Stop(at, how))
        if vfs is not None:
            vfs.armed = True
        OPERATIONS[operation](lib, world.root)
        reached = vfs.calls if vfs is not None else lib.blobs.disk.calls  # type: ignore[attr-defined]
        raise SystemExit(0 if reached < at else 55)

    status = in_child(work)
    check(world, operation)
    return status


def every_point(base: World, tmp: Path, operation: str, how: Any, expected: set[int], database: bool) -> int:
    for at in range(1, 400):
        status = visit(base, tmp / f"{at}", operation, at, how, database)
        if status == 0:
            return at - 1
        assert status in expected, f"{operation} at {at}: {status}"
    raise AssertionError("no end")


@pytest.mark.parametrize("operation", OPERATIONS)
def test_killed_at_every_call_to_the_disk(base: World, fast_tmp: Path, operation: str) -> None:
    points = every_point(base, fast_tmp, operation, die, {KILLED}, database=False)
    assert points >= {"supersede": 0, "archive": 0, "annotate": 0, "collect": 1}.get(operation, 5)


@pytest.mark.parametrize("operation", ["put", "prove", "supersede", "collect", "restore", "annotate"])
def test_killed_in_every_write_of_sqlite(base: World, fast_tmp: Path, operation: str) -> None:
    assert every_point(base, fast_tmp, operation, die, {KILLED}, database=True) >= 3


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EROFS])
def test_failing_at_every_call_to_the_disk(base: World, fast_tmp: Path, number: int) -> None:
    """55: the failure was one that may be ignored (a staging file that could not be removed)."""
    code = {errno.EIO: 16, errno.ENOSPC: 15, errno.EROFS: 16}[number]
    assert every_point(base, fast_tmp, "put", refuse(number), {code, 55}, database=False) >= 10


@pytest.mark.parametrize("kind", [apsw.IOError, apsw.FullError])
def test_failing_in_every_write_of_sqlite(base: World, fast_tmp: Path, kind: type[apsw.Error]) -> None:
    code = {apsw.IOError: 16, apsw.FullError: 15}[kind]
    assert every_point(base, fast_tmp, "put", sql_refuse(kind), {code, 55}, database=True) >= 3


@pytest.mark.slow
@pytest.mark.parametrize("operation", ["archive", "import"])
def test_killed_in_every_write_of_sqlite_long(base: World, fast_tmp: Path, operation: str) -> None:
    assert every_point(base, fast_tmp, operation, die, {KILLED}, database=True) >= 3


@pytest.mark.slow
@pytest.mark.parametrize("operation", ["prove", "collect", "archive", "restore", "import"])
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_failing_everywhere_long(base: World, fast_tmp: Path, operation: str, number: int) -> None:
    assert every_point(base, fast_tmp, operation, refuse(number), {15, 16, 55}, database=False) > 0


def test_a_full_disk_is_named_and_collection_still_works(base: World, fast_tmp: Path) -> None:
    world = base.copy(fast_tmp / "full")
    with world.open(disk=Stop(3, refuse(errno.ENOSPC))) as lib:
        with pytest.raises(EsperError) as error:
            OPERATIONS["put"](lib, world.root)
        assert (error.value.code, error.value.exit_code) == ("E0703", 15)
        report = lib.collect(grace_s=0, dry_run=False)
        assert report.removed >= 1
    check(world, "put")
