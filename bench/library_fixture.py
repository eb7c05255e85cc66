"""A library with many rows and few bytes, for measuring queries, listing and audits at size."""

from __future__ import annotations

import hashlib
import random

from library import ledger, query, rows
from library.canon import sha256_hex
from library.records import (
    COMPILED,
    COMPILING,
    PENDING_BENCHMARKING,
    UNVALIDATED,
    VALIDATED,
    ArtifactRecord,
    BlueprintRecord,
)
from library.store import Library

ARCHS = (
    ("h100", "cuda", "sm_90"),
    ("a100", "cuda", "sm_80"),
    ("l40s", "cuda", "sm_89"),
    ("cpu-v3", "cpu", "x86-64-v3"),
)
SPEEDS = ("high_speed", "medium_speed", "low_speed")
MEMORY = ("low_memory", "medium_memory", "high_memory")
FLAGS = ("numerically_stable", "deterministic", "trainable", "faster_than_eager", "faster_than_compile")


def fill(
    lib: Library, artifacts: int, blueprints: int, *, per_transaction: int = 5000, seed: int = 0
) -> list[str]:
    """Add rows as `put_artifact` and `record_verdict` would, unsigned and without objects; artifact ids."""
    rng = random.Random(seed)
    ids: list[str] = []
    for start in range(0, blueprints, per_transaction):
        with lib.index.write():
            for number in range(start, min(blueprints, start + per_transaction)):
                _blueprint(lib, number)
    for start in range(0, artifacts, per_transaction):
        with lib.index.write():
            for number in range(start, min(artifacts, start + per_transaction)):
                ids.append(_artifact(lib, number, number % blueprints, rng))
    return ids


def blueprint_id(number: int) -> str:
    """The id that `fill` gives to blueprint `number`."""
    return hashlib.sha256(b"bench blueprint %d" % number).hexdigest()


def _blueprint(lib: Library, number: int) -> None:
    digest = hashlib.sha256(b"text%d" % number).hexdigest()
    seq = ledger.append(
        lib.index, "blueprint.put", blueprint_id(number), {"name": f"block_{number}", "text": digest}
    )
    for old, new in ((UNVALIDATED, COMPILING), (COMPILING, COMPILED)):
        ledger.append(lib.index, "blueprint.state", blueprint_id(number), {"from": old, "to": new})
    rows.add_blueprint(
        lib.index, BlueprintRecord(blueprint_id(number), f"block_{number}", digest, COMPILED, "", 0.0, seq)
    )


def _artifact(lib: Library, number: int, blueprint: int, rng: random.Random) -> str:
    target, kind, arch = rng.choice(ARCHS)
    version = hashlib.sha256(b"version%d" % number).hexdigest()
    of = blueprint_id(blueprint)
    record = ArtifactRecord(
        id=f"{of[:12]}-{target}-fast-{version[:8]}",
        digest=hashlib.sha256(b"artifact%d" % number).hexdigest(),
        size=60_000,
        blueprint=of,
        name=f"block_{blueprint}",
        target=target,
        kind=kind,
        arch=arch,
        pipeline="fast",
        version=version,
        objective="speed",
        determinism="deterministic",
        interface="ab",
        state=PENDING_BENCHMARKING,
        reason="",
        previous_state="",
        superseded_by="",
        created=float(number),
        seq=0,
    )
    seq = ledger.append(
        lib.index,
        "artifact.put",
        record.id,
        {"digest": record.digest, "size": record.size, "envelope": sha256_hex(b"")},
    )
    num = rows.add_artifact(lib.index, ArtifactRecord(**{**record.to_json(), "seq": seq}), b"")
    if rng.random() < 0.9:
        data = {"result": VALIDATED, "envelope": sha256_hex(b"")}
        seq = ledger.append(lib.index, "artifact.verdict", record.id, data)
        verdict = {"arch": arch, "card": "", "result": VALIDATED, "reason": "", "keyid": "", "report": ""}
        rows.add_verdict(lib.index, num, {**verdict, "envelope": b"", "time": 0.0, "seq": seq})
        rows.set_artifact_state(lib.index, record.id, VALIDATED, "")
        query.write_facts(lib.index, num, record, _report(rng))
    return record.id


def _report(rng: random.Random) -> dict[str, object]:
    speed = rng.choice(SPEEDS)
    latency = {"high_speed": 0.1, "medium_speed": 0.4, "low_speed": 2.0}[speed] * rng.lognormvariate(0, 0.5)
    tags = [speed, rng.choice(MEMORY), *(f for f in FLAGS if rng.random() < 0.6)]
    wep = {"latency_ms_p99": latency, "memory_mb_peak": rng.uniform(1, 1000), "shapes": {}}
    return {"generated_tags": tags, "wep": wep, "risk_score": rng.random(), "conf_level": "Speculative"}
