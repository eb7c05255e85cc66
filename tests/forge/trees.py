"""Reductions of Triton's interpreter in an order such as a card has: 32 partial results, each of every 32nd
element in ascending order, then halves. The interpreter's own takes one element after the other, whose
roundings grow with the length: a sum of 256 squares of which one is 1e8 is off by 10 units of roundoff.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from triton.runtime.interpreter import ReduceOps

LANES = 32


def reduced(self: Any, values: Any) -> list[Any]:
    """In the place of `ReduceOps.generic_reduce`, for reductions along one axis."""
    values, axis = self.unravel(values, self.axis)
    kinds = [v.dtype for v in values]

    def joined(a: list[Any], b: list[Any]) -> list[Any]:
        sides = [self.to_tensor(v, k) for side in (a, b) for v, k in zip(side, kinds, strict=True)]
        made = self.combine_fn.fn(*sides)
        return [m.handle.data for m in (made if isinstance(made, tuple) else (made,))]

    data = [np.moveaxis(v.handle.data, axis, 0) for v in values]
    size = data[0].shape[0]
    lanes = min(size, LANES)
    found = [d[:lanes] for d in data]
    for at in range(lanes, size, lanes):
        found = joined(found, [d[at : at + lanes] for d in data])
    while lanes > 1:
        lanes //= 2
        found = joined([f[:lanes] for f in found], [f[lanes:] for f in found])
    whole = [np.expand_dims(f[0], axis) if self.keep_dims else f[0] for f in found]
    return [self.to_tensor(w, k) for w, k in zip(whole, kinds, strict=True)]


def install() -> None:
    ReduceOps.generic_reduce = reduced
