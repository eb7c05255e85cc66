"""Linear recurrences along one axis: h[t] = a[t] h[t-1] + b[t], from h[-1] = 0. Float32 inside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from esper_ir.diagnostics import EsperError
from esper_ir.lazy import functional
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
from esper_ir.ops.gradients import to, up, val
from esper_ir.ops.rules import accept, axis, tensor
from esper_ir.types import Dim, TensorType

Types = Sequence[TensorType | Number]


def _resolve(operands: Types, attrs: Attrs) -> dict[str, Any]:
    a = tensor(operands[0])
    if not a.rank:
        raise EsperError("E0207", "a recurrence needs an axis", hint="reshape to [1]")
    return {**attrs, "dim": axis(attrs["dim"], a.rank)}


def _infer(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    a, b = tensor(operands[0]), tensor(operands[1], 1)
    accept([a, b], "float")
    if a != b:
        raise EsperError("E0204", f"{a} and {b} differ", hint="factors and inputs have one type")
    return (b,)


def _expand(emit: Emit, inputs: Sequence[Operand], attrs: Attrs) -> Sequence[Val]:
    a, b = (val(o) for o in inputs)
    made = emit("recurrence", up(emit, a), up(emit, b), dim=attrs["dim"])
    return (to(emit, made, b.type.dtype),)


def _shifted(emit: Emit, x: Val, at: int, back: bool) -> Val:
    """x[t - 1] with 0 first, or (`back`) x[t + 1] with 0 last."""
    size, rank = x.type.shape[at], x.type.rank
    one = tuple(int(i == at) for i in range(rank))
    none = (0,) * rank
    if back:
        return emit("slice", emit("pad", x, before=none, after=one), dim=at, start=1, end=size + 1)
    return emit("slice", emit("pad", x, before=one, after=none), dim=at, start=0, end=size)


def _vjp(
    emit: Emit, inputs: Operands, outputs: Vals, cotangents: Cotangents, attrs: Attrs, wanted: Wanted
) -> Cotangents:
    """db[t] = g[t] + a[t + 1] db[t + 1], the recurrence from the other end; da[t] = db[t] h[t - 1]."""
    g, at = cotangents[0], attrs["dim"]
    if g is None or not any(wanted):
        return [None, None]
    later = emit("reverse", _shifted(emit, val(inputs[0]), at, True), dim=at)
    db = emit("reverse", emit("recurrence", later, emit("reverse", g, dim=at), dim=at), dim=at)
    da = emit("mul", db, _shifted(emit, outputs[0], at, False)) if wanted[0] else None
    return [da, db if wanted[1] else None]


def _reference(inputs: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
    """By doubling (Kogge and Stone 1973): after step k an element holds the sum over 2^k predecessors."""
    kept = inputs[1].dtype
    a, b = (t.movedim(attrs["dim"], -1) for t in inputs)
    if kept.itemsize < 4:
        a, b = a.float(), b.float()
    step = 1
    while step < b.shape[-1]:
        before = functional.pad(b[..., :-step], (step, 0))
        b, a = b + a * before, a * functional.pad(a[..., :-step], (step, 0))
        step *= 2
    return (b.movedim(-1, attrs["dim"]).to(kept),)


def _samples(dtypes: Sequence[str]) -> tuple[Sample, ...]:
    rows = [((5, 7), 1), ((9, 3), 0), ((2, 6, 3), -2), ((4, 1), 1)]
    return tuple(Sample((TensorType.of(d, s),) * 2, {"dim": at}, -0.9, 0.9) for d in dtypes for s, at in rows)


def _record(name: str, lowering: Any, vjp: Any, dtypes: Sequence[str], doc: str) -> OpDef:
    return OpDef(
        name=name, infer=_infer, reference=_reference, vjp=vjp, lowering=lowering, samples=_samples(dtypes),
        arity=(2, 2), params=(Attr("dim", "int", doc="the axis of time"),), resolve=_resolve,
        cost=lambda i, o, a: Dim.of(2) * o[0].numel, doc=doc,
    )  # fmt: skip


OPS = (
    _record("linear_scan", Composite(_expand), ByExpansion(), ("float32", "bfloat16", "float64"),
            "h[t] = a[t] h[t-1] + b[t] of factors a and inputs b"),
    _record("recurrence", Opaque("recurrence"), _vjp, ("float32", "float64"),
            "h[t] = a[t] h[t-1] + b[t], as a primitive in the compute type"),
)  # fmt: skip
