"""What pooling written with windows shares: offsets, positions along an axis, one element of each window."""

from __future__ import annotations

from collections.abc import Sequence

from esper_ir.opdef import Emit, Val
from esper_ir.ops.rules import ONE
from esper_ir.types import Dim, DType

MOST = 32  # elements of a window that is written out


def taps(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """All offsets, the last axis fastest."""
    out: list[tuple[int, ...]] = [()]
    for size in sizes:
        out = [(*o, k) for o in out for k in range(size)]
    return out


def numbered(emit: Emit, at: int, rank: int, size: Dim) -> Val:
    """Positions along an axis, of a shape that broadcasts."""
    numbers = emit("arange", end=size, dtype=DType.int32)
    return emit("reshape", numbers, shape=tuple(size if i == at else ONE for i in range(rank)))


def at_place(
    emit: Emit, x: Val, axis: int, mul: int, add: int, div: int, size: Dim, outside: str = "zero"
) -> Val | None:
    """A window, or the one element where the result has one position; None where that lies outside."""
    if size != ONE:
        return emit("window", x, dim=axis, mul=mul, add=add, div=div, size=size, outside=outside)
    place, whole = add // div, x.type.shape[axis].static
    if place < 0 or whole is None or place >= whole:
        return None
    return x if whole == 1 else emit("slice", x, dim=axis, start=place, end=place + 1)
