"""Every timing ever taken, winners and losers, keyed by what was timed: (group hash, arch, toolchain)."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from library.canon import canonical_json, parse_json
from library.errors import fail
from library.index import Index
from library.paths import make_private

SCHEMA_NAME = "esper-measurements/1"
_LINE_KEYS = {"schema", "group", "arch", "toolchain", "measurement"}
SCHEMA = (
    """
CREATE TABLE timings(
    num INTEGER PRIMARY KEY, group_hash TEXT NOT NULL, arch TEXT NOT NULL, toolchain TEXT NOT NULL,
    body BLOB NOT NULL, time REAL NOT NULL, UNIQUE(group_hash, arch, toolchain, body)) STRICT;
""",
)


class Measurements:
    """A database of its own below `measurements/`, so that it can be copied,
    exported and kept apart from artifacts."""

    def __init__(self, home: Path, *, readonly: bool, wait_s: float = 30.0) -> None:
        self.place = home / "measurements"
        if not readonly:
            make_private(self.place)
        elif not (self.place / "esper.db").exists():
            raise fail("E0721", f"no measurements in {home}")
        self.index = Index(self.place, readonly=readonly, wait_s=wait_s)
        if not readonly:
            self.index.migrate(SCHEMA)

    def close(self) -> None:
        self.index.close()

    def put(self, group_hash: str, arch: str, toolchain: str, measurement: Mapping[str, Any]) -> None:
        """Keep one; an equal one is kept once."""
        self.put_many([(group_hash, arch, toolchain, measurement)])

    def put_many(self, items: Iterable[tuple[str, str, str, Mapping[str, Any]]]) -> int:
        """Keep all in one transaction; how many were new."""
        ready = [(g, a, t, canonical_json(dict(m)), time.time()) for g, a, t, m in items]
        text = """INSERT OR IGNORE INTO timings (group_hash, arch, toolchain, body, time)
            VALUES (?, ?, ?, ?, ?) RETURNING num"""
        with self.index.write():
            return sum(len(self.index.run(text, values)) for values in ready)

    def get(self, group_hash: str, arch: str, toolchain: str) -> list[dict[str, Any]]:
        """All under this key, oldest first."""
        text = "SELECT body FROM timings WHERE group_hash = ? AND arch = ? AND toolchain = ? ORDER BY num"
        return [parse_json(row[0]) for row in self.index.rows(text, (group_hash, arch, toolchain))]

    def to_lines(self) -> bytes:
        """Everything as JSON lines {schema, group, arch, toolchain, measurement}, oldest first."""
        text = "SELECT group_hash, arch, toolchain, body FROM timings ORDER BY num"
        lines = [
            canonical_json(
                {
                    "schema": SCHEMA_NAME,
                    "group": g,
                    "arch": a,
                    "toolchain": t,
                    "measurement": parse_json(body),
                }
            )
            for g, a, t, body in self.index.rows(text)
        ]
        return b"".join(line + b"\n" for line in lines)

    def take_lines(self, data: bytes) -> int:
        """Keep what another store exported, all or nothing; how many were new. E0734, E0770."""
        items = []
        for number, line in enumerate(filter(None, data.split(b"\n")), 1):
            row = parse_json(line)
            if not isinstance(row, dict) or row.keys() != _LINE_KEYS or row["schema"] != SCHEMA_NAME:
                raise fail("E0770", f"line {number} is not a measurement")
            key = (row["group"], row["arch"], row["toolchain"])
            if not all(isinstance(part, str) for part in key) or not isinstance(row["measurement"], dict):
                raise fail("E0770", f"line {number} is not a measurement")
            items.append((*key, row["measurement"]))
        return self.put_many(items)
