"""Looking for what went wrong: every check continues after the first
finding and says what kind of wrong it is."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from esper_ir.diagnostics import EXIT_INTEGRITY, EXIT_OK, EXIT_REVOKED, EXIT_UNTRUSTED, EsperError
from library import rows
from library.canon import sha256_hex
from library.core import Core
from library.errors import fail
from library.loading import open_provenance, open_verdict
from library.manifest import unpack
from library.records import ARCHIVED, SUPERSEDED, VALIDATED, ArtifactRecord

CORRUPT, UNTRUSTED, UNAVAILABLE, REFUSED = "corrupt", "untrusted", "unavailable", "revoked"
_KINDS = {EXIT_UNTRUSTED: UNTRUSTED, EXIT_REVOKED: REFUSED}


@dataclass(frozen=True)
class Finding:
    """One thing wrong with one subject."""

    kind: str
    code: str
    subject: str
    message: str


@dataclass(frozen=True)
class VerifyReport:
    """All findings over `checked` artifacts."""

    checked: int
    findings: tuple[Finding, ...]

    def summary(self) -> str:
        """ "all sound", or the number of each kind."""
        counts = {
            k: sum(f.kind == k for f in self.findings) for k in (CORRUPT, UNTRUSTED, REFUSED, UNAVAILABLE)
        }
        return ", ".join(f"{n} {kind}" for kind, n in counts.items() if n) or "all sound"

    def exit_code(self) -> int:
        """11 if bytes are corrupt or unavailable, else 12 if untrusted, else 13 if revoked, else 0."""
        kinds = {f.kind for f in self.findings}
        if kinds & {CORRUPT, UNAVAILABLE}:
            return EXIT_INTEGRITY
        if UNTRUSTED in kinds:
            return EXIT_UNTRUSTED
        return EXIT_REVOKED if REFUSED in kinds else EXIT_OK

    def to_json(self) -> dict[str, Any]:
        findings = [f.__dict__ for f in self.findings]
        return {"checked": self.checked, "summary": self.summary(), "findings": findings, "ok": not findings}


def finding_of(subject: str, error: EsperError) -> Finding:
    """What an error means for `verify`."""
    kind = UNAVAILABLE if error.code == "E0731" else _KINDS.get(error.exit_code, CORRUPT)
    return Finding(kind, error.code, subject, error.message)


def verify_library(lib: Core, records: Iterable[ArtifactRecord], *, contents: bool) -> VerifyReport:
    """Check signatures and presence of every record's objects; with `contents` also read and hash every byte.

    Changes nothing: bytes that do not match stay where they are for `--repair` or for the next load to
    quarantine.
    """
    findings: list[Finding] = []
    checked = 0
    for record in records:
        checked += 1
        for check in (_check_objects, _check_provenance, _check_verdict):
            try:
                check(lib, record, contents)
            except EsperError as error:
                findings.append(finding_of(record.id, error))
    return VerifyReport(checked, tuple(findings))


def _check_objects(lib: Core, record: ArtifactRecord, contents: bool) -> None:
    if record.state == ARCHIVED:
        return
    for digest in (record.digest, *(f.digest for f in rows.side_files(lib.index, record.id))):
        if not contents and lib.blobs.has(digest):
            continue
        data = lib.blobs.read_raw(digest)
        if sha256_hex(data) != digest:
            raise fail("E0730", f"object {digest} holds other bytes than its name says")
        if digest == record.digest:
            unpack(data)


def _check_provenance(lib: Core, record: ArtifactRecord, contents: bool) -> None:
    open_provenance(lib.index, lib.trust, record)


def _check_verdict(lib: Core, record: ArtifactRecord, contents: bool) -> None:
    found = rows.verdict_rows(lib.index, record.id)
    if not found and record.state in (VALIDATED, SUPERSEDED):
        raise fail("E0740", f"{record.id} is marked {record.state} but has no verdict")
    for row in found:
        verdict = open_verdict(lib.trust.document(), record, row[6], row[8])
        if verdict.result != row[2]:
            raise fail("E0763", f"row says {row[2]}, the signed verdict {verdict.result}")
        if contents and sha256_hex(lib.blobs.read_raw(row[5])) != row[5]:
            raise fail("E0730", f"report {row[5]} holds other bytes than its name says")
