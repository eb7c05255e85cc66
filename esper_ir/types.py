"""Types of the graph language: dtypes, symbolic dimensions and tensor types. Standard library only."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property, reduce
from math import gcd
from types import MappingProxyType

from esper_ir.diagnostics import EsperError, did_you_mean


class DType(enum.Enum):
    """Element types; the value is torch's name of it."""

    float64 = "float64"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"
    int64 = "int64"
    int32 = "int32"
    int16 = "int16"
    int8 = "int8"
    uint8 = "uint8"
    bool = "bool"

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return _ITEMSIZE[self.value]

    @property
    def is_floating(self) -> bool:
        return self.value in ("float64", "float32", "bfloat16", "float16")

    @property
    def compute(self) -> DType:
        """The type in which arithmetic on this type happens (torch's opmath type)."""
        return DType.float32 if self in (DType.bfloat16, DType.float16) else self

    @staticmethod
    def parse(text: object, where: str | None = None) -> DType:
        try:
            return DType(text)
        except ValueError:
            known = [d.value for d in DType]
            hint = did_you_mean(str(text), known, f"one of: {', '.join(known)}")
            raise EsperError("E0103", f"unsupported dtype {text!r}", node=where, hint=hint) from None


_ITEMSIZE = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1,
    "uint8": 1, "bool": 1,
}  # fmt: skip
_RANK = {DType.bool: 0, DType.uint8: 1, DType.int8: 2, DType.int16: 3, DType.int32: 4, DType.int64: 5}


def promote(a: DType, b: DType) -> DType:
    """Result type of two tensors of the same category or not, as torch.promote_types."""
    if a is b:
        return a
    if a.is_floating and b.is_floating:
        if {a, b} == {DType.float16, DType.bfloat16}:
            return DType.float32
        return a if a.itemsize > b.itemsize else b
    if a.is_floating or b.is_floating:
        return a if a.is_floating else b
    if {a, b} == {DType.uint8, DType.int8}:
        return DType.int16
    return a if _RANK[a] > _RANK[b] else b


@dataclass(frozen=True)
class FloorDiv:
    """Atom `floordiv(numerator, divisor)` with a positive constant divisor."""

    numerator: Dim
    divisor: int

    def __str__(self) -> str:
        return f"floordiv({self.numerator}, {self.divisor})"


Atom = str | FloorDiv
Monomial = tuple[Atom, ...]
Interval = tuple[int, int | None]
IntLike = "int | Dim"


def _atom_key(atom: Atom) -> tuple[int, str]:
    return (0, atom) if isinstance(atom, str) else (1, str(atom))


def _monomial_key(m: Monomial) -> tuple[int, list[tuple[int, str]]]:
    return (-len(m), [_atom_key(a) for a in m])


@dataclass(frozen=True)
class Dim:
    """A size: polynomial over symbols and floordiv atoms with integer coefficients, in normal form.

    Two dims are equal exactly when their normal forms are; that is the only equality the language proves.
    """

    terms: tuple[tuple[Monomial, int], ...] = ()

    @staticmethod
    def of(value: int | str | Dim) -> Dim:
        """An int, an expression such as "floordiv(h-1, 2)+1", or a Dim."""
        if isinstance(value, Dim):
            return value
        if isinstance(value, int):
            return Dim((((), value),)) if value else Dim()
        return _Parser(value if isinstance(value, str) else repr(value)).parse()  # refuses what is no size

    @staticmethod
    def sym(name: str) -> Dim:
        return Dim((((name,), 1),))

    @staticmethod
    def _build(terms: Mapping[Monomial, int]) -> Dim:
        kept = [(m, c) for m, c in terms.items() if c]
        if len(kept) > 1:
            kept.sort(key=lambda t: _monomial_key(t[0]))
        return Dim(tuple(kept))

    @property
    def static(self) -> int | None:
        """The value when no symbol occurs, else None."""
        if not self.terms:
            return 0
        if len(self.terms) == 1 and not self.terms[0][0]:
            return self.terms[0][1]
        return None

    def __add__(self, other: int | Dim) -> Dim:
        other = Dim.of(other)
        if not self.terms or not other.terms:
            return self if self.terms else other
        out = dict(self.terms)
        for m, c in other.terms:
            out[m] = out.get(m, 0) + c
        return Dim._build(out)

    __radd__ = __add__

    def __neg__(self) -> Dim:
        return Dim(tuple((m, -c) for m, c in self.terms))

    def __sub__(self, other: int | Dim) -> Dim:
        return self + (-Dim.of(other))

    def __rsub__(self, other: int | Dim) -> Dim:
        return Dim.of(other) - self

    def __mul__(self, other: int | Dim) -> Dim:
        other = Dim.of(other)
        for times, rest in ((other.static, self), (self.static, other)):
            if times is not None:  # the usual case: the order of the terms stays
                return Dim(tuple((m, c * times) for m, c in rest.terms)) if times else Dim()
        out: dict[Monomial, int] = {}
        for m, c in self.terms:
            for n, d in other.terms:
                key = tuple(sorted(m + n, key=_atom_key))
                out[key] = out.get(key, 0) + c * d
        return Dim._build(out)

    __rmul__ = __mul__

    def __floordiv__(self, divisor: int) -> Dim:
        if divisor <= 0:
            hint = "the divisor must be a positive constant"
            raise EsperError("E0104", f"floordiv by {divisor}", hint=hint)
        whole = Dim(tuple((m, c // divisor) for m, c in self.terms if c % divisor == 0))
        rest = Dim(tuple((m, c) for m, c in self.terms if c % divisor))
        if rest.static is not None:
            return whole + rest.static // divisor
        return whole + Dim((((FloorDiv(rest, divisor),), 1),))

    def value(self, bindings: Mapping[str, int]) -> int:
        """Evaluate with every symbol bound."""
        total = 0
        for monomial, coefficient in self.terms:
            for atom in monomial:
                if isinstance(atom, str):
                    coefficient *= bindings[atom]
                else:
                    coefficient *= atom.numerator.value(bindings) // atom.divisor
            total += coefficient
        return total

    def substitute(self, bindings: Mapping[str, Dim]) -> Dim:
        """Replace symbols by dims (used to rename symbols)."""
        total = Dim()
        for monomial, coefficient in self.terms:
            part = Dim.of(coefficient)
            for atom in monomial:
                if isinstance(atom, str):
                    part = part * bindings.get(atom, Dim.sym(atom))
                else:
                    part = part * (atom.numerator.substitute(bindings) // atom.divisor)
            total = total + part
        return total

    def symbols(self) -> frozenset[str]:
        out: set[str] = set()
        for monomial, _ in self.terms:
            for atom in monomial:
                out |= {atom} if isinstance(atom, str) else atom.numerator.symbols()
        return frozenset(out)

    def bounds(self, ranges: Mapping[str, Interval]) -> tuple[int | None, int | None]:
        """Interval of values, given non-negative symbol ranges; None is unbounded."""
        low: int | None = 0
        high: int | None = 0
        for monomial, coefficient in self.terms:
            mono_low, mono_high = _monomial_bounds(monomial, ranges)
            ends = (mono_low, mono_high) if coefficient > 0 else (mono_high, mono_low)
            low = None if low is None or ends[0] is None else low + coefficient * ends[0]
            high = None if high is None or ends[1] is None else high + coefficient * ends[1]
        return low, high

    def multiple(self, multiples: Mapping[str, int]) -> int:
        """A known divisor of every value (0 only for the dim 0), given the declared ones of symbols."""
        parts = []
        for monomial, coefficient in self.terms:
            for atom in monomial:
                coefficient *= multiples.get(atom, 1) if isinstance(atom, str) else 1
            parts.append(abs(coefficient))
        return reduce(gcd, parts, 0)

    def __str__(self) -> str:
        if not self.terms:
            return "0"
        out = ""
        for monomial, coefficient in self.terms:
            body = "*".join(str(a) for a in monomial)
            if not body:
                text = str(abs(coefficient))
            else:
                text = body if abs(coefficient) == 1 else f"{abs(coefficient)}*{body}"
            sign = "-" if coefficient < 0 else ("+" if out else "")
            out += sign + text
        return out

    def to_json(self) -> int | str:
        return self.static if self.static is not None else str(self)


def _monomial_bounds(monomial: Monomial, ranges: Mapping[str, Interval]) -> tuple[int | None, int | None]:
    low: int | None = 1
    high: int | None = 1
    for atom in monomial:
        if isinstance(atom, str):
            a, b = ranges.get(atom, (0, None))
        else:
            n_low, n_high = atom.numerator.bounds(ranges)
            a = None if n_low is None else n_low // atom.divisor
            b = None if n_high is None else n_high // atom.divisor
        if a is None or a < 0:
            return None, None  # signs of products are not tracked: "cannot prove"
        low = None if low is None else low * a
        high = None if high is None or b is None else high * b
    return low, high


MAX_TERMS = 64
MAX_COEFFICIENT = 2**63 - 1


class _Parser:
    """Recursive descent over `+ - * ( ) floordiv(e, n) name int`."""

    _token = re.compile(r"\s*(?:(\d+)|([A-Za-z_]\w*)|(.))", re.ASCII | re.DOTALL)

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = [
            next(g for g in m.groups() if g is not None) for m in self._token.finditer(text.strip())
        ]
        self.at = 0

    def fail(self) -> EsperError:
        hint = "names, integers, + - *, floordiv(e, n)"
        return EsperError("E0104", f"cannot read the dimension {self.text[:200]!r}", hint=hint)

    def parse(self) -> Dim:
        if len(self.text) > 4096:
            raise self.fail()
        out = self.sum(0)
        if self.at != len(self.tokens):
            raise self.fail()
        return out

    def peek(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def take(self, expected: str | None = None) -> str:
        token = self.peek()
        if not token or len(token) > 200 or (expected is not None and token != expected):
            raise self.fail()
        self.at += 1
        return token

    def sum(self, depth: int) -> Dim:
        if depth > 32:
            raise self.fail()
        out = -self.product(depth, skip="-") if self.peek() == "-" else self.product(depth)
        while self.peek() in ("+", "-"):
            sign = self.take()
            term = self.product(depth)
            out = out + term if sign == "+" else out - term
        return out

    def product(self, depth: int, skip: str = "") -> Dim:
        if skip:
            self.take(skip)
        out = self.atom(depth)
        while self.peek() == "*":
            self.take()
            out = out * self.atom(depth)
            if len(out.terms) > MAX_TERMS or any(abs(c) > MAX_COEFFICIENT for _, c in out.terms):
                raise self.fail()  # a product of sums grows exponentially
        return out

    def atom(self, depth: int) -> Dim:
        token = self.take()
        if token.isdecimal():
            if len(token) > 18:
                raise self.fail()
            return Dim.of(int(token))
        if token == "(":
            inner = self.sum(depth + 1)
            self.take(")")
            return inner
        if token == "floordiv":
            self.take("(")
            inner = self.sum(depth + 1)
            self.take(",")
            divisor = self.take()
            self.take(")")
            if not divisor.isdecimal():
                raise self.fail()
            return inner // int(divisor)
        if re.fullmatch(r"[A-Za-z_]\w*", token, re.ASCII):
            return Dim.sym(token)
        raise self.fail()


@dataclass(frozen=True)
class DimSpec:
    """A declared symbol: inclusive range, sizes to tune for, known divisor."""

    min: int = 1
    max: int = 2**31 - 1
    tune: tuple[int, ...] = ()
    multiple_of: int = 1


_DECLARED: ContextVar[Mapping[str, DimSpec]] = ContextVar("declared", default=MappingProxyType({}))


@contextmanager
def declared(dims: Mapping[str, DimSpec]) -> Iterator[None]:
    """The ranges that shape rules may use for proofs inside."""
    token = _DECLARED.set(dims)
    try:
        yield
    finally:
        _DECLARED.reset(token)


def least(dim: Dim) -> int | None:
    """The smallest value that is proved over the declared ranges; symbols that are not declared are not
    negative.
    """
    if dim.static is not None:
        return dim.static
    dims = _DECLARED.get()
    return dim.bounds({name: (dims[name].min, dims[name].max) for name in dim.symbols() if name in dims})[0]


@dataclass(frozen=True)
class TensorType:
    """dtype and shape (outermost first)."""

    dtype: DType
    shape: tuple[Dim, ...]

    @staticmethod
    def of(dtype: str | DType, shape: Iterable[int | str | Dim]) -> TensorType:
        kind = dtype if isinstance(dtype, DType) else DType.parse(dtype)
        return TensorType(kind, tuple(Dim.of(s) for s in shape))

    @property
    def rank(self) -> int:
        return len(self.shape)

    @cached_property
    def numel(self) -> Dim:
        return reduce(lambda a, b: a * b, self.shape, Dim.of(1))

    @cached_property
    def nbytes(self) -> Dim:
        return self.numel * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.dtype.value}[{', '.join(str(s) for s in self.shape)}]"
