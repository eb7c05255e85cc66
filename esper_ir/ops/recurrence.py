"""Linear recurrences along one axis: h[t] = a[t] h[t-1] + b[t], from h[-1] = 0. Float32 inside."""

from __future__ import annotations

from collections.abc import Sequence
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
    Scan,
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
    made = emit("recurrence", up(emit, a), up(emit, b), **attrs)
    return (to(emit, made, b.type.dtype),)


def shifted(emit: Emit, x: Val, at: int, by: int) -> Val:
    """x[t - by] along axis `at`, 0 where that lies outside."""
    size = x.type.shape[at]
    if size.static is not None and size.static <= abs(by):
        return emit("full", shape=x.type.shape, value=0.0, dtype=x.type.dtype)
    return emit("window", x, dim=at, add=-by, size=size)


def _vjp(
    emit: Emit, inputs: Operands, outputs: Vals, cotangents: Cotangents, attrs: Attrs, wanted: Wanted
) -> Cotangents:
    """db[t] = g[t] + a[t + 1] db[t + 1], the recurrence from the other end; da[t] = db[t] h[t - 1].

    Both shifts are of the values as they are stored, so that a kernel reads them one place further.
    """
    g, at, kind = cotangents[0], attrs["dim"], val(inputs[1]).type.dtype
    if g is None or not any(wanted):
        return [None, None]
    by = -1 if attrs["reverse"] else 1
    later = shifted(emit, val(inputs[0]), at, -by)
    db = emit("recurrence", up(emit, later), up(emit, g), dim=at, reverse=not attrs["reverse"])
    da = None
    if wanted[0]:
        da = to(emit, emit("mul", db, up(emit, shifted(emit, outputs[0], at, by))), kind)
    return [da, to(emit, db, kind) if wanted[1] else None]


def _reference(inputs: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
    """By doubling (Kogge and Stone 1973): after step k an element holds the sum over 2^k predecessors."""
    kept = inputs[1].dtype
    ends = [t.flip(attrs["dim"]) if attrs["reverse"] else t for t in inputs]
    a, b = (t.movedim(attrs["dim"], -1) for t in ends)
    if kept.itemsize < 4:
        a, b = a.float(), b.float()
    step = 1
    while step < b.shape[-1]:
        before = functional.pad(b[..., :-step], (step, 0))
        b, a = b + a * before, a * functional.pad(a[..., :-step], (step, 0))
        step *= 2
    made = b.movedim(-1, attrs["dim"]).to(kept)
    return (made.flip(attrs["dim"]) if attrs["reverse"] else made,)


def _samples(dtypes: Sequence[str]) -> tuple[Sample, ...]:
    rows = [((5, 7), {"dim": 1}), ((9, 3), {"dim": 0}), ((2, 6, 3), {"dim": -2}), ((4, 1), {"dim": 1}),
            ((2, 5, 3), {"dim": 1, "reverse": True})]  # fmt: skip
    return tuple(Sample((TensorType.of(d, s),) * 2, attrs, -0.9, 0.9) for d in dtypes for s, attrs in rows)


REVERSE = Attr("reverse", "bool", False, doc="from the other end")


def _record(name: str, lowering: Any, vjp: Any, dtypes: Sequence[str], doc: str) -> OpDef:
    return OpDef(
        name=name, infer=_infer, reference=_reference, vjp=vjp, lowering=lowering, samples=_samples(dtypes),
        arity=(2, 2), params=(Attr("dim", "int", doc="the axis of time"), REVERSE), resolve=_resolve,
        cost=lambda i, o, a: Dim.of(2) * o[0].numel, doc=doc,
    )  # fmt: skip


OPS = (
    _record("linear_scan", Composite(_expand), _vjp, ("float32", "bfloat16", "float64"),
            "h[t] = a[t] h[t-1] + b[t] of factors a and inputs b"),
    _record("recurrence", Scan("recurrence", "recurrence"), _vjp, ("float32", "float64"),
            "h[t] = a[t] h[t-1] + b[t], as a primitive in the compute type"),
)  # fmt: skip
