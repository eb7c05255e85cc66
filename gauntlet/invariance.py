"""Equal rows have equal results, wherever they stand in a batch.

A first or last row that is a little wrong may be within what roundings excuse, for nearly all values. But a
kernel computes every row in one way, so that where rows are alike their results are, bit for bit but for code
of its own for what vectors or tiles leave over. So results of equal rows are held to each other: they may be
apart by what random roundings on the way (`meaning.rounded`) do to two of them, and by the rounding of the
result. No reference has to be computed for that as long as none differ.

It is asked of results that depend on one row only. Which do is asked of the float64 meaning: one row of all
leaves and cotangents is drawn anew, and of the others nothing may change. What is summed over rows has no row
for each; there one row after the other flows back alone, and gives the same: all other terms are zero.

Models whose results do not change with the place in a batch are called batch-invariant; as a test it is a
metamorphic relation (Chen, Cheung and Yiu, 1998).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from esper_ir.opdef import Contraction, Opaque
from esper_ir.registry import lookup
from gauntlet import accuracy, equal, inputs, meaning, medley
from gauntlet.stage import Context, Failed, Outcome, Passed, Recipe, Skipped
from gauntlet.subject import Subject

COUNT, BEYOND, LARGE, ROWS = 48, 8, 4, 3
"""Draws at small sizes, at each that bring another kernel, and at each large ones; rows of the smallest."""
PROBES = ("normal", "x10", "shifted")
"""Draws with which one row is tried against the others: which element is the largest hides what depends on
it."""
TWO = 2.0
"""Rows are as far apart as two of them are off, at most."""
WIDE_ROUNDINGS = 1e-10
"""Of the largest element: what float64 results may differ by that are one number."""
_found: WeakKeyDictionary[Subject, dict[str, frozenset[str]]] = WeakKeyDictionary()
Flowing = Sequence[Tensor | None]
Given = tuple[Mapping[str, Tensor], Flowing]


def tried(context: Context, deep: Iterable[dict[str, int]]) -> Iterator[tuple[str, dict[str, int], int]]:
    """Draws of this block, sizes and seeds, `deep`: large sizes. None in a hurry, nor where every case is
    dear, nor beside products."""
    subject = context.subject
    if context.quick or subject.heavy or _products(subject):
        return
    first, deep = context.seed % medley.FIRST * (medley.COUNT << 3), list(deep)
    for dim in subject.base_dims():
        if not labels(subject, dim):
            continue
        small = {d.name: subject.nearest(d.name, 1) for d in subject.launch.interface.dims}
        small[dim] = subject.nearest(dim, ROWS)
        base, *larger = subject.regions
        sizes = [dims for dims in (small, base) if dims[dim] > 1]
        each_of = [sizes[number % len(sizes)] for number in range(COUNT if sizes else 0)]
        for dims in larger:
            few = subject.elements(dims) <= medley.ELEMENTS and dims[dim] > 1
            each_of += [dims] * (BEYOND if few else 0)
        each_of += [dims for dims in deep for _ in range(LARGE if dims[dim] > 1 else 0)]
        for number, dims in enumerate(each_of):
            yield equal.named(dim, first + number), dims, context.seed + number


def labels(subject: Subject, dim: str) -> frozenset[str]:
    """Outputs, and gradients as "d(x)", whose every index along the dim depends on that index only."""
    kept = _found.setdefault(subject, {})
    if dim not in kept:
        kept[dim] = frozenset(_independent(subject, dim))
    return kept[dim]


def _independent(subject: Subject, dim: str) -> set[str]:
    axes = _axes(subject, dim)
    leaves = [kind for _, _, kind in subject.leaves]
    if any(equal.axis(t, dim) is None for t in leaves if any(dim in d.symbols() for d in t.shape)):
        return set()
    dims = {d.name: subject.nearest(d.name, ROWS) for d in subject.launch.interface.dims}
    if dims[dim] < 2:
        return set()
    for turn, draw in enumerate(PROBES):
        one = Recipe("numerics", dims, draw, cotangent=draw, seed=turn, repeat=2)  # drawn, also in a replay
        given, other = (_given(subject, replace(one, seed=s)) for s in (turn, turn + len(PROBES)))
        changed = _replaced(subject, dim, given, other)
        before, after = (_meant(subject, each) for each in (given, changed))
        for label in list(axes):
            rows = torch.arange(dims[dim]) != 1
            kept = [t.movedim(axes[label], 0).cpu()[rows] for t in (before[label], after[label])]
            if not torch.equal(*(torch.nan_to_num(t) for t in kept)):
                del axes[label]
    return set(axes)


def _axes(subject: Subject, dim: str) -> dict[str, int]:
    """Where the dim is, by label, of results that have it."""
    found = {name: equal.axis(kind, dim) for name, _, kind in subject.results}
    kinds = {name: kind for name, _, kind in subject.leaves}
    found |= {f"d({n})": equal.axis(kinds[n], dim) for n in subject.launch.interface.differentiable}
    return {label: at for label, at in found.items() if at is not None}


def _given(subject: Subject, recipe: Recipe) -> Given:
    _, meant = inputs.case(subject, recipe)
    where = next(iter(meant.values())).device
    return meant, inputs.cotangents(subject, recipe, where)


def _replaced(subject: Subject, dim: str, given: Given, other: Given) -> Given:
    """The second row of all that have one is that of the other."""

    def mixed(one: Tensor, another: Tensor, at: int | None) -> Tensor:
        if at is None:
            return one
        out = one.clone()
        out.select(at, 1).copy_(another.select(at, 1))
        return out

    leaves = {n: mixed(given[0][n], other[0][n], equal.axis(kind, dim)) for n, _, kind in subject.leaves}
    flows = [
        None if a is None or b is None else mixed(a.contiguous(), b, equal.axis(kind, dim))
        for (_, _, kind), a, b in zip(subject.results, given[1], other[1], strict=True)
    ]
    return leaves, flows


def _meant(subject: Subject, given: Given) -> dict[str, Tensor]:
    """Results and gradients in float64, by label."""
    values, flowing = given
    found = dict(zip(subject.blueprint.outputs, meaning.outputs(subject, values, "float64"), strict=True))
    wanted = subject.launch.interface.differentiable
    if not wanted:
        return found
    grads = meaning.gradients(subject, values, flowing, wanted, "float64")
    return found | {f"d({n})": t for n, t in grads.items()}


@dataclass(frozen=True)
class Alike:
    """`found`: results that are alike, one by index along its first dim. `exact`: what they are in float64,
    in the same form. `nearby`: some of them with random roundings, by the number of a draw."""

    label: str
    found: Tensor
    exact: Callable[[], Tensor]
    nearby: Callable[[int], Tensor]


def of_rows(
    subject: Subject, recipe: Recipe, results: Iterable[tuple[str, Tensor]],
    exact: Callable[[], Mapping[str, Tensor]], nearby: Callable[[int], Mapping[str, Tensor]],
) -> Iterator[Alike]:  # fmt: skip
    """Rows of each (label, result) that has one for every equal row; `exact` and `nearby` give float64 ones
    by label, without what stands in it behind a space."""
    dim = equal.dim_of(recipe.draw)
    asked, axes = labels(subject, dim), _axes(subject, dim)

    def lined(found: Mapping[str, Tensor], name: str) -> Tensor:
        return found[name].movedim(axes[name], 0)

    for label, got in results:
        name = label.partition(" ")[0]
        if name in asked:
            rows = got.movedim(axes[name], 0)
            yield Alike(
                label, rows, lambda n=name: lined(exact(), n), lambda at, n=name: lined(nearby(at), n)
            )


def one_by_one(subject: Subject, recipe: Recipe, flowing: Flowing) -> dict[int, Flowing]:
    """Cotangents of which one row flows back alone, by its number: the first, the last and two others."""
    dim = equal.dim_of(recipe.draw)
    count = recipe.dims[dim]
    some = random.Random(recipe.seed).sample(range(count), min(2, count))
    return {row: _only(subject, dim, flowing, row) for row in dict.fromkeys((0, count - 1, *some))}


def _only(subject: Subject, dim: str, flowing: Flowing, row: int) -> Flowing:
    out: list[Tensor | None] = []
    for (_, _, kind), flow in zip(subject.results, flowing, strict=True):
        at = equal.axis(kind, dim)
        if flow is None or at is None:
            out.append(flow)
            continue
        alone = torch.zeros_like(flow, memory_format=torch.contiguous_format)
        alone.select(at, row).copy_(flow.select(at, row))
        out.append(alone)
    return out


def summed(subject: Subject, recipe: Recipe) -> tuple[str, ...]:
    """Gradients among those that are wanted which are summed over the equal rows, where every output has a
    row for each and depends on no other."""
    dim = equal.dim_of(recipe.draw)
    asked, axes = labels(subject, dim), _axes(subject, dim)
    if not all(name in asked for name, _, kind in subject.results if kind.dtype.is_floating):
        return ()
    return tuple(n for n in recipe.wanted if f"d({n})" not in axes)


def judged(recipe: Recipe, results: Iterable[Alike]) -> Outcome:
    """The first that are too far apart, or how far they are in units of what may be."""
    worst, unlike = 0.0, list[str]()
    for each in results:
        if torch.equal(each.found[1:], each.found[:-1]):
            continue
        exact = each.exact()
        if not _alike(exact):
            unlike.append(each.label)
            continue
        draws = torch.stack([each.nearby(at) for at in range(accuracy.SHAKES + accuracy.MORE_SHAKES)])
        margin = _margin(each.found, exact, draws)
        if margin > 1:
            how = f"differs by {margin:.3g} times what roundings do"
            if not math.isfinite(margin):
                how = "is inf or NaN in some only" if each.found.is_floating_point() else "is another number"
            return Failed(f"{each.label} at {recipe}: of equal rows it {how}")
        worst = max(worst, margin)
    if unlike:
        return Skipped(f"{', '.join(unlike)}: of equal rows it differs in float64 too")
    return Passed({"rows_apart": worst})


def _alike(exact: Tensor) -> bool:
    """But for roundings of float64, of sums in another order."""
    if not exact.is_floating_point():
        return torch.equal(exact[1:], exact[:-1])
    size = float(torch.nan_to_num(exact, posinf=0.0, neginf=0.0).abs().max()) if exact.numel() else 0.0
    return torch.allclose(exact, exact[:1], rtol=0.0, atol=WIDE_ROUNDINGS * size, equal_nan=True)


def _products(subject: Subject) -> bool:
    """Whether there is a product anywhere, or a library's own algorithm. Libraries order the terms of a
    product as its place in a tile wants it, so that rows differ, and whatever comes after may make more of
    it: nothing is known of them."""
    graphs = [subject.flat, *([subject.flat_joint[0]] if subject.launch.interface.differentiable else [])]
    nodes = (node for graph in graphs for node in graph)
    return any(isinstance(lookup(node.op).lowering, Contraction | Opaque) for node in nodes)


def _margin(found: Tensor, exact: Tensor, draws: Tensor) -> float:
    """How far results are apart, in units of what `draws` of them with random roundings allow. Near the
    largest number nothing is known; what is no number beside one is too far, and so is another whole number
    where no rounding changes that."""
    same = ((found == found[:1]) | (found.isnan() & found[:1].isnan())).all(0)
    if not found.is_floating_point():
        decided = (draws == exact[:1]).flatten(0, 1).all(0)
        return math.inf if bool((~same & decided).any()) else 0.0
    info, rows = torch.finfo(found.dtype), found.double()
    moved = (draws - exact[:1]).abs().flatten(0, 1).amax(0)
    allowed = TWO * moved + info.eps * exact[0].abs() + info.smallest_normal
    apart = torch.nan_to_num(rows.amax(0) - rows.amin(0), nan=torch.inf)
    told = torch.where(~same & (exact[0].abs() + allowed < info.max), apart / allowed, 0.0)
    return float(told.max()) if told.numel() else 0.0
