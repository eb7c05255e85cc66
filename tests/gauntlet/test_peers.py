"""Ranks among peers, what too few of them mean, confidence and interest."""

from __future__ import annotations

import random
from typing import Any

import pytest

from esper_ir.diagnostics import EsperError
from gauntlet import confidence, interest, peers, tags
from gauntlet.confidence import Evidence
from gauntlet.peers import Peers
from library.contracts import FieldReport


def report(card: str = "card", kind: str = "product", **wep: Any) -> dict[str, Any]:
    return {
        "wep": {"op_class": kind, "dtype": "bfloat16", "tolerance_used": 0.3, **wep},
        "hardware_context": {"card": card}, "stages": [],
    }  # fmt: skip


def shelf(n: int, seed: int = 0) -> list[dict[str, Any]]:
    draw = random.Random(seed)
    return [
        report(
            roofline_share=draw.random(), memory_mb_peak=draw.random(), bytes_moved=1000,
            precision_drift_vs_fp64=draw.random() / 256, power_watts_avg=draw.uniform(100, 700),
            latency_ms_median=draw.lognormvariate(0, 1), flops=draw.lognormvariate(9, 1),
            eager_both_ms_median=draw.lognormvariate(1, 1), both_ms_median=draw.lognormvariate(0, 1),
        )
        for _ in range(n)
    ]  # fmt: skip


@pytest.mark.parametrize("n", [20, 37, 100])
def test_tags_are_exactly_the_percentile_sets(n: int) -> None:
    reports = shelf(n)
    found = Peers(reports)
    by_speed = sorted(reports, key=lambda r: -r["wep"]["roofline_share"])
    by_power = sorted(reports, key=lambda r: r["wep"]["power_watts_avg"])
    for at, one in enumerate(by_speed):
        wanted = "high_speed" if at < 0.2 * n else "medium_speed" if at < 0.7 * n else "low_speed"
        said = tags.of(one, found)
        assert [t for t in said if t.endswith("_speed")] == [wanted] and said[-1] == tags.PERCENTILE
    low = [tags.of(r, found) for r in by_power[: -(-n // 4)]]
    assert all("low_power" in said for said in low)
    assert sum("low_power" in tags.of(r, found) for r in reports) == len(low)
    assert sum("high_power" in tags.of(r, found) for r in reports) == len(low)


def test_stable_needs_rank_and_margin() -> None:
    reports = shelf(40)
    best = min(reports, key=lambda r: r["wep"]["precision_drift_vs_fp64"])
    assert "numerically_stable" in tags.of(best, Peers(reports))
    best["wep"]["tolerance_used"] = 0.6
    assert "numerically_stable" not in tags.of(best, Peers(reports))


def test_too_few_peers_leave_it_to_the_rule() -> None:
    reports = shelf(19)
    assert all(tags.of(r, Peers(reports))[-1] == tags.BASIS for r in reports)
    others = [*reports, report(card="another", roofline_share=0.1), report(kind="scan", roofline_share=0.1)]
    assert all(tags.of(r, Peers(others))[-1] == tags.BASIS for r in reports), "only its own kind is a peer"
    rows = Peers(others).to_json()
    assert {(r["hardware"], r["op_class"], r["basis"]) for r in rows} >= {("card", "product", "rule")}


def test_equal_peers_share_a_tag() -> None:
    reports = [report(roofline_share=0.5) for _ in range(30)]
    assert all("high_speed" in tags.of(r, Peers(reports)) for r in reports), "nobody is better than them"


def test_a_throttled_card_ranks_nobody() -> None:
    reports = shelf(30)
    slow = report(roofline_share=0.99, conditions="5 of 5 processes: throttled (power cap) in 9 of 9 batches")
    found = Peers([*reports, slow])
    assert len(found.values["card", "product", "speed"]) == 30
    assert not [t for t in tags.of(slow, found) if t.endswith("_speed")]


def test_an_unknown_metric_is_named() -> None:
    with pytest.raises(EsperError) as refused:
        peers.metric("beauty")
    assert refused.value.code == "E0911" and "speed" in str(refused.value.hint)


def test_bounds_and_compile_tags() -> None:
    said = tags.of(report(bound_by="memory", both_ms_median=1.0, compile_both_ms_median=1.2))
    assert {"memory_bound", "faster_than_compile"} <= set(said) and "compute_bound" not in said


@pytest.mark.parametrize(
    ("outcomes", "failures", "level"),
    [(0, 0, "Speculative"), (49, 10, "Speculative"), (50, 0, "Moderate"), (299, 40, "Moderate"),
     (300, 29, "Moderate"), (300, 30, "High"), (310, 155, "High"), (300, 150, "High")],
)  # fmt: skip
def test_confidence(outcomes: int, failures: int, level: str) -> None:
    assert confidence.level(Evidence(outcomes, failures)) == level


def test_what_counts_as_failure() -> None:
    kinds = ("CRASHED", "DIVERGED", "MISMATCH", "ROLLED_BACK", "CULLED", "EXPOSED", "FOSSILIZED", "CANCELLED")
    found = confidence.evidence(FieldReport("b", "a", "s", 0.0, 0.0, kind) for kind in kinds)
    assert found == Evidence(8, 4)


def test_interest_grows_with_the_distance() -> None:
    reports = shelf(60, seed=3)
    usual = interest.interest(reports[0], reports[1:])
    strange = report(**{**reports[0]["wep"], "latency_ms_median": 1e6, "flops": 1e30})
    far = interest.interest(strange, reports)
    assert usual is not None and far is not None and 0 <= usual < 0.9 < far < 1
    assert interest.interest(reports[0], reports[1:20]) is None, "nineteen others are too few"
    same = [report(roofline_share=0.5) for _ in range(30)]
    assert interest.interest(same[0], same[1:]) == 0.0
