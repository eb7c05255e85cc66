"""KernelPlan: the frozen, printable value between matching and text, what a kernel computes and its tiles.

A kernel works on an iteration `space`, a tuple of sizes, outermost first; the last one is `cols`, the product
of the others is `rows`. Every access gives a stride (in elements) per axis of the space, 0 where the operand
is broadcast. A value in the body has the axes it depends on: "rc" (a full tile), "r" (one per row), "c" (one
per column), "".

Program structure by schedule:

    RowTile     program p owns rows [p*rows_per_program, (p+1)*rows_per_program), in steps of `block_rows`,
                whole rows (or every `programs`-th block of rows, see RowTile). With `block_cols` >= cols the
                row stays in registers; otherwise the body runs in phases (see `phases`), one sweep over the
                columns each. A "col" reduction adds the program's rows into one partial row, stored (float32)
                at row p of a [programs, cols] workspace.
    PointTile   program p owns `block` consecutive elements of the space (all axes, row-major). No reductions.
    SumTile     `space` = (parts, cols): adds `parts` rows in ascending order per column (float32), in
                `block_cols` columns a program; the body then runs on the "c" value named by the "col"
                reduction.
    ScanTile    `space` = (outer axes ..., time, columns): programs walk time in order, or against it, and
                carry the state of every `Scan` from block to block. Scans of one kernel have one direction.
    MatmulTile  acc[m, n] = sum over k of a[m, k] * b[k, n] in float32; the body runs on the tile:
                space = (m, n). `descriptors`: operands come through tensor descriptors. With a second right
                operand acc2[m, n] is made in the same loop; `block_n` columns are of each.
    ChainTile   two products in a row, the value between them on chip: a program owns `block_m` rows, makes
                acc[m, r] = a b and the body of `chain.head` on it, then acc[m, n] = link b for blocks of
                columns n, with the plan's own body on each: space = (m, n).

Bit rules shared by all spellings: arithmetic in the compute dtype, a value is rounded to its dtype when it is
computed, reductions accumulate in float32 (float64 for float64), partial sums are combined in ascending
program order, and nothing that changes the split depends on the machine.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field

from esper_ir.scalar import Expr, render
from esper_ir.types import Dim, DType
from forge.access import INDEX, Access
from forge.groups import IN_CHUNK
from forge.rowtile import RowTile
from library.launch import Size


@dataclass(frozen=True)
class Load:
    """`row`: the value that is the number of a table's row."""

    name: str
    access: int
    row: str = ""


@dataclass(frozen=True)
class Compute:
    """`name` = expr over `args` (Arg(i) is args[i]), rounded to `dtype`."""

    name: str
    expr: Expr
    args: tuple[str, ...]
    dtype: DType


@dataclass(frozen=True)
class Reduce:
    """`axis` "row": over the columns; "col": over the program's rows. `combine`: sum, max, min; down columns
    squares and rest, with values `about` (forge/partials.py). The result has the argument's compute dtype.
    """

    name: str
    arg: str
    combine: str
    axis: str
    about: tuple[str, ...] = ()


@dataclass(frozen=True)
class Scan:
    """`name` = running value of `args` along the last axis but one, from its end when `reverse`. `combine`:
    sum, prod or logsumexp of one argument; recurrence of two (a, b), h = a h' + b from h' = 0. Computed in
    the compute dtype of the arguments.
    """

    name: str
    args: tuple[str, ...]
    combine: str
    reverse: bool


@dataclass(frozen=True)
class Store:
    access: int
    value: str


Stmt = Load | Compute | Reduce | Scan | Store


@dataclass(frozen=True)
class PointTile:
    """`reverse`: the last program takes the first elements."""

    block: int
    warps: int
    reverse: bool = False


@dataclass(frozen=True)
class SumTile:
    block_parts: int
    block_cols: int
    warps: int


@dataclass(frozen=True)
class MatmulTile:
    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    group_m: int = 8
    split_k: int = 1
    descriptors: bool = False


@dataclass(frozen=True)
class ChainTile:
    """The whole r axis lies in one tile; `block_k` steps of the first product, `block_n` of the columns."""

    block_m: int
    block_k: int
    block_n: int
    warps: int
    stages: int


@dataclass(frozen=True)
class ScanTile:
    """A program takes `block` columns of one outermost row (or, where the columns are one, `block` rows) and
    walks the axis before the columns in blocks of `parts` runs of `steps` positions.
    """

    steps: int
    parts: int
    block: int
    warps: int


@dataclass(frozen=True)
class PlaceTile:
    """`space` = (rows of a table, positions), accesses = (row numbers, order, rows, starts): program p lists
    the positions whose number lies in its `rows` rows of the table, ascending, and their rows, behind those
    of the programs before it; starts[p] is where its list begins. `block` positions are looked at at once.
    """

    rows: int
    block: int
    warps: int


@dataclass(frozen=True)
class GatherTile:
    """`space` = (rows of a table, columns), accesses = (values [position, column], order, rows, starts,
    table): every row of the table becomes the sum of the values at its positions, ascending, in the compute
    dtype. A program has `rows` rows and `block_cols` columns, and looks at `block` positions of its list at
    once; a list holds `listed` rows of the table.
    """

    rows: int
    block: int
    block_cols: int
    listed: int
    warps: int


@dataclass(frozen=True)
class ProductWay:
    """How a product is done: by a library call, or as a kernel of ours (`own`) with the tile that the other
    fields say, the template's own where they are zero. `dual`: in one kernel with the product that it shares
    its left operand with (forge/templates/dual.py).
    """

    own: bool
    block_m: int = 0
    block_n: int = 0
    block_k: int = 0
    warps: int = 0
    stages: int = 0
    group_m: int = 0
    split_k: int = 0
    descriptors: bool = False
    dual: bool = False


@dataclass(frozen=True)
class JoinedTile:
    """Kernels beside each other in one launch (forge/horizontal.py): part i has the programs of its own grid
    (`grids[i]`: along two axes), numbered behind those of the parts before it. All have `warps`.
    """

    warps: int
    stages: int
    parts: tuple[KernelPlan, ...]
    grids: tuple[tuple[Size, Size], ...]

    def __str__(self) -> str:
        made = ", ".join(
            f"{p.digest[:16]} x {x}, {y}" for p, (x, y) in zip(self.parts, self.grids, strict=True)
        )
        return f"JoinedTile(warps={self.warps}, stages={self.stages}, [{made}])"


Tile = (
    RowTile | PointTile | SumTile | MatmulTile | ChainTile | ScanTile | PlaceTile | GatherTile | ProductWay
    | JoinedTile
)  # fmt: skip


@dataclass(frozen=True)
class MatmulSpec:
    """Operands of a MatmulTile kernel: accesses of a over (m, k) and b over (k, n); prologues are expressions
    of the loaded element (identity when None); `k` is the contracted size. With `split_k` parts of ceil(k /
    parts) rounded to block_k, part p writes float32 to row p of a [parts, m, n] workspace and the body is
    left to a SumTile kernel. `second`: another right operand with the steps of b, for `acc2`; never split.
    It is no part of the text that keys of choices are made from: the body names `acc2`.
    """

    a: Access
    b: Access
    k: Dim
    precision: str = "ieee"
    second: Access | None = field(default=None, repr=False)

    @property
    def operands(self) -> tuple[Access, ...]:
        return (self.a, self.b, *([self.second] if self.second else ()))

    @property
    def products(self) -> int:
        return len(self.operands) - 1


@dataclass(frozen=True)
class Chain:
    """What comes before the second product: the plan `head` of the first one over (m, r), and its value
    `link` as left operand; `b` is the right operand over (r, n). Names of values differ from those of the
    plan.
    """

    head: KernelPlan
    link: str
    b: Access
    precision: str = "ieee"


@dataclass(frozen=True)
class KernelPlan:
    """`sizes`: the symbols the kernel takes as integer parameters, in order. Parameters of the kernel are:
    one pointer per distinct buffer in order of `buffers`, then `sizes` (32-bit, or 64-bit when `wide`).
    """

    name: str
    space: tuple[Dim, ...]
    accesses: tuple[Access, ...]
    body: tuple[Stmt, ...]
    tile: Tile
    sizes: tuple[str, ...]
    matmul: MatmulSpec | None = None
    wide: bool = False
    chain: Chain | None = None

    @property
    def operands(self) -> tuple[Access, ...]:
        """What the products read, and all accesses of the head of a chain."""
        own = self.matmul.operands if self.matmul else ()
        head = (*self.chain.head.operands, *self.chain.head.accesses, self.chain.b) if self.chain else ()
        return (*head, *own)

    @property
    def product(self) -> bool:
        return self.matmul is not None or self.chain is not None

    @property
    def sums(self) -> tuple[str, ...]:
        """Names under which the body reads what the products make."""
        both = self.matmul is not None and self.matmul.second is not None
        return ("acc", "acc2") if both else ("acc",) if self.product else ()

    @property
    def buffers(self) -> tuple[str, ...]:
        """Distinct buffer names, operands of the contraction first, in order of first access."""
        walked = (*self.operands, *self.accesses)
        return tuple(dict.fromkeys(a.buffer for a in walked if a.buffer != INDEX))

    @property
    def buffer_dtypes(self) -> tuple[DType, ...]:
        kinds = {a.buffer: a.dtype for a in (*self.operands, *self.accesses)}
        return tuple(kinds[b] for b in self.buffers)

    @property
    def rows(self) -> Dim:
        out = Dim.of(1)
        for size in self.space[:-1]:
            out = out * size
        return out

    @property
    def cols(self) -> Dim:
        return self.space[-1]

    def axes(self) -> dict[str, str]:
        """Axes each body value depends on: "rc", "r", "c" or ""."""
        out = dict.fromkeys(self.sums, "rc")
        for stmt in self.body:
            if isinstance(stmt, Load):
                joined = set(self.accesses[stmt.access].letters() + out.get(stmt.row, ""))
                out[stmt.name] = ("r" if "r" in joined else "") + ("c" if "c" in joined else "")
            elif isinstance(stmt, Compute):
                joined = set("".join(out[a] for a in stmt.args))
                out[stmt.name] = ("r" if "r" in joined else "") + ("c" if "c" in joined else "")
            elif isinstance(stmt, Reduce):
                out[stmt.name] = "r" if stmt.axis == "row" else "c"
            elif isinstance(stmt, Scan):
                out[stmt.name] = "r" if self.cols == Dim.of(1) else "rc"
        return out

    def store_axes(self, stmt: Store) -> str:
        """Axes along which a store writes; its value may have fewer (a row's value written to every
        column).
        """
        access = self.accesses[stmt.access]
        if access.partial:
            return "rc" if self.matmul else "c"
        return access.letters()

    def dtypes(self) -> dict[str, DType]:
        """dtype of each body value."""
        out = dict.fromkeys(self.sums, DType.float32)
        for stmt in self.body:
            if isinstance(stmt, Load):
                out[stmt.name] = self.accesses[stmt.access].dtype
            elif isinstance(stmt, Compute):
                out[stmt.name] = stmt.dtype
            elif isinstance(stmt, Reduce):
                out[stmt.name] = out[stmt.arg].compute
            elif isinstance(stmt, Scan):
                out[stmt.name] = out[stmt.args[-1]].compute
        return out

    def __str__(self) -> str:
        space = ", ".join(str(s) for s in self.space)
        lines = [f"kernel {self.name} over [{space}] sizes({', '.join(self.sizes)}) {self.tile}"]
        if self.matmul:
            m = self.matmul
            lines += [f"  {to} = matmul({_access(m.a)}, {_access(b)}) over k={m.k} {m.precision}"
                      for to, b in zip(self.sums, m.operands[1:], strict=True)]  # fmt: skip
        if self.chain:
            c = self.chain
            lines += [f"  {line}" for line in str(c.head).splitlines()]
            lines.append(f"  acc = matmul({c.link}, {_access(c.b)}) over r={c.head.cols} {c.precision}")
        lines += [f"  {_stmt(s, self.accesses)}" for s in self.body]
        return "\n".join(lines)

    @property
    def digest(self) -> str:
        """sha256 of everything but the name: equal digests mean equal kernels."""
        return hashlib.sha256(self._text().encode()).hexdigest()

    @property
    def work(self) -> str:
        """The digest without which chunks (`forge/passes/chunks.py`) it is about: they count from the first
        that is named. (Of plans beside each other the digests are in the text, so that they keep theirs.)"""
        order: dict[str, str] = {}
        text = re.sub(f"{IN_CHUNK}[0-9]+", lambda at: order.setdefault(at[0], f"#{len(order)}"), self._text())
        return hashlib.sha256(text.encode()).hexdigest()

    def _text(self) -> str:
        return str(self).replace(self.name, "_", 1) + repr(self.wide) + repr(self.accesses)


def _access(a: Access) -> str:
    strides = ", ".join(str(s) for s in a.strides)
    offset = f"+{a.offset}" if a.offset != Dim() else ""
    windows = "".join(f" axis {w.axis}: ({w.mul} p + {w.add}) / {w.div} < {w.size}" for w in a.windows)
    outside = f"{windows} else {a.fill}" if windows else ""
    apart = f" by ({', '.join(f'{n}: {step}' for n, step in a.parts)})" if a.parts else ""
    table = f" of {a.table[1]} rows at {a.table[0]}" if a.table else ""
    return f"{a.buffer}:{a.dtype.value}[{strides}]{apart}{offset}{outside}{table}" + (
        "@partial" if a.partial else ""
    )


def _stmt(s: Stmt, accesses: tuple[Access, ...]) -> str:
    if isinstance(s, Load):
        row = f" row {s.row}" if s.row else ""
        return f"{s.name} = load {_access(accesses[s.access])}{row}"
    if isinstance(s, Store):
        return f"store {_access(accesses[s.access])} = {s.value}"
    if isinstance(s, Reduce):
        return f"{s.name} = {s.axis}_{s.combine}({', '.join((s.arg, *s.about))})"
    if isinstance(s, Scan):
        return f"{s.name} = {'reverse ' if s.reverse else ''}{s.combine}_scan({', '.join(s.args)})"
    return f"{s.name}: {s.dtype.value} = {render(s.expr, lambda i: s.args[i])}"


def next_pow2(n: int) -> int:
    """Smallest power of two that is at least n (n >= 1)."""
    return 1 << max(n - 1, 0).bit_length()


@dataclass(frozen=True)
class Phase:
    """One sweep over the columns of a row: `full` statements run per element, then the `reduces` are complete
    and the `scalars` (per-row statements that became computable) run once. Full values are recomputed in
    every phase that needs them; loads of full values repeat (the row is in cache).
    """

    full: tuple[Stmt, ...]
    reduces: tuple[Reduce, ...]
    scalars: tuple[Stmt, ...]


def phases(plan: KernelPlan) -> tuple[tuple[Stmt, ...], tuple[Phase, ...]]:
    """Split a RowTile body for a sweep-by-sweep spelling: (statements before any sweep, sweeps in order).

    Row reductions whose arguments depend on no other unfinished row reduction share a sweep. Stores of full
    values and col reductions happen in the last sweep; stores of row values as soon as they are known.
    """
    axes = plan.axes()
    level: dict[str, int] = dict.fromkeys(plan.sums, 0)
    for stmt in plan.body:
        if isinstance(stmt, Load):
            level[stmt.name] = level.get(stmt.row, 0)
        elif isinstance(stmt, Compute):
            level[stmt.name] = max((level[a] for a in stmt.args), default=0)
        elif isinstance(stmt, Reduce):
            level[stmt.name] = level[stmt.arg] + (1 if stmt.axis == "row" else 0)
    row_level = {s.name: level[s.name] for s in plan.body if isinstance(s, Reduce) and s.axis == "row"}
    last = max(row_level.values(), default=0)
    tail = any(
        "c" in plan.store_axes(s) if isinstance(s, Store) else isinstance(s, Reduce) and s.axis == "col"
        for s in plan.body
    )
    sweeps = [_phase(plan, axes, level, row_level, depth) for depth in range(last)]
    if tail or not sweeps:
        sweeps.append(_tail(plan, axes))
    before = tuple(s for s in plan.body if _is_row_stmt(plan, s, axes) and _stmt_level(s, level) == 0)
    return before, tuple(sweeps)


def _is_row_stmt(plan: KernelPlan, s: Stmt, axes: dict[str, str]) -> bool:
    if isinstance(s, Reduce):
        return False
    return "c" not in (plan.store_axes(s) if isinstance(s, Store) else axes[s.name])


def _stmt_level(s: Stmt, level: dict[str, int]) -> int:
    return level[s.value if isinstance(s, Store) else s.name]


def needed(plan: KernelPlan, axes: dict[str, str], roots: set[str]) -> tuple[Stmt, ...]:
    """Full-valued statements that the roots need, in body order."""
    kept: list[Stmt] = []
    wanted = set(roots)
    for s in reversed(plan.body):
        if isinstance(s, (Load, Compute)) and s.name in wanted and "c" in axes[s.name]:
            kept.append(s)
            wanted |= set(s.args) if isinstance(s, Compute) else {s.row}
    return tuple(reversed(kept))


def _phase(
    plan: KernelPlan, axes: dict[str, str], level: dict[str, int], row_level: dict[str, int], depth: int
) -> Phase:
    reduces = tuple(s for s in plan.body if isinstance(s, Reduce) and row_level.get(s.name) == depth + 1)
    full = needed(plan, axes, {r.arg for r in reduces})
    scalars = tuple(
        s for s in plan.body if _is_row_stmt(plan, s, axes) and _stmt_level(s, level) == depth + 1
    )
    return Phase(full, reduces, scalars)


def _tail(plan: KernelPlan, axes: dict[str, str]) -> Phase:
    stores = [s for s in plan.body if isinstance(s, Store) and "c" in plan.store_axes(s)]
    cols = [s for s in plan.body if isinstance(s, Reduce) and s.axis == "col"]
    finished = {c.name for c in cols}
    direct = [s for s in stores if s.value not in finished]
    full = needed(plan, axes, {s.value for s in direct} | {c.arg for c in cols})
    return Phase((*full, *direct), tuple(cols), ())
