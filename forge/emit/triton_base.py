"""State and statements that every Triton spelling shares."""

from __future__ import annotations

from dataclasses import dataclass, field

from esper_ir.types import Dim, DType
from forge.emit.triton_scalars import TRITON_TYPE, rounded, spell
from forge.emit.writer import Writer, dim_text
from forge.plan import Access, Compute, KernelPlan, Load, Reduce, Stmt, Store

COMBINE = {"sum": ("_add", "0.0"), "max": ("_max", 'float("-inf")'), "min": ("_min", 'float("inf")')}


@dataclass
class Kernel:
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
        return self.widened(access, text)

    def raw_load(self, access: Access, index: list[str], mask: str) -> str:
        """A load that keeps the stored type."""
        address = f"{self.pointer[access.buffer]} + {self.offset(access.strides, index)}"
        return f"tl.load({address}{f', mask={mask}, other=0' if mask else ''})"

    def widened(self, access: Access, text: str) -> str:
        """Stored type to compute type."""
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


def masked(value: str, mask: str, identity: str) -> str:
    return f"tl.where({mask}, {value}, {identity})" if mask else value


def statement(k: Kernel, s: Stmt, index: list[str], masks: dict[str, str]) -> None:
    if isinstance(s, Load):
        k.load(s, index, k.mask(k.axes[s.name], masks))
    elif isinstance(s, Compute):
        k.compute(s)
    elif isinstance(s, Store):
        access = k.plan.accesses[s.access]
        k.store(access, s.value, index, k.mask(k.access_axes(access), masks))
    elif s.axis == "row":
        combine, identity = COMBINE[s.combine]
        value = masked(s.arg, masks.get("c", ""), identity)
        k.w.line(f"{s.name} = tl.reduce({value}, 1, {combine}, keep_dims=True)")
    else:
        combine, identity = COMBINE[s.combine]
        mask = k.mask("rc", masks)
        k.w.line(f"{s.name}_acc = {combine}({s.name}_acc, {masked(s.arg, mask, identity)})")
