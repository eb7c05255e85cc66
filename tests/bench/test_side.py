"""Side by side without waiting for compilers: our process and the plain one, rows that say why."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import load, side, whole
from bench.blocks import named
from bench.models import SMALL_CNN, SMALL_DECODER, Cnn, Decoder, cnn_batch, decoder_batch
from bench.results import figure
from forge.service import compile_file
from library.store import Library
from tests.source import ROOT

BLOCK = named("rmsnorm_residual")


@pytest.fixture(scope="module")
def beside(tmp_path_factory: pytest.TempPathFactory) -> Any:
    home = tmp_path_factory.mktemp("side")
    home.chmod(0o700)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ESPER_LIBRARY", str(home / "library"))
        patch.setenv("ESPER_KEYS", str(home / "keys"))
        with Library.open() as library:
            (made,) = compile_file(BLOCK.blueprint, targets=("cpu",), library=library)
            library.record_verdict(made.artifact_id, {"stages": []}, passed=True)
            yield side.Side(library, made.artifact_id, BLOCK, {"rows": 2, "cols": 4096}, False, 1)


def test_a_fresh_process_of_ours_and_of_plain_torch(beside: side.Side, tmp_path: Path) -> None:
    ours, plain = (beside.fresh(impl, tmp_path) for impl in (side.OURS, "eager"))
    assert "error" not in ours and "error" not in plain, (ours, plain)
    assert ours["total_ms"] == pytest.approx(ours["load_ms"] + ours["first_step_ms"])
    assert ours["processes"] == ours["dynamo_frames"] == ours["triton_kernels"] == 0 and not ours["triton"]
    assert plain["second_step_ms"] > 0
    absent = beside.fresh("HF kernels", tmp_path / "nothing")
    assert "error" in absent


def test_rows_and_figures_say_what_is_missing(beside: side.Side, tmp_path: Path) -> None:
    good = {"load_ms": 3.0, "first_step_ms": 2.0, "second_step_ms": 1.0, "total_ms": 5.0}
    good |= {"import_torch_ms": 1.0, "context_ms": 1.0}
    counts = dict.fromkeys(("processes", "dynamo_frames", "inductor_misses", "triton_kernels"), 0)
    ours = side._row(beside, side.OURS, {}, [{**good, **counts}, {"error": "x"}], tmp_path)
    slow = side._row(
        beside, "torch.compile", {"total_ms": 9e3}, [{**good, **counts, "total_ms": 50.0}], tmp_path
    )
    none = side._row(beside, "Triton JIT", {"error": "why"}, [], tmp_path)
    assert (ours["failed"], ours["bytes"]) == (1, beside.library.record(beside.artifact).size)
    assert none["why"] == "why" and "total_ms" not in none and slow["ahead_s"] == 9.0
    found = side.figures([ours, slow, none])
    assert found["side_torch_compile_over_esper"]["value"] == 10.0
    assert found["side_triton_jit_load_and_first_step_ms"]["value"] is None
    assert found["side_esper_compilations"]["met"]
    whole.show([ours, slow, none])


def test_peers_are_listed_with_the_reason() -> None:
    found = side.available(BLOCK, torch.device("cpu"))
    assert found[side.OURS] == found["torch.compile"] == "" and "card" in found["Triton JIT"]
    assert set(found) == set(__import__("bench.fresh", fromlist=["LOADERS"]).LOADERS)


def test_loading_has_bounds_of_its_own() -> None:
    pieces = {name: {"p50": 10.0} for name in (*whole.HOST_PIECES, "driver")}
    loaded = {
        "figures": {"load_uncached_us_p99": figure(900.0, "us")},
        "details": {"pieces": pieces},
    }
    found = whole._gated(loaded)
    assert (
        found["load_uncached_us_p99"]["met"] and found["load_uncached_us_p99"]["target"] == load.UNCACHED_US
    )
    assert found["load_without_driver_us_p50"]["value"] == 60.0


def test_the_triton_peer_is_right() -> None:
    script = """
import torch
from bench.blocks import named
from bench.jit import rmsnorm_residual
torch.manual_seed(0)
x, r, w = (torch.randn(s, requires_grad=True) for s in ((5, 48), (5, 48), (48,)))
flow = torch.randn(5, 48)
plain = named("rmsnorm_residual").fn
for fn in (plain, rmsnorm_residual):
    y = fn(x, r, w)
    found = (y, *torch.autograd.grad(y, (x, r, w), flow))
    wanted = found if fn is plain else wanted
torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
"""
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_the_whole_models_train() -> None:
    torch.manual_seed(0)
    decoder, cnn, cpu = Decoder(SMALL_DECODER), Cnn(SMALL_CNN), torch.device("cpu")
    for model, batch in (
        (decoder, decoder_batch(SMALL_DECODER, 2, 16, cpu)),
        (cnn, cnn_batch(SMALL_CNN, 4, cpu)),
    ):
        optimizer, losses = torch.optim.SGD(model.parameters(), 0.1), []
        for _ in range(6):
            loss = model(*batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < losses[0] - 0.1
