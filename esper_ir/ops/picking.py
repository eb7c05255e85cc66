"""Values at given positions: gather and scatter along an axis, rows by number, masks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from esper_ir.diagnostics import EsperError
from esper_ir.lazy import torch
from esper_ir.opdef import (
    Attr,
    Attrs,
    ByExpansion,
    Composite,
    Cotangents,
    Emit,
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
from esper_ir.ops.rules import ONE, Shape, accept, axis, broadcast, category, numel, same, tensor
from esper_ir.types import Dim, DType, TensorType

Types = Sequence[TensorType | Number]
DIM = Attr("dim", "int", doc="the axis of the positions")


def resolve_axis(operands: Types, attrs: Attrs) -> dict[str, Any]:
    x = tensor(operands[0])
    if not x.rank:
        raise EsperError("E0207", "positions need an axis", hint="reshape to [1]")
    return {**attrs, "dim": axis(attrs["dim"], x.rank)}


def _no_cost(operands: Any, outputs: Any, attrs: Any) -> Dim:
    return Dim()


def _places(operand: TensorType | Number, at: int, rank: int | None = None) -> TensorType:
    t = tensor(operand, at)
    if t.dtype is not DType.int64:
        raise EsperError("E0205", f"{t} are no positions", hint="int64")
    if rank is not None and t.rank != rank:
        raise EsperError("E0204", f"{t} are positions of rank {t.rank}", hint=f"rank {rank}")
    return t


def _within(places: Shape, whole: Shape, at: int) -> None:
    """Beside the axis, positions lie inside the operand."""
    for i, (a, b) in enumerate(zip(places, whole, strict=True)):
        if i == at or a == b:
            continue
        if a.static is None or b.static is None or a.static > b.static:
            same(a, b, "positions are no larger than the operand beside `dim`", places, whole)


def limit(at: int) -> Any:
    """Positions lie below the size of the operand `at` along the axis."""
    return lambda types, attrs: tensor(types[at]).shape[axis(attrs["dim"], tensor(types[at]).rank)]


def _infer_gather(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x = tensor(operands[0])
    places = _places(operands[1], 1, x.rank)
    _within(places.shape, x.shape, attrs["dim"])
    return (TensorType(x.dtype, places.shape),)


def _vjp_gather(
    emit: Emit, inputs: Operands, outputs: Vals, cotangents: Cotangents, attrs: Attrs, wanted: Wanted
) -> Cotangents:
    g, x = cotangents[0], val(inputs[0])
    if g is None or not wanted[0]:
        return [None, None]
    zeros = emit("full", shape=x.type.shape, value=0.0, dtype=x.type.dtype)
    return [emit("scatter_add", zeros, inputs[1], g, dim=attrs["dim"]), None]


def _infer_scatter(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x, source = tensor(operands[0]), tensor(operands[2], 2)
    places = _places(operands[1], 1, x.rank)
    _within(places.shape, x.shape, attrs["dim"])
    if source != TensorType(x.dtype, places.shape):
        hint = "one value per position, in the dtype of the operand"
        raise EsperError("E0204", f"{source} does not go with {places} and {x}", hint=hint)
    return (x,)


def _vjp_scatter(add: bool) -> Any:
    """What is written over gets no cotangent; what is added to keeps its own."""

    def vjp(
        emit: Emit, inputs: Operands, outputs: Vals, cotangents: Cotangents, attrs: Attrs, wanted: Wanted
    ) -> Cotangents:
        g, places = cotangents[0], val(inputs[1])
        if g is None:
            return [None] * 3
        dx: Val | None = g
        if not add and wanted[0]:
            zeros = emit("full", shape=places.type.shape, value=0.0, dtype=g.type.dtype)
            dx = emit("scatter", g, places, zeros, dim=attrs["dim"])
        source = emit("gather", g, places, dim=attrs["dim"]) if wanted[2] else None
        return [dx if wanted[0] else None, None, source]

    return vjp


def _scatter_reference(name: str) -> Any:
    return lambda i, a: (getattr(torch, name)(i[0], a["dim"], i[1], i[2]),)


def _infer_unsort(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    g = tensor(operands[0])
    if _places(operands[1], 1).shape != g.shape:
        raise EsperError("E0204", f"{operands[1]} is no order of {g}", hint="one position per value")
    return (g,)


def _vjp_unsort(
    emit: Emit, inputs: Operands, outputs: Vals, cotangents: Cotangents, attrs: Attrs, wanted: Wanted
) -> Cotangents:
    g = cotangents[0]
    return [None if g is None or not wanted[0] else emit("gather", g, inputs[1], dim=attrs["dim"]), None]


# Composites.


def _infer_along(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x = tensor(operands[0])
    places = _places(operands[1], 1, x.rank)
    shape = _shared(x.shape, places.shape, attrs["dim"])
    at = attrs["dim"]
    return (TensorType(x.dtype, (*shape[:at], places.shape[at], *shape[at + 1 :])),)


def _shared(x: Shape, places: Shape, at: int) -> Shape:
    """Broadcast beside the axis."""
    return broadcast([(*x[:at], ONE, *x[at + 1 :]), (*places[:at], ONE, *places[at + 1 :])])


def _expand_along(emit: Emit, inputs: Sequence[Operand], attrs: Attrs) -> Sequence[Val]:
    x, places, at = val(inputs[0]), val(inputs[1]), attrs["dim"]
    shape = _shared(x.type.shape, places.type.shape, at)
    wide = []
    for v in (x, places):
        own = (*shape[:at], v.type.shape[at], *shape[at + 1 :])
        wide.append(v if v.type.shape == own else emit("expand", v, shape=own))
    return (emit("gather", *wide, dim=at),)


def _infer_select(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x, at = tensor(operands[0]), attrs["dim"]
    places = _places(operands[1], 1, 1)
    return (TensorType(x.dtype, (*x.shape[:at], places.shape[0], *x.shape[at + 1 :])),)


def _wide(emit: Emit, places: Val, shape: Shape, at: int) -> Val:
    """The same positions in every row."""
    own = tuple(places.type.shape[0] if i == at else ONE for i in range(len(shape)))
    return emit("expand", emit("reshape", places, shape=own), shape=shape)


def _table(emit: Emit, x: Val, at: int) -> Val:
    """The axis first, all others as one."""
    rank = x.type.rank
    order = (at, *(i for i in range(rank) if i != at))
    moved = x if at == 0 else emit("permute", x, dims=order)
    rest = moved.type.shape[1:]
    return moved if rank == 2 else emit("reshape", moved, shape=(moved.type.shape[0], numel(rest)))


def _restored(emit: Emit, rows: Val, shape: Shape, at: int) -> Val:
    """The inverse of `_table` for a result of this shape."""
    first = (shape[at], *shape[:at], *shape[at + 1 :])
    back = rows if rows.type.shape == first else emit("reshape", rows, shape=first)
    order = (*range(1, at + 1), 0, *range(at + 1, len(shape)))
    return back if at == 0 else emit("permute", back, dims=order)


def _expand_select(emit: Emit, inputs: Sequence[Operand], attrs: Attrs) -> Sequence[Val]:
    x, at = val(inputs[0]), attrs["dim"]
    shape = x.type.shape
    if not x.type.dtype.is_floating:  # tables of rows are floating
        (made,) = _infer_select([x.type, val(inputs[1]).type], attrs)
        return (emit("gather", x, _wide(emit, val(inputs[1]), made.shape, at), dim=at),)
    rows = emit("embedding", inputs[1], _table(emit, x, at))
    count = val(inputs[1]).type.shape[0]
    return (_restored(emit, rows, (*shape[:at], count, *shape[at + 1 :]), at),)


def _infer_index_add(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x, source, at = tensor(operands[0]), tensor(operands[2], 2), attrs["dim"]
    accept([x, source], "number")
    if not x.dtype.is_floating and not float(attrs["alpha"]).is_integer():
        raise EsperError("E0203", f"alpha is {attrs['alpha']} for {x}", hint="a whole number")
    places = _places(operands[1], 1, 1)
    wanted = TensorType(x.dtype, (*x.shape[:at], places.shape[0], *x.shape[at + 1 :]))
    if source != wanted:
        raise EsperError("E0204", f"{source} does not go with {places} and {x}", hint=str(wanted))
    return (x,)


def _expand_index_add(emit: Emit, inputs: Sequence[Operand], attrs: Attrs) -> Sequence[Val]:
    x, at = val(inputs[0]), attrs["dim"]
    if not x.type.dtype.is_floating:
        source = val(inputs[2])
        if attrs["alpha"] != 1.0:
            source = emit("mul", source, int(attrs["alpha"]))
        places = _wide(emit, val(inputs[1]), source.type.shape, at)
        return (emit("scatter_add", x, places, source, dim=at),)
    table = _table(emit, val(inputs[2]), at)
    size = (x.type.shape[at], numel((*x.type.shape[:at], *x.type.shape[at + 1 :])))
    rows = emit("embedding_grad", table, inputs[1], size=size)
    added = _restored(emit, rows, x.type.shape, at)
    if attrs["alpha"] != 1.0:
        added = emit("mul", added, attrs["alpha"])
    return (emit("add", x, added),)


def _infer_filled(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x, mask = tensor(operands[0]), tensor(operands[1], 1)
    if mask.dtype is not DType.bool:
        raise EsperError("E0205", f"the mask is {mask}", hint="a bool tensor")
    value = attrs["value"]
    if category(x.dtype) < (2 if isinstance(value, float) else 0 if isinstance(value, bool) else 1):
        raise EsperError("E0203", f"value {value!r} for {x}", hint="a number of the operand's kind")
    return (TensorType(x.dtype, broadcast([x.shape, mask.shape])),)


def _expand_filled(emit: Emit, inputs: Sequence[Operand], attrs: Attrs) -> Sequence[Val]:
    return (emit("where", inputs[1], attrs["value"], inputs[0]),)


def _filled_reference(inputs: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
    return (torch.masked_fill(inputs[0], inputs[1], attrs["value"]),)


def _samples(*shapes: tuple[int, ...], dtypes: Sequence[str] = ("float32", "float64"), **attrs: Any
             ) -> tuple[Sample, ...]:  # fmt: skip
    """The second operand holds positions 0 and 1."""
    out = []
    for dtype in dtypes:
        kinds = [TensorType.of("int64" if i == 1 else dtype, s) for i, s in enumerate(shapes)]
        out.append(Sample(tuple(kinds), attrs, 0.0, 0.9))
    return tuple(out)


def _three(name: str, doc: str, add: bool) -> OpDef:
    return OpDef(
        name=name, infer=_infer_scatter, reference=_scatter_reference(name), vjp=_vjp_scatter(add),
        lowering=Opaque(name), arity=(3, 3), params=(DIM,), resolve=resolve_axis,
        cost=lambda i, o, a: tensor(i[2]).numel, indices={1: limit(0)}, doc=doc,
        samples=(*_samples((4, 5), (3, 5), (3, 5), dim=0),
                 *_samples((2, 5, 3), (2, 4, 3), (2, 4, 3), dim=-2, dtypes=("bfloat16",))),
    )  # fmt: skip


OPS = (
    OpDef(
        name="gather", infer=_infer_gather, reference=lambda i, a: (torch.gather(i[0], a["dim"], i[1]),),
        vjp=_vjp_gather, lowering=Opaque("gather"), arity=(2, 2), params=(DIM,), resolve=resolve_axis,
        cost=_no_cost, indices={1: limit(0)}, doc="torch.gather(x, dim, positions)",
        samples=(*_samples((4, 5), (3, 5), dim=0), *_samples((2, 5, 3), (2, 7, 3), dim=-2),
                 *_samples((4, 5), (4, 2), dim=1, dtypes=("bfloat16",))),
    ),
    _three("scatter_add", "torch.scatter_add(x, dim, positions, source): equal positions add up", True),
    _three("scatter", "torch.scatter(x, dim, positions, source): of equal positions any one stays", False),
    OpDef(
        name="unsort", infer=_infer_unsort, vjp=_vjp_unsort, lowering=Opaque("unsort"),
        reference=lambda i, a: (torch.zeros_like(i[0]).scatter(a["dim"], i[1], i[0]),), arity=(2, 2),
        params=(DIM,), resolve=resolve_axis, cost=_no_cost, indices={1: limit(0)},
        samples=(Sample((TensorType.of("float32", (3, 1)), TensorType.of("int64", (3, 1))),
            {"dim": 1}, 0.0, -1.5),
                 Sample((TensorType.of("float64", (1,)), TensorType.of("int64", (1,))), {"dim": 0},
                     0.0, -1.5)),
        doc="values at the positions of a permutation along an axis: what undoes a sort",
    ),
    OpDef(
        name="take_along_dim", infer=_infer_along, vjp=ByExpansion(), lowering=Composite(_expand_along),
        reference=lambda i, a: (torch.take_along_dim(i[0], i[1], a["dim"]),), arity=(2, 2), params=(DIM,),
        resolve=resolve_axis, cost=_no_cost, indices={1: limit(0)}, doc="torch.take_along_dim",
        samples=(*_samples((4, 5), (1, 3), dim=1), *_samples((4, 1), (3, 5), dim=0)),
    ),
    OpDef(
        name="index_select", infer=_infer_select, vjp=ByExpansion(), lowering=Composite(_expand_select),
        reference=lambda i, a: (torch.index_select(i[0], a["dim"], i[1]),), arity=(2, 2), params=(DIM,),
        resolve=resolve_axis, cost=_no_cost, indices={1: limit(0)}, doc="torch.index_select",
        samples=(*_samples((4, 5), (3,), dim=0), *_samples((2, 4, 3), (5,), dim=1), *_samples((4,),
            (2,), dim=0), *_samples((2, 4, 3), (5,), dim=1, dtypes=("int64", "bool"))),
    ),
    OpDef(
        name="index_add", infer=_infer_index_add, vjp=ByExpansion(), lowering=Composite(_expand_index_add),
        reference=lambda i, a: (torch.index_add(i[0], a["dim"], i[1], i[2], alpha=a["alpha"]),), arity=(3, 3),
        params=(DIM, Attr("alpha", "float", 1.0)), resolve=resolve_axis, indices={1: limit(0)},
        cost=lambda i, o, a: tensor(i[2]).numel, doc="torch.index_add",
        samples=(*_samples((4, 5), (3,), (3, 5), dim=0), *_samples((2, 4, 3), (5,), (2, 5, 3),
            dim=1, alpha=0.5), *_samples((2, 4, 3), (5,), (2, 5, 3), dim=1, alpha=2.0, dtypes=("int64",))),
    ),
    OpDef(
        name="masked_fill", infer=_infer_filled, vjp=ByExpansion(), lowering=Composite(_expand_filled),
        reference=_filled_reference, arity=(2, 2), params=(Attr("value", "number"),),
        cost=lambda i, o, a: o[0].numel, doc="torch.masked_fill with a number",
        samples=tuple(
            Sample((TensorType.of(d, x), TensorType.of("bool", m)), {"value": v})
            for d, x, m, v in (("float32", (4, 5), (4, 5), -1e9), ("float32", (2, 4, 5), (4, 1), 0.5),
                               ("bfloat16", (4, 5), (5,), 0.0), ("int64", (4, 5), (4, 5), 3))
        ),
    ),
)  # fmt: skip
