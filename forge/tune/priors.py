"""Tiles that were measured before this package was built, as data: what `fast` takes, and where a search
begins.

`priors.json` holds what `python -m bench.priors FILES` made of times from cards. Its rule: the entry
of the very work; else, of the same architecture and family (forge.tune.shapes) and of near sizes, the
nearest. Near, for a product: m, n and k each within a factor of two, together within four. For every other
kernel: the first axis within a factor of four and the others of the same power of two, so that a row that
was held in registers still is. The distance is the sum of the |log2| of the ratios; ties go to the smaller
sizes. Everything else is left to the rules of the templates. What decides bits between machines, whether
programs share a sum, is as the rule says in any case.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from forge.plan import ChainTile, MatmulTile, ProductWay, RowTile, Tile, next_pow2
from forge.tune import space
from forge.tune.shapes import Shape
from forge.tune.tiles import tile_of, tile_row

SCHEMA = "esper-priors/1"
PLACE = Path(__file__).with_name("priors.json")
PRODUCT_EACH, PRODUCT_TOTAL, ROWS_MOST = 1.0, 2.0, 2.0
"""In powers of two."""


@dataclass(frozen=True)
class Entry:
    """`us`: median of the tile, microseconds; `prior_us`: of the tile that the search began from; `what` it
    was measured for, in words; `card` and `toolchain` it was measured with.
    """

    key: str
    shape: Shape
    tile: Tile
    us: float
    prior_us: float
    what: str
    card: str
    toolchain: str


@dataclass(frozen=True)
class Table:
    """Entries by the digest of their work, and by architecture and family."""

    by_key: Mapping[str, Entry]
    by_family: Mapping[tuple[str, str], tuple[Entry, ...]]

    def find(self, key: str, rule: Tile, shape: Shape | None) -> tuple[Tile, str] | None:
        """(tile, "table" or "near"), or None where nothing measured is near."""
        exact = self.by_key.get(key)
        if exact is not None:
            made = usable(exact.tile, rule)
            return None if made is None else (made, "table")
        if shape is None:
            return None
        near = [(d, e) for e in self.by_family.get((shape.arch, shape.family), ())
                if (d := distance(e.shape, shape, e.tile)) is not None]  # fmt: skip
        for _, entry in sorted(near, key=lambda pair: (pair[0], pair[1].shape.sizes, pair[1].key)):
            made = usable(entry.tile, rule)
            if made is not None:
                return made, "near"
        return None


def distance(a: Shape, b: Shape, tile: Tile) -> float | None:
    """How far two sizes of one family are apart, in powers of two; None where they are not near."""
    if len(a.sizes) != len(b.sizes) or min((*a.sizes, *b.sizes)) < 1:
        return None
    steps = [abs(math.log2(x / y)) for x, y in zip(a.sizes, b.sizes, strict=True)]
    if isinstance(tile, (MatmulTile, ChainTile, ProductWay)):
        near = max(steps) <= PRODUCT_EACH and sum(steps) <= PRODUCT_TOTAL
    else:
        pairs = zip(a.sizes[1:], b.sizes[1:], strict=True)
        near = steps[0] <= ROWS_MOST and all(next_pow2(x) == next_pow2(y) for x, y in pairs)
    return sum(steps) if near else None


def usable(tile: Tile, rule: Tile) -> Tile | None:
    """The tile in the rule's place: in its direction, and only where it shares sums as the rule does."""
    if type(tile) is not type(rule) or not space.fits(tile):
        return None
    if getattr(tile, "reverse", False) != getattr(rule, "reverse", False):
        made: Any = replace(tile, **{"reverse": getattr(rule, "reverse", False)})
        tile = made
    if isinstance(tile, RowTile) and isinstance(rule, RowTile) and bool(tile.programs) != bool(rule.programs):
        # Rows that are taken in turn for their copies alone: no rule of a card has sums of programs there.
        return tile if tile.stages > 1 and not rule.programs else None
    return tile


def table(entries: Iterable[Entry]) -> Table:
    """A table; of two entries of one work the later."""
    by_key = {e.key: e for e in entries}
    families: dict[tuple[str, str], list[Entry]] = {}
    for entry in by_key.values():
        families.setdefault((entry.shape.arch, entry.shape.family), []).append(entry)
    return Table(by_key, {k: tuple(v) for k, v in families.items()})


NOTHING = table(())


@lru_cache(maxsize=1)
def shipped() -> Table:
    """The table of this package."""
    return table(read(PLACE.read_bytes())) if PLACE.exists() else NOTHING


def read(data: bytes) -> list[Entry]:
    """Entries of a table's file. ValueError for anything else; a tile that this version does not know is
    E0514."""
    document = json.loads(data)
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise ValueError(f"not a {SCHEMA} document")
    return [_entry(row) for row in document["entries"]]


def _entry(row: Mapping[str, Any]) -> Entry:
    shape = Shape(str(row["arch"]), str(row["family"]), tuple(int(s) for s in row["sizes"]))
    return Entry(
        str(row["key"]), shape, tile_of(str(row["key"]), row), float(row["us"]), float(row["prior_us"]),
        str(row["what"]), str(row["card"]), str(row["toolchain"]),
    )  # fmt: skip


def written(entries: Iterable[Entry]) -> bytes:
    """The file of a table: one line an entry, in the order of what they are for."""
    rows = [json.dumps(_row(e), sort_keys=True) for e in sorted(entries, key=lambda e: (e.what, e.key))]
    lines = ",\n".join(rows)
    return f'{{"schema": "{SCHEMA}", "entries": [\n{lines}\n]}}\n'.encode()


def _row(e: Entry) -> dict[str, Any]:
    return {
        "key": e.key, "arch": e.shape.arch, "family": e.shape.family, "sizes": list(e.shape.sizes),
        **tile_row(e.tile), "us": round(e.us, 3), "prior_us": round(e.prior_us, 3), "what": e.what,
        "card": e.card, "toolchain": e.toolchain,
    }  # fmt: skip
