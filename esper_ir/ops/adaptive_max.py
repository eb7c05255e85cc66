"""Maxima over a given number of windows, with their positions; one axis is a picture of height 1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from esper_ir.diagnostics import EsperError
from esper_ir.lazy import functional, torch
from esper_ir.opdef import (
    Attr,
    Attrs,
    ByExpansion,
    Composite,
    Cotangents,
    Emit,
    NotDifferentiable,
    Number,
    Opaque,
    OpDef,
    Operand,
    Operands,
    Sample,
    Val,
    Vals,
    Wanted,
)
from esper_ir.ops.gradients import val
from esper_ir.ops.pooling import image
from esper_ir.ops.reduction import only
from esper_ir.ops.rules import ONE, tensor
from esper_ir.ops.volume import tuned
from esper_ir.types import Dim, DType, TensorType

Types = Sequence[TensorType | Number]
SIZE = Attr("output_size", "ints")


def _resolve(rank: int) -> Any:
    def resolve(operands: Types, attrs: Attrs) -> dict[str, Any]:
        return {**attrs, "output_size": tuned(attrs["output_size"], "output_size", 1, rank)}

    return resolve


def _made(x: TensorType, attrs: Attrs) -> tuple[TensorType, TensorType]:
    shape = (*x.shape[:2], *(Dim.of(n) for n in attrs["output_size"]))
    return TensorType(x.dtype, shape), TensorType(DType.int64, shape)


def _infer(rank: int, outputs: int) -> Any:
    return lambda operands, attrs: _made(image(operands[0], rank), attrs)[:outputs]


def _infer_gradient(rank: int) -> Any:
    def infer(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
        g, x, places = (tensor(o, i) for i, o in enumerate(operands))
        if _made(image(x, rank), attrs) != (g, places):
            raise EsperError("E0204", f"{g} and {places} are not of this pooling of {x}")
        return (x,)

    return infer


def _expand(rank: int) -> Any:
    def expand(emit: Emit, inputs: Sequence[Operand], attrs: Attrs) -> Sequence[Val]:
        if rank > 1:
            return emit.many(f"adaptive_max_pool{rank}d_with_indices", inputs[0], **attrs)[:1]
        x = val(inputs[0])
        n, c, w = x.type.shape
        tall = emit("reshape", x, shape=(n, c, ONE, w))
        size = (1, *attrs["output_size"])
        y = emit.many("adaptive_max_pool2d_with_indices", tall, output_size=size)[0]
        return (emit("reshape", y, shape=(n, c, size[1])),)

    return expand


def _vjp(rank: int) -> Any:
    def vjp(
        emit: Emit, inputs: Operands, outputs: Vals, cotangents: Cotangents, attrs: Attrs, wanted: Wanted
    ) -> Cotangents:
        if cotangents[0] is None or not wanted[0]:
            return [None]
        name = f"adaptive_max_pool{rank}d_grad"
        return [emit(name, cotangents[0], only(inputs), outputs[1], **attrs)]

    return vjp


def _reference(rank: int, outputs: int) -> Any:
    def reference(inputs: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
        call = getattr(functional, f"adaptive_max_pool{rank}d_with_indices")
        return call(inputs[0], attrs["output_size"])[:outputs]

    return reference


def _gradient_reference(rank: int) -> Any:
    call = f"adaptive_max_pool{rank}d_backward"
    return lambda inputs, attrs: (getattr(torch.ops.aten, call)(*inputs),)


ROWS: dict[int, tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]] = {
    1: (("float32", (2, 3, 8), (4,)), ("float32", (2, 3, 7), (3,)), ("bfloat16", (2, 3, 7), (3,))),
    2: (
        ("float32", (2, 3, 6, 4), (3, 2)), ("float32", (2, 3, 7, 5), (3, 2)),
        ("bfloat16", (1, 2, 7, 5), (1,)), ("float64", (1, 2, 3, 4), (2, 3)),
    ),
    3: (("float32", (1, 2, 5, 6, 3), (2, 4, 2)), ("float64", (1, 2, 3, 4, 3), (1,))),
}  # fmt: skip


def _samples(rank: int) -> tuple[Sample, ...]:
    return tuple(Sample((TensorType.of(d, x),), {"output_size": s}) for d, x, s in ROWS[rank])


def _gradient_samples(rank: int) -> tuple[Sample, ...]:
    out = []
    for d, x, s in ROWS[rank]:
        y = (*x[:2], *(s if len(s) == rank else s * rank))
        kinds = (TensorType.of(d, y), TensorType.of(d, x), TensorType.of("int64", y))
        out.append(Sample(kinds, {"output_size": s}, 0.0, 2.0))
    return tuple(out)


def _cost(operands: Types, outputs: Sequence[TensorType], attrs: Attrs) -> Dim:
    return tensor(operands[0]).numel


def _whole(rank: int) -> OpDef:
    name = f"adaptive_max_pool{rank}d"
    return OpDef(
        name=name, infer=_infer(rank, 1), reference=_reference(rank, 1), vjp=ByExpansion(),
        lowering=Composite(_expand(rank)), samples=_samples(rank), arity=(1, 1), params=(SIZE,),
        resolve=_resolve(rank), cost=_cost, doc=f"torch.nn.functional.{name}",
    )  # fmt: skip


def _parts(rank: int) -> tuple[OpDef, OpDef]:
    name = f"adaptive_max_pool{rank}d"
    return (
        OpDef(
            name=f"{name}_with_indices", infer=_infer(rank, 2), reference=_reference(rank, 2), vjp=_vjp(rank),
            lowering=Opaque(name), samples=_samples(rank), arity=(1, 1), params=(SIZE,),
            resolve=_resolve(rank), cost=_cost,
            doc=f"torch.nn.functional.{name} with the positions of the maxima",
        ),
        OpDef(
            name=f"{name}_grad", infer=_infer_gradient(rank), reference=_gradient_reference(rank),
            vjp=NotDifferentiable("second derivatives of a max pool are not implemented"),
            lowering=Opaque(f"{name}_grad"), samples=_gradient_samples(rank), arity=(3, 3), params=(SIZE,),
            resolve=_resolve(rank), cost=_cost,
            doc=f"gradient of {name} from (cotangent, operand, positions)",
        ),
    )  # fmt: skip


OPS = (*(_whole(rank) for rank in (1, 2, 3)), *_parts(2), *_parts(3))
