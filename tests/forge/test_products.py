"""Products as library calls or as kernels of ours: planned both ways, timed as groups, frozen, replayed."""

from __future__ import annotations

import base64
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from esper_ir.builder import Builder
from esper_ir.graph import Blueprint
from forge.lower import Kernels, Site, together
from forge.pass_manager import run
from forge.pipelines import FAST
from forge.plan import MatmulTile, ProductWay
from forge.service import compile_blueprint, front
from forge.target import resolve
from forge.templates.ways import tile_of_way, way_of_tile
from forge.toolchain import build_candidates, toolchain_of
from forge.tune import candidates, clock, halves, priors, search, space
from forge.tune.journal import Choices
from forge.tune.priors import Entry, table
from forge.tune.products import way_sites
from forge.tuning import build_candidates as write_candidates
from forge.tuning import tune_artifact
from forge.work import Work
from library.launch import ExternStep, KernelStep, to_json
from library.store import Library
from tests.forge.whole import Machine, close, compared

ROWS = 64


def block(depth: int = 512, rows: int = 4096) -> Blueprint:
    """A product that is past the rule's depth, and small enough for a test to run."""
    b = Builder("product")
    b.dim("rows", min=1, max=8192, tune=(rows,))
    x = b.input("x", "bfloat16", ["rows", depth])
    w, bias = b.param("w", "bfloat16", [depth, 512]), b.param("bias", "bfloat16", [512])
    return b.build(b.gelu(b.add(b.matmul(x, w), bias)))


def planned(blueprint: Blueprint, given: dict[str, Any] | None = None, target: str = "h100") -> Work:
    steps = tuple(s for s in FAST.steps if s[0] not in ("build", "package"))
    kernels = Kernels(choices=Choices(given or {}, priors=priors.NOTHING))
    return run(replace(FAST, steps=steps), Work(blueprint, resolve(target), "fast", kernels=kernels))


def externs(work: Work) -> int:
    return sum(isinstance(s, ExternStep) for low in work.lowerings for s in low.plan.steps)


def test_the_rule_decides_where_nothing_was_measured() -> None:
    work = planned(block())
    assert len(work.kernels.drafts) >= 4 and externs(work) >= 3
    for key in work.kernels.drafts:
        way, origin = work.kernels.choices.made[key]
        assert origin == "rule" and isinstance(way, ProductWay) and not way.block_m


def test_both_ways_are_the_groups_that_differ_and_write_the_same() -> None:
    work = planned(block())
    sites = way_sites(work.kernels)
    assert sites.keys() == work.kernels.drafts.keys()
    for key, site in sites.items():
        written = {}
        for own in (True, False):
            plan, kernels = site.plan(Choices({key: ProductWay(own)}))
            assert any(isinstance(s, ExternStep) for s in plan.steps) is not own
            assert bool(kernels.by_key) or not own
            assert set(site.values) <= {b.name for b in plan.buffers}
            names = {b.name for b in plan.buffers} & set(site.values)
            written[own] = names
        assert written[True] == written[False] == set(site.values)
        tile = MatmulTile(64, 64, 64, 4, 4)
        plan, kernels = site.plan(Choices({key: way_of_tile(tile)}))
        assert tile in [s.plan.tile for s in kernels.by_key.values()]


@pytest.mark.parametrize("own", [True, False])
def test_a_given_way_is_taken_and_means_the_same(own: bool) -> None:
    blueprint = block(64, ROWS)
    keys = planned(blueprint).kernels.drafts
    way = way_of_tile(MatmulTile(32, 64, 32, 4, 2)) if own else ProductWay(False)
    work = planned(blueprint, dict.fromkeys(keys, way))
    assert (externs(work) == 0) is own
    found, wide, eager = compared(work, Machine(work, "plans"), {"rows": ROWS})
    for value in found:
        assert close(found[value], wide[value], eager[value]), value


def test_ways_lead_to_tiles_and_back() -> None:
    library, tile = ProductWay(False), way_of_tile(MatmulTile(128, 128, 64, 8, 3))
    assert tile_of_way(library) is None and tile_of_way(ProductWay(True)) is None
    assert tile_of_way(tile) == MatmulTile(128, 128, 64, 8, 3)
    first = list(space.neighbours(library))
    assert ProductWay(True) in first and tile in first and all(space.fits(t) for t in first)
    further = list(space.neighbours(tile))
    assert ProductWay(True) in further and all(isinstance(t, ProductWay) and t.own for t in further)
    assert all(space.distance(tile, t) == 1 for t in further)
    assert not space.fits(replace(tile, own=False)), "a library call has no tile"
    assert halves.around(library, 12)[0] == library


def test_the_clock_runs_library_calls_beside_kernels() -> None:
    work = planned(block(64, ROWS), target="cpu")
    low = next(w for w in work.lowerings if w.phase.name == "inference")
    first = next(s for s in work.kernels.sites.values() if s.low.phase.name == "inference")
    sites = [Site(first.low, low.parts, g, f"t{at}", False) for at, (g, _) in enumerate(low.lowered)]
    plan, kernels = together(sites, Choices())
    assert [type(s) for s in plan.steps] == [ExternStep, KernelStep]
    (code,) = build_candidates([tuple(kernels.by_key.values())], work.target)
    rows = [{"name": n, "plan": to_json(plan), "kernels": to_json(code.kernels),
             "code": base64.b64encode(code.code).decode()} for n in ("0", "1")]  # fmt: skip
    job = {"name": "g", "dims": {"rows": ROWS}, "values": list(first.values), "candidates": rows}
    (found,) = clock.run({"device": "cpu", "rounds": 3, "jobs": [job]}).values()
    assert all(found[n]["us"] > 0 for n in ("0", "1"))
    alone, none = together(sites[:1], Choices())
    assert not none.by_key
    bare = {"name": "0", "plan": to_json(alone), "kernels": [], "code": ""}
    (found,) = clock.run({"device": "cpu", "rounds": 3, "jobs": [{**job, "candidates": [bare]}]}).values()
    assert found["0"]["us"] > 0


@pytest.fixture
def library(tmp_path: Path) -> Library:
    return Library.open(tmp_path / "library", trust=tmp_path / "trust", roles=("compiler", "validator"))


def forward() -> Blueprint:
    return replace(block(), differentiable=())


def fake_times(sites: Any, rows: list[tuple[Any, Any]], own_us: float) -> None:
    """As a card would answer: library calls 100 us, kernels of ours as told, everything else 50."""
    for hunt, built in rows:
        us = (own_us if built.tile.own else 100.0) if isinstance(built.tile, ProductWay) else 50.0
        hunt.keep(search.Trial(built.tile, us, us * 0.99, us * 1.01))


@pytest.mark.parametrize(("own_us", "library_calls"), [(80.0, 0), (120.0, 1)])
def test_the_faster_way_is_chosen_frozen_and_replayed(
    library: Library, monkeypatch: pytest.MonkeyPatch, own_us: float, library_calls: int
) -> None:
    def measure(self: Any, asked: Any, rounds: int, energy: bool = False) -> None:
        built = [candidates.Built(h.key, t, {}, (), {}, (), b"") for h, t in asked]
        fake_times(self.sites, [(h, b) for (h, _), b in zip(asked, built, strict=True)], own_us)

    monkeypatch.setattr(search._Bench, "measure", measure)
    monkeypatch.setattr("forge.pipelines.device_of", lambda target: "cuda:0")
    options: dict[str, Any] = {"pipelines": ("standard",), "targets": ("h100",), "library": library}
    (made,) = compile_blueprint(forward(), budget_s=20.0, **options)
    assert made.externs == library_calls
    report = json.loads(library.side_file(made.artifact_id, "tuning.json"))
    (group,) = [g for g in report["groups"] if g["kind"] == "ProductWay"]
    assert {t["tile"]["own"] for t in group["trials"]} == {True, False}, "the journal keeps both"
    journal = json.loads(library.side_file(made.artifact_id, "journal.json"))
    monkeypatch.setattr(search._Bench, "measure", None)
    (again,) = compile_blueprint(forward(), replay=journal, **options)
    assert again.artifact_id == made.artifact_id


@pytest.mark.slow
def test_times_from_a_card_decide_a_product_where_there_is_none(library: Library, tmp_path: Path) -> None:
    (made,) = compile_blueprint(forward(), pipelines=("standard",), targets=("h100",), library=library)
    assert made.externs == 1
    path, times = tmp_path / "candidates", tmp_path / "times"
    write_candidates(library, made.artifact_id, path, trials=10)
    document = halves.read(path, halves.SCHEMA)
    (group,) = [g for g in document["groups"] if g["kind"] == "ProductWay"]
    rows = [r for r in document["candidates"] if r["key"] == group["key"] and "wrong" not in r]
    assert {r["tile"]["own"] for r in rows} == {True, False}
    assert not next(r for r in rows if not r["tile"]["own"])["plan"]["steps"][0].get("variants")
    best = next(r for r in rows if r["tile"]["block_m"])
    trials = [{**{k: r[k] for k in ("kind", "tile")}, "us": us, "low": us, "high": us}
              for r, us in ((r, 50.0 if r is best else 100.0) for r in rows)]  # fmt: skip
    told = {"arch": document["arch"], "toolchain": document["toolchain"]}
    halves.write({"schema": halves.TIMES, **told, "groups": [{**group, "trials": trials}]}, times)
    tuned = tune_artifact(library, made.artifact_id, measured=times)
    assert tuned.externs == 0 and tuned.artifact_id != made.artifact_id
    journal = json.loads(library.side_file(tuned.artifact_id, "journal.json"))["choices"]
    assert journal[group["key"]]["tile"] == best["tile"]
    tile = {k: v for k, v in best["tile"].items() if k != "own"}
    assert tile in [row["tile"] for row in journal.values() if row["kind"] == "MatmulTile"]


def test_a_shipped_way_is_taken_by_fast() -> None:
    plain = planned(forward())
    (key,) = plain.kernels.drafts
    shape = plain.kernels.choices.shapes[key]
    tile = MatmulTile(64, 128, 64, 4, 3)
    known = table([Entry("elsewhere", shape, way_of_tile(tile), 1.0, 2.0, "w", "c", "t")])
    steps = tuple(s for s in FAST.steps if s[0] not in ("build", "package"))
    kernels = Kernels(choices=Choices(priors=known))
    work = run(replace(FAST, steps=steps), Work(forward(), resolve("h100"), "fast", kernels=kernels))
    assert work.kernels.choices.made[key] == (way_of_tile(tile), "near") and externs(work) == 0
    assert tile in [s.plan.tile for s in work.kernels.by_key.values()]
    assert asdict(way_of_tile(tile))["own"] is True
    assert toolchain_of(work.target).startswith("triton") and front(forward(), "h100").kernels.drafts
