"""Columns that lie some way apart as one position of a kernel: rotations of halves.

A body over an axis that is made of two parts, the outer of which is short, is repeated for each place of the
outer part. What one place reads of another is then a value of that one: it is loaded and computed once, and
what asks for the place is a number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from esper_ir.scalar import Arg, Cast, Const, Expr, Prim, prim, walk
from esper_ir.types import Dim, DType
from forge.access import INDEX, Access
from forge.plan import Compute, Load, Reduce, Stmt, Store

ZERO = Dim()
COUNTS = (2, 4)  # places of the outer part
LEAST = 8  # columns of a place
COMBINE = {"sum": "add", "max": "maximum", "min": "minimum"}
Value = str | Const
"""Of the new body: a name, or a number that is known."""


def places_of(space: Sequence[Dim], accesses: Sequence[Access], stmts: Sequence[Stmt]) -> int:
    """How many places the columns' axis has that can be one position; 1 where it cannot be taken apart."""
    sizes = {tuple(size for size, _ in a.parts) for a in accesses if a.parts}
    if len(sizes) != 1 or any(a.windows or a.table for a in accesses):
        return 1
    outer, *inner = sizes.pop()
    plain = all(s.combine in COMBINE and not s.about for s in stmts if isinstance(s, Reduce))
    known = outer.static is not None and len(inner) == 1 and inner[0].static is not None
    if not (plain and known) or outer.static is None or inner[0].static is None:
        return 1
    fits = outer.static in COUNTS and inner[0].static >= LEAST and space[-1] == outer * inner[0]
    return outer.static if fits else 1


def in_places(
    space: tuple[Dim, ...], accesses: Sequence[Access], stmts: Sequence[Stmt], count: int
) -> tuple[tuple[Dim, ...], list[Access], list[Stmt]]:
    """The work over `count` times fewer columns; the same where that is 1."""
    if count == 1:
        return space, list(accesses), list(stmts)
    width = space[-1].static or 0
    made = _Places((*space[:-1], Dim.of(width // count)), accesses, count, width // count)
    for s in stmts:
        made.take(s)
    kept = made.needed()
    used = sorted({s.access for s in kept if isinstance(s, (Load, Store))})
    known = list(made.found)
    at = {old: new for new, old in enumerate(used)}
    body = [replace(s, access=at[s.access]) if isinstance(s, (Load, Store)) else s for s in kept]
    return made.space, [known[i] for i in used], body


@dataclass
class _Places:
    space: tuple[Dim, ...]
    accesses: Sequence[Access]
    count: int
    width: int
    made: list[Stmt] = field(default_factory=list)
    found: dict[Access, int] = field(default_factory=dict)
    known: dict[object, str] = field(default_factory=dict)
    kinds: dict[str, DType] = field(default_factory=dict)
    values: dict[str, list[Value]] = field(default_factory=dict)

    def take(self, s: Stmt) -> None:
        """One statement for every place."""
        each = range(self.count)
        if isinstance(s, Load):
            self.values[s.name] = [self._load(self.accesses[s.access], at) for at in each]
        elif isinstance(s, Compute):
            self.values[s.name] = [self._compute(s, at) for at in each]
        elif isinstance(s, Reduce):
            self.values[s.name] = self._reduce(s)
        elif isinstance(s, Store):
            for at in each:
                self._store(s, at)

    def needed(self) -> list[Stmt]:
        """Without what nothing asks for."""
        wanted: set[str] = set()
        kept: list[Stmt] = []
        for s in reversed(self.made):
            if isinstance(s, Store):
                kept.append(s)
                wanted.add(s.value)
            elif s.name in wanted:
                kept.append(s)
                wanted |= set(s.args) if isinstance(s, Compute) else {getattr(s, "arg", "")}
        return kept[::-1]

    def _moved(self, a: Access, at: int) -> Access:
        if a.partial:
            return replace(a, offset=Dim.of(at * self.width))
        if a.parts:
            (_, step), (_, inner) = a.parts
            return replace(a, strides=(*a.strides[:-1], inner), offset=a.offset + step * at, parts=())
        return replace(a, offset=a.offset + a.strides[-1] * (at * self.width))

    def _load(self, access: Access, at: int) -> Value:
        moved = self._moved(access, at)
        if moved.buffer == INDEX and not moved.axes and moved.offset.static is not None:
            return Const(moved.offset.static)
        if moved not in self.known:
            place = self._place(moved)
            self.known[moved] = self._add(lambda n: Load(n, place), moved.dtype)
        return self.known[moved]

    def _compute(self, s: Compute, at: int) -> Value:
        expr, args = _over(s.expr, [self.values[a][at] for a in s.args])
        if isinstance(expr, Const) and not s.dtype.is_floating:
            return expr
        if isinstance(expr, Arg) and self.kinds[args[0]] is s.dtype:
            return args[0]
        key = (expr, tuple(args), s.dtype)
        if key not in self.known:
            self.known[key] = self._add(lambda n: Compute(n, expr, tuple(args), s.dtype), s.dtype)
        return self.known[key]

    def _reduce(self, s: Reduce) -> list[Value]:
        """Along the row of all places together; down the columns each place has its own."""
        parts = [self._named(v, s) for v in self.values[s.arg]]
        kind = self.kinds[parts[0]].compute
        if s.axis == "col":
            return [self._add(lambda n, p=p: replace(s, name=n, arg=p), kind) for p in parts]
        total, *others = [self._wide(p, kind) for p in parts]
        for part in others:
            both, expr = (total, part), prim(COMBINE[s.combine], Arg(0), Arg(1))
            total = self._add(lambda n, e=expr, b=both: Compute(n, e, b, kind), kind)
        return [self._add(lambda n: replace(s, name=n, arg=total), kind)] * self.count

    def _store(self, s: Store, at: int) -> None:
        access = self._moved(self.accesses[s.access], at)
        made = Store(self._place(access), self._named(self.values[s.value][at], None, access.dtype))
        if made not in self.made:
            self.made.append(made)

    def _wide(self, name: str, kind: DType) -> str:
        if self.kinds[name] is kind:
            return name
        return self._add(lambda n: Compute(n, Arg(0), (name,), kind), kind)

    def _named(self, value: Value, s: Reduce | None, dtype: DType = DType.float32) -> str:
        if isinstance(value, str):
            return value
        return self._add(lambda n: Compute(n, value, (), dtype), dtype)

    def _add(self, make: Callable[[str], Stmt], dtype: DType) -> str:
        name = f"h{len(self.made)}"
        self.made.append(make(name))
        self.kinds[name] = dtype
        return name

    def _place(self, access: Access) -> int:
        return self.found.setdefault(access, len(self.found))


def _over(expr: Expr, given: Sequence[Value]) -> tuple[Expr, list[str]]:
    """The expression over the operands that are names and are left when numbers stand in their places."""

    def put(e: Expr) -> Expr:
        if isinstance(e, Arg):
            value = given[e.index]
            return value if isinstance(value, Const) else e
        if isinstance(e, Cast):
            inner = put(e.arg)
            whole = isinstance(inner, Const) and not e.dtype.is_floating
            return inner if whole else Cast(inner, e.dtype)
        return _chosen(Prim(e.name, tuple(put(a) for a in e.args))) if isinstance(e, Prim) else e

    made = put(expr)
    used = sorted({a.index for a in walk(made) if isinstance(a, Arg)})
    names = list(dict.fromkeys(str(given[i]) for i in used))
    places = {i: Arg(names.index(str(given[i]))) for i in used}

    def renumber(e: Expr) -> Expr:
        if isinstance(e, Arg):
            return places[e.index]
        if isinstance(e, Cast):
            return Cast(renumber(e.arg), e.dtype)
        return Prim(e.name, tuple(renumber(a) for a in e.args)) if isinstance(e, Prim) else e

    return renumber(made), names


def _chosen(e: Prim) -> Expr:
    """What a choice or a comparison of numbers comes to."""
    first = e.args[0]
    if e.name == "where" and isinstance(first, Const):
        return e.args[1] if first.value else e.args[2]
    if e.name in ("eq", "ne") and all(isinstance(a, Const) for a in e.args):
        same = e.args[0] == e.args[1]
        return Const(same if e.name == "eq" else not same)
    return e
