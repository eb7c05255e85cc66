"""Element by element: arithmetic, activations, comparisons, losses of two operands."""

from __future__ import annotations

import math
from typing import Any

from tests.esper_ir.opinfo.table import Excluded, Rule, plain

SAME = (
    "abs", "acos", "acosh", "asin", "asinh", "atan", "atanh", "ceil", "cos", "cosh", "erf", "erfc", "exp",
    "exp2", "expm1", "floor", "frac", "isfinite", "isinf", "isnan", "log", "log10", "log1p", "log2",
    "logical_not", "neg", "reciprocal", "rsqrt", "sigmoid", "sign", "sin", "sinh", "sqrt", "square", "tan",
    "tanh", "trunc", "atan2", "eq", "fmod", "ge", "gt", "hypot", "le", "logaddexp", "logical_and",
    "logical_or", "logical_xor", "lt", "maximum", "minimum", "mul", "ne", "pow", "remainder", "xlogy",
)  # fmt: skip
ACTIVATIONS = ("logsigmoid", "mish", "relu6", "silu", "softsign", "tanhshrink", "hardsigmoid", "hardswish",
               "relu", "selu")  # fmt: skip


def _activation(name: str) -> Rule:
    def rule(b: Any, x: Any, inplace: bool = False) -> Any:
        return b.op(name, x)

    return rule


def _with(name: str, *params: str) -> Rule:
    """Attributes by position or by name."""

    def rule(b: Any, x: Any, *args: Any, inplace: bool = False, **kwargs: Any) -> Any:
        attrs = {**dict(zip(params, args, strict=False)), **kwargs}
        return b.op(name, x, **{k: float(v) if not isinstance(v, str) else v for k, v in attrs.items()})

    return rule


def _add(b: Any, x: Any, y: Any, *, alpha: Any = 1) -> Any:
    return b.op("add", x, y if alpha == 1 else b.op("mul", y, alpha))


def _sub(b: Any, x: Any, y: Any, *, alpha: Any = 1) -> Any:
    return b.op("sub", x, y if alpha == 1 else b.op("mul", y, alpha))


def _rsub(b: Any, x: Any, y: Any, *, alpha: Any = 1) -> Any:
    return b.op("sub", y, x if alpha == 1 else b.op("mul", x, alpha))


def _div(b: Any, x: Any, y: Any, *, rounding_mode: str | None = None) -> Any:
    name = {None: "div", "floor": "floor_divide", "trunc": "trunc_divide"}[rounding_mode]
    return b.op(name, x, y)


def _clamp(b: Any, x: Any, min: Any = None, max: Any = None) -> Any:
    tensors = [v for v in (min, max) if hasattr(v, "type")]
    if not tensors:
        return b.op("clamp", x, min=min, max=max)
    out = x if min is None else b.op("maximum", x, min)
    return out if max is None else b.op("minimum", out, max)


def _logit(b: Any, x: Any, eps: float | None = None) -> Any:
    return b.op("logit", x, eps=eps)


def _round(b: Any, x: Any, *, decimals: int = 0) -> Any:
    if not decimals:
        return b.op("round", x)
    ten = float(10 ** abs(decimals))
    there, back = ("mul", "div") if decimals > 0 else ("div", "mul")
    return b.op(back, b.op("round", b.op(there, x, ten)), ten)


def _nan_to_num(b: Any, x: Any, nan: Any = None, posinf: Any = None, neginf: Any = None) -> Any:
    largest = {"float64": 1.7976931348623157e308, "float32": 3.4028234663852886e38,
               "bfloat16": 3.3895313892515355e38}[x.type.dtype.value]  # fmt: skip
    high = largest if posinf is None else posinf
    low = -largest if neginf is None else neginf
    numbers = (0.0 if nan is None else nan, high, low)
    if not all(math.isfinite(v) for v in numbers):
        raise Excluded("an attribute that is not finite")
    return b.op("nan_to_num", x, nan=float(numbers[0]), posinf=float(high), neginf=float(low))


def _where(b: Any, x: Any, condition: Any, y: Any) -> Any:
    return b.op("where", condition, x, y)


def _lerp(b: Any, x: Any, end: Any, weight: Any) -> Any:
    if not hasattr(weight, "type"):
        weight = b.op("full", shape=[], value=float(weight), dtype=x.type.dtype.value)
    return b.op("lerp", x, end, weight)


def _addc(name: str) -> Rule:
    def rule(b: Any, x: Any, y: Any, z: Any, *, value: Any = 1) -> Any:
        return b.op(name, x, y, z, value=float(value))

    return rule


def _masked_fill(b: Any, x: Any, mask: Any, value: Any) -> Any:
    if hasattr(value, "type") and value.type.rank:
        raise Excluded("the name, not the operator, refuses this rank")
    return b.op("where", mask, value, x) if hasattr(value, "type") else b.op(
        "masked_fill", x, mask, value=float(value))  # fmt: skip


def _float_power(b: Any, x: Any, y: Any) -> Any:
    wide = [b.op("cast", v, dtype="float64") if hasattr(v, "type") else v for v in (x, y)]
    return b.op("pow", *wide)


def _to(dtype: str) -> Rule:
    def rule(b: Any, x: Any, memory_format: Any = None) -> Any:
        return b.op("cast", x, dtype=dtype)

    return rule


def _gelu(b: Any, x: Any, *, approximate: str = "none") -> Any:
    return b.op("gelu", x, approximate=approximate)


def _celu(b: Any, x: Any, alpha: float = 1.0, inplace: bool = False) -> Any:
    return b.op("celu", x, alpha=float(alpha))


def _elu(b: Any, x: Any, alpha: float = 1.0, inplace: bool = False) -> Any:
    return b.op("elu", x, alpha=float(alpha))


def _threshold(b: Any, x: Any, threshold: float, value: float, inplace: bool = False) -> Any:
    return b.op("threshold", x, threshold=float(threshold), value=float(value))


def _hardtanh(b: Any, x: Any, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> Any:
    return b.op("hardtanh", x, min_val=float(min_val), max_val=float(max_val))


def _glu(b: Any, x: Any, dim: int = -1) -> Any:
    return b.op("glu", x, dim=dim)


def _same(b: Any, x: Any, **kwargs: Any) -> Any:
    return b.op("cast", x, dtype=x.type.dtype.value)


CASTS = {"bfloat16": "bfloat16", "double": "float64", "float": "float32", "half": "float16", "bool": "bool",
         "byte": "uint8", "char": "int8", "int": "int32", "long": "int64", "short": "int16"}  # fmt: skip

POINTWISE: dict[str, Rule] = {
    **{n: plain(n) for n in SAME},
    **{f"nn.functional.{n}": _activation(n) for n in ACTIVATIONS},
    **{n: _to(d) for n, d in CASTS.items()},
    "add": _add, "sub": _sub, "rsub": _rsub, "__radd__": lambda b, x, y: b.op("add", y, x),
    "__rmul__": lambda b, x, y: b.op("mul", y, x), "__rsub__": lambda b, x, y: b.op("sub", y, x),
    "__rdiv__": lambda b, x, y: b.op("div", y, x), "__rpow__": lambda b, x, y: b.op("pow", y, x),
    "__rmod__": lambda b, x, y: b.op("remainder", y, x),
    "div": _div, "true_divide": plain("div"), "floor_divide": plain("floor_divide"),
    "clamp": _clamp, "clamp_min": lambda b, x, v: _clamp(b, x, v),
    "clamp_max": lambda b, x, v: _clamp(b, x, None, v), "logit": _logit, "round": _round,
    "nan_to_num": _nan_to_num, "where": _where, "lerp": _lerp, "addcmul": _addc("addcmul"),
    "addcdiv": _addc("addcdiv"), "masked_fill": _masked_fill, "float_power": _float_power,
    "nn.functional.gelu": _gelu, "nn.functional.celu": _celu, "nn.functional.elu": _elu,
    "nn.functional.leaky_relu": _with("leaky_relu", "negative_slope"),
    "nn.functional.softplus": _with("softplus", "beta", "threshold"),
    "nn.functional.softshrink": _with("softshrink", "lambd"),
    "nn.functional.hardshrink": _with("hardshrink", "lambd"), "nn.functional.hardtanh": _hardtanh,
    "nn.functional.threshold": _threshold, "nn.functional.glu": _glu,
    "nn.functional.prelu": lambda b, x, weight: b.op("prelu", x, weight),
    "clone": _same, "contiguous": _same, "positive": _same, "resolve_conj": _same, "resolve_neg": _same,
}  # fmt: skip
