"""Tensors out of nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from esper_ir.lazy import torch
from esper_ir.opdef import Attr, Attrs, Creation, NotDifferentiable, Number, OpDef, Sample
from esper_ir.ops.rules import torch_dtype
from esper_ir.types import Dim, TensorType


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

OPS = (FULL,)
