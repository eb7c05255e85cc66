"""The tamper matrix of the database: every column of every table changed, every row taken away. Audit, verify
or loading names it; what they do not look at is listed here with the reason.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import apsw
import pytest

from esper_ir.diagnostics import EsperError
from library import history, jobs, outcomes
from library.audit import verify_library
from library.contracts import FieldReport
from library.index import DATABASE
from library.store import Library
from tests.library.helpers import make_container, validated

REPORT = {
    "policy": "p",
    "generated_tags": ["trainable"],
    "wep": {"latency_ms_p99": 1.0, "memory_mb_peak": 3.0, "shapes": {"a": {"latency_ms_p99": 1.0}}},
    "risk_score": 0.5,
    "conf_level": "High",
    "urabrask_interest": 0.25,
}
# No promise rests on these: times beside those of the ledger, counters, work in progress, an estimate.
BOOKKEEPING = {
    "artifacts.created", "blueprints.created", "edges.time", "outcomes.time", "outcomes.num", "outcomes.key",
    "tagsets.size", "jobs.num", "jobs.priority", "jobs.state", "jobs.attempt", "jobs.owner", "jobs.expires",
    "jobs.fence", "jobs.reason", "jobs.created",
}  # fmt: skip
# Losing all signed heads shows in the report (`signed`), not as a finding: an unsigned ledger is legal.
TABLES_ASIDE = {"usage", "leases", "tombstones"}
ROWS_ASIDE = {"checkpoints"}


@pytest.fixture
def full(home: Path) -> Path:
    """A closed library with a row in every table; the first row of each table is the one to change."""
    with Library.open(home) as lib:
        first, second = validated(lib, 1, REPORT), validated(lib, 2, {**REPORT, "policy": "q"})
        third = lib.put_artifact(make_container(3, blueprint=1), side_files={"k.ptx": b"ptx", "z": b"zz"}).id
        lib.annotate(first, {"risk_score": 0.25})
        lib.annotate(first, {"risk_score": 0.125})
        lib.add_edge(lib.record(first).blueprint, lib.record(third).blueprint, "mutation", "m")
        blueprint = lib.record(first).blueprint
        lib.record_outcomes([FieldReport(blueprint, first, "s", 0.5, 0.6, "CULLED", {})])
        outcomes.note_use(lib, first, 3)
        jobs.file_job(lib, "compile", blueprint, {"target": "h100"})
        lib.supersede(second, first, "better")
    return home


def other(value: Any) -> Any:
    """Another value of the same type."""
    if value is None:
        return 5
    if isinstance(value, bytes):
        return bytes([value[0] ^ 1]) + value[1:] if value else b"x"
    return f"{value}x" if isinstance(value, str) else value + 1


def found(home: Path) -> list[str]:
    """Codes of everything that looks at the rows."""
    codes: list[str] = []
    try:
        with Library.open(home, readonly=True) as lib:
            for look in (
                lambda: history.audit(lib).findings,
                lambda: verify_library(lib, lib.artifacts(), contents=True).findings,
            ):
                codes += [finding.code for finding in look()]
            for record in lib.artifacts(state="VALIDATED"):
                lib.load(record.id)
                lib.verdict(record.id)
    except EsperError as error:
        codes.append(error.code)
    return codes


def changes(home: Path) -> Iterator[tuple[str, str, list[Any]]]:
    """(table.column, statement, values) for the first row of each table."""
    connection = apsw.Connection(str(home / DATABASE))
    for (table,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
        columns = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
        row = next(connection.execute(f"SELECT * FROM {table}"), None)
        if row is None or table in TABLES_ASIDE:
            assert row is not None or table in TABLES_ASIDE, f"{table} is empty: nothing to change"
            continue
        where = " AND ".join(f"{column} IS ?" for column in columns)
        if table not in ROWS_ASIDE:
            yield table, f"DELETE FROM {table} WHERE {where}", [*row]
        for column, value in zip(columns, row, strict=True):
            yield f"{table}.{column}", f"UPDATE {table} SET {column} = ? WHERE {where}", [other(value), *row]
    connection.close()


def test_every_column_of_every_table(full: Path, fast_tmp: Path) -> None:
    assert found(full) == [], "sound before"
    unseen, refused, visited = set(), 0, 0
    for name, statement, values in list(changes(full)):
        copy = fast_tmp / "copy"
        shutil.copytree(full, copy)
        connection = apsw.Connection(str(copy / DATABASE))
        connection.execute("PRAGMA foreign_keys=OFF").fetchall()
        try:
            connection.execute(statement, values).fetchall()
            visited += 1
        except apsw.ConstraintError:
            refused += 1  # another row is in the way of this value
        finally:
            connection.close()
        if differ(full, copy) and not found(copy):
            unseen.add(name)
        shutil.rmtree(copy)
    assert unseen <= BOOKKEEPING, unseen - BOOKKEEPING
    assert unseen == BOOKKEEPING, f"looked at after all: {BOOKKEEPING - unseen}"
    assert visited > 100 and refused < 10


def differ(one: Path, two: Path) -> bool:
    return (one / DATABASE).read_bytes() != (two / DATABASE).read_bytes()


def test_lost_checkpoints_show(full: Path) -> None:
    with Library.open(full, readonly=True) as lib:
        report = history.audit(lib)
        assert report.signed == report.entries and report.checkpoints
    connection = apsw.Connection(str(full / DATABASE))
    connection.execute("DELETE FROM checkpoints").fetchall()
    connection.close()
    with Library.open(full, readonly=True) as lib:
        assert history.audit(lib).signed == 0


def test_a_report_of_another_artifact_is_not_shown(full: Path) -> None:
    """The row names a report; the signature says which one it must be."""
    with Library.open(full) as lib:
        first, second = (record.id for record in lib.artifacts()[:2])
        with lib.index.write():
            lib.index.run(
                "UPDATE verdicts SET report = (SELECT report FROM verdicts WHERE num = 2) WHERE num = 1"
            )
        for artifact, policy in ((first, "p"), (second, "q")):
            verdict = lib.verdict(artifact)
            assert verdict is not None and verdict.report["policy"] == policy


def test_a_side_file_of_another_artifact_is_not_given(full: Path) -> None:
    with Library.open(full) as lib:
        third = lib.artifacts()[2].id
        with lib.index.write():
            lib.index.run("UPDATE side_files SET digest = (SELECT digest FROM side_files WHERE name = 'z')")
        assert lib.side_file(third, "k.ptx") == b"ptx"
        findings = verify_library(lib, lib.artifacts(), contents=False).findings
        assert [f.code for f in findings] == ["E0763"]


def test_audit_looks_at_one_moment(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is written meanwhile: no false alarm."""
    with Library.open(home) as lib, Library.open(home) as writer:
        ids = [validated(lib, number) for number in range(5)]
        pages, written = history._pages, []

        def write_meanwhile(*arguments: Any) -> Iterator[Any]:
            for row in pages(*arguments):
                if not written:
                    written.append(writer.put_artifact(make_container(77)).id)
                    writer.revoke(ids[0], "meanwhile")
                yield row

        monkeypatch.setattr(history, "_pages", write_meanwhile)
        report = history.audit(lib)
        assert written and report.findings == ()
        monkeypatch.undo()
        assert history.audit(lib).entries > report.entries


def test_verify_looks_again_at_what_changed(
    home: Path, fast_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An artifact that is archived and collected between two looks is not lost."""
    with Library.open(home) as lib, Library.open(home) as writer:
        artifact = validated(lib)
        records, opened = lib.artifacts(), []
        read = lib.blobs.read_raw

        def archive_first(digest: str) -> bytes:
            if not opened:
                opened.append(True)
                writer.archive([artifact], fast_tmp / "bundle")
                writer.collect(grace_s=0, dry_run=False)
            return read(digest)

        monkeypatch.setattr(lib.blobs, "read_raw", archive_first)
        assert verify_library(lib, records, contents=True).findings == ()
        assert opened and lib.record(artifact).state == "ARCHIVED"


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE TRIGGER t AFTER INSERT ON artifacts BEGIN UPDATE artifacts SET state = 'VALIDATED'; END",
        "CREATE VIEW v AS SELECT * FROM artifacts",
        "CREATE TABLE extra(a)",
        "DROP INDEX artifacts_state",
        "DROP TRIGGER facts_added",
    ],
)
def test_audit_knows_the_schema(full: Path, statement: str) -> None:
    connection = apsw.Connection(str(full / DATABASE))
    connection.execute(statement).fetchall()
    connection.close()
    assert found(full) == ["E0709"]


def test_audit_finds_a_damaged_index(full: Path) -> None:
    """Rows that an index does not lead to any more: a query would miss them in silence."""
    connection = apsw.Connection(str(full / DATABASE))
    connection.execute("PRAGMA writable_schema=ON").fetchall()
    connection.execute(
        "UPDATE sqlite_master SET rootpage = (SELECT rootpage FROM sqlite_master "
        "WHERE name = 'artifacts_digest') WHERE name = 'artifacts_state'"
    ).fetchall()
    connection.close()
    assert "E0709" in found(full)
