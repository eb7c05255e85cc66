"""RowTile: how programs walk rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class RowTile:
    """`programs` > 0: that many programs share the row blocks in turn (program p takes blocks p, p +
    programs, ...) and `rows_per_program` is unused; `reverse` takes them last to first (what the kernel
    before touched last is met in the cache first); `prefetch` loads a block, of rows or of the columns of a
    sweep, while the one before is worked on. `stages` > 1, in its place: copies of as many blocks but one are
    under way into shared memory, without registers. `online`: of a row that is swept, a maximum and the sums
    of exponentials less that maximum come from one sweep (forge.online), in another order of rounding.
    `unroll`: neighbours along the rows' last axis that are one row (forge.unroll); `unroll_above`: along the
    axis before it; `unroll_cols`: columns that are one, whose operands are loaded as vectors
    (forge/emit/triton_vectors.py).
    """

    block_rows: int
    rows_per_program: int
    block_cols: int
    warps: int
    programs: int = 0
    reverse: bool = False
    prefetch: bool = False
    stages: int = 1
    online: bool = False
    unroll: int = 1
    unroll_above: int = 1
    unroll_cols: int = 1

    def __repr__(self) -> str:
        """Without the fields that came later where they say nothing: the text of a plan is in digests."""
        given = {f.name: getattr(self, f.name) for f in fields(RowTile)}
        told = (f"{n}={v!r}" for n, v in given.items() if n not in LATER_OF_ROWS or v != LATER_OF_ROWS[n])
        return f"RowTile({', '.join(told)})"


LATER_OF_ROWS: Mapping[str, int | bool] = {
    "stages": 1, "online": False, "unroll": 1, "unroll_above": 1, "unroll_cols": 1,
}  # fmt: skip
"""Fields of a RowTile that older plans, journals and tables do not have, with what they mean there."""
