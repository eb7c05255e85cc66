"""The gradient of a lookup: every row of a table is the sum of the cotangents of the positions that read it.

No atomics and no sort of the whole: the table is cut in some hundred parts. One kernel reads the row numbers
and lists, part by part, the positions that fall in it, in their order; a second one goes through the rows of
the table, finds the positions of each in the list of its part, adds their cotangents in ascending order in
float32, and writes the row once, zeros included. The cuts depend on the size of the table alone.

Least traffic: the cotangents once, the table once; the lists cost 8 bytes a position, and every part reads
all row numbers twice, from the cache.
"""

from __future__ import annotations

from collections.abc import Mapping

from esper_ir.graph import Node
from esper_ir.types import Dim, DType
from forge.lowered import Launch, Lowered, Temp, ceildiv, size_of, symbols
from forge.plan import Access, GatherTile, KernelPlan, PlaceTile, Tile, next_pow2
from forge.tune.journal import Choices, choice_key
from forge.views import ONE, View

ZERO = Dim()
PARTS = 256
ROWS = 16  # of the table, for a program of the second kernel
LISTED = 128  # positions that it looks at at once
Sizes = Mapping[str, int]
Ranges = Mapping[str, tuple[int, int]]


def flat(view: View, lead: int) -> Dim | None:
    """Step from one position to the next where the first `lead` axes walk memory as one; else None."""
    if view.windows:
        return None
    size, step = ONE, ZERO
    for count, stride in reversed(list(zip(view.shape[:lead], view.strides[:lead], strict=True))):
        if count == ONE:
            continue
        if size != ONE and stride != step * size:
            return None
        size, step = size * count, stride if size == ONE else step
    return step


def lower(
    node: Node, operands: tuple[View, View], kinds: tuple[DType, DType], ranges: Ranges, sizes: Sizes,
    name: str, arch: str, choices: Choices,
) -> Lowered:  # fmt: skip
    """Two kernels for an `embedding_grad` node; the leading axes of its operands are flat."""
    values, numbers = operands
    count = ONE
    for size in numbers.shape:
        count = count * size
    rows, cols = node.types[0].shape
    lists = [f"{node.id}:{part}" for part in ("order", "rows", "starts")]
    order, listed, starts = (Access(b, DType.int32, (ZERO, ONE)) for b in lists)
    by_row = Access(numbers.base, kinds[1], (ZERO, _step(numbers, len(numbers.shape))), offset=numbers.offset)
    given = Access(
        values.base, kinds[0], (_step(values, len(values.shape) - 1), values.strides[-1]),
        offset=values.offset,
    )  # fmt: skip
    out = Access(node.id, node.types[0].dtype, (cols, ONE))

    def plan(suffix: str, space: tuple[Dim, ...], accesses: tuple[Access, ...], prior: Tile) -> KernelPlan:
        key = choice_key(arch, space, accesses, (), suffix, sizes)
        used = symbols(*space, *(d for a in accesses for d in (*a.strides, a.offset)))
        far = any(_far(d, ranges) for d in (rows * cols, count * given.strides[0], count * by_row.strides[1]))
        return KernelPlan(name + suffix, space, accesses, (), choices.pick(key, prior), used, wide=far)

    first = plan("_place", (rows, count), (by_row, order, listed, starts), _place_tile(rows.value(sizes)))
    part = first.tile
    assert isinstance(part, PlaceTile)
    prior = _gather_tile(cols.value(sizes), part.rows)
    second = plan("_add", (rows, cols), (given, order, listed, starts, out), prior)
    tile = second.tile
    assert isinstance(tile, GatherTile)
    parts = ceildiv(rows, part.rows)
    grid = (size_of(ceildiv(rows, tile.rows) * ceildiv(cols, tile.block_cols)), 1, 1)
    shapes = ((count,), (count,), (parts + 1,))
    temps = {b: Temp(DType.int32, shape) for b, shape in zip(lists, shapes, strict=True)}
    return Lowered("table", (Launch(first, (size_of(parts), 1, 1)), Launch(second, grid)), temps)


def _step(view: View, lead: int) -> Dim:
    step = flat(view, lead)
    assert step is not None
    return step


def _far(size: Dim, ranges: Ranges) -> bool:
    high = size.bounds(ranges)[1]
    return high is None or high + 2**20 >= 2**31


def _place_tile(rows: int) -> PlaceTile:
    return PlaceTile(max(next_pow2(-(-rows // PARTS)), ROWS), 4096, 8)


def _gather_tile(cols: int, listed: int) -> GatherTile:
    """A warp a program: what it finds in the list it needs at once, and warps would wait for each other."""
    return GatherTile(ROWS, LISTED, min(next_pow2(max(cols, 1)), 256), listed, 1)
