"""Exchange: a set of artifacts as one file, with every signature and a proof that the ledger knew each of
them.

    b"ESPERBND\\x01" | u64 little-endian index length | canonical-JSON index | objects, each of the listed
    size

Nothing is extracted to a path: objects are named by digest. Import checks everything before a byte enters
`objects/`, and then takes all or nothing.
"""

from __future__ import annotations

import base64
import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from esper_ir.diagnostics import EsperError
from library import artifacts, dsse, ledger, rows, verdicts
from library.canon import JsonLimits, canonical_json, parse_json, sha256_hex
from library.core import Core
from library.errors import fail
from library.loading import open_provenance_bytes, open_verdict, refuse_revoked
from library.manifest import Container, blueprint_text, unpack
from library.merkle import Tree, leaf_hash, verify_inclusion
from library.paths import os_error, read_regular, refuse_inside
from library.records import (
    ARCHIVED,
    PENDING_BENCHMARKING,
    REJECTED,
    REVOKED,
    VALIDATED,
    ArtifactRecord,
    SideFile,
)
from library.trust import TrustDocument, TrustStore, replace_file

MAGIC = b"ESPERBND\x01"
FORMAT = "esper-bundle/1"
MAX_BUNDLE_BYTES = 2 << 30
_MAX_INDEX_BYTES = 64 << 20
_MAX_ITEMS = 100_000
_INDEX_KEYS = {"format", "origin", "trust", "checkpoint", "artifacts", "objects"}
_ARTIFACT_KEYS = {"id", "digest", "envelope", "side_files", "verdicts", "annotations", "proof"}
_VERDICT_KEYS = {"card", "report", "envelope"}


@dataclass(frozen=True)
class Arrival:
    """One artifact of a bundle after every check: what will be recorded."""

    unpacked: Container
    digest: str
    text: bytes
    envelope: bytes
    beside: tuple[SideFile, ...]
    verdicts: tuple[Mapping[str, Any], ...]
    reports: tuple[Mapping[str, Any], ...]
    annotations: tuple[tuple[bytes, str, dict[str, Any]], ...]


def export_bundle(core: Core, records: Iterable[ArtifactRecord], place: Path, *, keep: bool = False) -> int:
    """Write one bundle file, atomically; its size in bytes. Every object is hashed on the way.

    It takes the place of a file there, but not (E0720) of a bundle with what was archived from here: it may
    be the only copy. With `keep` it replaces only what an interrupted command of this library may have left.
    """
    refuse_inside(place, core.home, core.trust.home)
    _spare(core, place, keep)
    wanted = list(records)
    objects: dict[str, bytes] = {}
    tree, checkpoint = _proof_base(core)
    entries = [_exported(core, record, objects, tree) for record in wanted]
    order = sorted(objects)
    index = {
        "format": FORMAT,
        "origin": core.origin,
        "trust": _text(core.trust.envelope()),
        "checkpoint": _text(checkpoint),
        "artifacts": entries,
        "objects": [{"digest": digest, "size": len(objects[digest])} for digest in order],
    }
    text = canonical_json(index)
    data = b"".join([MAGIC, struct.pack("<Q", len(text)), text, *(objects[digest] for digest in order)])
    if len(data) > MAX_BUNDLE_BYTES:
        raise fail("E0735", f"bundle of {len(data)} bytes exceeds {MAX_BUNDLE_BYTES}: export fewer artifacts")
    replace_file(place, data)
    return len(data)


def _spare(core: Core, place: Path, keep: bool) -> None:
    if not os.path.lexists(place):
        return
    try:
        index = read_bundle(read_file(place))[0]
    except EsperError:
        index = {"origin": "", "artifacts": []}
    if keep and index["origin"] != core.origin:
        raise fail("E0720", f"{place} exists", node=str(place), hint="give another place")
    for item in _list(index["artifacts"], "artifacts"):
        found = rows.artifact(core.index, str(item.get("id"))) if isinstance(item, dict) else None
        if found is not None and found.state == ARCHIVED:
            text = f"{place} is a bundle with {found.id}, which is archived here"
            raise fail("E0720", text, node=str(place), hint="give another place, or restore it first")


def _proof_base(core: Core) -> tuple[Tree, bytes]:
    """The tree of the newest checkpoint, which is signed now when this handle may sign."""
    if core.roles and not core.readonly:
        core.sign_head(every=1)
    size = ledger.last_checkpoint(core.index)
    leaves = [
        row[0] for row in core.index.rows("SELECT leaf FROM ledger WHERE seq <= ? ORDER BY seq", (size,))
    ]
    row = core.index.row("SELECT envelope FROM checkpoints WHERE size = ?", (size,))
    return Tree(leaves), row[0] if row else b""


def _exported(core: Core, record: ArtifactRecord, objects: dict[str, bytes], tree: Tree) -> dict[str, Any]:
    if record.state == REVOKED:
        raise fail("E0742", f"{record.id} was revoked and is not exported", node=record.id)
    objects[record.digest] = core.blobs.read(record.digest)
    beside = rows.side_files(core.index, record.id)
    found = rows.verdict_rows(core.index, record.id)
    for digest in (*(f.digest for f in beside), *(row[5] for row in found)):
        objects[digest] = core.blobs.read(digest)
    return {
        "id": record.id,
        "digest": record.digest,
        "envelope": _text(rows.provenance_envelope(core.index, record.id)),
        "side_files": [{"name": f.name, "digest": f.digest} for f in beside],
        "verdicts": [
            {"card": row[1], "report": row[5], "envelope": _text(row[6])} for row in reversed(found)
        ],
        "annotations": [_text(row) for row in rows.annotation_envelopes(core.index, record.id)],
        "proof": _proof(core, record.seq, tree),
    }


def _proof(core: Core, seq: int, tree: Tree) -> dict[str, Any] | None:
    """That entry `seq` of the exporter's ledger stored this artifact, under the bundle's checkpoint."""
    row = core.index.row("SELECT body FROM ledger WHERE seq = ?", (seq,))
    if row is None or seq > len(tree):
        return None
    path = [node.hex() for node in tree.inclusion(seq - 1, len(tree))]
    return {"body": _text(row[0]), "index": seq - 1, "path": path}


def import_bundle(core: Core, data: bytes, *, dry_run: bool = False) -> list[str]:
    """Check a bundle whole, then take it whole; ids that are new here, newly proven or newly annotated.

    E0770, E0730, E0744 and the like; E0723 another content under a known id; E0725 a verdict that contradicts
    one given here.
    """
    index, objects = read_bundle(data)
    document = core.trust.document()
    refuse_old_trust(core.trust, index["trust"])
    proven = _checkpoint(index, document)
    listed = _list(index["artifacts"], "artifacts")
    arrivals = [_arrival(item, objects, document, proven) for item in listed]
    ids = [a.unpacked.manifest["artifact_id"] for a in arrivals]
    if len(set(ids)) != len(ids):
        raise fail("E0770", "bundle lists an artifact twice")
    new = [i for i, arrival in zip(ids, arrivals, strict=True) if _brings_something(core, arrival)]
    used = {d for a in arrivals for d in _digests(a)}
    if used != set(objects):
        raise fail("E0770", f"bundle carries {len(set(objects) - used)} objects that no artifact names")
    if not dry_run and arrivals:
        texts = {sha256_hex(a.text): a.text for a in arrivals}
        with core.publishing({**objects, **texts}, f"import {len(arrivals)} artifacts"):
            for arrival in arrivals:
                _record(core, arrival)
    return new


def _digests(arrival: Arrival) -> list[str]:
    reports = [row["report"] for row in arrival.verdicts]
    return [arrival.digest, *(f.digest for f in arrival.beside), *reports]


def _brings_something(core: Core, arrival: Arrival) -> bool:
    known = artifacts.known_content(core, arrival.unpacked.manifest, arrival.digest)
    if known is None or _fresh_verdicts(core, known, arrival):
        return True
    return bool(_fresh_annotations(core, known, arrival))


def _fresh_verdicts(
    core: Core, known: ArtifactRecord, arrival: Arrival
) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Verdicts (with their reports) that a known artifact does not have yet and that can count for it."""
    if known.state not in (PENDING_BENCHMARKING, VALIDATED, REJECTED):
        return []
    present = {row[6] for row in rows.verdict_rows(core.index, known.id)}
    pairs = zip(arrival.verdicts, arrival.reports, strict=True)
    fresh = [(values, report) for values, report in pairs if values["envelope"] not in present]
    against = [v["result"] for v, _ in fresh if known.state not in (PENDING_BENCHMARKING, v["result"])]
    if against:
        raise fail("E0725", f"{known.id} is {known.state} here, the bundle says {against[0]}", node=known.id)
    return [] if known.state == REJECTED else fresh


def _record(core: Core, arrival: Arrival) -> None:
    artifact_id = arrival.unpacked.manifest["artifact_id"]
    record = artifacts.known_content(core, arrival.unpacked.manifest, arrival.digest)
    if record is None:
        envelope, beside = arrival.envelope, list(arrival.beside)
        text = sha256_hex(arrival.text)
        record = artifacts.insert_artifact(core, arrival.unpacked, arrival.digest, text, envelope, beside)
    for values, report in _fresh_verdicts(core, record, arrival):
        verdicts.insert_verdict(core, artifact_id, values, report)
    proven = verdicts.known(core, artifact_id)
    for envelope, keyid, predicate in _fresh_annotations(core, proven, arrival):
        verdicts.insert_annotation(core, proven, envelope, keyid, predicate)


def _fresh_annotations(
    core: Core, known: ArtifactRecord, arrival: Arrival
) -> list[tuple[bytes, str, dict[str, Any]]]:
    """Annotations of a proven artifact that are newer than the newest here."""
    if known.state != VALIDATED:
        return []
    newest = rows.annotation_version(core.index, known.id)
    return [item for item in arrival.annotations if item[2]["version"] > newest]


def read_bundle(data: bytes) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Index and objects, every digest checked; E0770, E0730, E0734, E0735. No signature is looked at yet."""
    head = len(MAGIC) + 8
    if len(data) > MAX_BUNDLE_BYTES:
        raise fail("E0735", f"bundle of {len(data)} bytes exceeds {MAX_BUNDLE_BYTES}")
    if len(data) < head or data[: len(MAGIC)] != MAGIC:
        raise fail("E0770", "not a bundle: wrong magic or truncated header")
    (length,) = struct.unpack_from("<Q", data, len(MAGIC))
    if length > _MAX_INDEX_BYTES or head + length > len(data):
        raise fail("E0770", "bundle's index runs past the end of the file or the limit")
    text = data[head : head + length]
    index = parse_json(text, JsonLimits(max_bytes=_MAX_INDEX_BYTES, max_depth=16))
    if not isinstance(index, dict) or index.keys() != _INDEX_KEYS or canonical_json(index) != text:
        raise fail("E0770", "bundle's index is not canonical or has other fields")
    if index["format"] != FORMAT:
        raise fail("E0706", f"bundle format {index['format']!r}, this version reads {FORMAT!r}")
    return index, _objects(index, data, head + length)


def _objects(index: dict[str, Any], data: bytes, at: int) -> dict[str, bytes]:
    objects: dict[str, bytes] = {}
    listed = _list(index["objects"], "objects")
    for row in listed:
        if not isinstance(row, dict) or row.keys() != {"digest", "size"} or type(row["size"]) is not int:
            raise fail("E0770", "bundle's list of objects is malformed")
        digest, end = row["digest"], at + row["size"]
        if not isinstance(digest, str) or row["size"] < 0 or end > len(data) or digest in objects:
            raise fail("E0770", f"object {str(digest)[:80]} runs past the end of the file or is listed twice")
        content = data[at:end]
        if sha256_hex(content) != digest:
            raise fail("E0730", f"object {digest} in the bundle does not match its digest")
        objects[digest], at = content, end
    if at != len(data):
        raise fail("E0770", f"{len(data) - at} bytes after the last object of the bundle")
    return objects


def refuse_old_trust(trust: TrustStore, carried: Any) -> None:
    """E0750 when the bundle's trust document is an older version of ours: it may be from before a revocation.

    A bundle of another root says nothing about our versions; its signatures simply do not count here.
    """
    theirs = trust.check_envelope(_bytes(carried, "trust"), None)
    ours = trust.document()
    same_root = set(theirs.roles["root"].keyids) & set(ours.keys)
    if same_root and theirs.version < ours.version and set(theirs.keys) & set(ours.revoked_keys):
        raise fail(
            "E0750",
            f"bundle was made under trust store version {theirs.version}; in version {ours.version}, which "
            "holds here, some of its keys are revoked",
            hint="export it again where the trust store is current",
        )


def _checkpoint(index: dict[str, Any], document: TrustDocument) -> tuple[int, bytes] | None:
    """(size, root) of the exporter's ledger, signed by a key trusted here; None when the bundle has none."""
    envelope = _bytes(index["checkpoint"], "checkpoint")
    if not envelope:
        return None
    keys = {**document.role_keys("compiler"), **document.role_keys("validator")}
    opened = dsse.open_envelope(envelope, dsse.CHECKPOINT, keys, what="bundle's checkpoint")
    refuse_revoked(document, opened.keyids, _ANY_SEQUENCE, "bundle's checkpoint")
    head = ledger.read_checkpoint(opened.payload, "bundle's checkpoint")
    if head.origin != index["origin"]:
        raise fail("E0762", "bundle's checkpoint is of another library")
    return head.size, head.root


def _arrival(
    item: Any, objects: Mapping[str, bytes], document: TrustDocument, proven: tuple[int, bytes] | None
) -> Arrival:
    if not isinstance(item, dict) or item.keys() != _ARTIFACT_KEYS:
        raise fail("E0770", "bundle's entry of an artifact has other fields")
    data = _object(objects, item["digest"])
    unpacked = unpack(data)
    manifest = unpacked.manifest
    if manifest["artifact_id"] != item["id"]:
        raise fail("E0770", f"bundle lists {item['id']!r} but carries {manifest['artifact_id']}")
    text = blueprint_text(manifest).encode()
    envelope = _bytes(item["envelope"], "envelope")
    record = artifacts.record_of(unpacked, item["digest"], _ANY_SEQUENCE)
    predicate = open_provenance_bytes(document, record, envelope)
    beside = _beside(item, objects, predicate)
    found = [_verdict(row, record, objects, document) for row in _list(item["verdicts"], "verdicts")]
    _check_proof(item, proven)
    notes = tuple(_annotation(row, record, document) for row in _list(item["annotations"], "annotations"))
    versions = [predicate["version"] for _, _, predicate in notes]
    if any(later <= earlier for earlier, later in pairwise(versions)):
        raise fail("E0770", f"annotations of {record.id} are out of order")
    values, reports = tuple(v for v, _ in found), tuple(r for _, r in found)
    return Arrival(unpacked, item["digest"], text, envelope, beside, values, reports, notes)


def _beside(
    item: dict[str, Any], objects: Mapping[str, bytes], predicate: dict[str, Any]
) -> tuple[SideFile, ...]:
    """Side files, which must be exactly those that the compiler signed."""
    listed = _list(item["side_files"], "side files")
    if any(not isinstance(row, dict) or row.keys() != {"name", "digest"} for row in listed):
        raise fail("E0770", f"side files of {item['id']} are malformed")
    signed = predicate["side_files"]
    if sorted((str(r["name"]), str(r["digest"])) for r in listed) != sorted(signed.items()):
        raise fail(
            "E0746", f"side files of {item['id']} are not those that the compiler signed", node=item["id"]
        )
    return tuple(SideFile(row["name"], row["digest"], len(_object(objects, row["digest"]))) for row in listed)


def _verdict(
    row: Any, record: ArtifactRecord, objects: Mapping[str, bytes], document: TrustDocument
) -> tuple[dict[str, Any], Mapping[str, Any]]:
    if not isinstance(row, dict) or row.keys() != _VERDICT_KEYS:
        raise fail("E0770", f"verdict on {record.id} has other fields")
    envelope = _bytes(row["envelope"], "verdict")
    said = open_verdict(document, record, envelope, _ANY_SEQUENCE)
    if said.report != row["report"] or said.card != row["card"]:
        raise fail("E0746", f"report of {record.id} is not the one that was signed", node=record.id)
    report = parse_json(_object(objects, row["report"]))
    if not isinstance(report, dict) or said.result not in (VALIDATED, REJECTED):
        raise fail("E0745", f"verdict on {record.id} is malformed", node=record.id)
    fields = ("arch", "card", "result", "reason", "report", "time", "keyid")
    return {**{name: getattr(said, name) for name in fields}, "envelope": envelope}, report


def _annotation(
    text: Any, record: ArtifactRecord, document: TrustDocument
) -> tuple[bytes, str, dict[str, Any]]:
    envelope = _bytes(text, "annotation")
    opened = verdicts.open_annotation(document, record, envelope, _ANY_SEQUENCE)
    return envelope, opened[0], opened[1]


# A foreign ledger's sequence numbers say nothing here, so a revoked key is void for everything that arrives.
_ANY_SEQUENCE = 1 << 62


def _check_proof(item: dict[str, Any], proven: tuple[int, bytes] | None) -> None:
    proof = item["proof"]
    if proof is None or proven is None:
        return
    try:
        body = _bytes(proof["body"], "proof")
        path = [bytes.fromhex(node) for node in proof["path"]]
        entry = parse_json(body)
        good = verify_inclusion(leaf_hash(body), proof["index"], proven[0], path, proven[1])
        about = (entry["kind"], entry["subject"], entry["data"]["digest"])
    except (KeyError, TypeError, ValueError) as error:
        raise fail("E0770", f"proof of {item['id']} is malformed: {error}") from error
    if not good or about != ("artifact.put", item["id"], item["digest"]):
        raise fail(
            "E0762", f"proof of {item['id']} does not lead to the bundle's checkpoint", node=item["id"]
        )


def _object(objects: Mapping[str, bytes], digest: Any) -> bytes:
    if not isinstance(digest, str) or digest not in objects:
        raise fail("E0770", f"bundle names object {str(digest)[:80]} but does not carry it")
    return objects[digest]


def _list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list) or len(value) > _MAX_ITEMS:
        raise fail("E0770", f"bundle's {what} are not a list of at most {_MAX_ITEMS}")
    return value


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes(text: Any, what: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (ValueError, TypeError) as error:
        raise fail("E0770", f"bundle's {what} is not base64") from error


def read_file(place: Path) -> bytes:
    """A bundle from disk: a regular file of at most the limit, not followed through a link."""
    try:
        return read_regular(place, MAX_BUNDLE_BYTES, follow=False)
    except FileNotFoundError as error:
        raise fail("E0721", f"no file {place}") from error
    except (OSError, ValueError) as error:
        if isinstance(error, ValueError):
            raise fail("E0720", f"{str(place)!r} is not a path") from error
        raise os_error(error, "cannot read", place) from error
