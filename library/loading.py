"""What must hold before a byte of an artifact reaches a driver, in this order, failing closed:

record known; artifact not revoked, archived or rejected; bytes read once and hashed; verdict signed by a
trusted, unrevoked validator key over that digest; verdict says VALIDATED for this id and architecture; only
then are the same bytes parsed and handed on.
"""

from __future__ import annotations

import re
from types import NoneType
from typing import Any

from esper_ir.diagnostics import EsperError
from library import dsse, rows
from library.backends import BlobStore
from library.canon import sha256_hex
from library.errors import fail
from library.index import Index
from library.manifest import unpack
from library.records import (
    ARCHIVED,
    PENDING_BENCHMARKING,
    REJECTED,
    REVOKED,
    SUPERSEDED,
    VALIDATED,
    ArtifactRecord,
    LoadedArtifact,
    Verdict,
)
from library.resolve import not_found
from library.trust import TrustDocument, TrustStore

SIDE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,127}\Z")
_TEXTS = ("arch", "result", "card", "reason", "report")
_DIGEST = re.compile(r"[0-9a-f]{64}\Z")


def load_artifact(
    index: Index, blobs: BlobStore, trust: TrustStore, artifact_id: str, *, allow_unvalidated: bool
) -> LoadedArtifact:
    """See the module. `allow_unvalidated` (the gauntlet's) accepts PENDING
    and REJECTED under the compiler's signature."""
    try:
        return _load(index, blobs, trust, artifact_id, allow_unvalidated)
    except EsperError as error:
        if error.code != "E0731":
            raise
    # Archived between the look at the row and the read: the row now says so. Lost: the same refusal again.
    return _load(index, blobs, trust, artifact_id, allow_unvalidated)


def _load(
    index: Index, blobs: BlobStore, trust: TrustStore, artifact_id: str, allow_unvalidated: bool
) -> LoadedArtifact:
    found = rows.for_loading(index, artifact_id)
    if found is None:
        raise not_found(index, artifact_id, "artifact")
    record, (envelope, seq) = found
    document = trust.document()
    check_state(record, document, allow_unvalidated)
    data = blobs.read_raw(record.digest)
    if sha256_hex(data) != record.digest:
        raise blobs.quarantine(record.digest, f"bytes of {artifact_id} do not match the digest on loading")
    if record.state in (PENDING_BENCHMARKING, REJECTED):
        open_provenance(index, trust, record)
        return LoadedArtifact(record, unpack(data), None)
    if envelope is None:
        raise fail("E0740", f"{artifact_id} is marked {record.state} but has no verdict", node=artifact_id)
    verdict = open_verdict(document, record, envelope, seq)
    if verdict.result != VALIDATED:
        raise fail("E0741", f"the signed verdict on {artifact_id} is {verdict.result}", node=artifact_id)
    container = unpack(data, verified=True)
    if container.head["artifact_id"] != record.id:
        raise fail("E0746", f"the container stored as {record.id} calls itself otherwise", node=artifact_id)
    return LoadedArtifact(record, container, verdict)


def check_state(record: ArtifactRecord, document: TrustDocument, allow_unvalidated: bool) -> None:
    """E0740 to E0743 unless the record's state allows loading."""
    if record.state == REVOKED or record.digest in document.revoked_artifacts:
        raise fail(
            "E0742",
            f"{record.id} was revoked: {record.reason}",
            node=record.id,
            hint="it stays so; by another pipeline or a newer compiler the blueprint has another artifact",
        )
    if record.state == ARCHIVED:
        raise fail(
            "E0743", f"{record.id} is archived", node=record.id, hint=f"esper-library restore {record.id}"
        )
    if record.state in (VALIDATED, SUPERSEDED) or allow_unvalidated:
        return
    if record.state == REJECTED:
        raise fail(
            "E0741",
            f"{record.id} was rejected: {record.reason}",
            node=record.id,
            hint=f"`esper-gauntlet show {record.id}` has the case",
        )
    raise fail(
        "E0740",
        f"{record.id} has not been proven yet",
        node=record.id,
        hint=f"esper-gauntlet bench {record.id}",
    )


def open_verdict(document: TrustDocument, record: ArtifactRecord, envelope: bytes, seq: int) -> Verdict:
    """The verdict inside `envelope`, if a validator key of the trust
    store signed it about exactly this artifact."""
    opened = dsse.open_envelope(
        envelope,
        dsse.IN_TOTO,
        document.role_keys("validator"),
        threshold=document.roles["validator"].threshold,
        what=f"verdict on {record.id}",
    )
    refuse_revoked(document, opened.keyids, seq, record.id)
    predicate = dsse.read_statement(opened.payload, record.id, record.digest, dsse.VERDICT)
    verdict = _verdict(record.id, opened.keyids[0], predicate)
    if verdict.arch != record.arch:
        raise fail(
            "E0746", f"verdict is for {verdict.arch!r}, the record for {record.arch!r}", node=record.id
        )
    if predicate.get("blueprint") != record.blueprint or predicate.get("stage") != 1:
        raise fail("E0746", f"verdict on {record.id} is about another blueprint or stage", node=record.id)
    if predicate.get("policy") in document.revoked_policies:
        raise fail("E0742", f"the policy that validated {record.id} was revoked", node=record.id)
    return verdict


def _verdict(artifact_id: str, keyid: str, predicate: dict[str, Any]) -> Verdict:
    texts: list[Any] = [predicate.get(name) for name in _TEXTS]
    arch, result, card, reason, report = texts
    policy, when = predicate.get("policy"), predicate.get("time")
    odd = {*map(type, texts)} != {str} or type(policy) not in (str, NoneType)
    if odd or type(when) not in (int, float) or not _fits(when):
        raise fail("E0745", f"verdict on {artifact_id} has malformed fields", node=artifact_id)
    return Verdict.of((artifact_id, arch, result, keyid, float(when or 0), card, reason, report))


def _fits(when: Any) -> bool:
    return abs(when) < 1 << 53


def open_provenance(index: Index, trust: TrustStore, record: ArtifactRecord) -> dict[str, Any]:
    """The compiler's signed statement about a stored artifact: E0744 to E0746, E0755."""
    envelope = rows.provenance_envelope(index, record.id)
    return open_provenance_bytes(trust.document(), record, envelope)


def open_provenance_bytes(document: TrustDocument, record: ArtifactRecord, envelope: bytes) -> dict[str, Any]:
    """The same from an envelope in hand; `record.seq` decides about revoked keys."""
    opened = dsse.open_envelope(
        envelope,
        dsse.IN_TOTO,
        document.role_keys("compiler"),
        threshold=document.roles["compiler"].threshold,
        what=f"provenance of {record.id}",
    )
    refuse_revoked(document, opened.keyids, record.seq, record.id)
    predicate = dsse.read_statement(opened.payload, record.id, record.digest, dsse.PROVENANCE)
    files, build = predicate.get("side_files"), predicate.get("build")
    if not isinstance(build, dict) or not isinstance(predicate.get("toolchain"), dict):
        raise fail("E0745", f"provenance of {record.id} has malformed fields", node=record.id)
    if not isinstance(files, dict) or not all(_is_side_file(n, d) for n, d in files.items()):
        raise fail("E0745", f"provenance of {record.id} has malformed side files", node=record.id)
    if predicate.get("blueprint") != record.blueprint:
        raise fail("E0746", f"provenance of {record.id} is for another blueprint", node=record.id)
    return predicate


def _is_side_file(name: str, digest: Any) -> bool:
    return bool(SIDE_NAME.match(name)) and isinstance(digest, str) and bool(_DIGEST.match(digest))


def refuse_revoked(document: TrustDocument, keyids: tuple[str, ...], seq: int, node: str) -> None:
    """E0755 when a signing key was void from ledger entry `seq` or before."""
    for keyid in keyids:
        if keyid in document.revoked_keys and seq >= document.revoked_keys[keyid]:
            raise fail(
                "E0755",
                f"signed by key {keyid[:16]}, revoked from ledger entry {document.revoked_keys[keyid]}",
                node=node,
                hint="prove it again with a current key",
            )
