"""Squares about the mean, down the columns, in C; means are two numbers as in forge/emit/triton_moments.py.

A program looks at its rows twice: they are few, and in the cache. The second stage merges the programs' rows
in the type of its accumulators (Chan, Golub and LeVeque 1979).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from esper_ir.types import DType
from forge.emit.c_expr import REGISTER, Block
from forge.emit.c_reduce import Column
from forge.emit.c_text import Lines, Scope, Text, braces, by_runs, simd
from forge.plan import Reduce, RowTile, Stmt, needed


def about_means(text: Text, columns: Mapping[str, Column], before: Iterable[Stmt]) -> Lines:
    """What follows the sums of a program's rows `first` to `last`; `before` is done once a row. E0523 where a
    program has other rows.
    """
    reduces = [s for s in text.plan.body if isinstance(s, Reduce)]
    squares = [s for s in reduces if s.combine == "squares"]
    if not squares:
        return []
    if not isinstance(text.plan.tile, RowTile) or text.plan.tile.programs:
        raise text.refuse("squares about a mean of rows in turn")
    row = Scope(Block(), {}, text.index(None))
    text.statements(before, row)
    inner = row.inner(text.index("j"))
    stmts = needed(text.plan, text.axes, {s.arg for s in squares})
    text.statements(stmts, inner)
    lines, ends = [*inner.block.lines], Lines()
    for s in squares:
        total, kind = columns[s.about[0]].name, REGISTER[text.dtypes[s.name]]
        rest = next(columns[r.name].name for r in reduces if r.combine == "rest" and r.about == s.about)
        own, x = columns[s.name].name, inner.values[s.arg].text
        mean = f"{total}[j] * ({kind})each"
        lines += [f"{{ const {kind} d = ({x}) - {mean}; {rest}[j] += d; {own}[j] += d * d; }}"]
        ends += [
            f"{{ const {kind} off = {rest}[j] * ({kind})each, q = {own}[j] - off * (off * ({kind})count);",
            f"{own}[j] = q < 0 ? 0 : q; {rest}[j] = ({mean} - {total}[j] / ({kind})count) + off; }}",
        ]
    columns_of_row = by_runs(text.runs(stmts), lambda at, end: simd(at, end, lines))
    loop = text.each_row([*text.offsets(), *row.block.lines, *columns_of_row])
    size = ["const int64_t count = last - first;", "const double each = 1.0 / (double)count;"]
    return braces("", [*size, *loop, *simd("0", "cols", ends)])


@dataclass(frozen=True)
class Sets:
    """Squares of sets, from the squares of each about its own mean and that mean in two numbers. A SumTile's
    reduction number `number`.
    """

    number: int
    kind: DType

    def begin(self, columns: int) -> Lines:
        k, ctype = self.number, REGISTER[self.kind]
        return [f"{ctype} n{k} = 0, f{k}[{columns}], r{k}[{columns}];"]

    def clear(self) -> Lines:
        return [f"f{self.number}[j - start] = r{self.number}[j - start] = 0;"]

    def row(self, count: str) -> Lines:
        """What all columns have in common, where a set comes."""
        k, ctype = self.number, REGISTER[self.kind]
        return [
            f"const {ctype} m{k} = {count}, gain{k} = m{k} > 0 ? m{k} / (n{k} + m{k}) : 0;",
            f"const {ctype} share{k} = n{k} * gain{k};",
            f"const int begun{k} = n{k} > 0;",
            f"n{k} += m{k};",
        ]

    def add(self, place: str, square: str, mean: str, rest: str) -> Lines:
        k = self.number
        start, off = f"f{k}[j - start]", f"r{k}[j - start]"
        return [
            f"{start} = begun{k} ? {start} : {mean};",
            f"{{ const {REGISTER[self.kind]} d = ({mean} - {start}) + ({rest} - {off});",
            f"{off} += d * gain{k}; {place} += {square} + d * (d * share{k}); }}",
        ]
