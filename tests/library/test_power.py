"""Losing power: every state that the disk may be in, made from a recording, recovers to a sound library.

What counts as on the disk (the rules of ext4 without its extra kindness, as in the ALICE study): a file's
bytes only once the file was synced, a name only once its directory was synced; anything later may be there or
not, in any combination. A transaction is on the disk when COMMIT has returned (`synchronous=FULL`;
test_faults tears those writes).
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from library.disk import Disk
from library.index import DATABASE, Index
from tests.library.world import OPERATIONS, World, check, prepare

Event = tuple[Any, ...]


class Recorder(Disk):
    """Does everything and remembers it: names by directory, files by number."""

    def __init__(self, home: Path) -> None:
        self.home, self.events, self.files = home, [], 0
        self.open_files: dict[int, int] = {}

    def _where(self, fd: int) -> str:
        return str(Path(os.readlink(f"/proc/self/fd/{fd}")).relative_to(self.home))

    def make_dir(self, name: str, dir_fd: int) -> bool:
        new = super().make_dir(name, dir_fd)
        if new:
            self.events.append(("name", self._where(dir_fd), name, "directory"))
        return new

    def create(self, name: str, dir_fd: int) -> int:
        fd = super().create(name, dir_fd)
        self.files += 1
        self.open_files[fd] = self.files
        self.events.append(("name", self._where(dir_fd), name, self.files))
        return fd

    def write(self, fd: int, data: bytes | memoryview) -> None:
        super().write(fd, data)
        self.events.append(("write", self.open_files[fd], bytes(data)))

    def seal(self, fd: int) -> None:
        super().seal(fd)
        self.events.append(("sync", self.open_files[fd]))

    def sync_dir(self, fd: int) -> None:
        super().sync_dir(fd)
        self.events.append(("syncdir", self._where(fd)))

    def _move(self, source: str, source_fd: int, target: str, target_fd: int) -> None:
        self.events.append(("copy", self._where(source_fd), source, self._where(target_fd), target))

    def link(self, source: str, source_fd: int, target: str, target_fd: int) -> None:
        super().link(source, source_fd, target, target_fd)
        self._move(source, source_fd, target, target_fd)

    def rename(self, source: str, source_fd: int, target: str, target_fd: int) -> None:
        super().rename(source, source_fd, target, target_fd)
        self._move(source, source_fd, target, target_fd)
        self.events.append(("unname", self._where(source_fd), source))

    def unlink(self, name: str, dir_fd: int) -> None:
        super().unlink(name, dir_fd)
        place = Path(self._where(dir_fd)) / name
        self.events.append(("unname", str(place.parent), place.name))


@dataclass
class Medium:
    """What is on the disk for sure, and what has been asked of it since."""

    names: dict[tuple[str, str], Any]
    bytes: dict[Any, bytes]
    pending: list[tuple[str, str, Any]] = field(default_factory=list)  # directory, name, file or None
    unsynced: dict[Any, bytes] = field(default_factory=dict)
    database: dict[str, bytes] = field(default_factory=dict)

    def current(self, directory: str, name: str) -> Any:
        found = self.names.get((directory, name))
        for where, what, file in self.pending:
            if (where, what) == (directory, name):
                found = file
        return found

    def take(self, event: Event) -> None:
        kind = event[0]
        if kind == "name":
            self.pending.append(event[1:])
        elif kind == "unname":
            self.pending.append((event[1], event[2], None))
        elif kind == "copy":
            self.pending.append((event[3], event[4], self.current(event[1], event[2])))
        elif kind == "write":
            self.unsynced[event[1]] = self.unsynced.get(event[1], b"") + event[2]
        elif kind == "sync":
            self.bytes[event[1]] = self.unsynced.pop(event[1], b"")
        elif kind == "syncdir":
            for where, name, file in [p for p in self.pending if p[0] == event[1]]:
                self._apply(self.names, where, name, file)
            self.pending = [p for p in self.pending if p[0] != event[1]]
        elif kind == "commit":
            self.database = event[1]

    @staticmethod
    def _apply(names: dict[tuple[str, str], Any], where: str, name: str, file: Any) -> None:
        if file is None:
            names.pop((where, name), None)
        else:
            names[where, name] = file

    def states(self) -> Iterator[tuple[dict[tuple[str, str], Any], dict[Any, bytes]]]:
        """Names and bytes after a power loss now: no pending name, all, each alone, all but each; torn
        files.
        """
        count = len(self.pending)
        subsets = {(), tuple(range(count))}
        for one in range(count):
            subsets |= {(one,), tuple(i for i in range(count) if i != one)}
        for chosen, torn in itertools.product(sorted(subsets), (0, 2)):
            names = dict(self.names)
            for index in chosen:
                self._apply(names, *self.pending[index])
            half = {file: data[: len(data) // torn if torn else 0] for file, data in self.unsynced.items()}
            yield names, {**self.bytes, **half}


def snapshot(home: Path) -> dict[str, bytes]:
    files = (home / f"{DATABASE}{tail}" for tail in ("", "-wal"))
    return {file.name: file.read_bytes() for file in files if file.exists()}


def record(world: World, operation: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Medium, list[Event]]:
    """Run an operation; the medium before it and everything that was asked of it."""
    names: dict[tuple[str, str], Any] = {}
    known: dict[Any, bytes] = {}
    for top in ("objects", "staging", "quarantine"):
        for path in (world.home / top).rglob("*"):
            key = (str(path.parent.relative_to(world.home)), path.name)
            names[key] = "directory" if path.is_dir() else f"old {path}"
            if path.is_file():
                known[f"old {path}"] = path.read_bytes()
    recorder = Recorder(world.home)
    write = Index.write

    @contextmanager
    def noted(self: Index, *, durable: bool = True) -> Iterator[Index]:
        outer = not self.connection.in_transaction
        with write(self, durable=durable) as index:
            yield index
        if outer and durable and self.home == world.home:
            recorder.events.append(("commit", snapshot(world.home)))

    lib = world.open(disk=recorder)
    medium = Medium(names, known, database=snapshot(world.home))
    monkeypatch.setattr(Index, "write", noted)
    OPERATIONS[operation](lib, world.root)
    monkeypatch.undo()
    lib.close()
    return medium, recorder.events


def build(
    base: World, to: Path, names: dict[tuple[str, str], Any], data: dict[Any, bytes], medium: Medium
) -> World:
    """A library in the given state of the disk."""
    world = World(to)
    to.mkdir(mode=0o700)
    shutil.copytree(base.root / "keys", to / "keys")
    for bundle in ("gift", "kept"):
        shutil.copy(base.root / bundle, to)
    for top in ("objects", "staging", "quarantine", "measurements"):
        (world.home / top).mkdir(mode=0o700, parents=True, exist_ok=True)
    world.home.chmod(0o700)
    shutil.copy(base.home / "FORMAT", world.home)
    for (where, name), file in names.items():
        if file == "directory":
            (world.home / where / name).mkdir(mode=0o700, exist_ok=True)
    for (where, name), file in names.items():
        if file != "directory" and (world.home / where).is_dir():
            # The writer whose process number a staging name carries is gone after a power loss.
            name = name.replace(f"-{os.getpid()}-", "-999999999-")
            (world.home / where / name).write_bytes(data.get(file, b""))
    for name, content in medium.database.items():
        (world.home / name).write_bytes(content)
    return world


@pytest.mark.parametrize("operation", ["put", "prove", "collect", "restore", "import"])
def test_every_state_after_a_power_loss(
    operation: str, fast_tmp: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = prepare(fast_tmp / "base")
    medium, events = record(base.copy(fast_tmp / "run"), operation, monkeypatch)
    assert any(e[0] == "commit" for e in events)
    seen: set[object] = set()
    for event in [("begin",), *events]:
        medium.take(event)
        for names, data in medium.states():
            # The name of an open file shows no bytes of it that matter: states that look alike are visited
            # once.
            shape = (
                frozenset((k, data.get(f, f)) for k, f in names.items()),
                frozenset(medium.database.items()),
            )
            if shape in seen:
                continue
            seen.add(shape)
            world = build(base, fast_tmp / f"state{len(seen)}", names, data, medium)
            check(world, operation)
            shutil.rmtree(world.root)
    print(f"{operation}: {len(events)} events, {len(seen)} states")
    assert len(seen) >= 4


def test_the_check_finds_a_missing_sync(fast_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The method itself under test: without the directory's sync a committed row may name a lost object."""
    base = prepare(fast_tmp / "base")
    monkeypatch.setattr(Recorder, "sync_dir", lambda self, fd: None)
    medium, events = record(base.copy(fast_tmp / "run"), "put", monkeypatch)
    for event in events:
        medium.take(event)
    names, data = next(iter(medium.states()))
    world = build(base, fast_tmp / "state", names, data, medium)
    with pytest.raises(AssertionError):
        check(world, "put")
