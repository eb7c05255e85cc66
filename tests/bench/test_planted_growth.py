"""What counts as a planted bottleneck, and as found and fixed: by lines written out."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest

from bench.growing import crowd, planted


def line(seed: int, kind: str, untouched: float, grown: float = 0.0, **more: Any) -> dict[str, Any]:
    site = f"blocks.{seed % 4}/0"
    return {"seed": seed, "kind": kind, "site": site, "untouched": untouched, "counts": untouched >= 0.15,
            "grown": grown, "asked": [site], "kept": [site], "epochs": 12, **more}  # fmt: skip


TWIN = {"seed": 5, "kind": "twin", "healthy": 0.1}


def test_trials_are_shared_evenly() -> None:
    assert planted.shares(150) == {"dead": 38, "narrow": 38, "low_rank": 37, "noise": 37}
    assert sum(planted.shares(7).values()) == 7


def test_found_and_fixed() -> None:
    lines = [
        TWIN,
        line(5, "dead", 0.2, 0.105),
        line(5, "narrow", 0.2, 0.12),  # 80 % of the gap
        line(5, "low_rank", 0.2, 0.1, asked=["blocks.0/0", "blocks.1/0"]),  # elsewhere first
        line(5, "noise", 0.2, 0.1, kept=["blocks.0/0"]),  # kept elsewhere
    ]
    rows = {row["kind"]: row for row in planted.judged(lines)}
    assert {k: (r["found"], r["fixed"]) for k, r in rows.items()} == {
        "dead": (True, True), "narrow": (True, False), "low_rank": (False, True), "noise": (True, False),
    }  # fmt: skip
    assert rows["dead"]["resolved"] == pytest.approx(0.95)
    assert planted.figures(lines)["planted_found_and_fixed"]["value"] == 1


def test_a_plant_that_costs_nothing_is_no_trial() -> None:
    cheap = {k: v for k, v in line(5, "dead", 0.12).items() if k not in ("grown", "asked", "kept", "epochs")}
    found = planted.figures([TWIN, cheap, line(5, "narrow", 0.2, 0.1)])
    assert found["planted_found_and_fixed"]["of"] == 1
    assert found["planted_that_cost_nothing"]["value"] == 1


def test_a_file_goes_on_until_every_kind_has_its_trials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[int, str]] = []

    def one(seed: int, kind: str, lines: Any, library: Any) -> dict[str, Any]:
        made.append((seed, kind))
        if kind in ("twin", "grown"):
            return {"seed": seed, "kind": kind, "healthy": 0.1, "grown": 0.1, "asked": [], "kept": []}
        return line(seed, kind, 0.1 if (seed, kind) == (0, "narrow") else 0.2, 0.1)

    monkeypatch.setattr(planted, "_line", one)
    out = tmp_path / "lines.jsonl"
    library: Any = None
    assert len(planted.run(out, library, 0, 8, stop=-1.0)) == 0
    lines = planted.run(out, library, 0, 8)
    assert [seed for seed, kind in made if kind == "narrow"] == [0, 1, 2]
    assert [seed for seed, kind in made if kind == "dead"] == [0, 1]
    assert len(out.read_text().splitlines()) == len(lines) == len(made)
    before = len(made)
    assert planted.run(out, library, 0, 8) == [json.loads(t) for t in out.read_text().splitlines()]
    assert len(made) == before


def fine(number: int) -> int:
    return 2 * number


def breaks() -> None:
    raise ValueError("no")


def dies() -> None:
    os._exit(3)


def test_a_job_that_breaks_or_dies_costs_the_others_nothing() -> None:
    jobs: dict[str, crowd.Job] = {
        "a": (fine, (1,)),
        "bad": (breaks, ()),
        "dead": (dies, ()),
        "b": (fine, (2,)),
    }
    gave, broke = crowd.together(jobs, 2)
    assert gave == {"a": 2, "b": 4}
    assert broke == {"bad": "ValueError: no", "dead": "its process died"}
    assert crowd.together({"late": (fine, (1,))}, 1, 0.0)[1] == {"late": "not done after 0 s"}


def test_jobs_have_seeds_of_their_own_and_all_the_trials() -> None:
    jobs = [arguments for _, arguments in planted.jobs(Path("/nowhere"), 7, 10).values()]
    assert [many for _, _, _, many in jobs] == [4, 3, 3]
    starts = [start for _, _, start, _ in jobs]
    assert all(b - a >= planted.MOST_SEEDS for a, b in itertools.pairwise(starts))
