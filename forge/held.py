"""Bands whose rows wait in registers between a reading for mean and variance and one for the results."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from esper_ir.scalar import Arg, prim
from esper_ir.types import Dim, DType
from forge.plan import INDEX, Access, Compute, KernelPlan, Load, Reduce, Stmt, Store, next_pow2
from forge.views import ONE, ZERO

WORDS = 40  # registers of a thread for its part of the rows: of 64, so that two programs fit
VECTOR = 8  # elements of 16 bytes
SUB, MUL, ADD = (prim(name, Arg(0), Arg(1)) for name in ("sub", "mul", "add"))


def in_registers(first: KernelPlan, second: KernelPlan, third: KernelPlan) -> bool:
    """Both readings are of one tensor of 16 bits, each element where the other has it, and of nothing else of
    its size, the first for the moments of the band alone, and a thread has room for its part of all rows, 16
    bytes at a time.
    """
    cols, count = first.cols.static or 0, second.cols.static or 0
    read = {(a.buffer, a.dtype) for p in (first, third) for a in _full(p)}
    places = {a for p in (first, third) for a in _full(p)}
    alike = len(places) == 1 and first.space == third.space
    alike = alike or all(dense(a, p.space) for p in (first, third) for a in _full(p))
    halves = all(kind.is_floating and kind.itemsize == 2 for _, kind in read)
    per = 32 * warps(cols) * VECTOR
    fits = cols % per == 0 and count * cols // per <= 2 * WORDS // VECTOR
    return fits and halves and alike and len(read) == 1 and moments(first, second) is not None


def dense(access: Access, space: tuple[Dim, ...]) -> bool:
    """Element number = linear position in the space."""
    step = ONE
    for size, stride in reversed(list(zip(space, access.strides, strict=True))):
        if size != ONE and stride != step:
            return False
        step = step * size
    return access.offset == ZERO


def warps(cols: int) -> int:
    return min(max(next_pow2(cols) // (32 * VECTOR), 4), 16)


def moments(first: KernelPlan, second: KernelPlan) -> tuple[str, str] | None:
    """The names in the second part of the mean of a band's elements and of the mean of their squared
    differences from it, where these are made from the same of its rows and nothing else comes of the first
    part.
    """
    known = _meanings(first)
    sums = [s for s in first.body if isinstance(s, Reduce)]
    if not sums or not all(isinstance(s, (Load, Compute, Reduce, Store)) for s in second.body):
        return None
    mean, square = _moments(known[sums[0].arg], first.cols.static or 0)
    made = {first.accesses[s.access].buffer: known[s.value] for s in first.body if isinstance(s, Store)}
    if sorted(map(repr, made.values())) != sorted(map(repr, (mean, square))):
        return None
    theirs = _meanings(second)
    at = {meaning: ("load", buffer) for buffer, meaning in made.items()}
    whole = _divided(("sum", at[mean]), second.cols.static or 0)
    away = (SUB, (at[mean], whole), DType.float32)
    both = (ADD, (at[square], (MUL, (away, away), DType.float32)), DType.float32)
    names = {meaning: name for name, meaning in theirs.items()}
    found = names.get(whole), names.get(_divided(("sum", both), second.cols.static or 0))
    return (found[0], found[1]) if found[0] and found[1] else None


def rest(second: KernelPlan, names: tuple[str, str]) -> list[Stmt]:
    """What is left of the second part when the two are known."""
    wanted: set[str] = set()
    kept: list[Stmt] = []
    for s in reversed(second.body):
        if isinstance(s, Store):
            kept.append(s)
            wanted.add(s.value)
        elif s.name in wanted and s.name not in names:
            kept.append(s)
            wanted |= set(s.args) if isinstance(s, Compute) else {getattr(s, "arg", "")}
    return kept[::-1]


def _moments(x: Hashable, count: int) -> tuple[Hashable, Hashable]:
    mean = _divided(("sum", x), count)
    away = (SUB, (x, mean), DType.float32)
    return mean, _divided(("sum", (MUL, (away, away), DType.float32)), count)


def _divided(total: Hashable, count: int) -> Hashable:
    return prim("div", Arg(0), count), (total,), DType.float32


def _meanings(plan: KernelPlan) -> Mapping[str, Hashable]:
    out: dict[str, Hashable] = {}
    for s in plan.body:
        if isinstance(s, Load):
            out[s.name] = ("load", plan.accesses[s.access].buffer)
        elif isinstance(s, Compute):
            out[s.name] = (s.expr, tuple(out[a] for a in s.args), s.dtype)
        elif isinstance(s, Reduce):
            out[s.name] = (s.combine, out[s.arg])
    return out


def _full(plan: KernelPlan) -> list[Access]:
    loads = (plan.accesses[s.access] for s in plan.body if isinstance(s, Load))
    return [a for a in loads if a.buffer != INDEX and a.letters() == "rc"]
