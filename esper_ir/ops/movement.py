"""Movement: expand, reshape, permute and what is written with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from esper_ir.diagnostics import EsperError
from esper_ir.opdef import (
    Attr,
    Attrs,
    Composite,
    Cotangents,
    Emit,
    Movement,
    Number,
    OpDef,
    Operand,
    Operands,
    Sample,
    Val,
    Vals,
    Wanted,
)
from esper_ir.ops.gradients import unbroadcast, val
from esper_ir.ops.rules import ONE, Shape, axes, axis, conflict, numel, same, show, tensor
from esper_ir.types import Dim, TensorType

Types = Sequence[TensorType | Number]
NEGATIVE = Dim.of(-1)


def _no_cost(operands: Any, outputs: Any, attrs: Any) -> Dim:
    return Dim()


def divide(whole: Dim, part: Dim) -> Dim | None:
    """whole / part when the division is exact for every size: by a number or a single monomial."""
    if whole == part:
        return ONE
    if len(part.terms) != 1:
        return None
    monomial, coefficient = part.terms[0]
    out: dict[Any, int] = {}
    for atoms, factor in whole.terms:
        rest = list(atoms)
        for atom in monomial:
            if atom not in rest:
                return None
            rest.remove(atom)
        if factor % coefficient:
            return None
        out[tuple(rest)] = factor // coefficient
    return Dim(tuple(out.items()))


def _resolve_reshape(operands: Types, attrs: Attrs) -> dict[str, Any]:
    x = tensor(operands[0])
    shape: Shape = attrs["shape"]
    free = [i for i, d in enumerate(shape) if d == NEGATIVE]
    if len(free) > 1:
        raise conflict("at most one size may be -1", x, shape)
    if free:
        known = numel([d for d in shape if d != NEGATIVE])
        if known.static == 0:
            raise conflict("beside a size of 0 any number would do for -1", x, shape)
        size = divide(x.numel, known)
        if size is None:
            raise EsperError("E0206", f"cannot prove that {known} divides the {x.numel} elements of {x}")
        shape = tuple(size if d == NEGATIVE else d for d in shape)
    return {**attrs, "shape": shape}


def _infer_reshape(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x = tensor(operands[0])
    same(x.numel, numel(attrs["shape"]), "a reshape keeps the number of elements", x.shape, attrs["shape"])
    return (TensorType(x.dtype, attrs["shape"]),)


def _vjp_reshape(
    emit: Emit, inputs: Operands, outputs: Vals, cotangents: Cotangents, attrs: Attrs, wanted: Wanted
) -> Cotangents:
    g = cotangents[0]
    if g is None or not wanted[0]:
        return [None]
    shape = val(inputs[0]).type.shape
    return [g if g.type.shape == shape else emit("reshape", g, shape=shape)]


def _resolve_expand(operands: Types, attrs: Attrs) -> dict[str, Any]:
    x = tensor(operands[0])
    shape: Shape = attrs["shape"]
    lead = len(shape) - x.rank
    if lead < 0:
        raise conflict("the new shape has at least as many dimensions", x, shape)
    if any(d == NEGATIVE for d in shape[:lead]):
        raise conflict("-1 stands only for a dimension that exists", x, shape)
    kept = tuple(x.shape[i - lead] if d == NEGATIVE else d for i, d in enumerate(shape))
    return {**attrs, "shape": kept}


def _infer_expand(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x = tensor(operands[0])
    shape: Shape = attrs["shape"]
    for have, want in zip(x.shape, shape[len(shape) - x.rank :], strict=True):
        if have != ONE:
            same(have, want, "only dimensions of size 1 expand", x.shape, shape)
    return (TensorType(x.dtype, shape),)


def _vjp_expand(
    emit: Emit, inputs: Operands, outputs: Vals, cotangents: Cotangents, attrs: Attrs, wanted: Wanted
) -> Cotangents:
    g = cotangents[0]
    return [None if g is None or not wanted[0] else unbroadcast(emit, g, val(inputs[0]).type)]


def _resolve_permute(operands: Types, attrs: Attrs) -> dict[str, Any]:
    x = tensor(operands[0])
    dims = tuple(axis(d, x.rank) for d in attrs["dims"])
    if sorted(dims) != list(range(x.rank)):
        raise EsperError("E0207", f"{list(dims)} is no order of the axes of {x}", hint="name every axis once")
    return {**attrs, "dims": dims}


def _infer_permute(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x = tensor(operands[0])
    return (TensorType(x.dtype, tuple(x.shape[d] for d in attrs["dims"])),)


def _vjp_permute(
    emit: Emit, inputs: Operands, outputs: Vals, cotangents: Cotangents, attrs: Attrs, wanted: Wanted
) -> Cotangents:
    g = cotangents[0]
    if g is None or not wanted[0]:
        return [None]
    dims = attrs["dims"]
    return [emit("permute", g, dims=tuple(dims.index(i) for i in range(len(dims))))]


def _cases(rows: Sequence[tuple[tuple[int, ...], Attrs]]) -> tuple[Sample, ...]:
    out = [Sample((TensorType.of("float32", shape),), attrs) for shape, attrs in rows]
    return (*out, Sample((TensorType.of("bfloat16", rows[0][0]),), rows[0][1]))


def _primitive(
    name: str, infer: Any, vjp: Any, resolve: Any, param: Attr, reference: Any, rows: Any
) -> OpDef:
    return OpDef(
        name=name, infer=infer, reference=reference, vjp=vjp, lowering=Movement(name), samples=_cases(rows),
        arity=(1, 1), params=(param,), cost=_no_cost, resolve=resolve, doc=f"torch.Tensor.{name}",
    )  # fmt: skip


# Written with the primitives: the new shape is a function of the old one.


def _flattened(x: TensorType, attrs: Attrs) -> Shape:
    first, last = axis(attrs["start_dim"], x.rank), axis(attrs["end_dim"], x.rank)
    if first > last:
        raise EsperError("E0207", f"start_dim {first} lies after end_dim {last}")
    return (*x.shape[:first], numel(x.shape[first : last + 1]), *x.shape[last + 1 :])


def _squeezed(x: TensorType, attrs: Attrs) -> Shape:
    """Without `dims` every dimension known to be 1 goes; a named one of symbolic size cannot be decided."""
    dims = attrs["dims"]
    if dims is None:
        return tuple(d for d in x.shape if d != ONE)
    named = axes(dims, x.rank) if dims else ()
    for i in named:
        if x.shape and x.shape[i].static is None:
            raise EsperError("E0206", f"cannot prove whether {x.shape[i]} is 1 in {show(x.shape)}")
    return tuple(d for i, d in enumerate(x.shape) if i not in named or d != ONE)


def _unsqueezed(x: TensorType, attrs: Attrs) -> Shape:
    at = axis(attrs["dim"], x.rank + 1)
    return (*x.shape[:at], ONE, *x.shape[at:])


def _reshaping(
    name: str, shape: Callable[[TensorType, Attrs], Shape], params: tuple[Attr, ...],
    reference: Callable[[Sequence[Any], Attrs], tuple[Any, ...]],
    rows: Sequence[tuple[tuple[int, ...], Attrs]],
) -> OpDef:  # fmt: skip
    def infer(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
        x = tensor(operands[0])
        return (TensorType(x.dtype, shape(x, attrs)),)

    def expand(emit: Emit, inputs: Sequence[Operand], attrs: Attrs) -> Sequence[Val]:
        x = inputs[0]
        assert isinstance(x, Val)
        return (emit("reshape", x, shape=shape(x.type, attrs)),)

    return OpDef(
        name=name, infer=infer, reference=reference, vjp=_vjp_reshape, lowering=Composite(expand),
        samples=_cases(rows), arity=(1, 1), params=params, cost=_no_cost, doc=f"torch.{name}",
    )  # fmt: skip


def _squeeze_reference(inputs: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
    return (inputs[0].squeeze() if attrs["dims"] is None else inputs[0].squeeze(attrs["dims"]),)


def _swap(rank: int, attrs: Attrs) -> tuple[int, ...]:
    order = list(range(rank))
    a, b = axis(attrs["dim0"], rank), axis(attrs["dim1"], rank)
    if not rank:
        return ()
    order[a], order[b] = order[b], order[a]
    return tuple(order)


def _infer_transpose(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x = tensor(operands[0])
    return (TensorType(x.dtype, tuple(x.shape[i] for i in _swap(x.rank, attrs))),)


def _expand_transpose(emit: Emit, inputs: Sequence[Operand], attrs: Attrs) -> Sequence[Val]:
    x = inputs[0]
    assert isinstance(x, Val)
    return (emit("permute", x, dims=_swap(x.type.rank, attrs)),)


def _vjp_transpose(
    emit: Emit, inputs: Operands, outputs: Vals, cotangents: Cotangents, attrs: Attrs, wanted: Wanted
) -> Cotangents:
    g = cotangents[0]
    return [None if g is None or not wanted[0] else emit("permute", g, dims=_swap(g.type.rank, attrs))]


TRANSPOSE = OpDef(
    name="transpose", infer=_infer_transpose,
    reference=lambda i, a: (i[0].transpose(a["dim0"], a["dim1"]),), vjp=_vjp_transpose,
    lowering=Composite(_expand_transpose),
    samples=_cases([((3, 4, 5), {"dim0": 0, "dim1": -1}), ((3, 4), {"dim0": 0, "dim1": 1})]),
    arity=(1, 1), params=(Attr("dim0", "int"), Attr("dim1", "int")), cost=_no_cost, doc="torch.transpose",
)  # fmt: skip

OPS = (
    _primitive("reshape", _infer_reshape, _vjp_reshape, _resolve_reshape,
               Attr("shape", "shape", doc="new sizes; one may be -1"),
               lambda i, a: (i[0].reshape(a["shape"]),),
               [((4, 6), {"shape": (3, -1)}), ((2, 3, 4), {"shape": (6, 4)}), ((), {"shape": (1, 1)}),
                ((0, 3), {"shape": (3, 0)})]),
    _primitive("expand", _infer_expand, _vjp_expand, _resolve_expand,
               Attr("shape", "shape", doc="sizes after expansion; -1 keeps a dimension"),
               lambda i, a: (i[0].expand(a["shape"]),),
               [((4, 1), {"shape": (4, 5)}), ((1, 3), {"shape": (2, -1, 3)}), ((), {"shape": (3,)})]),
    _primitive("permute", _infer_permute, _vjp_permute, _resolve_permute,
               Attr("dims", "ints", doc="axes of the operand in the order of the result"),
               lambda i, a: (i[0].permute(a["dims"]),),
               [((2, 3, 4), {"dims": (2, 0, 1)}), ((3, 4), {"dims": (-1, 0)}), ((5,), {"dims": (0,)})]),
    TRANSPOSE,
    _reshaping("flatten", _flattened, (Attr("start_dim", "int", 0), Attr("end_dim", "int", -1)),
               lambda i, a: (i[0].flatten(a["start_dim"], a["end_dim"]),),
               [((2, 3, 4), {}), ((2, 3, 4), {"start_dim": 1}), ((2, 3, 4), {"end_dim": 1})]),
    _reshaping("squeeze", _squeezed, (Attr("dims", "ints", None, doc="axes of size 1 to drop; null: all"),),
               _squeeze_reference,
               [((2, 1, 4, 1), {}), ((2, 1, 4), {"dims": (1,)}), ((2, 1, 4), {"dims": (0, -2)})]),
    _reshaping("unsqueeze", _unsqueezed, (Attr("dim", "int"),), lambda i, a: (i[0].unsqueeze(a["dim"]),),
               [((2, 3), {"dim": 1}), ((2, 3), {"dim": -1}), ((), {"dim": 0})]),
)  # fmt: skip
