"""The scalar language run on torch tensors, primitive by primitive: a plain second meaning for bodies."""

from __future__ import annotations

from typing import Any

import torch

from esper_ir.scalar import PRIMITIVES, Arg, Cast, Const, Expr
from esper_ir.types import DType

SPECIAL = {
    "not": torch.logical_not, "and": torch.logical_and, "or": torch.logical_or, "xor": torch.logical_xor,
    "bitand": torch.bitwise_and, "bitor": torch.bitwise_or, "bitxor": torch.bitwise_xor,
    "shl": torch.bitwise_left_shift, "shr": torch.bitwise_right_shift,
    "quotient": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "div": torch.true_divide, "sub": lambda a, b: a - b,
}  # fmt: skip


def run_body(expr: Expr, operands: list[Any], compute: DType | None) -> torch.Tensor:
    """Evaluate with every operand converted to the compute type first; bool operands stay truth values."""
    if isinstance(expr, Arg):
        value = operands[expr.index]
        kind = getattr(torch, compute.value) if compute else None
        if isinstance(value, torch.Tensor):
            keep = kind is None or value.dtype is torch.bool
            return value if keep else value.to(kind)
        return torch.tensor(value, dtype=kind)
    if isinstance(expr, Const):
        kind = getattr(torch, compute.value) if compute and not isinstance(expr.value, bool) else None
        return torch.tensor(expr.value, dtype=kind)
    if isinstance(expr, Cast):
        return run_body(expr.arg, operands, compute).to(getattr(torch, expr.dtype.value))
    args = [run_body(a, operands, compute) for a in expr.args]
    assert len(args) == PRIMITIVES[expr.name]
    return SPECIAL.get(expr.name, getattr(torch, expr.name, None))(*args)
