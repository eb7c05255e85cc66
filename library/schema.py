"""Tables of esper.db. Migrations are append-only: a released one is never edited,
a library is brought up on opening."""

from __future__ import annotations

FORMAT_VERSION = 1

_TABLES = """
CREATE TABLE meta(key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT, WITHOUT ROWID;

CREATE TABLE blueprints(
    id TEXT PRIMARY KEY, name TEXT NOT NULL, text_digest TEXT NOT NULL, state TEXT NOT NULL, reason TEXT NOT
    NULL, created REAL NOT NULL, seq INTEGER NOT NULL) STRICT;
CREATE INDEX blueprints_name ON blueprints(name);
CREATE INDEX blueprints_text ON blueprints(text_digest);

CREATE TABLE artifacts(
    num INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, digest TEXT NOT NULL, size INTEGER NOT NULL,
    blueprint TEXT NOT NULL REFERENCES blueprints(id), name TEXT NOT NULL, target TEXT NOT NULL, kind TEXT NOT
    NULL, arch TEXT NOT NULL, pipeline TEXT NOT NULL, version TEXT NOT NULL, objective TEXT NOT NULL,
    determinism TEXT NOT NULL, interface TEXT NOT NULL, state TEXT NOT NULL, reason TEXT NOT NULL,
    previous_state TEXT NOT NULL, superseded_by TEXT NOT NULL, created REAL NOT NULL, seq INTEGER NOT NULL,
    envelope BLOB NOT NULL) STRICT;
CREATE INDEX artifacts_blueprint ON artifacts(blueprint, state);
CREATE INDEX artifacts_state ON artifacts(state);
CREATE INDEX artifacts_digest ON artifacts(digest);

CREATE TABLE side_files(
    artifact INTEGER NOT NULL REFERENCES artifacts(num), name TEXT NOT NULL, digest TEXT NOT NULL,
    size INTEGER NOT NULL, PRIMARY KEY(artifact, name)) STRICT, WITHOUT ROWID;
CREATE INDEX side_files_digest ON side_files(digest);

CREATE TABLE verdicts(
    num INTEGER PRIMARY KEY, artifact INTEGER NOT NULL REFERENCES artifacts(num), arch TEXT NOT NULL,
    card TEXT NOT NULL, result TEXT NOT NULL, reason TEXT NOT NULL, keyid TEXT NOT NULL, report TEXT NOT NULL,
    envelope BLOB NOT NULL, time REAL NOT NULL, seq INTEGER NOT NULL) STRICT;
CREATE INDEX verdicts_artifact ON verdicts(artifact, num);
CREATE INDEX verdicts_report ON verdicts(report);

CREATE TABLE annotations(
    num INTEGER PRIMARY KEY, artifact INTEGER NOT NULL REFERENCES artifacts(num), version INTEGER NOT NULL,
    keyid TEXT NOT NULL, envelope BLOB NOT NULL, time REAL NOT NULL, seq INTEGER NOT NULL,
    UNIQUE(artifact, version)) STRICT;

-- What find() ranks by: one row per VALIDATED artifact, made from its newest verdict and annotation.
-- Artifacts of one architecture with the same tags share a tag set; a query looks at those few first.
CREATE TABLE tagsets(
    num INTEGER PRIMARY KEY, arch TEXT NOT NULL, target TEXT NOT NULL, tags TEXT NOT NULL,
    size INTEGER NOT NULL DEFAULT 0, UNIQUE(arch, target, tags)) STRICT;
CREATE TABLE facts(
    artifact INTEGER PRIMARY KEY REFERENCES artifacts(num), tagset INTEGER NOT NULL REFERENCES tagsets(num),
    rank REAL NOT NULL, risk_rank REAL NOT NULL, latency_ms REAL, memory_mb REAL, risk REAL,
    conf_level TEXT NOT NULL, interest REAL, shapes TEXT NOT NULL) STRICT;
CREATE INDEX facts_rank ON facts(rank, risk_rank, artifact, tagset, memory_mb);
CREATE INDEX facts_set ON facts(tagset, rank, risk_rank, artifact, memory_mb);
CREATE INDEX facts_memory ON facts(memory_mb, tagset, rank, risk_rank, artifact);
CREATE INDEX facts_risk ON facts(risk_rank, tagset, rank, artifact, memory_mb);
CREATE TRIGGER facts_added AFTER INSERT ON facts BEGIN
    UPDATE tagsets SET size = size + 1 WHERE num = new.tagset; END;
CREATE TRIGGER facts_removed AFTER DELETE ON facts BEGIN
    UPDATE tagsets SET size = size - 1 WHERE num = old.tagset; END;

CREATE TABLE edges(
    parent TEXT NOT NULL, child TEXT NOT NULL, relation TEXT NOT NULL, mutation TEXT NOT NULL, time REAL NOT
    NULL, seq INTEGER NOT NULL, PRIMARY KEY(parent, child, relation)) STRICT, WITHOUT ROWID;
CREATE INDEX edges_child ON edges(child);

CREATE TABLE outcomes(
    num INTEGER PRIMARY KEY, artifact INTEGER NOT NULL REFERENCES artifacts(num), seed TEXT NOT NULL,
    outcome TEXT NOT NULL, key TEXT NOT NULL UNIQUE, report BLOB NOT NULL, time REAL NOT NULL, seq INTEGER NOT
    NULL) STRICT;
CREATE INDEX outcomes_artifact ON outcomes(artifact);

CREATE TABLE usage(
    artifact INTEGER PRIMARY KEY REFERENCES artifacts(num), loads INTEGER NOT NULL, first REAL NOT NULL,
    last REAL NOT NULL, compile_seconds REAL NOT NULL, tamiyo_interest REAL NOT NULL,
    urabrask_interest REAL NOT NULL) STRICT;

CREATE TABLE leases(
    digest TEXT NOT NULL, owner TEXT NOT NULL, purpose TEXT NOT NULL, taken REAL NOT NULL, expires REAL NOT
    NULL, PRIMARY KEY(digest, owner)) STRICT, WITHOUT ROWID;
CREATE TABLE tombstones(digest TEXT PRIMARY KEY, time REAL NOT NULL) STRICT, WITHOUT ROWID;

CREATE TABLE jobs(
    num INTEGER PRIMARY KEY, kind TEXT NOT NULL, subject TEXT NOT NULL, labels TEXT NOT NULL, priority INTEGER
    NOT NULL, state TEXT NOT NULL, attempt INTEGER NOT NULL, owner TEXT NOT NULL, expires REAL NOT NULL, fence
    INTEGER NOT NULL, reason TEXT NOT NULL, created REAL NOT NULL, seq INTEGER NOT NULL) STRICT;
CREATE UNIQUE INDEX jobs_open ON jobs(kind, subject, labels) WHERE state IN ('QUEUED', 'RUNNING');

CREATE TABLE ledger(seq INTEGER PRIMARY KEY, body BLOB NOT NULL, leaf BLOB NOT NULL) STRICT;
CREATE TABLE ledger_state(
    one INTEGER PRIMARY KEY CHECK (one = 1), size INTEGER NOT NULL, head BLOB NOT NULL, frontier BLOB NOT
    NULL) STRICT;
CREATE TABLE checkpoints(size INTEGER PRIMARY KEY, envelope BLOB NOT NULL) STRICT;
"""

MIGRATIONS: tuple[str, ...] = (_TABLES,)
