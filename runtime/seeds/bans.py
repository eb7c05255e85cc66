"""What must not be tried again: tombstones, locks and embargoes.

Tombstones and locks live outside the checkpoints, in a file of their own that is read first, so that a
restored controller does not repeat the command that led to a rollback. Embargoes are of this run and go with
its checkpoints.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runtime.seeds.commands import append_lines, cut_torn

log = logging.getLogger("esper.growth")
SCHEMA = "esper-tombstone/1"


class Bans:
    """`path` None keeps tombstones in memory (and loses them with the process). Of several ranks all read the
    file and one `writes`."""

    def __init__(self, path: Path | str | None = None, writes: bool = True) -> None:
        self.path, self.writes = Path(path) if path is not None else None, writes
        self.tombstones: list[dict[str, Any]] = []
        self.embargoes: dict[tuple[str, str], int] = {}
        self.quarantine: dict[str, str] = {}  # artifact -> why it is not taken again in this run
        if self.path is not None and self.path.exists():
            if writes:
                cut_torn(self.path)
            self.tombstones = [line for line in map(_parsed, self.path.read_bytes().split(b"\n")) if line]

    def bury(self, slot: str, artifact: str, epoch: int, reason: str) -> None:
        """Durable before this returns, where there is a file and it can be written (else in this process)."""
        self._write({"slot": slot, "artifact": artifact, "epoch": epoch, "reason": reason, "locked": True})

    def unlock(self, slot: str, epoch: int) -> None:
        """An operator released the slot; what lies in it stays buried."""
        if slot in self.locked():
            self._write({"slot": slot, "artifact": "", "epoch": epoch, "reason": "release", "locked": False})

    def _write(self, facts: Mapping[str, Any]) -> None:
        line = {"schema": SCHEMA, **facts}
        self.tombstones.append(line)
        if self.path is None or not self.writes:
            return
        append_lines(self.path, [json.dumps(line, sort_keys=True)], sync=True)

    def locked(self) -> dict[str, dict[str, Any]]:
        """Slots that wait for an operator, with the line that says why."""
        found: dict[str, dict[str, Any]] = {}
        for line in self.tombstones:
            found.pop(line["slot"], None)
            if line["locked"]:
                found[line["slot"]] = line
        return found

    def buried(self, site: str, artifact: str) -> bool:
        """Whether this artifact led to a rollback at this layer."""
        return any(
            t["artifact"] == artifact and t["slot"].rpartition("/")[0] == site for t in self.tombstones
        )

    def embargo(self, site: str, artifact: str, until: int) -> None:
        self.embargoes[site, artifact] = max(until, self.embargoes.get((site, artifact), 0))

    def embargoed(self, site: str, artifact: str, epoch: int) -> bool:
        return self.embargoes.get((site, artifact), 0) > epoch

    def state_dict(self) -> dict[str, Any]:
        listed = [[site, artifact, until] for (site, artifact), until in sorted(self.embargoes.items())]
        return {"embargoes": listed, "quarantine": dict(self.quarantine)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.embargoes = {(site, artifact): until for site, artifact, until in state["embargoes"]}
        self.quarantine = dict(state["quarantine"])


def _parsed(line: bytes) -> dict[str, Any] | None:
    """A line that is no tombstone is named in the log and left out."""
    if not line:
        return None
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        found = None
    kinds = {"slot": str, "artifact": str, "locked": bool}
    if (
        not isinstance(found, dict)
        or found.get("schema") != SCHEMA
        or not all(isinstance(found.get(name), kind) for name, kind in kinds.items())
    ):
        log.warning("not a tombstone: %s", line[:80])
        return None
    return found
