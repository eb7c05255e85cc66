"""Rows of a band that wait in registers, as they lie in memory, between the reading for mean and variance and
the one for the results.

A value is widened each time that it is used (`_again`), since what compilers remember of it has twice the
size.
"""

from __future__ import annotations

from collections.abc import Sequence

from forge.band import BandTile
from forge.emit.triton_base import Kernel, masked, statement
from forge.plan import INDEX, Load, Reduce, Stmt, needed


def columns(k: Kernel, tile: BandTile) -> dict[str, str]:
    cols = k.plan.cols.static
    return {} if cols == tile.block_cols else {"c": f"(col < {cols})"}


def held_moments(k: Kernel, tile: BandTile, names: tuple[str, str]) -> None:
    """The rows loaded, all at once; the mean of all that is made of their elements, and of the
    squares about it.
    """
    w, masks, every = k.w, columns(k, tile), range(tile.rows)
    access = next(k.plan.accesses[s.access] for s in k.plan.body if isinstance(s, Load) and _full(k, s))
    for r in every:
        w.line(f"row_{r} = pid * {tile.rows} + {r} + one")
        index = [*k.row_indices(f"row_{r}"), "col"]
        w.line(f"held_{r} = {k.raw_load(access, index, k.mask('rc', masks))}")
    size = tile.rows * (k.plan.cols.static or 0)
    summed = next(s.arg for s in k.plan.body if isinstance(s, Reduce))
    work = needed(k.plan, dict.fromkeys(k.axes, "c"), {summed})
    for name, term in zip(names, ("{0}", "({0} - {1}) * ({0} - {1})"), strict=True):
        w.line(f"{name}_acc = tl.zeros([1, {tile.block_cols}], tl.float32)")
        for r in every:
            _of_row(k, tile, work, r)
            value = masked(term.format(summed, names[0]), masks.get("c", ""), "0.0")
            w.line(f"{name}_acc = {name}_acc + {value}")
        w.line(f"{name} = _div(tl.reduce({name}_acc, 1, _add, keep_dims=True), {float(size)})")


def held_again(k: Kernel, tile: BandTile, work: Sequence[Stmt]) -> None:
    """The results, row by row."""
    for r in reversed(range(tile.rows)):
        _of_row(k, tile, work, r)


def _of_row(k: Kernel, tile: BandTile, work: Sequence[Stmt], r: int) -> None:
    index = [*k.row_indices(f"row_{r}"), "col"]
    for s in work:
        if isinstance(s, Load) and _full(k, s):
            k.w.line(f"{s.name} = _again(held_{r})")
        else:
            statement(k, s, index, columns(k, tile))


def _full(k: Kernel, s: Load) -> bool:
    access = k.plan.accesses[s.access]
    return access.buffer != INDEX and access.letters() == "rc"
