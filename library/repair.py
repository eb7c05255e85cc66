"""Mending what `verify` found: lost or corrupt objects come from bundles, from other objects, or from a
compile job.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from esper_ir.diagnostics import EsperError
from library import artifacts, jobs, query, rows
from library.canon import canonical_json, parse_json, sha256_hex
from library.core import Core
from library.manifest import blueprint_text, unpack
from library.query import facts_of, known_facts
from library.records import VALIDATED, ArtifactRecord
from library.verdicts import known, rank_again, signed_facts


@dataclass(frozen=True)
class Repair:
    """What was done about an object: restored, put in order, made again, job filed, job waiting or lost."""

    artifact_id: str
    digest: str
    what: str
    action: str


def repair(core: Core, records: Sequence[ArtifactRecord], objects: Mapping[str, bytes]) -> list[Repair]:
    """Put back every missing or corrupt object of `records` that `objects` (from bundles, by digest) holds.

    A container that is nowhere becomes a compile job for its blueprint; a blueprint's text is taken from a
    sound container; a side file that is nowhere is reported lost, since nothing loads it. A text whose names
    were sorted, as earlier versions kept it, is exchanged for the one in order.
    """
    core.refuse_readonly()
    done: list[Repair] = []
    for record in records:
        if record.away:
            continue
        for digest, what in _wanted(core, record):
            if not _sound(core, digest):
                done.append(_mend(core, record, digest, what, objects))
        done += _in_order(core, record)
        done += _ranked(core, record)
    return done


def _ranked(core: Core, record: ArtifactRecord) -> list[Repair]:
    """What find() knows, made again where it does not follow from what was signed."""
    try:
        with core.index.write():
            now = known(core, record.id)
            wanted = facts_of(now, signed_facts(core, now)) if now.state == VALIDATED else None
            if known_facts(core.index, now.id) == wanted:
                return []
            query.drop_facts(core.index, rows.artifact_num(core.index, now.id))
            if wanted is not None:
                rank_again(core, now)
    except EsperError:
        return []  # nothing trusted to make it from; `verify` says why
    return [Repair(record.id, record.digest, "what queries know", "made again")]


def _wanted(core: Core, record: ArtifactRecord) -> list[tuple[str, str]]:
    blueprint = rows.blueprint(core.index, record.blueprint)
    text = [(blueprint.text_digest, "blueprint")] if blueprint else []
    reports = [(row[5], "report") for row in rows.verdict_rows(core.index, record.id)]
    files = [(f.digest, f"side file {f.name}") for f in rows.side_files(core.index, record.id)]
    return [(record.digest, "container"), *text, *reports, *files]


def _sound(core: Core, digest: str) -> bool:
    try:
        return sha256_hex(core.blobs.read_raw(digest)) == digest
    except EsperError:
        return False


def _mend(core: Core, record: ArtifactRecord, digest: str, what: str, objects: Mapping[str, bytes]) -> Repair:
    found = objects.get(digest) or (_blueprint_text(core, record, digest) if what == "blueprint" else None)
    if found is not None:
        with core.publishing({digest: found}, f"repair {record.id}"):
            pass
        return Repair(record.id, digest, what, "restored")
    if what == "blueprint" and _sound(core, record.digest):
        return Repair(record.id, _respelled(core, record), what, "restored")
    if what == "container":
        labels = {"target": record.target, "pipeline": record.pipeline, "objective": record.objective}
        new = jobs.file_job(core, "compile", record.blueprint, labels, priority=1)
        return Repair(record.id, digest, what, "job filed" if new else "job waiting")
    return Repair(record.id, digest, what, "lost")


def _respelled(core: Core, record: ArtifactRecord) -> str:
    """The text inside a sound container takes the place of a lost one in another spelling; its digest."""
    text = blueprint_text(unpack(core.blobs.read_raw(record.digest)).manifest).encode()
    digest = sha256_hex(text)
    with core.publishing({digest: text}, f"repair {record.id}"):
        artifacts.set_text(core, record.blueprint, digest)
    return digest


def _blueprint_text(core: Core, record: ArtifactRecord, digest: str) -> bytes | None:
    """The text inside a sound container, in the spelling that has this digest."""
    if not _sound(core, record.digest):
        return None
    ordered = blueprint_text(unpack(core.blobs.read_raw(record.digest)).manifest).encode()
    spellings = (ordered, canonical_json(parse_json(ordered)))
    return next((text for text in spellings if sha256_hex(text) == digest), None)


def _in_order(core: Core, record: ArtifactRecord) -> list[Repair]:
    row = rows.blueprint(core.index, record.blueprint)
    if row is None or not _sound(core, row.text_digest) or not _sound(core, record.digest):
        return []
    kept = core.blobs.read_raw(row.text_digest)
    ordered = blueprint_text(unpack(core.blobs.read_raw(record.digest)).manifest).encode()
    said, meant = parse_json(kept), parse_json(ordered)
    if kept != canonical_json(said) or said != meant or json.dumps(said) == json.dumps(meant):
        return []
    digest = sha256_hex(ordered)
    with core.publishing({digest: ordered}, f"repair {record.id}"):
        artifacts.set_text(core, row.id, digest)
    return [Repair(record.id, digest, "blueprint", "put in order")]
