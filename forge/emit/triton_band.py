"""BandTile: the rows of a group for their sums, the group, and the rows again, in one program."""

from __future__ import annotations

from forge.band import BandTile
from forge.emit.triton_base import Kernel, statement
from forge.emit.triton_beside import Beside, beside, side_by_side
from forge.emit.triton_held import columns, held_again, held_moments
from forge.emit.triton_rows import ahead, fetch, staging
from forge.emit.triton_scalars import TRITON_TYPE
from forge.held import moments, rest
from forge.plan import KernelPlan, Load, Stmt, Store, next_pow2


def bands(k: Kernel, tile: BandTile) -> None:
    """Program p owns rows [p * rows, (p + 1) * rows)."""
    first, second, third = (_part(k, p) for p in tile.parts)
    w, count = k.w, next_pow2(tile.rows)
    w.line(f"pid = tl.program_id(0).to({k.index_type})")
    if tile.reverse:
        w.line("pid = tl.num_programs(0) - 1 - pid")
    w.line(f"col = {first.lanes(tile.block_cols, -1)}")
    w.line(f"sub = tl.arange(0, {count})[None, :]")
    w.line("one = tl.arange(0, 1)[:, None]")
    names = moments(first.plan, second.plan) if tile.held else None
    if names is not None:
        held_moments(first, tile, names)
    kept = {} if names else _sums(first, second.plan, tile, count)
    own = {"c": f"(sub < {tile.rows})"} if count != tile.rows else {}
    index = [*second.row_indices("(pid + one)"), "sub"]
    for s in rest(second.plan, names) if names else second.plan.body:
        if isinstance(s, Load) and second.plan.accesses[s.access].buffer in kept:
            w.line(f"{s.name} = {kept[second.plan.accesses[s.access].buffer]}")
        elif not _inside(second.plan, s, tile):
            statement(second, s, index, own)
    _again(third, second.plan, tile)


def _part(k: Kernel, plan: KernelPlan) -> Kernel:
    made = Kernel(plan, k.interpreted, k.w)
    made.pointer, made.pairs = k.pointer, k.pairs
    return made


def _inside(plan: KernelPlan, s: Stmt, tile: BandTile) -> bool:
    return isinstance(s, Store) and plan.accesses[s.access].buffer in tile.inner


def _sums(k: Kernel, reader: KernelPlan, tile: BandTile, count: int) -> dict[str, str]:
    """The first pass; names of the vectors that hold a value of every row, by buffer. The next row is loaded
    while one is worked on, in registers (after the last one it is the last again) or in `stages`.
    """
    w, masks = k.w, columns(k, tile)
    wanted = {a.buffer for a in reader.accesses}
    kept: dict[str, str] = {}
    for s in k.plan.body:
        buffer = k.plan.accesses[s.access].buffer if isinstance(s, Store) else ""
        if isinstance(s, Store) and buffer in wanted:
            kept[buffer] = f"kept_{s.value}"
            w.line(f"kept_{s.value} = tl.zeros([1, {count}], {TRITON_TYPE[k.dtypes[s.value]]})")
    work = [s for s in k.plan.body if not _inside(k.plan, s, tile)]
    staged = tile.stages > 1
    loads = [] if staged else [s for s in ahead(k, work) if "r" in k.axes[s.name]]
    w.line(f"row = pid * {tile.rows} + one")
    fetch(k, loads, "", masks)
    with w.block(f"for r in tl.range(0, {tile.rows}{staging(tile)}):"):
        if staged:
            w.line(f"row = pid * {tile.rows} + r + one")
        else:
            w.line(f"next_row = pid * {tile.rows} + tl.minimum(r + 1, {tile.rows - 1}) + one")
        fetch(k, loads, "next_", masks, ("next_row", "col"))
        for s in loads:
            w.line(f"{s.name} = {k.widened(k.plan.accesses[s.access], f'raw_{s.name}')}")
        index = [*k.row_indices("row"), "col"]
        for s in side_by_side(k, [s for s in work if s not in loads]):
            if isinstance(s, Beside):
                beside(k, s, masks)
            else:
                statement(k, s, index, masks)
        for name in kept.values():
            w.line(f"{name} = tl.where(sub == r, {name.removeprefix('kept_')}, {name})")
        for name in () if staged else ("row", *(f"raw_{s.name}" for s in loads)):
            w.line(f"{name} = next_{name}")
    return kept


def _again(k: Kernel, maker: KernelPlan, tile: BandTile) -> None:
    """The second pass, last row first: it was touched last."""
    values = {maker.accesses[s.access].buffer: s.value for s in maker.body if isinstance(s, Store)}
    late: list[Stmt] = []
    for s in k.plan.body:
        found = values.get(k.plan.accesses[s.access].buffer) if isinstance(s, Load) else None
        if isinstance(s, Load) and found is not None:
            k.w.line(f"{s.name} = {found}")
        else:
            late.append(s)
    if tile.held:
        held_again(k, tile, late)
        return
    with k.w.block(f"for r in tl.range(0, {tile.rows}{staging(tile)}):"):
        k.w.line(f"row = pid * {tile.rows} + ({tile.rows - 1} - r) + one")
        index = [*k.row_indices("row"), "col"]
        for s in late:
            statement(k, s, index, columns(k, tile))
