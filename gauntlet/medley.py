"""Every tensor drawn in a way of its own, at the smallest sizes.

A row that is a little wrong among many right ones is within the rule: the mean hides it, and an element may
be off by a few roundings. By itself it is judged by its own mean. And how large a fault is beside what
rounding does depends on the values of all tensors together: of tanh(x w) + x it takes an x that is alike in
all elements beside a w far from zero and a cotangent of one sign, which no draw of one kind for all tensors
has. So the draw "medley N" gives each leaf, and each cotangent, one of `WAYS` by a number made of N and its
name, and is tried where there are one to three rows.

So few rows run the kernels of the smallest sizes only. Larger ones that bring another kernel are tried as
well, and there the first and the last row, where loops over rows begin and end, are judged by themselves
besides (`by_ends`).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping

from esper_ir.types import DType
from gauntlet import ranges
from gauntlet.subject import Subject

DRAW = "medley "
WAYS = (
    "normal", "x10", "x0.1", "shifted", "sunk", "uneven", "ties", "gaps", "integers", "above", "below",
    "unit", "alike",
)  # fmt: skip
"""Finite for every block that is finite on normal values, and not far out."""
SHORT = (DType.bfloat16, DType.float16)
ALIKE = WAYS[-1]
"""One number everywhere."""
ONE_SIGN = ("shifted", "sunk", "above", "below", ALIKE)
MILD = ("normal", "x0.1", "uneven", "ties", "gaps", "unit")
"""Of four medleys about three have cotangents of one sign, and leaves of one sign or about 1: sums have terms
that do not cancel there, and functions are where they are steep. Of tanh(x w) + x with a last x that is 3 %
less they show it three times as often as others."""
COTANGENT = "cotangent:"
"""Before the name of an output: the name of what flows back into it."""
COUNT, SIZES, PLAIN = 128, (1, 2, 3), 4
BEYOND, ELEMENTS = 64, 1 << 16
"""Draws at each sizes that bring another kernel; elements of a tensor there."""
FIRST = 1_000_003


def tried(subject: Subject, seed: int, count: int = COUNT) -> Iterator[tuple[str, dict[str, int]]]:
    """Draws of this block and sizes of each: one dim after the other is more than the smallest there is.
    Other ones for another seed (the same for one in a million). None where every case is dear, nor of a block
    with sums in a wide type: one sum is in all elements of a row, with one error, and a mean over them says
    no more than that one does."""
    small = {dim.name: subject.nearest(dim.name, 1) for dim in subject.launch.interface.dims}
    found = [small]
    for name in small:
        each = ({**small, name: subject.nearest(name, size)} for size in SIZES)
        found += [dims for dims in each if dims not in found]
    if subject.heavy or not _alone(subject):
        return
    each_of = [found[number % len(found)] for number in range(count)]
    for dims in subject.regions[1:]:
        each_of += [dims] * (BEYOND if subject.elements(dims) <= ELEMENTS else 0)
    first = seed % FIRST * (COUNT << 3)
    for number, dims in enumerate(each_of):
        yield f"{DRAW}{first + number}", dims


def by_ends(subject: Subject, draw: str, dims: Mapping[str, int]) -> bool:
    """Whether the first and the last row count by themselves."""
    return draw.startswith(DRAW) and dims in subject.regions[1:]


def _alone(subject: Subject) -> bool:
    """Whether errors of neighbours have nothing to do with each other: nothing is summed, or all is rounded
    to a short type in the end."""
    types = {t.dtype for _, _, t in (*subject.leaves, *subject.results) if t.dtype.is_floating}
    return ranges.elementwise(subject) or all(t in SHORT for t in types)


def of_leaf(draw: str, leaf: str) -> str:
    """How a tensor is drawn."""
    ways = WAYS
    if random.Random(draw).randrange(PLAIN):
        ways = ONE_SIGN if leaf.startswith(COTANGENT) else (*ONE_SIGN, *MILD)
    return random.Random(f"{draw}:{leaf}").choice(ways)
