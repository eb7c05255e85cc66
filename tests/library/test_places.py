"""Where a library may be: full, read-only, network and foreign places, formats, locks and concurrent first
use.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import apsw
import pytest

from esper_ir.diagnostics import EsperError
from library import paths
from library.index import DATABASE, Index, sqlite_is_safe
from library.paths import check_private, file_system_type, library_home
from library.schema import MIGRATIONS
from library.store import Library
from tests.library.helpers import contents, make_container, validated
from tests.library.world import in_child

ROOT = Path(__file__).resolve().parents[2]


def code_of(call: object, *args: object, **kwargs: object) -> tuple[str, int]:
    assert callable(call)
    with pytest.raises(EsperError) as error:
        call(*args, **kwargs)
    return error.value.code, error.value.exit_code


def test_place_from_argument_environment_or_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ESPER_LIBRARY", str(tmp_path / "from environment"))
    assert library_home(None) == tmp_path / "from environment"
    assert library_home(tmp_path / "given") == tmp_path / "given"
    monkeypatch.delenv("ESPER_LIBRARY")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert library_home(None) == tmp_path / "data" / "esper" / "library"


def test_private_directories(home: Path, lib: Library) -> None:
    for name in ("", "objects", "staging", "quarantine", "measurements"):
        assert (home / name).stat().st_mode & 0o777 == 0o700
    record = lib.put_artifact(make_container())
    assert (home / "objects" / record.digest[:2] / record.digest[2:]).stat().st_mode & 0o777 == 0o444


def test_foreign_files_are_not_taken_over(home: Path) -> None:
    home.mkdir(mode=0o700)
    (home / "thesis.tex").write_text("x")
    assert code_of(Library.open, home) == ("E0704", 12)
    assert sorted(os.listdir(home)) == ["thesis.tex"]


def test_a_file_where_the_library_should_be(home: Path) -> None:
    home.write_text("x")
    assert code_of(Library.open, home)[0] in ("E0704", "E0710")


def test_links_on_the_way(fast_tmp: Path, home: Path) -> None:
    (fast_tmp / "real").mkdir(mode=0o700)
    (fast_tmp / "link").symlink_to(fast_tmp / "real")
    assert code_of(Library.open, fast_tmp / "link" / "library") == ("E0704", 12)
    assert list((fast_tmp / "real").iterdir()) == []
    check_private(fast_tmp / "real")


def test_network_file_systems_are_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Library.open(home).close()
    assert file_system_type(home) in ("tmpfs", "ext4", "xfs", "btrfs", "overlay", "zfs")
    before = contents(home)
    for kind in ("nfs4", "cifs", "9p", "lustre", "fuse.sshfs", "fuse.somebody-elses", "fuse"):
        monkeypatch.setattr(paths, "file_system_type", lambda path, kind=kind: kind)
        assert code_of(Library.open, home) == ("E0705", 16)
        assert code_of(Library.open, home, readonly=True) == ("E0705", 16)
        assert code_of(Library.open, home.parent / "new") == ("E0705", 16)
    assert contents(home) == before
    for kind in ("ext4", "xfs", "overlay", "fuse.fuse-overlayfs", "fuseblk", ""):
        monkeypatch.setattr(paths, "file_system_type", lambda path, kind=kind: kind)
        Library.open(home).close()


@pytest.mark.parametrize(
    ("version", "safe"),
    [((3, 40, 1), False), ((3, 44, 5), False), ((3, 44, 6), True), ((3, 45, 0), False), ((3, 50, 7), True),
     ((3, 51, 2), False), ((3, 51, 3), True), ((3, 54, 1), True), ((4, 0, 0), True)],
)  # fmt: skip
def test_sqlite_versions(version: tuple[int, int, int], safe: bool) -> None:
    assert sqlite_is_safe(version) is safe


def test_an_affected_sqlite_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("library.index.sqlite_version", lambda: (3, 51, 2))
    assert code_of(Library.open, home) == ("E0707", 16)


def test_settings_of_the_database(lib: Library) -> None:
    with lib.index.write():
        assert lib.index.run("PRAGMA synchronous") == [(2,)], "FULL"
    assert lib.index.rows("PRAGMA journal_mode") == [("wal",)]
    with lib.index.write(durable=False):
        pass
    with lib.index.write():
        assert lib.index.run("PRAGMA synchronous") == [(2,)]


def test_a_locked_library_says_by_whom(home: Path) -> None:
    with Library.open(home) as lib, Library.open(home, wait_s=0.1) as other, lib.index.write():
        with pytest.raises(EsperError) as error:
            other.put_artifact(make_container())
        assert (error.value.code, error.value.exit_code) == ("E0708", 15)
        assert f"process {os.getpid()}" in error.value.message and "since 20" in error.value.message


def test_readers_are_not_kept_out_by_a_writer(home: Path) -> None:
    with Library.open(home) as lib:
        artifact = validated(lib)
        with Library.open(home, readonly=True) as reader, lib.index.write():
            assert reader.load(artifact).record.id == artifact


def mounted(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A shell program in a mount namespace of its own; skipped aloud where that is not allowed."""
    if shutil.which("unshare") is None or os.geteuid() != 0:
        pytest.skip("needs root and unshare for a mount of its own: this test did NOT run")
    done = subprocess.run(
        ["unshare", "-m", "sh", "-ec", program, "sh", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    if "permission denied" in done.stderr.lower() and "mount" in done.stderr:
        pytest.skip("mounting is not allowed here: this test did NOT run")
    return done


READ = (
    "import sys; from library.store import Library\n"
    "with Library.open(sys.argv[1], readonly=True) as lib: print(len(lib.load(sys.argv[2]).container.data))\n"
)
WRITE = (
    "import sys; from library.store import Library; from tests.library.helpers import make_container\n"
    "with Library.open(sys.argv[1]) as lib: lib.put_artifact(make_container(7, size=int(sys.argv[2])))\n"
)
CODED = (
    "from esper_ir.diagnostics import EsperError\n"
    "try:\n{}except EsperError as error: print(error); sys.exit(error.exit_code)\n"
)


def coded(program: str) -> str:
    """The program, ending in the exit code of its refusal."""
    head, _, body = program.partition("\n")
    indented = "".join(f"    {line}\n" for line in body.splitlines())
    return f"{head}\n{CODED.format(indented)}"


def test_a_read_only_disk(disk_home: Path) -> None:
    """Loading needs no write access; writing is refused by name."""
    with Library.open(disk_home) as lib:
        artifact = validated(lib)
    before = contents(disk_home)
    script = 'mount --bind "$1" "$1"; mount -o remount,ro,bind "$1"; exec "$2" -c "$3" "$1" "$4"'
    done = mounted(script, str(disk_home), sys.executable, coded(READ), artifact)
    assert done.returncode == 0 and done.stdout.strip() == str(len(make_container())), done
    done = mounted(script, str(disk_home), sys.executable, coded(WRITE), "100")
    assert done.returncode == 16 and "E0702" in done.stdout, done
    assert contents(disk_home) == before


def test_a_directory_without_write_permission(home: Path, fast_tmp: Path) -> None:
    """As a user whom permissions bind: loading works, writing is refused by name, nothing changes."""
    with Library.open(home) as lib:
        artifact = validated(lib)
    before = contents(home)
    everything = [fast_tmp, *fast_tmp.rglob("*")]
    if os.geteuid() == 0:
        for path in everything:
            os.chown(path, 65534, 65534)
    directories = [path for path in everything if path.is_dir() and home in (path, *path.parents)]
    for path in directories:
        path.chmod(0o500)

    def work() -> None:
        if os.geteuid() == 0:
            os.setresgid(65534, 65534, 65534)
            os.setresuid(65534, 65534, 65534)
        with Library.open(home, readonly=True) as lib:
            assert lib.load(artifact).container.data == make_container()
        try:
            with Library.open(home) as lib:
                lib.put_artifact(make_container(7))
        except EsperError as error:
            raise SystemExit(40 if error.code == "E0702" else 41) from error

    status = in_child(work)
    for path in directories:
        path.chmod(0o700)
    assert status == 40 and contents(home) == before


@pytest.mark.parametrize("by", ["handle", "command"])
def test_a_full_disk(disk_home: Path, tmp_path: Path, by: str) -> None:
    """A real one: 8 MB. The refusal is named, the library sound, collection works and then there is room
    again.
    """
    place = tmp_path / "small"
    place.mkdir(mode=0o700)
    program = (
        "import os, sys; from library.store import Library; from library.audit import verify_library\n"
        "from esper_ir.diagnostics import EsperError; from tests.library.helpers import make_container\n"
        "root = sys.argv[1]\n"
        "lib = Library.open(root + '/library')\n"
        "lib.blobs.put(os.urandom(1 << 20))\n"
        "stored, codes = 0, []\n"
        "for i in range(40):\n"
        "    try:\n"
        "        lib.put_artifact(make_container(i, size=300_000)); stored += 1\n"
        "    except EsperError as error:\n"
        "        codes.append((error.code, error.exit_code))\n"
        "assert stored and set(codes) == {('E0703', 15)}, (stored, codes)\n"
        "assert len(lib.artifacts()) == stored\n"
        "def fill():\n"
        "    try:\n"
        "        with open(root + '/filler', 'ab', 0) as file:\n"
        "            while True: file.write(b'x' * 4096)\n"
        "    except OSError: pass\n"
        "fill()\n"
        "if sys.argv[2] == 'command':\n"
        "    lib.index.close()\n"
        "    fill()\n"
        "    import subprocess\n"
        "    assert os.statvfs(root).f_bavail == 0\n"
        "    command = [sys.executable, '-m', 'library.cli', '--library', root + '/library', 'gc']\n"
        "    subprocess.run([*command, '--apply', '--grace', '0'], check=True)\n"
        "    lib = Library.open(root + '/library')\n"
        "    assert len(lib.artifacts()) == stored\n"
        "else:\n"
        "    report = lib.collect(grace_s=0, dry_run=False)\n"
        "    assert report.removed >= 1 and report.bytes >= 1 << 20, report\n"
        "lib.put_artifact(make_container(1000, size=300_000))\n"
        "assert verify_library(lib, lib.artifacts(), contents=True).findings == ()\n"
        "lib.close()\n"
        "print('ok', stored)\n"
    )
    script = 'mount -t tmpfs -o size=8m,mode=700 none "$1"; exec "$2" -c "$3" "$1" "$4"'
    done = mounted(script, str(place), sys.executable, program, by)
    assert done.returncode == 0 and "ok " in done.stdout, done


def test_a_disk_too_small_for_a_library(tmp_path: Path, disk_home: Path) -> None:
    place = tmp_path / "tiny"
    place.mkdir(mode=0o700)
    script = 'mount -t tmpfs -o size=512k,mode=700 none "$1"; exec "$2" -c "$3" "$1/library" 100'
    done = mounted(script, str(place), sys.executable, coded(WRITE))
    assert done.returncode == 15 and "E0703" in done.stdout, done


def test_many_processes_open_a_new_library_at_once(disk_home: Path) -> None:
    program = coded(WRITE.replace("make_container(7,", "make_container(int(sys.argv[3]),"))
    processes = [
        subprocess.Popen([sys.executable, "-c", program, str(disk_home), "100", str(i)], cwd=ROOT)
        for i in range(6)
    ]
    assert [p.wait(120) for p in processes] == [0] * 6
    with Library.open(disk_home, readonly=True) as lib:
        assert len(lib.artifacts()) == 6
        assert {len(r.keyids) for r in lib.trust.document().roles.values()} == {1}


def test_a_new_file_is_opened_by_many_at_the_same_moment(tmp_path: Path) -> None:
    """Becoming a file with a log needs a lock that is not waited for: it is asked for again."""
    for turn in range(60):
        home, start = tmp_path / str(turn), threading.Barrier(4)
        home.mkdir()
        refused: list[BaseException] = []

        def opened(
            home: Path = home, start: threading.Barrier = start, refused: list[BaseException] = refused
        ) -> None:
            start.wait()
            try:
                index = Index(home, readonly=False)
                index.migrate()
                index.close()
            except BaseException as error:
                refused.append(error)

        threads = [threading.Thread(target=opened) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not refused, (turn, refused)


def test_migrations_are_applied_once_and_in_order(home: Path) -> None:
    Library.open(home).close()
    second = (*MIGRATIONS, "CREATE TABLE extra(a INTEGER) STRICT; INSERT INTO extra VALUES (7);")
    index = Index(home, readonly=False)
    assert index.version() == len(MIGRATIONS)
    threads = [threading.Thread(target=Index(home, readonly=False).migrate, args=(second,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert index.migrate(second) == len(second)
    assert index.rows("SELECT a FROM extra") == [(7,)]
    index.close()
    assert code_of(Library.open, home) == ("E0706", 16)


def test_a_failing_migration_changes_nothing(home: Path) -> None:
    Library.open(home).close()
    index = Index(home, readonly=False)
    broken = (*MIGRATIONS, "CREATE TABLE extra(a INTEGER) STRICT; SELECT nonsense;")
    with pytest.raises(EsperError):
        index.migrate(broken)
    assert index.version() == len(MIGRATIONS)
    assert index.rows("SELECT name FROM sqlite_master WHERE name = 'extra'") == []
    index.close()
    Library.open(home).close()


def test_a_library_of_an_older_schema_is_brought_up(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Library.open(home) as lib:
        artifact = validated(lib)
    second = (*MIGRATIONS, "CREATE TABLE extra(a INTEGER) STRICT;")
    monkeypatch.setattr("library.core.MIGRATIONS", second)
    with Library.open(home) as lib:
        assert lib.load(artifact).record.id == artifact
        assert lib.index.version() == len(second)


def test_database_has_no_leftover_log_after_closing(home: Path) -> None:
    Library.open(home).close()
    assert not (home / f"{DATABASE}-wal").exists()
    assert apsw.Connection(str(home / DATABASE)).execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def test_collection_cuts_the_log(home: Path) -> None:
    """It grows while processes hold the library open; a reader in the way does not make collection fail."""
    log = home / f"{DATABASE}-wal"
    with Library.open(home) as lib:
        for number in range(20):
            lib.put_artifact(make_container(number))
        assert log.stat().st_size > 100_000
        with lib.snapshot():
            lib.put_artifact(make_container(20))
            lib.collect(grace_s=0, dry_run=False)
            assert log.stat().st_size > 0, "the reader's moment is in it"
        lib.collect(grace_s=0, dry_run=False)
        assert log.stat().st_size == 0
        assert len(lib.artifacts()) == 21


@pytest.mark.parametrize(
    "name", ["a b#c?d%20e;f&g=h", "ü\u202e\n\t", "caf\udce9", "%41", "-rf", "'\"$(x)`", "x" * 200, "file:"]
)
def test_odd_names_of_directories(fast_tmp: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A library anywhere, opened for writing, reading, in a snapshot, and by the command."""
    home = fast_tmp / name / "library"
    monkeypatch.setenv("ESPER_KEYS", str(fast_tmp / name / "keys"))
    with Library.open(home) as lib:
        artifact = validated(lib)
        with lib.snapshot() as index:
            assert index.version() == len(MIGRATIONS)
    with Library.open(home, readonly=True) as lib:
        assert lib.load(artifact).record.id == artifact
    command = [sys.executable, "-m", "library.cli", "--library", str(home), "verify", "--contents"]
    assert subprocess.run(command, cwd=ROOT, capture_output=True).returncode == 0
    assert sorted(os.listdir(fast_tmp)) == sorted([name])


def test_mount_points_with_odd_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = (
        "36 35 98:0 / / rw - ext4 /dev/sda rw\n37 36 0:1 / /mnt/a\\040b\\011c\\134d rw - nfs4 host:/x rw\n"
    )
    monkeypatch.setattr(Path, "read_text", lambda *a, **k: table)
    assert file_system_type(Path("/mnt/a b\tc\\d/library")) == "nfs4"
    assert file_system_type(Path("/mnt/a b")) == "ext4"
