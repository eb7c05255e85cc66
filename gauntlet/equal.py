"""Draws of equal rows: "equal D N" is as medley N, and alike along the dim D."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

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


def single(draw: str, kind: TensorType) -> TensorType:
    """The type of what is drawn: one row of the tensor."""
    at = axis(kind, dim_of(draw))
    return kind if at is None else replace(kind, shape=(*kind.shape[:at], Dim.of(1), *kind.shape[at + 1 :]))


def levelled(draw: str, kind: TensorType, row: Tensor, dims: Mapping[str, int]) -> Tensor:
    """The tensor of which all rows are this one; as it is where it has none for each."""
    dim = dim_of(draw)
    at = axis(kind, dim)
    if at is None:
        return row
    return row.expand(*row.shape[:at], dims[dim], *row.shape[at + 1 :]).contiguous()
