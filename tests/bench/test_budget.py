"""The curve of memory budgets, from rows as a run writes them."""

from __future__ import annotations

import torch

import esper_ir.text as text
from bench import budget
from bench.blocks import available
from forge.service import front


def test_figures_are_the_least_budget_beside_the_largest() -> None:
    same = {"block": "b", "size": "8"}
    rows = [
        {**same, "impl": "esper", "share": share, "kept_bytes": kept, "peak_bytes": 2 * kept, "wall_ms": ms}
        for share, kept, ms in ((1.0, 400, 2.0), (0.0, 100, 3.0), (0.5, 200, 2.5))
    ]
    rows += [
        {**same, "impl": name, "peak_bytes": 500, "wall_ms": ms} for name, ms in (("a", 6.0), ("b", 3.6))
    ]
    found = {name.removeprefix("b_8_"): f["value"] for name, f in budget.figures(rows).items()}
    assert (found["kept_share"], found["peak_ratio"], found["time_ratio"]) == (0.25, 0.25, 1.5)
    assert (found["a_peak"], found["a_time"], found["best_time"]) == (2.5, 2.0, 1.2)


def test_gradients_are_compared_with_eagers() -> None:
    right = [torch.ones(8), torch.full((4,), 2.0)]
    assert budget.off(right, right) == 0
    assert abs(budget.off([right[0], right[1] * 1.01], right) - 0.01) < 1e-6


def test_bytes_are_counted_at_the_size_that_is_timed() -> None:
    (block,) = available(("small_mlp",))
    small = block.sizes[1]
    blueprint = budget.at(block, small)
    work = front(blueprint, "h100")
    assert all(blueprint.dims[n].tune == (small[n],) for n in small if n in blueprint.dims)
    half, full = (budget.kept(work, {n: size * k for n, size in small.items()}) for k in (1, 2))
    assert full == 2 * half > 0
    assert text.load(block.blueprint).dims != blueprint.dims
