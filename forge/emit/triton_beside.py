"""Reductions along a row that need nothing of each other, as one: the warps meet once for all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from forge.emit.triton_base import COMBINE, Kernel, identity, masked
from forge.plan import Load, Reduce, Stmt, Store


@dataclass(frozen=True)
class Beside:
    """Two or more reductions of one step."""

    reduces: tuple[Reduce, ...]


def side_by_side(k: Kernel, work: Sequence[Stmt]) -> list[Stmt | Beside]:
    """The statements in an order that has reductions of one depth together. What needs one of them comes
    after all of them, all else stays where it is.
    """
    depth = _depths(work)
    count = Counter(depth[s.name] for s in work if isinstance(s, Reduce) and _mergeable(k, s))
    out: list[Stmt | Beside] = []
    left = list(work)
    while left:
        left = _until_together(k, left, depth, count, out)
    return out


def _until_together(
    k: Kernel, work: Sequence[Stmt], depth: Mapping[str, int], count: Mapping[int, int],
    out: list[Stmt | Beside],
) -> list[Stmt]:  # fmt: skip
    """What can be done until all reductions of some depth stand goes to `out`, and they; the rest is left."""
    pending: list[Reduce] = []
    late: list[Stmt] = []
    blocked: set[str] = set()
    for at, s in enumerate(work):
        if blocked & set(_needs(s)):
            late.append(s)
            blocked |= _makes(s)
        elif not (isinstance(s, Reduce) and _mergeable(k, s) and count[depth[s.name]] > 1):
            out.append(s)
        else:
            pending.append(s)
            blocked.add(s.name)
        if pending and len(pending) == count[depth[pending[0].name]]:
            out.append(Beside(tuple(pending)))
            return [*late, *work[at + 1 :]]
    assert not pending and not late
    return []


def beside(k: Kernel, b: Beside, masks: dict[str, str]) -> None:
    """Each component is combined in the order that it has alone, so its bits are the same."""
    values = [
        masked(k.whole(r.arg), masks.get("c", ""), identity(r.combine, k.dtypes[r.name])) for r in b.reduces
    ]
    together(k, b.reduces, values)


def together(k: Kernel, reduces: Sequence[Reduce], values: Sequence[str]) -> None:
    """The values reduced along their columns."""
    if len(reduces) == 1:
        combine = COMBINE[reduces[0].combine]
        k.w.line(f"{reduces[0].name} = tl.reduce({values[0]}, 1, {combine}, keep_dims=True)")
        return
    kinds = tuple(r.combine for r in reduces)
    k.pairs.add(kinds)
    names = ", ".join(r.name for r in reduces)
    k.w.line(f"{names} = tl.reduce(({', '.join(values)}), 1, {_name(kinds)}, keep_dims=True)")


def helpers(pairs: Iterable[tuple[str, ...]]) -> str:
    """The functions that such reductions combine with."""
    out = []
    for kinds in sorted(pairs):
        given = ", ".join([*(f"a{i}" for i in range(len(kinds))), *(f"b{i}" for i in range(len(kinds)))])
        made = ", ".join(f"{COMBINE[kind]}(a{i}, b{i})" for i, kind in enumerate(kinds))
        out.append(f"@triton.jit\ndef {_name(kinds)}({given}):\n    return {made}\n\n\n")
    return "".join(out)


def _name(kinds: Sequence[str]) -> str:
    return f"_{'_'.join(kinds)}"


def _mergeable(k: Kernel, s: Reduce) -> bool:
    """All columns of every row of the tile; a value of the columns alone has another shape."""
    return s.axis == "row" and k.axes[s.arg] != "c"


def _depths(work: Sequence[Stmt]) -> dict[str, int]:
    """How many reductions along the row lie behind each value, itself among them."""
    depth: dict[str, int] = {}
    for s in work:
        behind = max((depth.get(n, 0) for n in _needs(s)), default=0)
        for name in _makes(s):
            depth[name] = behind + (isinstance(s, Reduce) and s.axis == "row")
    return depth


def _needs(s: Stmt) -> tuple[str, ...]:
    if isinstance(s, Store):
        return (s.value,)
    if isinstance(s, Load):
        return (s.row,) if s.row else ()
    return s.args if not isinstance(s, Reduce) else (s.arg, *s.about)


def _makes(s: Stmt) -> set[str]:
    return set() if isinstance(s, Store) else {s.name}
