"""Values beside an edge of the function: where it has a kink or a step, and a little wrong means another
branch.

A backward that computes x w + b once more for the mask of a relu may have a factor wrong by a millionth. No
random draw shows that: it takes an element whose sum lies within a millionth of zero. So the draw "edge N"
takes normal values and moves one leaf until many arguments of the N-th edge lie close beside it: so close
that terms cancel, yet `NEAREST` to `FARTHEST` times as far as roundings on the way can move them, so that one
branch is right. Edges are read from the bodies of pointwise operators: comparisons, maximum, minimum, |x|,
sign.

So does "edge N, small x, huge w", from values one of which is next to nothing and another huge: a kernel that
takes small numbers for a little less is on the other side of the edge where they meet large ones.

One leaf is moved by Newton's method on the arguments that are chosen: all, or one of every row, or one of
every column, whichever makes each element of the leaf matter to one argument only. What is not reached stays
as drawn.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from esper_ir import oracle, reference
from esper_ir.graph import Node
from esper_ir.opdef import Pointwise
from esper_ir.registry import lookup
from esper_ir.scalar import Arg, Expr, Prim, walk
from gauntlet import bodies, meaning, ranges
from gauntlet.subject import Subject

DRAW = "edge "
MOST = 4
"""Edges that are tried, of a block with more."""
NEAREST, FARTHEST = 8.0, 64.0
ELEMENTS = 1 << 16
ENOUGH = 0.2
"""Share of the chosen arguments that have to be reached."""
BINARY = ("maximum", "minimum", "lt", "le", "gt", "ge", "eq", "ne")
UNARY = ("abs", "sign")
PLAIN = ("add", "sub", "mul", "div", "neg", "abs", "exp", "log", "sqrt", "rsqrt", "tanh", "sigmoid")
"""What an argument of an edge may be computed with inside one operator."""


@dataclass(frozen=True)
class Edge:
    """`distance` over the operands of `node` is zero at the edge."""

    node: Node
    distance: Expr


def names(subject: Subject) -> list[str]:
    """Draws of this block: none where it is smooth, or where a case is dear at any size."""
    if subject.heavy or subject.elements(dims(subject)) > ELEMENTS:
        return []
    return [f"{DRAW}{number}" for number in range(min(len(_edges(subject)), MOST))]


def scaled(subject: Subject) -> list[str]:
    """Draws of one leaf and its neighbour, either the small one; of a block with two leaves and more."""
    leaves = ranges.leaves(subject)
    near = list(dict.fromkeys(pair for a, b in pairwise([*leaves, *leaves[:1]]) for pair in ((a, b), (b, a))))
    return [
        f"{draw}, small {one}, huge {other}" for draw in names(subject) for one, other in near if one != other
    ]


def of_leaf(draw: str, leaf: str) -> str:
    """How a leaf is drawn before one is moved."""
    hows = (part.split(" ", 1) for part in draw.split(", ")[1:])
    return next((how for how, name in hows if name == leaf), draw)


def any_of(subject: Subject) -> bool:
    """Whether the function has an edge anywhere."""
    return bool(_edges(subject))


def dims(subject: Subject) -> dict[str, int]:
    """The sizes to try them at: those of most cases, or the smallest where tensors are large."""
    base = subject.base_dims()
    return base if subject.elements(base) <= ELEMENTS else subject.least_dims()


def _edges(subject: Subject) -> list[Edge]:
    """Spread over the graph where there are more than `MOST`."""
    found = [edge for node in subject.flat.nodes for edge in _of_node(subject, node)]
    step = max(1, len(found) // MOST)
    return found[::step][:MOST]


def _of_node(subject: Subject, node: Node) -> Iterator[Edge]:
    lowering = lookup(node.op).lowering
    kinds = [subject.flat.types[name].dtype for name in node.tensors]
    if not isinstance(lowering, Pointwise) or not kinds or not all(k.is_floating for k in kinds):
        return
    for part in dict.fromkeys(p for p in walk(lowering.body(dict(node.attrs))) if isinstance(p, Prim)):
        if part.name in BINARY:
            distance: Expr = Prim("sub", part.args)
        elif part.name in UNARY:
            distance = part.args[0]
        else:
            continue
        inside = [p for p in walk(distance) if isinstance(p, Prim)]
        if any(isinstance(p, Arg) for p in walk(distance)) and all(p.name in PLAIN for p in inside):
            yield Edge(node, distance)


def _distance(edge: Edge, known: Mapping[str, Any]) -> Tensor:
    operands = [known[r] if isinstance(r, str) else r for r in edge.node.inputs]
    return bodies.value(edge.distance, operands).double()


def moved(subject: Subject, draw: str, values: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    """The values with one leaf moved to the edge that the draw names; as they are where none can be."""
    edge = _edges(subject)[int(draw.removeprefix(DRAW).partition(",")[0])]
    wide = {n: t.double() if t.is_floating_point() else t for n, t in values.items()}
    generator = torch.Generator().manual_seed(seed)
    start = _distance(edge, reference.evaluate_all(subject.flat, wide, precision="float64"))
    leaves = [n for n, kind, t in subject.leaves if t.dtype.is_floating and kind != "constant"]
    best, reached = dict(values), 0.0
    for name in sorted(leaves, key=lambda n: -values[n].numel()):
        for chosen in _choices(start, values[name].numel(), generator):
            there = _solved(subject, edge, wide, name, chosen, generator)
            if there is None:
                break  # the edge does not depend on this leaf
            found = {**values, name: _near(there, values[name])}
            share = _reached(subject, edge, found, chosen)
            if share > reached:
                best, reached = found, share
            if reached >= ENOUGH:
                return best
    return best


FAR_OUT = 0.75
"""Of the exponents of a type: further out a leaf is not moved. Sums of larger numbers overflow in one order
and not in another."""


def _near(there: Tensor, drawn: Tensor) -> Tensor:
    """The moved leaf in its type, as drawn where it would be far out."""
    most = torch.finfo(drawn.dtype).max ** FAR_OUT
    return torch.where(there.abs() <= most, there, drawn.double()).to(drawn.dtype)


def _choices(start: Tensor, elements: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Masks of the arguments that are to be moved, as ones and zeros."""
    ones = torch.ones_like(start)
    if elements >= start.numel():
        yield ones
    if start.dim() < 2 or not start.numel():
        return
    flat = torch.zeros_like(start).reshape(-1, start.shape[-1])
    rows, columns = flat.shape
    picked = torch.randint(0, columns, (rows, 1), generator=generator).to(flat.device)
    yield flat.scatter(1, picked, 1.0).reshape(start.shape)
    picked = torch.randint(0, rows, (1, columns), generator=generator).to(flat.device)
    yield flat.scatter(0, picked, 1.0).reshape(start.shape)


def _solved(
    subject: Subject, edge: Edge, wide: Mapping[str, Tensor], name: str, chosen: Tensor,
    generator: torch.Generator,
) -> Tensor | None:  # fmt: skip
    """The leaf for which the chosen arguments lie beside the edge: to the edge first, then as far from it as
    roundings there ask for. None where they do not depend on it."""
    leaf = wide[name]
    target = torch.zeros_like(chosen)
    for step in range(4):
        if step == 2:
            off = _noise(subject, edge, {**wide, name: leaf})
            far = torch.rand(chosen.shape, generator=generator, dtype=torch.float64).to(chosen.device)
            side = torch.randint(0, 2, chosen.shape, generator=generator).to(chosen.device) * 2 - 1
            target = side * off * NEAREST * (FARTHEST / NEAREST) ** far
        change = _newton(subject, edge, {**wide, name: leaf}, name, chosen, target)
        if change is None:
            return None
        leaf = leaf - change
    return leaf


def _newton(
    subject: Subject, edge: Edge, wide: Mapping[str, Tensor], name: str, chosen: Tensor, target: Tensor
) -> Tensor | None:
    """The least change of the leaf that moves every chosen argument to its target, to first order:
    J^T (J J^T)^-1 of the differences, where J J^T is diagonal."""
    with torch.enable_grad():
        leaf = wide[name].clone().requires_grad_()
        known = reference.evaluate_all(subject.flat, {**wide, name: leaf}, precision="float64")
        here = _distance(edge, known)
        if not here.requires_grad:
            return None
        weights = chosen.clone().requires_grad_()
        (slope,) = torch.autograd.grad(here, leaf, weights, create_graph=True, allow_unused=True)
        if slope is None or not bool(slope.any()):
            return None
        if slope.requires_grad:
            (square,) = torch.autograd.grad(slope, weights, slope.detach(), retain_graph=True)
        else:
            square = chosen
        differences = torch.where(square > 0, (here.detach() - target) / square, 0.0) * chosen
        (change,) = torch.autograd.grad(here, leaf, torch.nan_to_num(differences))
    return torch.nan_to_num(change.detach(), nan=0.0, posinf=0.0, neginf=0.0)


SHAKES = 4


def _noise(subject: Subject, edge: Edge, wide: Mapping[str, Tensor]) -> Tensor:
    """How far roundings on the way move each argument, in the shortest type that the block uses."""
    here = _distance(edge, reference.evaluate_all(subject.flat, wide, precision="float64"))
    off = torch.zeros_like(here)
    for turn in range(SHAKES):
        known = meaning.shaken(subject, subject.flat, wide, turn)
        off = torch.maximum(off, (_distance(edge, known) - here).abs())
    types = [t.dtype for _, _, t in (*subject.leaves, *subject.results) if t.dtype in oracle.BOUNDS]
    coarsest = max(oracle.BOUNDS[dtype].roundoff for dtype in types)
    return torch.maximum(off, LUCK * _typical(off)) * max(coarsest / subject.roundoff, 1.0)


LUCK = 0.5
"""Of what is usual: where no more than this was drawn, it was by luck."""


def _typical(off: Tensor) -> Tensor:
    """What is usual in the row and the column of each: a few draws of one element may all be next to nothing,
    and among thousands of arguments some are."""
    fine = torch.nan_to_num(off, nan=0.0, posinf=0.0, neginf=0.0).square()
    if off.dim() < 2:
        return fine.mean().sqrt() if off.numel() else off
    others = tuple(range(off.dim() - 1))
    rows, columns, all_of = fine.mean(-1, keepdim=True), fine.mean(others, keepdim=True), fine.mean()
    return torch.where(all_of > 0, rows * (columns / all_of), 0.0).sqrt()


def _reached(subject: Subject, edge: Edge, values: Mapping[str, Tensor], chosen: Tensor) -> float:
    """Share of the chosen arguments that lie beside the edge once the leaf is rounded to its type."""
    wide = {n: t.double() if t.is_floating_point() else t for n, t in values.items()}
    here = _distance(edge, reference.evaluate_all(subject.flat, wide, precision="float64")).abs()
    off = _noise(subject, edge, wide)
    good = (here > 2 * off) & (here < 2 * FARTHEST * off) & (chosen > 0)
    return float(good.sum() / chosen.sum().clamp(min=1))
