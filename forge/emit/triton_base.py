"""State and statements that every Triton spelling shares."""

from __future__ import annotations

from dataclasses import dataclass, field

from esper_ir.scalar import Cast, Prim
from esper_ir.types import Dim, DType
from forge.emit.triton_rounding import exact, packed, rounded_by_stores
from forge.emit.triton_scalars import TRITON_TYPE, number, real_operands, rounded, spell
from forge.emit.writer import Writer, dim_text
from forge.plan import (
    INDEX,
    Access,
    Compute,
    KernelPlan,
    Load,
    PointTile,
    Reduce,
    RowTile,
    Scan,
    ScanTile,
    Stmt,
    Store,
)
from forge.views import Window

COMBINE = {"sum": "_add", "max": "_max", "min": "_min"}
_BITS = {DType.int64: 63, DType.int32: 31, DType.int16: 15, DType.int8: 7}


def identity(combine: str, dtype: DType) -> str:
    """What changes nothing when combined, in the type of the accumulator."""
    if combine in ("sum", "squares"):
        return "0.0" if dtype.is_floating else "0"
    if dtype.is_floating:
        return 'float("-inf")' if combine == "max" else 'float("inf")'
    if dtype in (DType.bool, DType.uint8):
        return "0" if combine == "max" else "1" if dtype is DType.bool else "255"
    bits = _BITS[dtype]
    return f"({-(1 << bits)})" if combine == "max" else str((1 << bits) - 1)


def moved(window: Window, at: str) -> str:
    """The numerator of a window's position."""
    text = at if window.mul == 1 else f"{at} * {window.mul}"
    return f"({text} + {window.add})" if window.add >= 0 else f"({text} - {-window.add})"


def _halves(plan: KernelPlan) -> bool:
    """Whether every element of the full space that is read or written has 16 bits. Sums and statistics along
    fewer axes may be wider."""
    floats = [a for a in plan.accesses if a.dtype.is_floating and not a.partial and a.buffer != INDEX]
    axes = max((sum(s != Dim() for s in a.strides) for a in floats), default=0)
    full = [a for a in floats if sum(s != Dim() for s in a.strides) == axes]
    return bool(full) and all(a.dtype.itemsize == 2 for a in full)


@dataclass
class Kernel:
    """State of one emission: writer, axes of values, how to address each axis; `spread`: what is the same for
    all rows of a tile is loaded for each of them; `apart`: a block of rows lies in one `batch` of the axes
    before the rows' last one; `placed`: extrema of which somebody asks where they are; `in_line`: see
    forge/along.py; `pairs`: how reductions that are one combine; `vectors` and `stored`: see
    forge/emit/triton_vectors.py."""

    plan: KernelPlan
    interpreted: bool
    w: Writer = field(default_factory=Writer)
    spread: bool = False
    apart: bool = False
    placed: frozenset[str] = frozenset()
    in_line: bool = False
    vectors: dict[tuple[Access, int], tuple[str, ...]] = field(default_factory=dict)
    stored: list[list[Store]] = field(default_factory=list)
    pairs: set[tuple[str, ...]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.axes = self.plan.axes()
        self.dtypes = self.plan.dtypes()
        self.pointer = {b: f"p_{i}" for i, b in enumerate(self.plan.buffers)}
        self.index_type = "tl.int64" if self.plan.wide else "tl.int32"
        self.picks = any(a.windows for a in self.plan.accesses)
        self.unrounded = frozenset[str]() if self.interpreted else rounded_by_stores(self.plan)
        simple = isinstance(self.plan.tile, (PointTile, RowTile)) and not self.picks
        self.widens = simple and not self.interpreted and not packed(self.plan)
        self.fast = not self.interpreted and _halves(self.plan)

    # Addresses ------------------------------------------------------------------------------------

    def offset(self, access: Access, index: list[str]) -> str:
        """Element offset; an axis with stride 0 does not appear."""
        terms = [dim_text(access.offset)] if access.offset != Dim() else []
        for axis, (stride, at) in enumerate(zip(access.strides, index, strict=True)):
            window = access.window(axis)
            if access.parts and axis == len(index) - 1:
                terms += self.by_parts(access, at)
            elif window is not None:
                place = moved(window, at)
                place = place if window.div == 1 else f"({place} // {window.div})"
                terms.append(f"{place} * {dim_text(stride)}")
            elif stride == Dim.of(1):
                terms.append(at)
            elif stride != Dim():
                terms.append(f"{at} * {dim_text(stride)}")
        return " + ".join(terms) or "0"

    def lanes(self, count: int, axis: int) -> str:
        """`count` neighbours along an axis, of 64 bits where their number is, or where a step of numbers
        takes them past 31.
        """
        size, wide = self.plan.space[axis].static, self.plan.wide
        if wide and size is not None:
            parts = [a.parts if axis == -1 and a.parts else ((self.plan.space[axis], a.strides[axis]),)
                     for a in self.plan.accesses]  # fmt: skip
            reach = (sum((n.static or 0) * abs(step.static or 0) for n, step in each) for each in parts)
            wide = max(reach, default=0) >= 2**31
        turned = "[None, :]" if axis == -1 else "[:, None]"
        return f"tl.arange(0, {count}){turned}{'.to(tl.int64)' if wide else ''}"

    def by_parts(self, access: Access, at: str) -> list[str]:
        """Offsets along the parts that the last axis is made of."""
        out, inner = list[str](), Dim.of(1)
        for part, (size, stride) in reversed(list(enumerate(access.parts))):
            place = at if inner == Dim.of(1) else f"({at} // {dim_text(inner)})"
            place = place if part == 0 else f"({place} % {dim_text(size)})"
            inner = inner * size
            if stride != Dim():
                out.insert(0, place if stride == Dim.of(1) else f"{place} * {dim_text(stride)}")
        return out

    def load(self, stmt: Load, index: list[str], mask: str, hint: str = "") -> None:
        access = self.plan.accesses[stmt.access]
        if access.table is not None:
            text = self.widened(access, self.row_load(access, index, mask, stmt.row))
            self.w.line(f"{stmt.name} = {text}")
            return
        text = self.number_text if access.buffer == INDEX else self.load_text
        self.w.line(f"{stmt.name} = {text(access, index, mask, hint)}")

    def number_text(self, access: Access, index: list[str], mask: str, hint: str = "") -> str:
        """A position or a size as a tensor; a bare number becomes one by a sum with zero."""
        zero = "" if self.access_axes(access) else " + tl.program_id(0) * 0"
        return f"({self.offset(access, index)}{zero}).to({TRITON_TYPE[access.dtype]})"

    def load_text(self, access: Access, index: list[str], mask: str, hint: str = "") -> str:
        return self.widened(access, self.raw_load(access, index, mask, hint))

    def raw_load(self, access: Access, index: list[str], mask: str, hint: str = "") -> str:
        """A load that keeps the stored type."""
        rows = f" + {index[0]} * 0" if self.spread and self.access_axes(access) == "c" else ""
        if self.apart and "r" in self.access_axes(access) and access.strides[-2] == Dim():
            rows = f" + {index[-2]} * 0"  # the batch alone is no block, and the mask is one
        address = f"{self.pointer[access.buffer]} + {self.offset(access, index)}{rows}"
        mask = " & ".join([*([mask] if mask else []), *self.inside(access, index)])
        other = number(access.fill) if access.windows else "0"
        return f"tl.load({address}{f', mask={mask}, other={other}' if mask else ''}{hint})"

    def row_load(self, access: Access, index: list[str], mask: str, row: str) -> str:
        """Elements of the table's row that a value names; NaN where it has no such row."""
        assert access.table is not None
        stride, count = (dim_text(d) for d in access.table)
        exists = f"({row} >= 0) & ({row} < {count})"
        both = " & ".join([*([mask] if mask else []), exists])
        address = f"{self.pointer[access.buffer]} + {row}.to({self.index_type}) * {stride}"
        address += f" + {self.offset(access, index)}"
        return f'tl.load({address}, mask={both}, other=float("nan"))'

    def inside(self, access: Access, index: list[str]) -> list[str]:
        """Whether the windows have an element there. Division rounds to zero, so the sign is asked for."""
        out: list[str] = []
        for w in access.windows:
            place = moved(w, index[w.axis])
            if w.add < 0:
                out.append(f"({place} >= 0)")
            if not self._ends_inside(w):
                out.append(f"({place} < {dim_text(w.size * w.div)})")
        return out

    def _ends_inside(self, w: Window) -> bool:
        """Whether the last position along the axis has an element, as far as numbers tell."""
        count, size = self.plan.space[w.axis].static, w.size.static
        return count is not None and size is not None and w.mul * (count - 1) + w.add < size * w.div

    def widened(self, access: Access, text: str) -> str:
        """Stored type to compute type."""
        if access.dtype is DType.bfloat16:
            return f"_wide({text})" if self.widens else f"{text}.to(tl.float32)"
        return (
            f"{text}.to({TRITON_TYPE[access.dtype.compute]})"
            if access.dtype is not access.dtype.compute
            else text
        )

    def store(self, access: Access, value: str, index: list[str], mask: str, axes: str = "") -> None:
        """`axes` of the value: a pointer of its shape, also where every position has the same address."""
        own = self.access_axes(access)
        still = [index[0 if a == "r" else -1] for a in axes if a not in own]
        if not own and not still:
            still = [f"tl.zeros({self.one()}, tl.int32)"]
        zeros = "".join(f" + {at} * 0" for at in still if at != "0")
        address = f"{self.pointer[access.buffer]} + {self.offset(access, index)}{zeros}"
        mask = " & ".join([*([mask] if mask else []), *self.inside(access, index)])
        masked = f", mask={mask}" if mask else ""
        narrow = f"({value}).to({TRITON_TYPE[access.dtype]})"
        self.w.line(f"tl.store({address}, {narrow}{masked})")

    def compute(self, stmt: Compute) -> None:
        # Numbers alone become tensors, since a Python number has no type to be rounded to.
        alone = "" if stmt.args else self.one()
        flat = isinstance(self.plan.tile, (PointTile, ScanTile))
        fast = self.fast and (flat or self.axes[stmt.name] == "rc")
        args = list(stmt.args)
        if stmt.dtype is DType.bool and isinstance(stmt.expr, Prim) and stmt.expr.name == "add":
            args = [f"{a}.to(tl.int32)" for a in args]  # one bit plus one bit would be none
        kinds = [self.dtypes[a] for a in stmt.args]
        for at in real_operands(stmt.expr, kinds) if stmt.dtype.is_floating else ():
            if not kinds[at].is_floating:
                args[at] = f"{args[at]}.to({TRITON_TYPE[stmt.dtype.compute]})"
        late, expr = stmt.name in self.unrounded, stmt.expr
        while late and isinstance(expr, Cast) and expr.dtype is stmt.dtype:
            expr = expr.arg
        text = spell(expr, args, self.interpreted, alone, fast)
        wide = all(d.compute is DType.float32 for d in kinds)
        plain = stmt.dtype in (DType.float32, DType.bool) and wide
        if stmt.args and (late or exact(stmt.expr, kinds, stmt.dtype)):
            plain, text = True, text if wide else f"({text}).to(tl.float32)"
        self.w.line(f"{stmt.name} = {text if plain and stmt.args else rounded(text, stmt.dtype)}")

    def one(self) -> str:
        """Shape of a value that depends on no axis."""
        if isinstance(self.plan.tile, ScanTile) and self.plan.cols != Dim.of(1):
            return "[1, 1, 1]"
        return "[1]" if isinstance(self.plan.tile, PointTile) else "[1, 1]"

    def whole(self, name: str) -> str:
        """A value over all columns of the tile, where it depends on none."""
        tile = self.plan.tile
        if "c" in self.axes[name] or not isinstance(tile, RowTile):
            return name
        return f"tl.broadcast_to({name}, [{tile.block_rows}, {tile.block_cols}])"

    # Masks ----------------------------------------------------------------------------------------

    def mask(self, axes: str, masks: dict[str, str]) -> str:
        return " & ".join(masks[a] for a in ("r", "c") if a in axes and masks.get(a))

    def access_axes(self, access: Access) -> str:
        return access.letters()

    def row_indices(self, row: str) -> list[str]:
        """Index of every axis but the last from the linear row, outermost first."""
        outer = self.plan.space[:-1]
        if len(outer) == 1:
            return [row]
        if self.apart:
            return [*self._positions("batch", outer[:-1]), row]
        return self._positions(row, outer)

    def _positions(self, row: str, outer: tuple[Dim, ...]) -> list[str]:
        """Positions along axes from the number of one of their elements."""
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
            if free and late & (set(s.args) if isinstance(s, Compute) else {getattr(s, "row", "")}):
                free = False
            if not free and isinstance(s, (Load, Compute, Reduce)):
                late.add(s.name)
            (early if free else rest).append(s)
        return early, rest


def masked(value: str, mask: str, identity: str) -> str:
    return f"tl.where({mask}, {value}, {identity})" if mask else value


def statement(k: Kernel, s: Stmt, index: list[str], masks: dict[str, str]) -> None:
    if isinstance(s, Load):
        k.load(s, index, k.mask(k.axes[s.name], masks))
    elif isinstance(s, Compute):
        k.compute(s)
    elif isinstance(s, Store):
        access = k.plan.accesses[s.access]
        # A value along an axis of size 1 is written by the one position that the mask leaves.
        axes = k.access_axes(access) + k.axes[s.value]
        mask = k.mask(axes, masks)
        if isinstance(k.plan.tile, RowTile) and "r" not in axes:
            # One program writes what is the same for all rows: thousands of them would wait for one line.
            mask = " & ".join(("(pid == 0)", *([mask] if mask else [])))
        k.store(access, s.value, index, mask, k.axes[s.value])
    elif isinstance(s, Scan):
        raise AssertionError("running values are spelled in triton_scan.py")
    elif s.axis == "row":
        value = masked(k.whole(s.arg), masks.get("c", ""), identity(s.combine, k.dtypes[s.name]))
        k.w.line(f"{s.name} = tl.reduce({value}, 1, {COMBINE[s.combine]}, keep_dims=True)")
    else:
        value = masked(s.arg, k.mask("rc", masks), identity(s.combine, k.dtypes[s.name]))
        k.w.line(f"{s.name}_acc = {COMBINE[s.combine]}({s.name}_acc, {value})")
