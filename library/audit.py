"""Looking for what went wrong: every check continues after the first
finding and says what kind of wrong it is."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from esper_ir.diagnostics import EXIT_INTEGRITY, EXIT_OK, EXIT_REVOKED, EXIT_UNTRUSTED, EsperError
from library import rows
from library.artifacts import record_of
from library.canon import sha256_hex
from library.core import Core
from library.errors import fail
from library.loading import open_provenance, open_verdict
from library.manifest import unpack
from library.query import facts_of, known_facts
from library.records import SUPERSEDED, VALIDATED, ArtifactRecord, Verdict
from library.verdicts import open_annotation, signed_facts

CORRUPT, UNTRUSTED, UNAVAILABLE, REFUSED, EXPIRED = (
    "corrupt",
    "untrusted",
    "unavailable",
    "revoked",
    "expired",
)
_BY_CODE = {"E0731": UNAVAILABLE, "E0749": EXPIRED}
# Columns of an artifact's row that its container states.
_OF_CONTAINER = (
    "id", "size", "blueprint", "name", "target", "kind", "arch", "pipeline", "version", "objective",
    "determinism", "interface",
)  # fmt: skip
_AGAIN = 5
_KINDS = {EXIT_UNTRUSTED: UNTRUSTED, EXIT_REVOKED: REFUSED}


@dataclass(frozen=True)
class Finding:
    """One thing wrong with one subject; `hint` says what to do."""

    kind: str
    code: str
    subject: str
    message: str
    hint: str = ""


@dataclass(frozen=True)
class VerifyReport:
    """All findings over `checked` artifacts."""

    checked: int
    findings: tuple[Finding, ...]

    def summary(self) -> str:
        """ "all sound", or the number of each kind."""
        counts = {
            k: sum(f.kind == k for f in self.findings)
            for k in (CORRUPT, UNTRUSTED, REFUSED, EXPIRED, UNAVAILABLE)
        }
        return ", ".join(f"{n} {kind}" for kind, n in counts.items() if n) or "all sound"

    def joined(self, more: Iterable[Finding]) -> VerifyReport:
        """With further findings."""
        return VerifyReport(self.checked, (*self.findings, *more))

    def exit_code(self) -> int:
        """11 if bytes are corrupt or unavailable, 12 if untrusted, 13 if revoked or expired, else 0."""
        kinds = {f.kind for f in self.findings}
        if kinds & {CORRUPT, UNAVAILABLE}:
            return EXIT_INTEGRITY
        if UNTRUSTED in kinds:
            return EXIT_UNTRUSTED
        return EXIT_REVOKED if kinds else EXIT_OK

    def hints(self) -> list[str]:
        """What to do, each thing once."""
        return list(dict.fromkeys(f.hint for f in self.findings if f.hint))

    def to_json(self) -> dict[str, Any]:
        findings = [f.__dict__ for f in self.findings]
        return {"checked": self.checked, "summary": self.summary(), "findings": findings, "ok": not findings}


def finding_of(subject: str, error: EsperError) -> Finding:
    """What an error means for `verify`."""
    kind = _BY_CODE.get(error.code) or _KINDS.get(error.exit_code, CORRUPT)
    return Finding(kind, error.code, subject, error.message, error.hint or "")


def verify_library(lib: Core, records: Iterable[ArtifactRecord], *, contents: bool) -> VerifyReport:
    """Check signatures and presence of every record's objects; with `contents` also read and hash every byte
    and compare the rows with what was signed.

    Changes nothing: bytes that do not match stay where they are for `--repair` or for the next load to
    quarantine. Writers may go on meanwhile: a record that changed while it was looked at is looked at again.
    """
    findings: list[Finding] = []
    look = _Look(lib, contents, set())
    checked = 0
    for record in records:
        checked += 1
        findings += _looked_at(look, record)
    return VerifyReport(checked, tuple(findings))


def verify_blueprints(lib: Core, *, contents: bool) -> list[Finding]:
    """The same for the texts of all blueprints, those without an artifact included."""
    found: list[Finding] = []
    for record in rows.blueprints(lib.index):
        try:
            if contents or not lib.blobs.has(record.text_digest):
                _read(_Look(lib, contents, set()), record.text_digest)
        except EsperError as error:
            found.append(finding_of(record.id, error))
    return found


@dataclass(frozen=True)
class _Look:
    """How to look: `sound` are blueprints whose text was found good already."""

    lib: Core
    contents: bool
    sound: set[str]


def _looked_at(look: _Look, record: ArtifactRecord) -> list[Finding]:
    found: list[Finding] = []
    for _ in range(_AGAIN):
        found = []
        before = rows.last_entry(look.lib.index)
        for check in _CHECKS:
            try:
                check(look, record)
            except EsperError as error:
                finding = finding_of(record.id, error)
                found += [finding] if finding not in found else []
        now = rows.artifact(look.lib.index, record.id)
        if not found or now is None or (now == record and before == rows.last_entry(look.lib.index)):
            break
        record = now
    return found


def _read(look: _Look, digest: str) -> bytes:
    data = look.lib.blobs.read_raw(digest)
    if sha256_hex(data) != digest:
        raise fail("E0730", f"object {digest} holds other bytes than its name says")
    return data


def _check_objects(look: _Look, record: ArtifactRecord) -> None:
    if record.away:
        return
    files = [f.digest for f in rows.side_files(look.lib.index, record.id)]
    for digest in (record.digest, *files):
        if not look.contents and look.lib.blobs.has(digest):
            continue
        data = _read(look, digest)
        if digest == record.digest:
            _check_columns(record, record_of(unpack(data), digest, record.seq))


def _check_columns(record: ArtifactRecord, said: ArtifactRecord) -> None:
    row, container = record.to_json(), said.to_json()
    odd = [name for name in _OF_CONTAINER if row[name] != container[name]]
    if odd:
        text = f"row says {odd[0]} {row[odd[0]]!r}, the container {container[odd[0]]!r}"
        raise fail("E0763", f"{record.id}: {text}", node=record.id)


def _check_text(look: _Look, record: ArtifactRecord) -> None:
    known = rows.blueprint(look.lib.index, record.blueprint)
    if known is None:
        raise fail("E0763", f"{record.id} is of blueprint {record.blueprint}, which has no row")
    if known.id in look.sound or (not look.contents and look.lib.blobs.has(known.text_digest)):
        return
    _read(look, known.text_digest)
    look.sound.add(known.id)


def _check_provenance(look: _Look, record: ArtifactRecord) -> None:
    signed = open_provenance(look.lib.index, look.lib.trust, record)["side_files"]
    listed = rows.side_files(look.lib.index, record.id)
    if {f.name: f.digest for f in listed} != signed:
        raise fail("E0763", f"rows of side files of {record.id} are not those that the compiler signed")
    for file in listed if not record.away else ():
        if look.lib.blobs.has(file.digest) and look.lib.blobs.size(file.digest) != file.size:
            raise fail("E0763", f"row says {file.size} bytes for {file.name} of {record.id}")


def _check_verdicts(look: _Look, record: ArtifactRecord) -> None:
    found = rows.verdict_rows(look.lib.index, record.id)
    if not found and record.state in (VALIDATED, SUPERSEDED):
        raise fail("E0740", f"{record.id} is marked {record.state} but has no verdict")
    for arch, card, result, reason, keyid, report, envelope, when, seq in found:
        said = open_verdict(look.lib.trust.document(), record, envelope, seq)
        row = Verdict(record.id, arch, result, keyid, when, card, reason, report)
        if row != said:
            raise fail("E0763", f"row says {row}, the signed verdict {said}")
        if look.contents:
            _read(look, report)


def _check_annotations(look: _Look, record: ArtifactRecord) -> None:
    text = """SELECT n.version, n.keyid, n.envelope, n.time, n.seq FROM annotations n
        JOIN artifacts a ON a.num = n.artifact WHERE a.id = ?"""
    for version, keyid, envelope, when, seq in look.lib.index.rows(text, (record.id,)):
        signer, said = open_annotation(look.lib.trust.document(), record, envelope, seq)
        if (version, keyid, when) != (said["version"], signer, said["time"]):
            raise fail("E0763", f"row says annotation {version} by {keyid[:16]}, it is {said['version']}")


def _check_facts(look: _Look, record: ArtifactRecord) -> None:
    """What find() ranks by, made again from what was signed."""
    if not look.contents:
        return
    wanted = None
    if record.state == VALIDATED:
        wanted = facts_of(record, signed_facts(look.lib, record))
    found = known_facts(look.lib.index, record.id)
    if found != wanted:
        raise fail("E0763", f"queries know {found} of {record.id}, it was signed as {wanted}")


_CHECKS = (_check_objects, _check_text, _check_provenance, _check_verdicts, _check_annotations, _check_facts)
