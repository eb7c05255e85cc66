"""A small leaf by itself: what became of it shows only where nothing larger is added to it.

A kernel that takes small weights for zero is right within any rounding of x w + b, unless b is zero. So the
draw "lone w" has one leaf about 2^-60 (2^-10 in float16), and every other leaf zero as long as the result
still depends on that one; the rest are few exact numbers. Which may be zero is asked of the float64 meaning.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from gauntlet import meaning, ranges
from gauntlet.subject import Subject

DRAW = "lone "
_silent: WeakKeyDictionary[Subject, dict[str, tuple[str, ...]]] = WeakKeyDictionary()


def names(subject: Subject) -> list[str]:
    """A draw per leaf; none where each costs much, or where there is one leaf only."""
    leaves = ranges.leaves(subject)
    return [] if subject.heavy or len(leaves) < 2 else [f"{DRAW}{name}" for name in leaves]


def of_leaf(draw: str, leaf: str) -> str:
    """How a leaf is drawn at first."""
    return "small" if draw == f"{DRAW}{leaf}" else "ties"


def alone(subject: Subject, draw: str, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The values with all zero that can be. The same ones at all sizes and on every device."""
    kept = _silent.setdefault(subject, {})
    if draw not in kept:
        kept[draw] = tuple(_found(subject, draw.removeprefix(DRAW), values))
    return {n: torch.zeros_like(t) if n in kept[draw] else t for n, t in values.items()}


def _found(subject: Subject, leaf: str, values: Mapping[str, Tensor]) -> Iterable[str]:
    tried = dict(values)
    for name in ranges.leaves(subject):
        trial = {**tried, name: torch.zeros_like(tried[name])}
        if name != leaf and _felt(subject, leaf, trial):
            tried = trial
            yield name


def _felt(subject: Subject, leaf: str, values: Mapping[str, Tensor]) -> bool:
    with_it = meaning.outputs(subject, values, "float64")
    without = meaning.outputs(subject, {**values, leaf: torch.zeros_like(values[leaf])}, "float64")
    return any(bool((a != b).any()) for a, b in zip(with_it, without, strict=True))
