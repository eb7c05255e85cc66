"""Shape and type rules that operator families share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from esper_ir.diagnostics import EsperError
from esper_ir.lazy import torch
from esper_ir.opdef import Attrs, InferRule, Number
from esper_ir.types import Dim, DType, TensorType, promote

Shape = tuple[Dim, ...]
Operands = Sequence[TensorType | Number]
ONE = Dim.of(1)
CATEGORY = {"any": 0, "number": 1, "float": 2}


def show(shape: Shape) -> str:
    return f"[{', '.join(str(d) for d in shape)}]"


def conflict(rule: str, *types: TensorType | Number | Shape) -> EsperError:
    """E0204 naming the shapes and the rule they break."""
    found = " and ".join(show(t) if isinstance(t, tuple) else str(t) for t in types)
    return EsperError("E0204", f"shapes {found} do not fit", hint=rule)


def same(a: Dim, b: Dim, rule: str, *shapes: Shape) -> None:
    """Demand equal sizes: E0204 when both are numbers, E0206 when equality cannot be proved."""
    if a == b:
        return
    if a.static is not None and b.static is not None:
        raise conflict(rule, *shapes)
    found = " and ".join(show(s) for s in shapes)
    raise EsperError("E0206", f"cannot prove {a} == {b} for {found}", hint=rule)


def broadcast(shapes: Sequence[Shape]) -> Shape:
    """torch's broadcasting: aligned at the right, equal or 1."""
    out = shapes[0]
    for shape in shapes[1:]:
        if shape == out:
            continue
        rank = max(len(out), len(shape))
        a = (ONE,) * (rank - len(out)) + out
        b = (ONE,) * (rank - len(shape)) + shape
        for x, y in zip(a, b, strict=True):
            if x != ONE and y != ONE:
                same(x, y, "sizes must be equal or 1, aligned at the right", out, shape)
        out = tuple(y if x == ONE else x for x, y in zip(a, b, strict=True))
    return out


def number_dtype(value: Number) -> DType:
    """What a Python number is on its own: torch's default types."""
    if isinstance(value, bool):
        return DType.bool
    return DType.int64 if isinstance(value, int) else DType.float32


def category(dtype: DType) -> int:
    if dtype is DType.bool:
        return 0
    return 2 if dtype.is_floating else 1


def result_type(operands: Sequence[TensorType | Number]) -> DType:
    """torch.result_type: tensors with dimensions first, then those without, then numbers; a later group
    counts only when its category (bool < integer < floating) is higher.
    """
    groups: list[DType | None] = [None, None, None]
    for operand in operands:
        at = 2 if not isinstance(operand, TensorType) else (0 if operand.rank else 1)
        dtype = operand.dtype if isinstance(operand, TensorType) else number_dtype(operand)
        kept = groups[at]
        groups[at] = dtype if kept is None else promote(kept, dtype)
    out: DType | None = None
    for dtype in groups:
        if dtype is not None and (out is None or category(dtype) > category(out)):
            out = dtype if out is None or category(dtype) > category(out) else out
    assert out is not None
    return out


def as_float(dtype: DType) -> DType:
    return dtype if dtype.is_floating else DType.float32


def accept(operands: Sequence[TensorType | Number], what: str) -> None:
    """E0205 unless every tensor is of the category: any, number (no bool), float. Numbers may be integers."""
    for operand in operands:
        dtype = operand.dtype if isinstance(operand, TensorType) else number_dtype(operand)
        least = CATEGORY[what] if isinstance(operand, TensorType) else min(CATEGORY[what], 1)
        if category(dtype) < least:
            raise EsperError(
                "E0205", f"{operand} is not accepted", hint=f"the operand must be a {what} tensor"
            )


def tensor(operand: TensorType | Number, position: int = 0) -> TensorType:
    """E0208 when the operand is a Python number."""
    if not isinstance(operand, TensorType):
        raise EsperError(
            "E0208", f"operand {position} is the number {operand!r}", hint="a tensor is needed here"
        )
    return operand


def elementwise(out: str, accepts: str) -> InferRule:
    """`out`: same, float (integers become float32) or bool."""

    def infer(operands: Sequence[TensorType | Number], attrs: Attrs) -> tuple[TensorType, ...]:
        shapes = [o.shape for o in operands if isinstance(o, TensorType)]
        if not shapes:
            raise EsperError(
                "E0208", "all operands are numbers", hint="at least one operand must be a tensor"
            )
        accept(operands, accepts)
        dtype = DType.bool if out == "bool" else result_type(operands)
        return (TensorType(as_float(dtype) if out == "float" else dtype, broadcast(shapes)),)

    return infer


def axis(value: int, rank: int) -> int:
    """An axis counted from the front; E0207 when it is out of range."""
    size = max(rank, 1)
    if not -size <= value < size:
        raise EsperError(
            "E0207", f"axis {value} of a tensor of rank {rank}", hint=f"from {-size} to {size - 1}"
        )
    return value % size


def axes(values: Sequence[int] | None, rank: int) -> tuple[int, ...]:
    """Axes counted from the front, ascending; None and () mean all; E0207 for a repeated one."""
    if not values:
        return tuple(range(rank))
    found = sorted(axis(v, rank) for v in values)
    if len(set(found)) != len(found):
        raise EsperError("E0207", f"axis repeated in {list(values)}", hint="name each axis once")
    return tuple(found) if rank else ()


def demand(check: Callable[[Attrs], bool], hint: str) -> Callable[[Operands, Attrs], dict[str, Any]]:
    """A `resolve` that refuses attributes (E0203) which do not go together."""

    def resolve(operands: Operands, attrs: Attrs) -> dict[str, Any]:
        if not check(attrs):
            shown = ", ".join(f"{k}={v}" for k, v in attrs.items())
            raise EsperError("E0203", f"attributes {shown} do not go together", hint=hint)
        return dict(attrs)

    return resolve


def resolve_dims(operands: Sequence[TensorType | Number], attrs: Attrs) -> dict[str, Any]:
    return {**attrs, "dims": axes(attrs["dims"], tensor(operands[0]).rank)}


def resolve_dim(operands: Sequence[TensorType | Number], attrs: Attrs) -> dict[str, Any]:
    return {**attrs, "dim": axis(attrs["dim"], tensor(operands[0]).rank)}


def reduced(shape: Shape, dims: Sequence[int], keepdim: bool) -> Shape:
    if keepdim:
        return tuple(ONE if i in dims else d for i, d in enumerate(shape))
    return tuple(d for i, d in enumerate(shape) if i not in dims)


def numel(shape: Sequence[Dim]) -> Dim:
    out = ONE
    for dim in shape:
        out = out * dim
    return out


def torch_dtype(dtype: DType) -> Any:
    return getattr(torch, dtype.value)


def lift(inputs: Sequence[Any]) -> list[Any]:
    """Numbers as tensors without dimensions that promote as weakly as the numbers did, for torch calls that
    take tensors only. Floating ones stay float64 (arithmetic kernels read them unrounded) unless all tensors
    lack dimensions.
    """
    like = next((t for t in inputs if isinstance(t, torch.Tensor) and t.dim()), None)
    plain = next((t for t in inputs if isinstance(t, torch.Tensor)), None)
    out = []
    for value in inputs:
        if isinstance(value, torch.Tensor):
            out.append(value)
            continue
        dtype = torch.tensor(value).dtype if not isinstance(value, float) else torch.float64
        if like is None and plain is not None:
            dtype = torch.result_type(plain, value)
        elif dtype is torch.float64 and like is not None and not like.is_floating_point():
            dtype = torch.float32
        out.append(torch.scalar_tensor(value, dtype=dtype))
    return out


def call(name: str, module: Any = torch) -> Callable[[Sequence[Any], Attrs], tuple[Any, ...]]:
    """Reference `torch.<name>(*operands)`."""

    def reference(inputs: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
        return (getattr(module, name)(*lift(inputs)),)

    return reference


def pointwise_cost(per_element: int) -> Callable[[Any, Sequence[TensorType], Attrs], Dim]:
    def cost(operands: Any, outputs: Sequence[TensorType], attrs: Attrs) -> Dim:
        return outputs[0].numel * per_element

    return cost
