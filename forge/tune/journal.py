"""The tuning journal: every tile that was chosen, under the content of what it was chosen for, and why.

Replaying a journal makes the same choices, so the same artifact id; entries of it that no longer fit are
refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from esper_ir.types import Dim
from forge.plan import Access, MatmulTile, Stmt, Tile
from forge.tune.priors import Table, shipped
from forge.tune.shapes import Shape
from forge.tune.tiles import bad, tile_of, tile_row
from library.canon import canonical_json

SCHEMA = "esper-journal/1"


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
            *([[(str(n), str(step)) for n, step in a.parts]] if a.parts else []),
        )
        for a in accesses
    ]
    text = repr((arch, [str(s) for s in space], walked, body, more, sorted(sizes.items())))
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass
class Choices:
    """`given` tiles win over those of the table of `priors`, and these over the rule's. `made` records every
    choice of this compilation and where it came from ("journal", "way", "table", "near" or "rule"), `shapes`
    what for. `products`: tiles of products by node, of the phase that is being lowered, that came with the
    choice to do them in a kernel.
    """

    given: Mapping[str, Tile] = field(default_factory=dict)
    made: dict[str, tuple[Tile, str]] = field(default_factory=dict)
    products: Mapping[str, MatmulTile] = field(default_factory=dict)
    shapes: dict[str, Shape] = field(default_factory=dict)
    priors: Table = field(default_factory=shipped)

    def pick(self, key: str, rule: Tile, shape: Shape | None = None, node: str = "") -> Any:
        """The tile to use: that of a product's way, else the journal's, else a measured one of this or of
        near work, else the rule's.
        """
        if node in self.products:
            self.made[key] = (self.products[node], "way")
            return self.products[node]
        found = self.given.get(key)
        if found is not None and type(found) is not type(rule):
            raise bad(f"entry {key[:12]} holds a {type(found).__name__} for a {type(rule).__name__}")
        if shape is not None:
            self.shapes[key] = shape
        known = (found, "journal") if found is not None else self.priors.find(key, rule, shape)
        self.made[key] = known or (rule, "rule")
        return self.made[key][0]

    def to_json(self) -> dict[str, Any]:
        """The journal as data. The reason is left out of what is replayed: a replay writes the same bytes."""
        rows = {k: tile_row(t) for k, (t, _) in sorted(self.made.items())}
        return {"schema": SCHEMA, "choices": rows}

    def to_bytes(self) -> bytes:
        return canonical_json(self.to_json())


def read(document: object) -> Choices:
    """Choices from a journal document; E0514 for anything that is not one."""
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise bad(f"not a {SCHEMA} document")
    choices = document.get("choices")
    if not isinstance(choices, dict):
        raise bad("no choices")
    return Choices({str(k): tile_of(str(k), v) for k, v in choices.items()})
