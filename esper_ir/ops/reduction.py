"""Reductions over axes, and the composites written with them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from esper_ir.lazy import torch
from esper_ir.opdef import (  # fmt: skip
    Attr,
    Attrs,
    Composite,
    Cotangents,
    Emit,
    Lowering,
    Number,
    Opaque,
    OpDef,
    Operand,
    Operands,
    Reduction,
    Sample,
    Tolerance,
    Val,
    Vals,
    Wanted,
)
from esper_ir.ops.gradients import broadcast_to, restore, to, up
from esper_ir.ops.rules import accept, conflict, numel, reduced, resolve_dims, tensor
from esper_ir.types import Dim, DType, TensorType

Types = Sequence[TensorType | Number]
DIMS = Attr("dims", "ints", None, doc="axes to reduce; null: all")
KEEPDIM = Attr("keepdim", "bool", False, doc="keep reduced axes with size 1")


def only(inputs: Sequence[Operand]) -> Val:
    x = inputs[0]
    assert isinstance(x, Val)
    return x


def count(emit: Emit, x: TensorType, dims: Sequence[int], dtype: DType, less: float = 0) -> Operand:
    """Number of elements that a reduction takes, minus `less`: a number, or a value when the size is
    symbolic.
    """
    return amount(emit, numel([x.shape[d] for d in dims]), dtype, less)


def amount(emit: Emit, size: Dim, dtype: DType, less: float = 0) -> Operand:
    """A size minus `less` as an operand: a number, or a value when it is symbolic."""
    if size.static is not None:
        return max(float(size.static) - less, 0.0)
    if float(less).is_integer():
        return emit("full", shape=(), value=size - int(less), dtype=dtype)
    return emit("sub", emit("full", shape=(), value=size, dtype=dtype), less)


def _infer(accepts: str, widen: bool, empty: bool) -> Callable[[Types, Attrs], tuple[TensorType, ...]]:
    def infer(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
        x = tensor(operands[0])
        accept(operands, accepts)
        if not empty and any(x.shape[d].static == 0 for d in attrs["dims"]):
            raise conflict("an extremum over an axis of size 0 has no value", x)
        dtype = x.dtype if x.dtype.is_floating or not widen else DType.int64
        return (TensorType(dtype, reduced(x.shape, attrs["dims"], attrs["keepdim"])),)

    return infer


def _cost(operands: Types, outputs: Sequence[TensorType], attrs: Attrs) -> Dim:
    return tensor(operands[0]).numel


def reduction_samples(low: float = -2.0, high: float = 2.0, dtypes: Sequence[str] = ("bfloat16", "float64"),
                      empty: bool = True, extra: Attrs | None = None) -> tuple[Sample, ...]:  # fmt: skip
    rows: list[tuple[str, tuple[int, ...], Attrs]] = [
        ("float32", (5, 7), {}),
        ("float32", (5, 7), {"dims": (1,), "keepdim": True}),
        ("float32", (3, 4, 33), {"dims": (-1, 0)}),
        ("float32", (), {}),
        ("float32", (1, 130), {"dims": (1,)}),
        *((d, (5, 7), {"dims": (0,)}) for d in dtypes),
    ]
    if empty:
        rows.append(("float32", (0, 3), {"dims": (0,)}))
    return tuple(Sample((TensorType.of(d, s),), {**a, **(extra or {})}, low, high) for d, s, a in rows)


def _vjp_sum(
    emit: Emit, inputs: Operands, outputs: Vals, cotangents: Cotangents, attrs: Attrs, wanted: Wanted
) -> Cotangents:
    g, x = cotangents[0], only(inputs)
    if g is None or not wanted[0]:
        return [None]
    return [broadcast_to(emit, restore(emit, g, x.type, attrs["dims"], attrs["keepdim"]), x.type)]


def _vjp_mean(
    emit: Emit, inputs: Operands, outputs: Vals, cotangents: Cotangents, attrs: Attrs, wanted: Wanted
) -> Cotangents:
    g, x = cotangents[0], only(inputs)
    if g is None or not wanted[0]:
        return [None]
    g = restore(emit, g, x.type, attrs["dims"], attrs["keepdim"])
    return [broadcast_to(emit, emit("div", g, count(emit, x.type, attrs["dims"], g.type.dtype)), x.type)]


def _vjp_extremum(
    emit: Emit, inputs: Operands, outputs: Vals, cotangents: Cotangents, attrs: Attrs, wanted: Wanted
) -> Cotangents:
    """Elements that are equal to the extremum share its cotangent; all get NaN where none is, the extremum
    being NaN. As torch's amax does.
    """
    g, x = cotangents[0], only(inputs)
    if g is None or not wanted[0]:
        return [None]
    dims, keep = attrs["dims"], attrs["keepdim"]
    best = restore(emit, outputs[0], x.type, dims, keep)
    hit = emit("eq", x, best)
    share = emit("sum", emit("cast", hit, dtype=x.type.dtype.compute), dims=dims, keepdim=True)
    each = emit("div", up(emit, restore(emit, g, x.type, dims, keep)), share)
    return [to(emit, emit("where", hit, each, emit("sub", each, each)), x.type.dtype)]


def _vjp_prod(
    emit: Emit, inputs: Operands, outputs: Vals, cotangents: Cotangents, attrs: Attrs, wanted: Wanted
) -> Cotangents:
    """Product of the others: of all divided by the element, or of the rest where the element is the only
    zero.
    """
    g, x = cotangents[0], only(inputs)
    if g is None or not wanted[0]:
        return [None]
    dims, x32 = attrs["dims"], up(emit, x)
    zero = emit("eq", x32, 0.0)
    zeros = emit("sum", emit("cast", zero, dtype=x32.type.dtype), dims=dims, keepdim=True)
    rest = emit("prod", emit("where", zero, 1.0, x32), dims=dims, keepdim=True)
    others = emit("where", emit("eq", zeros, 0.0), emit("div", rest, x32), 0.0)
    others = emit("where", emit("logical_and", zero, emit("eq", zeros, 1.0)), rest, others)
    g = up(emit, restore(emit, g, x.type, dims, attrs["keepdim"]))
    return [to(emit, emit("mul", g, others), x.type.dtype)]


def _infer_row(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x = tensor(operands[0])
    if x.rank != 2:
        raise conflict("rows of a matrix", x)
    return (TensorType(x.dtype, x.shape[:1]),)


def _vjp_row(
    emit: Emit, inputs: Operands, outputs: Vals, cotangents: Cotangents, attrs: Attrs, wanted: Wanted
) -> Cotangents:
    return _vjp_prod(emit, inputs, outputs, cotangents, {"dims": (1,), "keepdim": False}, wanted)


def _expand_prod(emit: Emit, inputs: Sequence[Operand], attrs: Attrs) -> Sequence[Val]:
    """Reduced axes last and as one, in the compute type or int64; then row by row."""
    x, dims = only(inputs), attrs["dims"]
    kept = tuple(i for i in range(x.type.rank) if i not in dims)
    wide = up(emit, x) if x.type.dtype.is_floating else to(emit, x, DType.int64)
    moved = emit("permute", wide, dims=(*kept, *dims)) if x.type.rank else wide
    sizes = moved.type.shape
    rows = emit("reshape", moved, shape=(numel(sizes[: len(kept)]), numel(sizes[len(kept) :])))
    shape = reduced(x.type.shape, dims, attrs["keepdim"])
    made = emit("reshape", emit("row_prod", rows), shape=shape)
    return (to(emit, made, x.type.dtype if x.type.dtype.is_floating else DType.int64),)


def _torch(name: str) -> Callable[[Sequence[Any], Attrs], tuple[Any, ...]]:
    return lambda i, a: (getattr(torch, name)(i[0], dim=a["dims"], keepdim=a["keepdim"]),)


def _prod_reference(inputs: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
    """torch reduces one axis at a time; the product of none is the operand in the type of the result."""
    out = inputs[0]
    for d in sorted(attrs["dims"], reverse=True):
        out = torch.prod(out, d, keepdim=attrs["keepdim"])
    return (out if out.is_floating_point() else out.to(torch.int64),)


def _reduction(name: str, kind: Reduction | Composite, vjp: Any, samples: tuple[Sample, ...], *,
               accepts: str = "any", widen: bool = False, reference: Any = None,
               tolerance: Tolerance | None = None) -> OpDef:  # fmt: skip
    return OpDef(
        name=name, infer=_infer(accepts, widen, getattr(kind, "combine", "prod") not in ("max", "min")),
        reference=reference or _torch(name), vjp=vjp, lowering=kind,
        samples=samples, arity=(1, 1), params=(DIMS, KEEPDIM), cost=_cost, resolve=resolve_dims,
        tolerance=tolerance or Tolerance(), doc=f"torch.{name}(dim=dims, keepdim)",
    )  # fmt: skip


# Composites.


def _infer_one(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x = tensor(operands[0])
    accept(operands, "float")
    return (TensorType(x.dtype, reduced(x.shape, attrs["dims"], attrs["keepdim"])),)


def _centred(emit: Emit, x: Val, dims: Sequence[int]) -> Val:
    return emit("sub", x, emit("mean", x, dims=tuple(dims), keepdim=True))


def _variance(emit: Emit, x: Val, attrs: Attrs) -> Val:
    """In the compute type, two passes: the mean, then the squares of the differences."""
    d = _centred(emit, x, attrs["dims"])
    total = emit("sum", emit("mul", d, d), dims=attrs["dims"], keepdim=attrs["keepdim"])
    return emit("div", total, count(emit, x.type, attrs["dims"], total.type.dtype, attrs["correction"]))


def _expand_var(emit: Emit, inputs: Sequence[Operand], attrs: Attrs) -> Sequence[Val]:
    x = only(inputs)
    return (to(emit, _variance(emit, up(emit, x), attrs), x.type.dtype),)


def _expand_std(emit: Emit, inputs: Sequence[Operand], attrs: Attrs) -> Sequence[Val]:
    x = only(inputs)
    return (to(emit, emit("sqrt", _variance(emit, up(emit, x), attrs)), x.type.dtype),)


def _squared_deviations(inputs: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
    """In the compute type, two passes."""
    x = inputs[0] if inputs[0].dtype is torch.float64 else inputs[0].float()
    away = x - x.mean(attrs["dims"], keepdim=True)
    return (away.square().sum(attrs["dims"], keepdim=attrs["keepdim"]).to(inputs[0].dtype),)


def _vjp_squares(
    emit: Emit, inputs: Operands, outputs: Vals, cotangents: Cotangents, attrs: Attrs, wanted: Wanted
) -> Cotangents:
    """2 (x - mean): what the mean itself changes cancels."""
    g, x = cotangents[0], only(inputs)
    if g is None or not wanted[0]:
        return [None]
    g = up(emit, restore(emit, g, x.type, attrs["dims"], attrs["keepdim"]))
    away = _centred(emit, up(emit, x), attrs["dims"])
    return [to(emit, emit("mul", away, emit("mul", g, 2.0)), x.type.dtype)]


def _vjp_spread(root: bool) -> Any:
    """d var = 2 (x - mean) / (n - correction); d std = (x - mean) / ((n - correction) std), 0 where std is
    0.
    """

    def rule(
        emit: Emit, inputs: Operands, outputs: Vals, cotangents: Cotangents, attrs: Attrs, wanted: Wanted
    ) -> Cotangents:
        g, x = cotangents[0], only(inputs)
        if g is None or not wanted[0]:
            return [None]
        dims, x32 = attrs["dims"], up(emit, x)
        n = count(emit, x.type, dims, x32.type.dtype, attrs["correction"])
        g = up(emit, restore(emit, g, x.type, dims, attrs["keepdim"]))
        if root:
            std = up(emit, restore(emit, outputs[0], x.type, dims, attrs["keepdim"]))
            scaled = emit("where", emit("eq", std, 0.0), 0.0, emit("div", emit("div", g, std), n))
        else:
            scaled = emit("div", emit("mul", g, 2.0), n)
        return [to(emit, emit("mul", _centred(emit, x32, dims), scaled), x.type.dtype)]

    return rule


def _expand_logsumexp(emit: Emit, inputs: Sequence[Operand], attrs: Attrs) -> Sequence[Val]:
    """max + log(sum(exp(x - max))), with an infinite maximum left out of the difference."""
    x, dims, keep = up(emit, only(inputs)), attrs["dims"], attrs["keepdim"]
    if any(x.type.shape[d].static == 0 for d in dims):
        total = emit("log", emit("sum", emit("exp", x), dims=dims, keepdim=keep))
        return (to(emit, total, only(inputs).type.dtype),)
    top = emit("amax", x, dims=dims, keepdim=True)
    safe = emit("where", emit("eq", emit("abs", top), math.inf), 0.0, top)
    total = emit("sum", emit("exp", emit("sub", x, safe)), dims=dims, keepdim=keep)
    shape = total.type.shape
    base = safe if safe.type.shape == shape else emit("reshape", safe, shape=shape)
    return (to(emit, emit("add", emit("log", total), base), only(inputs).type.dtype),)


def _vjp_logsumexp(
    emit: Emit, inputs: Operands, outputs: Vals, cotangents: Cotangents, attrs: Attrs, wanted: Wanted
) -> Cotangents:
    g, x = cotangents[0], only(inputs)
    if g is None or not wanted[0]:
        return [None]
    back = [restore(emit, v, x.type, attrs["dims"], attrs["keepdim"]) for v in (g, outputs[0])]
    share = emit("exp", emit("sub", up(emit, x), up(emit, back[1])))
    return [to(emit, emit("mul", up(emit, back[0]), share), x.type.dtype)]


CORRECTION = Attr("correction", "number", 1, doc="divide by n - correction")


def _composite(name: str, expand: Any, vjp: Any, samples: tuple[Sample, ...], params: tuple[Attr, ...] = (),
               reference: Any = None, tolerance: Tolerance | None = None) -> OpDef:  # fmt: skip
    lowering: Lowering = Composite(expand)
    return OpDef(
        name=name, infer=_infer_one, reference=reference or _torch(name), vjp=vjp, lowering=lowering,
        samples=samples, arity=(1, 1), params=(DIMS, KEEPDIM, *params), resolve=resolve_dims,
        cost=lambda i, o, a: _cost(i, o, a) * 4, tolerance=tolerance or Tolerance(), doc=f"torch.{name}",
    )  # fmt: skip


def _spread(name: str) -> Callable[[Sequence[Any], Attrs], tuple[Any, ...]]:
    return lambda i, a: (
        getattr(torch, name)(i[0], dim=a["dims"], correction=a["correction"], keepdim=a["keepdim"]),
    )


SPREAD = tuple(s for s in reduction_samples(empty=False) if s.operands[0] != TensorType.of("float32", ()))
INTEGER = ("bfloat16", "float64", "int64", "int32", "bool")
PRODUCT = Tolerance(4.0, "every factor adds its relative error")

OPS = (
    _reduction("sum", Reduction("sum"), _vjp_sum, reduction_samples(dtypes=INTEGER), widen=True),
    _reduction("mean", Reduction("sum", mean=True), _vjp_mean, reduction_samples(empty=False),
               accepts="float"),
    _reduction("amax", Reduction("max"), _vjp_extremum, reduction_samples(dtypes=INTEGER, empty=False)),
    _reduction("amin", Reduction("min"), _vjp_extremum, reduction_samples(dtypes=INTEGER, empty=False)),
    _reduction("prod", Composite(_expand_prod), _vjp_prod,
               reduction_samples(0.7, 1.3, ("bfloat16", "float64", "int64")),
               widen=True, reference=_prod_reference, tolerance=PRODUCT),
    OpDef(
        name="row_prod", infer=_infer_row, reference=lambda i, a: (torch.prod(i[0], 1),), vjp=_vjp_row,
        lowering=Opaque("prod"), arity=(1, 1), cost=_cost, tolerance=PRODUCT,
        samples=tuple(Sample((TensorType.of(d, s),), {}, 0.7, 1.3) for d, s in (
            ("float32", (5, 7)), ("float32", (3, 1)), ("float64", (5, 7)), ("int64", (2, 3)))),
        doc="torch.prod of every row of a matrix, as a primitive in the compute type",
    ),
    OpDef(
        name="squared_deviations", infer=_infer_one, reference=_squared_deviations, vjp=_vjp_squares,
        lowering=Reduction("squares"), samples=SPREAD, arity=(1, 1), params=(DIMS, KEEPDIM),
        cost=lambda i, o, a: _cost(i, o, a) * 3, resolve=resolve_dims,
        doc="sum of (x - mean(x))^2 over dims: what var divides by n - correction, as a primitive",
    ),
    _composite("var", _expand_var, _vjp_spread(False), SPREAD, (CORRECTION,), _spread("var")),
    _composite("std", _expand_std, _vjp_spread(True), SPREAD, (CORRECTION,), _spread("std")),
    _composite("logsumexp", _expand_logsumexp, _vjp_logsumexp, reduction_samples(empty=False)),
)  # fmt: skip
