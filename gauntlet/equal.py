"""Draws of equal rows: "equal D N" is as medley N, and alike along the dim D."""

from __future__ import annotations

from torch import Tensor

from esper_ir.types import Dim, TensorType
from gauntlet import medley

DRAW = "equal "


def named(dim: str, number: int) -> str:
    return f"{DRAW}{dim} {number}"


def dim_of(draw: str) -> str:
    return draw.split(" ")[1]


def of_leaf(draw: str, leaf: str) -> str:
    """How a tensor is drawn before its rows are made alike."""
    return medley.of_leaf(f"{medley.DRAW}{draw.split(' ')[2]}", leaf)


def axis(kind: TensorType, dim: str) -> int | None:
    """The one axis of this dim; None where there is none, or where its size is no axis of its own."""
    at = [i for i, size in enumerate(kind.shape) if dim in size.symbols()]
    return at[0] if len(at) == 1 and kind.shape[at[0]] == Dim.sym(dim) else None


def levelled(draw: str, kind: TensorType, tensor: Tensor) -> Tensor:
    """The tensor with what it is at the first place along the dim at all of them."""
    at = axis(kind, dim_of(draw))
    if at is None or not tensor.numel():
        return tensor
    return tensor.narrow(at, 0, 1).expand(tensor.shape).contiguous()
