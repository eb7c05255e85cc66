"""The same judge on a card: clean kernels pass, faulty ones are refused, the card computes afterwards."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gauntlet import profile, quarantine
from gauntlet.isolate import ForkServer
from gauntlet.runner import judge
from library.manifest import pack, unpack
from library.store import Library
from tests.source import ROOT

pytestmark = pytest.mark.gpu


def _compiled(name: str, folder: Path) -> bytes:
    from forge.service import compile_file

    with Library.open(folder / "library", trust=folder / "trust") as library:
        made = compile_file(ROOT / "examples" / f"{name}.json", ("fast",), ("auto",), library=library)[0]
        return library.read(made.artifact_id)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """rmsnorm_residual compiled for the card here."""
    return _compiled("rmsnorm_residual", tmp_path_factory.mktemp("card"))


def changed(container: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    """The artifact with every kernel step of its launch manifest changed."""
    made = unpack(container)
    manifest = json.loads(json.dumps(made.manifest))
    for plan in manifest["launch"]["plans"]:
        for step in plan["steps"]:
            change(step)
    blobs = [(b["name"], b["kind"], bytes(made.blobs[b["name"]])) for b in manifest["blobs"]]
    return pack({k: v for k, v in manifest.items() if k not in ("artifact_id", "blobs")}, blobs)


def _one_row_less(step: dict[str, Any]) -> None:
    for argument in step["args"]:
        if argument["value"] == "rows":
            argument["value"] = ["max", 1, ["sub", "rows", 1]]


def _far_outside(step: dict[str, Any]) -> None:
    step["grid"][0] = ["mul", step["grid"][0], 1000]
    for argument in step["args"]:
        if argument["value"] == "rows":
            argument["value"] = ["mul", "rows", 1000]


def test_a_clean_artifact_passes(artifact: bytes, server: ForkServer) -> None:
    found = judge(artifact, "cuda:0", server, quick=True)
    assert found.passed, found.reason
    said = profile.measure(artifact, profile.Job("cuda:0", quick=True), server)
    assert said.outcome == "passed", said.reason
    wep = said.metrics["profile"]
    assert wep["memory_mb_peak"] > 0 and wep["host_us_per_call"] > 0 and 3 <= wep["processes"] <= 5
    assert said.metrics["card"]["nvml"] and said.metrics["nvbench"]
    called = {name for process in said.metrics["clock"] for name in process["called"]}
    assert called <= {"eager backward", "eager both"}, "autograd's streams are older than the capture"


@pytest.mark.parametrize(
    ("change", "sign"),
    [(_one_row_less, "depends on what lay in memory"), (_far_outside, "illegal memory access")],
)
def test_a_fault_is_refused_and_the_card_comes_back(
    artifact: bytes, server: ForkServer, change: Callable[[dict[str, Any]], None], sign: str
) -> None:
    found = judge(changed(artifact, change), "cuda:0", server, quick=True)
    assert found.passed is False and sign in found.reason
    assert quarantine.alive("cuda:0", server) == ""


def test_the_supervisor_holds_no_context(artifact: bytes, tmp_path: Path, server: ForkServer) -> None:
    """Neither this process's device files nor the fork server's name the card."""
    judge(artifact, "cuda:0", server, quick=True, stages=("integrity", "loads"))
    held = [str(p.readlink()) for p in Path(f"/proc/{server.pid}/fd").iterdir()]
    assert not [name for name in held if name.startswith("/dev/nvidia")], held


@pytest.mark.parametrize("name", ["attention", "groupnorm_silu"])
def test_library_calls_and_infinite_weights_are_judged_fairly(
    name: str, tmp_path: Path, server: ForkServer
) -> None:
    """Attention is given operands at odd addresses (they are copied first); group norm an infinite weight."""
    found = judge(_compiled(name, tmp_path), "cuda:0", server, quick=True)
    assert found.passed, found.reason


BUSY = """
import torch
x = torch.randn(8192, 8192, device="cuda")
print("on", flush=True)
while True:
    x = torch.mm(x, x).clamp(-1, 1)
"""


def test_a_busy_card_blames_nobody(artifact: bytes, server: ForkServer) -> None:
    with subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout and other.stdout.readline().strip() == "on"
        try:
            found = judge(artifact, "cuda:0", server, quick=True)
        finally:
            other.kill()
    assert found.passed, found.reason


def test_a_card_that_is_not_the_first(artifact: bytes) -> None:
    """Every stage, gradients too, on the card that was asked for."""
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("needs two cards: this test did NOT run")
    with ForkServer() as server:
        server.start()
        found = judge(artifact, "cuda:1", server, quick=True)
    assert found.passed, found.reason
    assert {s.name for s in found.stages if s.outcome == "passed"} >= {"numerics", "gradients", "memory"}
