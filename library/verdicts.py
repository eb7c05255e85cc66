"""What validators sign about artifacts: verdicts (final) and annotations (versioned, the newest wins)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from library import dsse, ledger, query, rows
from library.canon import canonical_json, parse_json, sha256_hex
from library.core import Core
from library.errors import fail
from library.loading import open_provenance, open_verdict, refuse_revoked
from library.manifest import unpack
from library.records import PENDING_BENCHMARKING, REJECTED, VALIDATED, ArtifactRecord, VerdictRecord
from library.resolve import not_found
from library.trust import TrustDocument

MAX_REPORT_BYTES = 16 << 20
_MAX_VERSION = 1 << 53
ANNOTATED = ("generated_tags", "risk_score", "risk_basis", "conf_level", "urabrask_interest")


def known(core: Core, artifact_id: str) -> ArtifactRecord:
    """By exact id; E0721 with the nearest."""
    found = rows.artifact(core.index, artifact_id)
    if found is None:
        raise not_found(core.index, artifact_id, "artifact")
    return found


def record_verdict(
    core: Core, artifact_id: str, report: Mapping[str, Any], *, passed: bool, reason: str, card: str
) -> VerdictRecord:
    """See Library.record_verdict."""
    core.refuse_readonly()
    record = known(core, artifact_id)
    _refuse_final(record, VALIDATED if passed else REJECTED)
    unpack(core.blobs.read(record.digest))
    open_provenance(core.index, core.trust, record)
    signer, text = core.signer("validator"), canonical_json(dict(report))
    if len(text) > MAX_REPORT_BYTES:
        raise fail("E0735", f"report of {len(text)} bytes exceeds {MAX_REPORT_BYTES}")
    values = {
        "arch": record.arch,
        "card": card,
        "result": VALIDATED if passed else REJECTED,
        "reason": reason,
        "report": sha256_hex(text),
        "time": time.time(),
    }
    predicate = {**values, "policy": report.get("policy"), "blueprint": record.blueprint, "stage": 1}
    payload = dsse.statement(record.id, record.digest, dsse.VERDICT, predicate)
    values |= {"envelope": dsse.seal(payload, dsse.IN_TOTO, [signer]), "keyid": signer.keyid}
    with core.publishing({values["report"]: text}, f"verdict {artifact_id}"):
        insert_verdict(core, artifact_id, values, report)
    found = read_verdict(core, known(core, artifact_id))
    assert found is not None
    return found


def _refuse_final(record: ArtifactRecord, result: str) -> None:
    if record.state != PENDING_BENCHMARKING and (record.state, result) != (VALIDATED, VALIDATED):
        raise fail(
            "E0725",
            f"{record.id} is {record.state}; a verdict {result} cannot change that",
            node=record.id,
            hint="revoke it, or compile again",
        )


def insert_verdict(
    core: Core, artifact_id: str, values: Mapping[str, Any], report: Mapping[str, Any]
) -> None:
    """The rows and ledger entry of a verdict whose signature holds; inside a transaction. E0725."""
    record, result = known(core, artifact_id), values["result"]
    _refuse_final(record, result)
    data = {k: values[k] for k in ("result", "reason", "report", "keyid", "arch", "card")}
    data["envelope"] = sha256_hex(values["envelope"])
    seq = ledger.append(core.index, "artifact.verdict", artifact_id, data)
    num = rows.artifact_num(core.index, artifact_id)
    rows.add_verdict(core.index, num, {**values, "seq": seq})
    if record.state != result:
        rows.set_artifact_state(core.index, artifact_id, result, values["reason"])
    if result == VALIDATED:
        query.write_facts(core.index, num, record, merged(report, newest_annotation(core, record)))


def read_verdict(core: Core, record: ArtifactRecord) -> VerdictRecord | None:
    """The newest verdict with its report, both as they were signed; None while PENDING."""
    found = rows.verdict_rows(core.index, record.id)
    return _opened(core, record, found[0]) if found else None


def read_verdicts(core: Core, record: ArtifactRecord) -> list[VerdictRecord]:
    """Every verdict with its report, newest first: one per card and toolchain that it was measured with."""
    return [_opened(core, record, row) for row in rows.verdict_rows(core.index, record.id)]


def _opened(core: Core, record: ArtifactRecord, row: tuple[Any, ...]) -> VerdictRecord:
    *_, envelope, _, seq = row
    said = open_verdict(core.trust.document(), record, envelope, seq)
    content = parse_json(core.blobs.read(said.report))
    if not isinstance(content, dict):
        raise fail("E0745", f"report on {record.id} is not an object", node=record.id)
    return VerdictRecord(
        record.id, said.arch, said.card, said.result, said.reason, said.keyid, said.time, seq, content
    )


def annotate(core: Core, artifact_id: str, annotation: Mapping[str, Any]) -> int:
    """Sign a new annotation over a VALIDATED artifact; its version. Fields: ANNOTATED, others E0720."""
    core.refuse_readonly()
    unknown = sorted(set(annotation) - set(ANNOTATED))
    if unknown:
        raise fail("E0720", f"annotation fields not known: {', '.join(unknown)}")
    signer = core.signer("validator")
    with core.index.write():
        record = known(core, artifact_id)
        if record.state != VALIDATED:
            text = f"{artifact_id} is {record.state}; only VALIDATED ones are annotated"
            raise fail("E0724", text, node=artifact_id)
        version = rows.annotation_version(core.index, artifact_id) + 1
        predicate = {"version": version, "time": time.time(), "annotation": dict(annotation)}
        payload = dsse.statement(record.id, record.digest, dsse.ANNOTATION, predicate)
        envelope = dsse.seal(payload, dsse.IN_TOTO, [signer])
        insert_annotation(core, record, envelope, signer.keyid, predicate)
    core.after_write()
    return version


def insert_annotation(
    core: Core, record: ArtifactRecord, envelope: bytes, keyid: str, predicate: Mapping[str, Any]
) -> None:
    """The row and ledger entry of an annotation whose signature holds; inside a transaction."""
    version = predicate["version"]
    data = {"version": version, "envelope": sha256_hex(envelope), "keyid": keyid}
    seq = ledger.append(core.index, "artifact.annotated", record.id, data)
    num = rows.artifact_num(core.index, record.id)
    rows.add_annotation(core.index, num, (version, keyid, envelope, predicate["time"], seq))
    rank_again(core, record)


def newest_annotation(core: Core, record: ArtifactRecord) -> dict[str, Any]:
    """The newest annotation, signature verified; {} without one."""
    row = rows.annotation_row(core.index, record.id)
    if row is None:
        return {}
    version, envelope, seq = row
    _, predicate = open_annotation(core.trust.document(), record, envelope, seq)
    if predicate["version"] != version:
        raise fail("E0746", f"annotation stored as version {version} is another", node=record.id)
    return dict(predicate["annotation"])


def read_annotations(core: Core, record: ArtifactRecord) -> list[dict[str, Any]]:
    """Every annotation as {version, time, annotation}, oldest first, signatures verified."""
    document, found = core.trust.document(), rows.annotation_rows(core.index, record.id)
    return [open_annotation(document, record, envelope, seq)[1] for envelope, seq in found]


def open_annotation(
    document: TrustDocument, record: ArtifactRecord, envelope: bytes, seq: int
) -> tuple[str, dict[str, Any]]:
    """Signing key and predicate {version, time, annotation} of a validator's annotation: E0744 to E0746."""
    what = f"annotation of {record.id}"
    opened = dsse.open_envelope(envelope, dsse.IN_TOTO, document.role_keys("validator"), what=what)
    refuse_revoked(document, opened.keyids, seq, record.id)
    predicate = dsse.read_statement(opened.payload, record.id, record.digest, dsse.ANNOTATION)
    if (
        predicate.keys() != {"version", "time", "annotation"}
        or type(predicate["version"]) is not int
        or not 0 < predicate["version"] < _MAX_VERSION
        or type(predicate["time"]) not in (int, float)
        or not abs(predicate["time"]) < _MAX_VERSION
        or not isinstance(predicate["annotation"], dict)
    ):
        raise fail("E0745", f"{what} is malformed", node=record.id)
    return opened.keyids[0], predicate


def rank_again(core: Core, record: ArtifactRecord) -> None:
    """Write what find() knows about a VALIDATED artifact from its signed verdict and annotation; inside a
    transaction.
    """
    query.write_facts(
        core.index, rows.artifact_num(core.index, record.id), record, signed_facts(core, record)
    )


def signed_facts(core: Core, record: ArtifactRecord) -> dict[str, Any]:
    """What validators signed about an artifact: the newest verdict's report under the newest annotation."""
    verdict = read_verdict(core, record)
    return merged(verdict.report if verdict else {}, newest_annotation(core, record))


def merged(report: Mapping[str, Any], annotation: Mapping[str, Any]) -> dict[str, Any]:
    """An annotation speaks about its own fields only, whatever else it holds."""
    return {**report, **{name: annotation[name] for name in ANNOTATED if name in annotation}}
