"""Tensors out of nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from esper_ir.diagnostics import EsperError
from esper_ir.lazy import torch
from esper_ir.opdef import Attr, Attrs, Creation, NotDifferentiable, Number, OpDef, Sample
from esper_ir.ops.rules import torch_dtype
from esper_ir.types import Dim, DType, TensorType


def _infer(operands: Sequence[TensorType | Number], attrs: Attrs) -> tuple[TensorType, ...]:
    return (TensorType(attrs["dtype"], attrs["shape"]),)


def _reference(inputs: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
    return (torch.full(attrs["shape"], attrs["value"], dtype=torch_dtype(attrs["dtype"])),)


FULL = OpDef(
    name="full",
    infer=_infer,
    reference=_reference,
    vjp=NotDifferentiable("there is no operand"),
    lowering=Creation("full"),
    samples=(
        Sample((), {"shape": (3, 4), "value": 1.5}),
        Sample((), {"shape": (), "value": 2, "dtype": "int64"}),
        Sample((), {"shape": (2,), "value": 0.1, "dtype": "bfloat16"}),
    ),
    arity=(0, 0),
    params=(
        Attr("shape", "shape"),
        Attr("value", "scalar", doc="a number, or a dimension expression such as 'rows'"),
        Attr("dtype", "dtype", "float32"),
    ),
    cost=lambda operands, outputs, attrs: Dim(),
    doc="torch.full; the value may be a size",
)


def _infer_arange(operands: Sequence[TensorType | Number], attrs: Attrs) -> tuple[TensorType, ...]:
    dtype, end = attrs["dtype"], attrs["end"]
    if dtype not in (DType.int64, DType.int32):
        raise EsperError("E0203", f"arange of {dtype.value}", hint="int64 or int32; cast the result")
    if isinstance(end, float) or (isinstance(end, int) and end < 0):
        raise EsperError("E0203", f"arange up to {end}", hint="a size: an integer or a dimension expression")
    return (TensorType(dtype, (Dim.of(int(end) if isinstance(end, int) else end),)),)


ARANGE = OpDef(
    name="arange",
    infer=_infer_arange,
    reference=lambda i, a: (torch.arange(a["end"], dtype=torch_dtype(a["dtype"])),),
    vjp=NotDifferentiable("there is no operand"),
    lowering=Creation("arange"),
    samples=(Sample((), {"end": 5}), Sample((), {"end": 0}), Sample((), {"end": 3, "dtype": "int32"})),
    arity=(0, 0),
    params=(
        Attr("end", "scalar", doc="number of elements: an integer or a dimension expression"),
        Attr("dtype", "dtype", "int64"),
    ),
    cost=lambda operands, outputs, attrs: Dim(),
    doc="torch.arange(end): 0, 1, ..., end - 1",
)

OPS = (FULL, ARANGE)
