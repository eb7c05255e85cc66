"""Scalar expressions as C: one temporary per distinct sub-expression, each with the type torch would
compute it in."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from esper_ir.diagnostics import EsperError
from esper_ir.scalar import Arg, Cast, Const, Expr, Prim, walk
from esper_ir.types import DType, promote

# C type of a value in a register, by compute type. A truth value is an int that is 0 or 1.
REGISTER = {
    DType.float64: "double", DType.float32: "float", DType.int64: "int64_t", DType.int32: "int32_t",
    DType.int16: "int16_t", DType.int8: "int8_t", DType.uint8: "uint8_t", DType.bool: "int",
}  # fmt: skip
# C type of an element in memory.
MEMORY = {**REGISTER, DType.bfloat16: "uint16_t", DType.float16: "uint16_t", DType.bool: "uint8_t"}
HALVES = (DType.bfloat16, DType.float16)

_COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_LOGIC = {"and": "{0} & {1}", "or": "{0} | {1}", "xor": "{0} ^ {1}", "not": "!{0}"}
_ARITHMETIC = {"neg": "-{0}", "add": "{0} + {1}", "sub": "{0} - {1}", "mul": "{0} * {1}", "div": "{0} / {1}"}
_LIBM = (
    "tan", "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh", "erfc", "atan2", "fmod",
)  # fmt: skip
_OURS = ("exp", "exp2", "expm1", "log", "log2", "log1p", "tanh", "erf", "sin", "cos", "pow")


def _call(name: str, operands: int = 1) -> str:
    return f"{name}({', '.join('{' + str(i) + '}' for i in range(operands))})"


_TWO = ("atan2", "fmod", "pow")
FLOAT32 = {
    **_ARITHMETIC,
    **{name: _call(f"{name}f", 2 if name in _TWO else 1) for name in _LIBM},
    **{name: _call(f"{name}_f", 2 if name in _TWO else 1) for name in (*_OURS, "sigmoid", "rsqrt", "sign")},
    "abs": "__builtin_fabsf({0})", "sqrt": "__builtin_sqrtf({0})", "floor": "__builtin_floorf({0})",
    "ceil": "__builtin_ceilf({0})", "round": "__builtin_rintf({0})", "trunc": "__builtin_truncf({0})",
    "maximum": "max_f({0}, {1})", "minimum": "min_f({0}, {1})",
}  # fmt: skip
FLOAT64 = {
    **_ARITHMETIC,
    **{name: _call(name, 2 if name in _TWO else 1) for name in (*_LIBM, *_OURS)},
    **{name: _call(f"{name}_d") for name in ("sigmoid", "rsqrt", "sign")},
    "abs": "__builtin_fabs({0})", "sqrt": "__builtin_sqrt({0})", "floor": "__builtin_floor({0})",
    "ceil": "__builtin_ceil({0})", "round": "__builtin_rint({0})", "trunc": "__builtin_trunc({0})",
    "maximum": "max_d({0}, {1})", "minimum": "min_d({0}, {1})",
}  # fmt: skip
INTEGER = {
    **_ARITHMETIC, "div": "div_i({0}, {1})", "fmod": "mod_i({0}, {1})", "pow": "pow_i({0}, {1})",
    "abs": "abs_i({0})", "sign": "sign_i({0})", "maximum": "max_i({0}, {1})", "minimum": "min_i({0}, {1})",
    "floor": "{0}", "ceil": "{0}", "round": "{0}", "trunc": "{0}",
    "bitand": "{0} & {1}", "bitor": "{0} | {1}", "bitxor": "{0} ^ {1}", "quotient": "div_i({0}, {1})",
    "shl": "shl_i({0}, {1})", "shr": "shr_i({0}, {1})",
}  # fmt: skip
# Exponents that torch computes without pow.
_POWERS = {
    1.0: "{0}", 2.0: "{0} * {0}", 3.0: "{0} * {0} * {0}", -1.0: "1 / {0}", -2.0: "1 / ({0} * {0})",
}  # fmt: skip
# Results representable in bfloat16 or float16 whenever every operand is.
_EXACT = frozenset({"neg", "abs", "maximum", "minimum", "floor", "ceil", "round", "trunc", "sign"})


@dataclass(frozen=True)
class Term:
    """A C expression without side effects and the compute type it has."""

    text: str
    kind: DType


@dataclass
class Block:
    """Lines of one C scope. Temporaries are numbered by their right-hand side, here and in the scopes
    around."""

    outer: Block | None = None
    lines: list[str] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)
    exact: set[tuple[str, DType]] = field(default_factory=set)
    counter: Iterator[int] | None = None

    def _number(self) -> int:
        scope = self
        while scope.counter is None and scope.outer is not None:
            scope = scope.outer
        if scope.counter is None:
            scope.counter = iter(range(1_000_000))
        return next(scope.counter)

    def find(self, declared: str) -> str | None:
        if declared in self.names:
            return self.names[declared]
        return self.outer.find(declared) if self.outer else None

    def is_exact(self, text: str, dtype: DType) -> bool:
        """Whether a term is known to be representable in the 16-bit dtype."""
        return (text, dtype) in self.exact or bool(self.outer and self.outer.is_exact(text, dtype))

    def let(self, kind: DType, text: str) -> Term:
        """The temporary that holds `text`."""
        declared = f"{REGISTER[kind]} {text}"
        found = self.find(declared)
        if found is None:
            found = f"t{self._number()}"
            self.names[declared] = found
            self.lines.append(f"const {REGISTER[kind]} {found} = {text};")
        return Term(found, kind)


def constant(value: float | int | bool, kind: DType) -> str:
    """A Python number in a compute type; floats in hexadecimal, so that no digit is lost."""
    if not kind.is_floating:
        number = int(bool(value)) if kind is DType.bool else int(value)
        text = f"INT64_C({number})" if abs(number) > 2**31 - 1 else str(number)
        return f"({text})" if number < 0 else text
    number = float(value)
    if math.isnan(number):
        return '__builtin_nanf("")'
    if kind is DType.float32:
        number = _float32(number)
    if math.isinf(number):
        return "__builtin_inff()" if number > 0 else "(-__builtin_inff())"
    text = re.sub(r"\.?0*p", "p", number.hex()) + ("f" if kind is DType.float32 else "")
    return f"({text})" if text.startswith("-") else text


def _float32(number: float) -> float:
    try:
        return struct.unpack("f", struct.pack("f", number))[0]
    except OverflowError:
        return math.copysign(math.inf, number)


def body_kind(expr: Expr, args: Sequence[DType], dtype: DType) -> DType:
    """The type in which an expression that ends in `dtype` is computed: that of the result when it is
    floating (wider if an operand is), else the promoted type of the operands. Truth values and Python
    numbers do not count.
    """
    found: DType | None = dtype.compute if dtype.is_floating else None
    leaves = list(_leaf_dtypes(expr, args))
    for leaf in leaves:
        counts = leaf is not DType.bool and (leaf.is_floating or not dtype.is_floating)
        found = found if not counts else leaf.compute if found is None else promote(found, leaf.compute)
    if found is None:
        found = DType.bool if dtype is DType.bool and leaves else dtype.compute
    fraction = any(isinstance(e, Const) and isinstance(e.value, float) for e in walk(expr))
    return DType.float32 if fraction and not found.is_floating else found


def _leaf_dtypes(expr: Expr, args: Sequence[DType]) -> Iterator[DType]:
    if isinstance(expr, Arg):
        yield args[expr.index]
    elif isinstance(expr, Cast):
        yield expr.dtype
    elif isinstance(expr, Prim):
        for operand in expr.args:
            yield from _leaf_dtypes(operand, args)


def convert(term: Term, kind: DType) -> str:
    """C text of a term in another compute type."""
    if term.kind is kind:
        return term.text
    if kind is DType.bool:
        return f"({term.text} != 0)"
    if term.kind.is_floating and kind in (DType.int16, DType.int8, DType.uint8):
        return f"({REGISTER[kind]})(int32_t){term.text}"
    return f"({REGISTER[kind]}){term.text}"


def round_to(block: Block, term: Term, dtype: DType) -> Term:
    """The term rounded to a stored type, in that type's compute type. NaN stays NaN."""
    if dtype not in HALVES:
        return term if term.kind is dtype else block.let(dtype, convert(term, dtype))
    if block.is_exact(term.text, dtype):
        return term
    short = "bf16" if dtype is DType.bfloat16 else "f16"
    single = term if term.kind is DType.float32 else block.let(DType.float32, convert(term, DType.float32))
    out = block.let(DType.float32, f"round_{short}({single.text})")
    block.exact.add((out.text, dtype))
    return out


def spell(block: Block, expr: Expr, args: Sequence[Term], dtypes: Sequence[DType], dtype: DType) -> Term:
    """Append what computes `expr`, rounded to `dtype`; `dtypes` are the declared types of the arguments."""
    kind = body_kind(expr, dtypes, dtype)
    out = _Speller(block, args, dtypes).term(
        expr.arg if isinstance(expr, Cast) else expr, _inner(expr, dtypes, kind)
    )
    if isinstance(expr, Cast):
        out = round_to(block, out, expr.dtype)
    return round_to(block, out, dtype)


def _inner(expr: Expr, dtypes: Sequence[DType], kind: DType) -> DType:
    return _cast_kind(expr, dtypes) if isinstance(expr, Cast) else kind


def _cast_kind(cast: Cast, dtypes: Sequence[DType]) -> DType:
    """A cast reads a plain operand in the operand's own type; under it a body is computed as if it ended
    there."""
    if isinstance(cast.arg, Arg):
        return dtypes[cast.arg.index].compute
    if isinstance(cast.arg, Cast):
        return cast.arg.dtype.compute
    return body_kind(cast.arg, dtypes, cast.dtype)


@dataclass
class _Speller:
    block: Block
    args: Sequence[Term]
    dtypes: Sequence[DType]
    seen: dict[tuple[int, DType], Term] = field(default_factory=dict)

    def term(self, expr: Expr, kind: DType) -> Term:
        """`expr` in the compute type `kind`, except that truth values stay truth values."""
        key = (id(expr), kind)
        if key not in self.seen:
            self.seen[key] = self._fresh(expr, kind)
        return self.seen[key]

    def _fresh(self, expr: Expr, kind: DType) -> Term:
        if isinstance(expr, Const):
            return Term(constant(expr.value, kind), kind)
        if isinstance(expr, Arg):
            return self._in_kind(self.args[expr.index], kind)
        if isinstance(expr, Cast):
            inner = self.term(expr.arg, _cast_kind(expr, self.dtypes))
            return self._in_kind(round_to(self.block, inner, expr.dtype), kind)
        return self._prim(expr, kind)

    def _in_kind(self, term: Term, kind: DType) -> Term:
        if term.kind in (kind, DType.bool):
            return term
        return self.block.let(kind, convert(term, kind))

    def _number(self, expr: Expr, kind: DType) -> str:
        term = self.term(expr, kind)
        return term.text if term.kind is kind else self.block.let(kind, convert(term, kind)).text

    def _truth(self, expr: Expr, kind: DType) -> str:
        term = self.term(expr, kind)
        return convert(term, DType.bool)

    def _prim(self, expr: Prim, kind: DType) -> Term:
        name = expr.name
        if name in _COMPARISONS:
            a, b = (self._number(e, kind) for e in expr.args)
            return self.block.let(DType.bool, f"{a} {_COMPARISONS[name]} {b}")
        if name == "isnan":
            a = self._number(expr.args[0], kind)
            return self.block.let(DType.bool, f"{a} != {a}")
        if name in _LOGIC:
            return self.block.let(DType.bool, _LOGIC[name].format(*(self._truth(e, kind) for e in expr.args)))
        if name == "where":
            return self._where(expr, kind)
        return self._arithmetic(expr, kind)

    def _where(self, expr: Prim, kind: DType) -> Term:
        condition = self._truth(expr.args[0], kind)
        chosen = [self.term(e, kind) for e in expr.args[1:]]
        result = DType.bool if all(c.kind is DType.bool for c in chosen) else kind
        a, b = (
            c.text if c.kind is result else self.block.let(result, convert(c, result)).text for c in chosen
        )
        out = self.block.let(result, f"{condition} ? {a} : {b}")
        return self._mark(out, (a, b))

    def _arithmetic(self, expr: Prim, kind: DType) -> Term:
        work = DType.int32 if kind is DType.bool else kind
        operands = [self._number(e, work) for e in expr.args]
        out = self.block.let(work, _template(expr, kind).format(*operands))
        if kind is DType.bool:
            return self.block.let(DType.bool, f"{out.text} != 0")
        return self._mark(out, operands) if expr.name in _EXACT else out

    def _mark(self, out: Term, operands: Sequence[str]) -> Term:
        for dtype in HALVES:
            if all(self.block.is_exact(o, dtype) or o == "0x0p+0f" for o in operands):
                self.block.exact.add((out.text, dtype))
        return out


def _template(expr: Prim, kind: DType) -> str:
    table = {DType.float32: FLOAT32, DType.float64: FLOAT64}.get(kind, INTEGER)
    exponent = expr.args[1] if expr.name == "pow" else None
    if kind.is_floating and isinstance(exponent, Const):
        if exponent.value in _POWERS:
            return _POWERS[exponent.value]
        if abs(exponent.value) == 0.5:
            return table["sqrt" if exponent.value > 0 else "rsqrt"]
    if expr.name not in table:
        raise EsperError(
            "E0524",
            f"{expr.name} of {kind.value} has no C spelling",
            hint="cast the operand to a floating type",
        )
    return table[expr.name]
