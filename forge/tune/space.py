"""Which tiles may be tried in place of a prior: every field of a tile, within what kernels can hold.

The search walks in steps of one field to a neighbouring value, so a space is a set of fields with their
values and a rule that refuses what cannot fit; nothing is enumerated that nobody asks for.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, fields, replace
from typing import Any

from forge.plan import ChainTile, MatmulTile, PointTile, ProductWay, RowTile, ScanTile, SumTile, Tile


def _powers(low: int, high: int) -> tuple[int, ...]:
    return tuple(1 << e for e in range(low.bit_length() - 1, high.bit_length()))


WARPS = _powers(1, 16)
PROGRAMS = tuple(sorted((*_powers(16, 2048), 132, 264, 528, 1056)))
"""Powers of two, and as many as the multiprocessors of an H100 and an H200, once and more often."""
SPACES: Mapping[type[Any], Mapping[str, tuple[int, ...]]] = {
    RowTile: {"block_rows": _powers(1, 256), "rows_per_program": _powers(1, 256),
              "block_cols": _powers(16, 16384), "warps": WARPS, "programs": PROGRAMS,
              "prefetch": (0, 1), "stages": (1, 3, 4, 5, 6), "online": (0, 1)},
    PointTile: {"block": _powers(128, 16384), "warps": WARPS},
    SumTile: {"block_parts": _powers(1, 512), "block_cols": _powers(8, 2048), "warps": WARPS},
    MatmulTile: {"block_m": _powers(16, 256), "block_n": _powers(16, 256), "block_k": _powers(16, 256),
                 "warps": _powers(2, 16), "stages": (1, 2, 3, 4, 5), "group_m": (1, 4, 8, 16),
                 "split_k": _powers(1, 32), "descriptors": (0, 1)},
    ChainTile: {"block_m": _powers(16, 128), "block_k": _powers(16, 256), "block_n": _powers(16, 512),
                "warps": WARPS, "stages": (1, 2, 3, 4, 5)},
    ScanTile: {"steps": _powers(1, 64), "parts": _powers(1, 64), "block": _powers(1, 256), "warps": WARPS},
}  # fmt: skip
"""Values of each field by kind of tile; a tile without an entry is not tuned. A field that is zero in the
prior is off and stays off."""

TURNS = ((264, 4), (1056, 3))
"""(programs, stages)."""
SHARED_BYTES = 220 << 10
"""Of a multiprocessor of the targets that are timed; operands of a product wait there."""
ELEMENTS = 1 << 16
"""Of one tile: more does not fit the registers of a program."""


PRODUCTS = (
    (128, 256, 64, 8, 3), (256, 128, 64, 8, 3), (128, 128, 64, 8, 3), (128, 128, 64, 4, 4),
    (64, 256, 64, 4, 4), (64, 128, 64, 4, 4), (128, 64, 64, 4, 4), (64, 64, 64, 4, 4),
)  # fmt: skip
"""(m, n, k, warps, stages) from which the tile of a product that was a library call is searched."""
DESCRIBED = (
    (128, 256, 64, 8, 3), (128, 256, 64, 8, 4), (256, 128, 64, 8, 3), (128, 128, 64, 8, 4),
    (128, 128, 64, 8, 3),
)  # fmt: skip
"""The same, of those whose operands come through descriptors."""
DUALS = ((128, 128, 64, 8, 3), (128, 64, 64, 8, 4), (128, 64, 64, 4, 3), (64, 128, 64, 4, 3),
         (64, 64, 64, 4, 3), (64, 32, 64, 4, 4))  # fmt: skip
"""The same of two products that are one kernel; columns are those of each."""


def tunable(tile: Tile) -> bool:
    return type(tile) in SPACES


def neighbours(tile: Tile, idle: Collection[str] = ()) -> Iterator[Tile]:
    """Every tile one step away in one field, in a fixed order, but in those of `idle`: they change nothing of
    the work.
    """
    if isinstance(tile, ProductWay):
        yield from (w for w in _ways(tile) if not (w.dual and "dual" in idle))
        return
    space = SPACES[type(tile)]
    if isinstance(tile, RowTile) and "stages" not in idle:
        yield from (made for made in _in_turn(tile) if fits(made))
    for name, values in space.items():
        now = int(getattr(tile, name))
        if name in idle or (now == 0 and 0 not in values):
            continue
        below = [v for v in values if v < now]
        above = [v for v in values if v > now]
        for value in (*below[-1:], *above[:1]):
            made = _with(tile, name, value)
            if fits(made):
                yield made


def _in_turn(tile: RowTile) -> Iterator[RowTile]:
    """From a program a block of rows to programs that take blocks in turn, the next ones copied meanwhile."""
    if tile.programs == 0 and tile.stages == 1:
        for programs, stages in TURNS:
            yield replace(tile, rows_per_program=0, programs=programs, stages=stages, prefetch=False)


def _ways(way: ProductWay) -> Iterator[ProductWay]:
    """From a library call and from the template's own tile the other of the two and tiles to begin with; from
    a tile its neighbours, and the template's own. What is one kernel with another product is among the first.
    """
    if not way.block_m:
        yield from (w for w in (ProductWay(False), ProductWay(True), ProductWay(True, dual=True)) if w != way)
        for m, n, k, warps, stages in DUALS:
            yield ProductWay(True, m, n, k, warps, stages, 8, 1, dual=True)
        for m, n, k, warps, stages in PRODUCTS:
            yield ProductWay(True, m, n, k, warps, stages, 8, 1)
        for m, n, k, warps, stages in DESCRIBED:
            yield ProductWay(True, m, n, k, warps, stages, 8, 1, True)
        return
    yield ProductWay(True, dual=way.dual)
    for tile in neighbours(_product(way)):
        assert isinstance(tile, MatmulTile)
        made = ProductWay(True, **asdict(tile), dual=way.dual)
        if fits(made):
            yield made


def _product(way: ProductWay) -> MatmulTile:
    return MatmulTile(**{f.name: getattr(way, f.name) for f in fields(MatmulTile)})


def _with(tile: Tile, name: str, value: int) -> Any:
    """One field changed; a block of rows that a program owns alone stays a whole number of blocks."""
    kind = bool if isinstance(getattr(tile, name), bool) else int
    made: Any = replace(tile, **{name: kind(value)})
    if isinstance(made, RowTile) and made.prefetch and made.stages > 1:
        # One or the other: the field that was not changed gives way.
        made = replace(made, stages=1) if name == "prefetch" else replace(made, prefetch=False)
    if isinstance(made, RowTile) and not made.programs and made.rows_per_program < made.block_rows:
        made = replace(made, rows_per_program=made.block_rows)
    return made


def fits(tile: Tile) -> bool:
    """Whether a program could hold the tile, and has work for its warps."""
    if isinstance(tile, ProductWay):
        if not tile.block_m or not tile.own:
            return not tile.block_m and (tile.own or not tile.dual)
        apart = tile.split_k > 1 or tile.descriptors
        wide = replace(_product(tile), block_n=tile.block_n * (2 if tile.dual else 1))
        return not (tile.dual and apart) and fits(wide)
    if isinstance(tile, RowTile):
        count = tile.block_rows * tile.block_cols
        whole = tile.programs or tile.rows_per_program % tile.block_rows == 0
        if tile.stages > 1 and (tile.prefetch or 2 * (tile.stages - 1) * count > SHARED_BYTES):
            return False
        return bool(whole) and 32 * tile.warps <= max(count, 32) and count <= ELEMENTS
    if isinstance(tile, SumTile):
        count = tile.block_parts * tile.block_cols
        return 32 * tile.warps <= max(count, 32) and count <= ELEMENTS
    if isinstance(tile, PointTile):
        return 32 * tile.warps <= tile.block
    if isinstance(tile, MatmulTile):
        staged = 2 * tile.stages * tile.block_k * (tile.block_m + tile.block_n)
        return staged <= SHARED_BYTES and tile.block_m * tile.block_n <= 64 * 256 * tile.warps // 2
    if isinstance(tile, ChainTile):
        return tile.block_m * max(tile.block_k, tile.block_n) <= ELEMENTS // 2
    return isinstance(tile, ScanTile) and tile.parts * tile.block <= 1024 * tile.warps


def features(tile: Tile) -> list[float]:
    """The tile as numbers, for a model that ranks tiles of one kind."""
    return [math.log2(1 + int(getattr(tile, f.name))) for f in fields(tile)]


def distance(a: Tile, b: Tile) -> int:
    """Steps between two tiles of one kind. A library call and the template's own tile are one step from each
    other and from every tile.
    """
    if isinstance(a, ProductWay) and isinstance(b, ProductWay):
        if not a.block_m or not b.block_m:
            return int(a != b)
        return int(a.dual != b.dual) + distance(_product(a), _product(b))
    total, space = 0, dict(SPACES[type(a)])
    if isinstance(a, RowTile) and isinstance(b, RowTile) and bool(a.programs) != bool(b.programs):
        # Rows in turn instead of a block a program are one step.
        total = 1
        for name in ("programs", "rows_per_program", "stages"):
            del space[name]
    for name, values in space.items():
        at = [min(range(len(values)), key=lambda i: abs(values[i] - int(getattr(t, name)))) for t in (a, b)]
        total += abs(at[0] - at[1])
    return total
