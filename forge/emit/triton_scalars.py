"""The only table of how scalar primitives are spelled in Triton, for the GPU and for its interpreter.

The interpreter has no libdevice and computes bfloat16 wrongly: there every value is float32, and rounding to
bfloat16 is integer arithmetic on the bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from esper_ir.diagnostics import EsperError
from esper_ir.scalar import Arg, Cast, Const, Expr, Prim, walk
from esper_ir.types import DType

COMMON: dict[str, str] = {
    "neg": "_neg({0})", "abs": "tl.abs({0})", "floor": "tl.floor({0})", "ceil": "tl.ceil({0})",
    "add": "({0} + {1})", "sub": "({0} - {1})", "mul": "({0} * {1})",
    "eq": "({0} == {1})", "ne": "({0} != {1})", "lt": "({0} < {1})", "le": "({0} <= {1})",
    "gt": "({0} > {1})",
    "ge": "({0} >= {1})", "and": "(({0} != 0) & ({1} != 0))",
    "or": "(({0} != 0) | ({1} != 0))", "xor": "(({0} != 0) ^ ({1} != 0))",
    "not": "({0} == 0)", "bitand": "({0} & {1})", "bitor": "({0} | {1})", "bitxor": "({0} ^ {1})",
    "shl": "_shl({0}, {1})", "shr": "_shr({0}, {1})", "quotient": "_quotient({0}, {1})",
    "isnan": "({0} != {0})", "where": "tl.where({0}, {1}, {2})", "sign": "_sign({0})",
    "maximum": "tl.maximum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
    "minimum": "tl.minimum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
    "sigmoid": "_sigmoid({0})", "erf": "tl.erf({0})", "rsqrt": "tl.rsqrt({0})",
    "div": "_div({0}, {1})", "sqrt": "_sqrt({0})",
}  # fmt: skip
ONE_OPERAND = (
    "exp", "exp2", "expm1", "log", "log2", "log1p", "sin", "cos", "tan", "asin", "acos", "atan", "sinh",
    "cosh",
    "tanh", "asinh", "acosh", "atanh", "erfc", "trunc",
)  # fmt: skip
# Accurate to an ulp or two, as torch's kernels are; tl.exp and friends are the approximate instructions.
LIBDEVICE: dict[str, str] = {
    **{n: f"libdevice.{n}({{0}})" for n in ONE_OPERAND},
    "atan2": "libdevice.atan2({0}, {1})",
    "pow": "_pow({0}, {1})",
    "fmod": "_fmod({0}, {1})",
    "round": "libdevice.rint({0})",
}
POWERS: dict[float, str] = {1.0: "{0}", 2.0: "({0} * {0})", 3.0: "({0} * {0} * {0})"}
REAL_POWERS: dict[float, str] = {
    0.5: "_sqrt({0})", -0.5: "tl.rsqrt({0})", -1.0: "_div_of_number(1.0, {0})",
    -2.0: "_div_of_number(1.0, {0} * {0})",
}  # fmt: skip
"""Powers by a number that torch, too, computes by products and roots: of any type, and by a real number.
The general function takes several times what memory does."""
OF_ONE_TYPE = ("atan2", "pow", "fmod", "quotient", "shl", "shr")
"""Functions that take operands of one type, so that a number becomes one of the other's."""
OF_REALS = frozenset((*ONE_OPERAND, "atan2", "erf", "rsqrt", "sqrt", "sigmoid"))
"""Functions that, where their result is no whole number, take none."""
# The approximate instructions, some 2 ulp of float32: where every element that is read or written has 16
# bits, they are far below its rounding, and the accurate ones cost more time than the memory does.
FAST: dict[str, str] = {
    "exp": "_fast_exp({0})", "exp2": "_fast_exp2({0})", "div": "({0} / {1})", "sigmoid": "_fast_sigmoid({0})",
    "erf": "_fast_erf({0})",
}  # fmt: skip
INTERPRETED: dict[str, str] = {
    "exp": "tl.exp({0})", "exp2": "tl.exp2({0})", "expm1": "(tl.exp({0}) - 1.0)", "log": "tl.log({0})",
    "log2": "tl.log2({0})", "log1p": "tl.log(1.0 + {0})", "sin": "tl.sin({0})", "cos": "tl.cos({0})",
    "tanh": "(2.0 * _sigmoid(2.0 * {0}) - 1.0)", "round": "_round({0})", "trunc": "_trunc({0})",
    "pow": "_pow({0}, {1})", "fmod": "_fmod({0}, {1})",
}  # fmt: skip

TRITON_TYPE = {
    DType.float64: "tl.float64", DType.float32: "tl.float32", DType.bfloat16: "tl.bfloat16",
    DType.float16: "tl.float16", DType.int64: "tl.int64", DType.int32: "tl.int32", DType.int16: "tl.int16",
    DType.int8: "tl.int8", DType.uint8: "tl.uint8", DType.bool: "tl.int1",
}  # fmt: skip
POINTER_TYPE = {
    DType.float64: "*fp64", DType.float32: "*fp32", DType.bfloat16: "*bf16", DType.float16: "*fp16",
    DType.int64: "*i64", DType.int32: "*i32", DType.int16: "*i16", DType.int8: "*i8", DType.uint8: "*u8",
    DType.bool: "*i1",
}  # fmt: skip

_HELPERS = """
@triton.jit
def _sigmoid(x):
    return tl.div_rn(1.0, 1.0 + {exp}) if x.dtype == tl.float32 else 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _div(x, y):
    return tl.div_rn(x, tl.cast(y, tl.float32)) if x.dtype == tl.float32 else x / y


@triton.jit
def _div_of_number(x, y):
    return tl.div_rn(x, y) if y.dtype == tl.float32 else x / y


@triton.jit
def _like(x, number):
    return tl.full(x.shape, number, x.dtype)


@triton.jit
def _real_like(x, number):
    return tl.full(x.shape, number, x.dtype if x.dtype.is_floating() else tl.float32)


@triton.jit
def _quotient(x, y):
    y = tl.zeros_like(x) + y
    return tl.where(y == 0, 0, x // tl.where(y == 0, 1, y))


@triton.jit
def _shl(x, y):
    y = tl.zeros_like(x) + y
    inside = (y >= 0) & (y < x.dtype.primitive_bitwidth)
    return tl.where(inside, x << tl.where(inside, y, 0), 0)


@triton.jit
def _shr(x, y):
    y = tl.zeros_like(x) + y
    inside = (y >= 0) & (y < x.dtype.primitive_bitwidth)
    return x >> tl.where(inside, y, x.dtype.primitive_bitwidth - 1)


@triton.jit
def _neg(x):
    # Less than zero is 0 - x to Triton: an instruction, and of 0 the other zero.
    return -x if x.dtype.is_int() else x * -1.0


@triton.jit
def _sqrt(x):
    return tl.sqrt_rn(x) if x.dtype == tl.float32 else tl.sqrt(x)


@triton.jit
def _sign(x):
    return tl.where(x > 0, 1, 0).to(x.dtype) - tl.where(x < 0, 1, 0).to(x.dtype)


@triton.jit
def _max(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _min(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _add(a, b):
    return a + b


@triton.jit
def _mul(a, b):
    return a * b


@triton.jit
def _logaddexp(a, b):
    top = _max(a, b)
    total = top + {log}({exp_a} + {exp_b})
    return tl.where((top == float("-inf")) | (top == float("inf")), top, total)


@triton.jit
def _recur(a, b, c, d):
    # h -> c (a h + b) + d: first the step (a, b), then the step (c, d).
    return a * c, b * c + d


@triton.jit
def _round_fp16(x):
    return x.to(tl.float16).to(tl.float32)


@triton.jit
def _int_pow(x, y):
    # Wraps; of negative exponents only those of 1 and -1 are not 0.
    result = tl.zeros_like(x) + 1
    base = x
    left = tl.where(y < 0, y & 1, y)
    for _ in tl.static_range(63):
        result = tl.where((left & 1) != 0, result * base, result)
        base = base * base
        left = left >> 1
    return tl.where((y < 0) & (x != 1) & (x != -1), 0, result)

"""
# Results too small for a normal number become 0 here: that saves three instructions of five an exponential.
_ROUND_GPU = """
@triton.jit
def _fast_exp(x):
    return libdevice.fast_expf(x) if x.dtype == tl.float32 else tl.exp(x)


@triton.jit
def _fast_exp2(x):
    return libdevice.exp2(x) if x.dtype == tl.float32 else tl.exp2(x)


@triton.jit
def _fast_sigmoid(x):
    if x.dtype == tl.float32:
        return _fast_reciprocal(1.0 + _fast_exp_of_less(x))
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _fast_erf(x):
    # 1 - erfc, to 1.2e-7 (Press et al., Numerical Recipes, erfcc); of small numbers the series.
    size = tl.abs(x)
    if x.dtype == tl.float32:
        t = _fast_reciprocal(1.0 + 0.5 * size)
        p = 0.17087277 * t - 0.82215223
        p = p * t + 1.48851587
        p = p * t - 1.13520398
        p = p * t + 0.27886807
        p = p * t - 0.18628806
        p = p * t + 0.09678418
        p = p * t + 0.37409196
        p = p * t + 1.00002368
        p = p * t - 1.26551223
        one = 1.0 - t * _fast_exp(p - size * size)
        small = x * (1.12837917 - 0.37612639 * x * x)
        return tl.where(size < 0.01, small, tl.where(x < 0, -one, one))
    return tl.erf(x)


@triton.jit
def _fmod(x, y):
    return x % y if x.dtype.is_int() else libdevice.fmod(x, y)


@triton.jit
def _fmod_of_number(x, y):
    return x % y if y.dtype.is_int() else libdevice.fmod(x, y)


@triton.jit
def _pow(x, y):
    return _int_pow(x, tl.zeros_like(x) + y) if x.dtype.is_int() else libdevice.pow(x, y)


@triton.jit
def _pow_of_number(x, y):
    return _int_pow(tl.zeros_like(y) + x, y) if y.dtype.is_int() else libdevice.pow(x, y)
"""
_AGAIN = """
@triton.jit
def _again(x):
    return x.to(tl.float32)
"""
_ROUND_ALONE = """
@triton.jit
def _round_bf16(x):
    return x.to(tl.bfloat16).to(tl.float32)


@triton.jit
def _wide(x):
    return x.to(tl.float32)


@triton.jit
def _fast_reciprocal(x):
    return libdevice.fast_dividef(1.0, x)


@triton.jit
def _fast_exp_of_less(x):
    return libdevice.fast_expf(-x)
"""
# Two at once, back to float32 by a shift and a mask: of one value at a time ptxas makes F2F, which goes
# through the few units for special functions, and widens the upper of two loaded values by two instructions.
# What libdevice has for reciprocals and exponentials of less than x takes one more than the instruction.
_ROUND_PAIRS = """
@triton.jit
def _round_bf16(x):
    if x.numel == 1:
        return x.to(tl.bfloat16).to(tl.float32)
    else:
        return tl.inline_asm_elementwise(
            "{.reg .b32 t; cvt.rn.bf16x2.f32 t, $3, $2; shl.b32 $0, t, 16; and.b32 $1, t, 0xffff0000;}",
            "=f,=f,f,f", [x], dtype=tl.float32, is_pure=True, pack=2,
        )


@triton.jit
def _wide(x):
    if x.numel == 1:
        return x.to(tl.float32)
    else:
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=f,=f,r", [x], dtype=tl.float32, is_pure=True,
            pack=2,
        )


@triton.jit
def _fast_reciprocal(x):
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _fast_exp_of_less(x):
    return tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x * -1.44269504], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _again(x):
    # Not pure: a compiler that knows both results to be one keeps them, twice the registers.
    if x.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=f,=f,r", [x], dtype=tl.float32,
            is_pure=False, pack=2,
        )
    return tl.inline_asm_elementwise(
        "{.reg .b16 l, h; mov.b32 {l, h}, $2; cvt.f32.f16 $0, l; cvt.f32.f16 $1, h;}", "=f,=f,r", [x],
        dtype=tl.float32, is_pure=False, pack=2,
    )
"""
_ROUND_INTERPRETED = """
@triton.jit
def _round_bf16(x):
    bits = x.to(tl.int32, bitcast=True)
    near = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
    return tl.where(x != x, x, near)


@triton.jit
def _trunc(x):
    return tl.where(x < 0, tl.ceil(x), tl.floor(x))


@triton.jit
def _fmod(x, y):
    return x % y if x.dtype.is_int() else x - y * _trunc(x / y)


@triton.jit
def _fmod_of_number(x, y):
    return x % y if y.dtype.is_int() else x - y * _trunc(x / y)


@triton.jit
def _pow(x, y):
    return _int_pow(x, tl.zeros_like(x) + y) if x.dtype.is_int() else tl.exp2(y * tl.log2(x))


@triton.jit
def _pow_of_number(x, y):
    return _pow(tl.zeros_like(y) + x, y)


@triton.jit
def _round(x):
    low = tl.floor(x)
    half = x - low
    odd = low - 2.0 * tl.floor(low / 2.0)
    return tl.where((half > 0.5) | ((half == 0.5) & (odd != 0)), low + 1.0, low)
"""


def preamble(interpreted: bool, pairs: bool = False) -> str:
    """Imports and helper functions of every generated module; `pairs`: of a card that rounds two float32
    values to bfloat16 in one instruction.
    """
    imports = "import triton\nimport triton.language as tl\n"
    if not interpreted:
        imports += "from triton.language.extra import libdevice\n"
    own = "tl" if interpreted else "libdevice"
    spelled = {"exp": "exp(-x)", "exp_a": "exp(a - top)", "exp_b": "exp(b - top)", "log": "log"}
    helpers = _HELPERS
    for name, text in spelled.items():
        helpers = helpers.replace(f"{{{name}}}", f"{own}.{text}")
    alone = _ROUND_GPU + (_ROUND_PAIRS if pairs else _ROUND_ALONE + _AGAIN)
    rounding = _ROUND_INTERPRETED + _AGAIN if interpreted else alone
    return imports + "\n" + helpers + rounding


def spell(expr: Expr, args: list[str], interpreted: bool, alone: str = "", fast: bool = False) -> str:
    """Triton text of a scalar expression over the texts of its operands; with `alone`, a shape, numbers are
    tensors of it; `fast` takes the approximate instructions.
    """
    if isinstance(expr, Arg):
        return args[expr.index]
    if isinstance(expr, Const):
        return (
            f"tl.full({alone}, {number(expr.value)}, {_number_type(expr)})" if alone else number(expr.value)
        )
    if isinstance(expr, Cast):
        return rounded(spell(expr.arg, args, interpreted, alone, fast), expr.dtype)
    if fast and expr.name in FAST:
        return FAST[expr.name].format(*(spell(a, args, interpreted, alone, fast) for a in expr.args))
    if expr.name == "pow" and (power := _power(expr)):
        return power.format(spell(expr.args[0], args, interpreted, alone, fast))
    if expr.name == "div" and all(isinstance(a, Const) for a in expr.args) and not alone:
        return number(_divided(*(float(a.value) for a in expr.args if isinstance(a, Const))))
    if expr.name in OF_ONE_TYPE and not (alone or interpreted) and len(_numbers(expr)) == 1:
        (at,) = _numbers(expr)
        texts = [spell(a, args, interpreted, fast=fast) for a in expr.args]
        like = "_real_like" if _real(expr.args[at]) else "_like"
        texts[at] = f"{like}({texts[1 - at]}, {texts[at]})"
        return LIBDEVICE.get(expr.name, COMMON.get(expr.name, "")).format(*texts)
    if expr.name in ("div", "fmod", "pow") and isinstance(expr.args[0], Const) and not alone:
        inner = ", ".join(spell(a, args, interpreted, fast=fast) for a in expr.args)
        return f"_{expr.name}_of_number({inner})"
    table = COMMON if expr.name in COMMON else INTERPRETED if interpreted else LIBDEVICE
    if expr.name not in table:
        raise EsperError("E0525", f"{expr.name} has no spelling in Triton's interpreter", node=expr.name)
    return table[expr.name].format(*(spell(a, args, interpreted, alone, fast) for a in expr.args))


def real_operands(expr: Expr, kinds: Sequence[DType]) -> set[int]:
    """Operands that a function of real numbers takes as they are; powers and rests of two whole numbers are
    none.
    """

    def takes(e: Prim) -> bool:
        either = e.name in ("pow", "fmod") and any(
            _real(a) or (isinstance(a, Arg) and kinds[a.index].is_floating) for a in e.args
        )
        return e.name in OF_REALS or either

    found = [e for e in walk(expr) if isinstance(e, Prim) and takes(e)]
    return {a.index for e in found for a in e.args if isinstance(a, Arg)}


def _real(expr: Expr) -> bool:
    return isinstance(expr, Const) and isinstance(expr.value, float)


def _power(expr: Prim) -> str:
    """Template of a power by one of the numbers above; empty for any other."""
    exponent = expr.args[1]
    if not isinstance(exponent, Const):
        return ""
    return POWERS.get(exponent.value, "") or (REAL_POWERS.get(exponent.value, "") if _real(exponent) else "")


def _numbers(expr: Prim) -> list[int]:
    return [at for at, a in enumerate(expr.args) if isinstance(a, Const)]


def _divided(a: float, b: float) -> float:
    """As hardware divides."""
    if b:
        return a / b
    return math.nan if not a or math.isnan(a) else math.copysign(math.inf, a) * math.copysign(1.0, b)


def _number_type(number: Const) -> str:
    kind = DType.bool if isinstance(number.value, bool) else DType.int64
    return TRITON_TYPE[DType.float32 if isinstance(number.value, float) else kind]


def rounded(text: str, dtype: DType) -> str:
    """Value of `text` rounded to `dtype`, held in its compute type."""
    if dtype is DType.bfloat16:
        return f"_round_bf16(({text}).to(tl.float32))"
    if dtype is DType.float16:
        return f"_round_fp16(({text}).to(tl.float32))"
    return f"({text}).to({TRITON_TYPE[dtype]})"


def number(value: float | int | bool) -> str:
    """A number as Triton text."""
    if isinstance(value, float) and not math.isfinite(value):
        return 'float("nan")' if math.isnan(value) else f'float("{"-" if value < 0 else ""}inf")'
    return f"({value!r})" if not isinstance(value, bool) and value < 0 else repr(value)
