"""Facts that decide whether a library can be relied upon here."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import apsw

from esper_ir.diagnostics import EsperError
from library.index import sqlite_is_safe, sqlite_version
from library.paths import file_system_type, library_home, trust_home
from library.store import Library
from library.trust import TrustStore


def examine(path: Path | None) -> tuple[dict[str, Any], bool]:
    """(facts, all well). Changes nothing; a problem is a fact with the error's text."""
    home, keys = library_home(path), trust_home()
    facts: dict[str, Any] = {
        "library": str(home),
        "file system": file_system_type(home) or "unknown",
        "SQLite": apsw.sqlite_lib_version() + ("" if sqlite_is_safe(sqlite_version()) else " AFFECTED"),
        "trust home": str(keys),
    }
    good = sqlite_is_safe(sqlite_version())
    for examined in (_library_facts, _trust_facts):
        try:
            facts |= examined(home, keys)
        except EsperError as error:
            facts[error.code] = error.message
            good = False
    return facts, good


def _library_facts(home: Path, keys: Path) -> dict[str, Any]:
    with Library.open(home, readonly=True) as lib:
        states = dict(lib.index.rows("SELECT state, count(*) FROM artifacts GROUP BY state"))
        size = lib.index.row("SELECT size FROM ledger_state")
        space = os.statvfs(home)
        return {
            "origin": lib.origin,
            "schema": lib.index.version(),
            "artifacts": ", ".join(f"{n} {state}" for state, n in sorted(states.items())) or "none",
            "ledger entries": size[0] if size else 0,
            "free bytes": space.f_bavail * space.f_frsize,
            "quarantined": len(list((home / "quarantine").glob("*.json"))),
        }


def _trust_facts(home: Path, keys: Path) -> dict[str, Any]:
    document = TrustStore(keys).document()
    days = (document.expires - time.time()) / 86400
    return {"trust version": document.version, "trust expires": f"in {days:.0f} days"}
