"""Numeric bounds and the input battery: one judge for tuning, proving and tests.

A result is right when its error against float64 is no larger than what eager torch makes itself (times a
small factor), and when no single element is further off than its own bound. There is no flat tolerance
anywhere: every bound follows the magnitude of the values, the length of accumulations and the unit roundoff
of the dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from esper_ir.expand import expand
from esper_ir.graph import Graph, Node
from esper_ir.opdef import Contraction, Opaque, Reduction, Scan
from esper_ir.positions import index_limits as index_limits
from esper_ir.registry import lookup
from esper_ir.types import Dim, DimSpec, DType, TensorType


@dataclass(frozen=True)
class Bounds:
    """Numbers of the rule for one dtype of the result.

    `roundoff`: unit roundoff u (half the spacing of numbers near 1). `rmse`: m of "RMSE <= m x eager's RMSE".
    `floor`: where eager is exact, an RMSE of floor x u x rms(value) is accepted. `element`: factor on eager's
    largest error in the same row, for one element. `tiny`: spacing of the subnormal numbers.
    """

    roundoff: float
    rmse: float
    floor: float
    element: float
    tiny: float


BOUNDS: Mapping[DType, Bounds] = {
    DType.float64: Bounds(2.0**-53, 2.0, 4.0, 4.0, 2.0**-1074),
    DType.float32: Bounds(2.0**-24, 2.0, 4.0, 4.0, 2.0**-149),
    DType.bfloat16: Bounds(2.0**-8, 3.0, 1.0, 4.0, 2.0**-133),
    DType.float16: Bounds(2.0**-11, 3.0, 1.0, 4.0, 2.0**-24),
}
"""m is 2 for float32 and 3 for the short types: the factors of torch's own accuracy check
(torch._dynamo.utils.same).
"""

SPREAD = 4.0
"""Errors of an accumulation of length K grow as sqrt(K) u; an element may be SPREAD deviations off."""
SHORT_ROW = 16
"""Rows shorter than this do not show eager's spread: the whole tensor is taken."""


@dataclass(frozen=True)
class Comparison:
    """`rmse_ratio`: own RMSE over eager's (0 when both are exact, inf when only eager is). `worst_margin`:
    largest error in units of its bound (passes up to 1), at index `where`; `rmse_margin`: own RMSE in
    units of what is allowed. `reason`: one sentence when it did not pass. `top`: the largest magnitude of the
    result and of the float64 meaning, inf beside infinities and NaN.
    """

    passed: bool
    rmse_ratio: float
    worst_margin: float
    where: tuple[int, ...] | None
    reason: str = ""
    rmse_margin: float = 0.0
    top: float = math.inf

    def far_from_overflow(self, dtype: DType) -> bool:
        """Whether even the square of every element is a number of the type."""
        return self.top <= math.sqrt(_LARGEST[dtype])


def element_bound(fp64: Tensor, eager: Tensor, accumulation: int, dtype: DType) -> Tensor:
    """Largest error allowed per element (float64, shape of `fp64`, finite values only make sense).

    u |y|: the rounding of the result. element x (largest eager error of the row): what the roundings inside
    the block do on these values; where eager was lucky all along a row, once more u |y|, what a value rounded
    before the last operation does at a derivative of 1. SPREAD sqrt(K) u_compute max(|y|, rms): another order
    of summation. After Higham, Accuracy and Stability of Numerical Algorithms, ch. 3, with the probabilistic
    sqrt(K); docs/bounds.md derives it.
    """
    error = torch.nan_to_num((eager.double() - fp64).abs(), nan=0.0, posinf=0.0, neginf=0.0)
    return _bound(fp64.abs(), error, _rms(fp64[torch.isfinite(fp64)].double()), accumulation, dtype)


def _bound(size: Tensor, error: Tensor, rms: float, accumulation: int, dtype: DType) -> Tensor:
    """`element_bound` from |fp64|, eager's error and the root mean square of fp64, all finite."""
    bounds, inner = BOUNDS[dtype], BOUNDS[dtype.compute]
    whole = error.numel() == 0 or error.ndim < 1 or error.shape[-1] < SHORT_ROW
    row = (error.max() if error.numel() else error.sum()) if whole else error.amax(-1, keepdim=True)
    spread = SPREAD * math.sqrt(max(accumulation, 1)) * inner.roundoff
    bound = size.clamp(min=rms).mul_(spread).add_(size, alpha=bounds.roundoff)
    inside = torch.maximum(bounds.element * row, bounds.roundoff * size)
    return bound.add_(inside).add_(2 * bounds.tiny)


SQUARE_TOP, SQUARE_LEAST = 1e140, 1e-140
"""In a norm between these no square has overflowed, and none that matters has vanished."""


def _rms(values: Tensor) -> float:
    """Root mean square of finite float64 values, scaled where squares would overflow or vanish."""
    if not values.numel():
        return 0.0
    norm = float(torch.linalg.vector_norm(values))
    if SQUARE_LEAST < norm < SQUARE_TOP:
        return norm / math.sqrt(values.numel())
    top = _top(values)
    return top * float((values / top).square().mean().sqrt()) if top else 0.0


def _top(values: Tensor) -> float:
    """Largest magnitude; NaN where there is one."""
    if not values.numel():
        return 0.0
    low, high = (float(end) for end in torch.aminmax(values))  # both NaN where one element is
    return abs(low) if math.isnan(low) or -low > high else abs(high)


def classes(values: Tensor) -> Tensor:
    """0 finite, 1 +inf, 2 -inf, 3 NaN, per element."""
    kinds = torch.isposinf(values).to(torch.int8) + 2 * torch.isneginf(values).to(torch.int8)
    return kinds + 3 * torch.isnan(values).to(torch.int8)


def _index(mask_or_value: Tensor) -> tuple[int, ...]:
    flat = mask_or_value.reshape(-1)
    at = int((flat.to(torch.uint8) if flat.dtype is torch.bool else flat).argmax())
    return _unravelled(at, mask_or_value.shape)


def _unravelled(at: int, shape: Sequence[int]) -> tuple[int, ...]:
    """The index of element number `at`."""
    found = []
    for size in reversed(shape):
        at, place = divmod(at, size)
        found.append(place)
    return tuple(reversed(found))


def _failed(reason: str, where: tuple[int, ...] | None = None) -> Comparison:
    return Comparison(False, math.inf, math.inf, where, reason)


def _exact(result: Tensor, wanted: Tensor) -> Comparison:
    wrong = result != wanted.to(result.dtype)
    if not bool(wrong.any()):
        return Comparison(True, 0.0, 0.0, None)
    at = _index(wrong)
    return _failed(f"{int(wrong.sum())} of {wrong.numel()} elements differ; first at {list(at)}", at)


def compare(result: Tensor, fp64: Tensor, eager: Tensor, accumulation: int, dtype: DType) -> Comparison:
    """Judge a result of dtype `dtype` against the float64 meaning and eager torch's result on the same
    values.

    inf and NaN stand where the float64 value, rounded to the dtype, has them (where eager disagrees with
    that, at the edge of overflow, either is right; where neither is finite and float64 itself is, terms of
    either sign overflowed on the way, and the third is right too: a multiply-add rounds once). Then RMSE <=
    m x eager's, and every element within `element_bound`. Integer and bool results are equal. `accumulation`:
    `accumulation_length` of the graph. Tensors may lie on any one device.
    """
    if result.shape != fp64.shape or result.dtype != getattr(torch, dtype.value):
        found = f"{str(result.dtype).removeprefix('torch.')}{list(result.shape)}"
        return _failed(f"the result is {found} instead of {dtype.value}{list(fp64.shape)}")
    if not dtype.is_floating:
        return _exact(result, fp64)
    tops = [_top(t) for t in (result, fp64, eager)]
    if all(top <= _LARGEST[dtype] for top in tops):
        found = _judge(result, fp64, eager, accumulation, dtype)
        return replace(found, top=max(tops[:2]))
    kind, meant, plain = classes(result), classes(fp64.to(result.dtype)), classes(eager)
    lost = torch.isfinite(fp64) & (kind > 0) & (meant > 0) & (plain > 0)  # terms of either sign overflowed
    wrong = (kind != meant) & ((meant == plain) | ((kind != plain) & ~lost))
    if bool(wrong.any()):
        at = _index(wrong)
        return _failed(
            f"{int(wrong.sum())} elements are inf or NaN on one side only; first at {list(at)}", at
        )
    finite = (kind == 0) & (meant == 0) & (plain == 0)
    own, wide, theirs = (torch.where(finite, t.double(), 0.0) for t in (result, fp64, eager))
    return _judge(own, wide, theirs, accumulation, dtype)


_LARGEST = {dtype: torch.finfo(getattr(torch, dtype.value)).max for dtype in BOUNDS}


def _judge(result: Tensor, fp64: Tensor, eager: Tensor, accumulation: int, dtype: DType) -> Comparison:
    """Of finite values."""
    bounds = BOUNDS[dtype]
    if not result.numel():
        return Comparison(True, 0.0, 0.0, None)
    pieces = _pieces(result, fp64, eager)
    exact = [p[1].double() for p in pieces]
    errors = [(_off(p[0], w), _off(p[2], w)) for p, w in zip(pieces, exact, strict=True)]
    own, theirs, rms = (_rms_of(rows) for rows in ([a for a, _ in errors], [b for _, b in errors], exact))
    allowed = max(bounds.rmse * theirs, bounds.floor * bounds.roundoff * rms, 2 * bounds.tiny)
    worst, at, before = -1.0, 0, 0
    for (mine, plain), wide in zip(errors, exact, strict=True):
        margin = (mine / _bound(wide.abs(), plain, rms, accumulation, dtype)).reshape(-1)
        top = int(margin.argmax())
        if float(margin[top]) > worst:
            worst, at = float(margin[top]), before + top
        before += margin.numel()
    where = _unravelled(at, result.shape)
    ratio = own / theirs if theirs else (math.inf if own else 0.0)
    reason = ""
    if own > allowed:
        reason = f"RMSE {own:.3e} against float64, eager {theirs:.3e}, allowed {allowed:.3e}"
    elif worst > 1.0:
        found, off = float(result[where]), abs(float(result[where]) - float(fp64[where]))
        reason = f"element {list(where)} is off by {off:.3e}, {worst:.2f} x its bound ({found!r})"
    return Comparison(not reason, ratio, worst, where, reason, own / allowed)


PIECE = 1 << 20
"""Elements judged at a time: what is computed on the way stays in the cache."""


def _pieces(*tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """Whole rows of all of them, in order; one piece where rows do not show eager's spread."""
    first = tensors[0]
    if first.numel() <= PIECE or first.ndim < 2 or first.shape[-1] < SHORT_ROW:
        return [tensors]
    rows = max(1, PIECE // first.shape[-1])
    flat = [t.reshape(-1, t.shape[-1]) for t in tensors]
    return [tuple(t[at : at + rows] for t in flat) for at in range(0, flat[0].shape[0], rows)]


def _off(result: Tensor, exact: Tensor) -> Tensor:
    return (result.double() - exact).abs_()


def _rms_of(pieces: Sequence[Tensor]) -> float:
    each = [_rms(p) for p in pieces]
    top = max(each)
    if len(pieces) == 1 or not 0.0 < top < math.inf:
        return top
    total = sum((one / top) ** 2 * p.numel() for one, p in zip(each, pieces, strict=True))  # no overflow
    return top * math.sqrt(total / sum(p.numel() for p in pieces))


def accumulation_length(graph: Graph, sizes: Mapping[str, int], *, flat: Graph | None = None) -> int:
    """Largest number of roundings in the compute type on a way from an input to an output: the sum over its
    reductions, contractions and scans of the elements they add up, and one for every other operator.
    `flat`: the graph with every composite written out, where that is known.
    """
    flat = flat or expand(graph)
    depth: dict[str, int] = {}
    for node in flat.nodes:
        before = max((depth.get(r, 0) for r in node.tensors), default=0)
        own = terms(flat, node, sizes)
        depth.update((name, before + own) for name in node.outputs)
    return max((depth.get(name, 0) for name in flat.outputs), default=0)


def terms(graph: Graph, node: Node, sizes: Mapping[str, int]) -> int:
    """Elements that a node adds up into one of its results; 1 where it adds none."""
    lowering = lookup(node.op).lowering
    first = graph.types.get(node.tensors[0]) if node.tensors else None
    adds = isinstance(lowering, Reduction) and lowering.combine in ("sum", "prod", "squares")
    if adds and first is not None:
        return max(1, math.prod(first.shape[d].value(sizes) for d in node.attr("dims")))
    if isinstance(lowering, Contraction) and first is not None:
        return max(1, first.shape[-1].value(sizes))
    if isinstance(lowering, Scan) and first is not None:
        return max(1, first.shape[node.attr("dim")].value(sizes))
    cost = lookup(node.op).cost
    if isinstance(lowering, Opaque) and cost is not None:
        operands = [graph.types[r] if isinstance(r, str) else r for r in node.inputs]
        flops = cost(operands, node.types, dict(node.attrs)).value(sizes)
        return max(1, flops // (2 * max(node.types[0].numel.value(sizes), 1)))
    return 1


# ---- The battery
# -----------------------------------------------------------------------------------------------

Draw = Callable[[Sequence[int], DType, torch.Generator], Tensor]


def _normal(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float32, device=generator.device)


def _cancelling(shape: Sequence[int], dtype: DType, generator: torch.Generator) -> Tensor:
    """Neighbours along the last axis nearly cancel."""
    value = 1.0 + _normal(shape, generator) / 64.0
    if value.ndim:
        value[..., 1::2] *= -1.0
    return value


def _ties(shape: Sequence[int], dtype: DType, generator: torch.Generator) -> Tensor:
    return torch.randint(-2, 3, tuple(shape), generator=generator, device=generator.device).float() / 2.0


def _special(shape: Sequence[int], dtype: DType, generator: torch.Generator) -> Tensor:
    """Normal values with one NaN and both infinities at random places."""
    value = _normal(shape, generator)
    flat = value.view(-1)
    if flat.numel():
        places = torch.randint(0, flat.numel(), (3,), generator=generator, device=generator.device)
        flat[places] = torch.tensor([math.inf, -math.inf, math.nan], device=flat.device)
    return value


def _denormal(shape: Sequence[int], dtype: DType, generator: torch.Generator) -> Tensor:
    scale = 2.0**-16 if dtype is DType.float16 else 2.0**-128
    return _normal(shape, generator) * scale


DRAWS: Mapping[str, Draw] = {
    "normal": lambda s, d, g: _normal(s, g),
    "x10": lambda s, d, g: _normal(s, g) * 10.0,
    "x0.1": lambda s, d, g: _normal(s, g) * 0.1,
    "shifted": lambda s, d, g: _normal(s, g) + 5.0,
    "cancelling": _cancelling,
    "ties": _ties,
    "denormal": _denormal,
    "special": _special,
}
"""How values are drawn, by name."""


def draw(
    name: str, kind: TensorType, sizes: Mapping[str, int], generator: torch.Generator,
    below: Dim | None = None,
) -> Tensor:  # fmt: skip
    """A dense tensor of the type, on the generator's device. Integers are -4..4 (0..4 unsigned) whatever the
    name; from 0 to `below` - 1 where they are positions.
    """
    shape = tuple(d.value(sizes) for d in kind.shape)
    dtype = getattr(torch, kind.dtype.value)
    if kind.dtype is DType.bool:
        return torch.randint(0, 2, shape, generator=generator, device=generator.device).to(dtype)
    if not kind.dtype.is_floating:
        low = 0 if kind.dtype is DType.uint8 or below is not None else -4
        high = max(below.value(sizes), 1) if below is not None else 5
        return torch.randint(low, high, shape, generator=generator, device=generator.device).to(dtype)
    return DRAWS[name](shape, kind.dtype, generator).to(dtype)


def at_offset(tensor: Tensor, elements: int) -> Tensor:
    """The same values so many elements behind where an allocation begins."""
    storage = torch.empty(tensor.numel() + elements, dtype=tensor.dtype, device=tensor.device)
    out = storage[elements:].view(tensor.shape)
    return out.copy_(tensor)


def _strided(tensor: Tensor) -> Tensor:
    """Every second element of a buffer twice as wide."""
    if not tensor.ndim:
        return at_offset(tensor, 1)
    wide = torch.empty((*tensor.shape[:-1], 2 * tensor.shape[-1]), dtype=tensor.dtype, device=tensor.device)
    return wide[..., ::2].copy_(tensor)


def _transposed(tensor: Tensor) -> Tensor:
    return tensor.transpose(-1, -2).contiguous().transpose(-1, -2) if tensor.ndim > 1 else _strided(tensor)


def _expanded(tensor: Tensor) -> Tensor:
    """The first slice in the place of all, with stride 0 (other values than before)."""
    return tensor[:1].contiguous().expand(tensor.shape) if tensor.ndim and tensor.shape[0] else tensor


EXPANDED = "expanded"
LAYOUTS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "dense": lambda t: t.contiguous(),
    "strided": _strided,
    "transposed": _transposed,
    "offset": lambda t: at_offset(t, 64),
    "misaligned": lambda t: at_offset(t, 1),
    EXPANDED: _expanded,
}
"""How a tensor lies in memory, by name. All but `EXPANDED` keep its values."""


@dataclass(frozen=True)
class Case:
    """A recipe: sizes of the dims, how values are drawn and how they lie in memory; tensors are made when
    asked for.
    """

    name: str
    sizes: Mapping[str, int]
    draw: str
    layout: str
    seed: int
    types: Mapping[str, TensorType] = field(repr=False)
    limits: Mapping[str, Dim] = field(default_factory=dict, repr=False)

    def values(self, device: str | torch.device = "cpu") -> dict[str, Tensor]:
        """A tensor per input of the graph; the same seed gives the same values on every device."""
        generator = torch.Generator().manual_seed(self.seed)
        how = {n: self.draw if self.draw != "special" or n in self._special else "normal" for n in self.types}
        made = {
            n: draw(how[n], t, self.sizes, generator, self.limits.get(n)).to(device)
            for n, t in self.types.items()
        }
        return {n: LAYOUTS[self.layout](t) for n, t in made.items()}

    @property
    def _special(self) -> set[str]:
        """Inputs that get inf and NaN: those with a symbolic dim, so that some rows stay finite; else the
        first.
        """
        return {n for n, t in self.types.items() if any(d.symbols() for d in t.shape)} or set(
            list(self.types)[:1]
        )


def fit(size: int, spec: DimSpec) -> int:
    """The nearest size that the dim allows."""
    step = spec.multiple_of
    low, high = -(-spec.min // step) * step, spec.max // step * step
    return min(max(round(size / step) * step, low), high)


def largest(graph: Graph, name: str, sizes: Mapping[str, int], byte_budget: int) -> int:
    """Largest allowed size of one dim for which no value of the graph has more than `byte_budget` bytes."""
    spec = graph.dims[name]

    def fits(size: int) -> bool:
        bound = {**sizes, name: fit(size, spec)}
        return all(t.nbytes.value(bound) <= byte_budget for t in graph.types.values())

    low, high = spec.min, spec.max
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return (
        spec.max if fits(spec.max) else max(fit(low, spec) - (0 if fits(low) else spec.multiple_of), spec.min)
    )


BASE, BLOCK, PRIMES = 48, 128, (251, 1021)


def size_cases(
    graph: Graph, dims: Mapping[str, DimSpec], byte_budget: int
) -> list[tuple[str, dict[str, int]]]:
    """(name, sizes): one dim at a time at 1, around a block, at primes, at the ends of its range; the rest at
    48.
    """
    base = {n: fit(BASE, s) for n, s in dims.items()}
    out: list[tuple[str, dict[str, int]]] = []
    for name, spec in dims.items():
        top = largest(graph, name, base, byte_budget)
        wanted = (spec.min, 1, BLOCK - 1, BLOCK, BLOCK + 1, *PRIMES, top)
        found = dict.fromkeys(min(fit(size, spec), top) for size in wanted)
        out += [(f"{name}={size}", {**base, name: size}) for size in found if size != base[name]]
    return out


def battery(
    graph: Graph, dims: Mapping[str, DimSpec], seed: int, *, byte_budget: int = 1 << 24
) -> list[Case]:
    """The cases that every artifact has to pass: each way to draw, each size, each layout, one at a time.

    `byte_budget` bounds the largest value of a case. The seed of a case follows from `seed` and its place.
    """
    base = {n: fit(BASE, s) for n, s in dims.items()}
    rows: list[tuple[str, Mapping[str, int], str, str]] = [(f"draw {d}", base, d, "dense") for d in DRAWS]
    rows += [(f"size {n}", sizes, "normal", "dense") for n, sizes in size_cases(graph, dims, byte_budget)]
    rows += [(f"layout {n}", base, "normal", n) for n in LAYOUTS if n != "dense"]
    limits = index_limits(graph)
    return [
        Case(n, s, d, lay, seed * 1_000_003 + i, graph.inputs, limits)
        for i, (n, s, d, lay) in enumerate(rows)
    ]


def impostors(fp64: Tensor, inputs: Sequence[Tensor], dtype: DType) -> dict[str, Any]:
    """Results that a sound oracle refuses: nothing written, zeros, a constant, a copy of an input, a rolled
    answer.

    Those that happen to equal the right answer after rounding are left out.
    """
    right = fp64.to(getattr(torch, dtype.value))
    found = {
        "poison": torch.full_like(right, math.nan if dtype.is_floating else 1),
        "zeros": torch.zeros_like(right),
        "constant": torch.full_like(right, float(right.float().mean()) if right.numel() else 0.0),
        "rolled": right.flatten().roll(1).view(right.shape),
        **{f"input {i}": t.to(right.dtype) for i, t in enumerate(inputs) if t.shape == right.shape},
    }
    return {name: t for name, t in found.items() if not torch.equal(t, right)}
