"""Sixteen writers, readers, a collector, an archiver and a verifier at once, with processes killed at
random.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from library import history, rows
from library.audit import verify_library
from library.records import ARCHIVED, VALIDATED
from library.store import Library

ROOT = Path(__file__).resolve().parents[2]
Record = Callable[[str, object], None]


def start(role: str, place: Path, seed: int, seconds: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.library.stress", role, str(place), str(seed), str(seconds)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def storm(place: Path, *, writers: int, kills: int, seconds: float) -> Counter[str]:
    """Run it; the counters of all processes that lived, and of what the library lacks afterwards."""
    rng = random.Random(7)
    roles = ["write"] * writers + ["read", "verify", "collect", "archive"]
    processes = [start(role, place, seed, seconds) for seed, role in enumerate(roles)]
    began, killed = time.monotonic(), 0
    while time.monotonic() - began < seconds + 2 and killed < kills:
        time.sleep(seconds / (kills + 1))
        victim = rng.choice([p for p in processes if p.poll() is None] or processes)
        if victim.poll() is None:
            victim.kill()
            killed += 1
            place_in_list = processes.index(victim)
            seed = len(roles) + killed
            processes[place_in_list] = start(roles[place_in_list], place, seed, max(1.0, seconds / 3))
    total: Counter[str] = Counter()
    for process in processes:
        out, err = process.communicate(timeout=seconds * 4 + 120)
        assert process.returncode == 0, err
        total.update(json.loads(out)["counts"])
    total["killed"] = killed
    return total


def _promise(lib: Library, what: str, artifact_id: str, digest: str = "") -> Counter[str]:
    """One line of a journal against the library."""
    record = rows.artifact(lib.index, artifact_id)
    if record is None:
        return Counter(lost=1)
    wrong = bool(digest) and record.digest != digest
    lost = what == "proven" and record.state not in (VALIDATED, ARCHIVED)
    return Counter(promised=1, wrong=int(wrong), lost=int(lost))


def lacks(place: Path) -> Counter[str]:
    """What the journals of the processes say is durable, against what the library has."""
    counts: Counter[str] = Counter()
    with Library.open(place / "library", trust=place / "keys") as lib:
        for file in place.glob("done-*"):
            for line in file.read_text().splitlines():
                counts.update(_promise(lib, *line.split()))
        findings = verify_library(lib, lib.artifacts(), contents=True).findings
        counts["wrong"] += len(findings) + len(history.audit(lib).findings)
        with lib.index.write():
            lib.index.run("DELETE FROM leases")
        lib.collect(grace_s=0, dry_run=False)
        present, named = set(lib.blobs.digests()), set(rows.referenced_digests(lib.index))
        counts["lost"] += len(named - present)
        counts["orphaned"] += len(present - named)
        for record in lib.artifacts(state=VALIDATED):
            counts["unverified"] += lib.load(record.id).verdict is None
    return counts


def judge(place: Path, total: Counter[str], record: Record) -> int:
    """How many promises of the processes were looked at."""
    total.update(lacks(place))
    words = ("promised", "loaded", "removed", "archived", "restored", "verified", "audited", "killed")
    zeros = ("lost", "wrong", "orphaned", "unverified")
    record("counters", ", ".join(f"{word} {total[word]}" for word in (*words, *zeros)))
    assert {word: total[word] for word in zeros} == dict.fromkeys(zeros, 0)
    assert total["promised"] > 20 and total["loaded"] > 5 and total["killed"] > 0
    return total["promised"]


@pytest.mark.timeout(600)
def test_a_short_storm(disk_home: Path, tmp_path: Path, record_property: Record) -> None:
    Library.open(disk_home).close()
    assert judge(tmp_path, storm(tmp_path, writers=16, kills=4, seconds=8.0), record_property)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_storm(disk_home: Path, tmp_path: Path, record_property: Record) -> None:
    Library.open(disk_home).close()
    assert judge(tmp_path, storm(tmp_path, writers=16, kills=60, seconds=600.0), record_property)
