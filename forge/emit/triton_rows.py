"""RowTile kernels in Triton: whole rows in registers, or rows swept in blocks of columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from esper_ir.types import Dim
from forge.along import apart, in_line
from forge.emit import triton_moments as moments
from forge.emit import triton_vectors as vectors
from forge.emit import triton_welford as welford
from forge.emit.absent import zero_outside
from forge.emit.triton_base import COMBINE, Kernel, identity, masked, statement
from forge.emit.triton_beside import Beside, beside, side_by_side, together
from forge.emit.triton_scalars import TRITON_TYPE, spell
from forge.emit.triton_sets import VECTOR, count, down, fits, sets_of
from forge.emit.writer import dim_text
from forge.online import LESS, Below, Online, joined
from forge.picked import Place, picked, places
from forge.plan import INDEX, Compute, Load, Reduce, RowTile, Stmt, Store, needed, phases
from forge.plan import Phase as Sweep


def rows(k: Kernel, tile: RowTile) -> None:
    """Body of a RowTile kernel."""
    cols = k.plan.cols.static
    whole = cols is not None and tile.block_cols >= cols
    k.w.line(f"pid = tl.program_id(0).to({k.index_type})")
    if tile.reverse and not tile.programs:
        k.w.line("pid = tl.num_programs(0) - 1 - pid")
    k.apart = apart(k.plan)
    if k.apart:
        k.w.line(f"blocks = tl.cdiv({dim_text(k.plan.space[-2])}, {tile.block_rows})")
        k.w.line("batch = pid // blocks")
    k.in_line = in_line(k.plan)
    if k.in_line:
        k.w.line(f"across = tl.cdiv({dim_text(k.plan.cols)}, {tile.block_cols})")
        k.w.line("turn = pid % across")
        k.w.line("pid = pid // across")
    if whole or not any(isinstance(s, Reduce) and s.axis == "row" for s in k.plan.body):
        _whole(k, tile, whole)
    else:
        _swept(k, tile)


def _row_mask(k: Kernel, tile: RowTile) -> dict[str, str]:
    """No mask where the grid has as many programs as there are rows."""
    return {} if tile.rows_per_program == 1 and not tile.programs else {"r": "row_ok"}


def _blocks(k: Kernel, tile: RowTile, staged: str = "") -> str | None:
    """Head of the loop over row blocks, or None when the program has one."""
    if tile.programs:
        k.w.line(f"blocks = tl.cdiv({dim_text(k.plan.rows)}, {tile.programs * tile.block_rows})")
        return f"for i in tl.range(0, blocks{staged}):"
    if tile.rows_per_program == tile.block_rows:
        return None
    return f"for i in tl.range(0, {tile.rows_per_program // tile.block_rows}{staged}):"


def staging(tile: RowTile) -> str:
    """Of a loop whose blocks are copied to shared memory before they are needed."""
    return f", num_stages={tile.stages}" if tile.stages > 1 else ""


def _first_row(tile: RowTile, step: str) -> str:
    """First row of block number `step` of this program."""
    if tile.programs:
        turn = f"(blocks - 1 - ({step}))" if tile.reverse else f"({step})"
        return f"({turn} * {tile.programs} + pid) * {tile.block_rows}"
    return f"pid * {tile.rows_per_program} + ({step}) * {tile.block_rows}"


def _row_lines(k: Kernel, tile: RowTile, step: str, prefix: str = "") -> None:
    if k.apart:
        k.w.line(f"row = pid % blocks * {tile.block_rows} + tl.arange(0, {tile.block_rows})[:, None]")
        k.w.line(f"row_ok = row < {dim_text(k.plan.space[-2])}")
        return
    k.w.line(f"{prefix}row = {_first_row(tile, step)} + tl.arange(0, {tile.block_rows})[:, None]")
    lower = f" & ({prefix}row >= 0)" if tile.reverse and tile.prefetch else ""
    k.w.line(f"{prefix}row_ok = ({prefix}row < {dim_text(k.plan.rows)}){lower}")


def _whole(k: Kernel, tile: RowTile, whole: bool) -> None:
    """The program's columns stay in registers: all of them, or (no row reduction) the block of grid axis
    1.
    """
    w, block = k.w, tile.block_cols
    turn = "turn" if k.in_line else f"tl.program_id(1).to({k.index_type})"
    first = "" if whole else f"{turn} * {block} + "
    w.line(f"col = {first}{k.lanes(block, -1)}")
    if tile.unroll_cols > 1:
        vectors.begin(k, tile, first)
    exact = k.plan.cols.static is not None and k.plan.cols.static % block == 0
    col_mask = {} if exact else {"c": f"(col < {dim_text(k.plan.cols)})"}
    early, rest = ([], list(k.plan.body)) if _spread(k, tile) else k.hoist()
    asked = _ask(k, tile, rest, col_mask)
    outer = ["0"] * (len(k.plan.space) - 1)
    for s in early:
        statement(k, s, [*outer, "col"], col_mask)
    sums = [s for s in k.plan.body if isinstance(s, Reduce) and s.axis == "col"]
    sets = sets_of(k.plan, tile)
    shape = f"[{sets}, {block}]"
    for s in (s for s in sums if s.combine != "rest"):
        w.line(
            f"{s.name}_acc = tl.full({shape}, {identity(s.combine, k.dtypes[s.name])},"
            f" {TRITON_TYPE[k.dtypes[s.name]]})"
        )
    moments.begin(k, sums, shape, f"[{sets}, 1]")
    finished = {s.name for s in sums}
    work = [s for s in rest if not (isinstance(s, Store) and s.value in finished)]
    _loop(k, tile, work, col_mask, sets, asked)
    _store_partials(k, sums, col_mask.get("c", ""), sets)


def _spread(k: Kernel, tile: RowTile) -> bool:
    """Values of a column are loaded by every thread that needs them, from the cache: as one row of the tile
    they would be handed round through shared memory, and no window's load is under way across a barrier.
    """
    stores = [s for s in k.plan.body if isinstance(s, Store)]
    rows = all("r" in k.plan.store_axes(s) for s in stores)
    alone = not any(isinstance(s, Reduce) for s in k.plan.body) and _blocks(k, tile) is None
    narrow = tile.block_cols < 32 * VECTOR * tile.warps  # a row of it lies otherwise in registers
    k.spread = alone and rows and narrow and any(a.windows for a in k.plan.accesses)
    return k.spread


def _ask(k: Kernel, tile: RowTile, rest: list[Stmt], col_mask: dict[str, str]) -> list[Load]:
    """Of a program with one block of rows: its rows are asked for before all else, so that they are on their
    way together, and while values of columns are handed round. (An assembler that is left to itself puts
    each load next to its use.) Windows read one another's elements: there the order of their use is right.
    """
    if _blocks(k, tile) is not None or k.picks:
        return []
    loads = [s for s in ahead(k, rest) if "r" in k.axes[s.name]]
    if loads:
        _row_lines(k, tile, "0")
        fetch(k, loads, "", {**_row_mask(k, tile), **col_mask})
    return loads


def _loop(
    k: Kernel, tile: RowTile, work: list[Stmt], col_mask: dict[str, str], sets: int, asked: list[Load]
) -> None:
    head = _blocks(k, tile, staging(tile))
    if head is None:
        if not asked:
            _row_lines(k, tile, "0")
        for s in asked:
            k.w.line(f"{s.name} = {k.widened(k.plan.accesses[s.access], f'raw_{s.name}')}")
        left = [s for s in work if s not in asked]
        _block(k, side_by_side(k, left), {**_row_mask(k, tile), **col_mask}, sets, _first_row(tile, "0"))
        return
    loads = ahead(k, work) if tile.prefetch else []
    rest = [s for s in work if s not in loads]
    if not loads:
        parts = side_by_side(k, work)
        with k.w.block(head):
            _row_lines(k, tile, "i")
            _block(k, parts, {"r": "row_ok", **col_mask}, sets, _first_row(tile, "i"))
        return
    _row_lines(k, tile, "0")
    fetch(k, loads, "", {"r": "row_ok", **col_mask})
    with k.w.block(head):
        _row_lines(k, tile, "i + 1", "next_")
        fetch(k, loads, "next_", {"r": "next_row_ok", **col_mask}, ("next_row", "col"))
        for s in loads:
            k.w.line(f"{s.name} = {k.widened(k.plan.accesses[s.access], f'raw_{s.name}')}")
        _block(k, rest, {"r": "row_ok", **col_mask}, sets, _first_row(tile, "i"))
        for name in ("row", "row_ok", *(f"raw_{s.name}" for s in loads)):
            k.w.line(f"{name} = next_{name}")


def ahead(k: Kernel, work: list[Stmt]) -> list[Load]:
    """Loads that need nothing computed: their addresses, or the rows they read, are loaded themselves."""
    out: list[Load] = []
    for s in work:
        if isinstance(s, Load) and k.plan.accesses[s.access].buffer != INDEX:
            if not s.row or any(s.row == other.name for other in out):
                out.append(s)
    return out


def fetch(
    k: Kernel, loads: list[Load], prefix: str, masks: dict[str, str], at: tuple[str, str] = ("row", "col")
) -> None:
    """Loads of one block in their stored type, half the registers of the computed one."""
    index = [*k.row_indices(at[0]), at[1]]
    for s in loads:
        access = k.plan.accesses[s.access]
        mask = k.mask(k.axes[s.name], masks)
        load = k.raw_load(access, index, mask)
        if s.row:
            load = k.row_load(access, index, mask, f"{prefix}raw_{s.row}")
        k.w.line(f"{prefix}raw_{s.name} = {load}")


def _block(
    k: Kernel, work: Sequence[Stmt | Beside], masks: dict[str, str], sets: int, first: str
) -> None:  # fmt: skip
    index = [*k.row_indices("row"), "col"]
    reduces = [s for s in work if isinstance(s, Reduce)]
    tile = k.plan.tile
    assert isinstance(tile, RowTile)
    moments.share(k, reduces, count(dim_text(k.plan.rows), first, tile, sets))
    if 1 < sets < tile.block_rows and moments.about(reduces):
        k.w.line(f"fits = {fits(dim_text(k.plan.rows), first, tile, sets)}")
    nothing = zero_outside(k.plan)
    for s in work:
        if isinstance(s, Beside):
            beside(k, s, masks)
            continue
        if isinstance(s, Reduce) and s.about:
            continue  # made with its sum
        if isinstance(s, Reduce) and (own := moments.squares_of(reduces, s.name)):
            moments.block(k, s, own, k.mask("rc", masks), sets)
        elif isinstance(s, Reduce) and s.axis == "col":
            combine = COMBINE[s.combine]
            absent = s.combine != "sum" or s.arg not in nothing
            mask = k.mask("rc", masks) if absent else ""
            value = masked(s.arg, mask, identity(s.combine, k.dtypes[s.name]))
            k.w.line(f"{s.name}_acc = {combine}({s.name}_acc, {down(value, tile, sets, s.combine)})")
        elif tile.unroll_cols == 1 or not vectors.statement(k, s, index, masks):
            statement(k, s, index, masks)
    moments.count(k, reduces)


def _store_partials(k: Kernel, sums: list[Reduce], mask: str, sets: int) -> None:
    stores = {s.value: k.plan.accesses[s.access] for s in k.plan.body if isinstance(s, Store)}
    for s in sums:
        access = stores[s.name]
        total = f"{s.name}_acc"
        if s.about:
            total = _about_mean(k, s, sums, sets == 1)
        elif sets > 1:
            total = f"tl.reduce({total}, 0, {COMBINE[s.combine]}, keep_dims=True)"
        # Places of columns that lie apart (forge/halves.py) have a part of the row each.
        width = k.plan.cols * sum(a.buffer == access.buffer for a in stores.values())
        at = "col" if access.offset == Dim() else f"{dim_text(access.offset)} + col"
        where = f"{k.pointer[access.buffer]} + pid * {dim_text(width)} + {at}"
        k.w.line(f"tl.store({where}, {total}{f', mask={mask}' if mask else ''})")


def _about_mean(k: Kernel, s: Reduce, sums: list[Reduce], folded: bool) -> str:
    """What the rounded mean leaves, and after that the squares."""
    squares = moments.squares_of(sums, s.about[0])
    assert squares is not None
    if s is squares:
        return f"{s.name}_acc"
    total = f"{s.about[0]}_acc"
    moments.end(k, squares, total if folded else f"tl.reduce({total}, 0, _add, keep_dims=True)", folded)
    return f"{squares.name}_rest"


def _swept(k: Kernel, tile: RowTile) -> None:
    head = _blocks(k, tile)
    if head is None:
        _row_lines(k, tile, "0")
        _sweeps(k, tile)
        return
    with k.w.block(head):
        _row_lines(k, tile, "i")
        _sweeps(k, tile)


def _sweeps(k: Kernel, tile: RowTile) -> None:
    w, kept = k.w, _row_mask(k, tile)
    before, sweeps = phases(k.plan)
    outer = k.row_indices("row")
    at = places(k.plan)
    k.placed = frozenset(p.of.name for p in at.values())
    for s in before:
        statement(k, s, [*outer, "0"], kept)
    for sweep in joined(k.plan, sweeps, tile.block_cols) if tile.online and not at else sweeps:
        known = [r for r in sweep.reduces if r.name in at]
        sums = tuple(r for r in sweep.reduces if r not in known and not _pick(k, r, outer, kept))
        pairs = sweep.sums if isinstance(sweep, Online) else ()
        tops = {p.top.name for p in pairs}
        for r in (*sums, *(p.total for p in pairs)):
            shape = f"[{tile.block_rows}, {1 if r.name in tops else tile.block_cols}]"
            w.line(
                f"{r.name}_acc = tl.full({shape}, {identity(r.combine, k.dtypes[r.name])},"
                f" {TRITON_TYPE[k.dtypes[r.name]]})"
            )
            if r.name in k.placed:
                first = f"tl.arange(0, {tile.block_cols})[None, :]"
                w.line(f"{r.name}_at = {first} + tl.zeros({shape}, tl.int32)")
        squares = sweep.squares if isinstance(sweep, Online) else ()
        for s in squares:
            welford.begin(k, s, f"[{tile.block_rows}, {tile.block_cols}]")
        full = sweep.full if sums == sweep.reduces else needed(k.plan, k.axes, {r.arg for r in sums})
        if full:
            _sweep(k, tile, replace(sweep, full=full, reduces=sums), outer)
        _swept_sums(k, sums, pairs)
        for r in known:
            _place(k, r, at[r.name])
        for s in sweep.scalars:
            statement(k, s, [*outer, "0"], kept)
        for s in squares:
            welford.end(k, s, tile.block_cols)


def _place(k: Kernel, r: Reduce, place: Place) -> None:
    """Where an extremum is: of the columns that each position of a block found, the first that has it."""
    of = place.of.name
    has = f"({of}_acc == {of})" + (f" | ({of}_acc != {of}_acc)" if place.nan else "")
    first = f"tl.reduce(tl.where({has}, {of}_at, {place.none}), 1, _min, keep_dims=True)"
    k.w.line(f"{r.name} = {first}.to({TRITON_TYPE[k.dtypes[r.name]]})")


def _better(k: Kernel, r: Reduce, value: str) -> None:
    """An extremum and the first column that has it, position of a block by position; not a number is one."""
    take = f"({value} {'<' if r.combine == 'min' else '>'} {r.name}_acc)"
    if k.dtypes[r.name].is_floating:
        take += f" | (({value} != {value}) & ({r.name}_acc == {r.name}_acc))"
    k.w.line(f"take = {take}")
    k.w.line(f"{r.name}_acc = tl.where(take, {value}, {r.name}_acc)")
    k.w.line(f"{r.name}_at = tl.where(take, col.to(tl.int32), {r.name}_at)")


def _pick(k: Kernel, r: Reduce, outer: list[str], kept: dict[str, str]) -> bool:
    """The value at one column instead of a sum of zeros and that value: the same bits, and one load a row.
    False where the sum is another one.
    """
    found = picked(k.plan, r)
    if found is None:
        return False
    value, column = found
    chain = needed(k.plan, k.axes, {value})
    if any(isinstance(s, Load) and s.row for s in chain):
        return False
    at, cols = f"at_{r.name}", dim_text(k.plan.cols)
    k.w.line(f"{at} = {column}.to({k.index_type})")
    k.w.line(f"hit_{r.name} = ({at} >= 0) & ({at} < {cols})")
    own = {s.name: f"{s.name}_at_{r.name}" for s in chain if not isinstance(s, Store)}
    for name, other in own.items():
        k.axes[other], k.dtypes[other] = k.axes[name], k.dtypes[name]
    for s in chain:
        if isinstance(s, Load):
            statement(k, replace(s, name=own[s.name]), [*outer, at], {**kept, "c": f"hit_{r.name}"})
        elif isinstance(s, Compute):
            made = replace(s, name=own[s.name], args=tuple(own.get(a, a) for a in s.args))
            statement(k, made, [*outer, at], kept)
    k.w.line(f"{r.name} = tl.where(hit_{r.name}, {own[value]}, 0.0) + 0.0")
    return True


def _swept_sums(k: Kernel, sums: Sequence[Reduce], pairs: Sequence[Below]) -> None:
    """What the lanes of a sweep have found, put together. Where a maximum is no number, the sum is what two
    sweeps find: no number, or below an infinite one with zero in its place exp of it.
    """
    tops = {p.top.name for p in pairs}
    wide = [r for r in (*sums, *(p.total for p in pairs)) if r.name not in tops]
    for name in dict.fromkeys(p.top.name for p in pairs):
        k.w.line(f"{name} = {name}_acc")
    if wide:
        together(k, wide, [f"{r.name}_acc" for r in wide])
    for p in pairs:
        name, total = p.top.name, p.total.name
        other = f"{name} - {name}" if not p.guarded else spell(LESS, [name, "0.0"], k.interpreted)
        k.w.line(f'{total} = tl.where(tl.abs({name}) < float("inf"), {total}, {other})')


def _online(k: Kernel, top: Reduce, sums: Sequence[Reduce], mask: str) -> None:
    """A block's maximum and sums. While nothing but -inf was seen the sums are zero, less zero."""
    name, w = top.name, k.w
    w.line(f"{name}_in = {masked(top.arg, mask, identity('max', k.dtypes[name]))}")
    w.line(f"{name}_new = _max({name}_acc, tl.reduce({name}_in, 1, _max, keep_dims=True))")
    w.line(f'{name}_base = tl.where(tl.abs({name}_new) < float("inf"), {name}_new, 0.0)')
    less = [spell(LESS, [f"{name}_{of}", f"{name}_base"], k.interpreted, fast=k.fast) for of in ("acc", "in")]
    for s in sums:
        w.line(f"{s.name}_acc = {s.name}_acc * {less[0]} + {less[1]}")
    w.line(f"{name}_acc = {name}_new")


def _sweep(k: Kernel, tile: RowTile, sweep: Sweep, outer: list[str]) -> None:
    """One pass over the columns of the rows, a block at a time; with `prefetch` the next block is under way
    while one is worked on. Only the last block, where it is not full, has masks along the columns; with
    `stages` all are one loop.
    """
    w, block = k.w, tile.block_cols
    last = f"(col < {dim_text(k.plan.cols)})"
    loads = ahead(k, list(sweep.full)) if tile.prefetch else []
    kept = _row_mask(k, tile)
    if loads:
        w.line(f"col = {k.lanes(block, -1)}")
        fetch(k, loads, "", {**kept, "c": last})
    for start, stop, whole in _spans(k, block, one=tile.stages > 1):
        with w.block(f"for start in tl.range({start}, {stop}, {block}{staging(tile)}):"):
            w.line(f"col = start + {k.lanes(block, -1)}")
            if loads and whole:
                w.line(f"next_col = col + {block}")
                fetch(k, loads, "next_", {**kept, "c": f"(next_{last[1:]}"}, ("row", "next_col"))
            _columns(k, sweep, loads, [*outer, "col"], kept if whole else {**kept, "c": last})
            for s in loads if whole else ():
                w.line(f"raw_{s.name} = next_raw_{s.name}")


def _spans(k: Kernel, block: int, one: bool = False) -> list[tuple[str, str, bool]]:
    """(first column, end, whether blocks are full) of the loops of a sweep."""
    cols = dim_text(k.plan.cols)
    if one:
        return [("0", cols, k.plan.cols.static is not None and k.plan.cols.static % block == 0)]
    if k.plan.cols.static is None:
        full = f"({cols} // {block} * {block})"
        return [("0", full, True), (full, cols, False)]
    full = k.plan.cols.static // block * block
    spans = [("0", str(full), True), (str(full), cols, False)]
    return [s for s in spans if s[0] != s[1]]


def _columns(k: Kernel, sweep: Sweep, loads: list[Load], index: list[str], masks: dict[str, str]) -> None:
    """The work of a sweep on one block of columns; `loads` are there already."""
    for s in sweep.full:
        if isinstance(s, Load) and s in loads:
            k.w.line(f"{s.name} = {k.widened(k.plan.accesses[s.access], f'raw_{s.name}')}")
        else:
            statement(k, s, index, masks)
    pairs = sweep.sums if isinstance(sweep, Online) else ()
    for top in dict.fromkeys(p.top for p in pairs):
        _online(k, top, [p.total for p in pairs if p.top == top], masks.get("c", ""))
    for r in (r for r in sweep.reduces if r not in [p.top for p in pairs]):
        value = masked(r.arg, masks.get("c", ""), identity(r.combine, k.dtypes[r.name]))
        if r.name in k.placed:
            k.w.line(f"of_{r.name} = {value}")
            _better(k, r, f"of_{r.name}")
            continue
        k.w.line(f"{r.name}_acc = {COMBINE[r.combine]}({r.name}_acc, {value})")
    welford.block(k, sweep.squares if isinstance(sweep, Online) else ())
