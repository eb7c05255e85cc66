"""KernelPlan -> Triton text. Every value lives in its compute type; loads convert up, stores convert down.

Tiles are two-dimensional, [rows, columns]; a value that depends on one axis keeps size 1 on the other. PointTile
kernels are one-dimensional.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from esper_ir.types import Dim, DType
from forge.emit.triton_scalars import TRITON_TYPE, preamble, rounded, spell
from forge.emit.writer import Writer, dim_text
from forge.plan import (
    Access,
    Compute,
    KernelPlan,
    Load,
    MatmulTile,
    PointTile,
    Reduce,
    RowTile,
    Stmt,
    Store,
    SumTile,
    phases,
)

_COMBINE = {"sum": ("_add", "0.0"), "max": ("_max", 'float("-inf")'), "min": ("_min", 'float("inf")')}
INT32_LIMIT = 2**31 - 1


def emit(plan: KernelPlan, *, interpreted: bool = False) -> str:
    """A module holding the kernel `plan.name`."""
    return preamble(interpreted) + "\n\n" + emit_kernel(plan, interpreted=interpreted)


def emit_kernel(plan: KernelPlan, *, interpreted: bool = False) -> str:
    """The kernel alone, without imports and helpers."""
    out = _Kernel(plan, interpreted)
    params = ", ".join([*(f"p_{i}" for i in range(len(plan.buffers))), *plan.sizes])
    out.w.line("@triton.jit")
    with out.w.block(f"def {plan.name}({params}):"):
        _EMITTERS[type(plan.tile)](out, plan.tile)
    return out.w.text()


def next_pow2(n: int) -> int:
    """Smallest power of two that is at least n (n >= 1)."""
    return 1 << max(n - 1, 0).bit_length()


@dataclass
class _Kernel:
    """State of one emission: writer, axes of values, how to address each axis."""

    plan: KernelPlan
    interpreted: bool
    w: Writer = field(default_factory=Writer)

    def __post_init__(self) -> None:
        self.axes = self.plan.axes()
        self.dtypes = self.plan.dtypes()
        self.pointer = {b: f"p_{i}" for i, b in enumerate(self.plan.buffers)}
        self.index_type = "tl.int64" if self.plan.wide else "tl.int32"

    # Addresses -----------------------------------------------------------------------------------------------------

    def offset(self, strides: tuple[Dim, ...], index: list[str]) -> str:
        """Element offset; an axis with stride 0 does not appear."""
        terms = []
        for stride, at in zip(strides, index, strict=True):
            if stride == Dim.of(1):
                terms.append(at)
            elif stride != Dim():
                terms.append(f"{at} * {dim_text(stride)}")
        return " + ".join(terms) or "0"

    def load(self, stmt: Load, index: list[str], mask: str, hint: str = "") -> None:
        access = self.plan.accesses[stmt.access]
        self.w.line(f"{stmt.name} = {self.load_text(access, index, mask, hint)}")

    def load_text(self, access: Access, index: list[str], mask: str, hint: str = "") -> str:
        address = f"{self.pointer[access.buffer]} + {self.offset(access.strides, index)}"
        masked = f", mask={mask}, other=0" if mask else ""
        text = f"tl.load({address}{masked}{hint})"
        if access.dtype is DType.bfloat16 and self.interpreted:
            return f"{text}.to(tl.float32)"
        return (
            f"{text}.to({TRITON_TYPE[access.dtype.compute]})"
            if access.dtype is not access.dtype.compute
            else text
        )

    def store(self, access: Access, value: str, index: list[str], mask: str) -> None:
        address = f"{self.pointer[access.buffer]} + {self.offset(access.strides, index)}"
        masked = f", mask={mask}" if mask else ""
        narrow = f"({value}).to({TRITON_TYPE[access.dtype]})"
        self.w.line(f"tl.store({address}, {narrow}{masked})")

    def compute(self, stmt: Compute) -> None:
        text = spell(stmt.expr, list(stmt.args), self.interpreted)
        plain = stmt.dtype in (DType.float32, DType.bool) and all(
            self.dtypes[a].compute is DType.float32 for a in stmt.args
        )
        self.w.line(f"{stmt.name} = {text if plain and stmt.args else rounded(text, stmt.dtype)}")

    # Masks ---------------------------------------------------------------------------------------------------------

    def mask(self, axes: str, masks: dict[str, str]) -> str:
        return " & ".join(masks[a] for a in ("r", "c") if a in axes and masks.get(a))

    def access_axes(self, access: Access) -> str:
        row = any(s != Dim() for s in access.strides[:-1])
        return ("r" if row else "") + ("c" if access.strides[-1] != Dim() else "")

    def row_indices(self, row: str) -> list[str]:
        """Index of every axis but the last from the linear row, outermost first."""
        outer = self.plan.space[:-1]
        if len(outer) == 1:
            return [row]
        out: list[str] = []
        inner = Dim.of(1)
        for position, size in reversed(list(enumerate(outer))):
            text = row if inner == Dim.of(1) else f"({row} // {dim_text(inner)})"
            out.append(text if position == 0 else f"({text} % {dim_text(size)})")
            inner = inner * size
        return out[::-1]

    def hoist(self) -> tuple[list[Stmt], list[Stmt]]:
        """(statements that depend on no row and no reduction, the rest)."""
        late = {s.name for s in self.plan.body if isinstance(s, Reduce)}
        early: list[Stmt] = []
        rest: list[Stmt] = []
        for s in self.plan.body:
            free = isinstance(s, (Load, Compute)) and "r" not in self.axes[s.name]
            if free and isinstance(s, Compute) and late & set(s.args):
                free = False
            if not free and isinstance(s, (Compute, Reduce)):
                late.add(s.name)
            (early if free else rest).append(s)
        return early, rest


def _masked(value: str, mask: str, identity: str) -> str:
    return f"tl.where({mask}, {value}, {identity})" if mask else value


# RowTile ---------------------------------------------------------------------------------------------------------------


def _rows(k: _Kernel, tile: RowTile) -> None:
    cols = k.plan.cols.static
    whole = cols is not None and tile.block_cols >= cols
    k.w.line(f"pid = tl.program_id(0).to({k.index_type})")
    if whole or not any(isinstance(s, Reduce) and s.axis == "row" for s in k.plan.body):
        _rows_whole(k, tile, whole)
    else:
        _rows_swept(k, tile)


def _row_setup(k: _Kernel, tile: RowTile, step: str) -> dict[str, str]:
    k.w.line(f"row = pid * {tile.rows_per_program} + {step} + tl.arange(0, {tile.block_rows})[:, None]")
    k.w.line(f"row_ok = row < {dim_text(k.plan.rows)}")
    return {"r": "row_ok"}


def _rows_whole(k: _Kernel, tile: RowTile, whole: bool) -> None:
    """The program's columns stay in registers: all of them, or (no row reduction) the block of grid axis 1."""
    w, block = k.w, tile.block_cols
    first = "" if whole else f"tl.program_id(1).to({k.index_type}) * {block} + "
    w.line(f"col = {first}tl.arange(0, {block})[None, :]")
    exact = k.plan.cols.static is not None and k.plan.cols.static % block == 0
    col_mask = {} if exact else {"c": f"(col < {dim_text(k.plan.cols)})"}
    early, rest = k.hoist()
    outer = ["0"] * (len(k.plan.space) - 1)
    for s in early:
        _statement(k, s, [*outer, "col"], col_mask)
    sums = [s for s in k.plan.body if isinstance(s, Reduce) and s.axis == "col"]
    for s in sums:
        shape = f"[{tile.block_rows}, {block}]"
        w.line(f"{s.name}_acc = tl.full({shape}, {_COMBINE[s.combine][1]}, {TRITON_TYPE[k.dtypes[s.name]]})")
    steps = f"tl.range(0, {tile.rows_per_program}, {tile.block_rows}, num_stages={tile.stages})"
    single = tile.rows_per_program == tile.block_rows
    finished = {s.name for s in sums}
    with w.block(f"for step in {steps}:") if not single else w.block("if True:"):
        masks = {**_row_setup(k, tile, "0" if single else "step"), **col_mask}
        index = [*k.row_indices("row"), "col"]
        for s in rest:
            if not (isinstance(s, Store) and s.value in finished):
                _statement(k, s, index, masks)
    _store_partials(k, sums, "col", col_mask.get("c", ""))


def _store_partials(k: _Kernel, sums: list[Reduce], col: str, mask: str) -> None:
    stores = {s.value: k.plan.accesses[s.access] for s in k.plan.body if isinstance(s, Store)}
    for s in sums:
        access = stores[s.name]
        k.w.line(f"{s.name} = tl.reduce({s.name}_acc, 0, {_COMBINE[s.combine][0]}, keep_dims=True)")
        where = f"{k.pointer[access.buffer]} + pid * {dim_text(k.plan.cols)} + {col}"
        k.w.line(f"tl.store({where}, {s.name}{f', mask={mask}' if mask else ''})")


def _statement(k: _Kernel, s: Stmt, index: list[str], masks: dict[str, str]) -> None:
    if isinstance(s, Load):
        k.load(s, index, k.mask(k.axes[s.name], masks))
    elif isinstance(s, Compute):
        k.compute(s)
    elif isinstance(s, Store):
        access = k.plan.accesses[s.access]
        k.store(access, s.value, index, k.mask(k.access_axes(access), masks))
    elif s.axis == "row":
        combine, identity = _COMBINE[s.combine]
        value = _masked(s.arg, masks.get("c", ""), identity)
        k.w.line(f"{s.name} = tl.reduce({value}, 1, {combine}, keep_dims=True)")
    else:
        combine, identity = _COMBINE[s.combine]
        mask = k.mask("rc", masks)
        k.w.line(f"{s.name}_acc = {combine}({s.name}_acc, {_masked(s.arg, mask, identity)})")


def _rows_swept(k: _Kernel, tile: RowTile) -> None:
    w, cols = k.w, dim_text(k.plan.cols)
    before, sweeps = phases(k.plan)
    steps = f"tl.range(0, {tile.rows_per_program}, {tile.block_rows})"
    single = tile.rows_per_program == tile.block_rows
    with w.block(f"for step in {steps}:") if not single else w.block("if True:"):
        rows = _row_setup(k, tile, "0" if single else "step")
        outer = k.row_indices("row")
        for s in before:
            _statement(k, s, [*outer, "0"], rows)
        for sweep in sweeps:
            for r in sweep.reduces:
                shape = f"[{tile.block_rows}, {tile.block_cols}]"
                w.line(
                    f"{r.name}_acc = tl.full({shape}, {_COMBINE[r.combine][1]}, {TRITON_TYPE[k.dtypes[r.name]]})"
                )
            with w.block(f"for start in tl.range(0, {cols}, {tile.block_cols}):"):
                w.line(f"col = start + tl.arange(0, {tile.block_cols})[None, :]")
                masks = {**rows, "c": f"(col < {cols})"}
                for s in sweep.full:
                    _statement(k, s, [*outer, "col"], masks)
                for r in sweep.reduces:
                    combine, identity = _COMBINE[r.combine]
                    value = _masked(r.arg, k.mask("rc", masks), identity)
                    w.line(f"{r.name}_acc = {combine}({r.name}_acc, {value})")
            for r in sweep.reduces:
                w.line(f"{r.name} = tl.reduce({r.name}_acc, 1, {_COMBINE[r.combine][0]}, keep_dims=True)")
            for s in sweep.scalars:
                _statement(k, s, [*outer, "0"], rows)


# PointTile -------------------------------------------------------------------------------------------------------------


def _points(k: _Kernel, tile: PointTile) -> None:
    total = Dim.of(1)
    for size in k.plan.space:
        total = total * size
    k.w.line(f"at = tl.program_id(0).to({k.index_type}) * {tile.block} + tl.arange(0, {tile.block})")
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
            k.store(k.plan.accesses[s.access], s.value, index, "ok")
        elif isinstance(s, Compute):
            k.compute(s)


# SumTile ---------------------------------------------------------------------------------------------------------------


def _sums(k: _Kernel, tile: SumTile) -> None:
    """Ascending parts, `block_parts` at a time kept apart in registers, then folded: the order is fixed by the tile."""
    w = k.w
    parts, cols = k.plan.space
    w.line(
        f"col = tl.program_id(0).to({k.index_type}) * {tile.block_cols} + tl.arange(0, {tile.block_cols})[None, :]"
    )
    w.line(f"col_ok = col < {dim_text(cols)}")
    reduces = [s for s in k.plan.body if isinstance(s, Reduce)]
    feeding = {r.arg for r in reduces}
    shape = f"[{tile.block_parts}, {tile.block_cols}]"
    for r in reduces:
        w.line(f"{r.name}_acc = tl.full({shape}, {_COMBINE[r.combine][1]}, {TRITON_TYPE[k.dtypes[r.name]]})")
    with w.block(f"for start in tl.range(0, {dim_text(parts)}, {tile.block_parts}):"):
        w.line(f"row = start + tl.arange(0, {tile.block_parts})[:, None]")
        w.line(f"ok = (row < {dim_text(parts)}) & col_ok")
        for s in k.plan.body:
            if isinstance(s, Load) and s.name in feeding:
                k.load(s, ["row", "col"], "ok")
        for r in reduces:
            combine, identity = _COMBINE[r.combine]
            w.line(f"{r.name}_acc = {combine}({r.name}_acc, {_masked(r.arg, 'ok', identity)})")
    for r in reduces:
        w.line(f"{r.name} = tl.reduce({r.name}_acc, 0, {_COMBINE[r.combine][0]}, keep_dims=True)")
    for s in k.plan.body:
        if not isinstance(s, Reduce) and not (isinstance(s, Load) and s.name in feeding):
            _statement(k, s, ["0", "col"], {"r": "", "c": "col_ok"})


# MatmulTile ------------------------------------------------------------------------------------------------------------


def _matmul(k: _Kernel, tile: MatmulTile) -> None:
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
    w.line(f"acc = tl.zeros([{tile.block_m}, {tile.block_n}], tl.float32)")
    start, stop = "0", depth
    if tile.split_k > 1:
        w.line("part = tl.program_id(1)")
        w.line(f"chunk = tl.cdiv(tl.cdiv({depth}, {tile.block_k}), {tile.split_k}) * {tile.block_k}")
        start, stop = "part * chunk", f"tl.minimum(part * chunk + chunk, {depth})"
    with w.block(f"for k0 in tl.range({start}, {stop}, {tile.block_k}, num_stages={tile.stages}):"):
        w.line(f"ka = (k0 + tl.arange(0, {tile.block_k})){wide}[None, :]")
        w.line(f"kb = (k0 + tl.arange(0, {tile.block_k})){wide}[:, None]")
        for name, access, index, mask in (
            ("a", spec.a, ["row", "ka"], f"row_ok & (ka < {stop})"),
            ("b", spec.b, ["kb", "col"], f"(kb < {stop}) & col_ok"),
        ):
            w.line(f"{name} = {_operand(k, access, index, mask)}")
        w.line(f'acc = tl.dot(a, b, acc, input_precision="{spec.precision}")')
    masks = {"r": "row_ok", "c": "col_ok"}
    if tile.split_k > 1:
        access = next(a for a in k.plan.accesses if a.partial)
        where = f"{k.pointer[access.buffer]} + part.to({k.index_type}) * {m} * {n} + row * {n} + col"
        w.line(f"tl.store({where}, acc, mask=row_ok & col_ok)")
        return
    for s in k.plan.body:
        _statement(k, s, ["row", "col"], masks)


def _matmul_indices(k: _Kernel, tile: MatmulTile, m: str, n: str) -> None:
    """Grouped order of tiles, so that neighbours share operands in the L2 cache."""
    w = k.w
    w.line("pid = tl.program_id(0)")
    w.line(f"tiles_m = tl.cdiv({m}, {tile.block_m})")
    w.line(f"tiles_n = tl.cdiv({n}, {tile.block_n})")
    w.line(f"group = pid // ({tile.group_m} * tiles_n)")
    w.line(f"first = group * {tile.group_m}")
    w.line(f"span = tl.minimum(tiles_m - first, {tile.group_m})")
    w.line(f"tile_m = first + (pid % ({tile.group_m} * tiles_n)) % span")
    w.line(f"tile_n = (pid % ({tile.group_m} * tiles_n)) // span")


def _operand(k: _Kernel, access: Access, index: list[str], mask: str) -> str:
    """Operands of a dot keep their stored type (the tensor cores' own), except in the interpreter."""
    address = f"{k.pointer[access.buffer]} + {k.offset(access.strides, index)}"
    text = f"tl.load({address}, mask={mask}, other=0)"
    return f"{text}.to(tl.float32)" if k.interpreted else text


_EMITTERS = {RowTile: _rows, PointTile: _points, SumTile: _sums, MatmulTile: _matmul}
