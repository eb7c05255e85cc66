"""The tamper matrix: one byte, field or file changed in every kind of place. Each gives a named error, none
loads.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import apsw
import pytest

from esper_ir.diagnostics import EsperError
from library.index import DATABASE
from library.store import Library
from tests.library.helpers import flip, make_container, object_path, validated

COLUMNS_OF_A_LOAD = {
    "digest": "0" * 64,
    "digest of another": None,
    "arch": "x86-64-v4",
    "id": "aaaaaaaaaaaa-cpu-v3-fast-00000000",
    "state": "PENDING_BENCHMARKING",
}


def refused(home: Path, artifact: str) -> EsperError:
    """Loading is refused by name, twice, and nothing is returned."""
    codes = []
    for _ in range(2):
        with pytest.raises(EsperError) as error, Library.open(home, readonly=True) as lib:
            lib.load(artifact)
        codes.append(error.value)
    assert all(e.exit_code in (10, 11, 12, 13, 16) for e in codes), codes
    return codes[0]


def edit(home: Path, statement: str, *values: object) -> None:
    connection = apsw.Connection(str(home / DATABASE))
    connection.execute("PRAGMA foreign_keys=OFF").fetchall()
    connection.execute(statement, values).fetchall()
    connection.close()


@pytest.fixture
def proven(home: Path) -> tuple[Path, str, str]:
    """A closed library with two proven artifacts."""
    with Library.open(home) as lib:
        return home, validated(lib, 1, {"policy": "p", "wep": {}}), validated(lib, 2)


def test_every_part_of_a_container(proven: tuple[Path, str, str]) -> None:
    home, artifact, _ = proven
    with Library.open(home) as lib:
        digest = lib.record(artifact).digest
        sound = lib.read(artifact)
    place = object_path(home, digest)
    for at in range(0, len(sound), 61):
        flip(place, at)
        assert refused(home, artifact).code == "E0730"
        place.write_bytes(sound)
    with Library.open(home, readonly=True) as lib:
        assert lib.load(artifact).container.data == sound


@pytest.mark.parametrize("change", ["cut", "grown", "empty", "gone", "directory", "link", "fifo"])
def test_every_kind_of_damaged_object(proven: tuple[Path, str, str], change: str) -> None:
    home, artifact, other = proven
    with Library.open(home) as lib:
        place = object_path(home, lib.record(artifact).digest)
        elsewhere = object_path(home, lib.record(other).digest)
    data = place.read_bytes()
    place.chmod(stat.S_IRUSR | stat.S_IWUSR)
    if change in ("cut", "grown", "empty"):
        place.write_bytes({"cut": data[:-1], "grown": data + b"x", "empty": b""}[change])
    else:
        place.unlink()
        make: dict[str, Callable[[], object]] = {
            "gone": lambda: None,
            "directory": place.mkdir,
            "link": lambda: place.symlink_to(elsewhere),
            "fifo": lambda: os.mkfifo(place),
        }
        make[change]()
    assert refused(home, artifact).code in ("E0730", "E0731", "E0704", "E0710")


@pytest.mark.parametrize("column", COLUMNS_OF_A_LOAD)
def test_every_column_that_loading_reads(proven: tuple[Path, str, str], column: str) -> None:
    home, artifact, other = proven
    value = COLUMNS_OF_A_LOAD[column]
    if column == "digest of another":
        with Library.open(home, readonly=True) as lib:
            value = lib.record(other).digest
    edit(home, f"UPDATE artifacts SET {column.split()[0]} = ? WHERE id = ?", value, artifact)
    assert refused(home, value if column == "id" else artifact)


def test_every_byte_of_a_verdict(proven: tuple[Path, str, str]) -> None:
    home, artifact, _ = proven
    with Library.open(home, readonly=True) as lib:
        ((envelope,),) = lib.index.rows(
            "SELECT v.envelope FROM verdicts v JOIN artifacts a ON a.num = v.artifact WHERE a.id = ?",
            (artifact,),
        )
    for at in range(0, len(envelope), 23):
        changed = bytearray(envelope)
        changed[at] ^= 1
        edit(home, "UPDATE verdicts SET envelope = ? WHERE artifact = 1", bytes(changed))
        assert refused(home, artifact).exit_code in (11, 12), at


def test_verdicts_cannot_be_moved_made_or_borrowed(proven: tuple[Path, str, str]) -> None:
    home, artifact, _ = proven
    with Library.open(home) as lib:
        pending = lib.put_artifact(make_container(3)).id
        rejected = lib.put_artifact(make_container(4)).id
        lib.record_verdict(rejected, {}, passed=False, reason="wrong")
    edit(home, "UPDATE artifacts SET state = 'VALIDATED'")
    assert refused(home, pending).code == "E0740"
    assert refused(home, rejected).code == "E0741"
    edit(home, "UPDATE verdicts SET artifact = 3 WHERE artifact = 1")
    assert refused(home, pending).code == "E0746"
    assert refused(home, artifact).code == "E0740"
    edit(home, "UPDATE verdicts SET artifact = 1, envelope = (SELECT envelope FROM artifacts WHERE num = 1)")
    assert refused(home, artifact).code == "E0744"


def test_a_later_rejection_cannot_be_hidden_behind_an_older_pass(proven: tuple[Path, str, str]) -> None:
    """The newest row decides; taking it away shows in the audit (test_audit) and revocation is outside the
    library.
    """
    home, artifact, _ = proven
    edit(home, "DELETE FROM verdicts WHERE artifact = 1")
    assert refused(home, artifact).code == "E0740"


def test_every_byte_of_a_report_and_a_side_file(home: Path) -> None:
    with Library.open(home) as lib:
        record = lib.put_artifact(make_container(), side_files={"k.ptx": b"text of the kernel"})
        lib.record_verdict(record.id, {"policy": "p"}, passed=True)
        report, side = (
            lib.index.rows("SELECT report FROM verdicts")[0][0],
            lib.side_files(record.id)[0].digest,
        )
        for digest, read in ((report, lib.verdict), (side, lambda i: lib.side_file(i, "k.ptx"))):
            place = object_path(home, digest)
            flip(place, 3)
            with pytest.raises(EsperError) as error:
                read(record.id)
            assert error.value.code == "E0730" and not place.exists()


MARKS = (
    "",
    "{",
    "[]",
    '{"format":"other","version":1}',
    '{"format":"esper-library","version":2}',
    '{"format":"esper-library","version":"1"}',
)


@pytest.mark.parametrize("text", MARKS)
def test_the_mark_of_the_format(proven: tuple[Path, str, str], text: str) -> None:
    home, artifact, _ = proven
    (home / "FORMAT").write_text(text)
    assert refused(home, artifact).code in ("E0706", "E0734")


def test_a_newer_database_is_refused_and_left_alone(proven: tuple[Path, str, str]) -> None:
    home, artifact, _ = proven
    edit(home, "PRAGMA user_version=99")
    before = (home / DATABASE).read_bytes()
    assert refused(home, artifact).code == "E0706"
    assert (home / DATABASE).read_bytes() == before


@pytest.mark.parametrize("at", [0, 20, 100, 4096, 5000, 8192])
def test_a_damaged_database_never_loads_wrong_bytes(proven: tuple[Path, str, str], at: int) -> None:
    """A flipped byte in a database page either shows, or touches nothing that loading uses."""
    home, artifact, _ = proven
    place = home / DATABASE
    data = bytearray(place.read_bytes())
    data[at : at + 64] = b"\xff" * 64
    place.write_bytes(bytes(data))
    try:
        with Library.open(home, readonly=True) as lib:
            assert lib.load(artifact).container.data == make_container(1)
    except EsperError as error:
        assert error.exit_code in (10, 11, 12, 16), error


def test_parts_of_the_library_taken_away(proven: tuple[Path, str, str], fast_tmp: Path) -> None:
    home, artifact, _ = proven
    for name in ("objects", DATABASE, "FORMAT", "staging", "quarantine"):
        copy = fast_tmp / f"without-{name}"
        shutil.copytree(home, copy)
        gone = copy / name
        shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
        assert refused(copy, artifact).exit_code in (10, 11, 16)


def test_directories_others_can_write(proven: tuple[Path, str, str], fast_tmp: Path) -> None:
    home, artifact, _ = proven
    home.chmod(0o777)
    assert refused(home, artifact).code == "E0704"
    home.chmod(0o700)
    fast_tmp.chmod(0o777)
    assert refused(home, artifact).code == "E0704"
    fast_tmp.chmod(0o700)
    (fast_tmp / "alias").symlink_to(home)
    assert refused(fast_tmp / "alias", artifact).code == "E0704"


def test_seen_notes_are_only_notes(proven: tuple[Path, str, str]) -> None:
    home, artifact, _ = proven
    with Library.open(home, readonly=True) as lib:
        note = lib.trust.home / "seen" / lib.origin
    assert json.loads(note.read_bytes())["size"] > 1
    note.write_bytes(b"\xff\xff")
    with Library.open(home, readonly=True) as lib:
        assert lib.load(artifact).record.id == artifact
