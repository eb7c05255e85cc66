"""A prepared library to break: operations to interrupt, and what must hold after any interruption."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from library import history, rows
from library.audit import verify_library
from library.bundle import export_bundle, import_bundle, read_file
from library.disk import Disk
from library.records import ARCHIVED, VALIDATED
from library.store import Library
from tests.library.helpers import make_container, validated


@dataclass(frozen=True)
class World:
    """One directory with `library`, `keys` and a bundle of two artifacts that the library does not have."""

    root: Path

    @property
    def home(self) -> Path:
        return self.root / "library"

    def open(self, disk: Disk | None = None) -> Library:
        return Library.open(self.home, trust=self.root / "keys", disk=disk, wait_s=20)

    def copy(self, to: Path) -> World:
        shutil.copytree(self.root, to, symlinks=True)
        return World(to)


def ids(number: int) -> str:
    from library.manifest import unpack

    return unpack(make_container(number)).manifest["artifact_id"]


PROVEN, BETTER, PENDING, OLD, AWAY = ids(1), ids(2), ids(3), ids(4), ids(5)
NEW = ids(50)


def prepare(root: Path) -> World:
    """Two proven, one pending, one to archive, one archived, one object without a name, one staging
    leftover.
    """
    root.mkdir(mode=0o700, exist_ok=True)
    world = World(root)
    with Library.open(root / "donor", trust=root / "keys") as donor:
        for number in (60, 61):
            validated(donor, number)
        export_bundle(donor, donor.artifacts(), root / "gift")
    shutil.rmtree(root / "donor")
    with world.open() as lib:
        for number in (1, 2, 4, 5):
            validated(lib, number, {"policy": "p", "generated_tags": ["old"]})
        lib.archive([AWAY], root / "kept")
        lib.collect(grace_s=0, dry_run=False)
        lib.put_artifact(make_container(3), side_files={"k.ptx": b"ptx"})
        lib.blobs.put(b"an object that nobody names")
    leftover = world.home / "staging" / "1-999999999-left"
    leftover.write_bytes(b"half")
    return world


def put(lib: Library, root: Path) -> None:
    lib.put_artifact(make_container(50, size=20000), side_files={"k.ptx": b"text" * 500})


def prove(lib: Library, root: Path) -> None:
    lib.record_verdict(PENDING, {"policy": "p", "generated_tags": ["trainable"]}, passed=True)


def supersede(lib: Library, root: Path) -> None:
    lib.supersede(PROVEN, BETTER, "faster")


def collect(lib: Library, root: Path) -> None:
    lib.collect(grace_s=0, dry_run=False)


def archive(lib: Library, root: Path) -> None:
    lib.archive([OLD], root / "moved", "old")


def restore(lib: Library, root: Path) -> None:
    lib.restore(root / "kept")


def annotate(lib: Library, root: Path) -> None:
    lib.annotate(PROVEN, {"risk_score": 0.5})


def take(lib: Library, root: Path) -> None:
    import_bundle(lib, read_file(root / "gift"))


OPERATIONS: dict[str, Callable[[Library, Path], None]] = {
    "put": put,
    "prove": prove,
    "supersede": supersede,
    "collect": collect,
    "archive": archive,
    "restore": restore,
    "annotate": annotate,
    "import": take,
}


def check(world: World, operation: str) -> None:
    """After an interruption: nothing lost, nothing wrong, nothing half; and the operation succeeds when done
    again.
    """
    with world.open() as lib:
        _sound(lib, before=True)
        again = OPERATIONS[operation]
        done = {
            "put": lambda: rows.artifact(lib.index, NEW) is not None,
            "prove": lambda: lib.record(PENDING).state == VALIDATED,
            "supersede": lambda: lib.record(PROVEN).state == "SUPERSEDED",
            "collect": lambda: False,
            "archive": lambda: lib.record(OLD).state == ARCHIVED,
            "restore": lambda: lib.record(AWAY).state == VALIDATED,
            "annotate": lambda: lib.annotation(PROVEN) == {"risk_score": 0.5},
            "import": lambda: rows.artifact(lib.index, ids(60)) is not None,
        }[operation]
        if operation == "import" and done():
            assert rows.artifact(lib.index, ids(61)) is not None, "half a bundle"
        if not done():
            again(lib, world.root)
        assert operation == "collect" or done()
        lib.collect(grace_s=0, dry_run=False)
        _sound(lib, before=False)
        named = set(rows.referenced_digests(lib.index))
        assert set(lib.blobs.digests()) == named, "orphans or losses"
        assert lib.blobs.staged() == [], "staging leftovers"
        assert not lib.index.rows("SELECT 1 FROM leases WHERE expires <= unixepoch()"), "stale leases"


def _sound(lib: Library, *, before: bool) -> None:
    report = verify_library(lib, lib.artifacts(), contents=True)
    assert report.findings == (), report.findings
    assert history.audit(lib).findings == ()
    (result,) = lib.index.rows("PRAGMA integrity_check")
    assert result == ("ok",)
    for record in lib.artifacts():
        if record.state in (VALIDATED, "SUPERSEDED"):
            assert lib.load(record.id).record.digest == record.digest
    for artifact_id in (PROVEN, BETTER, PENDING, OLD):
        assert lib.record(artifact_id).id == artifact_id


def in_child(work: Callable[[], None]) -> int:
    """Run in a forked child that never returns into pytest; its exit status (negative: killed by that
    signal).
    """
    child = os.fork()
    if child == 0:
        status = 99
        try:
            work()
            status = 0
        except SystemExit as error:
            status = int(error.code or 0)
        except BaseException as error:
            os.write(2, f"child: {type(error).__name__}: {error}\n".encode())
            status = getattr(error, "exit_code", 98)
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
