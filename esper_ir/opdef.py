"""What an operator is: one record with its shape rule, meaning, gradient, loop shape, samples and tolerance.

Types only: operator families import this module, and nothing here imports them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from esper_ir.scalar import Expr
from esper_ir.types import DType, TensorType, promote

REQUIRED = object()
Attrs = Mapping[str, Any]
Number = int | float | bool


@dataclass(frozen=True)
class Attr:
    """A typed attribute. `kind`: int, float, bool, str, dtype, ints (tuple of int), shape (tuple of Dim),
    number (int, float or bool, kept as it is), scalar (a number or a Dim).

    A default of None means that the attribute may be left out or null.
    """

    name: str
    kind: str
    default: Any = REQUIRED
    choices: tuple[Any, ...] = ()
    doc: str = ""


@dataclass(frozen=True)
class Val:
    """A value of a graph under construction: its name and type."""

    name: str
    type: TensorType


Operand = Val | Number
"""What a rule receives: a tensor value, or a Python number (weakly typed as in torch)."""


class Emit(Protocol):
    """Adds a node to the graph under construction; the shape rule is applied at once.

    `emit("sum", x, dims=(1,), keepdim=True)`; the outputs of an operator with several come by `emit.many`.
    """

    def __call__(self, op: str, *operands: Operand, **attrs: Any) -> Val: ...

    def many(self, op: str, *operands: Operand, **attrs: Any) -> tuple[Val, ...]: ...


InferRule = Callable[[Sequence[TensorType | Number], Attrs], tuple[TensorType, ...]]
"""Types of the outputs; raises EsperError (E02xx) with both shapes and the rule when they do not fit."""

Operands = Sequence[Operand]
Vals = Sequence[Val]
Cotangents = Sequence[Val | None]
Wanted = Sequence[bool]

VjpRule = Callable[
    [Emit, Sequence[Operand], Sequence[Val], Sequence[Val | None], Attrs, Sequence[bool]],
    Sequence[Val | None],
]
"""(emit, inputs, outputs, cotangents of outputs, attrs, wanted per input) -> cotangent per input or None."""


@dataclass(frozen=True)
class Pointwise:
    """Element by element with torch's broadcasting; `body(attrs)` is an expression over `Arg(i)`, one per
    operand.

    It is computed in `compute_dtype(operands, outputs)`; an operand of dtype bool stays a truth value.
    """

    body: Callable[[Attrs], Expr]


@dataclass(frozen=True)
class Reduction:
    """Over attribute `dims` (tuple of non-negative ints), `keepdim`. `combine`: sum, max, min, prod, squares
    (the sum of squared differences from the mean).

    Accumulates in float32 (float64 for float64); `mean` divides the sum by the number of elements reduced.
    """

    combine: str
    mean: bool = False


@dataclass(frozen=True)
class Movement:
    """Data movement without arithmetic. `kind`: expand, reshape (attribute `shape`), permute (`dims`), slice
    (`dim`, `start`, `step`), flip (`dim`) or window (see ops/windows.py).
    """

    kind: str


@dataclass(frozen=True)
class Contraction:
    """`spec`: "matmul" (torch.matmul of rank >= 2 operands, batch dims broadcast, fp32 accumulation)."""

    spec: str


@dataclass(frozen=True)
class Composite:
    """Stays whole in the text; `expand(emit, inputs, attrs)` gives the same outputs in primitives."""

    expand: Callable[[Emit, Sequence[Operand], Attrs], Sequence[Val]]


@dataclass(frozen=True)
class Creation:
    """No tensor operand: `full` (attributes `shape`, `dtype`, `value`) or `arange` (`end`, `dtype`)."""

    kind: str


@dataclass(frozen=True)
class Opaque:
    """Only a template, or the extern step, of this name can lower it. All operands are tensors."""

    template: str


@dataclass(frozen=True)
class Lookup(Opaque):
    """Rows of the second operand, a table, by their number in the first."""


@dataclass(frozen=True)
class Scan(Opaque):
    """A running value along attribute `dim`, from the other end where `reverse` is set. `combine`: "sum",
    "prod" or "logsumexp" of one operand, or "recurrence" of two, h = a h' + b from h' = 0.
    """

    combine: str


IndexLimit = Callable[[Sequence["TensorType | Number"], Attrs], Any]
"""(operand types, attributes) -> the Dim that an index lies below."""

Lowering = Pointwise | Reduction | Movement | Contraction | Composite | Creation | Opaque


@dataclass(frozen=True)
class NotDifferentiable:
    """Why there is no gradient. `constant`: the result counts as a constant (it is piecewise constant, or cut
    off by intention), so that asking for a gradient through it is no error and gives zero, as in torch.
    """

    reason: str
    constant: bool = False


@dataclass(frozen=True)
class ByExpansion:
    """A composite whose gradient is that of its expansion."""


@dataclass(frozen=True)
class Sample:
    """One test case: operand types (static shapes) or numbers, attributes, bounds of the random values."""

    operands: tuple[TensorType | Number, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    low: float = -2.0
    high: float = 2.0


@dataclass(frozen=True)
class Tolerance:
    """Ulps-like factor over the table in esper_ir/oracle.py, with the reason why the default does not do."""

    factor: float = 1.0
    reason: str = ""


@dataclass(frozen=True)
class OpDef:
    """The whole of one operator.

    `reference(inputs, attrs)` is given torch tensors (or numbers) and returns a tuple of tensors: it is the
    torch call of that name, resolved when used, so that this package works without torch. `arity` is (least,
    most) operands; `cost(input types, output types, attrs)` is floating-point operations as a Dim. `resolve`
    completes attributes once operand types are known (axes counted from the front, -1 in shapes replaced).
    `indices`: operands whose values are positions, and the size of what they point into.
    """

    name: str
    infer: InferRule
    reference: Callable[[Sequence[Any], Attrs], tuple[Any, ...]]
    vjp: VjpRule | NotDifferentiable | ByExpansion
    lowering: Lowering
    samples: tuple[Sample, ...]
    arity: tuple[int, int]
    params: tuple[Attr, ...] = ()
    tolerance: Tolerance = Tolerance()
    cost: Callable[[Sequence[TensorType | Number], Sequence[TensorType], Attrs], Any] | None = None
    commutative: bool = False
    resolve: Callable[[Sequence[TensorType | Number], Attrs], dict[str, Any]] | None = None
    doc: str = ""
    indices: Mapping[int, IndexLimit] = field(default_factory=dict)

    def attr(self, name: str) -> Attr | None:
        return next((a for a in self.params if a.name == name), None)


FLOATS = (DType.float64, DType.float32, DType.bfloat16, DType.float16)


def compute_dtype(operands: Sequence[TensorType | Number], outputs: Sequence[TensorType]) -> DType:
    """The type in which a pointwise body is computed: that of the result when it is floating, else
    (comparisons and integers) the promoted type of the operands. A `cast` reads its operand in the operand's
    own type.
    """
    out = outputs[0].dtype
    if out.is_floating:
        return out.compute
    found: DType | None = None
    for operand in operands:
        if isinstance(operand, TensorType):
            found = operand.dtype if found is None else promote(found, operand.dtype)
    return (found or out).compute
