"""The bench of measurement and tags, on a library of invented reports."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path
from typing import Any

import pytest

from bench import gauntlet, results
from gauntlet.annotating import annotate
from library.manifest import pack, unpack
from library.store import Library
from tests.faults import handmade, toys
from tests.gauntlet.test_page import report

MANY = 64


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Library:
    """Invented numbers about one hand-made block in as many versions."""
    monkeypatch.setenv("ESPER_KEYS", str(tmp_path / "trust"))
    draw, given = random.Random(7), unpack(handmade.build(toys.affine()))
    manifest = {k: v for k, v in given.manifest.items() if k not in ("artifact_id", "blobs")}
    blobs = [(b["name"], b["kind"], bytes(given.blobs[b["name"]])) for b in given.manifest["blobs"]]
    library = Library.open(tmp_path / "library", roles=("compiler", "validator"))
    for at in range(MANY):
        version = hashlib.sha256(b"%d" % at).hexdigest()
        made = library.put_artifact(pack({**manifest, "version": version}, blobs)).id
        numbers: dict[str, Any] = {
            "roofline_share": round(draw.random(), 2), "memory_mb_peak": draw.random(), "bytes_moved": 1000,
            "precision_drift_vs_fp64": draw.random() / 256, "tolerance_used": draw.random(),
            "dtype": "bfloat16", "op_class": "product" if at < 40 else "scan",
        }  # fmt: skip
        library.record_verdict(made, report(made, **numbers), passed=True)
    return library


def test_queries_by_tag_return_the_percentile_sets(shelf: Library) -> None:
    """Speeds are rounded, so that there are ties."""
    said, known = annotate(shelf)
    lines = gauntlet.check_tags(shelf, known.reports)
    assert {(line["class"], line["tag"]) for line in lines} >= {
        ("product", "high_speed"), ("product", "numerically_stable"), ("scan", "medium_memory"),
    }  # fmt: skip
    assert all(line["expected"] == line["returned"] for line in lines)
    assert not any(line["missing"] or line["too_many"] for line in lines)
    assert sum(line["expected"] for line in lines if line["tag"].endswith("_speed")) == MANY
    # and a wrong one is found, and history is kept
    before = {name: shelf.annotations(name) for name in said}
    fast = next(name for name, found in said.items() if "high_speed" in found["generated_tags"])
    slower = ["low_speed", "basis:percentile"]
    shelf.annotate(fast, {**said[fast], "generated_tags": slower})
    wrong = [
        line for line in gauntlet.check_tags(shelf, known.reports) if line["missing"] or line["too_many"]
    ]
    assert fast in next(line for line in wrong if line["tag"] == "high_speed")["missing"]
    assert fast in next(line for line in wrong if line["tag"] == "low_speed")["too_many"]
    annotate(shelf)
    assert gauntlet.retagged(shelf, list(said), before) == {"changed": 1, "lost": 0}
    assert [v["version"] for v in shelf.annotations(fast)] == [1, 2, 3]
    before[fast][0]["annotation"] = {}
    assert gauntlet.retagged(shelf, [fast], before)["lost"] == 1


@pytest.mark.parametrize(("canary", "at_one_clock"), [(315.0, True), (300.0, False)])
def test_two_measurements_meet_in_units_of_the_canary(
    canary: float, at_one_clock: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five per cent slower: the machine was as much slower, or it was not."""
    monkeypatch.setenv("ESPER_KEYS", str(tmp_path / "trust"))
    library = Library.open(tmp_path / "library", roles=("compiler", "validator"))
    made = library.put_artifact(handmade.build(toys.affine())).id
    for low, high, clock in ((1.00, 1.02, 300.0), (1.05, 1.07, canary)):
        told = report(made, latency_interval_ms=[low, high], latency_ms_median=low, latency_ms_p99=high)
        told["wep"] |= {"samples": 1500, "variance": 0.02, "conditions": "steady", "op_class": "pointwise"}
        told["benchmark_results"] = {"measurement": {"canary_us": [clock, clock, 2 * clock]}}
        library.record_verdict(made, told, passed=True)
    found = gauntlet.row(library, made)
    assert found["again_overlaps"] is False and found["again_overlaps_at_one_clock"] is at_one_clock


def line(us: Any, variance: float, **more: Any) -> dict[str, Any]:
    return {"artifact": f"{us}-{variance}", "median_us": us, "variance": variance, "seconds": 100.0,
            "conditions": "steady", **more}  # fmt: skip


def test_the_variance_table_counts_what_is_long_enough(tmp_path: Path) -> None:
    rows = [line(9.0, 0.5), line(10.0, 0.05), line(500.0, 0.06, again_overlaps=True), line("unresolved", 0.9)]
    found = gauntlet.document(rows, [], {"changed": 0, "lost": 0}, 4)
    figures = found["figures"]
    assert figures["artifacts_from_10_us"]["value"] == 2
    assert figures["variance_at_most_5_percent"] == results.figure(0.5, "share", 0.95, at_least=True)
    assert found["over_5_percent"] == ["500.0-0.06"] and figures["artifacts_per_day"]["value"] == 864
    assert figures["intervals_that_overlap"]["value"] == 1.0
    assert figures["intervals_that_overlap_at_one_clock"]["value"] == 0.0, "nobody told how fast it was"
    assert results.read(results.write(found, tmp_path))["bench"] == "gauntlet"
    rows = [{"block": "a", "seconds": 25.0}, {"block": "b", "seconds": 8.0}]
    quick = gauntlet.hurried({"rows": rows, "figures": {"variance_median": {}}})
    slow = quick["figures"]["quick_seconds_of_the_longest"]
    assert slow["value"] == 25.0 and slow["which"] == {"a": 25.0} and slow["met"] is False
    assert quick["figures"]["quick_artifacts_in_20_s"] == results.figure(1, "count", 2, at_least=True)
    assert all(n.startswith("quick_") for n in quick["figures"]) and quick["notes"][0].startswith("left out")
    nothing = gauntlet.document([], [], {"changed": 0, "lost": 0}, 0)["figures"]
    assert nothing["variance_at_most_5_percent"]["value"] is None


def test_blueprints_are_a_mixture_of_widths_and_ways() -> None:
    first = [next_ for next_, _ in zip(gauntlet.blueprints(), range(60), strict=False)]
    names = {blueprint.name for blueprint, _ in first}
    assert {"scale_shift_40_f32", "scale_shift_160_f32", "scale_shift_640_f32"} <= names
    assert {name.partition("_")[0] for name in names} >= {"scale", "rms", "lora"}, "of every kind"
    assert {tuple(options) for _, options in first} == {(), ("objectives",), ("pipelines", "budget_s")}
    assert len(list(gauntlet.blueprints())) >= gauntlet.COUNT


def test_the_table_of_a_library_that_is_there(shelf: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ESPER_LIBRARY", str(shelf.home))
    found = gauntlet.read()
    assert len(found["rows"]) == MANY and found["figures"]["artifacts"]["target"] == gauntlet.READ
    assert found["figures"]["tags_not_of_their_percentile"]["value"] == 0 < len(found["tags"])
    assert found["figures"]["tagged_again_lost"]["value"] == 0
