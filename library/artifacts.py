"""Rows and ledger entries of blueprints and artifacts whose objects are durable already; inside a
transaction.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from library import dsse, ledger, rows
from library.canon import sha256_hex
from library.core import Core
from library.errors import fail
from library.manifest import Container
from library.records import (
    BLUEPRINT_MOVES,
    COMPILED,
    COMPILING,
    PENDING_BENCHMARKING,
    UNVALIDATED,
    ArtifactRecord,
    BlueprintRecord,
    SideFile,
)


def known_content(core: Core, manifest: Mapping[str, Any], digest: str) -> ArtifactRecord | None:
    """The record of a manifest's id, if its content is this; E0723 if it is another."""
    known = rows.artifact(core.index, manifest["artifact_id"])
    if known is not None and known.digest != digest:
        same = known.version == manifest["version"]
        raise fail(
            "E0723",
            f"{known.id} is stored with digest {known.digest}, not {digest}",
            node=known.id,
            hint="the compiler gave one id to two contents: its version hash misses an input"
            if same
            else "two version hashes share their first 8 digits by chance: change a note in the blueprint's "
            "metadata and compile again",
            details={"stored": known.digest, "offered": digest},
        )
    return known


def sign_provenance(
    core: Core, unpacked: Container, digest: str, beside: Iterable[SideFile], build: Mapping[str, Any]
) -> bytes:
    """The compiler's statement: what was compiled with what, and what is kept beside it."""
    manifest = unpacked.manifest
    predicate = {
        "blueprint": manifest["blueprint"]["id"],
        "toolchain": manifest["toolchain"],
        "side_files": {f.name: f.digest for f in beside},
        "build": dict(build),
    }
    payload = dsse.statement(manifest["artifact_id"], digest, dsse.PROVENANCE, predicate)
    return dsse.seal(payload, dsse.IN_TOTO, [core.signer("compiler")])


def insert_blueprint(core: Core, blueprint_id: str, digest: str, name: str) -> BlueprintRecord:
    """The row of a blueprint, made when new."""
    known = rows.blueprint(core.index, blueprint_id)
    if known is not None:
        return known
    seq = ledger.append(core.index, "blueprint.put", blueprint_id, {"name": name, "text": digest})
    record = BlueprintRecord(blueprint_id, name, digest, UNVALIDATED, "", time.time(), seq)
    rows.add_blueprint(core.index, record)
    return record


def set_text(core: Core, blueprint_id: str, digest: str) -> None:
    """Another spelling of a blueprint's text takes the place of the one kept; inside a transaction."""
    ledger.append(core.index, "blueprint.text", blueprint_id, {"text": digest})
    rows.set_blueprint_text(core.index, blueprint_id, digest)


def insert_artifact(
    core: Core, unpacked: Container, digest: str, text: str, envelope: bytes, beside: list[SideFile]
) -> ArtifactRecord:
    """The row of an artifact as PENDING_BENCHMARKING, made when new; `text` is its blueprint text's
    digest.
    """
    manifest = unpacked.manifest
    known = known_content(core, manifest, digest)
    if known is not None:
        return known
    blueprint = manifest["blueprint"]
    _compiled(core, insert_blueprint(core, blueprint["id"], text, blueprint["name"]))
    data = {"digest": digest, "size": len(unpacked.data), "envelope": sha256_hex(envelope)}
    seq = ledger.append(core.index, "artifact.put", manifest["artifact_id"], data)
    record = record_of(unpacked, digest, seq)
    rows.add_side_files(core.index, rows.add_artifact(core.index, record, envelope), beside)
    return record


def _compiled(core: Core, record: BlueprintRecord) -> None:
    """Move a blueprint along to COMPILED, by legal steps, because an artifact of it now exists."""
    state = record.state
    for step in (COMPILING, COMPILED):
        if state != COMPILED and step in BLUEPRINT_MOVES[state]:
            data = {"from": state, "to": step, "reason": "artifact"}
            ledger.append(core.index, "blueprint.state", record.id, data)
            rows.set_blueprint_state(core.index, record.id, step, "")
            state = step


def record_of(unpacked: Container, digest: str, seq: int) -> ArtifactRecord:
    """The row of a container that has just been stored."""
    manifest = unpacked.manifest
    return ArtifactRecord(
        id=manifest["artifact_id"],
        digest=digest,
        size=len(unpacked.data),
        blueprint=manifest["blueprint"]["id"],
        name=manifest["blueprint"]["name"],
        target=manifest["target"]["name"],
        kind=manifest["target"]["kind"],
        arch=manifest["target"]["arch"],
        pipeline=manifest["pipeline"],
        version=manifest["version"],
        objective=manifest["objective"],
        determinism=manifest["determinism"],
        interface=manifest["blueprint"]["interface"],
        state=PENDING_BENCHMARKING,
        reason="",
        previous_state="",
        superseded_by="",
        created=time.time(),
        seq=seq,
    )
