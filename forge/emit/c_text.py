"""The parts of a C function that every tile shares: parameters, indices, loads, statements and stores."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from esper_ir.diagnostics import EsperError
from esper_ir.types import Dim, DType, FloorDiv
from forge.access import Parts
from forge.emit.c_expr import HALVES, MEMORY, REGISTER, Block, Term, constant, convert, round_to, spell
from forge.plan import INDEX, Access, Compute, KernelPlan, Load, RowTile, Stmt, Store
from forge.views import Window

# Elements under which starting threads costs more than it saves.
SERIAL = 16384

Lines = list[str]
Index = Callable[[int], str]
"""Number of an access -> C text of the element's index."""


def indent(lines: Iterable[str]) -> Lines:
    return [f"    {line}" if line and not line.startswith("#") else line for line in lines]


def braces(head: str, *parts: Iterable[str]) -> Lines:
    return [f"{head} {{", *indent([line for part in parts for line in part]), "}"]


def identifier(text: str) -> str:
    """A name from a blueprint as part of a C identifier; names that differ stay different."""
    return re.sub(r"[^0-9A-Za-z_]", lambda found: f"_{ord(found[0]):x}_", text)


def comment(text: str) -> str:
    """Text that may hold names from a blueprint, so that nothing in it can end the comment."""
    return f"/* {text.replace('*', ' * ').replace('/', ' / ')} */"


@dataclass
class Scope:
    """A C block, what its values are called, and how accesses are indexed in it."""

    block: Block
    values: dict[str, Term]
    index: Index

    def inner(self, index: Index) -> Scope:
        return Scope(Block(self.block), dict(self.values), index)


@dataclass
class Text:
    plan: KernelPlan
    axes: dict[str, str] = field(init=False)
    dtypes: dict[str, DType] = field(init=False)
    buffers: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        self.axes, self.dtypes = self.plan.axes(), self.plan.dtypes()
        self.buffers = {b: f"b{i}_{identifier(b)}" for i, b in enumerate(self.plan.buffers)}

    def refuse(self, what: str) -> EsperError:
        return EsperError(
            "E0523",
            what,
            node=self.plan.name,
            hint="a template made a plan outside the grammar of forge/plan.py",
        )

    def opening(self) -> Lines:
        """The head of the function, its parameters and sizes."""
        plan, width = self.plan, "int64_t" if self.plan.wide else "int32_t"
        lines = [comment(line) for line in str(plan).splitlines()]
        lines += [
            '__attribute__((visibility("default")))',
            f"void {plan.name}(void *const *args, int64_t gx, int64_t gy, int64_t gz)",
            "{",
        ]
        body = []
        for at, (buffer, dtype) in enumerate(zip(plan.buffers, plan.buffer_dtypes, strict=True)):
            body.append(
                f"{MEMORY[dtype]} *const {self.buffers[buffer]} = *({MEMORY[dtype]} *const *)args[{at}];"
            )
        for at, size in enumerate(plan.sizes, len(plan.buffers)):
            body.append(f"const int64_t n_{identifier(size)} = *(const {width} *)args[{at}];")
        body.append(f"const int64_t rows = {dim(plan.rows)}, cols = {dim(plan.cols)};")
        return [*lines, *indent([*body, "(void)gy, (void)gz;"])]

    def parallel(self, body: Lines) -> Lines:
        """The loop over programs."""
        head = f"#pragma omp parallel for schedule(static) if(gx > 1 && rows * cols > {SERIAL})"
        return [head, *braces("for (int64_t p = 0; p < gx; p++)", body)]

    def row_indices(self, row: str) -> Lines:
        """`i0`, `i1`, ...: position along each axis but the last, from the row number."""
        sizes = self.plan.space[:-1]
        lines, rest = [], row
        for axis in reversed(range(1, len(sizes))):
            size = factor(sizes[axis])
            lines.append(f"const int64_t i{axis} = {rest} % {size}, r{axis} = {rest} / {size};")
            rest = f"r{axis}"
        return [*lines, f"const int64_t i0 = {rest};"] if sizes else lines

    def each_row(self, body: Lines) -> Lines:
        """The loop over rows `first` to `last`. Positions along the axes are counted on: a division a row
        takes longer than a row of 32 elements."""
        sizes = self.plan.space[:-1]
        if len(sizes) < 2:
            return braces("for (int64_t i = first; i < last; i++)", ["const int64_t i0 = i;"], body)
        begin = [line.replace("const int64_t i", "int64_t i") for line in self.row_indices("first")]
        carry: Lines = ["i0++;"]
        for axis in range(1, len(sizes)):
            carry = braces(f"if (++i{axis} == {factor(sizes[axis])})", [f"i{axis} = 0;"], carry)
        return [*begin, *braces("for (int64_t i = first; i < last; i++)", body, carry)]

    def offsets(self) -> Lines:
        """`o<access>`: index of column 0 of the row, for every access that moves with the row."""
        lines = []
        for at, access in enumerate(self.plan.accesses):
            moving = [a for a in sorted(access.axes) if a < len(access.strides) - 1]
            parts = [product(_source(access.window(a), f"i{a}"), access.strides[a]) for a in moving]
            if not parts or self.is_partial(access):
                continue
            inside = [c for w in access.windows if w.axis in moving for c in _inside(w, f"i{w.axis}")]
            where = " + ".join(parts)
            if inside:
                lines.append(f"const int g{at} = {' & '.join(inside)};")
                where = f"g{at} ? {where} : 0"
            lines.append(f"const int64_t o{at} = {where};")
        return lines

    def is_partial(self, access: Access) -> bool:
        """Whether an access is addressed by program: the second stage reads the workspace by its strides."""
        return access.partial and isinstance(self.plan.tile, RowTile)

    def partial_row(self, access: Access) -> str:
        """Index of column 0 of the program's partial row. Places of columns that lie apart (forge/halves.py)
        have a part of one row each."""
        stored = {s.access for s in self.plan.body if isinstance(s, Store)}
        count = sum(self.plan.accesses[at].buffer == access.buffer for at in stored)
        row = "p * cols" if count < 2 else f"p * cols * {count}"
        return row if access.offset == Dim() else f"{row} + {factor(access.offset)}"

    def index(self, column: str | None, row: bool = True) -> Index:
        """Indexing inside a row (with `row`) at `column`, or of row values (None)."""

        def text(at: int) -> str:
            access = self.plan.accesses[at]
            if self.is_partial(access):
                return f"{self.partial_row(access)} + {column}"
            last = len(access.strides) - 1
            moves = row and bool(access.axes - {last})
            step = access.strides[-1]
            parts = [f"o{at}"] if moves else []
            if column is not None and access.parts:
                parts += place(access.parts, column)
            elif column is not None and step != Dim():
                parts.append(product(_source(access.window(last), column), step))
            if access.offset != Dim():
                parts.append(factor(access.offset))
            return " + ".join(parts) or "0"

        return text

    def statements(self, stmts: Iterable[Stmt], scope: Scope) -> None:
        for stmt in stmts:
            if isinstance(stmt, Load):
                scope.values[stmt.name] = self._load(stmt, scope)
            elif isinstance(stmt, Compute):
                args = [scope.values[a] for a in stmt.args]
                dtypes = [self.dtypes[a] for a in stmt.args]
                scope.values[stmt.name] = spell(scope.block, stmt.expr, args, dtypes, stmt.dtype)
            elif isinstance(stmt, Store):
                scope.block.lines.append(self._store(stmt, scope))

    def _element(self, access: int, scope: Scope) -> str:
        return f"{self.buffers[self.plan.accesses[access].buffer]}[{scope.index(access)}]"

    def _load(self, stmt: Load, scope: Scope) -> Term:
        access = self.plan.accesses[stmt.access]
        if access.buffer == INDEX:
            return scope.block.let(access.dtype, f"({REGISTER[access.dtype]})({scope.index(stmt.access)})")
        dtype, element = access.dtype, self._element(stmt.access, scope)
        reads = {DType.bfloat16: "from_bf16({})", DType.float16: "from_f16({})", DType.bool: "{} != 0"}
        value = reads.get(dtype, "{}").format(element)
        if access.windows:
            inside = " & ".join(self._inside(stmt.access))
            value = f"{inside} ? {value} : {constant(access.fill, dtype.compute)}"
        out = scope.block.let(dtype.compute, value)
        if dtype in HALVES:
            scope.block.exact.add((out.text, dtype))
        return out

    def _inside(self, at: int) -> Lines:
        """Whether the windows of an access have an element: along the row's axes, and at column j."""
        access = self.plan.accesses[at]
        last = len(access.strides) - 1
        row = [f"g{at}"] if any(w.axis != last for w in access.windows) else []
        window = access.window(last)
        return row if window is None else [*row, *_inside(window, "j")]

    def _store(self, stmt: Store, scope: Scope) -> str:
        dtype = self.plan.accesses[stmt.access].dtype
        term = round_to(scope.block, scope.values[stmt.value], dtype)
        writes = {DType.bfloat16: "high_half({})", DType.float16: "to_f16({})"}
        text = writes.get(dtype, "{}").format(convert(term, dtype.compute))
        return f"{self._element(stmt.access, scope)} = {text};"

    def runs(self, stmts: Iterable[Stmt]) -> tuple[Dim, ...]:
        """Sizes of the parts of the columns where a statement reads or writes by them, else nothing."""
        used = (self.plan.accesses[s.access] for s in stmts if isinstance(s, (Load, Store)))
        return next((tuple(size for size, _ in a.parts) for a in used if a.parts), ())


def place(parts: Parts, column: str) -> Lines:
    """Terms of an index along the parts that the columns are made of, inside of `by_runs`."""
    positions = [*(f"q{at}" for at in range(len(parts) - 1)), f"({column} - run)"]
    return [product(q, step) for q, (_, step) in zip(positions, parts, strict=True) if step != Dim()]


def by_runs(sizes: Sequence[Dim], loop: Callable[[str, str], Lines]) -> Lines:
    """`loop(first, end)` over all columns: at once, or a run of the innermost part after the other. Then
    `q0`, `q1`, ... are the positions along the parts outside of it and `run` is the run's first column.
    """
    if not sizes:
        return loop("0", "cols")
    number = "0"
    for at, size in enumerate(sizes[:-1]):
        number = f"q{at}" if at == 0 else f"({number} * {factor(size)} + q{at})"
    inner = factor(sizes[-1])
    lines = [f"const int64_t run = {number} * {inner};", *loop("run", f"run + {inner}")]
    for at, size in reversed(list(enumerate(sizes[:-1]))):
        lines = braces(f"for (int64_t q{at} = 0; q{at} < {factor(size)}; q{at}++)", lines)
    return lines


def flush(scope: Scope) -> Lines:
    lines, scope.block.lines = scope.block.lines, []
    return lines


def simd(start: str, end: str, body: Lines) -> Lines:
    return ["#pragma omp simd", *braces(f"for (int64_t j = {start}; j < {end}; j++)", body)]


def dim(size: Dim) -> str:
    """A size as C over int64 variables."""
    out = ""
    for monomial, coefficient in size.terms:
        factors = [f"n_{identifier(a)}" if isinstance(a, str) else _floordiv(a) for a in monomial]
        if abs(coefficient) != 1 or not factors:
            factors.insert(0, f"INT64_C({abs(coefficient)})")
        sign = "-" if coefficient < 0 else "+"
        out += (f" {sign} " if out else sign.replace("+", "")) + " * ".join(factors)
    return out or "INT64_C(0)"


def factor(size: Dim) -> str:
    text = dim(size)
    return text if re.fullmatch(r"\w+(\(\d+\))?", text) else f"({text})"


def product(position: str, stride: Dim) -> str:
    return position if stride == Dim.of(1) else f"{position} * {factor(stride)}"


def _source(window: Window | None, at: str) -> str:
    """The position that is read; where there is none, any number."""
    if window is None:
        return at
    place = _numerator(window, at)
    return place if window.div == 1 else f"({place} / {window.div})"


def _numerator(window: Window, at: str) -> str:
    return f"({at if window.mul == 1 else f'{at} * {window.mul}'} + {window.add})".replace("+ -", "- ")


def _inside(window: Window, at: str) -> Lines:
    """Division rounds to zero, so the sign is asked for."""
    place = _numerator(window, at)
    low = [f"({place} >= 0)"] if window.add < 0 else []
    return [*low, f"({place} < {factor(window.size * window.div)})"]


def _floordiv(atom: FloorDiv) -> str:
    return f"floordiv({dim(atom.numerator)}, {atom.divisor})"
