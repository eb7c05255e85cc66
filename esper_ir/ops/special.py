"""Pointwise operators with care at their edges, rounded division, and norms over neighbouring channels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from esper_ir.diagnostics import EsperError
from esper_ir.lazy import functional, torch
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
    Pointwise,
    Sample,
    Tolerance,
    Val,
)
from esper_ir.ops.binary import binary
from esper_ir.ops.gradients import to, up, val
from esper_ir.ops.pointwise import unary
from esper_ir.ops.reduction import only
from esper_ir.ops.rules import ONE, accept, call, elementwise, lift, pointwise_cost, same, tensor
from esper_ir.scalar import Arg, Const, Expr, prim
from esper_ir.types import DType, TensorType

Types = Sequence[TensorType | Number]
A, B = Arg(0), Arg(1)
FLAT = "the result is piecewise constant"


def _trunc(attrs: Attrs) -> Expr:
    return prim("trunc", prim("div", A, B))


def _floor(attrs: Attrs) -> Expr:
    """torch's (and Python's) way: the remainder is taken off first, so that no quotient rounds up to the next
    integer; a zero divisor and an infinite quotient give the quotient itself.
    """
    rest = prim("fmod", A, B)
    quotient = prim("div", prim("sub", A, rest), B)
    differs = prim("and", prim("ne", rest, 0.0), prim("ne", prim("lt", rest, 0.0), prim("lt", B, 0.0)))
    whole = prim("where", differs, prim("sub", quotient, 1.0), quotient)
    down = prim("floor", whole)
    near = prim("where", prim("gt", prim("sub", whole, down), 0.5), prim("add", down, 1.0), down)
    signed = prim("where", prim("eq", whole, 0.0), prim("mul", prim("div", A, B), 0.0), near)
    plain = prim("div", A, B)
    beyond = prim("and", prim("eq", prim("abs", plain), math.inf), prim("lt", prim("abs", A), math.inf))
    endless = prim("or", prim("eq", B, 0.0), beyond)
    return prim("where", endless, plain, signed)


def _xlogy(attrs: Attrs) -> Expr:
    """0 where the first operand is 0, unless the second is NaN."""
    zero = prim("where", prim("isnan", B), B, 0.0)
    return prim("where", prim("and", prim("eq", A, 0.0), prim("not", prim("isnan", B))), zero,
                prim("mul", A, prim("log", B)))  # fmt: skip


def _xlogy_derivatives(attrs: Attrs) -> tuple[Expr, Expr]:
    """torch: no gradient of the first operand where it is 0 and the second is not positive."""
    edge = prim("and", prim("eq", A, 0.0), prim("le", B, 0.0))
    return prim("where", edge, 0.0, prim("log", B)), prim("div", A, B)


def _logaddexp(attrs: Attrs) -> Expr:
    """max + log1p(exp(-|a - b|)); equal infinities give themselves."""
    top, gap = prim("maximum", A, B), prim("neg", prim("abs", prim("sub", A, B)))
    even = prim("and", prim("eq", A, B), prim("eq", prim("abs", A), math.inf))
    return prim("where", even, A, prim("add", top, prim("log1p", prim("exp", gap))))


def _logaddexp_derivatives(attrs: Attrs) -> tuple[Expr, Expr]:
    """g / (1 + exp(b - a)), and the other way round."""

    def share(a: Expr, b: Expr) -> Expr:
        return prim("div", 1.0, prim("add", 1.0, prim("exp", prim("sub", b, a))))

    return share(A, B), share(B, A)


def _within(attrs: Attrs) -> Expr:
    eps = attrs["eps"]
    return A if eps is None else prim("minimum", prim("maximum", A, eps), 1.0 - eps)


def _logit(attrs: Attrs) -> Expr:
    x = _within(attrs)
    return prim("log", prim("div", x, prim("sub", 1.0, x)))


def _logit_derivative(attrs: Attrs) -> tuple[Expr]:
    """1 / (x (1 - x)) inside; outside 0 with `eps`, else NaN, as in torch."""
    slope, eps = prim("div", 1.0, prim("mul", A, prim("sub", 1.0, A))), attrs["eps"]
    low, high, out = (0.0, 1.0, math.nan) if eps is None else (eps, 1.0 - eps, 0.0)
    return (prim("where", prim("or", prim("lt", A, low), prim("gt", A, high)), out, slope),)


def _sinc(attrs: Attrs) -> Expr:
    turned = prim("mul", A, math.pi)
    zero = prim("eq", A, 0.0)
    return prim("where", zero, 1.0, prim("div", prim("sin", turned), prim("where", zero, 1.0, turned)))


def _sinc_derivative(attrs: Attrs) -> tuple[Expr]:
    """pi (t cos t - sin t) / t^2 of t = pi x; its series below 1, where the difference cancels."""
    t = prim("mul", A, math.pi)
    square: Expr = prim("mul", t, t)
    series: Expr = Const(1.0)
    for k in range(8, 0, -1):
        series = prim("sub", 1.0, prim("mul", prim("div", square, float(2 * k * (2 * k + 3))), series))
    near = prim("mul", prim("mul", t, -math.pi / 3.0), series)
    far = prim(
        "mul", prim("div", prim("sub", prim("mul", t, prim("cos", t)), prim("sin", t)), square), math.pi
    )
    return (prim("where", prim("lt", square, 1.0), near, far),)


def _finite(attrs: Attrs) -> Expr:
    out = prim("where", prim("isnan", A), attrs["nan"], A)
    out = prim("where", prim("eq", A, math.inf), attrs["posinf"], out)
    return prim("where", prim("eq", A, -math.inf), attrs["neginf"], out)


def _finite_derivative(attrs: Attrs) -> tuple[Expr]:
    return (prim("where", prim("lt", prim("abs", A), math.inf), 1.0, 0.0),)


def _divide(name: str, mode: str, body: Any) -> OpDef:
    return binary(
        name, body, accepts="float", low=0.5, high=7.0, dtypes=("bfloat16", "float64"), flat=FLAT,
        reference=lambda i, a: (torch.div(*lift(i), rounding_mode=mode),),
        doc=f"torch.div(rounding_mode={mode!r})",
    )  # fmt: skip


# Bits.


WHOLE = NotDifferentiable("whole numbers have no gradient")


def _expand_not(emit: Emit, inputs: Sequence[Operand], attrs: Attrs) -> Sequence[Val]:
    """-1 - x: every bit of a two's complement turned round."""
    x = only(inputs)
    return (emit("logical_not", x) if x.type.dtype is DType.bool else emit("sub", -1, x),)


def _infer_bits(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    out = elementwise("same", "any")(operands, attrs)
    if out[0].dtype.is_floating:
        raise EsperError("E0205", f"{out[0]} has no bits to combine", hint="integers or truth values")
    return out


def _bits(name: str, body: Any, count: int, number: int | None = None) -> OpDef:
    shapes = [((5, 7), (5, 7)), ((5, 7), (7,)), ((5, 1), (1, 7)), ((), (3,))]
    kinds = {"bool": 1, "int64": 4, "int32": 1, "uint8": 1}
    rows = [(d, s[:count]) for d, most in kinds.items() for s in shapes[:most]]
    samples = [Sample(tuple(TensorType.of(d, s) for s in row), {}, 0.0, 9.0) for d, row in rows]
    if number is not None:
        samples.append(Sample((TensorType.of("int64", (5, 7)), number), {}, -4.0, 9.0))
    return OpDef(
        name=name, infer=_infer_bits, reference=call(name), vjp=WHOLE, lowering=Pointwise(body),
        samples=tuple(samples), arity=(count, count), cost=pointwise_cost(1),
        commutative=count == 2, doc=f"torch.{name}",
    )  # fmt: skip


def _shift(name: str, scalar: str) -> OpDef:
    """Whole numbers; beyond the width of the type 0, or the sign."""

    def infer(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
        if any(isinstance(o, TensorType) and o.dtype is DType.bool for o in operands):
            raise EsperError("E0205", "a truth value has no bits to shift", hint="cast it to an integer")
        return _infer_bits(operands, attrs)

    return replace(
        _bits(name, lambda a: prim(scalar, A, B), 2, 3), infer=infer, commutative=False,
        samples=tuple(
            Sample((TensorType.of(d, x), TensorType.of(d, y)), {}, 0.0, 6.0)
            for d, x, y in (("int64", (5, 7), (7,)), ("int32", (5, 1), (1, 7)), ("uint8", (3,), ()))
        ) + (Sample((TensorType.of("int64", (5, 7)), 3), {}, -9.0, 9.0),),
    )  # fmt: skip


def _whole(attrs: Attrs) -> Expr:
    """Cut off towards 0, or one less where the signs differ and something is left over."""
    cut = prim("quotient", A, B)
    if attrs["rounding"] == "trunc":
        return cut
    rest = prim("fmod", A, B)
    differs = prim("and", prim("ne", rest, 0), prim("ne", prim("lt", rest, 0), prim("lt", B, 0)))
    differs = prim("and", prim("ne", B, 0), differs)  # what is left over by 0 depends on the device
    return prim("where", differs, prim("sub", cut, 1), cut)


def _infer_whole(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    out = elementwise("same", "number")(operands, attrs)
    if out[0].dtype.is_floating:
        raise EsperError("E0205", f"{out[0]} is no whole number", hint="floor_divide or trunc_divide")
    return out


def _whole_reference(inputs: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
    x, y = lift(inputs)
    nothing = y == 0
    found = torch.div(x, torch.where(nothing, torch.ones_like(y), y), rounding_mode=attrs["rounding"])
    return (torch.where(nothing, torch.zeros_like(found), found),)


WHOLE_DIVIDE = OpDef(
    name="int_divide", infer=_infer_whole, lowering=Pointwise(_whole), arity=(2, 2), cost=pointwise_cost(4),
    reference=_whole_reference, vjp=WHOLE,
    params=(Attr("rounding", "str", "floor", ("floor", "trunc"), "down, or towards 0"),),
    samples=tuple(
        Sample((TensorType.of(d, x), y), {"rounding": r}, low, high)
        for r in ("floor", "trunc")
        for d, x, y, low, high in (
            ("int64", (5, 7), 3, -20.0, 20.0), ("int32", (5, 7), -4, -20.0, 20.0),
            ("int64", (5, 1), TensorType.of("int64", (1, 7)), 1.0, 9.0),
            ("uint8", (6,), TensorType.of("uint8", ()), 1.0, 9.0),
        )
    ),
    doc="torch.div with a rounding mode, of whole numbers; by 0 it is 0, which torch refuses",
)  # fmt: skip


# Selections by value.


def _choice(name: str) -> OpDef:
    """The larger or smaller of two; a number instead of NaN. All of the cotangent goes to one operand."""
    wins = prim("ge" if name == "fmax" else "le", A, B)
    first = prim("or", wins, prim("isnan", B))
    body = prim("where", prim("and", first, prim("not", prim("isnan", A))), A, B)
    return binary(
        name, lambda a: body, dtypes=("bfloat16", "float64"), accepts="float", number=None,
        derivatives=lambda a: (prim("where", first, 1.0, 0.0), prim("where", first, 0.0, 1.0)),
        doc=f"torch.{name}: of a number and NaN the number",
    )  # fmt: skip


def negative(x: Expr) -> Expr:
    """Whether the sign is set, that of -0 included."""
    return prim(
        "or", prim("lt", x, 0.0), prim("and", prim("eq", x, 0.0), prim("lt", prim("div", 1.0, x), 0.0))
    )


def _copysign(attrs: Attrs) -> Expr:
    size = prim("abs", A)
    return prim("where", negative(B), prim("neg", size), size)


def _copysign_derivatives(attrs: Attrs) -> tuple[Expr, Expr]:
    """torch: the quotient of result and operand, 0 where the operand is 0."""
    return prim("where", prim("eq", A, 0.0), 0.0, prim("div", Arg(2), A)), Const(0.0)


def _step(attrs: Attrs) -> Expr:
    return prim("where", prim("eq", A, 0.0), B, prim("where", prim("gt", A, 0.0), 1.0, 0.0))


def _step_reference(inputs: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
    """torch wants both of one type, and no gradient."""
    kind = torch.result_type(*inputs)
    return (torch.heaviside(*(t.detach().to(kind) for t in lift(inputs))),)


# A slope per channel.


def _infer_prelu(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x, w = tensor(operands[0]), tensor(operands[1], 1)
    accept([x, w], "float")
    if w.dtype is not x.dtype or w.rank > 1:
        raise EsperError("E0204", f"{w} is no slope of {x}", hint="one number, or one per channel (axis 1)")
    if w.rank == 1 and w.shape[0] != ONE:
        channels = x.shape[1] if x.rank > 1 else ONE
        same(w.shape[0], channels, "one slope per channel", w.shape, x.shape)
    return (x,)


def _expand_prelu(emit: Emit, inputs: Sequence[Operand], attrs: Attrs) -> Sequence[Val]:
    x, w = val(inputs[0]), val(inputs[1])
    rank = x.type.rank
    if w.type.rank == 1 and rank > 1 and w.type.shape[0] != ONE:
        w = emit("reshape", w, shape=(w.type.shape[0], *[ONE] * (rank - 2)))
    elif w.type.rank == 1:
        w = emit("reshape", w, shape=())
    return (emit("where", emit("gt", x, 0.0), x, emit("mul", w, x)),)


# Neighbouring channels.


def _infer_local(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x = tensor(operands[0])
    accept([x], "float")
    if x.rank < 3 or not 0 < attrs["size"] <= 64:
        raise EsperError("E0204", f"{x} with {attrs['size']} neighbours", hint="rank 3 or more, 1 to 64")
    return (x,)


def _expand_local(emit: Emit, inputs: Sequence[Operand], attrs: Attrs) -> Sequence[Val]:
    """x / (k + alpha * mean of the squares of `size` neighbouring channels)^beta."""
    x, size = only(inputs), attrs["size"]
    wide, rank, channels = up(emit, x), x.type.rank, x.type.shape[1]
    square = emit("mul", wide, wide)
    before = tuple(size // 2 if i == 1 else 0 for i in range(rank))
    after = tuple((size - 1) // 2 if i == 1 else 0 for i in range(rank))
    framed = emit("pad", square, before=before, after=after) if size > 1 else square
    total = emit("slice", framed, dim=1, start=0, end=channels)
    for at in range(1, size):
        total = emit("add", total, emit("slice", framed, dim=1, start=at, end=channels + at))
    scaled = emit("add", emit("mul", emit("mul", total, 1.0 / size), attrs["alpha"]), attrs["k"])
    return (to(emit, emit("div", wide, emit("pow", scaled, attrs["beta"])), x.type.dtype),)


def _local_reference(inputs: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
    x = inputs[0].float() if inputs[0].dtype.itemsize == 2 else inputs[0]
    made = functional.local_response_norm(x, attrs["size"], attrs["alpha"], attrs["beta"], attrs["k"])
    return (made.to(inputs[0].dtype),)


OPS = (
    _divide("floor_divide", "floor", _floor),
    _divide("trunc_divide", "trunc", _trunc),
    *(_bits(f"bitwise_{n}", lambda a, n=n: prim(f"bit{n}", A, B), 2, 6) for n in ("and", "or", "xor")),
    OpDef(
        name="bitwise_not", infer=_infer_bits, reference=call("bitwise_not"), vjp=WHOLE, arity=(1, 1),
        lowering=Composite(_expand_not), cost=pointwise_cost(1), doc="torch.bitwise_not",
        samples=tuple(
            Sample((TensorType.of(d, s),), {}, -4.0, 9.0)
            for d, s in (("bool", (5, 7)), ("int64", (5, 7)), ("int32", ()), ("int8", (3,)))
        ),
    ),
    WHOLE_DIVIDE,
    _shift("bitwise_left_shift", "shl"),
    _shift("bitwise_right_shift", "shr"),
    _choice("fmax"),
    _choice("fmin"),
    binary("copysign", _copysign, accepts="float", dtypes=("bfloat16", "float64"), number=None,
           derivatives=_copysign_derivatives, doc="torch.copysign; NaN counts as positive"),
    binary("heaviside", _step, accepts="float", dtypes=("bfloat16", "float64"), number=None, flat=FLAT,
           reference=_step_reference),
    binary("xlogy", _xlogy, out="float", low=0.1, high=3.0, dtypes=("bfloat16", "float64"),
           derivatives=_xlogy_derivatives),
    binary("logaddexp", _logaddexp, accepts="float", dtypes=("bfloat16", "float64"), number=None,
           derivatives=_logaddexp_derivatives, commutative=True),
    unary("logit", _logit, low=0.05, high=0.95, derivatives=_logit_derivative, params=(
          Attr("eps", "float", None, doc="operands are kept from eps to 1 - eps"),),
          cases=({}, {"eps": 0.2}), reference=lambda i, a: (torch.logit(i[0], a["eps"]),)),
    unary("sinc", _sinc, accepts="float", derivatives=_sinc_derivative),
    unary("nan_to_num", _finite, out="same", accepts="float", derivatives=_finite_derivative,
          params=(Attr("nan", "float", 0.0), Attr("posinf", "float"), Attr("neginf", "float")),
          cases=({"posinf": 1e4, "neginf": -1e4},),
          reference=lambda i, a: (torch.nan_to_num(i[0], a["nan"], a["posinf"], a["neginf"]),)),
    OpDef(
        name="prelu", infer=_infer_prelu, reference=lambda i, a: (functional.prelu(i[0], i[1]),),
        vjp=ByExpansion(), lowering=Composite(_expand_prelu), arity=(2, 2), cost=lambda i, o,
            a: o[0].numel * 2,
        samples=tuple(
            Sample((TensorType.of(d, x), TensorType.of(d, w)))
            for d, x, w in (("float32", (5, 7), (7,)), ("float32", (2, 3, 5), (1,)), ("float32", (6,), (1,)),
                            ("bfloat16", (2, 3, 4, 5), (3,)), ("float64", (5, 7), (7,)))
        ),
        doc="torch.nn.functional.prelu(x, slope)",
    ),
    OpDef(
        name="local_response_norm", infer=_infer_local, reference=_local_reference, vjp=ByExpansion(),
        lowering=Composite(_expand_local), arity=(1, 1), cost=lambda i, o, a: o[0].numel * (a["size"] + 4),
        params=(Attr("size", "int"), Attr("alpha", "float", 1e-4), Attr("beta", "float", 0.75),
                Attr("k", "float", 1.0)),
        samples=tuple(
            Sample((TensorType.of(d, s),), a)
            for d, s, a in (("float32", (2, 6, 5), {"size": 3}), ("float32", (2, 5, 3, 4),
                {"size": 2, "alpha": 0.5}),
                            ("bfloat16", (2, 6, 5), {"size": 3}), ("float64", (2, 6, 5),
                                {"size": 1, "k": 2.0}))
        ),
        tolerance=Tolerance(2.0, "a power magnifies the rounding of its operand"),
        doc="torch.nn.functional.local_response_norm",
    ),
)  # fmt: skip
