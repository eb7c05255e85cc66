"""KernelPlan -> C: one function per plan, OpenMP over programs, vector loops over columns.

    void NAME(void *const *args, int64_t gx, int64_t gy, int64_t gz)

`args[i]` points at parameter i: the pointers of `plan.buffers`, then `plan.sizes` as int32 (int64 when `plan.wide`).
`gx` is the number of programs; every program does the same work whichever thread runs it, so bits do not depend on the
number of threads. Row reductions run in `LANES` interleaved sums (element j in lane j mod LANES) that are added in a
binary tree: the order is part of the text and the same for every vector width.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from esper_ir.diagnostics import EsperError
from esper_ir.scalar import walk
from esper_ir.types import Dim, DType, FloorDiv
from forge.emit.c_expr import HALVES, MEMORY, REGISTER, Block, Term, convert, round_to, spell
from forge.emit.c_math import preamble
from forge.plan import (
    Access,
    Compute,
    KernelPlan,
    Load,
    Phase,
    PointTile,
    Reduce,
    RowTile,
    Stmt,
    Store,
    SumTile,
    phases,
)
from forge.target import Target

LANES = 16
# Elements under which starting threads costs more than it saves.
SERIAL = 16384
# Values whose second computation costs more than a store and a load of 4 bytes.
COSTLY = frozenset(
    "exp exp2 expm1 log log2 log1p sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh erf erfc sigmoid pow "
    "fmod atan2".split()
)
KEPT_BYTES = 1 << 17

Lines = list[str]
Index = Callable[[int], str]
"""Number of an access -> C text of the element's index."""


def emit_module(plans: Iterable[KernelPlan], target: Target) -> str:
    """One translation unit with a function per plan and the definitions they use."""
    functions = [emit(plan, target) for plan in plans]
    return preamble("\n".join(functions)) + "\n" + "\n".join(functions)


def emit(plan: KernelPlan, target: Target) -> str:
    """The C function of a plan; it needs `preamble(text)` before it (see `emit_module`).

    Raises E0530 when the target is no cpu or the plan is a contraction, E0531 for a body that its tile cannot hold.
    """
    tiles = {RowTile: _row_tile, PointTile: _point_tile, SumTile: _sum_tile}
    spelled = tiles.get(type(plan.tile))
    if target.kind != "cpu" or spelled is None or plan.matmul:
        what = f"{type(plan.tile).__name__} on {target.name}"
        raise EsperError("E0530", f"no C for {what}", node=plan.name, hint="contractions are extern steps on cpu targets")
    text = _Text(plan)
    return "\n".join([*text.opening(), *_indent(spelled(text)), "}", ""])


def _indent(lines: Iterable[str]) -> Lines:
    return [f"    {line}" if line and not line.startswith("#") else line for line in lines]


def _braces(head: str, *parts: Iterable[str]) -> Lines:
    return [f"{head} {{", *_indent([line for part in parts for line in part]), "}"]


def _identifier(text: str) -> str:
    return re.sub(r"\W", "_", text)


@dataclass
class _Scope:
    """A C block, what its values are called, and how accesses are indexed in it."""

    block: Block
    values: dict[str, Term]
    index: Index

    def inner(self, index: Index) -> _Scope:
        return _Scope(Block(self.block), dict(self.values), index)


@dataclass
class _Text:
    plan: KernelPlan
    axes: dict[str, str] = field(init=False)
    dtypes: dict[str, DType] = field(init=False)
    buffers: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        self.axes, self.dtypes = self.plan.axes(), self.plan.dtypes()
        self.buffers = {b: f"b{i}_{_identifier(b)}" for i, b in enumerate(self.plan.buffers)}

    def refuse(self, what: str) -> EsperError:
        return EsperError("E0531", what, node=self.plan.name, hint="a template made a plan outside the grammar of forge/plan.py")

    def opening(self) -> Lines:
        """The head of the function, its parameters and sizes."""
        plan, width = self.plan, "int64_t" if self.plan.wide else "int32_t"
        lines = [f"/* {line} */" for line in str(plan).splitlines()]
        lines += [
            '__attribute__((visibility("default")))',
            f"void {plan.name}(void *const *args, int64_t gx, int64_t gy, int64_t gz)",
            "{",
        ]
        body = []
        for at, (buffer, dtype) in enumerate(zip(plan.buffers, plan.buffer_dtypes, strict=True)):
            body.append(f"{MEMORY[dtype]} *const {self.buffers[buffer]} = *({MEMORY[dtype]} *const *)args[{at}];")
        for at, size in enumerate(plan.sizes, len(plan.buffers)):
            body.append(f"const int64_t n_{_identifier(size)} = *(const {width} *)args[{at}];")
        body.append(f"const int64_t rows = {dim(plan.rows)}, cols = {dim(plan.cols)};")
        return [*lines, *_indent([*body, "(void)gy, (void)gz;"])]

    def parallel(self, body: Lines) -> Lines:
        """The loop over programs."""
        head = f"#pragma omp parallel for schedule(static) if(gx > 1 && rows * cols > {SERIAL})"
        return [head, *_braces("for (int64_t p = 0; p < gx; p++)", body)]

    def row_indices(self, row: str) -> Lines:
        """`i0`, `i1`, ...: position along each axis but the last, from the row number."""
        sizes = self.plan.space[:-1]
        lines, rest = [], row
        for axis in reversed(range(1, len(sizes))):
            lines.append(f"const int64_t i{axis} = {rest} % {_factor(sizes[axis])}, r{axis} = {rest} / {_factor(sizes[axis])};")
            rest = f"r{axis}"
        return [*lines, f"const int64_t i0 = {rest};"] if sizes else lines

    def offsets(self) -> Lines:
        """`o<access>`: index of column 0 of the row, for every access that moves with the row."""
        lines = []
        for at, access in enumerate(self.plan.accesses):
            parts = [f"i{a} * {_factor(s)}" for a, s in enumerate(access.strides[:-1]) if s != Dim()]
            if parts and not access.partial:
                lines.append(f"const int64_t o{at} = {' + '.join(parts)};")
        return lines

    def index(self, column: str | None, row: bool = True) -> Index:
        """Indexing inside a row (with `row`) at `column`, or of row values (None)."""

        def text(at: int) -> str:
            access = self.plan.accesses[at]
            if access.partial and isinstance(self.plan.tile, RowTile):
                return f"p * cols + {column}"
            moves = row and any(s != Dim() for s in access.strides[:-1])
            step = access.strides[-1]
            parts = [f"o{at}"] if moves else []
            if column is not None and step != Dim():
                parts.append(column if step == Dim.of(1) else f"{column} * {_factor(step)}")
            return " + ".join(parts) or "0"

        return text

    def statements(self, stmts: Iterable[Stmt], scope: _Scope) -> None:
        for stmt in stmts:
            if isinstance(stmt, Load):
                scope.values[stmt.name] = self._load(stmt, scope)
            elif isinstance(stmt, Compute):
                args = [scope.values[a] for a in stmt.args]
                dtypes = [self.dtypes[a] for a in stmt.args]
                scope.values[stmt.name] = spell(scope.block, stmt.expr, args, dtypes, stmt.dtype)
            elif isinstance(stmt, Store):
                scope.block.lines.append(self._store(stmt, scope))

    def _element(self, access: int, scope: _Scope) -> str:
        return f"{self.buffers[self.plan.accesses[access].buffer]}[{scope.index(access)}]"

    def _load(self, stmt: Load, scope: _Scope) -> Term:
        dtype, element = self.plan.accesses[stmt.access].dtype, self._element(stmt.access, scope)
        reads = {DType.bfloat16: "from_bf16({})", DType.float16: "from_f16({})", DType.bool: "{} != 0"}
        out = scope.block.let(dtype.compute, reads.get(dtype, "{}").format(element))
        if dtype in HALVES:
            scope.block.exact.add((out.text, dtype))
        return out

    def _store(self, stmt: Store, scope: _Scope) -> str:
        dtype = self.plan.accesses[stmt.access].dtype
        term = round_to(scope.block, scope.values[stmt.value], dtype)
        writes = {DType.bfloat16: "high_half({})", DType.float16: "to_f16({})"}
        text = writes.get(dtype, "{}").format(convert(term, dtype.compute))
        return f"{self._element(stmt.access, scope)} = {text};"


def dim(size: Dim) -> str:
    """A size as C over int64 variables."""
    out = ""
    for monomial, coefficient in size.terms:
        factors = [f"n_{_identifier(a)}" if isinstance(a, str) else _floordiv(a) for a in monomial]
        if abs(coefficient) != 1 or not factors:
            factors.insert(0, f"INT64_C({abs(coefficient)})")
        sign = "-" if coefficient < 0 else "+"
        out += (f" {sign} " if out else sign.replace("+", "")) + " * ".join(factors)
    return out or "INT64_C(0)"


def _factor(size: Dim) -> str:
    text = dim(size)
    return text if re.fullmatch(r"\w+(\(\d+\))?", text) else f"({text})"


def _floordiv(atom: FloorDiv) -> str:
    return f"floordiv({dim(atom.numerator)}, {atom.divisor})"


# Reductions


def _identity(combine: str, kind: DType) -> str:
    if combine == "sum":
        return "0"
    if kind.is_floating:
        return "-__builtin_inff()" if combine == "max" else "__builtin_inff()"
    bits = kind.itemsize * 8
    low, high = (0, 2**bits - 1) if kind is DType.uint8 else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    if kind is DType.bool:
        low, high = 0, 1
    limit = low if combine == "max" else high
    return f"(-INT64_C({-limit - 1}) - 1)" if limit < 0 else f"INT64_C({limit})"


def _combined(combine: str, kind: DType, a: str, b: str) -> str:
    if combine == "sum":
        return f"{a} + {b}"
    suffix = {DType.float32: "f", DType.float64: "d"}.get(kind, "i")
    return f"{combine}_{suffix}({a}, {b})"


@dataclass(frozen=True)
class _Lanes:
    """The accumulators of one row reduction."""

    name: str
    kind: DType
    combine: str
    arg: str

    def declare(self) -> Lines:
        start = _identity(self.combine, self.kind)
        return [
            f"{REGISTER[self.kind]} {self.name}[{LANES}];",
            f"for (int l = 0; l < {LANES}; l++) {self.name}[l] = {start};",
        ]

    def add(self, term: Term) -> str:
        lane = f"{self.name}[l]"
        return f"{lane} = {_combined(self.combine, self.kind, lane, term.text)};"

    def finish(self) -> Lines:
        loop = f"for (int s = {LANES // 2}; s; s >>= 1)"
        pair = _combined(self.combine, self.kind, f"{self.name}[l]", f"{self.name}[l + s]")
        return [f"{loop} for (int l = 0; l < s; l++) {self.name}[l] = {pair};"]


def _simd(start: str, end: str, body: Lines) -> Lines:
    return ["#pragma omp simd", *_braces(f"for (int64_t j = {start}; j < {end}; j++)", body)]


# Tiles


def _row_tile(text: _Text) -> Lines:
    tile = text.plan.tile
    assert isinstance(tile, RowTile)
    before, sweeps = phases(text.plan)
    columns = _partial_rows(text)
    kept = _Kept.choose(text, sweeps, tile)
    row = _Scope(Block(), {}, text.index(None))
    text.statements(before, row)
    lines = [*text.row_indices("i"), *text.offsets(), *_flush(row)]
    for number, phase in enumerate(sweeps):
        lines += _sweep(text, row, phase, number, columns, kept)
        text.statements(phase.scalars, row)
        lines += _flush(row)
    step = tile.rows_per_program
    program = [
        f"const int64_t first = p * {step}, last = first + {step} < rows ? first + {step} : rows;",
        *(line for column in columns.values() for line in column.declare()),
        *kept.declare(),
        *_braces("for (int64_t i = first; i < last; i++)", lines),
    ]
    return text.parallel(program)


def _flush(scope: _Scope) -> Lines:
    lines, scope.block.lines = scope.block.lines, []
    return lines


@dataclass(frozen=True)
class _Column:
    """The partial row of one column reduction, kept in the workspace itself."""

    name: str
    kind: DType
    combine: str
    place: str

    def declare(self) -> Lines:
        start = _identity(self.combine, self.kind)
        ctype = REGISTER[self.kind]
        return [f"{ctype} *const {self.name} = {self.place};", *_simd("0", "cols", [f"{self.name}[j] = {start};"])]

    def add(self, term: Term) -> str:
        return f"{self.name}[j] = {_combined(self.combine, self.kind, f'{self.name}[j]', term.text)};"


def _partial_rows(text: _Text) -> dict[str, _Column]:
    out: dict[str, _Column] = {}
    for stmt in text.plan.body:
        if isinstance(stmt, Reduce) and stmt.axis == "col":
            access = _partial_access(text, stmt)
            place = f"{text.buffers[access.buffer]} + p * cols"
            out[stmt.name] = _Column(f"c{len(out)}", access.dtype, stmt.combine, place)
    used = {a for s in text.plan.body if isinstance(s, Compute) for a in s.args}
    if used & out.keys():
        raise text.refuse(f"{sorted(used & out.keys())} used before its partial sums are combined")
    return out


def _partial_access(text: _Text, reduce: Reduce) -> Access:
    stores = [s for s in text.plan.body if isinstance(s, Store) and s.value == reduce.name]
    found = [text.plan.accesses[s.access] for s in stores]
    kind = text.dtypes[reduce.name]
    if len(found) != 1 or not found[0].partial or found[0].dtype is not kind:
        raise text.refuse(f"col reduction {reduce.name} needs one store to a {kind.value} partial workspace")
    return found[0]


@dataclass(frozen=True)
class _Kept:
    """Full values that one sweep computes and a later one reads back instead of computing them again."""

    arrays: Mapping[str, tuple[str, DType]]
    size: int
    first: Mapping[str, int]

    @staticmethod
    def choose(text: _Text, sweeps: Sequence[Phase], tile: RowTile) -> _Kept:
        """Costly values needed by more than one sweep, where whole rows fit the tile and a thread's stack."""
        width = text.plan.cols.static or tile.block_cols
        uses: dict[str, list[int]] = {}
        for number, phase in enumerate(sweeps):
            for stmt in phase.full:
                if isinstance(stmt, Compute) and _is_costly(stmt):
                    uses.setdefault(stmt.name, []).append(number)
        names = [name for name, at in uses.items() if len(at) > 1]
        if width > tile.block_cols or width * 8 * len(names) > KEPT_BYTES:
            names = []
        arrays = {name: (f"k{i}", text.dtypes[name].compute) for i, name in enumerate(names)}
        return _Kept(arrays, width, {name: uses[name][0] for name in names})

    def declare(self) -> Lines:
        return [f"{REGISTER[kind]} {array}[{self.size}];" for array, kind in self.arrays.values()]

    def prune(self, phase: Phase, number: int) -> tuple[tuple[Stmt, ...], set[str]]:
        """The statements a sweep still runs, and the values it reads back."""
        old = {name for name, at in self.first.items() if at < number}
        wanted = {r.arg for r in phase.reduces} | {s.value for s in phase.full if isinstance(s, Store)}
        stmts: list[Stmt] = []
        read: set[str] = set()
        for stmt in reversed(phase.full):
            name = "" if isinstance(stmt, Store) else stmt.name
            if name in wanted and name in old:
                read.add(name)
            elif not name or name in wanted:
                stmts.append(stmt)
                wanted |= set(stmt.args) if isinstance(stmt, Compute) else set()
        return tuple(reversed(stmts)), read


def _is_costly(stmt: Compute) -> bool:
    return any(getattr(e, "name", "") in COSTLY for e in walk(stmt.expr))


def _sweep(
    text: _Text, row: _Scope, phase: Phase, number: int, columns: Mapping[str, _Column], kept: _Kept
) -> Lines:
    """One pass over the columns of a row."""
    stmts, read = kept.prune(phase, number)
    lanes = [
        _Lanes(f"a{number}_{i}", text.dtypes[r.name], r.combine, r.arg)
        for i, r in enumerate(phase.reduces)
        if r.axis == "row"
    ]
    inner = row.inner(text.index("j"))
    for name in sorted(read):
        array, kind = kept.arrays[name]
        inner.values[name] = inner.block.let(kind, f"{array}[j]")
        inner.block.exact.add((inner.values[name].text, text.dtypes[name]))
    text.statements(stmts, inner)
    for name, at in kept.first.items():
        if at == number:
            inner.block.lines.append(f"{kept.arrays[name][0]}[j] = {inner.values[name].text};")
    for reduce in phase.reduces:
        if reduce.axis == "col":
            inner.block.lines.append(columns[reduce.name].add(inner.values[reduce.arg]))
    body = [*inner.block.lines, *(lane.add(inner.values[lane.arg]) for lane in lanes)]
    for reduce, lane in zip((r for r in phase.reduces if r.axis == "row"), lanes, strict=True):
        row.values[reduce.name] = Term(f"{lane.name}[0]", lane.kind)
    return _lane_loop(lanes, body) if lanes else _simd("0", "cols", body)


def _lane_loop(lanes: Sequence[_Lanes], body: Lines) -> Lines:
    blocks = f"for (; j{lanes[0].name} + {LANES} <= cols; j{lanes[0].name} += {LANES})"
    at = f"j{lanes[0].name}"
    vector = _braces(f"for (int l = 0; l < {LANES}; l++)", [f"const int64_t j = {at} + l;", *body])
    rest = _braces(f"for (int64_t j = {at}; j < cols; j++)", [f"const int l = j & {LANES - 1};", *body])
    return [
        *(line for lane in lanes for line in lane.declare()),
        f"int64_t {at} = 0;",
        *_braces(blocks, ["#pragma omp simd", *vector]),
        *rest,
        *(line for lane in lanes for line in lane.finish()),
    ]


def _point_tile(text: _Text) -> Lines:
    tile = text.plan.tile
    assert isinstance(tile, PointTile)
    if any(isinstance(s, Reduce) for s in text.plan.body):
        raise text.refuse("a reduction in a PointTile")
    row = _Scope(Block(), {}, text.index(None))
    text.statements((s for s in text.plan.body if "c" not in text.axes[_value(s)]), row)
    inner = row.inner(text.index("j"))
    text.statements((s for s in text.plan.body if "c" in text.axes[_value(s)]), inner)
    step = tile.block
    head = [
        f"const int64_t total = rows * cols, first = p * {step};",
        f"const int64_t last = first + {step} < total ? first + {step} : total;",
    ]
    if len(text.plan.space) == 1:
        return text.parallel([*head, *row.block.lines, *_simd("first", "last", inner.block.lines)])
    lines = [
        "const int64_t i = e / cols, start = e % cols;",
        "const int64_t end = cols - start < last - e ? cols : start + last - e;",
        *text.row_indices("i"),
        *text.offsets(),
        *row.block.lines,
        *_simd("start", "end", inner.block.lines),
        "e += end - start;",
    ]
    return text.parallel([*head, *_braces("for (int64_t e = first; e < last;)", lines)])


def _value(stmt: Stmt) -> str:
    return stmt.value if isinstance(stmt, Store) else stmt.name


def _sum_tile(text: _Text) -> Lines:
    tile = text.plan.tile
    assert isinstance(tile, SumTile)
    reduces = [s for s in text.plan.body if isinstance(s, Reduce)]
    if len(text.plan.space) != 2 or any(r.axis != "col" for r in reduces):
        raise text.refuse("a SumTile adds over (parts, cols)")
    adds, after = _split_sum(text.plan.body, {r.arg for r in reduces})
    lines, finish = [], Block()
    row = _Scope(Block(), {}, text.index(None))
    inner = row.inner(text.index("j"))
    text.statements(adds, inner)
    last = _Scope(finish, {}, text.index("j", row=False))
    for number, reduce in enumerate(reduces):
        kind, place = text.dtypes[reduce.name], f"s{number}[j - start]"
        lines += [f"{REGISTER[kind]} s{number}[{tile.block_cols}];"]
        lines += _simd("start", "end", [f"{place} = {_identity(reduce.combine, kind)};"])
        added = _combined(reduce.combine, kind, place, inner.values[reduce.arg].text)
        inner.block.lines.append(f"{place} = {added};")
        last.values[reduce.name] = finish.let(kind, place)
    text.statements(after, last)
    step = tile.block_cols
    body = [*text.row_indices("i"), *text.offsets(), *_simd("start", "end", inner.block.lines)]
    program = [
        f"const int64_t start = p * {step}, end = start + {step} < cols ? start + {step} : cols;",
        *lines,
        *_braces("for (int64_t i = 0; i < rows; i++)", body),
        *_simd("start", "end", finish.lines),
    ]
    return text.parallel(program)


def _split_sum(body: Sequence[Stmt], args: set[str]) -> tuple[list[Stmt], list[Stmt]]:
    """Statements that the sums need, and those that run once on the finished sums."""
    wanted, adds = set(args), []
    for stmt in reversed(body):
        if isinstance(stmt, (Load, Compute)) and stmt.name in wanted:
            adds.insert(0, stmt)
            wanted |= set(stmt.args) if isinstance(stmt, Compute) else set()
    later: set[str] = set()
    after: list[Stmt] = []
    for stmt in reversed(body):
        if isinstance(stmt, Store) or (isinstance(stmt, (Load, Compute)) and stmt.name in later):
            after.insert(0, stmt)
            later |= {stmt.value} if isinstance(stmt, Store) else set(getattr(stmt, "args", ()))
    return adds, after
