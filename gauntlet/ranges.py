"""Values at the ends of what a type holds, in one tensor at a time: two that are far out hide each other.

infinite    a few infinities of either sign, in rows of their own, among small exact numbers and zeros; the
            others have many exact zeros, so that infinities meet them
small       so small that a product of three is nothing; also all of them
huge        so large that the square of it is almost too large
subnormal   about the smallest normal number; on the CPU only: on a card the functions of the compiler take
            subnormal arguments for zero
far         sixteen times normal: where exponentials are almost nothing beside others

undefined   NaN in the place of those infinities, of cotangents only: what a mask keeps is passed on

A draw is named by one of these and a leaf ("far x"); a cotangent by one of them alone.

turned      one leaf all negative among others that are all positive, under infinities that flow back: where
            several ways of a gradient meet in a sum, infinities of either sign meet there. Of leaves with
            either sign a sum over eight terms is nearly always undefined before, and hides what became of one
against     "infinite x against w": the same forwards. Infinities in x among others that are all positive, but
            for w, which is all negative: what x becomes by a long way (inf - inf in a product) does not hide
            what it is by a short one. Against itself: no other is negative
among       "infinite x among specks": the others are zero, or whole, half and next to nothing, so that
            infinities meet that too: it is not zero. Of blocks without sums only: what it leaves of one that
            cancels depends on the order
over        "far w over x": w far out (eight times normal), x huge. A share that is almost nothing is felt in
            a product with a number that is far larger than what stands beside it. Shares of exp(-87) and less
            are subnormal, and a card's functions give zero for them: no row of eight times normal has any
"""

from __future__ import annotations

import torch
from torch import Tensor

from esper_ir.opdef import Creation, Movement, Opaque, Pointwise
from esper_ir.registry import lookup
from esper_ir.types import DType
from gauntlet.subject import Subject

FAR, INFINITE, FEW, TURNED, UNDEFINED = "far", "infinite", "few", "turned", "undefined"
AGAINST, OVER, AMONG, APART = " against ", " over ", " among ", "apart"
HOW = (INFINITE, "small", "huge", "subnormal", FAR)
OTHERS = {INFINITE: "ties", "small": "ties", "subnormal": "ties"}
"""How the other leaves are drawn, where not normal: what is lost in a sum shows where the rest of it is zero.
"""
SPECKS = "specks"
COTANGENTS = (FEW, INFINITE, UNDEFINED, "small", "huge", "subnormal")
LEAVES, OPPOSED = 8, 4
"""Leaves that are taken to the ends, of a block with more; and that are tried against every other."""
SHORT = {"small": 2.0**-10, "huge": 2.0**6, "subnormal": 2.0**-16, FAR: 16.0, APART: 8.0}
WIDE = {"small": 2.0**-60, "huge": 2.0**56, "subnormal": 2.0**-128, FAR: 16.0, APART: 8.0}
"""Factors on normal values; of float16, and of the types with the exponents of float32 or more."""
NUMBERS = (*[0.0] * 8, -1.0, -0.5, 0.5, 1.0)
MOST, FLOWING, SHARE = 4, 16, 8
"""Infinities in a leaf, and in a cotangent, where a mask may hide half; in short ones at most one of so many
elements."""


def names(subject: Subject, *, how: tuple[str, ...] = HOW) -> list[str]:
    """Draws of this block, leaf by leaf."""
    among = f"{AMONG}{SPECKS}" if elementwise(subject) else ""
    possible = _possible(subject, how)
    return [
        "small",
        *(f"{h} {n}{among if h == INFINITE else ''}" for n in leaves(subject) for h in possible),
    ]


def elementwise(subject: Subject) -> bool:
    """Whether no element of a result depends on more than one of each leaf."""
    kinds = (Pointwise, Movement, Creation)
    return all(isinstance(lookup(node.op).lowering, kinds) for node in subject.flat.nodes)


def opposed(subject: Subject) -> list[str]:
    """Draws of an infinite leaf against another and against itself; of many, against the next one only."""
    found = leaves(subject)
    if not _possible(subject, (INFINITE,)) or len(found) < 2:
        return []
    return [f"{INFINITE} {one}{AGAINST}{other}" for one, other in _met(found)]


def over(subject: Subject) -> list[str]:
    """Draws of a leaf far out with another that is huge; of many, with the next one only."""
    return [f"{FAR} {one}{OVER}{other}" for one, other in _met(leaves(subject)) if one != other]


def _met(found: list[str]) -> list[tuple[str, str]]:
    others = len(found) if len(found) <= OPPOSED else 2
    rows = [(n, [*found[at:], *found[:at]][:others]) for at, n in enumerate(found)]
    return [(one, other) for one, against in rows for other in against]


def leaves(subject: Subject) -> list[str]:
    """Floating leaves that are given; spread over them where there are many."""
    found = [n for n, kind, t in subject.leaves if t.dtype.is_floating and kind != "constant"]
    step = -(-len(found) // LEAVES)
    return found[:: max(step, 1)]


def cotangents(subject: Subject) -> list[str]:
    """Cotangents of this block."""
    return _possible(subject, COTANGENTS)


def pairs(subject: Subject) -> list[tuple[str, str]]:
    """(draw, cotangent) of gradients: where an infinity may meet a zero, both stand close; what is far out
    flows back alone."""
    with_leaves = {INFINITE: FEW, FAR: FEW, "subnormal": "huge"}
    with_cotangents = {INFINITE: FEW, UNDEFINED: FEW, FEW: "ties"}
    given = [(draw, with_leaves.get(draw.partition(" ")[0], "normal")) for draw in names(subject)]
    flowing = [(with_cotangents.get(c, "normal"), c) for c in cotangents(subject)]
    signs = [f"{TURNED} {n}" for n in leaves(subject)]
    more = [(draw, c) for c in cotangents(subject) if c == INFINITE for draw in ("normal", *signs)]
    return [("zeros", "normal"), *more, *flowing, *given]


def away(subject: Subject) -> list[tuple[str, str]]:
    """Those of `pairs` where one leaf is far out: of one that is a single row, one draw has its largest at
    one place, and a little of it where it does not belong is felt from there only."""
    return [(f"{FAR} {name}", FEW) for name in leaves(subject)]


def _possible(subject: Subject, how: tuple[str, ...]) -> list[str]:
    """A library's own algorithm may spread an infinity (Winograd's adds and subtracts it; attention in blocks
    has other rows of NaN): blocks with one are not given any."""
    calls = any(isinstance(lookup(node.op).lowering, Opaque) for node in subject.flat.nodes)
    left_out = {
        *([INFINITE, UNDEFINED] if calls else []),
        *(["subnormal"] if subject.device.type != "cpu" else []),
    }
    return [h for h in how if h not in left_out]


def at_an_end(how: str) -> bool:
    """Of a draw or a cotangent: whether it has infinities, what is nearly one, or what is held by itself."""
    return how.partition(" ")[0] in (INFINITE, UNDEFINED, TURNED, FAR, "huge", "special")


def of_leaf(draw: str, leaf: str) -> str:
    """How a leaf is drawn in a draw of the whole block; draws of other kinds are the same for all leaves."""
    how, _, moved = draw.partition(" ")
    if how == TURNED:
        return "below" if moved == leaf else "above"
    if how not in HOW or not moved:
        return draw
    moved, _, among = moved.partition(AMONG)
    if among:
        return how if moved == leaf else among
    moved, _, lifted = moved.partition(OVER)
    if lifted and leaf in (moved, lifted):
        return "huge" if leaf == lifted else APART
    moved, _, below = moved.partition(AGAINST)
    if below and leaf != moved:
        return "below" if leaf == below else "above"
    return how if moved == leaf else OTHERS.get(how, "normal")


def _infinite(shape: tuple[int, ...], generator: torch.Generator, most: int) -> Tensor:
    value = few(shape, generator)
    if not value.numel():
        return value
    lone = value.dim() < 2 or value.numel() == value.shape[-1]
    rows = value.reshape(-1, 1 if lone else value.shape[-1])
    count = max(1, min(most, len(rows), value.numel() // SHARE))
    at = torch.randperm(len(rows), generator=generator)[:count]
    at[0] = torch.where((at == len(rows) - 1).any(), at[0], len(rows) - 1)  # where loops end
    column = torch.randint(0, rows.shape[1], (count,), generator=generator)
    first = torch.randint(0, 2, (), generator=generator)
    sign = 1 - 2 * ((first + torch.arange(count)) % 2)  # both, where there are two
    rows[at, column] = sign.double() * torch.inf
    return value


def few(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Two of three are zero, the rest whole and half numbers, in float64."""
    places = torch.randint(0, len(NUMBERS), shape, generator=generator)
    return torch.tensor(NUMBERS, dtype=torch.float64)[places]


def drawn(
    how: str, shape: tuple[int, ...], dtype: DType, generator: torch.Generator, most: int = MOST
) -> Tensor:
    """A tensor of the type; with at most so many infinities."""
    out = getattr(torch, dtype.value)
    if how == UNDEFINED:
        value = _infinite(shape, generator, most)
        return value.masked_fill(value.isinf(), torch.nan).to(out)
    if how == SPECKS:
        tiny = torch.rand(shape, generator=generator) < 0.5
        factor = (SHORT if dtype is DType.float16 else WIDE)["small"]
        halves = torch.randint(-2, 3, shape, generator=generator).double() / 2
        return torch.where(tiny, halves * factor, halves).to(out)
    if how in (INFINITE, FEW):
        return (_infinite(shape, generator, most) if how == INFINITE else few(shape, generator)).to(out)
    factor = (SHORT if dtype is DType.float16 else WIDE)[how]
    return (torch.randn(shape, generator=generator).double() * factor).to(out)


OWN = (INFINITE, UNDEFINED, FEW, SPECKS, *WIDE)
"""What `drawn` knows."""
