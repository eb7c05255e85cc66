"""Mean and variance down the columns in one reading: found, and as near to float64 as eager where the mean is
large, single elements are heavy, or programs have few rows or none.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import esper_ir.text as text
from esper_ir.graph import Blueprint
from esper_ir.oracle import compare
from esper_ir.reference import evaluate
from esper_ir.types import DType
from forge.pipelines import FAST
from forge.plan import Reduce
from forge.service import front
from tests.forge.interpreted import Interpreter
from tests.forge.trees import install
from tests.forge.whole import Machine, Tensors, pick

ROOT = Path(__file__).parents[2]
MEAN: dict[str, Any] = {"id": "m", "op": "mean", "inputs": ["x"], "attrs": {"dims": [0], "keepdim": True}}
VAR: dict[str, Any] = {"id": "v", "op": "var", "inputs": ["x"], "attrs": {"dims": [0], "correction": 0}}
FORMS: dict[str, list[dict[str, Any]]] = {
    "var": [MEAN, VAR],
    "mean of squares": [
        MEAN, {"id": "d", "op": "sub", "inputs": ["x", "m"]}, {"id": "s", "op": "mul", "inputs": ["d", "d"]},
        {"id": "v", "op": "mean", "inputs": ["s"], "attrs": {"dims": [0]}},
    ],
    "sums and a power": [
        {"id": "t", "op": "sum", "inputs": ["x"], "attrs": {"dims": [0]}},
        {"id": "m", "op": "div", "inputs": ["t", "n"]}, {"id": "d", "op": "sub", "inputs": ["x", "m"]},
        {"id": "s", "op": "pow", "inputs": ["d", 2.0]},
        {"id": "v", "op": "sum", "inputs": ["s"], "attrs": {"dims": [0]}},
    ],
    "the operator": [MEAN, {"id": "v", "op": "squared_deviations", "inputs": ["x"], "attrs": {"dims": [0]}}],
}  # fmt: skip
OTHERS: dict[str, list[dict[str, Any]]] = {
    "about another mean": [
        MEAN, {"id": "h", "op": "mul", "inputs": ["m", 0.5]}, {"id": "d", "op": "sub", "inputs": ["x", "h"]},
        {"id": "s", "op": "mul", "inputs": ["d", "d"]},
        {"id": "v", "op": "sum", "inputs": ["s"], "attrs": {"dims": [0]}},
    ],
    "along rows": [
        {"id": "m", "op": "mean", "inputs": ["x"], "attrs": {"dims": [1], "keepdim": True}},
        {"id": "v", "op": "var", "inputs": ["x"], "attrs": {"dims": [1], "correction": 0}},
    ],
}  # fmt: skip


def blueprint(form: str, cols: int, dtype: str = "float32", tune: int = 300) -> Blueprint:
    nodes = [dict(node) for node in (FORMS | OTHERS)[form]]
    for node in nodes:
        node["inputs"] = [i if i != "n" else float(tune) for i in node["inputs"]]
    fixed = form == "sums and a power"
    document = {
        "format": "esper-blueprint/1",
        "name": "moments",
        "dims": {} if fixed else {"n": {"min": 1, "max": 1 << 17, "tune": [tune]}},
        "inputs": {"x": {"dtype": dtype, "shape": [tune if fixed else "n", cols]}},
        "nodes": nodes,
        "outputs": ["m", "v"],
    }
    return text.parse(json.dumps(document))


def drawn(kind: str, rows: int, cols: int) -> torch.Tensor:
    x = torch.randn(rows, cols, dtype=torch.float64, generator=torch.Generator().manual_seed(rows + cols))
    if kind == "far":
        return x + 1e5
    if kind == "heavy":
        x[rows // 3] *= 1e3
    if kind == "one sign":
        return x.abs()
    if kind == "constant":
        return torch.full_like(x, 3.14159)
    if kind == "not finite":
        x[rows // 2, 0] = x[0, 1] = math.inf
        x[-1, 2], x[0, 3], x[:, 4] = -math.inf, math.nan, math.inf
    return x


KINDS = ("plain", "offset", "far", "heavy", "one sign", "constant", "not finite")


def judged(machine: Machine, dtype: str, rows: int, cols: int) -> dict[str, str]:
    """Why variances are wrong, by kind of data: every column has the next kind."""
    made, low, count = machine.work.blueprint, pick(machine.work, "inference", {"n": rows}), len(KINDS)
    x = torch.zeros(rows, cols, dtype=torch.float64)
    for at, kind in enumerate(KINDS):
        x[:, at::count] = drawn(kind, rows, len(range(at, cols, count)))
    x = x.to(getattr(torch, dtype))
    memory = machine.run(low.plan, {"x": x}, {"n": rows})
    found: Tensors = {b.name: value for b, value in zip(low.plan.buffers, memory, strict=True)}
    eager = evaluate(made, {"x": x}, precision="declared")["v"]
    wide = evaluate(made, {"x": x.double()}, precision="float64")["v"]
    out = {}
    for at, kind in enumerate(KINDS):
        own, exact, theirs = (v[at::count] for v in (found["v"], wide, eager))
        said = compare(own, exact, theirs, rows, DType(dtype))
        if not said.passed:
            out[kind] = said.reason
    return out


def squares(form: str, target: str) -> list[str]:
    """What the kernels reduce by, down the columns."""
    work = front(blueprint(form, 8), target, FAST.name)
    bodies = [s for source in work.kernels.by_key.values() for s in source.plan.body]
    return [s.combine for s in bodies if isinstance(s, Reduce) and s.axis == "col"]


@pytest.mark.parametrize("target", ["h100", "cpu-v3"])
@pytest.mark.parametrize("form", [*FORMS])
def test_mean_and_variance_are_made_in_one_reading(form: str, target: str) -> None:
    found = squares(form, target)
    assert "squares" in found and "rest" in found


@pytest.mark.parametrize("form", [*OTHERS])
def test_other_squares_are_not(form: str) -> None:
    assert "squares" not in squares(form, "h100")


@pytest.mark.parametrize("backend", ["plans", "c"])
@pytest.mark.parametrize(
    ("rows", "dtype"), [(1, "float32"), (3, "float32"), (17, "bfloat16"), (1000, "float32")]
)
def test_variances_in_c_are_as_near_to_float64_as_eager(rows: int, dtype: str, backend: str) -> None:
    work = front(blueprint("var", 69, dtype), "cpu", FAST.name)
    assert not judged(Machine(work, backend), dtype, rows, 69)


def test_variances_in_triton_are_as_near_to_float64_as_eager() -> None:
    """Full blocks of rows and others, programs with fewer rows or none, blocks of one set or of many."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.forge.test_moments"], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    answers = json.loads(done.stdout)
    assert len(answers) == len(TILES) and not any(answers.values()), answers


TILES = [(64, 100, 1), (64, 100, 75), (256, 40, 61), (600, 20, 13), (35, 600, 600)]
"""Columns, tuned rows, rows."""


def main() -> None:
    install()
    out = {}
    for cols, tune, rows in TILES:
        work = front(blueprint("var", cols, tune=tune), "h100", FAST.name)
        out[f"{cols} {tune} {rows}"] = judged(Interpreter(work), "float32", rows, cols)
    print(json.dumps(out))


if __name__ == "__main__":
    main()
