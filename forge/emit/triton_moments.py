"""Squares about the mean, down the columns, beside the sum: sets of rows merged two by two (Chan, Golub and
LeVeque 1979).

The mean of a set is kept as two numbers, `from` + `rest`: a mean of some of the rows, and the small number
that it is off. A mean that is one number is off by its rounding, which is much where the mean is large beside
the differences. `seen` rows with squares q and `fresh` ones with r have, where their means are d apart,

    q + r + d^2 seen fresh / (seen + fresh).

In the first stage a kernel stores the rest about total / rows, rounded, which the second stage makes again.
"""

from __future__ import annotations

from collections.abc import Sequence

from esper_ir.types import DType
from forge.emit.triton_base import Kernel, masked
from forge.emit.triton_scalars import TRITON_TYPE
from forge.emit.triton_sets import down
from forge.plan import Reduce, RowTile


def squares_of(reduces: Sequence[Reduce], total: str) -> Reduce | None:
    """The reduction that is about the mean which this sum gives."""
    return next((r for r in reduces if r.combine == "squares" and r.about[0] == total), None)


def begin(k: Kernel, reduces: Sequence[Reduce], shape: str, counts: str) -> None:
    """No row has been seen; `shape` of the accumulators, and of the counts."""
    for kind in _kinds(k, reduces):
        k.w.line(f"seen_{kind.value} = tl.full({counts}, 0.0, {TRITON_TYPE[kind]})")
    for r in reduces:
        if r.combine == "squares":
            for name in ("from", "rest"):
                k.w.line(f"{r.name}_{name} = tl.full({shape}, 0.0, {TRITON_TYPE[k.dtypes[r.name]]})")


def share(k: Kernel, reduces: Sequence[Reduce], fresh: str) -> None:
    """`fresh` rows come: what all columns have in common."""
    for kind in _kinds(k, reduces):
        n, m = f"seen_{kind.value}", f"fresh_{kind.value}"
        k.w.line(f"{m} = ({fresh}).to({TRITON_TYPE[kind]})")
        k.w.line(f"each_{kind.value} = 1.0 / tl.maximum({m}, 1.0)")
        k.w.line(f"gain_{kind.value} = {m} / tl.maximum({n} + {m}, 1.0)")


def count(k: Kernel, reduces: Sequence[Reduce]) -> None:
    """The fresh rows have been seen."""
    for kind in _kinds(k, reduces):
        k.w.line(f"seen_{kind.value} = seen_{kind.value} + fresh_{kind.value}")


def about(reduces: Sequence[Reduce]) -> bool:
    """Whether squares about a mean are among them."""
    return any(r.combine == "squares" for r in reduces)


def block(k: Kernel, total: Reduce, r: Reduce, mask: str, sets: int) -> None:
    """A block of rows into the sum and the squares: as one set, as several, or each row into its own."""
    w, s, x, q, kind = k.w, total.name, total.arg, r.name, _kind(k, r)
    tile = k.plan.tile
    assert isinstance(tile, RowTile)
    part, together = masked(x, mask, "0.0"), sets == 1 or sets < tile.block_rows
    if together:
        add = "tl.reduce({0}, 0, _add, keep_dims=True)" if sets == 1 else "tl.reduce({0}, 0, _add)"
        w.line(f"{s}_part = {down(part, tile, sets, 'sum')}")
        # A product would melt into the differences from it, and be another number in each.
        w.line(f"{q}_mean = tl.where(fresh_{kind} > 0, {s}_part * each_{kind}, 0.0)")
        away, there = f"{x} - {q}_mean", mask
        if sets > 1:
            shape = f"[{tile.block_rows // sets}, {sets}, {tile.block_cols}]"
            away, there = f"tl.reshape({x}, {shape}) - {q}_mean[None, :, :]", "fits" if mask else ""
        w.line(f"{q}_away = {masked(away, there, '0.0')}")
        w.line(f"{q}_off = {add.format(f'{q}_away')} * each_{kind}")
        w.line(f"{q}_part = {add.format(f'{q}_away * {q}_away')}")
        w.line(f"{q}_part = _max({q}_part - {q}_off * ({q}_off * fresh_{kind}), 0.0)")
    else:
        w.line(f"{s}_part = {part}")
        w.line(f"{q}_off = {masked(f'{x} - {x}', mask, '0.0')}")  # NaN where it is not finite
        w.line(f"{q}_part = {q}_off")
    merge(k, r, f"{q}_mean" if together else f"{s}_part", f"{q}_off", f"{q}_part")
    w.line(f"{s}_acc = {s}_acc + {s}_part")


def merge(k: Kernel, r: Reduce, mean: str, rest: str, part: str) -> None:
    """Fresh rows with a mean in two numbers and their squares to those that have been seen."""
    w, q, kind = k.w, r.name, _kind(k, r)
    w.line(f"{q}_from = tl.where(seen_{kind} > 0, {q}_from, {mean})")
    w.line(f"{q}_apart = ({mean} - {q}_from) + ({rest} - {q}_rest)")
    w.line(f"{q}_rest = {q}_rest + {q}_apart * gain_{kind}")
    w.line(f"{q}_acc = {q}_acc + {part} + {q}_apart * ({q}_apart * (seen_{kind} * gain_{kind}))")


def end(k: Kernel, r: Reduce, total: str, folded: bool) -> None:
    """`_rest` about the rounded mean of all rows, and the squares of all in `_acc`; `total` is their sum."""
    w, q, n = k.w, r.name, f"seen_{_kind(k, r)}"
    whole = n if folded else f"{q}_all"
    if not folded:
        w.line(f"{whole} = tl.reduce({n}, 0, _add, keep_dims=True)")
    w.line(f"{q}_mean = _div({total}, tl.maximum({whole}, 1.0))")
    off = f"({q}_from - {q}_mean) + {q}_rest"
    if folded:
        w.line(f"{q}_rest = tl.where({n} > 0, {off}, 0.0)")
        return
    w.line(f"{q}_apart = tl.where({n} > 0, {off}, 0.0)")
    w.line(f"{q}_rest = tl.reduce({q}_apart * {n}, 0, _add, keep_dims=True) / tl.maximum({whole}, 1.0)")
    w.line(f"{q}_apart = {q}_apart - {q}_rest")
    w.line(f"{q}_acc = tl.reduce({q}_acc + {q}_apart * ({q}_apart * {n}), 0, _add, keep_dims=True)")


def end_sets(k: Kernel, r: Reduce) -> None:
    """The squares of all sets, where each row of the tile has its own; about a number near the mean."""
    n = f"seen_{_kind(k, r)}"
    end(k, r, f"tl.reduce({r.name}_from * {n}, 0, _add, keep_dims=True)", False)
    k.w.line(f"{r.name} = {r.name}_acc")


def _kind(k: Kernel, r: Reduce) -> str:
    return k.dtypes[r.name].value


def _kinds(k: Kernel, reduces: Sequence[Reduce]) -> list[DType]:
    return list(dict.fromkeys(k.dtypes[r.name] for r in reduces if r.combine == "squares"))
