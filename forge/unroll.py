"""Neighbours along an axis of windows in one program's registers: what they read alike is read once.

A body that is written for one position of an axis is repeated for `times` positions side by side. Windows of
neighbours then read the same elements by the same accesses, so that loads, and what is made of them, are one
value; a division by a stride becomes a number where the stride divides the step from one group of neighbours
to the next, and with it which windows hold an element at all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from esper_ir.scalar import Arg, Const, Expr, prim
from esper_ir.types import Dim, DType
from forge.access import INDEX, Access
from forge.folding import Affine, folded, line, renumbered
from forge.lowered import ceildiv
from forge.plan import Compute, Load, Reduce, RowTile, Stmt, Store
from forge.views import Window

ZERO = Dim()
Value = str | Const
"""Of the new body: a name, or a number that is known."""
Unrolled = tuple[tuple[Dim, ...], list[Access], list[Stmt]]


def unrolled(
    space: tuple[Dim, ...], accesses: Sequence[Access], stmts: Sequence[Stmt], tile: RowTile
) -> Unrolled:
    """The work with as many neighbours in each position as the tile says; the same where it says one."""
    made: Unrolled = space, list(accesses), list(stmts)
    if tile.unroll == tile.unroll_above == tile.unroll_cols == 1:
        return made
    for back, times in ((2, tile.unroll), (3, tile.unroll_above), (1, tile.unroll_cols)):
        if times > 1 and len(space) >= back + 1:
            made = _Copies(*made, len(space) - back, times).build()
    maxima = _maxima(made[2])
    return made[0], *_used(made[1], maxima)


def possible(space: Sequence[Dim], accesses: Sequence[Access], stmts: Sequence[Stmt]) -> bool:
    """Windows along an axis before the last one, and nothing that needs its positions one by one."""
    last = len(space) - 1
    moved = {w.axis for a in accesses for w in a.windows}
    plain = not any(a.parts or a.table for a in accesses)
    sums = all(s.axis == "col" and s.combine == "sum" for s in stmts if isinstance(s, Reduce))
    return bool(moved) and last not in moved and plain and sums and len(space) > 2


def _maxima(stmts: Sequence[Stmt]) -> list[Stmt]:
    """Where all that is wanted of the larger of two is its value, one instruction instead of three."""
    known = {s.name: s for s in stmts if isinstance(s, Compute)}
    read = Counter(a for s in known.values() for a in s.args)

    def larger(s: Compute) -> bool:
        if s.expr != prim("where", Arg(0), Arg(1), Arg(2)) or not s.dtype.is_floating:
            return False
        better, value, best = s.args
        found = known.get(better)
        if found is None or found.expr != prim("or", Arg(0), Arg(1)) or read[better] > 1:
            return False
        above, none = (known.get(a) for a in found.args)
        if above is None or none is None or (above.args, none.args) != ((value, best), (value,)):
            return False
        return above.expr == prim("gt", Arg(0), Arg(1)) and none.expr == prim("isnan", Arg(0))

    made = prim("maximum", Arg(0), Arg(1))
    return [
        replace(s, expr=made, args=s.args[1:]) if isinstance(s, Compute) and larger(s) else s for s in stmts
    ]


@dataclass
class _Copies:
    """One body for `times` positions along `axis`."""

    space: tuple[Dim, ...]
    accesses: list[Access]
    stmts: list[Stmt]
    axis: int
    times: int
    made: list[Stmt] = field(default_factory=list)
    places: dict[Access, int] = field(default_factory=dict)
    known: dict[object, str] = field(default_factory=dict)
    kinds: dict[str, DType] = field(default_factory=dict)
    lines: dict[str, Affine] = field(default_factory=dict)
    sums: dict[str, list[str]] = field(default_factory=dict)

    def build(self) -> Unrolled:
        size = self.space[self.axis]
        groups = ceildiv(size, self.times)
        after = (*self.space[: self.axis], groups, *self.space[self.axis + 1 :])
        self.space_after = after
        for at in range(self.times):
            self._copy(at, self._inside(at))
        self._finish()
        return (after, *_used(list(self.places), self.made))

    def _inside(self, at: int) -> bool:
        """Whether every group has this position."""
        static = self.space[self.axis].static
        return static is not None and (static % self.times == 0 or at < static % self.times)

    # One position ---------------------------------------------------------------------------------

    def _copy(self, at: int, inside: bool) -> None:
        values: dict[str, Value] = {}
        for s in self.stmts:
            if isinstance(s, Load):
                values[s.name] = self._load(self._moved(self.accesses[s.access], at, inside))
            elif isinstance(s, Compute):
                values[s.name] = self._compute(s, values)
            elif isinstance(s, Reduce):
                part = self._named(values[s.arg], DType.float32)
                self.sums.setdefault(s.name, []).append(part if inside else self._masked(part, at))
            elif isinstance(s, Store) and s.value not in self.sums:
                access = self._moved(self.accesses[s.access], at, inside)
                self.made.append(Store(self._place(access), self._named(values[s.value], access.dtype)))

    def _moved(self, access: Access, at: int, inside: bool) -> Access:
        """The access of one position of each group."""
        axis, step, window = self.axis, access.strides[self.axis], access.window(self.axis)
        if window is not None:
            others = tuple(w for w in access.windows if w is not window)
            made = (*others, _grouped(window, self.times, at))
            return replace(access, windows=tuple(sorted(made, key=lambda w: w.axis)))
        if step == ZERO:
            return access
        if access.buffer != INDEX and not inside:
            one = Window(axis, self.times, at, 1, self.space[axis])
            made = (*access.windows, one)
            return replace(access, windows=tuple(sorted(made, key=lambda w: w.axis)))
        strides = (*access.strides[:axis], step * self.times, *access.strides[axis + 1 :])
        return replace(access, strides=strides, offset=access.offset + step * at)

    def _load(self, access: Access) -> str:
        if access not in self.known:
            at = self._place(access)
            self.known[access] = self._add(lambda n: Load(n, at), access.dtype)
            if access.buffer == INDEX:
                found = _steps(access)
                self.lines |= {} if found is None else {self.known[access]: found}
        return self.known[access]

    def _compute(self, s: Compute, values: Mapping[str, Value]) -> Value:
        given = [values[a] for a in s.args]
        expr, args = renumbered(s.expr, given)
        expr = folded(expr, [self.lines.get(a) for a in args], self.space_after)
        if isinstance(expr, Const) and _is_number(expr, s.dtype):
            return expr
        expr, args = renumbered(expr, args)
        if isinstance(expr, Arg) and self.kinds[args[0]] is s.dtype:
            return args[0]
        key = (expr, tuple(args), s.dtype)
        if key not in self.known:
            self.known[key] = self._add(lambda n: Compute(n, expr, tuple(args), s.dtype), s.dtype)
            along = None
            if not (s.dtype.is_floating or s.dtype is DType.bool):
                along = line(expr, [self.lines.get(a) for a in args])
            self.lines |= {} if along is None else {self.known[key]: along}
        return self.known[key]

    def _masked(self, part: str, at: int) -> str:
        """Zero in the place of a position that the last group does not have."""
        size, steps = self.space[self.axis], [ZERO] * len(self.space)
        steps[self.axis] = Dim.of(self.times)
        here = self._load(Access(INDEX, DType.int64, tuple(steps), offset=Dim.of(at)))
        args = [part, here]
        end: Expr = Const(size.static) if size.static is not None else Arg(2)
        if size.static is None:
            args.append(self._load(Access(INDEX, DType.int64, (ZERO,) * len(self.space), offset=size)))
        expr = prim("where", prim("lt", Arg(1), end), Arg(0), 0.0)
        return self._add(lambda n: Compute(n, expr, tuple(args), self.kinds[part]), self.kinds[part])

    # The whole ------------------------------------------------------------------------------------

    def _finish(self) -> None:
        """Sums down the columns of all positions together, and where they go."""
        for s in self.stmts:
            if isinstance(s, Reduce):
                total, *others = self.sums[s.name]
                for part in others:
                    total = self._sum(total, part)
                self.made.append(replace(s, arg=total))
            elif isinstance(s, Store) and s.value in self.sums:
                self.made.append(Store(self._place(self.accesses[s.access]), s.value))

    def _sum(self, a: str, b: str) -> str:
        kind = self.kinds[a]
        return self._add(lambda n: Compute(n, prim("add", Arg(0), Arg(1)), (a, b), kind), kind)

    def _named(self, value: Value, dtype: DType) -> str:
        if isinstance(value, str):
            return value
        return self._add(lambda n: Compute(n, value, (), dtype), dtype)

    def _add(self, make: Callable[[str], Stmt], dtype: DType) -> str:
        name = f"u{len(self.made)}"
        self.made.append(make(name))
        self.kinds[name] = dtype
        return name

    def _place(self, access: Access) -> int:
        return self.places.setdefault(access, len(self.places))


def _grouped(w: Window, times: int, at: int) -> Window:
    mul, add = w.mul * times, w.mul * at + w.add
    if mul % w.div == 0:  # floor((mul q + add) / div) = (mul / div) q + floor(add / div)
        return Window(w.axis, mul // w.div, add // w.div, 1, w.size)
    return Window(w.axis, mul, add, w.div, w.size)


def _steps(access: Access) -> Affine | None:
    steps = [s.static for s in access.strides]
    start = access.offset.static
    if start is None or access.windows or any(s is None for s in steps):
        return None
    return Affine(tuple(s or 0 for s in steps), start)


def _is_number(expr: Const, dtype: DType) -> bool:
    """A number that rounding to the type leaves as it is."""
    return not dtype.is_floating or expr.value == 0


def _used(accesses: list[Access], stmts: list[Stmt]) -> tuple[list[Access], list[Stmt]]:
    """What a result needs, with the accesses that are left."""
    wanted, kept = set[str](), list[Stmt]()
    for s in reversed(stmts):
        if isinstance(s, Store):
            wanted.add(s.value)
        elif s.name not in wanted:
            continue
        elif isinstance(s, Compute):
            wanted |= set(s.args)
        elif isinstance(s, Reduce):
            wanted |= {s.arg, *s.about}
        kept.append(s)
    kept.reverse()
    left = sorted({s.access for s in kept if isinstance(s, (Load, Store))})
    at = {old: new for new, old in enumerate(left)}
    moved = [replace(s, access=at[s.access]) if isinstance(s, (Load, Store)) else s for s in kept]
    return [accesses[old] for old in left], moved
