"""Tiles as data, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from esper_ir.diagnostics import EXIT_USAGE, EsperError
from forge.plan import (
    ChainTile,
    GatherTile,
    MatmulTile,
    PlaceTile,
    PointTile,
    ProductWay,
    RowTile,
    ScanTile,
    SumTile,
    Tile,
)
from forge.rowtile import LATER_OF_ROWS

TILES = (RowTile, PointTile, SumTile, MatmulTile, ChainTile, ScanTile, PlaceTile, GatherTile, ProductWay)
LATER = frozenset({"descriptors"})
"""Fields that tiles of older journals and tables have not: off."""
LATER_OF: Mapping[type[Any], Mapping[str, int | bool]] = {
    RowTile: LATER_OF_ROWS, ProductWay: {"dual": False},
}  # fmt: skip
"""Fields that came later still, by kind of tile: not written where they say nothing."""
KINDS: dict[str, type[Any]] = {t.__name__: t for t in TILES}


def tile_row(tile: Tile) -> dict[str, Any]:
    """The tile as {kind, tile}; fields that came later are left out where they say nothing."""
    return {"kind": type(tile).__name__, "tile": values_of(tile)}


def values_of(tile: Tile) -> dict[str, Any]:
    later = LATER_OF.get(type(tile), {})
    return {name: value for name, value in asdict(tile).items() if name not in later or value != later[name]}


def tile_of(key: str, row: object) -> Any:
    """The tile of a row {kind, tile}; E0514 for what is none."""
    kind = KINDS.get(str(row.get("kind"))) if isinstance(row, dict) else None
    values = row.get("tile") if isinstance(row, dict) else None
    if kind is None or not isinstance(values, dict) or not _complete(values, kind):
        raise bad(f"entry {key[:12]} is no tile")
    for name, value in values.items():
        if not isinstance(value, (int, bool)) or value < 0 or value > 1 << 20:
            raise bad(f"entry {key[:12]}: {name} is {value!r}")
    return kind(**values)


def _complete(values: Mapping[str, Any], kind: type[Any]) -> bool:
    """All fields and no others; `LATER` ones may be missing."""
    names = {f.name for f in fields(kind)}
    later = LATER | LATER_OF.get(kind, {}).keys()
    return names - later <= values.keys() <= names


def bad(what: str) -> EsperError:
    return EsperError(
        "E0514", f"tuning journal: {what}", hint="use a journal.json of an artifact", exit_code=EXIT_USAGE
    )
