"""KernelPlan -> Triton text. Every value lives in its compute type; loads convert up, stores convert down.

Tiles are two-dimensional, [rows, columns]; a value that depends on one axis keeps size 1 on the other.
PointTile kernels are one-dimensional.
"""

from __future__ import annotations

from functools import partial

from esper_ir.types import Dim
from forge.band import BandTile
from forge.emit import triton_moments as moments
from forge.emit.triton_band import bands
from forge.emit.triton_base import COMBINE, Kernel, identity, masked, statement
from forge.emit.triton_beside import helpers
from forge.emit.triton_chain import chains, dot_operand
from forge.emit.triton_joined import joined
from forge.emit.triton_rows import rows
from forge.emit.triton_scalars import TRITON_TYPE, preamble
from forge.emit.triton_scan import scans
from forge.emit.triton_table import gathers, places
from forge.emit.triton_vectors import HELPERS as VECTORS
from forge.emit.writer import dim_text, size_name
from forge.plan import (
    Access,
    ChainTile,
    Compute,
    GatherTile,
    JoinedTile,
    KernelPlan,
    Load,
    MatmulTile,
    PlaceTile,
    PointTile,
    Reduce,
    RowTile,
    ScanTile,
    Store,
    SumTile,
    needed,
)


def emit(plan: KernelPlan, *, interpreted: bool = False, pairs: bool = False) -> str:
    """A module holding the kernel `plan.name`; `pairs` as of `preamble`, not where operands move in windows:
    of a sum and its rounding the assembler makes packed sums there.
    """
    pairs = pairs and not any(a.windows for a in plan.accesses)
    return preamble(interpreted, pairs) + "\n\n" + emit_kernel(plan, interpreted=interpreted)


def emit_kernel(plan: KernelPlan, *, interpreted: bool = False) -> str:
    """The kernel alone, without imports and what all kernels share."""
    if isinstance(plan.tile, JoinedTile):
        return joined(plan, partial(emit_kernel, interpreted=interpreted))
    out = Kernel(plan, interpreted)
    params = ", ".join([*(f"p_{i}" for i in range(len(plan.buffers))), *map(size_name, plan.sizes)])
    out.w.line("@triton.jit")
    with out.w.block(f"def {plan.name}({params}):"):
        _EMITTERS[type(plan.tile)](out, plan.tile)
    return helpers(out.pairs) + (VECTORS if out.vectors else "") + out.w.text()


# PointTile ----------------------------------------------------------------------------------------


def _points(k: Kernel, tile: PointTile) -> None:
    total = Dim.of(1)
    for size in k.plan.space:
        total = total * size
    pid = "(tl.num_programs(0) - 1 - tl.program_id(0))" if tile.reverse else "tl.program_id(0)"
    k.w.line(f"at = {pid}.to({k.index_type}) * {tile.block} + tl.arange(0, {tile.block})")
    k.w.line(f"ok = at < {dim_text(total)}")
    index: list[str] = []
    inner = Dim.of(1)
    for position, size in reversed(list(enumerate(k.plan.space))):
        text = "at" if inner == Dim.of(1) else f"(at // {dim_text(inner)})"
        index.append(text if position == 0 else f"({text} % {dim_text(size)})")
        inner = inner * size
    index.reverse()
    for s in k.plan.body:
        if isinstance(s, Load):
            access = k.plan.accesses[s.access]
            k.load(s, index, "ok" if k.access_axes(access) else "")
        elif isinstance(s, Store):
            k.store(k.plan.accesses[s.access], s.value, index, "ok", "c")
        elif isinstance(s, Compute):
            k.compute(s)


# SumTile ------------------------------------------------------------------------------------------


def _sums(k: Kernel, tile: SumTile) -> None:
    """Ascending parts, `block_parts` at a time kept apart in registers, then folded: the order is fixed by
    the tile.
    """
    w = k.w
    parts, cols = k.plan.space
    w.line(
        f"col = tl.program_id(0).to({k.index_type}) * {tile.block_cols}"
        f" + tl.arange(0, {tile.block_cols})[None, :]"
    )
    w.line(f"col_ok = col < {dim_text(cols)}")
    reduces = [s for s in k.plan.body if isinstance(s, Reduce)]
    feeding = {name for r in reduces for name in (r.arg, *r.about)}
    early = needed(k.plan, dict.fromkeys(k.axes, "c"), feeding)
    shape = f"[{tile.block_parts}, {tile.block_cols}]"
    for r in reduces:
        w.line(
            f"{r.name}_acc = tl.full({shape}, {identity(r.combine, k.dtypes[r.name])},"
            f" {TRITON_TYPE[k.dtypes[r.name]]})"
        )
    moments.begin(k, reduces, shape, f"[{tile.block_parts}, 1]")
    with w.block(f"for start in tl.range(0, {dim_text(parts)}, {tile.block_parts}):"):
        w.line(f"row = start + {k.lanes(tile.block_parts, 0)}")
        w.line(f"ok = (row < {dim_text(parts)}) & col_ok")
        for s in early:
            statement(k, s, ["row", "col"], {"r": "ok"})
        _add_parts(k, reduces, f"row < {dim_text(parts)}")
    for r in reduces:
        if r.combine == "squares":
            moments.end_sets(k, r)
            continue
        w.line(f"{r.name} = tl.reduce({r.name}_acc, 0, {COMBINE[r.combine]}, keep_dims=True)")
    for s in k.plan.body:
        if not isinstance(s, Reduce) and s not in early:
            statement(k, s, ["0", "col"], {"r": "", "c": "col_ok"})


def _add_parts(k: Kernel, reduces: list[Reduce], exists: str) -> None:
    """A block of partial rows to what each of its rows has."""
    counts = [r.about[0] for r in reduces if r.about]
    moments.share(k, reduces, f"tl.where({exists}, {counts[0]}, 0)" if counts else "")
    for r in reduces:
        value = masked(r.arg, "ok", identity(r.combine, k.dtypes[r.name]))
        if r.combine == "squares":
            moments.merge(k, r, r.about[1], r.about[2], value)
        else:
            k.w.line(f"{r.name}_acc = {COMBINE[r.combine]}({r.name}_acc, {value})")
    moments.count(k, reduces)


# MatmulTile ---------------------------------------------------------------------------------------


def _matmul(k: Kernel, tile: MatmulTile) -> None:
    assert k.plan.matmul is not None
    w, spec = k.w, k.plan.matmul
    m, n = (dim_text(d) for d in k.plan.space)
    depth = dim_text(spec.k)
    _matmul_indices(k, tile, m, n)
    wide = f".to({k.index_type})"
    w.line(f"row = (tile_m * {tile.block_m} + tl.arange(0, {tile.block_m})){wide}[:, None]")
    w.line(f"col = (tile_n * {tile.block_n} + tl.arange(0, {tile.block_n})){wide}[None, :]")
    w.line(f"row_ok = row < {m}")
    w.line(f"col_ok = col < {n}")
    for name in k.plan.sums:
        w.line(f"{name} = tl.zeros([{tile.block_m}, {tile.block_n}], tl.float32)")
    if tile.descriptors:
        _described(k, tile, m, n, depth)
    start, stop = "0", depth
    if tile.split_k > 1:
        w.line("part = tl.program_id(1)")
        w.line(f"chunk = tl.cdiv(tl.cdiv({depth}, {tile.block_k}), {tile.split_k}) * {tile.block_k}")
        start, stop = "part * chunk", f"tl.minimum(part * chunk + chunk, {depth})"
    with w.block(f"for k0 in tl.range({start}, {stop}, {tile.block_k}, num_stages={tile.stages}):"):
        if tile.descriptors:
            _from_descriptors(k, tile)
        else:
            w.line(f"ka = (k0 + tl.arange(0, {tile.block_k})){wide}[None, :]")
            w.line(f"kb = (k0 + tl.arange(0, {tile.block_k})){wide}[:, None]")
            w.line(f"a = {dot_operand(k, spec.a, ['row', 'ka'], f'row_ok & (ka < {stop})')}")
            for name, access in zip(("b", "b2"), spec.operands[1:], strict=False):
                w.line(f"{name} = {dot_operand(k, access, ['kb', 'col'], f'(kb < {stop}) & col_ok')}")
        for name, right in zip(k.plan.sums, ("b", "b2"), strict=False):
            w.line(f'{name} = tl.dot(a, {right}, {name}, input_precision="{spec.precision}")')
    masks = {"r": "row_ok", "c": "col_ok"}
    if tile.split_k > 1:
        access = next(a for a in k.plan.accesses if a.partial)
        where = f"{k.pointer[access.buffer]} + part.to({k.index_type}) * {m} * {n} + row * {n} + col"
        w.line(f"tl.store({where}, acc, mask=row_ok & col_ok)")
        return
    for s in k.plan.body:
        statement(k, s, ["row", "col"], masks)


def _described(k: Kernel, tile: MatmulTile, m: str, n: str, depth: str) -> None:
    """A descriptor of each operand as it lies in memory, its dense axis last. What is outside reads as 0."""
    assert k.plan.matmul is not None
    spec = k.plan.matmul
    rows = (
        ("a", spec.a, (m, depth), (tile.block_m, tile.block_k)),
        ("b", spec.b, (depth, n), (tile.block_k, tile.block_n)),
    )
    for name, access, shape, block in rows:
        order = _order(access)
        size, step, part = (
            ", ".join(str(values[axis]) for axis in order)
            for values in (shape, [dim_text(s) for s in access.strides], block)
        )
        k.w.line(
            f"{name}_at = tl.make_tensor_descriptor({k.pointer[access.buffer]}, [{size}], [{step}], [{part}])"
        )


def _from_descriptors(k: Kernel, tile: MatmulTile) -> None:
    assert k.plan.matmul is not None
    spec = k.plan.matmul
    first = {"m": f"(tile_m * {tile.block_m}).to(tl.int32)", "n": f"(tile_n * {tile.block_n}).to(tl.int32)"}
    for name, access, at in (("a", spec.a, (first["m"], "k0")), ("b", spec.b, ("k0", first["n"]))):
        order = _order(access)
        text = f"{name}_at.load([{', '.join(at[axis] for axis in order)}])"
        turned = ".T" if order == (1, 0) else ""
        k.w.line(f"{name} = {text}{turned}" + (".to(tl.float32)" if k.interpreted else ""))


def _order(access: Access) -> tuple[int, int]:
    """Axes of an operand, the dense one last."""
    return (0, 1) if access.strides[1] == Dim.of(1) else (1, 0)


def _matmul_indices(k: Kernel, tile: MatmulTile, m: str, n: str) -> None:
    """Grouped order of tiles, so that neighbours share operands in the L2 cache."""
    w = k.w
    w.line(f"pid = tl.program_id(0).to({k.index_type})")
    w.line(f"tiles_m = tl.cdiv({m}, {tile.block_m})")
    w.line(f"tiles_n = tl.cdiv({n}, {tile.block_n})")
    w.line(f"group = pid // ({tile.group_m} * tiles_n)")
    w.line(f"first = group * {tile.group_m}")
    w.line(f"span = tl.minimum(tiles_m - first, {tile.group_m})")
    w.line(f"tile_m = first + (pid % ({tile.group_m} * tiles_n)) % span")
    w.line(f"tile_n = (pid % ({tile.group_m} * tiles_n)) // span")


_EMITTERS = {RowTile: rows, PointTile: _points, SumTile: _sums, MatmulTile: _matmul, ChainTile: chains,
             ScanTile: scans, PlaceTile: places, GatherTile: gathers, BandTile: bands}  # fmt: skip
