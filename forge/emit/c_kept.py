"""Values of a row that a C kernel keeps in an array, because it needs them again: in a later sweep over the
row's columns, at other columns of the row, or for the rows that follow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from esper_ir.scalar import Prim, walk
from esper_ir.types import Dim, DType
from forge.access import INDEX, Access, Parts
from forge.emit.c_expr import HALVES, REGISTER
from forge.emit.c_text import Lines, Scope, Text, braces, by_runs, factor, place, simd
from forge.plan import Compute, KernelPlan, Load, Phase, RowTile, Stmt, Store, needed

# Values whose computation is worth much more than a store and a load of 4 bytes.
COSTLY = frozenset(
    (
        *(
            "exp",
            "exp2",
            "expm1",
            "log",
            "log2",
            "log1p",
            "sin",
            "cos",
            "tan",
            "asin",
            "acos",
            "atan",
            "sinh",
        ),
        *("cosh", "tanh", "asinh", "acosh", "atanh", "erf", "erfc", "sigmoid", "pow", "fmod", "atan2"),
    )
)
QUOTIENTS = COSTLY | {"div", "sqrt", "rsqrt"}  # worth a load of 4 bytes
KEPT_BYTES = 1 << 17
BEFORE = -1
DEAR = 10  # instructions that are worth a store and a load
ROUNDING, CALL = 6, 20  # instructions of a rounding to 16 bits, and of a costly function


@dataclass(frozen=True)
class Moved:
    """What another value, `of`, is at the column that parts and offset give."""

    of: str
    parts: Parts
    offset: Dim


@dataclass(frozen=True)
class Kept:
    """`arrays`: name and type by value; `first`: the sweep that computes it, BEFORE for those that stay the
    same from row to row, computed for a line of rows. `moved`: values that are read from other's arrays.
    """

    arrays: Mapping[str, tuple[str, DType]]
    size: int
    first: Mapping[str, int]
    moved: Mapping[str, Moved]

    @staticmethod
    def choose(text: Text, sweeps: Sequence[Phase], tile: RowTile) -> tuple[Kept, tuple[Phase, ...]]:
        """Dear values needed more than once, where whole rows fit the tile and a thread's stack; and the
        sweeps, with one more before those that need a row's values at other columns.
        """
        width = text.plan.cols.static  # a symbolic width may exceed the tile's at run time
        if width is None or width > tile.block_cols:
            return Kept({}, 0, {}, {}), tuple(sweeps)
        steady = {
            s.name for s in text.plan.body
            if isinstance(s, Compute) and s.name in _steady(text) and _is_costly(s, QUOTIENTS)
        }  # fmt: skip
        uses = _Uses(text, steady)
        made, moved = uses.before(sweeps)
        first = {**uses.again(made, moved), **dict.fromkeys(sorted(steady), BEFORE)}
        if width * 8 * len(first) > KEPT_BYTES:
            return Kept({}, 0, {}, {}), tuple(sweeps)
        arrays = {name: (f"k{i}", text.dtypes[name].compute) for i, name in enumerate(first)}
        return Kept(arrays, width, first, moved), tuple(made)

    def place(self, name: str) -> tuple[str, DType]:
        """(C text of the value at column j, its type)."""
        found = self.moved.get(name)
        if found is None:
            array, kind = self.arrays[name]
            return f"{array}[j]", kind
        array, kind = self.arrays[found.of]
        parts = place(found.parts, "j")
        offset = [factor(found.offset)] if found.offset != Dim() else []
        return f"{array}[{' + '.join([*parts, *offset]) or '0'}]", kind

    def runs(self, names: Iterable[str]) -> tuple[Dim, ...]:
        """As `Text.runs`, of values that are read back."""
        found = (self.moved[n].parts for n in names if n in self.moved)
        return next((tuple(size for size, _ in parts) for parts in found), ())

    def line(self, text: Text, row: Scope) -> Lines:
        """What stays the same along the last axis of the rows, where a line of them begins."""
        names = [name for name, at in self.first.items() if at == BEFORE]
        if not names:
            return []
        scope = row.inner(text.index("j"))
        stmts = needed(text.plan, text.axes, set(names))
        text.statements(stmts, scope)
        ends = [f"{self.arrays[name][0]}[j] = {scope.values[name].text};" for name in names]
        begins = f"if (i == first || i{len(text.plan.space) - 2} == 0)"
        sizes, lines = text.runs(stmts), [*scope.block.lines, *ends]
        return braces(begins, by_runs(sizes, lambda first, end: simd(first, end, lines)))

    def declare(self, rows: int = 0) -> Lines:
        """The arrays, of one row or of `rows`."""
        size, all_rows = max(rows, 1) * self.size, "s" if rows else ""
        return [f"{REGISTER[kind]} {array}{all_rows}[{size}];" for array, kind in self.arrays.values()]

    def rows(self, at: str) -> Lines:
        """The arrays of row `at` of several."""
        found = self.arrays.values()
        return [f"{REGISTER[kind]} *const {name} = {name}s + {at} * {self.size};" for name, kind in found]

    def prune(self, phase: Phase, number: int) -> tuple[tuple[Stmt, ...], set[str]]:
        """The statements a sweep still runs, and the values it reads back."""
        old = {name for name, at in self.first.items() if at < number}
        old |= {name for name, moved in self.moved.items() if moved.of in old}
        wanted = {r.arg for r in phase.reduces} | {s.value for s in phase.full if isinstance(s, Store)}
        wanted |= {name for name, at in self.first.items() if at == number}
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


@dataclass
class _Uses:
    """Which sweep needs what; `steady` values are there before all sweeps."""

    text: Text
    steady: set[str]

    def __post_init__(self) -> None:
        self.made = {s.name: s for s in self.text.plan.body if isinstance(s, (Load, Compute))}
        self.costs: dict[str, int] = {}
        for name in self.made:
            self.costs[name] = self._cost(name)

    def _cost(self, name: str) -> int:
        """Instructions of a value, with all that it is made of for its column, about."""
        stmt = self.made[name]
        if "c" not in self.text.axes[name]:
            return 0
        if isinstance(stmt, Load):
            return 2 if self.text.plan.accesses[stmt.access].dtype in HALVES else 1
        prims = [e.name for e in walk(stmt.expr) if isinstance(e, Prim)]
        own = len(prims) + CALL * sum(n in COSTLY for n in prims)
        rounded = ROUNDING if stmt.dtype in HALVES else 0
        return own + rounded + sum(self.costs.get(a, 0) for a in set(stmt.args))

    def before(self, sweeps: Sequence[Phase]) -> tuple[list[Phase], dict[str, Moved]]:
        """The sweeps, with one more for values that a sweep needs at other columns too."""
        twins, done = _twins(self.text), list[Phase]()
        moved: dict[str, Moved] = {}
        for phase in sweeps:
            names = self._walk(phase, lambda name: name in twins and self.costs[name] >= DEAR)
            moved |= {name: twins[name] for name in names}
            earlier = {s.name for p in done for s in p.full if isinstance(s, Compute)}
            missing = {twins[name].of for name in names} - earlier
            if missing:
                done.append(Phase(needed(self.text.plan, self.text.axes, missing), (), ()))
            done.append(phase)
        return done, moved

    def again(self, sweeps: Sequence[Phase], moved: Mapping[str, Moved]) -> dict[str, int]:
        """Values to keep, and the sweep that computes them first."""
        first: dict[str, int] = {}
        out = set[str]()
        targets = {m.of for m in moved.values()}
        for number, phase in enumerate(sweeps):
            again = self._walk(phase, lambda n: n in moved or (n in first and self.costs[n] >= DEAR))
            out |= (again - moved.keys()) | {moved[n].of for n in again & moved.keys()}
            for stmt in phase.full:
                if isinstance(stmt, Compute) and stmt.name not in self.steady | moved.keys():
                    first.setdefault(stmt.name, number)
        return {name: at for name, at in first.items() if name in out | targets}

    def _walk(self, phase: Phase, found: Callable[[str], bool]) -> set[str]:
        """The first values from the results down for which this holds."""
        stack = [r.arg for r in phase.reduces] + [s.value for s in phase.full if isinstance(s, Store)]
        if not stack:  # a sweep for values that the next one needs at other columns
            used = {a for s in phase.full if isinstance(s, Compute) for a in s.args}
            stack = [s.name for s in phase.full if not isinstance(s, Store) and s.name not in used]
        out, seen = set[str](), set[str]()
        while stack:
            name = stack.pop()
            if name in seen or name in self.steady:
                continue
            seen.add(name)
            stmt = self.made.get(name)
            if found(name):
                out.add(name)
            elif isinstance(stmt, Compute):
                stack += stmt.args
        return out


def _steady(text: Text) -> set[str]:
    """Values of a column that do not change along the last axis of the rows: of operands that do not."""
    axis, out = len(text.plan.space) - 2, set[str]()
    for stmt in text.plan.body:
        if isinstance(stmt, Load) and not stmt.row and axis not in text.plan.accesses[stmt.access].axes:
            out.add(stmt.name)
        elif isinstance(stmt, Compute) and out.issuperset(stmt.args):
            out.add(stmt.name)
    return {name for name in out if "c" in text.axes[name]}


def _is_costly(stmt: Compute, names: frozenset[str]) -> bool:
    return any(getattr(e, "name", "") in names for e in walk(stmt.expr))


def _twins(text: Text) -> dict[str, Moved]:
    """Values that are what another one is at another column of the row: the same work on operands that are
    the same for the row, or moved alike.
    """
    plan, out = text.plan, dict[str, Moved]()
    same = {(s.expr, s.dtype, s.args): s.name for s in reversed(plan.body) if isinstance(s, Compute)}
    loads = [s for s in plan.body if isinstance(s, Load) and not s.row]
    for stmt in plan.body:
        if isinstance(stmt, Load) and not stmt.row:
            pairs = ((other, _shift(plan, stmt, other)) for other in loads)
            found = next((Moved(o.name, *shift) for o, shift in pairs if shift is not None), None)
            if found is not None:
                out[stmt.name] = found
        elif isinstance(stmt, Compute):
            ways = {(out[a].parts, out[a].offset) for a in stmt.args if a in out}
            still = all(a in out or "c" not in text.axes[a] for a in stmt.args)
            args = tuple(out[a].of if a in out else a for a in stmt.args)
            of = same.get((stmt.expr, stmt.dtype, args))
            if len(ways) == 1 and still and of is not None:
                out[stmt.name] = Moved(of, *ways.pop())
    return out


def _shift(plan: KernelPlan, load: Load, other: Load) -> tuple[Parts, Dim] | None:
    """Parts and offset of the column of `other` that a load reads, where it is one for every column."""
    a, b = plan.accesses[other.access], plan.accesses[load.access]
    alike = (a.buffer, a.dtype, a.strides[:-1]) == (b.buffer, b.dtype, b.strides[:-1])
    plain = not a.windows and not b.windows and a.buffer != INDEX
    if not (alike and plain and b.parts and not a.parts and a.strides[-1] == Dim.of(1)):
        return None
    return (b.parts, b.offset - a.offset) if _within(b, a.offset, plan.cols) else None


def _within(access: Access, start: Dim, cols: Dim) -> bool:
    """All columns that it reads lie in the row that begins at `start`."""
    low = high = access.offset - start
    for size, stride in access.parts:
        reach = (size - 1) * stride
        if reach.static is None:
            return False
        low, high = (low + reach, high) if reach.static < 0 else (low, high + reach)
    if low.static is None or high.static is None or cols.static is None:
        return False
    return low.static >= 0 and high.static < cols.static
