"""Operators of torch that importing once refused, or got wrong: values, places and sizes, against torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper_ir.builder import Builder
from esper_ir.eager import to_torch
from esper_ir.importers.torch_export import from_torch
from esper_ir.reference import evaluate
from tests.esper_ir.test_import_torch import same

ROWS, IMAGE = torch.linspace(-3, 4, 35).reshape(5, 7), torch.linspace(-1, 2, 60).reshape(1, 2, 5, 6)
WHOLE = torch.arange(-17, 18).reshape(5, 7)
TRUTH = WHOLE % 3 == 0
PLACES = torch.arange(21).reshape(3, 7) % 5

CASES: tuple[tuple[Callable[..., Any], tuple[Tensor, ...]], ...] = (
    (lambda x: torch.fmax(x, x.log()) + torch.fmin(x.log(), -x), (ROWS,)),
    (lambda x: torch.copysign(x.abs() + 1, x) * torch.heaviside(x, x * 0 + 0.5), (ROWS,)),
    (lambda x: torch.ldexp(x, torch.tensor(3)) + torch.angle(x) + torch.signbit(x), (ROWS,)),
    (lambda x: (x // 4, x % 4, torch.div(x, -3, rounding_mode="trunc"), (x << 3) ^ (x >> 1)), (WHOLE,)),
    (lambda x: (x.cumsum(1), x.cumprod(0), x[:, [0, 3, 3]], x.float().median(1)[0]), (WHOLE,)),
    (lambda k: (k.cumsum(1) - 1, k.max(1)[0], k.sort(1)[0], k[:, [0, 2]], k.amin(0)), (TRUTH,)),
    (lambda x: (x.median(1)[0], x.median(), x.kthvalue(3, 1)[1], torch.dist(x, x * 2)), (ROWS.roll(3),)),
    (lambda x: torch.bucketize(x, torch.linspace(-2, 2, 6), right=True), (ROWS,)),
    (lambda x: torch.searchsorted(x.sort(1)[0], x), (ROWS,)),
    (lambda x: F.interpolate(x, scale_factor=1.7), (IMAGE,)),
    (lambda x: F.interpolate(x, scale_factor=1.5, mode="bilinear"), (IMAGE,)),
    (lambda x: F.interpolate(x, scale_factor=1.5, mode="bicubic"), (IMAGE,)),
    (lambda x: F.interpolate(x, size=(3, 9), mode="bilinear", antialias=True), (IMAGE,)),
    (lambda x: F.interpolate(x, size=(7, 4), mode="nearest-exact"), (IMAGE,)),
    (lambda x, i: torch.zeros(5, 7).scatter_reduce(0, i, x[:3], "mean", include_self=False), (ROWS, PLACES)),
    (lambda x: F.grid_sample(x, x.reshape(1, 5, 6, 2) * 0.7, padding_mode="border"), (IMAGE,)),
    (lambda x, i: x.put(i[0] - 5, torch.arange(7.0)), (ROWS, PLACES)),
)


@pytest.mark.parametrize("at", range(len(CASES)))
def test_values(at: int) -> None:
    function, given = CASES[at]
    blueprint = from_torch(function, given)
    wanted = function(*given)
    made = to_torch(blueprint)(*given)
    found = made if isinstance(made, tuple) else (made,)
    for one, other in zip(found, wanted if isinstance(wanted, tuple) else (wanted,), strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("padding", [None, 2])
def test_bags_of_rows(mode: str, padding: int | None) -> None:
    module = nn.EmbeddingBag(5, 3, mode=mode, padding_idx=padding)
    assert same(module, from_torch(module, PLACES, dynamic=0), (PLACES,)) > 0


def test_nearest_is_rounded_as_torch_does() -> None:
    """Positions are products in float32: between 29 and 58, and in one size of six, float64 has others."""
    for size, count in ((29, 58), (41, 123), (55, 107), (3, 123), (60, 41)):
        x = torch.arange(float(size)).reshape(1, 1, size)
        b = Builder("near")
        y = b.op("interpolate", b.input("x", "float32", (1, 1, size)), size=(count,))
        assert torch.equal(next(iter(evaluate(b.build(y), {"x": x}).values())), F.interpolate(x, size=count))


def test_running_statistics_of_instance_norm() -> None:
    module = nn.InstanceNorm2d(2, affine=True, track_running_stats=True)
    blueprint = from_torch(module, torch.randn(3, 2, 4, 5), dynamic=0)
    assert set(blueprint.updates) >= {"running_mean", "running_var"}


DRAWN: tuple[tuple[Callable[[Tensor], Tensor], float, float], ...] = (
    (lambda x: torch.empty_like(x).uniform_(-1.0, 3.0), 1.0, 4 / 12**0.5),
    (lambda x: torch.empty_like(x).normal_(2.0, 0.5), 2.0, 0.5),
    (lambda x: torch.empty_like(x).exponential_(2.0), 0.5, 0.5),
    (lambda x: torch.randint(3, 9, (4000,)) + x * 0, 5.5, (35 / 12) ** 0.5),
    (lambda x: torch.randperm(4000) + x * 0, 1999.5, 4000 / 12**0.5),
    (lambda x: F.rrelu(x - 1.0, 0.2, 0.4, training=True), -0.3, 0.2 / 12**0.5),
)


@pytest.mark.parametrize("at", range(len(DRAWN)))
def test_what_is_drawn_has_its_mean_and_spread(at: int) -> None:
    function, mean, spread = DRAWN[at]
    blueprint = from_torch(function, torch.zeros(4000))
    drawn = {"x": torch.zeros(4000), "seed": torch.tensor([5])}
    (y,) = evaluate(blueprint, {v.name: drawn.get(v.name, drawn["x"]) for v in blueprint.leaves}).values()
    assert y.double().mean().item() == pytest.approx(mean, abs=0.1 * spread)
    assert y.double().std().item() == pytest.approx(spread, rel=0.1)
