"""What a template yields for a group: kernel plans with grids, extern calls, and the workspace they need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from esper_ir.types import Dim, DType, FloorDiv
from forge.plan import KernelPlan
from library.launch import Size

DESCRIPTOR_BYTES = 128
"""Of one tensor descriptor in memory."""


@dataclass(frozen=True)
class Launch:
    """One kernel launch: the grid is in sizes of the closed grammar. `scratch`: workspace that the kernel
    takes as its last parameter."""

    plan: KernelPlan
    grid: tuple[Size, Size, Size]
    scratch: str = ""


@dataclass(frozen=True)
class Operand:
    """A value as a library call sees it: its memory reshaped, then permuted."""

    value: str
    shape: tuple[Dim, ...]
    permute: tuple[int, ...] = ()


@dataclass(frozen=True)
class Call:
    """A library call (runtime/externs.py) that writes `outs`."""

    op: str
    inputs: tuple[Operand, ...]
    outs: tuple[Operand, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Temp:
    """Workspace of a template: dtype and shape."""

    dtype: DType
    shape: tuple[Dim, ...]

    @property
    def numel(self) -> Dim:
        out = Dim.of(1)
        for size in self.shape:
            out = out * size
        return out


@dataclass(frozen=True)
class Lowered:
    """Steps of one group, in order. `template` names who made them, `bytes` is the memory traffic at the
    tuned size.
    """

    template: str
    steps: tuple[Launch | Call, ...]
    temps: Mapping[str, Temp] = field(default_factory=dict)


def size_of(dim: Dim) -> Size:
    """A dim in the launch manifest's grammar."""
    out: Size | None = None
    for monomial, coefficient in dim.terms:
        term: Size = coefficient
        for atom in monomial:
            part = atom if isinstance(atom, str) else _floordiv(atom)
            term = part if term == 1 else ("mul", term, part)
        out = term if out is None else ("add", out, term)
    return 0 if out is None else out


def _floordiv(atom: FloorDiv) -> Size:
    return ("floordiv", size_of(atom.numerator), atom.divisor)


def ceildiv(dim: Dim, divisor: int) -> Dim:
    """Number of blocks of `divisor` that cover `dim`."""
    return (dim + (divisor - 1)) // divisor if divisor > 1 else dim


def symbols(*dims: Dim) -> tuple[str, ...]:
    """Names that occur, sorted: the integer parameters of a kernel."""
    return tuple(sorted(frozenset().union(*(d.symbols() for d in dims))))
