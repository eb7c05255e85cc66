"""What to keep: retention by what an artifact is worth, archive with restore, and how varied the library is.

Worth is uses per day times the seconds it would take to compile again, raised by the interest scores: an
artifact that somebody finds scientifically or strategically interesting outlives one that is merely cheap to
keep.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from library import leases, ledger, query, rows
from library.bundle import export_bundle, import_bundle, read_bundle, read_file
from library.canon import sha256_hex
from library.core import Core
from library.errors import fail
from library.records import (
    ARCHIVED,
    ARTIFACT_MOVES,
    REJECTED,
    SUPERSEDED,
    VALIDATED,
    ArtifactRecord,
    check_move,
)
from library.verdicts import known, rank_again

# Interest in [0, 1] multiplies worth by up to this much; chosen so that full interest outweighs a year of no
# use.
INTEREST_WEIGHT = 400.0
_DAY_S = 86400.0
_TAG_COUNTS = "SELECT t.tags, count(*) FROM facts f JOIN tagsets t ON t.num = f.tagset GROUP BY t.tags"


@dataclass(frozen=True)
class Plan:
    """What curation would do to one artifact, and why."""

    artifact_id: str
    action: str
    worth: float
    bytes: int
    reason: str


def worth(loads: int, days: float, compile_seconds: float, interest: float) -> float:
    """Loads per day (one more, so that none is worthless) times compile seconds, times 1 + weight x
    interest.
    """
    frequency = (loads + 1) / max(days, 1.0)
    return frequency * max(compile_seconds, 1.0) * (1.0 + INTEREST_WEIGHT * interest)


def plan(core: Core, *, keep_bytes: int, min_age_days: float = 30.0, now: float | None = None) -> list[Plan]:
    """Which artifacts to archive, least worth first, until the rest fits `keep_bytes`.

    Never one that is leased, PENDING, younger than `min_age_days`, or the only VALIDATED one of its blueprint
    and architecture.
    """
    at = time.time() if now is None else now
    rated = sorted(
        (_rated(core, row, at) for row in rows.retention(core.index)), key=lambda p: (p.worth, p.artifact_id)
    )
    total = sum(p.bytes for p in rated)
    last = Counter(_group(r) for r in rows.artifacts(core.index, state=VALIDATED))
    records = {r.id: r for r in rows.artifacts(core.index)}
    chosen: list[Plan] = []
    for item in rated:
        record = records[item.artifact_id]
        if total <= keep_bytes:
            break
        if not _may_go(core, record, at, min_age_days, last):
            continue
        last[_group(record)] -= record.state == VALIDATED
        total -= item.bytes
        chosen.append(item)
    return chosen


def _group(record: ArtifactRecord) -> tuple[str, str]:
    return record.blueprint, record.arch


def _rated(core: Core, row: tuple[Any, ...], now: float) -> Plan:
    artifact_id, size, created, loads, compile_seconds, tamiyo, urabrask, noted = row
    days = (now - created) / _DAY_S
    interest = max(tamiyo or 0.0, urabrask or 0.0, noted or 0.0)
    value = worth(loads or 0, days, compile_seconds or 0.0, interest)
    cost = f"{compile_seconds or 0:.0f} s to compile, interest {interest:.2f}"
    reason = f"{loads or 0} loads in {days:.0f} days, {cost}"
    return Plan(artifact_id, "archive", value, size, reason)


def _may_go(
    core: Core, record: ArtifactRecord, now: float, min_age_days: float, last: Counter[tuple[str, str]]
) -> bool:
    if record.state not in (VALIDATED, SUPERSEDED, REJECTED) or now - record.created < min_age_days * _DAY_S:
        return False
    if record.state == VALIDATED and last[_group(record)] <= 1:
        return False
    return not leases.live(core.index, record.digest)


def archive(core: Core, artifact_ids: Sequence[str], place: Path, reason: str = "") -> int:
    """Move artifacts out into one bundle at `place`, read it back, then mark them ARCHIVED; its bytes.

    Their rows and ledger entries stay; their objects are left to collection.
    """
    core.refuse_readonly()
    records = [known(core, artifact_id) for artifact_id in dict.fromkeys(artifact_ids)]
    for record in records:
        check_move(ARTIFACT_MOVES, record.id, record.state, ARCHIVED)
        holder = leases.holder(core.index, record.digest)
        if holder:
            raise fail("E0726", f"{record.id} is leased by {holder}", node=record.id, hint="try again later")
    size = export_bundle(core, records, place, keep=True)
    data = read_file(place)
    import_bundle(core, data, dry_run=True)
    note = {"reason": reason, "bundle": sha256_hex(data)}
    with core.index.write():
        for record in records:
            current = known(core, record.id)
            check_move(ARTIFACT_MOVES, record.id, current.state, ARCHIVED)
            ledger.append(
                core.index, "artifact.state", record.id, {"from": current.state, "to": ARCHIVED, **note}
            )
            rows.set_artifact_state(core.index, record.id, ARCHIVED, reason)
            query.drop_facts(core.index, rows.artifact_num(core.index, record.id))
    core.after_write()
    return size


def restore(core: Core, place: Path) -> list[str]:
    """Bring archived artifacts back from a bundle, verified like any import, in the state they had; their
    ids.
    """
    data = read_file(place)
    import_bundle(core, data, dry_run=True)
    index, objects = read_bundle(data)
    wanted = [known(core, item["id"]) for item in index["artifacts"]]
    back = [record for record in wanted if record.state == ARCHIVED]
    if not back:
        raise fail("E0724", f"{place} holds no artifact that is archived here")
    with core.publishing(objects, f"restore {len(back)} artifacts"):
        for record in back:
            _bring_back(core, record.id, sha256_hex(data))
    return [record.id for record in back]


def _bring_back(core: Core, artifact_id: str, bundle: str) -> None:
    """Inside the transaction: whoever revoked it meanwhile has the last word (E0724)."""
    record = known(core, artifact_id)
    if record.state != ARCHIVED:
        raise fail("E0724", f"{artifact_id} became {record.state} meanwhile", node=artifact_id)
    state = record.previous_state
    check_move(ARTIFACT_MOVES, artifact_id, ARCHIVED, state)
    data = {"from": ARCHIVED, "to": state, "reason": "restored", "bundle": bundle}
    ledger.append(core.index, "artifact.state", artifact_id, data)
    rows.set_artifact_state(core.index, artifact_id, state, "")
    if state == VALIDATED:
        rank_again(core, known(core, artifact_id))


@dataclass(frozen=True)
class Diversity:
    """How varied the validated artifacts are: entropy in bits over each division, and how many kinds there
    are.
    """

    artifacts: int
    blueprints: int
    entropy_bits: dict[str, float]
    kinds: dict[str, int]
    lone_blueprints: int

    def to_json(self) -> dict[str, Any]:
        return dict(self.__dict__)


def diversity(core: Core) -> Diversity:
    """Over VALIDATED artifacts, by blueprint, target, pipeline, objective and tag set."""
    found = rows.artifacts(core.index, state=VALIDATED)
    divisions = {
        "blueprint": Counter(r.blueprint for r in found),
        "target": Counter(r.target for r in found),
        "pipeline": Counter(r.pipeline for r in found),
        "objective": Counter(r.objective for r in found),
        "tags": Counter(dict(core.index.rows(_TAG_COUNTS))),
    }
    per_blueprint = divisions["blueprint"]
    return Diversity(
        len(found),
        len(per_blueprint),
        {name: _entropy(counts) for name, counts in divisions.items()},
        {name: len(counts) for name, counts in divisions.items()},
        sum(1 for n in per_blueprint.values() if n == 1),
    )


def _entropy(counts: Counter[str]) -> float:
    total = sum(counts.values())
    return sum(-n / total * math.log2(n / total) for n in counts.values() if n) if total else 0.0
