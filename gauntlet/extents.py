"""What a size of the launch manifest can become over a whole range of sizes, not at its corners only.

A size is made of +, -, *, divisions, minimum and maximum over dims (`library.sizes`). Interval arithmetic
bounds it, exactly where no dim stands in it twice. Where the interval is too wide, every size of the range is
tried; a range too large for that is refused: a manifest that cannot be checked is none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from library.launch import Size, evaluate

TRIED = 1 << 14
"""Sizes that are tried one by one."""


@dataclass(frozen=True)
class Range:
    """Multiples of `step` from `low` to `high`, both included."""

    low: int
    high: int
    step: int = 1

    def values(self) -> range:
        step = max(self.step, 1)
        return range(-(-self.low // step) * step, self.high + 1, step)


Interval = tuple[int, int]


def interval(size: Size, ranges: Mapping[str, Range]) -> Interval | None:
    """(least, most) that the size surely stays within; None where something may be divided by zero."""
    if isinstance(size, int):
        return size, size
    if isinstance(size, str):
        return ranges[size].low, ranges[size].high
    a, b = interval(size[1], ranges), interval(size[2], ranges)
    if a is None or b is None or (size[0] in DIVISIONS and b[0] <= 0):
        return None
    if size[0] == "mod":
        return (a[0], a[1]) if 0 <= a[0] and a[1] < b[0] else (0, b[1] - 1)
    ends = [OPS[size[0]](x, y) for x in a for y in b]
    return min(ends), max(ends)


DIVISIONS = ("floordiv", "ceildiv", "mod")
OPS: Mapping[str, Callable[[int, int], int]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "floordiv": lambda a, b: a // b,
    "ceildiv": lambda a, b: -(-a // b),
    "min": min,
    "max": max,
}
"""Each grows or falls steadily in either operand while the other stays, so that the ends of an interval are
reached at ends."""


def outside(shape: Sequence[Size], ranges: Mapping[str, Range], least: int, most: int) -> str:
    """Where the product of these sizes, none of them negative beside others, leaves least..most: a phrase;
    empty where it never does. E0720 for a division by zero."""
    found = [interval(size, ranges) for size in shape]
    if all(one is not None and (len(shape) == 1 or one[0] >= 0) for one in found):
        low, high = prod(i[0] for i in found if i), prod(i[1] for i in found if i)
        if least <= low and high <= most:
            return ""
    names = sorted({name for size in shape for name in _names(size)})
    count = prod(len(ranges[name].values()) for name in names)
    tried = _every(names, ranges) if count <= TRIED else _corners(names, ranges)
    for dims in tried:
        sizes = [evaluate(size, dims) for size in shape]
        if not least <= prod(sizes) <= most or (len(sizes) > 1 and min(sizes) < 0):
            return f"{prod(sizes)} at {dims}"
    return "" if count <= TRIED else f"sizes that cannot be bounded over {dict(ranges)}"


def _names(size: Size) -> set[str]:
    if isinstance(size, tuple):
        return _names(size[1]) | _names(size[2])
    return {size} if isinstance(size, str) else set()


def _every(names: Sequence[str], ranges: Mapping[str, Range]) -> Iterator[dict[str, int]]:
    for values in product(*(ranges[name].values() for name in names)):
        yield dict(zip(names, values, strict=True))


def _corners(names: Sequence[str], ranges: Mapping[str, Range]) -> Iterator[dict[str, int]]:
    for values in product(*(sorted({ranges[name].low, ranges[name].high}) for name in names)):
        yield dict(zip(names, values, strict=True))
