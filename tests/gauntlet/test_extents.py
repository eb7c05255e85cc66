"""What sizes become over ranges too large to be tried."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gauntlet import extents
from gauntlet.extents import Range, outside
from library.launch import Size, evaluate

ROWS = {"rows": Range(5793, 1 << 20)}
STACK = {"batch": Range(6, 640), "seq": Range(46, 8192)}


def last(rows: Size, chunks: int) -> Size:
    """What is left of some rows after all chunks but one, each a multiple of 16."""
    return ("add", rows, ("mul", -16 * (chunks - 1), ("floordiv", rows, 16 * chunks)))


@pytest.mark.parametrize("chunks", [2, 3, 7, 16])
def test_the_last_chunk_of_many_rows(chunks: int) -> None:
    stack = ("floordiv", ("mul", ("mul", 24, "seq"), "batch"), 24)
    for rows, ranges in (("rows", ROWS), (("mul", "batch", "seq"), STACK), (stack, STACK)):
        left: Size = last(rows, chunks)
        assert outside((left,), ranges, 0, 2**31) == ""
        assert outside((left, 32000), ranges, 0, 2**40) == ""
        assert outside((("ceildiv", left, 128),), ranges, 0, 2**31) == ""
        assert "at" in outside((left,), ranges, 0, 1000)
        assert "at" in outside((("sub", left, 5000),), ranges, 0, 2**31)


def test_a_chunk_too_many_is_negative_at_the_end() -> None:
    left = ("add", "rows", ("mul", -16 * 4, ("floordiv", "rows", 16 * 4)))
    assert outside((left,), ROWS, 0, 2**31) == ""  # nothing is left at times
    more = ("add", "rows", ("mul", -16 * 4 - 1, ("floordiv", "rows", 16 * 4)))
    assert outside((more,), ROWS, 0, 2**31) != ""


@pytest.mark.parametrize(
    "size", [("mul", "rows", ("mod", "rows", 7)), ("min", ("mod", "rows", 7), 3), ("floordiv", 9, "rows")]
)
def test_what_does_not_grow_steadily_is_not_guessed(size: Size) -> None:
    assert extents._period(size) is None


def _sizes() -> Any:
    numbers = st.integers(-40, 40)
    divisors = st.integers(1, 24)

    def grown(inner: Any) -> Any:
        return st.one_of(
            st.tuples(st.sampled_from(("add", "sub")), inner, st.one_of(inner, numbers)),
            st.tuples(st.just("mul"), numbers, inner),
            st.tuples(st.sampled_from(("floordiv", "ceildiv", "mod")), inner, divisors),
        )

    return st.recursive(st.just("n"), grown, max_leaves=5)


@settings(max_examples=150, deadline=None)
@given(_sizes(), st.integers(0, 300))
def test_a_steady_size_is_bounded_as_trying_all_bounds_it(size: Size, low: int) -> None:
    ranges = {"n": Range(low, low + 6000)}
    found = extents._steady((size,), ranges)
    if found is None or found[0] == [low]:
        return
    (steady,), ends = found
    told = [evaluate(steady, dims) for dims in ends]
    every = [evaluate(size, {"n": n}) for n in range(low, low + 6001)]
    assert (min(told), max(told)) == (min(every), max(every))
