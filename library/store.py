"""The store: one directory, many processes, no server.

with Library.open(path, roles=("compiler",)) as lib:     # ESPER_LIBRARY, else the user's data directory
    lib.put_blueprint(blueprint_id, text, name)          # -> BlueprintRecord
    record = lib.put_artifact(container, side_files={"k.ptx": ptx}, provenance={})  # -> ArtifactRecord
with Library.open(path, roles=("validator",)) as lib:
    lib.load(record.id, allow_unvalidated=True)          # -> LoadedArtifact(record, container, None)
    lib.record_verdict(record.id, report, passed=True)   # -> VerdictRecord, signed; state VALIDATED
with Library.open(path, readonly=True) as lib:
    lib.warm()                                           # imports and trust store, before the first load
    lib.load(record.id)                                  # one read, one hash, verdict verified
    lib.resolve("9f2c41d0")                              # id, unique prefix or blueprint id -> record
    lib.artifacts(blueprint=None, state="VALIDATED")     # -> list[ArtifactRecord]
    lib.verdict(record.id), lib.side_file(record.id, "k.ptx"), lib.read(record.id)
    lib.find(KernelQuery(required_tags=("high_speed",))) # -> KernelQueryResult, ranked, with refusals
    lib.put_measurement(group, arch, toolchain, {}), lib.measurements(group, arch, toolchain)
set_blueprint_state, supersede, revoke, archive, restore: legal transitions only (E0724), one ledger
entry each. Signing opens only the keys of `roles`. Refusals are EsperError E07xx with exit code 10 not
found, 11 corrupt, 12 untrusted, 13 revoked or archived, 14 conflict or ambiguous, 15 full or locked,
16 not writable. The user's keys and trust store live in ESPER_KEYS, else the configuration directory.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from library import artifacts, curate, gc, ledger, lineage, outcomes, query, rows, verdicts
from library.canon import parse_json, sha256_hex
from library.contracts import CompiledKernelArtifact, FieldReport, KernelQuery, KernelQueryResult
from library.core import Core
from library.errors import fail
from library.loading import SIDE_NAME, load_artifact, open_provenance
from library.manifest import blueprint_text, unpack
from library.records import (
    ARCHIVED,
    ARTIFACT_MOVES,
    BLUEPRINT_MOVES,
    REVOKED,
    SUPERSEDED,
    VALIDATED,
    ArtifactRecord,
    BlueprintRecord,
    LoadedArtifact,
    SideFile,
    VerdictRecord,
    check_move,
)
from library.resolve import not_found, resolve_artifact, resolve_blueprint

_HEX64 = re.compile(r"[0-9a-f]{64}\Z")


class Library(Core):
    """An open library. Safe to use from several threads; each process opens its own."""

    _found: query.Finder | None = None

    # -- blueprints --------------------------------------------------------------------------------

    def put_blueprint(self, blueprint_id: str, text: bytes, name: str) -> BlueprintRecord:
        """Keep a blueprint's JSON text under its canonical hash (64 hex). The first text of an id stays."""
        self.refuse_readonly()
        if not _HEX64.match(blueprint_id):
            raise fail("E0720", f"blueprint id must be 64 hexadecimal digits, not {blueprint_id[:80]!r}")
        parse_json(text)
        known = rows.blueprint(self.index, blueprint_id)
        if known is not None and self.blobs.has(known.text_digest):
            return known
        digest = sha256_hex(text)
        with self.publishing({digest: text}, f"put blueprint {blueprint_id[:12]}"):
            record = artifacts.insert_blueprint(self, blueprint_id, digest, name)
        return record

    def set_blueprint_state(self, blueprint_id: str, state: str, reason: str = "") -> BlueprintRecord:
        """One legal transition of a blueprint, E0724 otherwise."""
        with self.index.write():
            record = rows.blueprint(self.index, blueprint_id)
            if record is None:
                raise not_found(self.index, blueprint_id, "blueprint")
            check_move(BLUEPRINT_MOVES, blueprint_id, record.state, state)
            ledger.append(
                self.index,
                "blueprint.state",
                blueprint_id,
                {"from": record.state, "to": state, "reason": reason},
            )
            rows.set_blueprint_state(self.index, blueprint_id, state, reason)
        self.after_write()
        return self.blueprint(blueprint_id)

    def blueprint(self, id_or_prefix: str) -> BlueprintRecord:
        """By id or unique prefix of at least 4 hex digits: E0721, E0722."""
        return resolve_blueprint(self.index, id_or_prefix)

    def blueprints(self) -> list[BlueprintRecord]:
        """All, by name."""
        return rows.blueprints(self.index)

    def blueprint_text(self, blueprint_id: str) -> bytes:
        """The JSON text, verified against its digest."""
        return self.blobs.read(self.blueprint(blueprint_id).text_digest)

    # -- artifacts ---------------------------------------------------------------------------------

    def put_artifact(
        self,
        container: bytes,
        *,
        side_files: Mapping[str, bytes] | None = None,
        provenance: Mapping[str, Any] | None = None,
    ) -> ArtifactRecord:
        """Keep a container as PENDING_BENCHMARKING, signed by the compiler key. Durable when it returns.

        The same id with the same digest returns the record; with another digest E0723. Nothing is kept on
        failure.
        """
        self.refuse_readonly()
        unpacked, digest = unpack(container), sha256_hex(container)
        files = dict(side_files or {})
        for name in files:
            if not SIDE_NAME.match(name):
                raise fail("E0720", f"side file name {name[:80]!r} must be [A-Za-z0-9._+-], at most 128 long")
        known = artifacts.known_content(self, unpacked.manifest, digest)
        if known is not None and self.blobs.has(digest):
            return known
        text = blueprint_text(unpacked.manifest).encode()
        beside = [SideFile(name, sha256_hex(data), len(data)) for name, data in sorted(files.items())]
        envelope = artifacts.sign_provenance(self, unpacked, digest, beside, provenance or {})
        contents = {digest: container, sha256_hex(text): text, **{f.digest: files[f.name] for f in beside}}
        with self.publishing(contents, f"put {unpacked.manifest['artifact_id']}"):
            record = artifacts.insert_artifact(self, unpacked, digest, sha256_hex(text), envelope, beside)
        return record

    def resolve(self, id_or_prefix: str) -> ArtifactRecord:
        """Artifact id, unique prefix, or blueprint id or prefix (4 hex
        or more) with one artifact: E0721, E0722."""
        return resolve_artifact(self.index, id_or_prefix)

    def artifacts(
        self, blueprint: str | None = None, state: str | None = None, limit: int | None = None
    ) -> list[ArtifactRecord]:
        """Those of one blueprint id and one state where given, oldest first, at most `limit`."""
        return rows.artifacts(self.index, blueprint=blueprint, state=state, limit=limit)

    def record(self, artifact_id: str) -> ArtifactRecord:
        """By exact id; E0721 with the nearest."""
        return verdicts.known(self, artifact_id)

    def read(self, artifact_id: str) -> bytes:
        """The container's bytes, hash verified (E0730 quarantines). For copying;
        loading goes through `load`."""
        return self.blobs.read(self.record(artifact_id).digest)

    def load(self, artifact_id: str, *, allow_unvalidated: bool = False) -> LoadedArtifact:
        """Verified bytes of an exact id under a trusted verdict;
        see library.loading for the order of checks."""
        return load_artifact(
            self.index, self.blobs, self.trust, artifact_id, allow_unvalidated=allow_unvalidated
        )

    def side_files(self, artifact_id: str) -> list[SideFile]:
        """What is kept beside an artifact."""
        return rows.side_files(self.index, self.record(artifact_id).id)

    def side_file(self, artifact_id: str, name: str) -> bytes:
        """One of them, as the compiler signed it: hash and signature verified. E0721 without that name."""
        signed = open_provenance(self.index, self.trust, self.record(artifact_id))["side_files"]
        if name in signed:
            return self.blobs.read(signed[name])
        have = ", ".join(sorted(signed)) or "none"
        raise fail("E0721", f"{artifact_id} has no side file {name!r} (it has {have})", node=artifact_id)

    # -- verdicts and transitions ------------------------------------------------------------------

    def record_verdict(
        self, artifact_id: str, report: Mapping[str, Any], *, passed: bool, reason: str = "", card: str = ""
    ) -> VerdictRecord:
        """Sign what the gauntlet found, keep it, and make the artifact VALIDATED or REJECTED.

        The bytes and the compiler's signature are verified once more. Final: a later pass on a VALIDATED
        artifact adds a verdict (another card); a contradiction is E0725.
        """
        return verdicts.record_verdict(self, artifact_id, report, passed=passed, reason=reason, card=card)

    def verdict(self, artifact_id: str) -> VerdictRecord | None:
        """The newest verdict with its report, signature verified; None while PENDING."""
        return verdicts.read_verdict(self, self.record(artifact_id))

    def verdicts(self, artifact_id: str) -> list[VerdictRecord]:
        """Every verdict with its report, newest first, signatures verified."""
        return verdicts.read_verdicts(self, self.record(artifact_id))

    def annotate(self, artifact_id: str, annotation: Mapping[str, Any]) -> int:
        """Sign tags, risk, confidence and interest over a VALIDATED artifact; the newest version wins."""
        return verdicts.annotate(self, artifact_id, annotation)

    def annotation(self, artifact_id: str) -> dict[str, Any]:
        """The newest annotation, signature verified; {} without one."""
        return verdicts.newest_annotation(self, self.record(artifact_id))

    def annotations(self, artifact_id: str) -> list[dict[str, Any]]:
        """Every annotation as {version, time, annotation}, oldest first, signatures verified."""
        return verdicts.read_annotations(self, self.record(artifact_id))

    def _finder(self) -> query.Finder:
        if self._found is None:
            self._found = query.Finder(self.index)
        return self._found

    def contract(self, artifact_id: str) -> CompiledKernelArtifact:
        """The artifact as the record that other tools exchange, from its signed statements."""
        record = self.record(artifact_id)
        signed = open_provenance(self.index, self.trust, record)
        found, build = self.verdict(artifact_id), signed["build"]
        metadata = {
            "pipeline": record.pipeline,
            "compilation_seconds": build.get("compilation_seconds"),
            "peak_memory_gb": build.get("peak_memory_gb"),
            "toolchain_version": signed["toolchain"],
            "optimization_flags": build.get("optimization_flags", []),
        }
        report = dict(found.report) if found else None
        place = f"sha256:{record.digest}"
        return CompiledKernelArtifact(
            record.id, record.blueprint, record.state, record.pipeline, place, metadata, report
        )

    def find(self, wanted: KernelQuery, *, explain: bool = False) -> KernelQueryResult:
        """Validated artifacts that fit, best first; with `explain` also why each other one does not."""
        return self._finder().find(wanted, explain=explain)

    def tags(self) -> frozenset[str]:
        """The tags that a query may name; any other is taken for a misspelt one."""
        return self._finder().tags()

    def _retire(self, artifact_id: str, state: str, reason: str, *, by: str = "") -> None:
        """To SUPERSEDED or REVOKED, inside a transaction: E0724."""
        record = self.record(artifact_id)
        check_move(ARTIFACT_MOVES, artifact_id, record.state, state)
        data = {"from": record.state, "to": state, "reason": reason, "by": by}
        ledger.append(self.index, "artifact.state", artifact_id, data)
        rows.set_artifact_state(self.index, artifact_id, state, reason, by)
        query.drop_facts(self.index, rows.artifact_num(self.index, artifact_id))

    def supersede(self, artifact_id: str, by: str, reason: str = "") -> ArtifactRecord:
        """A recompiled artifact proven better takes its place; the old one still loads by its exact id."""
        with self.index.write():
            better, old = self.record(by), self.record(artifact_id)
            if better.state != VALIDATED or better.blueprint != old.blueprint or better.id == old.id:
                text = f"{by} cannot supersede {artifact_id}: not VALIDATED, itself, or of another blueprint"
                raise fail("E0724", text, node=by)
            if old.state == ARCHIVED:
                raise fail("E0724", f"{artifact_id} is archived: restore it first", node=artifact_id)
            self._retire(artifact_id, SUPERSEDED, reason, by=by)
        self.after_write()
        return self.record(artifact_id)

    def revoke(self, artifact_id: str, reason: str) -> ArtifactRecord:
        """Never load it again. Final."""
        with self.index.write():
            self._retire(artifact_id, REVOKED, reason)
        self.after_write()
        return self.record(artifact_id)

    # -- lineage, outcomes, keeping ------------------------------------------------------------------

    def add_edge(self, parent: str, child: str, relation: str, mutation: str = "") -> None:
        """Blueprint `child` was made from `parent`; see library.lineage."""
        lineage.add_edge(self, parent, child, relation, mutation)

    def record_outcomes(self, reports: Iterable[FieldReport]) -> int:
        """Keep field reports, each once; how many were new."""
        return outcomes.record_outcomes(self, reports)

    def outcomes(self, artifact_id: str) -> list[FieldReport]:
        """Field reports about one artifact, in the order they came."""
        return outcomes.outcomes(self, artifact_id)

    def timed_outcomes(self, artifact_id: str) -> list[tuple[float, FieldReport]]:
        """The same, each with the time it was taken in (seconds since 1970)."""
        return outcomes.timed_outcomes(self, artifact_id)

    def troubled(self, blueprint: str | None = None) -> list[str]:
        """Ids of artifacts that crashed or differed in use and were not proven again since."""
        return rows.troubled(self.index, blueprint)

    def archive(self, artifact_ids: Sequence[str], place: Path, reason: str = "") -> int:
        """Move artifacts into a bundle at `place` and mark them ARCHIVED; see library.curate."""
        return curate.archive(self, artifact_ids, place, reason)

    def restore(self, place: Path) -> list[str]:
        """Bring archived artifacts back from a bundle, verified, in the state they had."""
        return curate.restore(self, place)

    def collect(self, *, grace_s: float = gc.GRACE_S, dry_run: bool = True) -> gc.GcReport:
        """Remove bytes that no row names; see library.gc."""
        return gc.collect(self, grace_s=grace_s, dry_run=dry_run)

    # -- measurements ----------------------------------------------------------------------------------

    def put_measurement(
        self, group_hash: str, arch: str, toolchain: str, measurement: Mapping[str, Any]
    ) -> None:
        """Keep one timing for the tuner; see library.measurements."""
        self.timings().put(group_hash, arch, toolchain, measurement)

    def measurements(self, group_hash: str, arch: str, toolchain: str) -> list[dict[str, Any]]:
        """Every timing kept under this key, oldest first."""
        return self.timings().get(group_hash, arch, toolchain)
