"""Random numbers from (seed, offset), and dropout: functions of a drawn number and of the place, so that
recomputation and replay are exact.

The seed is an input that the blueprint names under `random`; `offset` tells the places of one block apart.
The numbers are a keyed permutation of the position over a prime field, x -> (x + key)^3 in four rounds (as in
the cipher MiMC, Albrecht et al., Asiacrypt 2016): whole numbers below 2^63 only, hence the same bits
everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from esper_ir.diagnostics import EsperError
from esper_ir.lazy import torch
from esper_ir.opdef import (
    Attr,
    Attrs,
    ByExpansion,
    Composite,
    Emit,
    NotDifferentiable,
    Number,
    OpDef,
    Operand,
    Sample,
    Val,
)
from esper_ir.ops.gradients import to, up, val
from esper_ir.ops.rules import ONE, accept, numel, tensor, torch_dtype
from esper_ir.types import Dim, DType, TensorType

Types = Sequence[TensorType | Number]
PRIME, OTHER = 2147483579, 2147483563
"""Primes below 2^31; the first is 2 modulo 3, so that cubes are a permutation."""
KEYS = (1013904223, 1406932607, 668265263, 374761393)
BITS = 24
OFFSET = Attr("offset", "int", 0, doc="another number, other values from the same seed")
Step = Callable[[Any, Any], Any]


def _mixed(add: Step, mul: Step, rest: Step, place: Any, seed: Any, offset: int, small: bool) -> Any:
    """Whole numbers below 2^24, evenly distributed. `small`: places lie below both primes."""
    keys = (rest(seed, PRIME), rest(seed, OTHER))
    x, wide = (place, place) if small else (rest(place, PRIME), rest(place, OTHER))
    for number, key in enumerate(KEYS):
        fixed = (key + offset * 40503 * (number + 1)) % PRIME
        x = add(x, add(keys[number % 2], fixed))
        x = rest(add(x, wide) if number == 1 else x, PRIME)
        x = rest(mul(rest(mul(x, x), PRIME), x), PRIME)
    return rest(x, 2**BITS)


def _check_seed(operand: TensorType | Number, at: int) -> None:
    seed = tensor(operand, at)
    if seed.dtype is not DType.int64 or seed.numel != ONE:
        raise EsperError("E0205", f"the seed is {seed}", hint="one number of int64")


def _drawn(emit: Emit, seed: Val, shape: Sequence[Dim], offset: int) -> Val:
    """Uniform in [0, 1), float32, from multiples of 2^-24."""
    flat = emit("reshape", seed, shape=(1,) * len(shape))
    place = emit("reshape", emit("arange", end=numel(tuple(shape))), shape=tuple(shape))
    add, mul, rest = (lambda a, b, op=op: emit(op, a, b) for op in ("add", "mul", "remainder"))
    count = numel(tuple(shape)).static
    whole = _mixed(add, mul, rest, place, flat, offset, count is not None and count < OTHER)
    return emit("mul", emit("cast", whole, dtype=DType.float32), 2.0**-BITS)


def _torch_drawn(seed: Any, shape: Sequence[int], offset: int) -> Any:
    place = torch.arange(math.prod(shape), device=seed.device).reshape(tuple(shape))
    flat = seed.reshape((1,) * len(shape))
    whole = _mixed(torch.add, torch.mul, torch.remainder, place, flat, offset, False)
    return whole.to(torch.float32) * 2.0**-BITS


def _infer_shape(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    _check_seed(operands[0], 0)
    if not attrs["dtype"].is_floating:
        raise EsperError("E0203", f"dtype is {attrs['dtype'].value}", hint="a floating type")
    if any(d.static is not None and d.static < 0 for d in attrs["shape"]):
        raise EsperError("E0203", f"shape {[str(d) for d in attrs['shape']]}", hint="sizes are not negative")
    return (TensorType(attrs["dtype"], attrs["shape"]),)


def _expand_rand(emit: Emit, inputs: Sequence[Operand], attrs: Attrs) -> Sequence[Val]:
    return (to(emit, _drawn(emit, val(inputs[0]), attrs["shape"], attrs["offset"]), attrs["dtype"]),)


def _expand_randn(emit: Emit, inputs: Sequence[Operand], attrs: Attrs) -> Sequence[Val]:
    """sqrt(-2 log(1 - u)) cos(2 pi v) (Box and Muller 1958)."""
    u, v = (_drawn(emit, val(inputs[0]), attrs["shape"], 2 * attrs["offset"] + i) for i in (0, 1))
    u, v = (to(emit, t, attrs["dtype"].compute) for t in (u, v))
    size = emit("sqrt", emit("mul", emit("log", emit("sub", 1.0, u)), -2.0))
    return (to(emit, emit("mul", size, emit("cos", emit("mul", v, 2.0 * math.pi))), attrs["dtype"]),)


def _randn_reference(inputs: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
    u, v = (_torch_drawn(inputs[0], attrs["shape"], 2 * attrs["offset"] + i) for i in (0, 1))
    wide = torch.promote_types(torch_dtype(attrs["dtype"]), torch.float32)
    u, v = u.to(wide), v.to(wide)
    made = torch.sqrt(torch.log(1.0 - u) * -2.0) * torch.cos(v * (2.0 * math.pi))
    return (made.to(torch_dtype(attrs["dtype"])),)


def _infer_bernoulli(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x = tensor(operands[0])
    accept([x], "float")
    _check_seed(operands[1], 1)
    return (x,)


def _expand_bernoulli(emit: Emit, inputs: Sequence[Operand], attrs: Attrs) -> Sequence[Val]:
    x = val(inputs[0])
    hit = emit("lt", _drawn(emit, val(inputs[1]), x.type.shape, attrs["offset"]), up(emit, x))
    return (to(emit, hit, x.type.dtype),)


def _bernoulli_reference(inputs: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
    x = inputs[0].to(torch.promote_types(inputs[0].dtype, torch.float32))
    return ((_torch_drawn(inputs[1], x.shape, attrs["offset"]) < x).to(inputs[0].dtype),)


def _resolve_dropout(operands: Types, attrs: Attrs) -> dict[str, Any]:
    if not 0.0 <= attrs["p"] <= 1.0:
        raise EsperError("E0203", f"p is {attrs['p']}", hint="from 0 to 1")
    return dict(attrs)


def _expand_dropout(emit: Emit, inputs: Sequence[Operand], attrs: Attrs) -> Sequence[Val]:
    x, p = val(inputs[0]), attrs["p"]
    kept = emit("ge", _drawn(emit, val(inputs[1]), x.type.shape, attrs["offset"]), p)
    scaled = emit("mul", up(emit, x), 1.0 / (1.0 - p) if p < 1.0 else 0.0)
    return (to(emit, emit("where", kept, scaled, 0.0), x.type.dtype),)


def _dropout_reference(inputs: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
    x, p = inputs[0], attrs["p"]
    kept = _torch_drawn(inputs[1], x.shape, attrs["offset"]) >= p
    wide = x.to(torch.promote_types(x.dtype, torch.float32)) * (1.0 / (1.0 - p) if p < 1.0 else 0.0)
    return (torch.where(kept, wide, 0.0).to(x.dtype),)


SEED = TensorType.of("int64", (1,))
DTYPE = Attr("dtype", "dtype", "float32")
SHAPE = Attr("shape", "shape")
NONE = NotDifferentiable("drawn numbers are constants", constant=True)


def _created(name: str, expand: Any, reference: Any) -> OpDef:
    rows = (
        ((3, 5), {}),
        ((33,), {"offset": 3}),
        ((2, 2), {"dtype": "bfloat16"}),
        ((4,), {"dtype": "float64"}),
    )
    return OpDef(
        name=name, infer=_infer_shape, reference=reference, vjp=NONE, lowering=Composite(expand),
        arity=(1, 1),
        samples=tuple(Sample((SEED,), {"shape": s, **a}, 0.0, 9.0) for s, a in rows),
        params=(SHAPE, DTYPE, OFFSET), cost=lambda i, o, a: o[0].numel * 20,
        doc=f"torch.{name} from a seed: the same for the same seed and offset",
    )  # fmt: skip


def _rand_reference(inputs: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
    return (_torch_drawn(inputs[0], attrs["shape"], attrs["offset"]).to(torch_dtype(attrs["dtype"])),)


def _samples(**attrs: Any) -> tuple[Sample, ...]:
    kinds = [TensorType.of(d, (5, 7)) for d in ("float32", "bfloat16", "float64")]
    return tuple(Sample((kind, SEED), attrs, 0.1, 0.9) for kind in kinds)


OPS = (
    _created("rand", _expand_rand, _rand_reference),
    _created("randn", _expand_randn, _randn_reference),
    OpDef(
        name="bernoulli", infer=_infer_bernoulli, reference=_bernoulli_reference, vjp=NONE, arity=(2, 2),
        lowering=Composite(_expand_bernoulli), samples=_samples(), params=(OFFSET,),
        cost=lambda i, o, a: o[0].numel * 20, doc="torch.bernoulli(probabilities), from a seed",
    ),
    OpDef(
        name="dropout", infer=_infer_bernoulli, reference=_dropout_reference, vjp=ByExpansion(), arity=(2, 2),
        lowering=Composite(_expand_dropout), samples=(*_samples(p=0.5), *_samples(p=0.25, offset=2)[:1]),
        params=(Attr("p", "float", 0.5, doc="part that becomes zero"), OFFSET), resolve=_resolve_dropout,
        cost=lambda i, o, a: o[0].numel * 21,
        doc="torch.nn.functional.dropout(x) in training, from a seed: the rest is divided by 1 - p",
    ),
)  # fmt: skip
