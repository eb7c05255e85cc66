"""The tensors of a case, from its recipe or as they were stored."""

from __future__ import annotations

import zlib
from dataclasses import replace
from math import log2, prod
from typing import Any

import torch
from torch import Tensor

from esper_ir import oracle
from esper_ir.eager import constant_value
from esper_ir.graph import Leaf
from esper_ir.types import Dim, TensorType
from gauntlet import edges, equal, hosted, lone, medley, ranges
from gauntlet.cases import Raw
from gauntlet.stage import Recipe
from gauntlet.subject import Subject

COTANGENT = medley.COTANGENT
HALVED = {f"from {n} bytes on": n for n in (8, 16)}
"""Where vectors of 8 or 16 bytes may be loaded and no longer ones: allocations begin at more."""
LAYOUTS = (*(name for name in oracle.LAYOUTS if name != "dense"), *HALVED)
COTANGENTS = (
    "ones", "rows", "columns", "one-hot", "zeros", "gaps", "strided", "alternating", "parts",
)  # fmt: skip
PART = 16
"""Neighbours that are alike in "parts", a hundred times normal: what flows back from sums over parts of a
row."""
OWN_DRAWS = (
    "unit", "negative", "sunk", "zeros", "gaps", "spikes", "tiny", "integers", "uneven", "above", "below",
    "tail", "dip", "holed", "seesaw",
)  # fmt: skip
"""Beside the battery of `esper_ir.oracle`: [0, 1); all negative; the mirror of shifted; all zero; rows that
begin or end with zeros, or have some in a row inside; a few values that overflow a bare exp; magnitudes near
the smallest that round to nothing when squared; whole numbers; rows of different mean and size, so that a
statistic of another row shows; whole and half numbers from 4 to 6, or from -6 to -4: of one sign, and every
sum of them is exact; rows whose last element outweighs the others, a positive or a negative one, since the
rest of a row after whole vectors or tiles is code of its own; those of one sign with the zeros of gaps, so
that sums are felt in rows that begin or end with zeros; large and small rows in turn, where rows are counted:
with cotangents that are small and large in turn no row outweighs another in a sum, and a little of a large
row in the next one does."""
LIFT = {torch.float16: 5.0}
"""Powers of two that the rows of "seesaw" go up and down; 10 of wider types."""
INTEGERS = "integers"
START, END = "start", "end"
"""Of a cotangent: only the first row flows back, or only the last, where loops over rows begin and end:
nothing hides what it gives. A little of each part of a sum in the place of as much of the next one is felt at
these two alone: all others lose as much as they get."""
HALVES, LAST = {"above": 5.0, "below": -5.0}, {"tail": 16.0, "dip": -16.0}
REPEATED = "repeated"
"""Of leaves: numbers as of "above", all rows as the first. Less its own mean a row has either sign, and so
has a sum of it over rows that differ: over these it has one sign in each column."""
BALANCED = "balanced"
"""Of leaves: whole numbers from 1 to 8 of which as many are negative in every row, so that it sums to zero.
Less their mean they are what they were, and sums of their products with whole numbers are exact in any order:
with no error of eager's to hide behind, a millionth of what comes from later rows is felt in a sum over many.
"""
TILE = 1 << 20
"""Elements that are drawn of a tensor that has more."""
PRIME = TILE + 7
SMOOTH = ("normal", "x10", "x0.1", "shifted", "sunk", "uneven")


def tensor_of(raw: Raw, device: torch.device) -> Tensor:
    dtype = getattr(torch, raw.dtype)
    if not raw.data:
        return torch.empty(raw.shape, dtype=dtype, device=device)
    return torch.frombuffer(bytearray(raw.data), dtype=dtype).reshape(raw.shape).to(device)


def raw_of(tensor: Tensor) -> Raw:
    dense = tensor.detach().cpu().contiguous()
    data = dense.reshape(-1).view(torch.uint8).numpy().tobytes()
    return Raw(str(dense.dtype).removeprefix("torch."), tuple(dense.shape), data)


def stored_form(subject: Subject, recipe: Recipe) -> dict[str, Raw]:
    """Everything that a replay needs."""
    out = {name: raw_of(tensor) for name, tensor in values(subject, recipe).items()}
    if recipe.cotangent:
        flowing = cotangents(subject, recipe)
        names = subject.blueprint.outputs
        out |= {COTANGENT + n: raw_of(c) for n, c in zip(names, flowing, strict=True) if c is not None}
    return out


def draws(subject: Subject, *, quick: bool) -> list[str]:
    """Names of value distributions to try."""
    names = [*oracle.DRAWS, *OWN_DRAWS]
    return [n for n in names if not quick or n not in ("x0.1", "integers", "tiny", "holed", "seesaw")]


def smooth_draws(subject: Subject) -> list[str]:
    """Those where every gradient is finite for any block that is finite on normal values."""
    return list(SMOOTH)


def _seed(recipe: Recipe, name: str, fixed: bool = False) -> int:
    """Every tensor of every case has its own stream; `fixed`: one for all sizes and cotangents."""
    rest = "" if fixed else f"{recipe.cotangent}:{sorted(recipe.dims.items())}"
    key = f"{recipe.seed}:{recipe.draw}:{rest}:{name}"
    return zlib.crc32(key.encode()) + (recipe.seed << 32)


def values(subject: Subject, recipe: Recipe) -> dict[str, Tensor]:
    """A tensor per leaf, laid out as the recipe says, where the artifact runs."""
    return case(subject, recipe)[0]


def case(subject: Subject, recipe: Recipe) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A tensor per leaf, twice: as the artifact gets it, and as the reference takes it, dense and where that
    is computed. Drawn on the CPU, so that every device gets the same."""
    meant = _drawn(subject, recipe, hosted.device(subject, recipe.dims))
    if recipe.layout == oracle.EXPANDED:  # the one layout with other values than were drawn
        meant = {n: _laid_out(recipe, t).contiguous() for n, t in meant.items()}
    return {n: _laid_out(recipe, t.to(subject.device)) for n, t in meant.items()}, meant


def _drawn(subject: Subject, recipe: Recipe, where: torch.device) -> dict[str, Tensor]:
    if subject.stored and not recipe.repeat > 1:
        return {name: subject.stored[name].to(where) for name, _, _ in subject.leaves}
    limits = oracle.index_limits(subject.graph)
    leaves = subject.blueprint.leaves
    drawn = {v.name: _leaf(subject, recipe, v, limits.get(v.name), where) for v in leaves}
    if recipe.draw.startswith(edges.DRAW):
        drawn = edges.moved(subject, recipe.draw, drawn, _seed(recipe, edges.DRAW))
    return lone.alone(subject, recipe.draw, drawn) if recipe.draw.startswith(lone.DRAW) else drawn


def _leaf(subject: Subject, recipe: Recipe, leaf: Leaf, limit: Any, where: torch.device) -> Tensor:
    """Leaves whose size never changes (weights) are the same in all cases of one seed and draw, and kept."""
    if leaf.kind == "constant":
        return constant_value(leaf).to(where)
    fixed = limit is None and all(d.static is not None for d in leaf.type.shape)
    named = next((m for m in (lone, edges, medley, equal) if recipe.draw.startswith(m.DRAW)), ranges)
    whole, how = recipe.draw, named.of_leaf(recipe.draw, leaf.name)
    kind = equal.single(whole, leaf.type) if named is equal else leaf.type
    recipe = replace(recipe, draw=how)
    seed = _seed(recipe, leaf.name, fixed)
    key = (leaf.name, recipe.draw, seed, where.type)
    if fixed and (kept := subject.kept.get(key)) is not None:
        return kept
    generator = torch.Generator().manual_seed(seed)
    # Draws other than "normal" mean something by rows, and cases of theirs are small.
    some = _drawn_rows(kind, recipe) if fixed or recipe.draw == "normal" else 0
    few = replace(kind, shape=(Dim.of(some), *kind.shape[1:])) if some else kind
    drawn = _draw(recipe.draw, few, recipe, generator, limit)
    scale = 1.0 if leaf.kind == "input" else parameter_scale(leaf.type)
    if leaf.type.dtype.is_floating and scale != 1.0:
        drawn = (drawn.double() * scale).to(drawn.dtype)
    drawn = _over_all(drawn.to(where), kind, recipe)
    drawn = equal.levelled(whole, leaf.type, drawn, recipe.dims) if named is equal else drawn
    if fixed:
        subject.kept.put(key, drawn, drawn.nbytes)
    return drawn


def parameter_scale(kind: TensorType) -> float:
    """Matrices are drawn with a variance near 1 over their rows, as initialisers do, so that sums of products
    stay near 1: by a power of two, so that whole numbers stay exact, and so do sums of their products."""
    rows = kind.shape[0].static if kind.rank >= 2 else None
    return 2.0 ** -round(log2(rows) / 2) if rows else 1.0


def _drawn_rows(kind: TensorType, recipe: Recipe) -> int:
    """Of a large tensor only the first rows are drawn, a number that no tile divides; 0 for all of them."""
    if kind.rank < 2:
        return 0
    rows, *rest = (d.value(recipe.dims) for d in kind.shape)
    some = max(TILE // max(prod(rest), 1), 1) | 1
    return some if some < rows else 0


def _over_all(drawn: Tensor, kind: TensorType, recipe: Recipe) -> Tensor:
    """All rows: it goes on with those that were drawn."""
    rows = kind.shape[0].value(recipe.dims) if kind.rank else 1
    if kind.rank < 2 or len(drawn) >= rows:
        return drawn
    return drawn.repeat(-(-rows // len(drawn)), *[1] * (kind.rank - 1))[:rows]


def _draw(
    name: str, kind: TensorType, recipe: Recipe, generator: torch.Generator, below: Dim | None
) -> Tensor:
    if name in ranges.OWN and kind.dtype.is_floating:
        shape = tuple(d.value(recipe.dims) for d in kind.shape)
        return ranges.drawn(name, shape, kind.dtype, generator)
    if name not in (*OWN_DRAWS, REPEATED, BALANCED, medley.ALIKE):
        return oracle.draw(name if name in oracle.DRAWS else "normal", kind, recipe.dims, generator, below)
    drawn = oracle.draw("normal", kind, recipe.dims, generator, below)
    if not kind.dtype.is_floating:
        return drawn
    wide = drawn.double()
    if name == "unit":
        wide = wide.frac().abs()
    elif name == "negative":
        wide = -wide.abs()
    elif name == "sunk":
        wide = wide - 5
    elif name == "zeros":
        wide = torch.zeros_like(wide)
    elif name == "gaps":
        wide = torch.where(_gaps(tuple(wide.shape), generator), 0.0, wide)
    elif name == "spikes":
        places = torch.rand(wide.shape, generator=generator) < 1 / 16
        wide = torch.where(places, wide * 100, wide)
    elif name == "uneven" and wide.dim() > 1:
        rows = (*wide.shape[:-1], 1)
        spread = torch.randint(-3, 4, rows, generator=generator).double().exp2()
        wide = wide * spread + 2 * spread * torch.randn(rows, generator=generator).double()
    elif name == medley.ALIKE and wide.numel():
        wide = wide.flatten()[0].expand(wide.shape)
    elif name == "tiny":
        wide = wide * 1e-5
    elif name == "integers":
        wide = (wide * 4).round()
    elif name in LAST and wide.dim():
        wide[..., -1:] = LAST[name] * (1 + wide[..., -1:].abs().clamp(max=2))
    elif name == "seesaw" and any(d.symbols() for d in kind.shape[:1]):
        wide = wide * _seesaw(wide, drawn.dtype)
    elif name in HALVES or name == "holed":
        wide = (wide * 2).round().clamp(-2, 2) / 2 + HALVES.get(name, HALVES["above"])
        holes = _gaps(tuple(wide.shape), generator) if name == "holed" else torch.zeros(())
        wide = torch.where(holes.bool(), 0.0, wide)
    elif name == BALANCED:
        wide = _balanced(tuple(wide.shape), generator) if wide.dim() else wide.round()
    elif name == REPEATED:
        wide = (wide * 2).round().clamp(-2, 2) / 2 + HALVES["above"]
        if any(d.symbols() for d in kind.shape[:1]):
            wide = wide[:1].expand_as(wide)
    return wide.to(drawn.dtype).contiguous()


def _gaps(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """True for up to half of every row, at its beginning, at its end or somewhere."""
    width, rows = shape[-1] if shape else 0, (*shape[:-1], 1)
    if width < 2:
        return torch.zeros(shape, dtype=torch.bool)
    length = torch.randint(1, width // 2 + 1, rows, generator=generator)
    place = torch.randint(0, 3, rows, generator=generator)
    inside = (torch.rand(rows, generator=generator) * (width - length + 1)).long()
    start = torch.where(place == 0, 0, torch.where(place == 1, width - length, inside))
    at = torch.arange(width).expand(shape)
    return (at >= start) & (at < start + length)


def _balanced(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    half = torch.randint(1, 9, (*shape[:-1], shape[-1] // 2), generator=generator).double()
    there = torch.rand(half.shape, generator=generator).argsort(-1)
    row = torch.cat([half, -half.gather(-1, there), half.new_zeros(*shape[:-1], shape[-1] % 2)], -1)
    return row.gather(-1, torch.rand(shape, generator=generator).argsort(-1))


def _seesaw(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """A factor for every row, up for even ones and down for odd ones."""
    sign = 1.0 - 2.0 * (torch.arange(rows.shape[0], dtype=torch.float64) % 2)
    return (LIFT.get(dtype, 10.0) * sign).exp2().reshape(-1, *[1] * (rows.dim() - 1))


def _laid_out(recipe: Recipe, tensor: Tensor) -> Tensor:
    """Replayed tensors are dense; their layout is made again."""
    if recipe.layout in HALVED:
        return oracle.at_offset(tensor, max(HALVED[recipe.layout] // tensor.element_size(), 1))
    layout = oracle.LAYOUTS.get(recipe.layout)
    return layout(tensor) if layout and recipe.layout != "dense" and tensor.dim() else tensor


def cotangent_kinds(subject: Subject) -> list[str]:
    """Ways in which gradients flow back; with several floating outputs also each of them absent."""
    floating = [name for name, _, kind in subject.results if kind.dtype.is_floating]
    return [*COTANGENTS, *(f"none:{name}" for name in floating if len(floating) > 1)]


def cotangents(subject: Subject, recipe: Recipe, where: torch.device | None = None) -> list[Tensor | None]:
    """One per output, where the artifact runs or where asked for; None for outputs that are not floating, or
    absent by the recipe."""
    out: list[Tensor | None] = []
    for name, _, kind in subject.results:
        stored = subject.stored.get(COTANGENT + name) if not recipe.repeat > 1 else None
        if not kind.dtype.is_floating or recipe.cotangent == f"none:{name}":
            out.append(None)
        else:
            out.append(_cotangent(recipe, name, kind, stored, where or subject.device))
    return out


def _cotangent(
    recipe: Recipe, name: str, kind: TensorType, stored: Tensor | None, device: torch.device
) -> Tensor:
    """Expanded on the device: a copy of an expanded tensor would be dense."""
    shape = tuple(d.value(recipe.dims) for d in kind.shape)
    dtype = getattr(torch, kind.dtype.value)
    generator = torch.Generator().manual_seed(_seed(recipe, COTANGENT + name))
    if recipe.cotangent == "ones":
        return torch.ones((), dtype=dtype, device=device).expand(shape)
    if recipe.cotangent == "rows":
        return torch.randn(shape[1:], generator=generator).to(device, dtype).expand(shape)
    if recipe.cotangent == "columns" and shape:
        return torch.randn((*shape[:-1], 1), generator=generator).to(device, dtype).expand(shape)
    if stored is not None:
        dense = stored.clone()
    elif recipe.cotangent in ranges.COTANGENTS:
        return ranges.drawn(recipe.cotangent, shape, kind.dtype, generator, ranges.FLOWING).to(device)
    elif (way := _way(recipe.cotangent, COTANGENT + name)) is not None:
        alike = recipe.cotangent.startswith(equal.DRAW)
        drawn = equal.single(recipe.cotangent, kind) if alike else kind
        dense = _draw(way, drawn, recipe, generator, None)
        dense = equal.levelled(recipe.cotangent, kind, dense, recipe.dims) if alike else dense
    elif recipe.cotangent == "zeros":
        dense = torch.zeros(shape, dtype=dtype)
    elif recipe.cotangent == "normal" and (some := _drawn_rows(kind, recipe)):
        drawn = torch.randn((some, *shape[1:]), generator=generator).to(dtype)
        dense = _over_all(drawn.to(device), kind, recipe)
    else:
        dense = torch.randn(shape, generator=generator).to(dtype)
    if stored is None:
        dense = _shaped(recipe.cotangent, dense, generator)
    dense = dense.to(device)
    return dense.t().contiguous().t() if recipe.cotangent == "strided" and dense.dim() == 2 else dense


def _way(cotangent: str, name: str) -> str | None:
    """How a leaf is drawn that is as this cotangent."""
    if (by := next((m for m in (medley, equal) if cotangent.startswith(m.DRAW)), None)) is not None:
        return by.of_leaf(cotangent, name)
    return cotangent if cotangent in (*HALVES, INTEGERS) else None


def _shaped(kind: str, dense: Tensor, generator: torch.Generator) -> Tensor:
    if kind == "one-hot" and dense.numel():
        flat = torch.zeros(dense.numel(), dtype=dense.dtype)
        flat[dense.numel() * 2 // 3] = 1
        return flat.reshape(dense.shape)
    if kind in (START, END) and dense.dim():
        dense[slice(1, None) if kind == START else slice(-1)] = 0
        return dense
    if kind == "alternating" and dense.numel():
        flat = dense.abs().reshape(-1)
        flat[1::2] *= -1
        return flat.reshape(dense.shape)
    if kind == "parts" and dense.dim():
        return dense[..., ::PART].repeat_interleave(PART, -1)[..., : dense.shape[-1]].contiguous() * 100
    if kind == "gaps":
        return torch.where(_gaps(tuple(dense.shape), generator), 0.0, dense)
    if kind == "seesaw" and dense.dim():
        return (dense.double() / _seesaw(dense, dense.dtype)).to(dense.dtype)
    return dense


def direction(recipe: Recipe, name: str, value: Tensor) -> Tensor:
    """A random direction in float64, of the size of normal values; of a large tensor a prime number of
    elements, again and again: rows differ."""
    generator = torch.Generator().manual_seed(_seed(recipe, f"direction:{name}"))
    count = value.numel()
    drawn = torch.randn(min(count, PRIME), generator=generator, dtype=torch.float64).to(value.device)
    return drawn.repeat(-(-count // max(len(drawn), 1)))[:count].reshape(value.shape)
