"""Statements over blueprints, artifacts, side files and verdicts.
Writers expect to stand inside `index.write()`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from library.index import Index
from library.records import ArtifactRecord, BlueprintRecord, SideFile

_ARTIFACT = (
    "id, digest, size, blueprint, name, target, kind, arch, pipeline, version, objective, determinism, "
    "interface, state, reason, previous_state, superseded_by, created, seq"
)
_BLUEPRINT = "id, name, text_digest, state, reason, created, seq"
# Two look-ups of the newest verdict in the row's own statement take a quarter of the time of a join.
_NEWEST = "(SELECT {} FROM verdicts v WHERE v.artifact = a.num ORDER BY v.num DESC LIMIT 1)"
_LOAD = f"""SELECT {_NEWEST.format("v.envelope")}, {_NEWEST.format("v.seq")}, {_ARTIFACT}
    FROM artifacts a WHERE a.id = ?"""


def blueprint(index: Index, blueprint_id: str) -> BlueprintRecord | None:
    row = index.row(f"SELECT {_BLUEPRINT} FROM blueprints WHERE id = ?", (blueprint_id,))
    return BlueprintRecord(*row) if row else None


def blueprints(index: Index, low: str = "", high: str = "g") -> list[BlueprintRecord]:
    """Blueprints with low <= id < high, by name."""
    found = index.rows(
        f"SELECT {_BLUEPRINT} FROM blueprints WHERE id >= ? AND id < ? ORDER BY name, id", (low, high)
    )
    return [BlueprintRecord(*row) for row in found]


def add_blueprint(index: Index, record: BlueprintRecord) -> None:
    values = (
        record.id,
        record.name,
        record.text_digest,
        record.state,
        record.reason,
        record.created,
        record.seq,
    )
    index.run(f"INSERT INTO blueprints ({_BLUEPRINT}) VALUES (?, ?, ?, ?, ?, ?, ?)", values)


def set_blueprint_state(index: Index, blueprint_id: str, state: str, reason: str) -> None:
    index.run("UPDATE blueprints SET state = ?, reason = ? WHERE id = ?", (state, reason, blueprint_id))


def set_blueprint_text(index: Index, blueprint_id: str, digest: str) -> None:
    index.run("UPDATE blueprints SET text_digest = ? WHERE id = ?", (digest, blueprint_id))


def artifact(index: Index, artifact_id: str) -> ArtifactRecord | None:
    row = index.row(f"SELECT {_ARTIFACT} FROM artifacts WHERE id = ?", (artifact_id,))
    return ArtifactRecord(*row) if row else None


def artifacts(
    index: Index, *, blueprint: str | None = None, state: str | None = None, limit: int | None = None
) -> list[ArtifactRecord]:
    """Artifacts in the order they were stored."""
    wanted, values = [], []
    for column, value in (("blueprint", blueprint), ("state", state)):
        if value is not None:
            wanted.append(f"{column} = ?")
            values.append(value)
    where = f" WHERE {' AND '.join(wanted)}" if wanted else ""
    tail = " LIMIT ?" if limit is not None else ""
    if limit is not None:
        values.append(limit)
    return [
        ArtifactRecord(*r)
        for r in index.rows(f"SELECT {_ARTIFACT} FROM artifacts{where} ORDER BY num{tail}", values)
    ]


def artifacts_between(index: Index, low: str, high: str, limit: int) -> list[ArtifactRecord]:
    """Artifacts with low <= id < high."""
    text = f"SELECT {_ARTIFACT} FROM artifacts WHERE id >= ? AND id < ? ORDER BY id LIMIT ?"
    return [ArtifactRecord(*row) for row in index.rows(text, (low, high, limit))]


def artifacts_of_digest(index: Index, digest: str) -> list[str]:
    return [row[0] for row in index.rows("SELECT id FROM artifacts WHERE digest = ?", (digest,))]


def neighbours(index: Index, artifact_id: str, count: int = 4) -> list[str]:
    """Ids just before and after a place in the order of ids: the nearest by prefix."""
    above = index.rows("SELECT id FROM artifacts WHERE id >= ? ORDER BY id LIMIT ?", (artifact_id, count))
    below = index.rows("SELECT id FROM artifacts WHERE id < ? ORDER BY id DESC LIMIT ?", (artifact_id, count))
    return [row[0] for row in above + below]


def artifact_num(index: Index, artifact_id: str) -> int:
    """Row number of an artifact known to exist."""
    row = index.row("SELECT num FROM artifacts WHERE id = ?", (artifact_id,))
    assert row is not None, artifact_id
    return row[0]


def add_artifact(index: Index, record: ArtifactRecord, envelope: bytes) -> int:
    marks = ", ".join("?" * (len(_ARTIFACT.split(", ")) + 1))
    values = (*record.to_json().values(), envelope)
    row = index.run(f"INSERT INTO artifacts ({_ARTIFACT}, envelope) VALUES ({marks}) RETURNING num", values)
    return row[0][0]


def provenance_envelope(index: Index, artifact_id: str) -> bytes:
    row = index.row("SELECT envelope FROM artifacts WHERE id = ?", (artifact_id,))
    return row[0] if row else b""


def set_artifact_state(
    index: Index, artifact_id: str, state: str, reason: str, superseded_by: str = ""
) -> None:
    """What took an artifact's place stays known while it is archived and when it is back."""
    text = """UPDATE artifacts SET previous_state = state, state = ?1, reason = ?2,
        superseded_by = CASE ?3 WHEN '' THEN superseded_by ELSE ?3 END WHERE id = ?4"""
    index.run(text, (state, reason, superseded_by, artifact_id))


def add_side_files(index: Index, num: int, files: Sequence[SideFile]) -> None:
    for file in files:
        index.run(
            "INSERT OR IGNORE INTO side_files VALUES (?, ?, ?, ?)", (num, file.name, file.digest, file.size)
        )


def side_files(index: Index, artifact_id: str) -> list[SideFile]:
    text = """SELECT s.name, s.digest, s.size FROM side_files s JOIN artifacts a ON a.num = s.artifact
        WHERE a.id = ? ORDER BY s.name"""
    return [SideFile(*row) for row in index.rows(text, (artifact_id,))]


def add_verdict(index: Index, num: int, values: Mapping[str, Any]) -> None:
    columns = ("arch", "card", "result", "reason", "keyid", "report", "envelope", "time", "seq")
    index.run(
        f"INSERT INTO verdicts (artifact, {', '.join(columns)}) VALUES (?{', ?' * len(columns)})",
        (num, *(values[c] for c in columns)),
    )


def verdict_rows(index: Index, artifact_id: str) -> list[tuple[Any, ...]]:
    """(arch, card, result, reason, keyid, report, envelope, time, seq), newest first."""
    text = """SELECT v.arch, v.card, v.result, v.reason, v.keyid, v.report, v.envelope, v.time, v.seq
        FROM verdicts v JOIN artifacts a ON a.num = v.artifact WHERE a.id = ? ORDER BY v.num DESC"""
    return index.rows(text, (artifact_id,))


def for_loading(index: Index, artifact_id: str) -> tuple[ArtifactRecord, tuple[Any, ...]] | None:
    """The record and the newest verdict's (envelope, seq), None both without one, in one statement."""
    row = index.row(_LOAD, (artifact_id,))
    return (ArtifactRecord.of(row[2:]), row[:2]) if row else None


# Artifacts whose bytes are here: `ArtifactRecord.away` as SQL.
_HERE = "a.state <> 'ARCHIVED' AND NOT (a.state = 'REVOKED' AND a.previous_state = 'ARCHIVED')"


def referenced(index: Index, digest: str) -> bool:
    """Whether any row names an object. An archived artifact keeps its row but not its bytes."""
    text = f"""SELECT EXISTS (SELECT 1 FROM artifacts a WHERE a.digest = ?1 AND {_HERE})
        OR EXISTS (SELECT 1 FROM blueprints WHERE text_digest = ?1)
        OR EXISTS (SELECT 1 FROM verdicts WHERE report = ?1)
        OR EXISTS (SELECT 1 FROM side_files s JOIN artifacts a ON a.num = s.artifact
                   WHERE s.digest = ?1 AND {_HERE})"""
    row = index.row(text, (digest,))
    return bool(row and row[0])


def referenced_digests(index: Index) -> list[str]:
    """Every object that some row needs present."""
    text = f"""SELECT a.digest FROM artifacts a WHERE {_HERE} UNION SELECT text_digest FROM blueprints
        UNION SELECT report FROM verdicts UNION SELECT s.digest FROM side_files s
        JOIN artifacts a ON a.num = s.artifact WHERE {_HERE}"""
    return [row[0] for row in index.rows(text)]


def annotation_version(index: Index, artifact_id: str) -> int:
    """Version of the newest annotation, 0 without one."""
    found = annotation_row(index, artifact_id)
    return found[0] if found else 0


def annotation_row(index: Index, artifact_id: str) -> tuple[Any, ...] | None:
    """(version, envelope, seq) of the newest annotation."""
    text = """SELECT n.version, n.envelope, n.seq FROM annotations n JOIN artifacts a ON a.num = n.artifact
        WHERE a.id = ? ORDER BY n.version DESC LIMIT 1"""
    return index.row(text, (artifact_id,))


def add_annotation(index: Index, num: int, values: tuple[Any, ...]) -> None:
    """`values`: version, keyid, envelope, time, seq."""
    text = "INSERT INTO annotations (artifact, version, keyid, envelope, time, seq) VALUES (?, ?, ?, ?, ?, ?)"
    index.run(text, (num, *values))


def leased_digests(index: Index) -> set[str]:
    """Objects under a lease, run out or not: running out is for `leases.expire` to decide."""
    return {row[0] for row in index.rows("SELECT digest FROM leases")}


def add_tombstone(index: Index, digest: str, now: float) -> bool:
    """Mark an object as nameless; True when it was not marked before."""
    return bool(index.run("INSERT OR IGNORE INTO tombstones VALUES (?, ?) RETURNING digest", (digest, now)))


def lift_tombstones(index: Index, digests: set[str]) -> None:
    """Unmark objects."""
    for (marked,) in index.run("SELECT digest FROM tombstones"):
        if marked in digests:
            index.run("DELETE FROM tombstones WHERE digest = ?", (marked,))


def lift_tombstones_but(index: Index, digests: set[str]) -> None:
    """Unmark what is not there any more, or never was."""
    for (marked,) in index.run("SELECT digest FROM tombstones"):
        if marked not in digests:
            index.run("DELETE FROM tombstones WHERE digest = ?", (marked,))


def date_tombstones(index: Index, now: float) -> None:
    """A mark from a time that has not come yet, since the clock was set back, counts from now."""
    index.run("UPDATE tombstones SET time = ?1 WHERE time > ?1", (now,))


def lift_tombstone(index: Index, digest: str) -> None:
    """Unmark one object."""
    index.run("DELETE FROM tombstones WHERE digest = ?", (digest,))


def ripe_tombstones(index: Index, before: float, limit: int) -> list[str]:
    """Marks that are old enough, oldest first."""
    text = "SELECT digest FROM tombstones WHERE time <= ? ORDER BY time, digest LIMIT ?"
    return [row[0] for row in index.run(text, (before, limit))]


def last_entry(index: Index) -> int:
    """Sequence number of the newest ledger entry: the same before and after means that nothing changed."""
    row = index.row("SELECT size FROM ledger_state")
    return row[0] if row else 0


def annotation_rows(index: Index, artifact_id: str) -> list[tuple[Any, ...]]:
    """(envelope, seq) of every annotation, oldest first."""
    text = """SELECT n.envelope, n.seq FROM annotations n JOIN artifacts a ON a.num = n.artifact
        WHERE a.id = ? ORDER BY n.version"""
    return index.rows(text, (artifact_id,))


def annotation_envelopes(index: Index, artifact_id: str) -> list[bytes]:
    """Signed annotations, oldest first."""
    text = """SELECT n.envelope FROM annotations n JOIN artifacts a ON a.num = n.artifact
        WHERE a.id = ? ORDER BY n.version"""
    return [row[0] for row in index.rows(text, (artifact_id,))]


def retention(index: Index) -> list[tuple[Any, ...]]:
    """(id, size, created, loads, compile seconds, tamiyo interest, urabrask interest, annotated interest)."""
    text = """SELECT a.id, a.size, a.created, u.loads, u.compile_seconds, u.tamiyo_interest,
        u.urabrask_interest, f.interest FROM artifacts a LEFT JOIN usage u ON u.artifact = a.num
        LEFT JOIN facts f ON f.artifact = a.num WHERE a.state NOT IN ('ARCHIVED', 'REVOKED')"""
    return index.rows(text)


def has_outcome(index: Index, key: str) -> bool:
    """Whether a field report with this key was taken in."""
    return bool(index.row("SELECT 1 FROM outcomes WHERE key = ?", (key,)))


def add_outcome(index: Index, num: int, seed: str, outcome: str, key: str, body: bytes, seq: int) -> int:
    """1 when it is new, 0 when its key is known."""
    text = """INSERT OR IGNORE INTO outcomes (artifact, seed, outcome, key, report, time, seq)
        VALUES (?, ?, ?, ?, ?, unixepoch('subsec'), ?) RETURNING num"""
    return len(index.run(text, (num, seed, outcome, key, body, seq)))


def outcome_bodies(index: Index, artifact_id: str) -> list[bytes]:
    text = """SELECT o.report FROM outcomes o JOIN artifacts a ON a.num = o.artifact
        WHERE a.id = ? ORDER BY o.num"""
    return [row[0] for row in index.rows(text, (artifact_id,))]


def timed_outcomes(index: Index, artifact_id: str) -> list[tuple[float, bytes]]:
    """(when it was taken in, report), in the order they came."""
    text = """SELECT o.time, o.report FROM outcomes o JOIN artifacts a ON a.num = o.artifact
        WHERE a.id = ? ORDER BY o.num"""
    return [(float(row[0]), row[1]) for row in index.rows(text, (artifact_id,))]


def troubled(index: Index, blueprint: str | None = None) -> list[str]:
    """Artifacts that failed in use after their newest verdict, the longest waiting first."""
    text = """SELECT a.id FROM artifacts a JOIN outcomes o ON o.artifact = a.num
        WHERE o.outcome IN ('CRASHED', 'MISMATCH') AND (?1 IS NULL OR a.blueprint = ?1) AND o.seq >
        coalesce((SELECT max(v.seq) FROM verdicts v WHERE v.artifact = a.num), 0)
        GROUP BY a.num ORDER BY min(o.seq)"""
    return [row[0] for row in index.rows(text, (blueprint,))]


def add_use(index: Index, num: int, loads: int, compile_seconds: float | None, now: float) -> None:
    """Count loads; a compile time that is given replaces the one known."""
    index.run(
        """INSERT INTO usage VALUES (?1, ?2, ?3, ?3, coalesce(?4, 0), 0, 0)
        ON CONFLICT(artifact) DO UPDATE SET
        loads = loads + ?2, last = max(last, ?3), compile_seconds = coalesce(?4, compile_seconds)""",
        (num, loads, now, compile_seconds),
    )


def set_interest(index: Index, num: int, tamiyo: float | None, urabrask: float | None) -> None:
    text = """UPDATE usage SET tamiyo_interest = coalesce(?, tamiyo_interest),
        urabrask_interest = coalesce(?, urabrask_interest) WHERE artifact = ?"""
    index.run(text, (tamiyo, urabrask, num))


def add_edge(index: Index, parent: str, child: str, relation: str, mutation: str, seq: int) -> None:
    text = "INSERT OR IGNORE INTO edges VALUES (?, ?, ?, ?, unixepoch('subsec'), ?)"
    index.run(text, (parent, child, relation, mutation, seq))


def edges_from(index: Index, start: str, *, down: bool, depth: int) -> list[tuple[Any, ...]]:
    """(parent, child, relation, mutation, distance) reachable from a blueprint, nearest first."""
    here, there = ("parent", "child") if down else ("child", "parent")
    text = f"""WITH RECURSIVE reach(id, distance) AS (SELECT ?1, 0 UNION
        SELECT e.{there}, r.distance + 1 FROM reach r JOIN edges e ON e.{here} = r.id WHERE r.distance < ?2)
        SELECT e.parent, e.child, e.relation, e.mutation, min(r.distance) + 1 FROM reach r
        JOIN edges e ON e.{here} = r.id WHERE r.distance < ?2
        GROUP BY e.parent, e.child, e.relation ORDER BY 5, e.parent, e.child"""
    return index.rows(text, (start, depth))
