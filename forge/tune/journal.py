"""The tuning journal: every tile that was chosen, under the content of what it was chosen for, and why.

Replaying a journal makes the same choices, so the same artifact id; entries of it that no longer fit are
refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from esper_ir.diagnostics import EXIT_USAGE, EsperError
from esper_ir.types import Dim
from forge.plan import (
    Access,
    ChainTile,
    GatherTile,
    MatmulTile,
    PlaceTile,
    PointTile,
    RowTile,
    ScanTile,
    Stmt,
    SumTile,
    Tile,
)
from library.canon import canonical_json

SCHEMA = "esper-journal/1"
TILES = (RowTile, PointTile, SumTile, MatmulTile, ChainTile, ScanTile, PlaceTile, GatherTile)
KINDS: dict[str, type[Any]] = {t.__name__: t for t in TILES}


def choice_key(
    arch: str, space: tuple[Dim, ...], accesses: tuple[Access, ...], body: tuple[Stmt, ...], more: object,
    sizes: Mapping[str, int],
) -> str:  # fmt: skip
    """sha256 over what a tile is chosen for: the work, the architecture, the sizes. Names of buffers are
    left out.
    """
    order = {a.buffer: i for i, a in reversed(list(enumerate(accesses)))}
    walked = [
        (
            order[a.buffer],
            a.dtype.value,
            [str(s) for s in (*a.strides, a.offset)],
            a.partial,
            a.windows,
            a.table,
        )
        for a in accesses
    ]
    text = repr((arch, [str(s) for s in space], walked, body, more, sorted(sizes.items())))
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass
class Choices:
    """`given` tiles win over the prior; `made` records every choice of this compilation."""

    given: Mapping[str, Tile] = field(default_factory=dict)
    made: dict[str, tuple[Tile, str]] = field(default_factory=dict)

    def pick(self, key: str, prior: Tile) -> Any:
        """The tile to use: the journal's, else the prior."""
        found = self.given.get(key)
        if found is not None and type(found) is not type(prior):
            raise _bad(f"entry {key[:12]} holds a {type(found).__name__} for a {type(prior).__name__}")
        self.made[key] = (found, "journal") if found is not None else (prior, "prior")
        return self.made[key][0]

    def to_json(self) -> dict[str, Any]:
        """The journal as data. The reason is left out of what is replayed: a replay writes the same bytes."""
        rows = {k: {"kind": type(t).__name__, "tile": asdict(t)} for k, (t, _) in sorted(self.made.items())}
        return {"schema": SCHEMA, "choices": rows}

    def to_bytes(self) -> bytes:
        return canonical_json(self.to_json())


def read(document: object) -> Choices:
    """Choices from a journal document; E0514 for anything that is not one."""
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise _bad(f"not a {SCHEMA} document")
    choices = document.get("choices")
    if not isinstance(choices, dict):
        raise _bad("no choices")
    return Choices({str(k): tile_of(str(k), v) for k, v in choices.items()})


def tile_of(key: str, row: object) -> Tile:
    """The tile of a row {kind, tile}; E0514 for what is none."""
    kind = KINDS.get(str(row.get("kind"))) if isinstance(row, dict) else None
    values = row.get("tile") if isinstance(row, dict) else None
    if kind is None or not isinstance(values, dict) or values.keys() != {f.name for f in fields(kind)}:
        raise _bad(f"entry {key[:12]} is no tile")
    for name, value in values.items():
        if not isinstance(value, (int, bool)) or value < 0 or value > 1 << 20:
            raise _bad(f"entry {key[:12]}: {name} is {value!r}")
    return kind(**values)


def _bad(what: str) -> EsperError:
    return EsperError(
        "E0514", f"tuning journal: {what}", hint="use a journal.json of an artifact", exit_code=EXIT_USAGE
    )
