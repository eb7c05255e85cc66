"""Cross entropy of class indices: float32 inside, nothing of the size of the logits but their gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from esper_ir.diagnostics import EsperError
from esper_ir.lazy import functional
from esper_ir.opdef import (
    Attr,
    Attrs,
    Composite,
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
from esper_ir.ops.gradients import to, up, val
from esper_ir.ops.losses import REDUCTION
from esper_ir.ops.reduction import count
from esper_ir.ops.rules import ONE, accept, numel, same, tensor
from esper_ir.types import Dim, DType, TensorType

Types = Sequence[TensorType | Number]


def _classes(x: TensorType) -> int:
    """The axis of the classes."""
    return 1 if x.rank > 1 else 0


def _infer(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x, t = tensor(operands[0]), tensor(operands[1], 1)
    accept([x], "float")
    if not x.rank:
        raise EsperError("E0204", f"{x} has no classes", hint="logits are [classes] or [batch, classes, ...]")
    if x.shape[_classes(x)].static == 0:
        raise EsperError("E0204", f"{x} has no classes", hint="at least one")
    if t.dtype not in (DType.int64, DType.int32):
        raise EsperError("E0205", f"{t} are no class indices", hint="int64 or int32, no probabilities")
    rest = tuple(d for i, d in enumerate(x.shape) if i != _classes(x))
    if t.rank != len(rest):
        raise EsperError("E0204", f"{t} does not go with {x}", hint="one index per position")
    for a, b in zip(t.shape, rest, strict=True):
        same(a, b, "one index per position without the classes", t.shape, x.shape)
    if len(operands) > 2:
        w = tensor(operands[2], 2)
        if w.rank != 1 or w.dtype is not x.dtype:
            raise EsperError("E0204", f"{w} is no weight per class of {x}", hint="[classes], in its dtype")
        same(w.shape[0], x.shape[_classes(x)], "one weight per class", w.shape, x.shape)
    if not 0.0 <= attrs["label_smoothing"] <= 1.0:
        raise EsperError("E0203", f"label_smoothing is {attrs['label_smoothing']}", hint="from 0 to 1")
    return (TensorType(x.dtype, t.shape if attrs["reduction"] == "none" else ()),)


@dataclass(frozen=True)
class _Pieces:
    """Classes last. Per row [..., 1]: `top` and `total` of the exponentials, `valid`; `hit` marks the
    target's column. `weight`: of the target's class per row, with `weights` [classes].
    """

    x: Val
    hit: Val
    valid: Val
    top: Val
    total: Val
    weights: Val | None
    weight: Val | None


def _last(emit: Emit, x: Val) -> Val:
    at, rank = _classes(x.type), x.type.rank
    if at == rank - 1:
        return x
    return emit("permute", x, dims=(*(i for i in range(rank) if i != at), at))


def _along(emit: Emit, op: str, x: Val) -> Val:
    return emit(op, x, dims=(x.type.rank - 1,), keepdim=True)


def _pieces(emit: Emit, inputs: Sequence[Operand], attrs: Attrs) -> _Pieces:
    x = up(emit, _last(emit, val(inputs[0])))
    t = emit("reshape", val(inputs[1]), shape=(*val(inputs[1]).type.shape, ONE))
    column = emit("arange", end=x.type.shape[-1], dtype=DType.int32)
    hit = emit("eq", column, to(emit, t, DType.int32))
    top = _along(emit, "amax", x)
    total = _along(emit, "sum", emit("exp", emit("sub", x, top)))
    weights = up(emit, val(inputs[2])) if len(inputs) > 2 else None
    weight = None if weights is None else _along(emit, "sum", emit("where", hit, weights, 0.0))
    return _Pieces(x, hit, emit("ne", t, attrs["ignore_index"]), top, total, weights, weight)


def _rows(emit: Emit, p: _Pieces, attrs: Attrs) -> Val:
    """log(sum exp(x - top)) - (x_target - top), weighted; over all classes for the smoothed share."""
    smooth, log_total = attrs["label_smoothing"], emit("log", p.total)
    picked = _along(emit, "sum", emit("where", p.hit, p.x, 0.0))
    loss = emit("sub", log_total, emit("sub", picked, p.top))
    if p.weight is not None:
        loss = emit("mul", loss, p.weight)
    if smooth:
        every = emit("sub", log_total, emit("sub", p.x, p.top))
        if p.weights is not None:
            every = emit("mul", every, p.weights)
        even = emit("mul", _along(emit, "mean", every), smooth)
        loss = emit("add", emit("mul", loss, 1.0 - smooth), even)
    return emit("where", p.valid, loss, 0.0)


def _count(emit: Emit, p: _Pieces) -> Val:
    """What a mean divides by: the weights of the targets that count."""
    dtype = p.x.type.dtype
    each = to(emit, p.valid, dtype) if p.weight is None else emit("where", p.valid, p.weight, 0.0)
    return emit("sum", each, dims=tuple(range(each.type.rank)))


def _expand(emit: Emit, inputs: Sequence[Operand], attrs: Attrs) -> Sequence[Val]:
    p, dtype = _pieces(emit, inputs, attrs), val(inputs[0]).type.dtype
    loss = _rows(emit, p, attrs)
    if attrs["reduction"] == "none":
        return (to(emit, emit("reshape", loss, shape=val(inputs[1]).type.shape), dtype),)
    total = emit("sum", loss, dims=tuple(range(loss.type.rank)))
    return (to(emit, emit("div", total, _count(emit, p)) if attrs["reduction"] == "mean" else total, dtype),)


def _vjp(
    emit: Emit, inputs: Operands, outputs: Vals, cotangents: Cotangents, attrs: Attrs, wanted: Wanted
) -> Cotangents:
    """scale (softmax sum(q) - q), with q = (1 - s) w_t at the target plus s w / classes everywhere."""
    found: list[Val | None] = [None] * len(inputs)
    g = cotangents[0]
    if g is None or not wanted[0]:
        return found
    x = val(inputs[0]).type
    p, smooth = _pieces(emit, inputs, attrs), attrs["label_smoothing"]
    g = up(emit, g)
    if attrs["reduction"] == "none":
        g = emit("reshape", g, shape=p.valid.type.shape)
    elif attrs["reduction"] == "mean":
        g = emit("div", g, _count(emit, p))
    share = emit("div", emit("exp", emit("sub", p.x, p.top)), p.total)
    if smooth:
        share = _smoothed(emit, p, share, smooth)
    else:
        share = emit("sub", share, to(emit, p.hit, p.x.type.dtype))
        share = share if p.weight is None else emit("mul", share, p.weight)
    dx = to(emit, emit("mul", share, emit("where", p.valid, g, 0.0)), x.dtype)
    at, rank = _classes(x), x.rank
    order = (*range(at), rank - 1, *range(at, rank - 1))
    found[0] = dx if at == rank - 1 else emit("permute", dx, dims=order)
    return found


def _smoothed(emit: Emit, p: _Pieces, share: Val, smooth: float) -> Val:
    size = count(emit, p.x.type, (p.x.type.rank - 1,), p.x.type.dtype)
    each: Operand = smooth / size if isinstance(size, float) else emit("div", smooth, size)
    sharp: Operand = 1.0 - smooth if p.weight is None else emit("mul", p.weight, 1.0 - smooth)
    even: Operand = each if p.weights is None else emit("mul", p.weights, each)
    spread: Operand = smooth if p.weights is None else emit("sum", even, keepdim=True)
    whole = emit("mul", share, 1.0 if p.weights is None else emit("add", sharp, spread))
    peak = emit("add", to(emit, p.hit, p.x.type.dtype), 0.0)
    return emit("sub", whole, emit("add", emit("mul", peak, sharp), even))


def _reference(inputs: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
    x, t, *weight = inputs
    out = functional.cross_entropy(
        x, t.long(), weight[0].detach() if weight else None, ignore_index=attrs["ignore_index"],
        reduction=attrs["reduction"], label_smoothing=attrs["label_smoothing"],
    )  # fmt: skip
    return (out,)


def _samples() -> tuple[Sample, ...]:
    rows: list[tuple[str, tuple[int, ...], bool, Attrs]] = [
        ("float32", (5, 7), False, {}),
        ("float32", (5, 7), False, {"reduction": "none", "ignore_index": 1}),
        ("float32", (5, 7), True, {"reduction": "sum"}),
        ("float32", (6, 7), True, {"ignore_index": 2}),
        ("float32", (5, 7), False, {"label_smoothing": 0.1}),
        ("float32", (5, 7), True, {"label_smoothing": 0.25, "ignore_index": 0}),
        ("float32", (3, 5, 4), False, {}),
        ("float32", (7,), False, {}),
        ("bfloat16", (5, 130), False, {}),
        ("float64", (5, 7), False, {}),
    ]
    out = []
    for dtype, shape, weighted, attrs in rows:
        at = min(1, len(shape) - 1)
        t = TensorType.of("int64", (*shape[:at], *shape[at + 1 :]))
        weight = [TensorType.of(dtype, shape[at : at + 1])] if weighted else []
        out.append(Sample((TensorType.of(dtype, shape), t, *weight), attrs, 0.0, 2.0))
    return tuple(out)


def _cost(operands: Types, outputs: Sequence[TensorType], attrs: Attrs) -> Dim:
    return numel(tensor(operands[0]).shape) * 5


OPS = (
    OpDef(
        name="cross_entropy", infer=_infer, reference=_reference, vjp=_vjp, lowering=Composite(_expand),
        samples=_samples(), arity=(2, 3), cost=_cost,
        params=(
            REDUCTION, Attr("ignore_index", "int", -100, doc="targets of this value count for nothing"),
            Attr("label_smoothing", "float", 0.0),
        ),
        indices={1: lambda types, attrs: tensor(types[0]).shape[_classes(tensor(types[0]))]},
        doc="torch.nn.functional.cross_entropy(logits, class indices, weight)",
    ),
)  # fmt: skip
