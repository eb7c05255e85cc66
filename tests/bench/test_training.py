"""Whole models at a size for tests: every way trains alike, and rows and figures say what happened."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import training, whole_models
from bench.prepare import compile_models
from bench.training import COMPILE, EAGER, INSIDE, LARGE, OURS, SMALL, WAYS
from bench.whole_models import Bench
from docs import measured
from library.store import Library

OPTIONS = {"models_seconds": 600.0, "cards": "", "skip": (), "unproven": True, "threads": 1}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(library, artifact by key) of what is swapped into the small models."""
    made = tmp_path_factory.mktemp("training")
    made.chmod(0o700)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ESPER_LIBRARY", str(made / "library"))
        patch.setenv("ESPER_KEYS", str(made / "keys"))
        with Library.open() as library:
            compiled = compile_models("small", "cpu", library)
        yield made / "library", {key: a for a, facts in compiled.items() for key in facts["modules"]}


def lines_of(home: Any, folder: Path, model: str, way: str) -> list[dict[str, Any]]:
    library, ids = home
    (folder / "go").touch()
    job = {
        "which": "small", "model": model, "way": way, "library": str(library), "ids": ids, "unproven": True,
        "threads": 1, "go": str(folder / "go"), "repeats": 3, "span_s": 0.05,
    }  # fmt: skip
    found: list[dict[str, Any]] = []
    training.run(job, lambda kind, **fields: found.append({"kind": kind, **fields}))
    return found


@pytest.mark.filterwarnings("ignore::runtime.loader.UnvalidatedWarning")
@pytest.mark.parametrize("model", ["decoder", "cnn"])
def test_ours_trains_as_eager_does(home: Any, tmp_path: Path, model: str) -> None:
    plain, ours = (lines_of(home, tmp_path, model, way) for way in (EAGER, OURS))
    assert [line["kind"] for line in ours] == ["ready", "row"]
    losses = ours[0]["losses"]
    assert len(losses) == training.CURVE and losses[-1] < losses[0] and ours[0]["moved"] == []
    noise = max(training.deviation(m, plain[0]["losses"]) for m in plain[0]["moved"])
    told = whole_models._compared(losses, plain[0], noise)
    assert told["correct"], told
    assert ours[1]["swapped"] == (4 if model == "decoder" else 3) and not ours[1]["eager_calls"]
    assert ours[1]["wall_ms"] > 0 and plain[1]["swapped"] == 0
    worse = [loss * 1.01 for loss in losses]
    assert not whole_models._compared(worse, plain[0], noise)["correct"]


def test_every_way_sees_the_same(home: Any) -> None:
    device = torch.device("cpu")
    for model in SMALL:
        first, second = model.make(), model.make()
        assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
        assert all(map(torch.equal, model.data(device, 1), model.data(device, 1)))
        assert set(training.plan("small", model, home[1])) == set(model.swaps())
    assert "8192" in json.dumps(LARGE[0].swaps()["head"]["dims"]) and LARGE[1].swaps()


def timed(way: str, ms: float) -> list[dict[str, Any]]:
    times = {"wall_ms": ms, "wall_lo": ms * 0.9, "wall_hi": ms * 1.1, "wall_iqr": 0.1, "dev_ms": None}
    ready = {"kind": "ready", "losses": [1.0, 0.5], "moved": [[1.0, 0.501]], "first_step_s": 1.0}
    return [ready, {"kind": "row", **times, "steps": 9, "peak_MiB": 10.0, "swapped": 0, "eager_calls": 0}]


def test_rows_and_figures(tmp_path: Path) -> None:
    bench = Bench("small", tmp_path, {}, OPTIONS, False)
    ways = {EAGER: timed(EAGER, 4.0), COMPILE: timed(COMPILE, 2.0), OURS: timed(OURS, 1.0)}
    found = {("decoder", way): lines for way, lines in ways.items()}
    found["decoder", INSIDE] = [{"kind": "killed", "why": "stopped after 9 s"}]
    rows = bench._rows(SMALL[0], found)
    assert [row["impl"] for row in rows] == list(WAYS)
    ours, lost = rows[2], rows[3]
    assert ours["per_s"] == 1e3 * 2 * 16 / 1.0 and ours["counted"] == "tokens" and ours["correct"]
    assert not lost["correct"] and lost["wall_ms"] is None and lost["why"] == "stopped after 9 s"
    made = whole_models.figures(rows)
    assert made["decoder_swapped_over_compile"]["value"] == 2.0
    assert made["decoder_swapped_over_compile"]["met"]
    assert made["decoder_inside_compile_over_compile"]["value"] is None
    assert made["decoder_swapped_loss_over_noise"]["value"] == 0.0
    head = {"bench": "models", "card": "cpu", "commit": "c" * 40, "date": "2026-01-01T00:00:00Z"}
    (table,) = measured.model_table([{**head, "versions": {"torch": "2"}, "rows": rows}])
    assert "| esper-fast | 32000 tokens | 1.00 | 10 | 0.00 |" in table and "stopped after 9 s" in table


@pytest.mark.slow
def test_all_ways_in_processes(home: Any) -> None:
    library, ids = home
    found = Bench("small", library, ids, OPTIONS, False).measure()
    assert all(row["correct"] and row["per_s"] > 0 for row in found["rows"]), found["rows"]
    assert len(found["rows"]) == 8 and all(f["value"] is not None for f in found["figures"].values())
