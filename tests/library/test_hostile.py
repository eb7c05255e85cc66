"""A library whose files and rows somebody else wrote: it is read without harm to anything outside it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import apsw
import pytest
from click.testing import CliRunner

from esper_ir.diagnostics import EsperError
from library import jobs, outcomes, rotation
from library.cli import main
from library.contracts import FieldReport
from library.index import DATABASE
from library.store import Library
from tests.library.helpers import contents, make_container, object_path, validated


def edit(home: Path, statement: str, *values: object) -> None:
    connection = apsw.Connection(str(home / DATABASE))
    connection.execute("PRAGMA foreign_keys=OFF").fetchall()
    connection.execute(statement, values).fetchall()
    connection.close()


@pytest.fixture
def full(home: Path) -> tuple[Path, str]:
    """A closed library with a row in every table, and its first artifact."""
    report = {"policy": "p", "generated_tags": ["t"], "wep": {"shapes": {"a": {"latency_ms_p99": 1.0}}}}
    with Library.open(home) as lib:
        first, second = validated(lib, 1, report), validated(lib, 2)
        third = lib.put_artifact(make_container(3, blueprint=1), side_files={"k.ptx": b"ptx"}).id
        blueprint = lib.record(first).blueprint
        lib.annotate(first, {"risk_score": 0.25})
        lib.add_edge(blueprint, lib.record(third).blueprint, "mutation", "m")
        lib.record_outcomes([FieldReport(blueprint, first, "s", 0.5, 0.6, "CULLED", {})])
        outcomes.note_use(lib, first, 3)
        jobs.file_job(lib, "compile", blueprint, {"target": "h100"})
        lib.supersede(second, first, "better")
    return home, first


# -- rows that name other files ----------------------------------------------------------------------

ELSEWHERE = [
    "../victim",
    "../../victim",
    "..victim",
    "/etc/hostname",
    "ab/../../../victim",
    "",
    ".",
    "..",
    "A" * 64,
]


@pytest.mark.parametrize("digest", ELSEWHERE)
def test_a_row_leads_to_no_other_file(full: tuple[Path, str], digest: str) -> None:
    """Neither read, nor moved to quarantine, nor collected: the file beside the library stays."""
    home, artifact = full
    for victim in (home.parent / "victim", home / "victim"):
        victim.write_bytes(b"mine")
    edit(home, "UPDATE artifacts SET digest = ? WHERE id = ?", digest, artifact)
    edit(home, "INSERT OR REPLACE INTO tombstones VALUES (?, 0)", digest)
    edit(home, "UPDATE blueprints SET text_digest = ?", digest)
    before = contents(home.parent)
    with Library.open(home, readonly=True) as lib:
        for call in (lib.load, lib.read, lambda a: lib.blueprint_text(lib.record(a).blueprint)):
            with pytest.raises(EsperError) as error:
                call(artifact)
            assert error.value.code in ("E0709", "E0742"), error.value
    assert contents(home.parent) == before
    with Library.open(home) as lib:
        lib.collect(grace_s=0, dry_run=False)
        with pytest.raises(EsperError):
            lib.archive([artifact], home.parent / "bundle")
    for victim in (home.parent / "victim", home / "victim"):
        assert victim.read_bytes() == b"mine"


@pytest.mark.parametrize("origin", ["../trust.json", "../highest", "../../x", "", "a/b", "\0", "x" * 32])
def test_a_name_of_a_library_leads_nowhere(full: tuple[Path, str], origin: str) -> None:
    """The trust home keeps a note under it: whoever writes a library must not write there."""
    home, _ = full
    with Library.open(home, readonly=True) as lib:
        trust = lib.trust.home
    edit(home, "UPDATE meta SET value = ? WHERE key = 'origin'", origin)
    before = contents(trust)
    for readonly in (True, False):
        with pytest.raises(EsperError) as error:
            Library.open(home, readonly=readonly)
        assert error.value.code == "E0709"
    assert contents(trust) == before


# -- files of another kind ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["FORMAT", "writer", "reserve", DATABASE])
@pytest.mark.parametrize("kind", ["fifo", "directory", "link"])
def test_files_of_another_kind_do_not_block(full: tuple[Path, str], name: str, kind: str) -> None:
    """Refused or ignored, in an instant: nobody waits for a pipe, nothing is written through a link."""
    home, artifact = full
    target = home.parent / "target"
    target.write_bytes(b"mine")
    place = home / name
    place.unlink(missing_ok=True)
    make = {
        "fifo": lambda: os.mkfifo(place),
        "directory": place.mkdir,
        "link": lambda: place.symlink_to(target),
    }
    make[kind]()
    try:
        with Library.open(home, wait_s=0.1) as lib:
            lib.load(artifact)
            lib.put_artifact(make_container(9))
            lib.collect(grace_s=0, dry_run=False)
    except EsperError as error:
        assert error.exit_code in (10, 11, 12, 16), error
    assert target.read_bytes() == b"mine"


def test_a_directory_under_an_objects_name(lib: Library, home: Path) -> None:
    """Set aside by collection, which goes on; replaced by a writer of those bytes."""
    loose = "ab" + "0" * 62
    object_path(home, loose).mkdir(parents=True)
    other = lib.blobs.put(b"loose")
    report = lib.collect(grace_s=0, dry_run=False)
    assert not lib.blobs.has(loose) and not lib.blobs.has(other) and report.removed == 2
    record = lib.put_artifact(make_container())
    place = object_path(home, record.digest)
    place.unlink()
    place.mkdir()
    assert lib.put_artifact(make_container()) == record
    assert lib.collect(grace_s=0, dry_run=False).removed == 0


def test_a_linked_shard_is_not_entered(lib: Library, home: Path) -> None:
    outside = home.parent / "outside"
    outside.mkdir(mode=0o700)
    (outside / ("0" * 62)).write_bytes(b"mine")
    (home / "objects" / "cd").symlink_to(outside)
    lib.collect(grace_s=0, dry_run=False)
    assert (outside / ("0" * 62)).read_bytes() == b"mine"
    assert "cd" + "0" * 62 not in lib.blobs.digests()


def test_stray_files_are_left_alone(lib: Library, home: Path) -> None:
    (home / "objects" / "README").write_text("x")
    (home / "objects" / "ab").mkdir(exist_ok=True)
    for name in ("short", "Z" * 62, "0" * 61 + "\n"):
        (home / "objects" / "ab" / name).write_text("x")
    (home / "staging" / "somebody").mkdir()
    for name in ("1-" + "9" * 40 + "-x", "1--5-x", "x", "1-0-x", "-"):
        (home / "staging" / name).write_text("x")
    artifact = validated(lib)
    assert lib.collect(grace_s=0, dry_run=False).removed == 0
    assert lib.load(artifact).record.id == artifact


# -- rows of any content ----------------------------------------------------------------------------------

FEW: dict[str, list[Any]] = {"TEXT": ["../../x\0"], "INTEGER": [-1], "REAL": [float("inf")], "BLOB": [b"[]"]}
MANY: dict[str, list[Any]] = {
    "TEXT": [
        "",
        "x",
        '{"a":1}',
        "[]",
        "../../etc",
        "\0",
        "\ud7ff" * 3,
        "1e999",
        "null",
        "VALIDATED",
        "ARCHIVED",
    ],
    "INTEGER": [-1, 0, 1 << 62, -(1 << 63)],
    "REAL": [float("inf"), -1.0, 1e308, float("-inf")],
    "BLOB": [b"", b"x", b"{}", b"[]", b"null", b"\xff" * 40],
}
SHORT = [
    ["show", "ARTIFACT"],
    ["query", "--shape", "a"],
    ["verify", "--contents"],
    ["ls", "--jobs"],
    ["gc", "--apply"],
]
LONG = [
    *SHORT,
    ["ls"], ["ls", "--blueprints"], ["query", "--explain"], ["query", "--blueprint", "BLUEPRINT"], ["verify"],
    ["audit"], ["audit", "--prove", "3"], ["audit", "--grown-from", "2"], ["lineage", "BLUEPRINT"],
    ["lineage", "BLUEPRINT", "--up"], ["diff", "BLUEPRINT", "BLUEPRINT"], ["doctor"], ["gc"],
    ["curate", "--keep-mb", "0", "--min-age-days", "0"], ["export", "OUT", "ARTIFACT"],
    ["verify", "--repair"], ["archive", "ARTIFACT", "--to", "OUT"],
    ["export", "--hf-kernel", "OUT", "ARTIFACT"], ["show", "ARTIFACT", "--json"], ["audit", "--json"],
]  # fmt: skip


def edits(home: Path, values: dict[str, list[Any]]) -> Iterator[tuple[str, str, list[Any]]]:
    """(table.column, statement, values) over the first row of every table."""
    connection = apsw.Connection(str(home / DATABASE))
    for (table,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
        columns = [(row[1], row[2]) for row in connection.execute(f"PRAGMA table_info({table})")]
        row = next(connection.execute(f"SELECT * FROM {table}"), None)
        where = " AND ".join(f"{name} IS ?" for name, _ in columns)
        for name, kind in columns if row is not None else ():
            for value in values[kind]:
                yield f"{table}.{name}", f"UPDATE {table} SET {name} = ? WHERE {where}", [value, *row]
    connection.close()


def command_line(command: list[str], library: Path, artifact: str, blueprint: str) -> list[str]:
    meant = {"ARTIFACT": artifact, "BLUEPRINT": blueprint, "OUT": str(library.parent / "out")}
    return ["--library", str(library), *(meant.get(word, word) for word in command)]


def no_command_breaks(
    home: Path, artifact: str, values: dict[str, list[Any]], commands: list[list[str]]
) -> int:
    """Every command over every edit ends by itself or in a refusal; how many ran."""
    with Library.open(home, readonly=True) as lib:
        blueprint = lib.record(artifact).blueprint
    work, out, ran = home.parent / "work", home.parent / "out", 0
    for name, statement, bound in list(edits(home, values)):
        shutil.copytree(home, work)
        try:
            edit(work, statement, *bound)
        except apsw.ConstraintError:
            shutil.rmtree(work)
            continue
        for command in commands:
            result = CliRunner().invoke(main, command_line(command, work, artifact, blueprint))
            broken = result.exception is not None and not isinstance(result.exception, SystemExit)
            assert not broken, (name, bound[0], command, result.exception)
            shutil.rmtree(out, ignore_errors=True) if out.is_dir() else out.unlink(missing_ok=True)
            ran += 1
        shutil.rmtree(work)
    return ran


def test_rows_of_any_content(full: tuple[Path, str]) -> None:
    assert no_command_breaks(*full, FEW, SHORT) > 300


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_rows_of_any_content_long(full: tuple[Path, str]) -> None:
    assert no_command_breaks(*full, MANY, LONG) > 10_000


# -- the trust home -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["trust.json", "highest", "seen"])
@pytest.mark.parametrize("kind", ["fifo", "garbage", "huge"])
def test_a_broken_trust_home_refuses_in_an_instant(full: tuple[Path, str], name: str, kind: str) -> None:
    home, artifact = full
    with Library.open(home, readonly=True) as lib:
        place = lib.trust.home / name
        place = place / lib.origin if name == "seen" else place
    place.unlink()
    make = {
        "fifo": lambda: os.mkfifo(place, 0o600),
        "garbage": lambda: place.write_bytes(b"\xff{" * 50),
        "huge": lambda: place.write_bytes(b"9" * (9 << 20)),
    }
    make[kind]()
    try:
        with Library.open(home) as lib:
            lib.load(artifact)
        assert name != "trust.json"
    except EsperError as error:
        assert error.exit_code in (11, 12, 15, 16), error


def test_trusting_somebody_on_a_first_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lib: Library
) -> None:
    """`trust add` works where there is no trust store yet."""
    public = lib.trust.document().keys[lib.trust.document().roles["validator"].keyids[0]]
    keyid = lib.trust.document().roles["validator"].keyids[0]
    fresh = type(lib.trust)(tmp_path / "fresh")
    document = rotation.trust_key(fresh, "validator", public, keyid)
    assert document.version == 2 and keyid in document.roles["validator"].keyids
