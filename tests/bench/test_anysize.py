"""Odd sizes beside the tuned ones: which, and what is expected of them."""

from __future__ import annotations

import pytest

from bench import anysize
from bench.blocks import available


def test_sizes_are_primes_around_the_tuned_ones_within_the_range() -> None:
    found = anysize.odd_sizes([64, 256], 300)
    assert found == [1, 2, 3, 17, 61, 67, 163, 251, 257]
    for block in available(anysize.BLOCKS):
        assert anysize.axis(block) in block.sizes[0]


@pytest.mark.parametrize(
    ("size", "time"), [(1, 2.0), (10, 2.0), (55, 3.5), (100, 5.0), (101, 5.05), (300, 15.0)]
)
def test_a_size_is_expected_on_the_line_between_its_neighbours(size: int, time: float) -> None:
    assert anysize.expected(size, {10: 2.0, 100: 5.0}) == pytest.approx(time)


def test_figures_name_the_slow_and_the_wrong() -> None:
    rows = [
        {"block": "b", "size": size, "tuned": size == 8, "ratio": ratio, "wrong": wrong}
        for size, ratio, wrong in ((8, 1.0, ""), (7, 0.8, ""), (9, 0.95, "y: off"))
    ]
    found = anysize.figures(rows)
    assert found["sizes_wrong"]["value"] == 1 and found["slowest_beside_neighbours"]["value"] == 0.8
    assert found["sizes_below_the_tuned_neighbours"]["which"] == ["b 7"]
