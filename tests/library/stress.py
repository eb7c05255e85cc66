"""One process of the stress test: `python -m tests.library.stress ROLE ROOT SEED SECONDS`; prints its
counters.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from esper_ir.diagnostics import EsperError
from library import history
from library.audit import verify_library
from library.canon import sha256_hex
from library.records import VALIDATED
from library.store import Library
from tests.library.helpers import make_container


def journal(root: Path, seed: int, text: str) -> None:
    """What this process was told is durable, beside the library."""
    with open(root / f"done-{seed}", "a", encoding="utf-8") as file:
        file.write(text + "\n")


def write(lib: Library, root: Path, rng: random.Random, seed: int, counts: Counter[str]) -> None:
    """Store one, prove it mostly, note both as done once the call has returned."""
    shared = rng.random() < 0.2
    number = rng.randrange(20) if shared else (seed + 1) * 1_000_000 + counts["put"]
    size = rng.choice((500, 5000, 60_000)) if not shared else 500
    # The eight digits of a version that stand in an id are the number: a hash of it would meet itself.
    version = f"{number:08x}{sha256_hex(b'%d' % number)[:56]}"
    data = make_container(number, size=size, blueprint=number % 7, version=version)
    record = lib.put_artifact(data, side_files={"k.ptx": b"%d" % (number % 5)})
    journal(root, seed, f"put {record.id} {sha256_hex(data)}")
    counts["put"] += 1
    if not shared and rng.random() < 0.8:
        lib.record_verdict(record.id, {"policy": "p"}, passed=True)
        journal(root, seed, f"proven {record.id}")
        counts["proven"] += 1


def read(lib: Library, root: Path, rng: random.Random, seed: int, counts: Counter[str]) -> None:
    """Load what is said to be proven: always right bytes under a verdict, or a refusal for a legal reason."""
    found = lib.artifacts(state=VALIDATED)
    for record in rng.sample(found, min(5, len(found))):
        try:
            loaded = lib.load(record.id)
        except EsperError as error:
            if error.code != "E0743":  # archived meanwhile
                raise
            continue
        counts["unverified"] += loaded.verdict is None
        counts["wrong"] += sha256_hex(loaded.container.data) != record.digest
        counts["loaded"] += 1
    time.sleep(0.01)


def verify(lib: Library, root: Path, rng: random.Random, seed: int, counts: Counter[str]) -> None:
    """Hash a sample, and now and then audit the whole history, beside the writers: never a false alarm."""
    found = lib.artifacts()
    findings = verify_library(lib, rng.sample(found, min(20, len(found))), contents=True).findings
    if counts["verified"] % 20 == 0:
        findings += history.audit(lib).findings
        counts["audited"] += 1
    for finding in findings:
        counts["wrong"] += 1
        print(finding, file=sys.stderr)
    counts["verified"] += 1
    time.sleep(0.05)


def collect(lib: Library, root: Path, rng: random.Random, seed: int, counts: Counter[str]) -> None:
    """Collect without any grace: the sharpest setting."""
    counts["removed"] += lib.collect(grace_s=0, dry_run=False).removed
    time.sleep(rng.uniform(0, 0.05))


def archive(lib: Library, root: Path, rng: random.Random, seed: int, counts: Counter[str]) -> None:
    """Move some out and half of them back in."""
    found = lib.artifacts(state=VALIDATED)
    if len(found) > 10:
        chosen = [r.id for r in rng.sample(found, 3)]
        place = root / f"archive-{seed}-{counts['archived']}"
        lib.archive(chosen, place)
        counts["archived"] += 1
        if rng.random() < 0.5:
            lib.restore(place)
            counts["restored"] += 1
    time.sleep(0.1)


ROLES: dict[str, Callable[[Library, Path, random.Random, int, Counter[str]], None]] = {
    "write": write,
    "read": read,
    "verify": verify,
    "collect": collect,
    "archive": archive,
}


def main() -> None:
    role, root, seed, seconds = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
    rng, counts = random.Random(seed), Counter[str]()
    began, slowest = time.monotonic(), 0.0
    with Library.open(root / "library", trust=root / "keys", wait_s=60) as lib:
        while time.monotonic() - began < seconds:
            start = time.monotonic()
            ROLES[role](lib, root, rng, seed, counts)
            slowest = max(slowest, time.monotonic() - start)
    print(json.dumps({"role": role, "counts": counts, "slowest_s": round(slowest, 3)}))


if __name__ == "__main__":
    main()
