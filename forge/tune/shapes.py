"""What a tile is chosen for, in two parts: the work without its sizes, and the sizes.

Two groups of one family do the same to tensors of other extents, so that a tile measured for one may serve
the other where the sizes are near.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from esper_ir.scalar import Cast, Prim, walk
from esper_ir.types import Dim
from forge.plan import INDEX, Access, Compute, Load, MatmulSpec, Reduce, Scan, Stmt, Store

ZERO, ONE = Dim(), Dim.of(1)


@dataclass(frozen=True)
class Shape:
    """`arch` and `family` must be equal, `sizes` near: of products (m, n, k), else the axes of the space."""

    arch: str
    family: str
    sizes: tuple[int, ...]


def shape_of(
    arch: str, space: Sequence[Dim], accesses: Sequence[Access], body: Sequence[Stmt], more: object,
    sizes: Mapping[str, int],
) -> Shape:  # fmt: skip
    """`more` is what a template adds to the work: of a product its operands and depth, of products in a row
    also what is done between them, to which operands, and the second right operand. Of these the weights are
    a part of the family, so that only rows and depth may differ.
    """
    extents = tuple(size.value(sizes) for size in space)
    if isinstance(more, MatmulSpec):
        # How the tensor cores are fed decides; the epilogue counts by how many tensors it moves.
        sides = [(a.dtype.value, a.strides[-1] == ONE) for a in (more.a, more.b)]
        full = sum(a.buffer != INDEX and len(a.axes) > 1 for a in accesses)
        family = ("product", sides, more.precision, full, *(["dual"] if more.second else []))
        extents = (*extents, more.k.value(sizes))
    elif isinstance(more, tuple):
        spec, between, head, second = more
        weights = [[str(s) for s in a.strides] for a in (spec.b, second)]
        kinds = [a.dtype.value for a in (spec.a, spec.b, second, *accesses, *head)]
        parts = [_stmt(s) for s in (*between, *body)]
        family = ("chain", kinds, weights, spec.precision, parts)
        extents = (*extents, spec.k.value(sizes))
    else:
        walked = [_access(a) for a in accesses]
        family = ("loops", len(extents), walked, [_stmt(s) for s in body], type(more).__name__)
    return Shape(arch, hashlib.sha256(repr(family).encode()).hexdigest()[:32], extents)


def _access(a: Access) -> tuple[object, ...]:
    strides = tuple("0" if s == ZERO else "1" if s == ONE else "s" for s in a.strides)
    apart = (len(a.parts),) if a.parts else ()
    return (a.buffer == INDEX, a.dtype.value, strides, a.partial, len(a.windows), a.table is not None, *apart)


def _stmt(s: Stmt) -> tuple[object, ...]:
    """A statement without names and constants: these carry sizes."""
    if isinstance(s, Load):
        return ("load", s.access)
    if isinstance(s, Store):
        return ("store", s.access)
    if isinstance(s, Reduce):
        return ("reduce", s.combine, s.axis)
    if isinstance(s, Scan):
        return ("scan", s.combine, len(s.args))
    assert isinstance(s, Compute)
    parts = [e for e in walk(s.expr) if isinstance(e, (Prim, Cast))]
    return ("compute", [e.name if isinstance(e, Prim) else e.dtype.value for e in parts], s.dtype.value)
