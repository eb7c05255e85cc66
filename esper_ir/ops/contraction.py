"""Matrix products. Accumulation is float32 (float64 for float64); `precision` says how float32 operands are
multiplied.
"""

from __future__ import annotations

from collections.abc import Sequence

from esper_ir.diagnostics import EsperError
from esper_ir.lazy import functional, torch
from esper_ir.opdef import (
    Attr,
    Attrs,
    Composite,
    Contraction,
    Cotangents,
    Emit,
    Number,
    OpDef,
    Operand,
    Operands,
    Sample,
    Val,
    Vals,
    Wanted,
)
from esper_ir.ops.gradients import to, unbroadcast, up, val
from esper_ir.ops.reduction import only
from esper_ir.ops.rules import ONE, accept, broadcast, conflict, numel, same, tensor
from esper_ir.types import Dim, TensorType

Types = Sequence[TensorType | Number]
PRECISION = Attr(
    "precision",
    "str",
    "ieee",
    ("ieee", "tf32", "bf16x3"),
    "multiplication of float32 operands; part of the meaning",
)


def _same_dtype(operands: Types) -> None:
    types = [tensor(o, i) for i, o in enumerate(operands)]
    accept(types, "float")
    if len({t.dtype for t in types}) > 1:
        found = " and ".join(str(t) for t in types)
        raise EsperError("E0205", f"operands {found} differ in dtype", hint="add a cast")


def _infer_matmul(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    _same_dtype(operands)
    a, b = (tensor(o, i) for i, o in enumerate(operands))
    if a.rank < 2 or b.rank < 2:
        raise conflict("matmul takes operands of rank 2 or more", a, b)
    same(a.shape[-1], b.shape[-2], "columns of the first equal rows of the second", a.shape, b.shape)
    batch = broadcast([a.shape[:-2], b.shape[:-2]])
    return (TensorType(a.dtype, (*batch, a.shape[-2], b.shape[-1])),)


def _swapped(emit: Emit, x: Val) -> Val:
    """The last two axes exchanged."""
    rank = x.type.rank
    return emit("permute", x, dims=(*range(rank - 2), rank - 1, rank - 2))


def _rows(emit: Emit, x: Val) -> Val:
    """All leading axes as one."""
    if x.type.rank == 2:
        return x
    return emit("reshape", x, shape=(numel(x.type.shape[:-1]), x.type.shape[-1]))


def _vjp_matmul(
    emit: Emit, inputs: Operands, outputs: Vals, cotangents: Cotangents, attrs: Attrs, wanted: Wanted
) -> Cotangents:
    """da = g b^T, db = a^T g; a shared right operand sums over the batch inside one product."""
    g, a, b = cotangents[0], val(inputs[0]), val(inputs[1])
    found: list[Val | None] = [None, None]
    if g is None:
        return found
    precision = attrs["precision"]
    if wanted[0]:
        found[0] = unbroadcast(emit, emit("matmul", g, _swapped(emit, b), precision=precision), a.type)
    if wanted[1] and b.type.rank == 2:
        found[1] = emit("matmul", _swapped(emit, _rows(emit, a)), _rows(emit, g), precision=precision)
    elif wanted[1]:
        found[1] = unbroadcast(emit, emit("matmul", _swapped(emit, a), g, precision=precision), b.type)
    return found


def _cost_matmul(operands: Types, outputs: Sequence[TensorType], attrs: Attrs) -> Dim:
    return outputs[0].numel * tensor(operands[0]).shape[-1] * 2


def _infer_linear(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    _same_dtype(operands)
    x, w = tensor(operands[0]), tensor(operands[1], 1)
    if x.rank < 1 or w.rank != 2:
        raise conflict("linear takes x [..., in] and weight [out, in]", x, w)
    same(x.shape[-1], w.shape[1], "the last axis of x equals the second of weight", x.shape, w.shape)
    if len(operands) > 2:
        bias = tensor(operands[2], 2)
        if bias.rank != 1:
            raise conflict("bias is [out]", bias, w)
        same(bias.shape[0], w.shape[0], "bias is [out]", bias.shape, w.shape)
    return (TensorType(x.dtype, (*x.shape[:-1], w.shape[0])),)


def _expand_linear(emit: Emit, inputs: Sequence[Operand], attrs: Attrs) -> Sequence[Val]:
    x, w = only(inputs), only(inputs[1:])
    rows = x if x.type.rank > 1 else emit("reshape", x, shape=(ONE, x.type.shape[0]))
    out = emit("matmul", rows, emit("permute", w, dims=(1, 0)), precision=attrs["precision"])
    if len(inputs) > 2:
        out = emit("add", out, inputs[2])
    return (out if x.type.rank > 1 else emit("reshape", out, shape=(w.type.shape[0],)),)


def _vjp_linear(
    emit: Emit, inputs: Operands, outputs: Vals, cotangents: Cotangents, attrs: Attrs, wanted: Wanted
) -> Cotangents:
    found: list[Val | None] = [None] * len(inputs)
    g, x, w = cotangents[0], only(inputs), only(inputs[1:])
    if g is None:
        return found
    flat = [v if v.type.rank > 1 else emit("reshape", v, shape=(ONE, v.type.shape[0])) for v in (g, x)]
    precision = attrs["precision"]
    if wanted[0]:
        dx = emit("matmul", flat[0], w, precision=precision)
        found[0] = dx if dx.type.shape == x.type.shape else emit("reshape", dx, shape=x.type.shape)
    if wanted[1]:
        rows = [_rows(emit, v) for v in flat]
        found[1] = emit("matmul", _swapped(emit, rows[0]), rows[1], precision=precision)
    if len(inputs) > 2 and wanted[2]:
        bias = val(inputs[2]).type
        found[2] = to(emit, unbroadcast(emit, up(emit, g), bias), bias.dtype)
    return found


def _sample(*shapes: tuple[int, ...], dtype: str = "float32") -> Sample:
    return Sample(tuple(TensorType.of(dtype, s) for s in shapes))


OPS = (
    OpDef(
        name="matmul",
        infer=_infer_matmul,
        reference=lambda i, a: (torch.matmul(i[0], i[1]),),
        vjp=_vjp_matmul,
        lowering=Contraction("matmul"),
        samples=(
            _sample((5, 7), (7, 3)),
            _sample((1, 1), (1, 1)),
            _sample((2, 5, 7), (7, 3)),
            _sample((2, 5, 7), (2, 7, 3)),
            _sample((2, 1, 5, 7), (3, 7, 4)),
            _sample((5, 0), (0, 3)),
            _sample((17, 129), (129, 33)),
            _sample((17, 64), (64, 33), dtype="bfloat16"),
            _sample((5, 7), (7, 3), dtype="float64"),
        ),
        arity=(2, 2),
        params=(PRECISION,),
        cost=_cost_matmul,
        doc="torch.matmul of operands of rank 2 or more, leading axes broadcast",
    ),
    OpDef(
        name="linear",
        infer=_infer_linear,
        reference=lambda i, a: (functional.linear(*i),),
        vjp=_vjp_linear,
        lowering=Composite(_expand_linear),
        samples=(
            _sample((5, 7), (3, 7), (3,)),
            _sample((5, 7), (3, 7)),
            _sample((7,), (3, 7), (3,)),
            _sample((2, 5, 7), (3, 7), (3,)),
            _sample((17, 64), (33, 64), (33,), dtype="bfloat16"),
        ),
        arity=(2, 3),
        params=(PRECISION,),
        cost=_cost_matmul,
        doc="torch.nn.functional.linear(x, weight [out, in], bias [out])",
    ),
)
