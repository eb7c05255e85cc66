"""RowTile kernels in C whose memory runs along the rows: neighbouring rows lie side by side in vectors.

A channel of a channels-last image is such a row: its elements are a whole line of memory apart, those of the
next channel beside it. Row values wait in arrays between the loops. A sum takes `PART` columns in ascending
order, and the sums of the parts in ascending order: neither depends on how many rows go side by side."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from esper_ir.types import Dim, DType
from forge.emit.c_expr import REGISTER, Block
from forge.emit.c_reduce import combined, identity
from forge.emit.c_text import Index, Lines, Scope, Text, braces, dim, factor, product
from forge.plan import Compute, Load, Phase, Reduce, RowTile, Stmt, Store, phases

PART = 64


def across_tile(text: Text) -> Lines:
    """The loop over programs. E0523 for windows and for reductions down the columns."""
    tile = text.plan.tile
    assert isinstance(tile, RowTile)
    if any(a.windows or a.parts for a in text.plan.accesses) or tile.programs:
        raise text.refuse("windows, or rows in turn, where rows lie side by side")
    before, sweeps = phases(text.plan)
    kernel = _Across(text, tile.block_rows)
    kernel.keep(before, sweeps)
    lines = kernel.rows(before)
    for number, phase in enumerate(sweeps):
        lines += kernel.sweep(phase, number)
        lines += kernel.rows(phase.scalars)
    axis, step = len(text.plan.space) - 2, tile.rows_per_program
    count = f"{dim(text.plan.space[axis])} - i{axis}"
    run = [
        *text.row_indices("r"),
        *text.offsets(),
        f"int64_t count = {count} < last - r ? {count} : last - r;",
        f"count = count < {tile.block_rows} ? count : {tile.block_rows};",
        *lines,
        "r += count;",
    ]
    return text.parallel(
        [
            f"const int64_t first = p * {step}, last = first + {step} < rows ? first + {step} : rows;",
            *kernel.declare(),
            *braces("for (int64_t r = first; r < last;)", run),
        ]
    )


@dataclass
class _Across:
    """`arrays`: of row values that more than one loop needs, a number for each row of the block."""

    text: Text
    wide: int
    arrays: dict[str, str] = field(default_factory=dict)
    parts: dict[str, str] = field(default_factory=dict)

    def keep(self, before: Iterable[Stmt], sweeps: Sequence[Phase]) -> None:
        """Names the arrays: every reduction, and what one loop makes and another reads."""
        loops: list[list[Stmt]] = [list(before)]
        for phase in sweeps:
            loops += [[*phase.full, *phase.reduces], list(phase.scalars)]
        made = {
            s.name: at for at, loop in enumerate(loops) for s in loop
            if at % 2 == 0 and isinstance(s, (Load, Compute))
        }  # fmt: skip
        for at, loop in enumerate(loops):
            for name in sorted({a for s in loop for a in _reads(s)}):
                if name in made and made[name] != at:
                    self.arrays.setdefault(name, f"k{len(self.arrays)}")
        for phase in sweeps:
            for reduce in phase.reduces:
                self.parts[reduce.name] = f"a{len(self.parts)}"
                self.arrays[reduce.name] = f"s{len(self.parts) - 1}"

    def declare(self) -> Lines:
        names = [*self.arrays.items(), *self.parts.items()]
        return [f"{self._type(name)} {array}[{self.wide}];" for name, array in names]

    def _type(self, name: str) -> str:
        return REGISTER[self.text.dtypes[name].compute]

    def _beside(self, body: Lines) -> Lines:
        return ["#pragma omp simd", *braces("for (int l = 0; l < count; l++)", body)]

    def rows(self, stmts: Sequence[Stmt]) -> Lines:
        """What happens once a row."""
        if not stmts:
            return []
        scope = Scope(Block(), {}, self._index(None))
        self._read_back(scope, stmts)
        self.text.statements(stmts, scope)
        kept = [s.name for s in stmts if isinstance(s, (Load, Compute)) and s.name in self.arrays]
        ends = [f"{self.arrays[name]}[l] = {scope.values[name].text};" for name in kept]
        return self._beside([*scope.block.lines, *ends])

    def sweep(self, phase: Phase, number: int) -> Lines:
        """One pass over the columns, all rows of the block at each."""
        column = Scope(Block(), {}, self._index("j"))
        alone: list[Stmt] = []
        for s in phase.full:  # not those of a value that stands in the rows' arrays
            known = {a.name for a in alone if isinstance(a, (Load, Compute))}
            if self._by_column(s) and known.issuperset(_reads(s)):
                alone.append(s)
        self.text.statements(alone, column)
        inner = column.inner(self._index("j"))
        rest = [s for s in phase.full if s not in alone]
        self._read_back(inner, [*rest, *phase.reduces])
        self.text.statements(rest, inner)
        for reduce in phase.reduces:
            inner.block.lines.append(self._add(reduce, self.parts, inner.values[reduce.arg].text))
        each = [*column.block.lines, *self._beside(inner.block.lines)]
        if not phase.reduces:
            return braces("for (int64_t j = 0; j < cols; j++)", each)
        at = f"j{number}"
        return [
            *self._beside([self._clear(r, self.arrays) for r in phase.reduces]),
            *braces(
                f"for (int64_t {at} = 0; {at} < cols; {at} += {PART})",
                [f"const int64_t end = {at} + {PART} < cols ? {at} + {PART} : cols;"],
                self._beside([self._clear(r, self.parts) for r in phase.reduces]),
                braces(f"for (int64_t j = {at}; j < end; j++)", each),
                self._beside([self._add(r, self.arrays, f"{self.parts[r.name]}[l]") for r in phase.reduces]),
            ),
        ]

    def _by_column(self, stmt: Stmt) -> bool:
        return not isinstance(stmt, (Store, Reduce)) and self.text.axes[stmt.name] == "c"

    def _add(self, reduce: Reduce, arrays: dict[str, str], value: str) -> str:
        place = f"{arrays[reduce.name]}[l]"
        return f"{place} = {combined(reduce.combine, self.text.dtypes[reduce.name], place, value)};"

    def _clear(self, reduce: Reduce, arrays: dict[str, str]) -> str:
        return f"{arrays[reduce.name]}[l] = {identity(reduce.combine, self.text.dtypes[reduce.name])};"

    def _read_back(self, scope: Scope, stmts: Iterable[Stmt]) -> None:
        """What these statements need of the arrays."""
        stmts = list(stmts)
        own = {s.name for s in stmts if isinstance(s, (Load, Compute))}
        for name in sorted({a for s in stmts for a in _reads(s)} - own):
            if name in self.arrays and name not in scope.values:
                kind: DType = self.text.dtypes[name]
                scope.values[name] = scope.block.let(kind.compute, f"{self.arrays[name]}[l]")
                scope.block.exact.add((scope.values[name].text, kind))

    def _index(self, column: str | None) -> Index:
        def spelled(at: int) -> str:
            access = self.text.plan.accesses[at]
            last = len(access.strides) - 1
            parts = [f"o{at}"] if access.axes - {last} else []
            if access.strides[last - 1] != Dim():
                parts.append(product("l", access.strides[last - 1]))
            if column is not None and access.strides[last] != Dim():
                parts.append(product(column, access.strides[last]))
            if access.offset != Dim():
                parts.append(factor(access.offset))
            return " + ".join(parts) or "0"

        return spelled


def _reads(stmt: Stmt) -> tuple[str, ...]:
    if isinstance(stmt, Compute):
        return stmt.args
    if isinstance(stmt, Reduce):
        return (stmt.arg,)
    return (stmt.value,) if isinstance(stmt, Store) else ()
