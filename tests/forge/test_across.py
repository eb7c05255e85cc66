"""Reductions whose memory runs along the rows: one kernel, one reading, and the same meaning."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from esper_ir.builder import Builder, Value
from esper_ir.graph import Blueprint
from forge.along import apart
from forge.lowered import Launch
from forge.picked import places
from forge.plan import Reduce
from forge.service import front
from tests.forge.whole import check, close, compared

ROOT = Path(__file__).parents[2]
F = "float32"


def rms(b: Builder, shape: list[int | str], dtype: str) -> Value:
    x = b.input("x", dtype, shape)
    mean = b.mean(b.square(x), dims=[1], keepdim=True)
    return b.mul(b.div(x, b.sqrt(b.add(mean, 1e-5))), b.param("w", dtype, [shape[1], 1, 1]))


def softmax(b: Builder, shape: list[int | str], dtype: str) -> Value:
    return b.mul(b.softmax(b.clamp(b.input("x", dtype, shape), min=-1.0, max=1.0), dim=1), 2.0)


def logsumexp(b: Builder, shape: list[int | str], dtype: str) -> Value:
    return b.op("logsumexp", b.input("x", dtype, shape), dims=[1])


def mean(b: Builder, shape: list[int | str], dtype: str) -> Value:
    return b.mean(b.input("x", dtype, shape), dims=[1])


def argmin(b: Builder, shape: list[int | str], dtype: str) -> Value:
    return b.op("argmin", b.input("x", dtype, shape), dim=1)


def argmax(b: Builder, shape: list[int | str], dtype: str) -> Value:
    return b.op("argmax", b.input("x", dtype, shape), dim=1)


def exclusive(b: Builder, shape: list[int | str], dtype: str, reverse: bool = False) -> Value:
    x, size = b.input("x", dtype, shape), int(shape[1])
    zeros = b.op("full", shape=[shape[0], 3, *shape[2:]], value=0.0, dtype=dtype)
    run = b.op("cumsum", x, dim=1, reverse=reverse)
    part = b.op("slice", run, dim=1, start=3 if reverse else 0, end=size if reverse else size - 3, step=1)
    return b.op("cat", *((part, zeros) if reverse else (zeros, part)), dim=1)


def exclusive_from_the_end(b: Builder, shape: list[int | str], dtype: str) -> Value:
    return exclusive(b, shape, dtype, reverse=True)


def scaled(b: Builder, shape: list[int | str], dtype: str) -> Value:
    x = b.input("x", dtype, shape)
    return b.mul(x, b.reshape(b.param("w", dtype, [shape[1]]), shape=[shape[1], 1]))


Make = Callable[[Builder, list[int | str], str], Value]
CASES: dict[str, tuple[Make, list[int | str], str]] = {
    "rms": (rms, ["n", 5, 7, 9], F), "rms of many channels": (rms, ["n", 70, 3, 11], "bfloat16"),
    "softmax": (softmax, ["n", 6, 5, 13], F), "softmax swept": (softmax, ["n", 520, 33], F),
    "logsumexp": (logsumexp, ["n", 12, 100], "bfloat16"), "mean": (mean, ["n", 300, 45], F),
    "even mean": (mean, ["n", 20, 64], F), "argmin": (argmin, ["n", 300, 45], F),
    "argmax": (argmax, ["n", 17, 37], "bfloat16"), "argmax of long rows": (argmax, ["n", 17000], F),
    "exclusive sum": (exclusive, ["n", 37], F), "columns": (exclusive, ["n", 21, 5], F),
    "from the end": (exclusive_from_the_end, ["n", 37], F), "scaled": (scaled, ["n", 3, 4100], "bfloat16"),
}  # fmt: skip


def blueprint(name: str) -> Blueprint:
    make, shape, dtype = CASES[name]
    b = Builder("across")
    b.dim("n", min=1, max=64, tune=(2,))
    return b.build(make(b, shape, dtype))


def given(name: str) -> dict[str, torch.Tensor]:
    """Of argmin and argmax: few values, so that there are ties; rows of one value, of infinities, and with
    values that are no numbers."""
    _, shape, dtype = CASES[name]
    x = torch.randint(-3, 4, [2, *(int(s) for s in shape[1:])], generator=torch.Generator().manual_seed(3))
    x = x.to(getattr(torch, dtype))
    if x.dim() == 2:
        x[1, 1900:] = math.nan
        return {"x": x}
    x[0, :, 1], x[0, :, 2], x[1, :, 3] = 1.0, math.inf, -math.inf
    x[1, 5:9, 4], x[0, -1, 5] = math.nan, math.nan
    return {"x": x}


def interpreted(name: str) -> dict[str, bool]:
    """Whether each result of the kernels' text is right."""
    from tests.forge.interpreted import Interpreter

    work = front(blueprint(name), "h100")
    values = given(name) if "arg" in name else None
    found, wide, eager = compared(work, Interpreter(work), {"n": 2}, values)
    if values is not None:
        return {n: torch.equal(v, eager[n]) for n, v in found.items()}
    return {n: close(v, wide[n], eager[n]) for n, v in found.items()}


QUICK = ("rms", "softmax", "argmin", "exclusive sum")
"""Interpreted in seconds."""


def answers(names: Iterable[str]) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.forge.test_across", *names], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}, timeout=540,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("names", [QUICK, pytest.param(tuple(CASES), marks=pytest.mark.slow)], ids=len)
def test_the_text_means_what_eager_means(names: tuple[str, ...]) -> None:
    found = answers(names)
    assert found.keys() == set(names) and all(found.values()), found
    assert not [name for name, right in found.items() if not all(right.values())], found


@pytest.mark.parametrize("name", [n for n in CASES if "arg" not in n])
@pytest.mark.parametrize(("target", "backend"), [("h100", "plans"), ("cpu", "c")])
def test_plans_mean_the_same(name: str, target: str, backend: str) -> None:
    check(blueprint(name), {"n": 3}, target, backend)


@pytest.mark.parametrize("name", [n for n in CASES if n != "argmax of long rows"])
def test_one_kernel_reads_once(name: str) -> None:
    """Forward, and backward where no other axes are summed; blocks of rows stay inside of one image."""
    for low in front(blueprint(name), "h100").lowerings:
        steps = [s for _, made in low.lowered for s in made.steps if isinstance(s, Launch)]
        assert len(steps) == 1 or (low.phase.name == "backward" and name[:3] in ("rms", "sca")), steps
        reducing = any(isinstance(r, Reduce) for r in steps[0].plan.body)
        assert apart(steps[0].plan) or not reducing or name in ("even mean", "scaled") or len(steps) > 1


def test_where_an_extremum_is_needs_no_reading_of_its_own() -> None:
    (low,) = front(blueprint("argmin"), "h100").lowerings
    (step,) = (s for _, made in low.lowered for s in made.steps)
    assert isinstance(step, Launch)
    (place,) = places(step.plan).values()
    assert place.of.combine == "min" and place.nan and place.none == 300


if __name__ == "__main__":
    print(json.dumps({name: interpreted(name) for name in sys.argv[1:]}))
