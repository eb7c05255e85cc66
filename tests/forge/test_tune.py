"""Tiles measured in place of priors: the space, the worker that compares and times, the search, journals."""

from __future__ import annotations

import base64
import gzip
import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import esper_ir.text as text
from esper_ir.builder import Builder
from esper_ir.diagnostics import EsperError
from esper_ir.graph import Blueprint
from forge.lower import Kernels
from forge.plan import ChainTile, MatmulTile, PointTile, RowTile, ScanTile, SumTile, Tile
from forge.service import compile_blueprint, front
from forge.target import resolve
from forge.toolchain import build_candidates, toolchain_of
from forge.tune import candidates, clock, halves, search, space
from forge.tune.candidates import Timer
from forge.tune.journal import Choices
from forge.tune.trials import Hunt, Trial
from forge.tuning import build_candidates as write_candidates
from forge.tuning import time_candidates, tune_artifact
from library.launch import to_json
from library.store import Library

PRIORS: list[Tile] = [
    RowTile(1, 4, 4096, 4), RowTile(4, 0, 512, 2, programs=128, prefetch=True), PointTile(1024, 4),
    SumTile(16, 128, 4), MatmulTile(128, 128, 64, 8, 3), ChainTile(16, 128, 128, 2, 4), ScanTile(4, 8, 32, 8),
]  # fmt: skip


@pytest.fixture
def library(tmp_path: Path) -> Library:
    return Library.open(tmp_path / "library", trust=tmp_path / "trust", roles=("compiler", "validator"))


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Timed in this process, which has imported torch, where the point is not the worker."""

    def run(module: str, request: dict[str, Any], *_: Any) -> dict[str, Any]:
        assert module == "forge.tune.clock"
        return json.loads(json.dumps(clock.run(json.loads(json.dumps(request)))))

    monkeypatch.setattr(candidates, "run_worker", run)


def block() -> Blueprint:
    b = Builder("tuned")
    b.dim("rows", min=1, max=4096, tune=(256,))
    x = b.input("x", "float32", ["rows", 128])
    return b.build(b.gelu(b.layer_norm(x, b.param("w", "float32", [128]), normalized_shape=[128])))


def forward() -> Blueprint:
    """The same without gradients: one phase to tune."""
    return replace(block(), differentiable=())


@pytest.mark.parametrize("prior", PRIORS, ids=lambda t: type(t).__name__)
def test_neighbours_are_one_step_away_fit_and_lead_back(prior: Tile) -> None:
    found = list(space.neighbours(prior))
    assert len(found) >= 2 and len({repr(t) for t in found}) == len(found)
    for tile in found:
        assert type(tile) is type(prior) and space.fits(tile) and tile != prior
        assert 1 <= space.distance(tile, prior) <= 2, "a block of rows takes its program along"


@pytest.mark.parametrize("prior", PRIORS, ids=lambda t: type(t).__name__)
def test_what_is_off_stays_off(prior: Tile) -> None:
    """Bits depend on how many programs share a sum; the reverse order is the plan's business. Where stages
    mean nothing, programs that take blocks in turn are no other way to walk rows.
    """
    seen, edge = {repr(prior)}, [prior]
    for _ in range(3):
        edge = [t for e in edge for t in space.neighbours(e, ("stages", "online")) if repr(t) not in seen]
        seen |= {repr(t) for t in edge}
        assert all(getattr(t, "reverse", False) == getattr(prior, "reverse", False) for t in edge)
        if getattr(prior, "programs", 1) == 0:
            assert all(getattr(t, "programs", 0) == 0 for t in edge)


def planned(blueprint: Blueprint | None = None) -> tuple[Kernels, Any]:
    work = front(blueprint or block(), "cpu")
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


@pytest.mark.usefixtures("here")
def test_a_search_keeps_everything_it_measured_and_goes_on_from_it(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels, target = planned(forward())
    effort = search.Effort(trials=8, seconds=60.0)
    built: list[int] = []
    real = candidates.build_candidates
    monkeypatch.setattr(candidates, "build_candidates", lambda s, t: built.append(len(s)) or real(s, t))
    tiles: list[tuple[str, str]] = []
    asked = candidates.build

    def build(sets: Any, *rest: Any) -> Any:
        tiles.extend((key, repr(tile)) for _, key, tile in sets)
        return asked(sets, *rest)

    monkeypatch.setattr(candidates, "build", build)
    first = search.search(kernels, target, "cpu", toolchain_of(target), effort, library)
    assert built and first.report["groups"]
    for group in first.report["groups"]:
        times = [t["us"] for t in group["trials"] if "us" in t]
        assert times == sorted(times) and group["prior"] in [t["tile"] for t in group["trials"]]
    kept = library.measurements(first.report["groups"][0]["key"], target.arch, toolchain_of(target))
    assert len(kept) >= len(first.report["groups"][0]["trials"])
    built.clear()
    assert len(tiles) == len(set(tiles)), "a finalist is timed again, not built again"
    spent = first.report["spent"]
    assert spent["timed"] >= len(first.report["groups"]) and spent["gain"] >= 1
    assert min(spent["building_s"], spent["measuring_s"]) > 0
    again = search.search(kernels, target, "cpu", toolchain_of(target), search.Effort(0, 0.0), library)
    known = {g["key"]: len(g["trials"]) for g in first.report["groups"]}
    assert {g["key"]: len(g["trials"]) for g in again.report["groups"]} == known, "read, not measured again"
    assert len(built) <= 2, "the priors and the finalists, and no batch of new tiles between"


@pytest.mark.parametrize("budget", [5.0, 20.0, 60.0])
def test_no_tile_is_begun_that_the_budget_has_no_time_for(
    monkeypatch: pytest.MonkeyPatch, budget: float
) -> None:
    """A second a tile, on a clock of its own; the priors that move most come first."""
    now, first = [0.0], list[str]()

    def measure(self: Any, asked: Any, rounds: int, energy: bool = False) -> None:
        for hunt, tile in asked:
            now[0] += 1.0 if rounds == search.ROUNDS else 0.0  # finalists are built by then
            first.append(hunt.key)
            us = 100.0 - len(hunt.trials)
            hunt.keep(Trial(tile, us, us - 0.1, us + 0.1))

    monkeypatch.setattr(search._Bench, "measure", measure)
    monkeypatch.setattr(search, "GUESS_S", 2.0 * len(os.sched_getaffinity(0)))
    monkeypatch.setattr(search, "time", SimpleNamespace(monotonic=lambda: now[0]))
    hunts = [Hunt(f"k{at}", f"g{at}", RowTile(1, 4, 128, 1), floor_us=float(at)) for at in range(30)]
    bench = search._Bench({}, {}, resolve("cpu"), Timer("cpu", "", "", None))
    search._hunt(hunts, bench, search.Effort(300, budget), lambda text: None)
    assert budget / 2 <= now[0] <= budget + 1, "it neither begins what has no time nor ends early"
    assert first[: min(30, int(budget) // 2)] == [f"k{29 - at}" for at in range(min(30, int(budget) // 2))]
    reached = {h.key for h in hunts if h.trials}
    assert {h.key for h in bench.left} == {h.key for h in hunts} - reached
    assert (len(reached) == 30) == (budget > 30)


def test_a_winner_is_faster_by_the_margin_and_outside_the_noise() -> None:
    prior, near, sure = RowTile(1, 4, 128, 1), RowTile(1, 8, 128, 1), RowTile(1, 16, 128, 1)

    def won(*trials: Trial) -> Tile | None:
        hunt = Hunt("k", "g", prior)
        for trial in (Trial(prior, 100.0, 98.0, 102.0), *trials):
            hunt.keep(trial)
        return hunt.winner()

    assert won(Trial(near, 99.0, 98.5, 99.5)) is None, "below the margin"
    assert won(Trial(near, 95.0, 90.0, 99.0)) is None, "intervals meet"
    assert won(Trial(near, 1.0, 1.0, 1.0, wrong="off by 3")) is None
    assert won(Trial(near, 95.0, 94.0, 96.0), Trial(sure, 80.0, 79.0, 81.0)) == sure
    assert won(Trial(near, 80.1, 79.0, 81.0), Trial(sure, 80.0, 79.0, 81.0)) == near, "even: the nearer one"


@pytest.mark.usefixtures("here")
def test_tuned_artifacts_say_what_was_tried_and_replay_to_the_same_id(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    (made,) = compile_blueprint(
        block(), pipelines=("standard",), targets=("cpu",), library=library, budget_s=2.0
    )
    report = json.loads(library.side_file(made.artifact_id, "tuning.json"))
    assert report["schema"] == "esper-tuning/1" and report["groups"] and "-standard-" in made.artifact_id
    journal = json.loads(library.side_file(made.artifact_id, "journal.json"))
    monkeypatch.setattr(clock, "run", None)
    monkeypatch.setattr(candidates, "run_worker", None)  # nothing is measured
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


def test_candidates_around_a_prior_are_the_nearest() -> None:
    prior = MatmulTile(128, 128, 64, 8, 3)
    found = halves.around(prior, 60)
    assert found[0] == prior and len({repr(t) for t in found}) == 60 and found == halves.around(prior, 60)
    distances = [space.distance(t, prior) for t in found]
    assert distances == sorted(distances) and distances[-1] > 1
    assert len(halves.around(PointTile(128, 1), 10_000)) < 100, "a space that is small is tried whole"


def test_built_on_one_machine_timed_on_another(library: Library, tmp_path: Path) -> None:
    """Candidates travel as a file to a library that knows nothing, times travel back and decide here."""
    (made,) = compile_blueprint(forward(), targets=("cpu",), library=library)
    path, times = tmp_path / "candidates", tmp_path / "times"
    wrote = write_candidates(library, made.artifact_id, path, trials=4)
    again = write_candidates(library, made.artifact_id, tmp_path / "again", trials=4)
    assert (
        path.read_bytes() == (tmp_path / "again").read_bytes() and again["candidates"] == wrote["candidates"]
    )
    assert wrote["groups"] and wrote["candidates"] >= 3 * wrote["groups"]
    with Library.open(tmp_path / "there", trust=tmp_path / "trust there", roles=("compiler",)) as there:
        found = time_candidates(there, path, times)
        assert found["candidates"] == wrote["candidates"] and found["failed"] < found["candidates"] / 2
        kept = time_candidates(there, path)
        assert kept["candidates"] == found["candidates"], "what is known is not timed again"
    document = halves.read(times, halves.TIMES)
    for group in document["groups"]:
        _make_fastest(group, group["trials"][-1])
    halves.write(document, times)
    tuned = tune_artifact(library, made.artifact_id, budget_s=0.0, measured=times)
    report = json.loads(library.side_file(tuned.artifact_id, "tuning.json"))
    assert report["groups"] and "-standard-" in tuned.artifact_id


def _make_fastest(group: dict[str, Any], trial: dict[str, Any]) -> None:
    """As if this one had been a thousand times as fast."""
    trial.pop("wrong", None)
    trial.update(us=0.01, low=0.009, high=0.011)


def test_times_from_a_card_decide_where_there_is_none(library: Library, tmp_path: Path) -> None:
    (made,) = compile_blueprint(forward(), pipelines=("standard",), targets=("h100",), library=library)
    assert any("untimed" in w for w in made.warnings)
    path, times = tmp_path / "candidates", tmp_path / "times"
    write_candidates(library, made.artifact_id, path, trials=8)
    with pytest.raises(EsperError) as refused:
        time_candidates(library, path, times)
    assert refused.value.code == "E0527" and not times.exists()
    document = halves.read(path, halves.SCHEMA)
    rows = [r for r in document["candidates"] if "wrong" not in r]
    assert rows and all(base64.b64decode(r["code"])[:4] == b"\x7fELF" for r in rows)
    first: dict[str, Any] = {
        "schema": halves.TIMES,
        "arch": document["arch"],
        "toolchain": document["toolchain"],
    }
    groups: dict[str, list[dict[str, Any]]] = {}
    for at, row in enumerate(rows):
        timed = {
            "kind": row["kind"],
            "tile": row["tile"],
            "us": 100.0 - at,
            "low": 99.9 - at,
            "high": 100.1 - at,
        }
        groups.setdefault(row["key"], []).append(timed)
    halves.write(first | {"groups": [{"key": k, "trials": t} for k, t in groups.items()]}, times)
    tuned = tune_artifact(library, made.artifact_id, measured=times)
    assert tuned.artifact_id != made.artifact_id and not tuned.warnings
    journal = json.loads(library.side_file(tuned.artifact_id, "journal.json"))["choices"]
    assert all(journal[k]["tile"] == t[-1]["tile"] for k, t in groups.items() if len(t) > 3)


def _zipped(data: bytes) -> bytes:
    """The same at any second: the bytes are the test's name."""
    return gzip.compress(data, mtime=0)


@pytest.mark.parametrize(
    "data",
    [b"", b"{}", b"\x1f\x8b", _zipped(b"[]"), _zipped(b"{\"schema\": 1}")[:-4], b"\xff\xfe",
     _zipped(b'{"schema": "esper-candidates/1", "target": "cpu", "groups": [{}], "candidates": []}'),
     b'{"schema": "esper-candidates/1", "target": "cpu", "arch": "x", "toolchain": "x", "groups": [],'
     b' "candidates": [{"key": "k", "kind": "RowTile", "tile": {}}]}'],
)  # fmt: skip
def test_a_file_that_holds_no_candidates_is_refused(library: Library, tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(data)
    with pytest.raises(EsperError) as refused:
        time_candidates(library, path)
    assert refused.value.code in ("E0526", "E0514", "E0527")
