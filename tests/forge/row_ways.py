"""Ways to walk rows, by Triton's interpreter: TRITON_INTERPRET=1 python -m tests.forge.row_ways

Printed is a JSON list of {"name", "why"}: "" where a kernel leaves what it has to.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from esper_ir.scalar import Arg, prim
from esper_ir.types import DType
from forge.emit.triton import emit
from forge.plan import KernelPlan, RowTile
from tests.forge.interpreted import load_kernel
from tests.forge.plan_interpreter import run_plan
from tests.forge.plans import BF16, F32, A, B, Builder, layer_norm, rms_backward

INF, NAN = math.inf, math.nan
COLS = 20
"""No whole number of blocks of 8."""


def softmax() -> KernelPlan:
    """As blueprints have it: the difference and its exponential one after the other; and the maximum."""
    b = Builder("softmax", ("m", COLS))
    x = b.load("x", F32)
    top = b.reduce(x, "max")
    e = b.compute(prim("exp", A), (b.compute(prim("sub", A, B), (x, top), F32),), F32)
    total = b.reduce(e)
    b.store(b.compute(prim("div", A, B), (e, total), F32), "y", F32)
    b.store(top, "top", F32, "r")
    b.store(total, "total", F32, "r")
    return b.plan(RowTile(1, 1, 8, 1), ("m",))


def logsumexp() -> KernelPlan:
    """With zero in the place of an infinite maximum."""
    b = Builder("logsumexp", ("m", COLS))
    x = b.load("x", F32)
    top = b.reduce(x, "max")
    size = b.compute(prim("abs", A), (top,), F32)
    base = b.compute(prim("where", A, 0.0, B), (b.compute(prim("eq", A, INF), (size,), DType.bool), top), F32)
    e = b.compute(prim("exp", A), (b.compute(prim("sub", A, B), (x, base), F32),), F32)
    total = b.compute(prim("log", A), (b.reduce(e),), F32)
    b.store(b.compute(prim("add", A, B), (total, base), F32), "y", F32, "r")
    return b.plan(RowTile(1, 1, 8, 1), ("m",))


def several() -> KernelPlan:
    """Reductions of two depths, of three kinds, one of them needed before the next of its depth stands."""
    b = Builder("several", ("m", COLS))
    x, w = b.load("x", F32), b.load("w", F32, "c")
    first = b.reduce(x)
    centred = b.compute(prim("sub", A, prim("div", B, float(COLS))), (x, first), F32)
    b.store(centred, "y", F32)
    high, low = b.reduce(b.compute(prim("mul", A, B), (x, w), F32), "max"), b.reduce(x, "min")
    spread = b.reduce(b.compute(prim("mul", A, A), (centred,), F32))
    size = b.reduce(b.compute(prim("abs", A), (centred,), F32))
    alone = b.reduce(w)
    total = prim("add", prim("add", A, B), prim("add", Arg(2), prim("add", Arg(3), Arg(4))))
    b.store(b.compute(total, (high, low, spread, size, alone), F32), "s", F32, "r")
    return b.plan(RowTile(1, 1, 32, 1), ("m",))


def memory(plan: KernelPlan, rows: int) -> dict[str, Tensor]:
    """Every buffer of the plan; x has rows that softmax knows nothing of."""
    generator = torch.Generator().manual_seed(7)
    out: dict[str, Tensor] = {}
    for name, dtype in zip(plan.buffers, plan.buffer_dtypes, strict=True):
        access = next(a for a in plan.accesses if a.buffer == name)
        tile = plan.tile
        assert isinstance(tile, RowTile)
        lead = tile.programs if access.partial else rows if "r" in access.letters() else 1
        count = lead * (COLS if "c" in access.letters() or access.partial else 1)
        kind = torch.bfloat16 if dtype is BF16 else torch.float32
        out[name] = torch.randn(count, generator=generator).to(kind)
    return out


def extremes(x: Tensor) -> Tensor:
    """Rows with what a maximum has to be careful of, in the first block, the last and everywhere."""
    rows = x.view(-1, COLS)
    for row, (at, value) in enumerate(
        [(slice(0, 9), -INF), (slice(None), -INF), (5, NAN), (17, INF), (slice(7, None), -INF), (2, INF),
         (19, 3e38), (slice(0, 8), -3e38), (18, NAN)]
    ):  # fmt: skip
        if row < len(rows):
            rows[row, at] = value
    return x


def left(plan: KernelPlan, given: dict[str, Tensor], rows: int) -> dict[str, Tensor]:
    """What the kernel makes of the buffers."""
    tile = plan.tile
    assert isinstance(tile, RowTile)
    own = {name: t.clone() for name, t in given.items()}
    programs = tile.programs or -(-rows // tile.rows_per_program)
    kernel = load_kernel(emit(plan, interpreted=True), plan.name)
    kernel[(programs, 1, 1)](*(own[b] for b in plan.buffers), rows)
    return own


def differs(found: dict[str, Tensor], want: dict[str, Tensor], bits: bool) -> str:
    for name, value in want.items():
        a, b = found[name].float(), value.float()
        same = torch.equal(a.nan_to_num(7.5, 8.5, 9.5), b.nan_to_num(7.5, 8.5, 9.5))
        if not same and (bits or not torch.allclose(a, b, rtol=2e-5, atol=1e-6, equal_nan=True)):
            return f"{name}: {(a - b).abs().max()}"
    return ""


TURNS = [RowTile(2, 0, 32, 1, 3, True, False, 4), RowTile(4, 0, 32, 1, 2, False, False, 3)]
SWEEPS = [RowTile(4, 4, 8, 1, stages=3, online=True), RowTile(2, 0, 8, 1, 2, True, True, online=True)]


def cases() -> Iterator[tuple[str, str]]:
    for rows in (1, 9):
        for tile in SWEEPS[:rows]:
            for plan in (softmax(), logsumexp()):
                yield f"{plan.name} {rows} {tile}", swept(plan, tile, rows)
            whole = replace(tile, block_cols=4)
            yield f"variance {rows} {whole}", swept(layer_norm(COLS, F32), whole, rows)
        for tile in TURNS[:rows]:
            for plan in (layer_norm(COLS, BF16), rms_backward(COLS, BF16), several()):
                yield f"{plan.name} {rows} {tile}", in_turn(replace(plan, tile=tile), rows)
            yield f"bits {rows} {tile}", together(tile, rows)


def swept(plan: KernelPlan, tile: RowTile, rows: int) -> str:
    """One reading beside two."""
    given = memory(plan, rows)
    extremes(given["x"])
    twice = left(replace(plan, tile=replace(tile, online=False)), given, rows)
    return differs(left(replace(plan, tile=tile), given, rows), twice, bits=False)


def in_turn(plan: KernelPlan, rows: int) -> str:
    """Beside the meaning of the plan."""
    given = memory(plan, rows)
    want = {name: t.clone() for name, t in given.items()}
    run_plan(plan, want, {"m": rows})
    return differs(left(plan, given, rows), want, bits=False)


def together(tile: RowTile, rows: int) -> str:
    """Reductions that are one have the bits of each by itself."""
    plan = replace(several(), tile=tile)
    given = memory(plan, rows)
    apart = left(replace(plan, tile=replace(tile, stages=1, prefetch=True)), given, rows)
    return differs(left(plan, given, rows), apart, bits=True)


if __name__ == "__main__":
    print(json.dumps([{"name": name, "why": why} for name, why in cases()]))
