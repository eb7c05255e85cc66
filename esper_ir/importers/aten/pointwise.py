"""Element by element: arithmetic, activations, comparisons, selection, casts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from esper_ir.builder import Value
from esper_ir.importers.aten.creation import uniform
from esper_ir.importers.context import Context, Rule, Tensor, each
from esper_ir.opdef import Number
from esper_ir.ops.rules import torch_dtype
from esper_ir.types import Dim, DType

PLAIN = (
    "neg", "abs", "sign", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt", "rsqrt",
    "reciprocal",
    "square", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh",
    "atanh", "erf",
    "erfc", "sigmoid", "relu", "relu6", "selu", "silu", "mish", "hardsigmoid", "hardswish", "ceil",
    "trunc", "frac",
    "isnan", "isinf", "isfinite", "logical_not", "detach", "round", "floor",
)  # fmt: skip
OTHER_NAMES = {
    "log_sigmoid": "logsigmoid", "absolute": "abs", "negative": "neg", "arcsin": "asin",
    "arccos": "acos", "arctan": "atan", "arcsinh": "asinh", "arccosh": "acosh", "arctanh": "atanh",
    "special_expit": "sigmoid", "special_erf": "erf", "special_erfc": "erfc", "special_exp2": "exp2",
}  # fmt: skip
ROUND = ("ceil", "trunc", "floor", "round")
FLAT = (*ROUND, "sign")
PAIRS = ("maximum", "minimum", "atan2", "hypot", "logical_and", "logical_or", "logical_xor")
COMPARED = ("eq", "ne", "lt", "le", "gt", "ge")
ALSO_COMPARED = {"greater": "gt", "greater_equal": "ge", "less": "lt", "less_equal": "le", "not_equal": "ne"}


def _unary(op: str) -> Callable[..., Value]:
    return lambda b, x: b.op(op, x)


def _binary(op: str) -> Callable[..., Value]:
    return lambda b, x, y: _pair(b, op, x, y)


def _pair(b: Context, op: str, x: Tensor, y: Tensor, **attrs: Any) -> Value:
    """At least one operand is a value: torch computes with two numbers itself, except for sizes."""
    if not isinstance(x, Value) and not isinstance(y, Value):
        x = b.tensor(x, DType.int64 if isinstance(x, (int, Dim)) else DType.float32)
    return b.op(op, x, y, **attrs)


def _compared(op: str) -> Callable[..., Value]:
    """An infinity on the other side is what no number passes."""
    return lambda b, x, y: _pair(b, op, x, y)


def _scaled(b: Context, x: Tensor, alpha: Number) -> Tensor:
    if alpha == 1:
        return x
    return x * alpha if not isinstance(x, Value) else b.op("mul", x, alpha)  # type: ignore[operator]


def _add(b: Context, x: Tensor, y: Tensor, alpha: Number = 1) -> Value:
    return _pair(b, "add", x, _scaled(b, y, alpha))


def _sub(b: Context, x: Tensor, y: Tensor, alpha: Number = 1) -> Value:
    return _pair(b, "sub", x, _scaled(b, y, alpha))


def _rsub(b: Context, x: Tensor, y: Tensor, alpha: Number = 1) -> Value:
    return _pair(b, "sub", y, _scaled(b, x, alpha))


def _div(b: Context, x: Tensor, y: Tensor, rounding_mode: str | None = None) -> Value:
    if rounding_mode is None:
        return _pair(b, "div", x, y)
    if any(isinstance(v, float) or (isinstance(v, Value) and v.type.dtype.is_floating) for v in (x, y)):
        return _pair(b, f"{rounding_mode}_divide", x, y)
    return _pair(b, "int_divide", x, y, rounding=rounding_mode)


def _floor_divide(b: Context, x: Tensor, y: Tensor) -> Value:
    return _div(b, x, y, "floor")


def _bitwise(logical: str, plain: str) -> Callable[..., Value]:
    def convert(b: Context, x: Tensor, *rest: Tensor) -> Value:
        truth = all(not isinstance(v, Value) or v.type.dtype is DType.bool for v in (x, *rest))
        return b.op(logical if truth else plain, x, *rest)

    return convert


def _clamp(b: Context, x: Value, min: Tensor | None = None, max: Tensor | None = None) -> Value:
    finite = {}
    for name, bound in (("min", min), ("max", max)):
        if isinstance(bound, (Value, Dim)):
            return _clamp_values(b, x, min, max)
        if bound is not None and not (isinstance(bound, float) and math.isinf(bound)):
            finite[name] = bound
    return b.op("clamp", x, **finite) if finite else b.cast(x, x.type.dtype)


def _clamp_values(b: Context, x: Value, min: Tensor | None, max: Tensor | None) -> Value:
    out = x if min is None else b.op("maximum", x, min)
    return out if max is None else b.op("minimum", out, max)


def _clamp_min(b: Context, x: Value, min: Tensor) -> Value:
    return _clamp(b, x, min, None)


def _clamp_max(b: Context, x: Value, max: Tensor) -> Value:
    return _clamp(b, x, None, max)


def _where(b: Context, condition: Value, x: Tensor, y: Tensor) -> Value:
    condition = b.cast(condition, DType.bool)
    if not isinstance(x, Value) and not isinstance(y, Value):
        dtype = DType.float32 if isinstance(x, float) or isinstance(y, float) else DType.int64
        x = b.tensor(x, dtype)
    return b.op("where", condition, x, y)


def _masked_fill(b: Context, x: Value, mask: Value, value: Tensor) -> Value:
    """Whole where the number is of the operand's kind and can be written; else a selection."""
    mask = b.cast(mask, DType.bool)
    if isinstance(value, Value):
        value = b.cast(value, x.type.dtype)
    elif not isinstance(value, Dim) and math.isfinite(value) and x.type.dtype.is_floating:
        return b.op("masked_fill", x, mask, value=float(value))
    return b.cast(b.op("where", mask, value, x), x.type.dtype)


def _lerp(b: Context, x: Value, y: Value, weight: Tensor) -> Value:
    return b.op("lerp", x, y, b.tensor(weight, x.type.dtype))


def _addc(op: str) -> Callable[..., Value]:
    return lambda b, x, y, z, value=1: b.op(op, x, y, z, value=float(value))


def _elu(b: Context, x: Value, alpha: Number = 1.0, scale: Number = 1.0, input_scale: Number = 1.0) -> Value:
    """scale (x, or alpha (exp(input_scale x) - 1) below 0): elu, selu and celu are cases of it."""
    if scale == 1 and input_scale == 1:
        return b.op("elu", x, alpha=float(alpha))
    if input_scale == 1:
        return b.op("mul", b.op("elu", x, alpha=float(alpha)), scale)
    if scale == 1 and alpha * input_scale == 1:
        return b.op("celu", x, alpha=float(alpha))
    below = b.op("mul", b.op("expm1", b.op("mul", x, input_scale)), alpha)
    return b.op("mul", b.op("where", b.op("gt", x, 0.0), x, below), scale)


def _celu(b: Context, x: Value, alpha: Number = 1.0) -> Value:
    return b.op("celu", x, alpha=float(alpha))


def _leaky(b: Context, x: Value, negative_slope: Number = 0.01) -> Value:
    return b.op("leaky_relu", x, negative_slope=float(negative_slope))


def _prelu(b: Context, x: Value, weight: Value) -> Value:
    return b.op("prelu", x, weight)


def _rrelu(
    b: Context,
    x: Value,
    lower: float = 0.125,
    upper: float = 1 / 3,
    training: bool = False,
    generator: Any = None,
) -> Value:
    if training:
        slope = b.cast(uniform(b, x.type.shape, lower, upper), x.type.dtype)
        return b.op("where", b.op("gt", x, 0.0), x, b.op("mul", x, slope))
    return b.op("leaky_relu", x, negative_slope=(lower + upper) / 2)


def _gelu(b: Context, x: Value, approximate: str = "none") -> Value:
    return b.op("gelu", x, approximate=approximate)


def _softplus(b: Context, x: Value, beta: Number = 1, threshold: Number = 20) -> Value:
    return b.op("softplus", x, beta=float(beta), threshold=float(threshold))


def _hardtanh(b: Context, x: Value, min_val: Number = -1, max_val: Number = 1) -> Value:
    return b.op("hardtanh", x, min_val=float(min_val), max_val=float(max_val))


def _shrink(op: str) -> Callable[..., Value]:
    return lambda b, x, lambd=0.5: b.op(op, x, lambd=float(lambd))


def _threshold(b: Context, x: Value, threshold: Number, value: Number) -> Value:
    return b.op("threshold", x, threshold=float(threshold), value=float(value))


def _round(b: Context, x: Value, decimals: int = 0) -> Value:
    scale = 10.0**decimals
    return b.op("div", b.op("round", b.op("mul", x, scale)), scale)


def _rounded(op: str) -> Callable[..., Value]:
    """Integers are round already."""
    return lambda b, x: b.op(op, x) if x.type.dtype.is_floating else x


def _logit(b: Context, x: Value, eps: float | None = None) -> Value:
    return b.op("logit", x, eps=eps)


def _nan_to_num(
    b: Context, x: Value, nan: float | None = None, posinf: float | None = None, neginf: float | None = None
) -> Value:
    if not x.type.dtype.is_floating:
        return x
    largest = torch.finfo(torch_dtype(x.type.dtype)).max
    high = largest if posinf is None else float(posinf)
    low = -largest if neginf is None else float(neginf)
    return b.op("nan_to_num", x, nan=float(nan or 0.0), posinf=high, neginf=low)


def _negative(b: Context, x: Value) -> Value:
    """Whether the sign is set, that of -0 included."""
    below = b.op("lt", x, 0.0 if x.type.dtype.is_floating else 0)
    if not x.type.dtype.is_floating:
        return below
    return b.op("logical_or", below, b.op("lt", b.op("reciprocal", x), 0.0))


def _angle(b: Context, x: Value) -> Value:
    """Of a real number: pi where it is negative."""
    wide = x if x.type.dtype.is_floating else b.cast(x, DType.float32)
    turned = b.op("where", b.op("lt", wide, 0.0), math.pi, 0.0)
    return b.cast(b.op("where", b.op("isnan", wide), b.op("detach", wide), turned), wide.type.dtype)


def _ldexp(b: Context, x: Value, power: Value) -> Value:
    return b.op("mul", x, b.op("pow", 2.0, power))


def _numbers(op: str, whole: str) -> Callable[..., Value]:
    """Without a point there is no NaN."""

    def convert(b: Context, x: Value, y: Value) -> Value:
        floating = x.type.dtype.is_floating or y.type.dtype.is_floating
        return b.op(op if floating else whole, x, y)

    return convert


def _copysign(b: Context, x: Tensor, y: Tensor) -> Value:
    kind = next(v.type.dtype for v in (x, y) if isinstance(v, Value))
    kind = kind if kind.is_floating else DType.float32
    return b.op("copysign", *(b.cast(b.tensor(v, kind), kind) for v in (x, y)))


def _glu(b: Context, x: Value, dim: int = -1) -> Value:
    return b.op("glu", x, dim=dim)


def _same(b: Context, x: Value, *rest: Any, **more: Any) -> Value:
    """The value itself; it has no memory order here."""
    return x


def _to(b: Context, x: Value, dtype: DType | None = None, **more: Any) -> Value:
    return b.cast(x, dtype)


def _to_dtype(b: Context, x: Value, dtype: DType, *rest: Any, **more: Any) -> Value:
    return b.cast(x, dtype)


def _to_device(b: Context, x: Value, device: Any, dtype: DType, *rest: Any, **more: Any) -> Value:
    return b.cast(x, dtype)


def _to_other(b: Context, x: Value, other: Value, *rest: Any, **more: Any) -> Value:
    return b.cast(x, other.type.dtype)


def _copy(b: Context, x: Value, source: Tensor, non_blocking: bool = False) -> Value:
    made = b.cast(b.tensor(source, x.type.dtype), x.type.dtype)
    return made if made.type.shape == x.type.shape else b.op("expand", made, shape=x.type.shape)


def _fill(b: Context, x: Value, value: Tensor) -> Value:
    if isinstance(value, Value):
        return _copy(b, x, value)
    return b.full(x.type.shape, value, x.type.dtype)


def _zero(b: Context, x: Value) -> Value:
    return b.full(x.type.shape, 0.0 if x.type.dtype.is_floating else 0, x.type.dtype)


def _pow(b: Context, x: Tensor, y: Tensor) -> Value:
    """Squares and roots as such: they are exact, and their gradients are short."""
    if isinstance(x, Value) and not isinstance(y, (Value, Dim)) and y == 2:
        return b.op("square", x)
    return _pair(b, "pow", x, y)


RULES: tuple[Rule, ...] = (
    *(r for n in PLAIN if n not in FLAT for r in each(_unary(n),
          f"{n}.default")),
    *(r for n in ROUND for r in each(_rounded(n), f"{n}.default")),
    *(r for n, o in OTHER_NAMES.items() for r in each(_unary(o), f"{n}.default")),
    *(r for n in PAIRS for r in each(_binary(n), f"{n}.default")),
    *(r for n in COMPARED for r in each(_compared(n), f"{n}.Tensor", f"{n}.Scalar")),
    *(r for n, o in ALSO_COMPARED.items() for r in each(_compared(o), f"{n}.Tensor", f"{n}.Scalar")),
    *each(_binary("maximum"), "max.other"), *each(_binary("minimum"), "min.other"),
    *each(_add, "add.Tensor", "add.Scalar"), *each(_sub, "sub.Tensor", "sub.Scalar", "subtract.Tensor"),
    *each(_rsub, "rsub.Tensor", "rsub.Scalar"),
    *each(_binary("mul"), "mul.Tensor", "mul.Scalar", "multiply.Tensor"),
    *each(_div, "div.Tensor", "div.Scalar", "div.Tensor_mode", "div.Scalar_mode", "divide.Tensor",
          "true_divide.Tensor"),
    *each(_floor_divide, "floor_divide.default", "floor_divide.Scalar"),
    *each(_pow, "pow.Tensor_Tensor", "pow.Tensor_Scalar", "pow.Scalar"),
    *each(_binary("remainder"), "remainder.Tensor", "remainder.Scalar", "remainder.Scalar_Tensor"),
    *each(_binary("fmod"), "fmod.Tensor", "fmod.Scalar"),
    *each(_bitwise("logical_not", "bitwise_not"), "bitwise_not.default"),
    *each(_bitwise("logical_and", "bitwise_and"), "bitwise_and.Tensor", "bitwise_and.Scalar",
          "__and__.Tensor",
          "__and__.Scalar"),
    *each(_bitwise("logical_or", "bitwise_or"), "bitwise_or.Tensor", "bitwise_or.Scalar", "__or__.Tensor",
          "__or__.Scalar"),
    *each(_bitwise("logical_xor", "bitwise_xor"), "bitwise_xor.Tensor", "bitwise_xor.Scalar",
          "__xor__.Tensor"),
    *each(_clamp, "clamp.default", "clamp.Tensor", "clip.default", "clip.Tensor"),
    *each(_clamp_min, "clamp_min.default", "clamp_min.Tensor"),
    *each(_clamp_max, "clamp_max.default", "clamp_max.Tensor"),
    *each(_where, "where.self", "where.ScalarOther", "where.ScalarSelf", "where.Scalar"),
    *each(_masked_fill, "masked_fill.Scalar", "masked_fill.Tensor"),
    *each(_lerp, "lerp.Scalar", "lerp.Tensor"),
    *each(_addc("addcmul"), "addcmul.default"), *each(_addc("addcdiv"), "addcdiv.default"),
    *each(_elu, "elu.default"), *each(_celu, "celu.default"), *each(_leaky, "leaky_relu.default"),
    *each(_prelu, "prelu.default", "_prelu_kernel.default"), *each(_rrelu, "rrelu.default"),
    *each(_gelu, "gelu.default"), *each(_softplus, "softplus.default"), *each(_hardtanh, "hardtanh.default"),
    *each(_shrink("softshrink"), "softshrink.default"), *each(_shrink("hardshrink"), "hardshrink.default"),
    *each(_threshold, "threshold.default"), *each(_unary("sign"), "sign.default", "sgn.default"),
    *each(_rounded("trunc"), "fix.default"),
    *each(_round, "round.decimals"), *each(_logit, "logit.default"),
    *each(_binary("xlogy"), "xlogy.Tensor", "xlogy.Scalar_Other", "xlogy.Scalar_Self"),
    *each(_binary("logaddexp"), "logaddexp.default"),
    *each(_unary("sinc"), "sinc.default"), *each(_glu, "glu.default"),
    *each(_nan_to_num, "nan_to_num.default"),
    *each(_negative, "signbit.default"), *each(_angle, "angle.default"), *each(_ldexp, "ldexp.Tensor"),
    *each(_numbers("fmax", "maximum"), "fmax.default"), *each(_numbers("fmin", "minimum"), "fmin.default"),
    *each(_copysign, "copysign.Tensor", "copysign.Scalar"), *each(_binary("heaviside"), "heaviside.default"),
    *each(_binary("bitwise_left_shift"), "bitwise_left_shift.Tensor", "bitwise_left_shift.Tensor_Scalar",
          "__lshift__.Tensor", "__lshift__.Scalar"),
    *each(_binary("bitwise_right_shift"), "bitwise_right_shift.Tensor", "bitwise_right_shift.Tensor_Scalar",
          "__rshift__.Tensor", "__rshift__.Scalar"),
    *each(_same, "clone.default", "contiguous.default", "lift_fresh_copy.default", "lift.default",
          "alias.default",
          "positive.default", "resolve_conj.default", "resolve_neg.default",
          "real.default", "conj.default", "_conj.default"),
    *each(_to, "_to_copy.default", "to.dtype_layout"), *each(_to_dtype, "to.dtype"),
    *each(_to_device, "to.device"), *each(_to_other, "to.other", "type_as.default"),
    *each(_copy, "copy.default"), *each(_fill, "fill.Scalar", "fill.Tensor"), *each(_zero, "zero.default"),
)  # fmt: skip
