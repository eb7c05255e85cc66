"""Exchange between libraries: everything or nothing, and nothing hostile."""

from __future__ import annotations

import base64
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from esper_ir.diagnostics import EsperError
from library import dsse
from library.audit import verify_library
from library.bundle import MAGIC, export_bundle, import_bundle, read_bundle, read_file
from library.canon import canonical_json, parse_json, sha256_hex
from library.contracts import KernelQuery
from library.history import audit
from library.keys import new_key
from library.records import PENDING_BENCHMARKING, REJECTED, VALIDATED
from library.store import Library
from library.trust import Role, TrustStore
from tests.library.helpers import contents, make_container, validated

HEAD = len(MAGIC) + 8


@pytest.fixture
def bundle(lib: Library, tmp_path: Path) -> bytes:
    """Three artifacts: proven with an annotation and a side file, rejected, pending."""
    report = {"policy": "p", "generated_tags": ["trainable"], "wep": {"latency_ms_p99": 1.0}}
    record = lib.put_artifact(make_container(1), side_files={"k.ptx": b"ptx"})
    lib.record_verdict(record.id, report, passed=True)
    lib.annotate(record.id, {"risk_score": 0.25})
    rejected = lib.put_artifact(make_container(2)).id
    lib.record_verdict(rejected, {}, passed=False, reason="why")
    lib.put_artifact(make_container(3, blueprint=1))
    size = export_bundle(lib, lib.artifacts(), tmp_path / "b.esper")
    data = read_file(tmp_path / "b.esper")
    assert len(data) == size
    return data


@pytest.fixture
def other(home: Path, tmp_path: Path) -> Any:
    with Library.open(tmp_path / "other") as opened:
        yield opened


def test_a_bundle_brings_everything(bundle: bytes, lib: Library, other: Library) -> None:
    ids = import_bundle(other, bundle)
    assert sorted(ids) == sorted(r.id for r in lib.artifacts())
    assert {r.state for r in other.artifacts()} == {VALIDATED, REJECTED, PENDING_BENCHMARKING}
    proven = other.artifacts(state=VALIDATED)[0]
    assert other.load(proven.id).container.data == make_container(1)
    assert other.side_file(proven.id, "k.ptx") == b"ptx"
    assert other.annotation(proven.id) == {"risk_score": 0.25}
    verdict = other.verdict(proven.id)
    assert verdict is not None and verdict.report["policy"] == "p"
    assert import_bundle(other, bundle) == []


def test_dry_run_changes_nothing(bundle: bytes, other: Library) -> None:
    before = contents(other.home)
    assert len(import_bundle(other, bundle, dry_run=True)) == 3
    assert contents(other.home) == before


def test_a_bundle_of_unknown_keys_is_refused(bundle: bytes, home: Path, tmp_path: Path) -> None:
    with Library.open(tmp_path / "stranger", trust=tmp_path / "their-keys") as stranger:
        before = contents(stranger.home)
        with pytest.raises(EsperError) as error:
            import_bundle(stranger, bundle)
        assert error.value.exit_code == 12
        assert contents(stranger.home) == before


def respell(data: bytes, change: Callable[[dict[str, Any], dict[str, bytes]], None]) -> bytes:
    """The bundle with its index or objects changed and its frame made to fit again."""
    index, objects = read_bundle(data)
    change(index, objects)
    order = [row["digest"] for row in index["objects"]]
    return framed(canonical_json(index), [objects.get(digest, b"") for digest in order])


def framed(text: bytes, parts: list[bytes]) -> bytes:
    return b"".join([MAGIC, struct.pack("<Q", len(text)), text, *parts])


def drop_object(index: dict[str, Any], objects: dict[str, bytes]) -> None:
    index["objects"].pop()


def add_object(index: dict[str, Any], objects: dict[str, bytes]) -> None:
    extra = b"stowaway"
    objects[sha256_hex(extra)] = extra
    index["objects"].append({"digest": sha256_hex(extra), "size": len(extra)})


def swap_verdicts(index: dict[str, Any], objects: dict[str, bytes]) -> None:
    """A good verdict moved to an artifact that was never proven."""
    index["artifacts"][2]["verdicts"] = index["artifacts"][0]["verdicts"]


def path_name(index: dict[str, Any], objects: dict[str, bytes]) -> None:
    index["artifacts"][0]["side_files"][0]["name"] = "../../../etc/cron.d/x"


def other_id(index: dict[str, Any], objects: dict[str, bytes]) -> None:
    index["artifacts"][0]["id"] = index["artifacts"][1]["id"]


def twice(index: dict[str, Any], objects: dict[str, bytes]) -> None:
    index["artifacts"].append(index["artifacts"][0])


def same_object_twice(index: dict[str, Any], objects: dict[str, bytes]) -> None:
    index["objects"].append(index["objects"][0])


def negative_size(index: dict[str, Any], objects: dict[str, bytes]) -> None:
    index["objects"][0]["size"] = -1


def bomb(index: dict[str, Any], objects: dict[str, bytes]) -> None:
    index["objects"][0]["size"] = 1 << 60


def other_origin(index: dict[str, Any], objects: dict[str, bytes]) -> None:
    index["origin"] = "0" * 32


def other_report(index: dict[str, Any], objects: dict[str, bytes]) -> None:
    index["artifacts"][0]["verdicts"][0]["report"] = index["artifacts"][1]["verdicts"][0]["report"]


def broken_proof(index: dict[str, Any], objects: dict[str, bytes]) -> None:
    index["artifacts"][0]["proof"]["index"] += 1


def unknown_field(index: dict[str, Any], objects: dict[str, bytes]) -> None:
    index["artifacts"][0]["run"] = "rm -rf"


def verdict_from_provenance(index: dict[str, Any], objects: dict[str, bytes]) -> None:
    """The compiler's signature where a validator's is wanted."""
    index["artifacts"][0]["verdicts"][0]["envelope"] = index["artifacts"][0]["envelope"]


HOSTILE = {
    drop_object: 11,
    add_object: 11,
    swap_verdicts: 12,
    path_name: 12,
    other_id: 11,
    twice: 11,
    same_object_twice: 11,
    negative_size: 11,
    bomb: 11,
    other_origin: 11,
    other_report: 12,
    broken_proof: 11,
    unknown_field: 11,
    verdict_from_provenance: 12,
}


@pytest.mark.parametrize("change", HOSTILE, ids=lambda change: change.__name__)
def test_hostile_bundles_bring_nothing(change: Any, bundle: bytes, other: Library) -> None:
    before = contents(other.home)
    with pytest.raises(EsperError) as error:
        import_bundle(other, respell(bundle, change))
    assert error.value.exit_code == HOSTILE[change], error.value
    assert contents(other.home) == before


def test_every_cut_is_refused(bundle: bytes, other: Library) -> None:
    before = contents(other.home)
    for end in [*range(0, len(bundle), 997), len(bundle) - 1]:
        with pytest.raises(EsperError) as error:
            import_bundle(other, bundle[:end])
        assert error.value.exit_code in (11, 15)
    with pytest.raises(EsperError):
        import_bundle(other, bundle + b"\0")
    assert contents(other.home) == before


def test_flipped_bytes_are_refused(bundle: bytes, other: Library) -> None:
    before = contents(other.home)
    for at in range(0, len(bundle), 131):
        changed = bytearray(bundle)
        changed[at] ^= 1
        with pytest.raises(EsperError) as error:
            import_bundle(other, bytes(changed))
        assert error.value.exit_code in (10, 11, 12, 15, 16), (at, error.value)
    assert contents(other.home) == before


def test_duplicate_keys_in_the_index(bundle: bytes, other: Library) -> None:
    (length,) = struct.unpack_from("<Q", bundle, len(MAGIC))
    text = bundle[HEAD : HEAD + length]
    doubled = text.replace(b'"origin":', b'"origin":"x","origin":', 1)
    data = MAGIC + struct.pack("<Q", len(doubled)) + doubled + bundle[HEAD + length :]
    with pytest.raises(EsperError) as error:
        import_bundle(other, data)
    assert error.value.code == "E0734" and parse_json(text)


def test_one_id_two_contents_brings_nothing(bundle: bytes, other: Library) -> None:
    other.put_artifact(make_container(3, blueprint=1, size=2500))
    before = contents(other.home)
    with pytest.raises(EsperError) as error:
        import_bundle(other, bundle)
    assert error.value.code == "E0723"
    assert contents(other.home) == before


def test_a_bundle_from_before_a_revocation_is_refused(bundle: bytes, other: Library) -> None:
    current = other.trust.document()
    keyid, raw = new_key(other.trust.home, "validator")
    old = current.roles["validator"].keyids[0]
    roles = {**current.roles, "validator": Role((old, keyid))}
    other.trust.amend(keys={**current.keys, keyid: raw}, roles=roles, revoked_keys={old: 1})
    with pytest.raises(EsperError) as error:
        import_bundle(other, bundle)
    assert error.value.code == "E0750"


def test_revoked_artifacts_are_not_exported(lib: Library, tmp_path: Path) -> None:
    artifact = validated(lib)
    lib.revoke(artifact, "bad")
    with pytest.raises(EsperError) as error:
        export_bundle(lib, lib.artifacts(), tmp_path / "b")
    assert error.value.code == "E0742" and not (tmp_path / "b").exists()


def test_links_are_not_followed(bundle: bytes, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "b.esper")
    with pytest.raises(EsperError) as error:
        read_file(tmp_path / "link")
    assert error.value.exit_code == 16


def test_a_bundle_proves_what_was_compiled_here(bundle: bytes, lib: Library, other: Library) -> None:
    """The same bytes compiled in two places, proven in one: the verdict travels, once."""
    mine = other.put_artifact(make_container(1)).id
    assert len(import_bundle(other, bundle)) == 3
    assert other.load(mine).verdict is not None
    assert import_bundle(other, bundle) == [] and len(other.index.rows("SELECT 1 FROM verdicts")) == 2


def test_a_contradicting_verdict_is_refused_whole(bundle: bytes, other: Library) -> None:
    mine = other.put_artifact(make_container(1)).id
    other.record_verdict(mine, {}, passed=False, reason="wrong here")
    before = contents(other.home)
    with pytest.raises(EsperError) as error:
        import_bundle(other, bundle)
    assert error.value.code == "E0725" and contents(other.home) == before


def test_a_revoked_artifact_does_not_come_back(bundle: bytes, other: Library) -> None:
    mine = other.put_artifact(make_container(1)).id
    other.revoke(mine, "known to be bad")
    assert mine not in import_bundle(other, bundle)
    assert other.record(mine).state == "REVOKED"


def test_what_was_compiled_here_gets_the_notes_too(bundle: bytes, other: Library) -> None:
    """Known here as PENDING: verdict and annotation arrive together."""
    mine = other.put_artifact(make_container(1)).id
    import_bundle(other, bundle)
    assert other.annotation(mine) == {"risk_score": 0.25}


def test_newer_annotations_travel(bundle: bytes, lib: Library, other: Library, tmp_path: Path) -> None:
    """The newest by number wins, wherever it was signed; an older one brings nothing."""
    import_bundle(other, bundle)
    proven = lib.artifacts(state=VALIDATED)[0].id
    assert lib.annotate(proven, {"risk_score": 0.125}) == 2
    export_bundle(lib, lib.artifacts(), tmp_path / "second")
    assert import_bundle(other, read_file(tmp_path / "second"), dry_run=True) == [proven]
    assert import_bundle(other, read_file(tmp_path / "second")) == [proven]
    assert other.annotation(proven) == {"risk_score": 0.125}
    (match,) = other.find(KernelQuery(required_tags=("trainable",))).matches
    assert match.risk == 0.125
    assert import_bundle(other, bundle) == [] == import_bundle(other, read_file(tmp_path / "second"))
    assert other.annotation(proven) == {"risk_score": 0.125}
    assert audit(other).findings == ()
    assert verify_library(other, other.artifacts(), contents=True).findings == ()


def note_on_a_refused_one(index: dict[str, Any], objects: dict[str, bytes]) -> None:
    index["artifacts"][1]["annotations"] = index["artifacts"][0]["annotations"]


def notes_twice(index: dict[str, Any], objects: dict[str, bytes]) -> None:
    index["artifacts"][0]["annotations"] *= 2


@pytest.mark.parametrize("change", [note_on_a_refused_one, notes_twice])
def test_annotations_out_of_place(change: Any, bundle: bytes, other: Library) -> None:
    before = contents(other.home)
    with pytest.raises(EsperError):
        import_bundle(other, respell(bundle, change))
    assert contents(other.home) == before


def test_an_annotated_artifact_that_was_refused_is_found_by_no_query(lib: Library, tmp_path: Path) -> None:
    """Signed as both, in another library: the verdict decides."""
    artifact = lib.put_artifact(make_container(5)).id
    record = lib.record(artifact)
    lib.record_verdict(artifact, {"generated_tags": ["trainable"]}, passed=False, reason="wrong")
    predicate = {"version": 1, "time": 1.0, "annotation": {"risk_score": 0.5}}
    payload = dsse.statement(artifact, record.digest, dsse.ANNOTATION, predicate)
    envelope = dsse.seal(payload, dsse.IN_TOTO, [lib.trust.signer("validator")])
    export_bundle(lib, lib.artifacts(), tmp_path / "b")

    def add(index: dict[str, Any], objects: dict[str, bytes]) -> None:
        index["artifacts"][0]["annotations"] = [base64.b64encode(envelope).decode()]

    with Library.open(tmp_path / "third") as third:
        import_bundle(third, respell(read_file(tmp_path / "b"), add))
        assert third.find(KernelQuery()).matches == ()
        assert verify_library(third, third.artifacts(), contents=True).findings == ()


DATA = Path(__file__).parent / "data"


def test_a_bundle_that_an_earlier_version_wrote(fast_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept as it was written, with the trust document of its day: formats are read for good."""
    monkeypatch.setattr("library.trust.time.time", lambda: 1_800_000_000.0)  # it expires in 2029
    trust = TrustStore(fast_tmp / "keys")
    trust.install((DATA / "trust-1.json").read_bytes())
    with Library.open(fast_tmp / "library", trust=trust.home, roles=()) as lib:
        (artifact,) = import_bundle(lib, read_file(DATA / "bundle-1.esper"))
        loaded = lib.load(artifact)
        assert loaded.container.manifest["format"] == "esper-artifact/1"
        assert bytes(loaded.container.blobs["code"]) == b"code of the first format"
        text = parse_json(lib.blueprint_text(loaded.record.blueprint))
        assert list(text["inputs"]) == ["z", "a"], "sorted in the container, in order in the library"
        assert lib.annotation(artifact) == {"risk_score": 0.25} and lib.side_file(artifact, "k.ptx") == b"ptx"
        assert verify_library(lib, lib.artifacts(), contents=True).findings == ()
