"""What a conversion rule sees: the builder, the precision in force, the shapes that torch found."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from esper_ir.builder import Builder, Value
from esper_ir.diagnostics import EsperError
from esper_ir.opdef import Number
from esper_ir.types import Dim, DType, TensorType

Scalar = Number | Dim
Tensor = Value | Scalar
Shape = tuple[Dim, ...]
Made = Value | tuple[Value | None, ...]


@dataclass(frozen=True)
class Rule:
    """How one operator of torch is written here: `convert(context, *arguments)` with the arguments of its
    schema. Tensors come as values, symbolic sizes as dims, dtypes as DType; None for an output that has no
    counterpart.
    """

    name: str
    convert: Callable[..., Any]


@dataclass(frozen=True)
class Precision:
    """Multiplication of float32 operands: "ieee" or "tf32"."""

    matmul: str = "ieee"
    convolution: str = "ieee"


@dataclass
class Context:
    """Adds nodes for one node of torch's graph after the other.

    `shapes`: of the outputs of the node at hand, None where torch's expression has no counterpart. `updates`:
    new values of buffers, by the name of the buffer. `seed`: the input that random operators read, `places`
    of them so far.
    """

    builder: Builder
    precision: Precision
    training_updates: bool = False
    shapes: tuple[Shape | None, ...] = ()
    updates: dict[str, Value] = field(default_factory=dict)
    updated: set[str] = field(default_factory=set)
    seed: Value | None = None
    places: int = 0

    def op(self, name: str, *operands: Tensor, **attrs: Any) -> Value:
        return self.many(name, *operands, **attrs)[0]

    def many(self, name: str, *operands: Tensor, **attrs: Any) -> tuple[Value, ...]:
        like = next((o.type for o in operands if isinstance(o, Value)), TensorType(DType.float32, ()))
        return self.builder.many(name, *(self.operand(o, like) for o in operands), **attrs)

    def operand(self, value: Tensor, like: TensorType) -> Value | Number:
        """A number that the text can hold, else a value without axes, which promotes as the number does."""
        if isinstance(value, Value):
            return value
        if isinstance(value, Dim):
            exact = like.dtype.compute if like.rank and like.dtype.is_floating else DType.int64
            return value.static if value.static is not None else self.size(value, exact)
        return value if math.isfinite(value) else self.special(value, like.dtype)

    def size(self, dim: Dim, dtype: DType = DType.int64) -> Value:
        return self.builder.op("full", shape=(), value=dim, dtype=dtype)

    def special(self, number: float, like: DType) -> Value:
        """An infinity or NaN as the value that makes it: the text has finite numbers only."""
        dtype = like if like.is_floating else DType.float32
        low = self.builder.op("log", self.builder.op("full", shape=(), value=0.0, dtype=dtype))
        if math.isnan(number):
            return self.builder.op("sub", low, low)
        return low if number < 0 else self.builder.op("neg", low)

    def full(self, shape: Sequence[Scalar], value: Scalar, dtype: DType) -> Value:
        if isinstance(value, float) and not math.isfinite(value):
            made = self.special(value, dtype)
            return made if not shape else self.op("expand", made, shape=tuple(shape))
        plain = bool(value) if dtype is DType.bool and not isinstance(value, Dim) else value
        return self.builder.op("full", shape=tuple(shape), value=plain, dtype=dtype)

    def tensor(self, value: Tensor, dtype: DType) -> Value:
        """The operand as a value."""
        return value if isinstance(value, Value) else self.full((), value, dtype)

    def cast(self, x: Value, dtype: DType | None) -> Value:
        return x if dtype is None or x.type.dtype is dtype else self.builder.op("cast", x, dtype=dtype)

    def shape(self, wanted: Sequence[Scalar]) -> Shape:
        """The shape of the only output, as torch found it; else as it was asked for."""
        if self.shapes and self.shapes[0] is not None:
            return self.shapes[0]
        return tuple(dim_of(s) for s in wanted)

    def reshape(self, x: Value, shape: Sequence[Scalar]) -> Value:
        wanted = tuple(dim_of(s) for s in shape)
        return x if x.type.shape == wanted else self.op("reshape", x, shape=wanted)

    def permute(self, x: Value, dims: Sequence[int]) -> Value:
        order = tuple(d % max(x.type.rank, 1) for d in dims)
        return x if order == tuple(range(x.type.rank)) else self.op("permute", x, dims=order)

    def drawn(self) -> tuple[Value, int]:
        """The seed, an input that callers do not give, and a number for the next place that draws."""
        if self.seed is None:
            self.seed = self.builder.input(self.free_name("seed"), DType.int64, (1,))
        self.places += 1
        return self.seed, self.places - 1

    def free_name(self, name: str) -> str:
        while not self.builder.is_free(name):
            name += "_"
        return name

    def update(self, buffer: Value, make: Callable[[], Value]) -> None:
        """A buffer gets a new value; it is computed only when it was asked for."""
        self.updated.add(buffer.name)
        if self.training_updates:
            self.updates[buffer.name] = make()


def dim_of(value: Scalar) -> Dim:
    """A size, as a dim."""
    return value if isinstance(value, Dim) else Dim.of(int(value))


def plain(dim: Dim) -> Scalar:
    """A number where the dim is one."""
    return dim if dim.static is None else dim.static


def static(value: Scalar, what: str) -> int:
    """A size that has to be a number; E0206."""
    if isinstance(value, Dim):
        if value.static is None:
            raise EsperError("E0206", f"{what} is the symbolic size {value}", hint="make it static")
        return value.static
    return int(value)


def unsupported(reason: str, hint: str | None = None) -> EsperError:
    """E0406: what torch's graph asks for has no counterpart."""
    return EsperError("E0406", reason, hint=hint)


def each(convert: Callable[..., Any], *names: str) -> tuple[Rule, ...]:
    """One rule under several names, without "aten."."""
    return tuple(Rule(f"aten.{name}", convert) for name in names)
