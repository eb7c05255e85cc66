"""Tiles measured in place of priors: the space, the worker that compares and times, the search, journals."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

import esper_ir.text as text
from esper_ir.builder import Builder
from esper_ir.graph import Blueprint
from forge.lower import Kernels
from forge.plan import ChainTile, MatmulTile, PointTile, RowTile, ScanTile, SumTile, Tile
from forge.service import compile_blueprint, front, tune_artifact
from forge.toolchain import build_candidates, toolchain_of
from forge.tune import clock, search, space
from forge.tune.journal import Choices
from library.launch import to_json
from library.store import Library

PRIORS: list[Tile] = [
    RowTile(1, 4, 4096, 4), RowTile(4, 0, 512, 2, programs=128, prefetch=True), PointTile(1024, 4),
    SumTile(16, 128, 4), MatmulTile(128, 128, 64, 8, 3), ChainTile(16, 128, 128, 2, 4), ScanTile(4, 8, 32, 8),
]  # fmt: skip


@pytest.fixture
def library(tmp_path: Path) -> Library:
    return Library.open(tmp_path / "library", trust=tmp_path / "trust", roles=("compiler", "validator"))


def block() -> Blueprint:
    b = Builder("tuned")
    b.dim("rows", min=1, max=4096, tune=(256,))
    x = b.input("x", "float32", ["rows", 128])
    return b.build(b.gelu(b.layer_norm(x, b.param("w", "float32", [128]), normalized_shape=[128])))


@pytest.mark.parametrize("prior", PRIORS, ids=lambda t: type(t).__name__)
def test_neighbours_are_one_step_away_fit_and_lead_back(prior: Tile) -> None:
    found = list(space.neighbours(prior))
    assert len(found) >= 2 and len({repr(t) for t in found}) == len(found)
    for tile in found:
        assert type(tile) is type(prior) and space.fits(tile) and tile != prior
        assert 1 <= space.distance(tile, prior) <= 2, "a block of rows takes its program along"


@pytest.mark.parametrize("prior", PRIORS, ids=lambda t: type(t).__name__)
def test_what_is_off_stays_off(prior: Tile) -> None:
    """Bits depend on how many programs share a sum; the reverse order is the plan's business."""
    seen, edge = {repr(prior)}, [prior]
    for _ in range(3):
        edge = [t for e in edge for t in space.neighbours(e) if repr(t) not in seen]
        seen |= {repr(t) for t in edge}
        assert all(getattr(t, "reverse", False) == getattr(prior, "reverse", False) for t in edge)
        if getattr(prior, "programs", 1) == 0:
            assert all(getattr(t, "programs", 0) == 0 for t in edge)


def planned() -> tuple[Kernels, Any]:
    work = front(block(), "cpu")
    return work.kernels, work.target


def job_of(tiles: list[Tile | None]) -> dict[str, Any]:
    """One group's job with these tiles (None: the prior)."""
    kernels, target = planned()
    key, site = next((k, s) for k, s in sorted(kernels.sites.items()) if s.low.phase.name == "inference")
    prior = kernels.choices.made[key][0]
    rows = []
    for at, tile in enumerate(tiles):
        plan, made = site.plan(Choices({key: tile or prior}))
        (code,) = build_candidates([tuple(made.by_key.values())], target)
        assert not code.failed
        rows.append({"name": str(at), "plan": to_json(plan), "kernels": to_json(code.kernels),
                     "code": base64.b64encode(code.code).decode()})  # fmt: skip
    return {
        "name": "g",
        "dims": dict(site.low.sizes),
        "values": sorted(site.low.graph.types),
        "candidates": rows,
    }


def test_the_clock_times_what_agrees_with_the_prior_and_says_what_does_not() -> None:
    job = job_of([None, RowTile(1, 8, 128, 1), RowTile(1, 2, 128, 1)])
    broken = json.loads(json.dumps(job["candidates"][2]))
    # As if a template had left rows out: half the programs of its grid.
    for step in broken["plan"]["steps"]:
        step["grid"][0] = 1
    broken["name"] = "broken"
    job["candidates"].append(broken)
    (found,) = clock.run({"device": "cpu", "rounds": 3, "jobs": [job]}).values()
    assert all(found[n]["low"] <= found[n]["us"] <= found[n]["high"] for n in ("0", "1", "2"))
    assert "off by" in found["broken"]["wrong"] or "writes" in found["broken"]["wrong"]


def test_a_search_keeps_everything_it_measured_and_goes_on_from_it(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels, target = planned()
    effort = search.Effort(trials=8, seconds=60.0)
    built: list[int] = []
    real = search.build_candidates
    monkeypatch.setattr(search, "build_candidates", lambda s, t: built.append(len(s)) or real(s, t))
    first = search.search(kernels, target, "cpu", toolchain_of(target), effort, library)
    assert built and first.report["groups"]
    for group in first.report["groups"]:
        times = [t["us"] for t in group["trials"] if "us" in t]
        assert times == sorted(times) and group["prior"] in [t["tile"] for t in group["trials"]]
    kept = library.measurements(first.report["groups"][0]["key"], target.arch, toolchain_of(target))
    assert len(kept) >= len(first.report["groups"][0]["trials"])
    built.clear()
    again = search.search(kernels, target, "cpu", toolchain_of(target), search.Effort(0, 0.0), library)
    known = {g["key"]: len(g["trials"]) for g in first.report["groups"]}
    assert {g["key"]: len(g["trials"]) for g in again.report["groups"]} == known, "read, not measured again"
    assert len(built) <= 2, "the priors and the finalists, and no batch of new tiles between"


def test_a_winner_is_faster_by_the_margin_and_outside_the_noise() -> None:
    prior, near, sure = RowTile(1, 4, 128, 1), RowTile(1, 8, 128, 1), RowTile(1, 2, 128, 1)
    kernels, _ = planned()
    key, site = next(iter(sorted(kernels.sites.items())))

    def won(*trials: search.Trial) -> dict[str, Tile]:
        hunt = search.Hunt(key, site, prior)
        for trial in (search.Trial(prior, 100.0, 98.0, 102.0), *trials):
            hunt.keep(trial)
        return search._winners([hunt])

    assert won(search.Trial(near, 99.0, 98.5, 99.5)) == {}, "below the margin"
    assert won(search.Trial(near, 95.0, 90.0, 99.0)) == {}, "intervals meet"
    assert won(search.Trial(near, 1.0, 1.0, 1.0, wrong="off by 3")) == {}
    assert won(search.Trial(near, 95.0, 94.0, 96.0), search.Trial(sure, 80.0, 79.0, 81.0)) == {key: sure}


def test_tuned_artifacts_say_what_was_tried_and_replay_to_the_same_id(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    (made,) = compile_blueprint(
        block(), pipelines=("standard",), targets=("cpu",), library=library, budget_s=6.0
    )
    report = json.loads(library.side_file(made.artifact_id, "tuning.json"))
    assert report["schema"] == "esper-tuning/1" and report["groups"] and "-standard-" in made.artifact_id
    journal = json.loads(library.side_file(made.artifact_id, "journal.json"))
    monkeypatch.setattr(clock, "run", None)
    monkeypatch.setattr(search, "run_worker", None)  # nothing is measured
    (again,) = compile_blueprint(
        block(), pipelines=("standard",), targets=("cpu",), library=library, replay=journal
    )
    assert again.artifact_id == made.artifact_id and not again.warnings


def test_without_the_card_priors_stay_and_the_artifact_says_so(library: Library) -> None:
    blueprint = text.load(Path(__file__).parents[2] / "examples" / "softmax.json")
    (made,) = compile_blueprint(blueprint, pipelines=("standard",), targets=("h100",), library=library)
    assert any("untimed" in w for w in made.warnings)
    assert json.loads(library.side_file(made.artifact_id, "tuning.json"))["untimed"]
    (later,) = [tune_artifact(library, made.artifact_id, budget_s=1.0)]
    assert later.artifact_id == made.artifact_id, "still no card: the same priors, the same artifact"
