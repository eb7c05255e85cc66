"""Values by position: lookup of rows, one-hot, triangles, running sums."""

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
    Lookup,
    NotDifferentiable,
    Number,
    Opaque,
    OpDef,
    Operand,
    Operands,
    Sample,
    Scan,
    Val,
    Vals,
    Wanted,
)
from esper_ir.ops.convolution import sized
from esper_ir.ops.gradients import to, up, val
from esper_ir.ops.recurrence import REVERSE
from esper_ir.ops.reduction import only
from esper_ir.ops.rules import ONE, accept, axis, same, tensor, torch_dtype
from esper_ir.types import Dim, DType, TensorType

Types = Sequence[TensorType | Number]


def _no_cost(operands: Any, outputs: Any, attrs: Any) -> Dim:
    return Dim()


def _positions(operand: TensorType | Number, at: int) -> TensorType:
    t = tensor(operand, at)
    if t.dtype not in (DType.int64, DType.int32):
        raise EsperError("E0205", f"{t} are no positions", hint="int64 or int32")
    return t


def _infer_embedding(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    rows, weight = _positions(operands[0], 0), tensor(operands[1], 1)
    accept([weight], "float")
    if weight.rank != 2:
        raise EsperError("E0204", f"{weight} is no table", hint="[rows, width]")
    return (TensorType(weight.dtype, (*rows.shape, weight.shape[1])),)


def _vjp_embedding(
    emit: Emit, inputs: Operands, outputs: Vals, cotangents: Cotangents, attrs: Attrs, wanted: Wanted
) -> Cotangents:
    rows, weight = (val(o) for o in inputs)
    if cotangents[0] is None or not wanted[1]:
        return [None, None]
    return [None, emit("embedding_grad", cotangents[0], rows, size=weight.type.shape)]


def _infer_embedding_gradient(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    g, rows = tensor(operands[0]), _positions(operands[1], 1)
    weight = sized(g, attrs, 2)
    if g.rank != rows.rank + 1:
        raise EsperError("E0204", f"{g} is no cotangent of a lookup of {rows}", hint="one axis more")
    for a, b in zip(g.shape, (*rows.shape, weight.shape[1]), strict=True):
        same(a, b, "the cotangent has the shape of the lookup", g.shape, rows.shape)
    return (weight,)


def _vjp_embedding_gradient(
    emit: Emit, inputs: Operands, outputs: Vals, cotangents: Cotangents, attrs: Attrs, wanted: Wanted
) -> Cotangents:
    h = cotangents[0]
    return [emit("embedding", inputs[1], h) if h is not None and wanted[0] else None, None]


def _embedding_gradient_reference(inputs: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
    g, rows = inputs
    return (torch.ops.aten.embedding_dense_backward(g, rows, attrs["size"][0], -1, False),)


# Masks from positions.


def _infer_one_hot(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    t, count = _positions(operands[0], 0), attrs["num_classes"]
    if not isinstance(count, Dim) and (isinstance(count, (bool, float)) or count < 1):
        raise EsperError("E0203", f"num_classes is {count}", hint="a size")
    return (TensorType(attrs["dtype"], (*t.shape, Dim.of(count))),)


def _expand_one_hot(emit: Emit, inputs: Sequence[Operand], attrs: Attrs) -> Sequence[Val]:
    t = only(inputs)
    column = emit("reshape", t, shape=(*t.type.shape, ONE))
    hit = emit("eq", emit("arange", end=attrs["num_classes"], dtype=t.type.dtype), column)
    return (to(emit, hit, attrs["dtype"]),)


def _one_hot_reference(inputs: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
    return (functional.one_hot(inputs[0].long(), attrs["num_classes"]).to(torch_dtype(attrs["dtype"])),)


def _triangle(name: str, compare: str) -> OpDef:
    """Kept where column - row <= diagonal (tril), >= (triu); 0 elsewhere."""

    def infer(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
        x = tensor(operands[0])
        accept([x], "number")
        if x.rank < 2:
            raise EsperError("E0204", f"{x} is no matrix", hint="rank 2 or more")
        return (x,)

    def expand(emit: Emit, inputs: Sequence[Operand], attrs: Attrs) -> Sequence[Val]:
        x = only(inputs)
        height, width = x.type.shape[-2:]
        row = emit("reshape", emit("arange", end=height), shape=(height, ONE))
        kept = emit(compare, emit("arange", end=width), emit("add", row, attrs["diagonal"]))
        zero = 0.0 if x.type.dtype.is_floating else 0
        return (emit("where", kept, x, zero),)

    return OpDef(
        name=name, infer=infer, reference=lambda i, a: (getattr(torch, name)(i[0], a["diagonal"]),),
        vjp=ByExpansion(), lowering=Composite(expand), arity=(1, 1), params=(Attr("diagonal", "int", 0),),
        samples=tuple(
            Sample((TensorType.of(d, s),), a)
            for d, s, a in (("float32", (4, 6), {}), ("bfloat16", (2, 5, 5), {"diagonal": -1}),
                            ("int64", (4, 3), {"diagonal": 1}))
        ),
        cost=_no_cost, doc=f"torch.{name}",
    )  # fmt: skip


# Running sums: float32 inside.


def _resolve_cumsum(operands: Types, attrs: Attrs) -> dict[str, Any]:
    x = tensor(operands[0])
    if not x.rank:
        raise EsperError("E0207", "a running sum needs an axis", hint="reshape to [1]")
    return {**attrs, "dim": axis(attrs["dim"], x.rank)}


def _infer_cumsum(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    """Whole numbers and truth values are counted in int64."""
    x = tensor(operands[0])
    return (x if x.dtype.is_floating else TensorType(DType.int64, x.shape),)


def _infer_running(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x = tensor(operands[0])
    if x.dtype is not DType.int64:
        accept([x], "float")
    return (x,)


def _expand_cumsum(emit: Emit, inputs: Sequence[Operand], attrs: Attrs) -> Sequence[Val]:
    x = only(inputs)
    if not x.type.dtype.is_floating:
        return (emit("running_sum", to(emit, x, DType.int64), **attrs),)
    return (to(emit, emit("running_sum", up(emit, x), **attrs), x.type.dtype),)


def _vjp_running(
    emit: Emit, inputs: Operands, outputs: Vals, cotangents: Cotangents, attrs: Attrs, wanted: Wanted
) -> Cotangents:
    """The running sum from the other end."""
    g, at = cotangents[0], attrs["dim"]
    if g is None or not wanted[0]:
        return [None]
    return [emit("running_sum", g, dim=at, reverse=not attrs["reverse"])]


def _cumsum_reference(inputs: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
    x, at = inputs[0], attrs["dim"]
    return (x.flip(at).cumsum(at).flip(at) if attrs["reverse"] else torch.cumsum(x, at),)


def _scan(name: str, lowering: Any, vjp: Any, dtypes: Sequence[str]) -> OpDef:
    rows = [((5, 7), {"dim": 1}), ((5, 7), {"dim": 0}), ((2, 3, 4), {"dim": -2}),
            ((3, 6), {"dim": 1, "reverse": True})]  # fmt: skip
    infer = _infer_cumsum if name == "cumsum" else _infer_running
    return OpDef(
        name=name, infer=infer, reference=_cumsum_reference, vjp=vjp,
        lowering=lowering, arity=(1, 1), params=(Attr("dim", "int"), REVERSE), resolve=_resolve_cumsum,
        samples=tuple(Sample((TensorType.of(d, s),), attrs) for d in dtypes for s, attrs in rows),
        cost=lambda i, o, a: o[0].numel, doc="torch.cumsum",
    )  # fmt: skip


def _embedding_samples() -> tuple[Sample, ...]:
    return tuple(
        Sample((TensorType.of(i, s), TensorType.of(d, (9, 5))), {}, 0.0, 2.0)
        for i, d, s in (("int64", "float32", (4,)), ("int64", "bfloat16", (2, 3)),
                        ("int32", "float32", (2, 3)), ("int64", "float64", ()))
    )  # fmt: skip


def _gradient_samples() -> tuple[Sample, ...]:
    return tuple(
        Sample((TensorType.of(d, (*s, 5)), TensorType.of("int64", s)), {"size": (9, 5)}, 0.0, 2.0)
        for d, s in (("float32", (4,)), ("bfloat16", (2, 3)))
    ) + (
        Sample((TensorType.of("float32", (4, 1)), TensorType.of("int64", (4,))), {"size": (9, 1)}, 0.0, 2.0),
    )


OPS = (
    OpDef(
        name="embedding", infer=_infer_embedding, reference=lambda i, a: (functional.embedding(*i),),
        vjp=_vjp_embedding, lowering=Lookup("embedding"), samples=_embedding_samples(), arity=(2, 2),
        cost=_no_cost, indices={0: lambda types, attrs: tensor(types[1], 1).shape[0]},
        doc="torch.nn.functional.embedding(rows, weight)",
    ),
    OpDef(
        name="embedding_grad", infer=_infer_embedding_gradient, reference=_embedding_gradient_reference,
        vjp=_vjp_embedding_gradient, lowering=Opaque("embedding_grad"), samples=_gradient_samples(),
        arity=(2, 2), params=(Attr("size", "shape", doc="shape of the table"),),
        cost=lambda i, o, a: tensor(i[0]).numel, indices={1: lambda types, attrs: attrs["size"][0]},
        doc="gradient of embedding with respect to its table, from (cotangent, rows)",
    ),
    OpDef(
        name="one_hot", infer=_infer_one_hot, reference=_one_hot_reference,
        vjp=NotDifferentiable("the operand is an integer"), lowering=Composite(_expand_one_hot), arity=(1, 1),
        params=(Attr("num_classes", "scalar"), Attr("dtype", "dtype", "int64")), cost=_no_cost,
        samples=(Sample((TensorType.of("int64", (3, 2)),), {"num_classes": 5}, 0.0, 2.0),
                 Sample((TensorType.of("int32", (4,)),), {"num_classes": 7, "dtype": "float32"}, 0.0, 2.0),
                 Sample((TensorType.of("int64", ()),), {"num_classes": 4, "dtype": "bool"}, 0.0, 2.0)),
        indices={0: lambda types, attrs: Dim.of(attrs["num_classes"])},
        doc="torch.nn.functional.one_hot, in any type",
    ),
    _triangle("tril", "le"),
    _triangle("triu", "ge"),
    _scan("cumsum", Composite(_expand_cumsum), ByExpansion(),
          ("float32", "bfloat16", "float64", "int64", "bool")),
    _scan("running_sum", Scan("cumsum", "sum"), _vjp_running, ("float32", "float64", "int64")),
)  # fmt: skip
