"""What a size of the launch manifest can become over a whole range of sizes, not at its corners only.

A size is made of +, -, *, divisions, minimum and maximum over dims (`library.sizes`). Interval arithmetic
bounds it, exactly where no dim stands in it twice. Where the interval is too wide, every size of the range is
tried. A range too large for that needs a size that grows steadily: of one dim, or of one product of dims,
with constants only beside it. What is left is refused: a manifest that cannot be checked is none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import gcd, prod

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
    steady = _steady(shape, ranges) if count > TRIED else None
    if steady is not None:
        return _first_outside(*steady, least, most)
    tried = _every(names, ranges) if count <= TRIED else _corners(names, ranges)
    wrong = _first_outside(shape, tried, least, most)
    return wrong or ("" if count <= TRIED else f"sizes that cannot be bounded over {dict(ranges)}")


def _first_outside(shape: Sequence[Size], tried: Iterable[Mapping[str, int]], least: int, most: int) -> str:
    for dims in tried:
        sizes = [evaluate(size, dims) for size in shape]
        if not least <= prod(sizes) <= most or (len(sizes) > 1 and min(sizes) < 0):
            return f"{prod(sizes)} at {dims}"
    return ""


def _steady(
    shape: Sequence[Size], ranges: Mapping[str, Range]
) -> tuple[list[Size], list[dict[str, int]]] | None:
    """The shape, and where it takes its least and its most: of one size that grows by the same amount over
    every period, whatever it does within one, at either end of its range. None where it is not so."""
    whole = {name for size in shape for name in _products(size)}
    parts = [part for name in whole for part in name.split("*")]
    varying = [size for size in shape if not isinstance(size, int)]
    if len(whole) != 1 or len(parts) != len(set(parts)) or len(varying) != 1:
        return None
    (name,) = whole
    low, high = (prod(getattr(ranges[p], end) for p in parts) for end in ("low", "high"))
    period = _period(_as_one(varying[0]))
    if period is None:
        return None
    ends = {*range(low, min(low + period, high + 1)), *range(max(high - period + 1, low), high + 1)}
    return [_as_one(size) for size in shape], [{name: value} for value in sorted(ends)]


def _as_one(size: Size) -> Size:
    """With every product of dims as one name, whatever stands between them."""
    if not isinstance(size, tuple):
        return size
    a, b = _as_one(size[1]), _as_one(size[2])
    if size[0] != "mul":
        return (size[0], a, b)
    factors = [*_factors(a), *_factors(b)]
    count = prod(f for f in factors if isinstance(f, int))
    names = "*".join(sorted(f for f in factors if isinstance(f, str)))
    rest = [f for f in factors if isinstance(f, tuple)]
    out: Size = names or count
    for factor in [count] * bool(names) + rest:
        out = ("mul", factor, out) if factor != 1 else out
    return out


def _factors(size: Size) -> list[Size]:
    return (
        [*_factors(size[1]), *_factors(size[2])] if isinstance(size, tuple) and size[0] == "mul" else [size]
    )


def _products(size: Size) -> set[str]:
    return _names(_as_one(size))


def _period(size: Size) -> int | None:
    """After how much its only name grows the size has grown by a whole number, the same wherever it began;
    None where that is never so, or too late."""
    period = 1
    while period <= TRIED // 2:
        more = _growth(size, period)
        if more is None or isinstance(more, int):
            return None if more is None else period
        period *= more.factor
    return None


@dataclass(frozen=True)
class _Later:
    """A quotient has not grown by a whole number yet: after so many periods it has."""

    factor: int


def _growth(size: Size, period: int) -> int | _Later | None:
    """Of a size while its name grows by a period; None where it depends on where that began."""
    if not isinstance(size, tuple):
        return 0 if isinstance(size, int) else period
    a, b = _growth(size[1], period), _growth(size[2], period)
    for one in (a, b):
        if not isinstance(one, int):
            return one
    assert isinstance(a, int) and isinstance(b, int)
    if size[0] in ("add", "sub"):
        return OPS[size[0]](a, b)
    if size[0] == "mul":
        constants = [(c, g) for c, g in ((size[1], b), (size[2], a)) if isinstance(c, int)]
        return constants[0][0] * constants[0][1] if constants else None
    if size[0] not in DIVISIONS or not isinstance(size[2], int) or size[2] <= 0:
        return None
    if a % size[2]:
        return _Later(size[2] // gcd(a, size[2]))
    return 0 if size[0] == "mod" else a // size[2]


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
