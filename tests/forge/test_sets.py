"""Sums down the rows of tiles that several warps hold, by Triton's interpreter, beside what the plan means:
TRITON_INTERPRET=1 python -m tests.forge.test_sets
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from esper_ir.scalar import prim
from forge.emit.triton import emit
from forge.emit.triton_sets import sets_of
from forge.pipelines import FAST
from forge.plan import KernelPlan, Reduce, RowTile
from forge.service import front
from tests.forge.interpreted import load_kernel
from tests.forge.plan_interpreter import run_plan
from tests.forge.plans import BF16, F32, A, B, Builder
from tests.forge.row_ways import differs
from tests.forge.test_moments import blueprint

ROOT = Path(__file__).parents[2]
COLS = 64
TILES = [RowTile(32, 0, COLS, 4, 2, True, True), RowTile(16, 0, COLS, 2, 3, False, False, 3)]


def products(cols: int = COLS) -> KernelPlan:
    """Two sums down the columns: of x y, and of the greater of the two."""
    b = Builder("products", ("m", cols))
    x, y = b.load("x", BF16), b.load("y", BF16)
    for name, expr in (("p", prim("mul", A, B)), ("q", prim("maximum", A, B))):
        total = b.reduce(b.compute(expr, (x, y), F32), "sum", "col")
        b.store(total, name, F32, "c", partial=True)
    return b.plan(TILES[0], ("m",))


def moments() -> KernelPlan:
    work = front(blueprint("var", COLS, "bfloat16"), "h100", FAST.name)
    plans = [s.plan for s in work.kernels.by_key.values() if isinstance(s.plan.tile, RowTile)]
    return next(p for p in plans if any(isinstance(s, Reduce) and s.combine == "squares" for s in p.body))


def test_as_many_sets_as_lie_side_by_side() -> None:
    plan = products()
    assert [sets_of(plan, tile) for tile in TILES] == [16, 8]
    assert sets_of(plan, replace(TILES[0], warps=1)) == 1
    assert sets_of(plan, replace(TILES[0], block_rows=8)) == 8, "each row its own"
    assert sets_of(products(60), TILES[0]) == 32


@pytest.mark.slow
def test_triton_says_the_same() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.forge.test_sets"], cwd=ROOT, capture_output=True,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert len(found) == 2 * len(TILES) * len(ROWS) and not any(found.values()), found


ROWS = (1, 77)


def cases() -> Iterator[tuple[str, str]]:
    for plan in (products(), moments()):
        for tile in TILES:
            for rows in ROWS:
                yield f"{plan.name} {tile} {rows}", _beside(replace(plan, tile=tile), tile, rows)


def _beside(plan: KernelPlan, tile: RowTile, rows: int) -> str:
    generator = torch.Generator().manual_seed(5)
    given: dict[str, Tensor] = {}
    for name, dtype in zip(plan.buffers, plan.buffer_dtypes, strict=True):
        partial = any(a.partial and a.buffer == name for a in plan.accesses)
        count = COLS * (tile.programs if partial else rows)
        value = torch.randn(count, generator=generator) + 2.0
        given[name] = value.to(torch.bfloat16 if dtype is BF16 else torch.float32)
    want, own = ({name: t.clone() for name, t in given.items()} for _ in range(2))
    run_plan(plan, want, dict.fromkeys(plan.sizes, rows))
    kernel = load_kernel(emit(plan, interpreted=True), plan.name)
    kernel[(tile.programs, 1, 1)](*(own[b] for b in plan.buffers), *([rows] * len(plan.sizes)))
    return differs(own, want, bits=False)


if __name__ == "__main__":
    print(json.dumps(dict(cases())))
