"""Rows, groups of rows, and the rows again as one kernel: the same numbers, and memory read once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

import esper_ir.text as text
from esper_ir.graph import Blueprint
from forge import band
from forge.band import BandTile
from forge.emit.triton import emit_kernel
from forge.plan import KernelPlan
from forge.service import front
from forge.work import Work
from tests.forge.test_blocks import EXAMPLES
from tests.forge.test_interpreter import ROOT
from tests.forge.whole import Machine, check, compared


def document(channels: int, groups: int, image: list[int], dtype: str = "bfloat16") -> dict[str, Any]:
    data = json.loads((EXAMPLES / "groupnorm_silu.json").read_text())
    data["inputs"]["x"] = {"dtype": dtype, "shape": ["n", channels, *image]}
    for leaf in data["params"].values():
        leaf |= {"dtype": dtype, "shape": [channels]}
    data["nodes"][0]["attrs"]["num_groups"] = groups
    data["dims"]["n"]["tune"] = [16]
    return data


def blueprint(channels: int, groups: int, image: list[int], dtype: str = "bfloat16") -> Blueprint:
    return text.parse(json.dumps(document(channels, groups, image, dtype)))


def bands(work: Work) -> list[KernelPlan]:
    return [s.plan for s in work.kernels.by_key.values() if isinstance(s.plan.tile, BandTile)]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(band, "LONG", 1)
    monkeypatch.setattr(band, "MANY", 1)
    monkeypatch.setattr(band, "FEW", 1)


SHAPES = {
    "powers of two": (16, 4, [16, 16], "bfloat16"),
    "unlike": (20, 4, [15, 18], "bfloat16"),
    "float32": (12, 4, [13, 20], "float32"),
    "one group": (6, 1, [16, 17], "float16"),
    "in registers": (6, 2, [32, 32], "bfloat16"),
}


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", SHAPES)
def test_group_norm_reads_memory_once(name: str) -> None:
    """Forward one kernel; backward one for the operand's gradient, which leaves what the others need."""
    work = check(blueprint(*SHAPES[name]), {"n": 3}, "h100")
    made = bands(work)
    assert made and all(p.tile.warps in (4, 8, 16) for p in made)
    steps = {low.phase.name: len(low.plan.steps) for low in work.lowerings}
    assert steps["inference"] == steps["forward"] == 1 and steps["backward"] < 6
    for plan in made:
        tile = plan.tile
        assert isinstance(tile, BandTile)
        assert tile.inner and not tile.inner & set(plan.buffers)


def test_cards_of_real_sizes() -> None:
    """Few programs, or rows too long for registers: three kernels as before."""
    data = document(320, 32, [64, 64])
    assert bands(front(text.parse(json.dumps(data)), "h100"))
    assert not bands(front(text.parse(json.dumps(data)), "cpu"))
    data["dims"]["n"]["tune"] = [4]
    few = bands(front(text.parse(json.dumps(data)), "h100"))
    assert few and all(p.tile.held for p in few if isinstance(p.tile, BandTile)), "forward only"
    data["dims"]["n"]["tune"] = [1]
    assert not bands(front(text.parse(json.dumps(data)), "h100"))
    for channels, image in ((320, [256, 256]), (320, [16, 16]), (4096, [64, 64])):
        assert not bands(front(blueprint(channels, 32, image), "h100"))


@pytest.mark.parametrize("image", [[48, 64], [56, 56], [64, 40], [64, 64]])
def test_warps_are_a_power_of_two_for_any_image(image: list[int]) -> None:
    made = bands(front(blueprint(64, 32, image), "h100"))
    assert made and all(p.tile.warps in (4, 8, 16) for p in made)


def test_rows_that_fit_registers_are_read_once() -> None:
    """Forward: all loads before the first sum, and what is kept of a row is as it lies in memory."""
    made = [p for p in bands(front(blueprint(320, 32, [64, 64]), "h100")) if getattr(p.tile, "held", False)]
    assert len(made) == 2, "inference and forward"
    for plan in made:
        lines = emit_kernel(plan).splitlines()
        loads = [at for at, line in enumerate(lines) if "held_" in line and "tl.load(" in line]
        sums = [at for at, line in enumerate(lines) if "tl.reduce(" in line]
        assert len(loads) == 10 and len(sums) == 2 and max(loads) < min(sums)
    wide = bands(front(blueprint(320, 32, [64, 64], "float32"), "h100"))
    assert wide and not any(getattr(p.tile, "held", False) for p in wide)


def elsewhere(kind: str) -> dict[str, Any]:
    """Group norm, times or plus what other rows of the same tensor hold."""
    data = document(*SHAPES["in registers"])
    moved = {
        "images reversed": ("flip", {"dims": [0]}), "channels reversed": ("flip", {"dims": [1]}),
        "one channel": ("slice", {"dim": 1, "start": 4, "end": 5}),
    }  # fmt: skip
    op, attrs = moved[kind]
    data["nodes"].append({"id": "m", "op": op, "inputs": ["x"], "attrs": attrs})
    data["nodes"].append({"id": "z", "op": "mul", "inputs": ["y", "m"]})
    return data | {"outputs": ["z"]}


def activated() -> dict[str, Any]:
    """Group norm of what is made of a tensor and a value of its channels."""
    data = document(*SHAPES["in registers"])
    data["params"]["c"] = {**data["params"]["b"], "shape": [6, 1, 1]}
    norm, *others = data["nodes"]
    before = [
        {"id": "u", "op": "add", "inputs": ["x", "c"]}, {"id": "v", "op": "tanh", "inputs": ["u"]},
    ]  # fmt: skip
    norm = {**norm, "inputs": ["v", *norm["inputs"][1:]]}
    return data | {"nodes": [*before, norm, *others]}


@pytest.mark.usefixtures("small")
def test_moments_of_rows_in_registers_are_of_what_is_made_of_them() -> None:
    """For the mean, for the variance and for the results."""
    made = bands(check(text.parse(json.dumps(activated())), {"n": 3}, "h100"))
    tile = made[0].tile
    assert isinstance(tile, BandTile) and tile.held
    assert sum("tanh" in line for line in emit_kernel(made[0]).splitlines()) == 3 * tile.rows


ELSEWHERE = ["images reversed", "channels reversed", "one channel"]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("kind", ELSEWHERE)
def test_rows_read_again_from_elsewhere_do_not_wait_in_registers(kind: str) -> None:
    made = bands(check(text.parse(json.dumps(elsewhere(kind))), {"n": 3}, "h100"))
    assert made and not any(p.tile.held for p in made if isinstance(p.tile, BandTile))


@pytest.mark.usefixtures("small")
def test_equal_text_means_equal_parts() -> None:
    one, two = (bands(front(blueprint(c, 4, [16, 16]), "h100"))[0] for c in (16, 24))
    again = bands(front(blueprint(16, 4, [16, 16]), "h100"))[0]
    assert one.digest == again.digest != two.digest


CODE = """
import json, sys
from forge import band
band.LONG = band.MANY = band.FEW = 1
import esper_ir.text as text
from forge.service import front
from tests.forge.interpreted import compare
cases = json.loads(sys.argv[1])
print(json.dumps([compare(front(text.parse(json.dumps(c)), "h100"), {"n": 3}, "g") for c in cases]))
"""


CASES = {**{name: document(*shape) for name, shape in SHAPES.items()}, "activated": activated()}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*(n for n in CASES if n != "one group"), *ELSEWHERE])
def test_triton_says_the_same(name: str) -> None:
    cases = [elsewhere(name) if name in ELSEWHERE else CASES[name]]
    done = subprocess.run(
        [sys.executable, "-c", CODE, json.dumps(cases)], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    for answer in json.loads(done.stdout):
        assert answer["results"] and all(r["ok"] for r in answer["results"].values()), answer


@pytest.mark.usefixtures("small")
def test_statistics_far_from_zero() -> None:
    """Rows that differ by much more than they vary inside keep the variance of each."""
    work = front(blueprint(8, 2, [16, 16], "float32"), "h100")
    x = torch.randn(2, 8, 16, 16) + 1000.0 * torch.arange(8.0).reshape(1, 8, 1, 1)
    given = {"x": x, "w": torch.ones(8), "b": torch.zeros(8)}
    found, wide, _ = compared(work, Machine(work), {"n": 2}, given)
    torch.testing.assert_close(found["y"].double(), wide["y"], rtol=1e-4, atol=1e-4)
