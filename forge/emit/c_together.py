"""Short rows in C, some at a time: sums of all of them, then what follows once a row for all of them in
vectors, then the next sweep. One after the other, each would wait for its own sum, root and quotient."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from forge.emit.c_expr import REGISTER, Block
from forge.emit.c_kept import BEFORE, KEPT_BYTES, Kept
from forge.emit.c_text import Lines, Scope, Text, braces, factor, flush
from forge.plan import Compute, Load, Phase, Reduce, Stmt, Store

ROWS = 16  # at a time
NARROW = 256  # columns of a row that waits for its sum; longer ones have enough to do

Sweep = Callable[[Scope, int], Lines]
"""(scope of the row, number of the sweep) -> its loop."""


@dataclass(frozen=True)
class _Loop:
    """One loop over the rows: `stmts` once a row, then these sweeps."""

    stmts: tuple[Stmt, ...]
    sweeps: tuple[int, ...] = ()


@dataclass
class Together:
    """`arrays`: of row values that one loop makes and another reads."""

    text: Text
    sweeps: Sequence[Phase]
    kept: Kept
    loops: list[_Loop]
    arrays: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def of(text: Text, before: Sequence[Stmt], sweeps: Sequence[Phase], kept: Kept) -> Together | None:
        """None where rows are long, give nothing as a whole, or share values with the rows that follow."""
        width = text.plan.cols.static
        sums = [at for at, phase in enumerate(sweeps) if any(r.axis == "row" for r in phase.reduces)]
        held = ROWS * kept.size * len(kept.arrays) * 8
        narrow = width is not None and width <= NARROW and held <= KEPT_BYTES
        if not narrow or not sums or BEFORE in kept.first.values():
            return None
        loops, stmts, numbers = list[_Loop](), tuple(before), list[int]()
        for number, phase in enumerate(sweeps):
            numbers.append(number)
            if number in sums:
                loops += [_Loop(stmts, tuple(numbers)), _Loop(phase.scalars)]
                stmts, numbers = (), []
        loops += [_Loop(stmts, tuple(numbers))] if numbers else []
        made = Together(text, sweeps, kept, loops)
        made._share()
        return made

    def _share(self) -> None:
        """Names the arrays."""
        home: dict[str, int] = {}
        for at, loop in enumerate(self.loops):
            for stmt in self._statements(loop):
                if not isinstance(stmt, Store) and "c" not in self.text.axes[stmt.name]:
                    home[stmt.name] = at
        for at, loop in enumerate(self.loops):
            for name in sorted(_read(self._statements(loop))):
                if home.get(name, at) != at:
                    self.arrays.setdefault(name, f"w{len(self.arrays)}")

    def _statements(self, loop: _Loop) -> list[Stmt]:
        found = (s for at in loop.sweeps for s in (*self.sweeps[at].full, *self.sweeps[at].reduces))
        return [*loop.stmts, *found]

    def lines(self, sweep: Sweep) -> Lines:
        """The loop over rows `first` to `last`."""
        axes = range(len(self.text.plan.space) - 1)
        begin: Lines = []
        fill: Lines = []
        if len(axes) > 1:
            begin = [x.replace("const int64_t i", "int64_t i") for x in self.text.row_indices("first")]
            carry: Lines = ["i0++;"]
            for axis in axes[1:]:
                size = factor(self.text.plan.space[axis])
                carry = braces(f"if (++i{axis} == {size})", [f"i{axis} = 0;"], carry)
            fill = self._each([f"at{axis}[r] = i{axis};" for axis in axes], carry)
        body = [line for loop in self.loops for line in self._loop(loop, sweep)]
        count = f"const int64_t count = last - i < {ROWS} ? last - i : {ROWS};"
        head = f"for (int64_t i = first; i < last; i += {ROWS})"
        return [*self._declared(), *begin, *braces(head, [count], fill, body)]

    def _declared(self) -> Lines:
        axes = len(self.text.plan.space) - 1
        places = [f"int64_t at{axis}[{ROWS}];" for axis in range(axes)] if axes > 1 else []
        kinds = {name: REGISTER[self.text.dtypes[name].compute] for name in self.arrays}
        values = [f"{kinds[name]} {array}[{ROWS}];" for name, array in self.arrays.items()]
        return [*places, *values, *self.kept.declare(ROWS)]

    def _each(self, *parts: Iterable[str]) -> Lines:
        return braces("for (int64_t r = 0; r < count; r++)", *parts)

    def _loop(self, loop: _Loop, sweep: Sweep) -> Lines:
        stmts = self._statements(loop)
        if not stmts:
            return []
        scope = Scope(Block(), {}, self.text.index(None))
        for name in sorted(_read(stmts) & self.arrays.keys()):
            kind = self.text.dtypes[name]
            if not any(not isinstance(s, Store) and s.name == name for s in stmts):
                scope.values[name] = scope.block.let(kind.compute, f"{self.arrays[name]}[r]")
                scope.block.exact.add((scope.values[name].text, kind))
        self.text.statements(loop.stmts, scope)
        lines = flush(scope)
        for number in loop.sweeps:
            lines += sweep(scope, number)
        own = [s.name for s in stmts if not isinstance(s, Store) and s.name in self.arrays]
        ends = [f"{self.arrays[name]}[r] = {scope.values[name].text};" for name in dict.fromkeys(own)]
        rows = self._each(self._place(stmts), self.kept.rows("r") if loop.sweeps else [], lines, ends)
        return rows if loop.sweeps else ["#pragma omp simd", *rows]

    def _place(self, stmts: Sequence[Stmt]) -> Lines:
        """Where the row lies, where something is read or written for it."""
        if not any(isinstance(s, (Load, Store)) for s in stmts):
            return []
        axes = range(len(self.text.plan.space) - 1)
        places = [f"i{axis} = at{axis}[r]" for axis in axes] if len(axes) > 1 else ["i0 = i + r"]
        return [f"const int64_t {', '.join(places)};", *self.text.offsets()] if places else []


def _read(stmts: Iterable[Stmt]) -> set[str]:
    out = set[str]()
    for stmt in stmts:
        if isinstance(stmt, Compute):
            out.update(stmt.args)
        elif isinstance(stmt, Reduce):
            out.add(stmt.arg)
        elif isinstance(stmt, Store):
            out.add(stmt.value)
        elif isinstance(stmt, Load) and stmt.row:
            out.add(stmt.row)
    return out
