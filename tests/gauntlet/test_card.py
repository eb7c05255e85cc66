"""The same judge on a card: clean kernels pass, faulty ones are refused, the card computes afterwards."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gauntlet import quarantine
from gauntlet.isolate import ForkServer
from gauntlet.runner import judge
from library.manifest import pack, unpack
from library.store import Library
from tests.source import ROOT

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """rmsnorm_residual compiled for the card here."""
    from forge.service import compile_file

    folder = tmp_path_factory.mktemp("card")
    with Library.open(folder / "library", trust=folder / "trust") as library:
        path = ROOT / "examples" / "rmsnorm_residual.json"
        made = compile_file(path, ("fast",), ("auto",), library=library)[0]
        return library.read(made.artifact_id)


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
    profile = next(s.metrics["profile"] for s in found.stages if s.name == "timing")
    assert profile["forward_ms_median"] > 0 and profile["memory_mb_peak"] > 0


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
