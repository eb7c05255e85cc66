"""Collection, archive, retention, repair, lineage, outcomes and jobs."""

from __future__ import annotations

import json
import os
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from esper_ir.diagnostics import EsperError
from library import curate, history, jobs, leases, lineage, outcomes, rows
from library.audit import verify_library
from library.bundle import export_bundle, import_bundle, read_bundle, read_file
from library.canon import canonical_json, sha256_hex
from library.contracts import FieldReport, KernelQuery
from library.hub import export_kernel
from library.manifest import FORMATS, pack
from library.records import ARCHIVED, SUPERSEDED, VALIDATED
from library.repair import repair
from library.store import Library
from library.trust import replace_file
from tests.library.helpers import (
    contents,
    flip,
    make_container,
    make_manifest,
    object_path,
    old_manifest,
    text_of,
    validated,
)


def code_of(call: object, *args: object, **kwargs: object) -> str:
    assert callable(call)
    with pytest.raises(EsperError) as error:
        call(*args, **kwargs)
    return error.value.code


# -- collection ------------------------------------------------------------------------------------


def test_only_what_no_row_names_is_collected(lib: Library) -> None:
    artifact = validated(lib)
    loose = lib.blobs.put(b"nobody names me")
    report = lib.collect(grace_s=0)
    assert report.dry_run and report.marked == 1 and lib.blobs.has(loose)
    report = lib.collect(grace_s=0, dry_run=False)
    assert (report.removed, report.bytes) == (1, 15) and not lib.blobs.has(loose)
    assert lib.load(artifact).record.id == artifact
    assert verify_library(lib, lib.artifacts(), contents=True).findings == ()


def test_a_grace_period_lies_between_mark_and_removal(lib: Library) -> None:
    loose = lib.blobs.put(b"x")
    assert lib.collect(grace_s=100, dry_run=False).removed == 0 and lib.blobs.has(loose)
    with lib.index.write():
        lib.index.run("UPDATE tombstones SET time = time - 101")
    assert lib.collect(grace_s=100, dry_run=False).removed == 1


def test_a_lease_protects_and_lifts_a_mark(lib: Library) -> None:
    """The race of a writer that reuses bytes which collection has marked already."""
    loose = lib.blobs.put(b"x")
    assert lib.collect(grace_s=100, dry_run=False).marked == 1
    leases.take(lib.index, "other", [loose], "put")
    with lib.index.write():
        lib.index.run("UPDATE tombstones SET time = 0")
    assert lib.collect(grace_s=0, dry_run=False).removed == 0 and lib.blobs.has(loose)
    leases.drop(lib.index, "other")
    assert lib.collect(grace_s=0, dry_run=False).removed == 1


def test_a_writer_whose_lease_ran_out_is_refused(lib: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    real = lib.blobs.put_many

    def slow(items: object) -> list[str]:
        done = real(items)  # type: ignore[arg-type]
        with lib.index.write():
            lib.index.run("UPDATE leases SET expires = 0")
        lib.collect(grace_s=0, dry_run=False)
        return done

    monkeypatch.setattr(lib.blobs, "put_many", slow)
    assert code_of(lib.put_artifact, make_container()) == "E0726"
    monkeypatch.undo()
    assert lib.artifacts() == []
    assert lib.put_artifact(make_container()).state == "PENDING_BENCHMARKING"


def test_staging_leftovers_of_dead_writers(lib: Library, home: Path) -> None:
    dead = home / "staging" / "1-999999999-dead"
    alive = home / "staging" / f"1-{os.getpid()}-alive"
    for file in (dead, alive):
        file.write_bytes(b"half")
    lib.collect(grace_s=0, dry_run=False)
    assert not dead.exists() and alive.exists()


def test_collection_is_in_the_ledger(lib: Library) -> None:
    loose = lib.blobs.put(b"x")
    lib.collect(grace_s=0, dry_run=False)
    ((body,),) = lib.index.rows("SELECT body FROM ledger ORDER BY seq DESC LIMIT 1")
    entry = json.loads(body)
    assert entry["kind"] == "objects.collected" and entry["data"]["digests"] == [loose]


# -- archive and retention -------------------------------------------------------------------------


def test_archive_moves_bytes_out_and_restore_verifies(lib: Library, fast_tmp: Path) -> None:
    artifact = validated(lib, 1, {"generated_tags": ["trainable"], "wep": {"latency_ms_p99": 1.0}})
    lib.annotate(artifact, {"risk_score": 0.5})
    place = fast_tmp / "bundle"
    lib.archive([artifact], place, "unused")
    assert lib.record(artifact).state == ARCHIVED and code_of(lib.load, artifact) == "E0743"
    assert lib.find(KernelQuery()).matches == ()
    lib.collect(grace_s=0, dry_run=False)
    assert not lib.blobs.has(lib.record(artifact).digest)
    sound = place.read_bytes()
    for at in range(0, len(sound), 211):
        flip(place, at)
        with pytest.raises(EsperError):
            lib.restore(place)
        place.write_bytes(sound)
    assert lib.record(artifact).state == ARCHIVED
    assert lib.restore(place) == [artifact]
    assert lib.load(artifact).record.state == VALIDATED
    (match,) = lib.find(KernelQuery(required_tags=("trainable",))).matches
    assert match.risk == 0.5
    assert code_of(lib.restore, place) == "E0724"


def test_what_may_not_be_archived(lib: Library, fast_tmp: Path) -> None:
    pending = lib.put_artifact(make_container(1)).id
    proven = validated(lib, 2)
    leases.take(lib.index, "bench", [lib.record(proven).digest], "bench")
    assert code_of(lib.archive, [pending], fast_tmp / "b") == "E0724"
    with pytest.raises(EsperError) as error:
        lib.archive([proven], fast_tmp / "b")
    assert error.value.code == "E0726" and "(bench) since 20" in error.value.message
    assert not (fast_tmp / "b").exists()


def test_retention_keeps_what_is_used_costly_or_interesting(lib: Library) -> None:
    ids = [validated(lib, n, size=5000) for n in range(6)]
    for artifact in ids:
        outcomes.note_use(lib, artifact, 0, compile_seconds=10.0)
    outcomes.note_use(lib, ids[0], 1000)
    outcomes.note_use(lib, ids[1], 0, compile_seconds=86400.0)
    outcomes.set_interest(lib, ids[2], urabrask=1.0)
    later = time.time() + 400 * 86400
    plans = curate.plan(lib, keep_bytes=0, now=later)
    order = [p.artifact_id for p in plans]
    assert set(order[:3]) == set(ids[3:]) and len(plans) == 5, "the last of its blueprint stays"
    assert curate.plan(lib, keep_bytes=0) == [], "all younger than the least age"
    size = lib.record(ids[0]).size
    assert len(curate.plan(lib, keep_bytes=4 * size, now=later)) == 2
    leases.take(lib.index, "bench", [lib.record(order[0]).digest], "bench")
    assert order[0] not in [p.artifact_id for p in curate.plan(lib, keep_bytes=0, now=later)]


def test_worth_formula() -> None:
    assert curate.worth(9, 10.0, 60.0, 0.0) == pytest.approx(60.0)
    assert curate.worth(0, 1.0, 1.0, 1.0) == pytest.approx(401.0)


def test_diversity(lib: Library) -> None:
    for number, blueprint in ((1, 0), (2, 0), (3, 1), (4, 2)):
        validated(lib, number, blueprint=blueprint)
    varied = curate.diversity(lib)
    assert (varied.artifacts, varied.blueprints, varied.lone_blueprints) == (4, 3, 2)
    assert varied.entropy_bits["blueprint"] == pytest.approx(1.5) and varied.entropy_bits["target"] == 0


# -- repair ----------------------------------------------------------------------------------------


def test_repair_from_a_bundle(lib: Library, home: Path, fast_tmp: Path) -> None:
    ids = [validated(lib, n) for n in (1, 2)]
    lib.put_artifact(make_container(3), side_files={"a.txt": b"text"})
    export_bundle(lib, lib.artifacts(), fast_tmp / "b")
    objects = read_bundle(read_file(fast_tmp / "b"))[1]
    for number, digest in enumerate(sorted(rows.referenced_digests(lib.index))):
        place = object_path(home, digest)
        flip(place, 1) if number % 2 else place.unlink()
    assert len(verify_library(lib, lib.artifacts(), contents=True).findings) >= 4
    done = repair(lib, lib.artifacts(), objects)
    assert {r.action for r in done} == {"restored"}, done
    assert verify_library(lib, lib.artifacts(), contents=True).findings == ()
    assert [lib.load(i).record.id for i in ids] == ids
    assert repair(lib, lib.artifacts(), objects) == []


def test_repair_without_a_bundle_files_a_job(lib: Library, home: Path) -> None:
    artifact = validated(lib)
    record = lib.record(artifact)
    object_path(home, record.digest).unlink()
    (done,) = repair(lib, lib.artifacts(), {})
    assert (done.what, done.action) == ("container", "job filed")
    assert [r.action for r in repair(lib, lib.artifacts(), {})] == ["job waiting"]
    (job,) = jobs.listed(lib)
    assert (job.kind, job.subject, job.labels["target"]) == ("compile", record.blueprint, "cpu-v3")
    lib.put_artifact(make_container())
    assert lib.load(artifact).record.id == artifact


def test_the_text_of_a_blueprint_keeps_its_order_everywhere(lib: Library, home: Path, fast_tmp: Path) -> None:
    """Stored, sent to another library, lost and repaired: the same text."""
    artifact = validated(lib)
    blueprint = lib.record(artifact).blueprint
    assert lib.blueprint_text(blueprint).decode() == text_of(0)
    export_bundle(lib, lib.artifacts(), fast_tmp / "b")
    with Library.open(fast_tmp / "other") as other:
        import_bundle(other, read_file(fast_tmp / "b"))
        assert other.blueprint_text(blueprint).decode() == text_of(0)
    object_path(home, lib.blueprint(blueprint).text_digest).unlink()
    assert {r.action for r in repair(lib, lib.artifacts(), {})} == {"restored"}
    assert lib.blueprint_text(blueprint).decode() == text_of(0)


@pytest.mark.parametrize("lost", [False, True])
def test_a_text_kept_with_sorted_names_is_put_in_order(lib: Library, home: Path, lost: bool) -> None:
    """What an earlier version wrote for a container of the first format."""
    container = pack(old_manifest(), [("code", "elf", b"x")])
    kept = canonical_json(json.loads(text_of(0)))
    lib.put_blueprint(make_manifest()["blueprint"]["id"], kept, "block_0")
    record = lib.put_artifact(container)
    assert lib.blueprint_text(record.blueprint) == kept, "the first text of an id stays"
    if lost:
        object_path(home, sha256_hex(kept)).unlink()
    actions = [r.action for r in repair(lib, lib.artifacts(), {})]
    assert actions == (["restored", "put in order"] if lost else ["put in order"])
    assert list(json.loads(lib.blueprint_text(record.blueprint))["inputs"]) == ["z", "a"]
    assert repair(lib, lib.artifacts(), {}) == []
    assert history.audit(lib).findings == ()
    lib.collect(grace_s=0, dry_run=False)
    assert not lib.blobs.has(sha256_hex(kept)) and lib.blueprint_text(record.blueprint)


def test_containers_of_both_formats_live_together(lib: Library) -> None:
    old = lib.put_artifact(pack(old_manifest(1), [("code", "elf", b"x")])).id
    lib.record_verdict(old, {"policy": "p"}, passed=True)
    new = validated(lib, 2)
    assert tuple(lib.load(i).container.manifest["format"] for i in (old, new)) == FORMATS
    assert verify_library(lib, lib.artifacts(), contents=True).findings == ()


def test_verify_tells_kinds_apart_and_goes_on(lib: Library, home: Path) -> None:
    ids = [validated(lib, n) for n in range(4)]
    flip(object_path(home, lib.record(ids[0]).digest), 100)
    object_path(home, lib.record(ids[1]).digest).unlink()
    with lib.index.write():
        lib.index.run(
            "UPDATE verdicts SET envelope = (SELECT envelope FROM artifacts WHERE num = 1) WHERE num = 3"
        )
    before = contents(home)
    report = verify_library(lib, lib.artifacts(), contents=True)
    kinds = {f.subject: f.kind for f in report.findings}
    assert kinds == {ids[0]: "corrupt", ids[1]: "unavailable", ids[2]: "untrusted"}
    assert report.exit_code() == 11 and contents(home) == before


# -- lineage, outcomes, jobs -----------------------------------------------------------------------


def test_lineage(lib: Library) -> None:
    ids = []
    for number in range(5):
        blueprint = make_manifest(blueprint=number)["blueprint"]
        text = json.dumps({"nodes": [{"id": "n1", "op": "add"}, {"id": f"x{number}", "op": "mul"}]}).encode()
        ids.append(lib.put_blueprint(blueprint["id"], text, f"b{number}").id)
    lib.add_edge(ids[0], ids[1], "mutation", "swap add for mul")
    lib.add_edge(ids[0], ids[2], "mutation")
    lib.add_edge(ids[1], ids[3], "crossover")
    lib.add_edge(ids[2], ids[3], "crossover")
    assert {(e.child, e.distance) for e in lineage.descendants(lib, ids[0])} == {
        (ids[1], 1),
        (ids[2], 1),
        (ids[3], 2),
    }
    assert {e.parent for e in lineage.ancestors(lib, ids[3])} == {ids[0], ids[1], ids[2]}
    assert lineage.ancestors(lib, ids[3], depth=1)[-1].distance == 1
    lines = lineage.tree_lines(lib, ids[0])
    assert len(lines) == 5 and lines[-1].endswith("(above)")
    assert code_of(lib.add_edge, ids[3], ids[0], "mutation") == "E0724"
    assert code_of(lib.add_edge, ids[3], ids[3], "mutation") == "E0724"
    assert code_of(lib.add_edge, ids[3], "0" * 64, "mutation") == "E0721"
    assert code_of(lib.add_edge, ids[3], ids[4], "nonsense") == "E0720"
    difference = lineage.diff(lib, ids[0], ids[1])
    assert '- nodes[x0].op: "mul"' in difference and '+ nodes[x1].op: "mul"' in difference
    assert lineage.diff(lib, ids[0], ids[0]) == []
    svg = ElementTree.fromstring(lineage.picture(lib, ids[1]))
    assert len(svg.findall("{http://www.w3.org/2000/svg}rect")) == 3


def report_of(lib: Library, artifact: str, outcome: str = "FOSSILIZED") -> FieldReport:
    return FieldReport(lib.record(artifact).blueprint, artifact, "seed-1", 0.5, 0.6, outcome, {"loss": 0.1})


def test_outcomes_are_kept_once(lib: Library) -> None:
    artifact = validated(lib)
    assert lib.record_outcomes([report_of(lib, artifact), report_of(lib, artifact, "CULLED")]) == 2
    assert lib.record_outcomes([report_of(lib, artifact)]) == 0
    assert [o.outcome for o in lib.outcomes(artifact)] == ["FOSSILIZED", "CULLED"]
    assert code_of(lib.record_outcomes, [report_of(lib, artifact, "HAPPY")]) == "E0720"


def test_spool(lib: Library, fast_tmp: Path) -> None:
    artifact = validated(lib)
    body = {**report_of(lib, artifact).__dict__}
    lines = [
        {"schema": "esper-spool/1", "kind": "outcome", "key": "k1", "report": body},
        {"schema": "esper-spool/1", "kind": "use", "key": "k2", "artifact_id": artifact, "loads": 7},
        {"schema": "somebody else's"},
    ]
    spool = fast_tmp / "spool"
    spool.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"torn')
    assert outcomes.take_spool(lib, spool) == (2, 1)
    assert outcomes.take_spool(lib, spool) == (0, 1)
    assert lib.index.rows("SELECT loads FROM usage") == [(7,)]


def test_jobs_are_fenced(lib: Library) -> None:
    assert jobs.file_job(lib, "compile", "b1", {"target": "h100"})
    assert not jobs.file_job(lib, "compile", "b1", {"target": "h100"})
    first = jobs.claim(lib, "compile", "worker 1", seconds=-1)
    second = jobs.claim(lib, "compile", "worker 2")
    assert first and second and first.num == second.num and second.fence == first.fence + 1
    assert jobs.claim(lib, "compile", "worker 3") is None
    assert code_of(jobs.finish, lib, first) == "E0726"
    jobs.extend(lib, second)
    jobs.finish(lib, second)
    assert code_of(jobs.finish, lib, second) == "E0726"
    assert jobs.file_job(lib, "compile", "b1", {"target": "h100"})
    for worker in ("a", "b", "c"):
        assert jobs.claim(lib, "compile", worker, seconds=-1)
    assert jobs.claim(lib, "compile", "d") is None and jobs.listed(lib, "DEAD")


def test_superseded_needs_a_better_one_of_the_same_blueprint(lib: Library) -> None:
    one, other = validated(lib, 1), validated(lib, 2, blueprint=1)
    pending = lib.put_artifact(make_container(3)).id
    assert code_of(lib.supersede, one, other) == "E0724"
    assert code_of(lib.supersede, one, pending) == "E0724"
    assert lib.supersede(one, validated(lib, 4)).state == SUPERSEDED


def test_a_spool_of_anything(lib: Library, fast_tmp: Path) -> None:
    """Malformed and foreign lines are counted and keep nothing else out; giving it again changes nothing."""
    artifact = validated(lib)
    good = {
        "schema": "esper-spool/1",
        "kind": "outcome",
        "key": "k1",
        "report": report_of(lib, artifact).__dict__,
    }
    use = {"schema": "esper-spool/1", "kind": "use", "key": "k2", "artifact_id": artifact, "loads": 7}
    report = good["report"]
    lines = [
        good,
        {**good, "key": None},
        {**good, "key": "x" * 300},
        {**good, "key": "a", "report": None},
        {**good, "key": "b", "report": {**report, "outcome": "HAPPY"}},
        {**good, "key": "c", "report": {**report, "kernel_artifact_id": "ffffffffffff-cpu-v3-fast-00000000"}},
        {**good, "key": "d", "report": {**report, "pre_metric": "x"}},
        {"schema": "esper-spool/1", "kind": "poem", "key": "e"},
        *({**use, "key": f"u{n}", "loads": n} for n in (0, -5, 1 << 40, "7", None, True, 1.5)),
        {**use, "key": "g", "artifact_id": "../../etc"},
        7,
        None,
        [],
        use,
    ]
    spool = fast_tmp / "spool"
    bad = [
        b"{",
        b"\xff\xfe",
        b'{"schema":"esper-spool/1","schema":"x"}',
        b"[" * 1000,
        b'"' + b"x" * (2 << 20) + b'"',
    ]
    spool.write_bytes(b"".join(json.dumps(line).encode() + b"\n" for line in lines) + b"\n".join(bad) + b"\n")
    strange = len(lines) - 2 + len(bad)
    assert outcomes.take_spool(lib, spool) == (2, strange)
    assert outcomes.take_spool(lib, spool) == (0, strange)
    assert lib.index.rows("SELECT loads FROM usage") == [(7,)]
    assert [o.outcome for o in lib.outcomes(artifact)] == ["FOSSILIZED", "EXPOSED"]
    assert history.audit(lib).findings == ()


def test_the_same_outcome_twice_in_one_call(lib: Library) -> None:
    artifact = validated(lib)
    assert lib.record_outcomes([report_of(lib, artifact), report_of(lib, artifact)]) == 1
    assert history.audit(lib).findings == ()


@pytest.mark.parametrize("inside", ["library", "keys"])
def test_bundles_are_not_written_over_the_library(lib: Library, home: Path, inside: str) -> None:
    artifact = validated(lib)
    base = home if inside == "library" else lib.trust.home
    before = contents(home.parent)
    for name in ("esper.db", "trust.json", "objects/x", "", "new/deeper"):
        assert code_of(export_bundle, lib, lib.artifacts(), base / name) == "E0720"
        assert code_of(lib.archive, [artifact], base / name) == "E0720"
        assert code_of(export_kernel, lib, lib.record(artifact), base / name) == "E0720"
    assert {k: v for k, v in contents(home.parent).items() if "esper.db" not in k} == {
        k: v for k, v in before.items() if "esper.db" not in k
    }
    assert lib.record(artifact).state == VALIDATED


def test_places_that_are_no_file(lib: Library, fast_tmp: Path) -> None:
    """Refused by name; what was there stays and nothing is left beside it."""
    validated(lib)
    (fast_tmp / "directory").mkdir()
    (fast_tmp / "kept").write_bytes(b"mine")
    for place in (
        "/",
        "..",
        fast_tmp / "directory",
        fast_tmp / "missing" / "b",
        fast_tmp / ("x" * 300),
        "a\0b",
    ):
        with pytest.raises(EsperError) as error:
            export_bundle(lib, lib.artifacts(), Path(place))
        assert error.value.exit_code in (2, 16), place
    if os.geteuid() == 0 and Path("/dev/full").exists():
        assert code_of(replace_file, Path("/dev/full/x"), b"x") == "E0710"
    assert sorted(p.name for p in fast_tmp.iterdir() if not p.name.startswith(("keys", "library"))) == [
        "directory",
        "kept",
    ]
    export_bundle(lib, lib.artifacts(), fast_tmp / ("y" * 250))


def test_repair_makes_again_what_queries_know(lib: Library) -> None:
    first, second = validated(lib, 1, {"generated_tags": ["a"]}), validated(lib, 2, {"generated_tags": ["b"]})
    lib.revoke(second, "bad")
    with lib.index.write():
        lib.index.run("UPDATE facts SET latency_ms = 0.001, rank = 0.001")
        lib.index.run("INSERT INTO facts SELECT 2, tagset, rank, risk_rank, 1, 1, 1, '', 1, '{}' FROM facts")
    assert len(lib.find(KernelQuery()).matches) == 2, "what the edit wanted"
    assert {f.code for f in verify_library(lib, lib.artifacts(), contents=True).findings} == {"E0763"}
    assert [r.action for r in repair(lib, lib.artifacts(), {})] == ["made again"] * 2
    assert [m.artifact_id for m in lib.find(KernelQuery()).matches] == [first]
    assert verify_library(lib, lib.artifacts(), contents=True).findings == ()
    assert repair(lib, lib.artifacts(), {}) == []
