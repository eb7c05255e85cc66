"""Work to be done, as leased rows: at least once, with a fencing token so that a late worker cannot
overwrite.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass

from library import ledger
from library.canon import parse_json
from library.core import Core
from library.errors import fail

QUEUED, RUNNING, DONE, DEAD = "QUEUED", "RUNNING", "DONE", "DEAD"
MAX_ATTEMPTS = 3
_COLUMNS = "num, kind, subject, labels, state, attempt, owner, fence, reason"


@dataclass(frozen=True)
class Job:
    """One piece of work; `fence` must be shown to finish it."""

    num: int
    kind: str
    subject: str
    labels: Mapping[str, str]
    state: str
    attempt: int
    owner: str
    fence: int
    reason: str


def _job(row: tuple) -> Job:
    num, kind, subject, labels, state, attempt, owner, fence, reason = row
    found = parse_json(labels.encode())
    if not isinstance(found, dict):
        raise fail("E0709", f"labels of job {num} are damaged", node=str(num))
    return Job(num, kind, subject, found, state, attempt, owner, fence, reason)


def file_job(core: Core, kind: str, subject: str, labels: Mapping[str, str], *, priority: int = 0) -> bool:
    """Queue work unless the same is queued or running; True when it is new."""
    text = json.dumps(dict(labels), sort_keys=True)
    with core.index.write():
        open_one = """SELECT 1 FROM jobs WHERE kind = ? AND subject = ? AND labels = ?
            AND state IN ('QUEUED', 'RUNNING')"""
        if core.index.run(open_one, (kind, subject, text)):
            return False
        seq = ledger.append(core.index, "job.filed", subject, {"kind": kind, "labels": dict(labels)})
        core.index.run(
            """INSERT INTO jobs (kind, subject, labels, priority, state, attempt, owner, expires, fence,
            reason, created, seq) VALUES (?, ?, ?, ?, 'QUEUED', 0, '', 0, 0, '', ?, ?)""",
            (kind, subject, text, priority, time.time(), seq),
        )
    core.after_write()
    return True


def claim(core: Core, kind: str, owner: str, *, seconds: float = 300.0) -> Job | None:
    """The next job of a kind, leased to `owner`; a job whose lease ran out is taken over, MAX_ATTEMPTS
    times.
    """
    now = time.time()
    with core.index.write():
        core.index.run(
            """UPDATE jobs SET state = 'DEAD', reason = 'too many attempts' WHERE state = 'RUNNING'
            AND expires <= ? AND attempt >= ?""",
            (now, MAX_ATTEMPTS),
        )
        found = core.index.run(
            f"""UPDATE jobs SET state = 'RUNNING', owner = ?1, expires = ?2, fence = fence + 1, attempt =
            attempt + 1 WHERE num = (SELECT num FROM jobs WHERE kind = ?3 AND (state = 'QUEUED' OR (state =
            'RUNNING' AND expires <= ?4)) ORDER BY priority DESC, num LIMIT 1) RETURNING {_COLUMNS}""",
            (owner, now + seconds, kind, now),
        )
    return _job(found[0]) if found else None


def extend(core: Core, job: Job, *, seconds: float = 300.0) -> None:
    """Keep a job; E0726 when another worker took it over."""
    _with_fence(core, job, "expires = ?", time.time() + seconds)


def finish(core: Core, job: Job, *, reason: str = "") -> None:
    """Done; E0726 for a worker that came too late."""
    _with_fence(core, job, "state = 'DONE', reason = ?", reason)


def _with_fence(core: Core, job: Job, change: str, value: object) -> None:
    text = f"UPDATE jobs SET {change} WHERE num = ? AND fence = ? AND state = 'RUNNING' RETURNING num"
    with core.index.write():
        if not core.index.run(text, (value, job.num, job.fence)):
            raise fail("E0726", f"job {job.num} ({job.kind} {job.subject[:12]}) is no longer {job.owner}'s")


def listed(core: Core, state: str | None = None) -> list[Job]:
    """Jobs in the order they were filed."""
    rows = core.index.rows(
        f"SELECT {_COLUMNS} FROM jobs WHERE ?1 IS NULL OR state = ?1 ORDER BY num", (state,)
    )
    return [_job(row) for row in rows]
