"""Numbers from (seed, offset): evenly distributed, independent, and the same for ever."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from esper_ir.builder import Builder
from esper_ir.diagnostics import EsperError
from esper_ir.reference import evaluate

COUNT = 1 << 18


def drawn(op: str, seed: int, *, offset: int = 0, shape: tuple[int, ...] = (COUNT,)) -> Tensor:
    b = Builder("drawn")
    made = b.op(op, b.input("seed", "int64", [1]), shape=shape, offset=offset, dtype="float32")
    return evaluate(b.build(made), {"seed": torch.tensor([seed])})[op]


def correlation(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a.double(), b.double()]))[0, 1])


@pytest.mark.parametrize("seed", [0, 1, 2**61 + 12345])
def test_even_and_uncorrelated(seed: int) -> None:
    """Bounds are five standard deviations of what truly random numbers give."""
    u = drawn("rand", seed).double()
    assert 0.0 <= float(u.min()) and float(u.max()) < 1.0
    assert abs(float(u.mean()) - 0.5) < 5 * (1 / 12 / COUNT) ** 0.5
    counts = torch.histc(u, 256, 0.0, 1.0)
    assert abs(float(((counts - COUNT / 256) ** 2 / (COUNT / 256)).sum()) - 255) < 5 * (2 * 255) ** 0.5
    pairs = torch.bincount((u[:-1] * 16).long() * 16 + (u[1:] * 16).long(), minlength=256).double()
    assert abs(float(((pairs - pairs.mean()) ** 2 / pairs.mean()).sum()) - 255) < 5 * (2 * 255) ** 0.5
    for lag in (1, 2, 64, 1024):
        assert abs(correlation(u[:-lag], u[lag:])) < 5 / COUNT**0.5, lag


def test_seeds_and_offsets_are_independent() -> None:
    first = drawn("rand", 5)
    for other in (
        drawn("rand", 6),
        drawn("rand", 5, offset=1),
        drawn("rand", 5 + 2**31),
        drawn("rand", 6, offset=1),
    ):
        assert abs(correlation(first, other)) < 5 / COUNT**0.5
        assert abs(correlation(first[1:], other[:-1])) < 5 / COUNT**0.5


def test_normal() -> None:
    z = drawn("randn", 7).double()
    assert bool(z.isfinite().all())
    for power, moment in ((1, 0.0), (2, 1.0), (3, 0.0), (4, 3.0)):
        assert abs(float((z**power).mean()) - moment) < 0.06, power


def test_the_numbers_stay_the_same() -> None:
    """Artifacts and recomputation rely on them: another function is another operator."""
    assert (drawn("rand", 0, shape=(4,)) * 2**24).tolist() == [7743776, 5991559, 1564036, 14960993]
    assert torch.equal(drawn("rand", 3, shape=(2, 6)).flatten(), drawn("rand", 3, shape=(12,)))


def test_refusals() -> None:
    b = Builder("b")
    seed, x = b.input("seed", "int64", [1]), b.input("x", "float32", [3])
    with pytest.raises(EsperError, match="E0203"):
        b.dropout(x, seed, p=1.5)
    with pytest.raises(EsperError, match="E0205"):
        b.dropout(x, x)
    with pytest.raises(EsperError, match="E0203"):
        b.rand(seed, shape=(3,), dtype="int64")
