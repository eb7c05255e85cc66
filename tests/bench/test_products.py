"""Families of products: blueprint and function mean the same, tiles are asked for by journal, figures say
which bar is met."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

import esper_ir.text as text
from bench import families, priors, products, products_worker, shares
from bench.correct import truth
from bench.prepare import UNBUILT
from bench.results import ROOT
from forge.lower import Kernels
from forge.pass_manager import run
from forge.plan import MatmulTile, ProductWay
from forge.service import compile_blueprint, front
from forge.target import resolve
from forge.tune.journal import Choices, read
from forge.tune.priors import read as read_entries
from forge.tune.priors import table, written
from forge.work import Work
from library.store import Library

TINY = families.cases(tiny=True)
RUN = [sys.executable, "-m", "bench.products"]


@pytest.mark.parametrize("case", TINY, ids=lambda c: c.name)
def test_blueprint_and_function_mean_the_same(case: families.Case, tmp_path: Path) -> None:
    (tmp_path / "made.json").write_bytes(case.text())
    args = case.block.inputs(case.sizes, torch.device("cpu"))
    out = case.block.fn(*args).detach()
    against = truth(tmp_path / "made.json", case.block.fn, args, torch.ones_like(out))
    assert len(against.eager) == (1 + len(args) if case.trains else 1)
    assert not against.why_wrong(against.eager)


def test_names_sizes_and_peers() -> None:
    every = families.cases()
    assert len({c.name for c in every}) == len(every)
    assert {c.family for c in every} == set(families.FAMILIES)
    assert [families.gated_hidden(w) for w in (256, 512, 1024, 4096)] == [768, 1536, 2816, 11008]
    alone, fused = (next(c for c in every if c.block.name == n) for n in ("matmul_nt", "matmul_residual"))
    assert alone.impls(cuda=True) == ("eager",) and not alone.trains
    assert fused.impls(cuda=True) == ("eager", "compile") and fused.epilogue
    assert families.cases(("lora",))[0].impls(cuda=True)[-1] == "compile-reduce-overhead"


def _tiles(work: Work) -> list[MatmulTile]:
    plans = [s.plan for s in work.kernels.by_key.values()]
    return [p.tile for p in plans if isinstance(p.tile, MatmulTile)]


def test_a_journal_asks_for_a_kernel_with_a_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(c for c in families.cases() if c.name == "matmul_tn_4096x4096x4096")
    blueprint = text.parse(case.text())
    ways = products.own_ways(blueprint, "h100", 4)
    assert len(ways) == 4 and not ways[0][0].block_m, "the template's own tile is among them"
    assert not _tiles(front(blueprint, "h100")), "by default the library does it"
    assert not products.own_ways(blueprint, "cpu-v3", 4)
    way, journal = ways[1]
    kernels = Kernels(choices=read(journal))
    planned = run(UNBUILT, Work(blueprint, resolve("h100"), "fast", kernels=kernels))
    (tile,) = _tiles(planned)
    assert (tile.block_m, tile.block_n, tile.warps) == (way.block_m, way.block_n, way.warps)
    assert tile.descriptors and way.descriptors


def row(family: str, block: str, impl: str, ms: float, **more: Any) -> dict[str, Any]:
    times = {f"{q}_{x}": ms for q in ("wall", "dev") for x in ("ms", "lo", "hi")}
    base = {"family": family, "case": block, "block": block, "size": "1", "dtype": "bfloat16", "phase": "f"}
    return {**base, "mode": "plain", "impl": impl, "correct": True, **times, **more}


def test_figures() -> None:
    rows = [
        row("products", "matmul_nn", "eager", 1.0), row("products", "matmul_nn", "esper-fast", 1.01),
        row("products", "matmul_nn", "esper-own", 1.25, tried=5),
        row("products", "matmul_residual", "eager", 1.5), row("products", "matmul_residual", "compile", 1.2),
        row("products", "matmul_residual", "esper-fast", 1.0),
        row("products", "matmul_residual", "esper-own", 0.8, correct=False),
        row("small", "lora", "eager", 1.0), row("small", "lora", "esper-fast", 2.0),
        row("swiglu", "swiglu", "liger", 1.2, phase="fb"),
        row("swiglu", "swiglu", "esper-fast", 1.0, phase="fb"),
    ]  # fmt: skip
    found = shares.figures(rows)
    own, chosen = found["own_products_vs_library_min"], found["chosen_products_vs_library_min"]
    assert own["value"] == 0.8 and not own["met"] and chosen["met"]
    assert found["chosen_products_with_epilogue_vs_best_peer_min"]["value"] == 1.2
    assert found["own_products_with_epilogue_vs_best_peer_min"]["value"] is None
    assert found["chosen_products_with_epilogue_vs_eager"]["value"] == 1.5
    assert found["small_f_wall_behind_a_peer"]["which"] == {"lora 1": 0.5}
    assert found["small_fb_graphed_behind_a_peer"]["value"] is None
    assert found["swiglu_fb_dev_vs_best_peer_min"]["met"]
    assert found["products_wrong_or_missing"]["which"] == ["matmul_residual esper-own"]
    assert shares.figures(rows[-2:]).keys() < found.keys(), "a family that was not measured says nothing"


def test_times_become_priors() -> None:
    """A product that ours wins becomes a kernel by default there and in its neighbourhood; else it stays."""
    rows = []
    for case, own in (("matmul_nn_4096x4096x4096", 0.5), ("matmul_nt_4096x4096x4096", 0.99)):
        way = ProductWay(True, 128, 256, 64, 8, 3, 8, 1, True)
        rows += [
            row("products", "_", "esper-fast", 1.0) | {"case": case, "externs": 1},
            row("products", "_", "esper-own", own) | {"case": case, "tile": asdict(way)},
        ]
    told = {"rows": rows, "tiny": False, "target": "h100", "card": "c", "toolchain": "t"}
    made = priors.ways_of(told)
    assert [e.what for e in made] == ["matmul_nn_4096x4096x4096", "matmul_nt_4096x4096x4096"]
    assert [e.tile for e in made] == [way, ProductWay(False)]
    assert [e.us for e in made] == [500.0, 1000.0]
    case = next(c for c in families.cases() if c.name == "matmul_nn_2048x2048x2048")
    kernels = Kernels(choices=Choices(priors=table(read_entries(written(made)))))
    work = Work(text.parse(case.text()), resolve("h100"), "fast", kernels=kernels)
    assert not _tiles(run(UNBUILT, work)), "an eighth of the work is not near"
    case = next(c for c in families.cases() if c.name == "matmul_nn_4096x4096x4096")
    work = Work(text.parse(case.text()), resolve("h100"), "fast", kernels=kernels)
    (tile,) = _tiles(run(UNBUILT, work))
    assert tile.descriptors


def test_tiles_that_do_not_run_alone_take_no_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "products.json").write_text("{}")
    job = {"folder": str(tmp_path), "place": str(tmp_path), "cases": [TINY[0].name], "tiny": True}
    share = products_worker.Share(job, tmp_path / "out")
    share.device = torch.device("cuda")
    tiles = [{"artifact": name, "tile": {"descriptors": name != "a"}} for name in "abc"]

    def bounded(words: list[str], seconds: float) -> str:
        assert json.loads(Path(words[-2]).read_text())["run"] == ["b", "c"]
        Path(words[-1]).write_text("b\n")
        return "exit code 1"

    monkeypatch.setattr(products_worker, "bounded", bounded)
    assert [t.get("why") for t in share._sound(share.cases[0], tiles)] == [
        None, None, "did not run alone: exit code 1",
    ]  # fmt: skip


@pytest.mark.slow
def test_the_whole_in_small(tmp_path: Path) -> None:
    """Compiled and timed here; every case has a row of ours that is right."""
    made = [*RUN, "--make", str(tmp_path / "made"), "--target", "cpu", "--tiny"]
    timed = [*RUN, "--from", str(tmp_path / "made"), "--out", str(tmp_path / "out"), "--jobs", "2"]
    for words in (made, [*timed, "--seconds", "400"]):
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stderr[-3000:]
    (path,) = (tmp_path / "out").glob("products-*.json")
    rows = json.loads(path.read_text())["rows"]
    right = {r["case"] for r in rows if r["impl"] == "esper-fast" and r["correct"]}
    assert right == {c.name for c in TINY}


@pytest.mark.slow
def test_tiles_become_artifacts(tmp_path: Path) -> None:
    case = next(c for c in families.cases() if c.name == "matmul_nt_2048x2048x2048")
    blueprint = text.parse(case.text())
    places: dict[str, Any] = {"trust": tmp_path / "trust", "roles": ("compiler",)}
    with Library.open(tmp_path / "library", **places) as library:
        made = {}
        for _, journal in products.own_ways(blueprint, "h100", 2):
            (found,) = compile_blueprint(blueprint, targets=("h100",), library=library, replay=journal)
            loaded = library.load(found.artifact_id, allow_unvalidated=True)
            (kernel,) = loaded.container.manifest["launch"]["kernels"]
            made[found.artifact_id] = (found.kernels, found.externs, len(kernel["params"]), kernel["scratch"])
    # The second keeps its descriptors in workspace, which it takes in the place of a null pointer.
    assert list(made.values()) == [(1, 0, 3, 2), (1, 0, 4, 1)]
