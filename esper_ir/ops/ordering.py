"""Order along an axis: first places of extrema, sorting, the largest k."""

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
    NotDifferentiable,
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
from esper_ir.ops.gradients import to
from esper_ir.ops.picking import resolve_axis
from esper_ir.ops.reduction import KEEPDIM, only
from esper_ir.ops.rules import ONE, accept, axis, conflict, tensor
from esper_ir.types import Dim, DType, TensorType, least

Types = Sequence[TensorType | Number]
DIM = Attr("dim", "int", -1, doc="the axis")
PLACE = NotDifferentiable("the result is a position")


def _shape(x: TensorType, attrs: Attrs) -> tuple[Dim, ...]:
    """Without the axis, or with size 1 there; a tensor without axes stays."""
    if not x.rank:
        return ()
    at = attrs["dim"]
    if x.shape[at].static == 0:
        raise conflict("an extremum over an axis of size 0 has no value", x)
    return (*x.shape[:at], *((ONE,) if attrs["keepdim"] else ()), *x.shape[at + 1 :])


def _resolve(operands: Types, attrs: Attrs) -> dict[str, Any]:
    return {**attrs, "dim": axis(attrs["dim"], tensor(operands[0]).rank)}


def _infer_place(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x = tensor(operands[0])
    accept([x], "number")
    return (TensorType(DType.int64, _shape(x, attrs)),)


def _infer_best(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x = tensor(operands[0])
    accept([x], "number")
    shape = _shape(x, attrs)
    return TensorType(x.dtype, shape), TensorType(DType.int64, shape)


def _place(emit: Emit, x: Val, at: int, largest: bool) -> Val:
    """First place of the extremum, size 1 along the axis. NaN is larger and smaller than any number."""
    best = emit("amax" if largest else "amin", x, dims=(at,), keepdim=True)
    hit = emit("eq", x, best)
    if x.type.dtype.is_floating:
        hit = emit("logical_or", hit, emit("isnan", x))
    size = x.type.shape[at]
    column = emit("reshape", emit("arange", end=size), shape=(size, *[ONE] * (x.type.rank - at - 1)))
    beyond: Operand = size.static if size.static is not None else emit("full", shape=(), value=size,
                                                                        dtype=DType.int64)  # fmt: skip
    return emit("amin", emit("where", hit, column, beyond), dims=(at,), keepdim=True)


def _expand_place(largest: bool) -> Any:
    def expand(emit: Emit, inputs: Sequence[Operand], attrs: Attrs) -> Sequence[Val]:
        x = only(inputs)
        if not x.type.rank:
            return (emit("full", shape=(), value=0, dtype=DType.int64),)
        found = _place(emit, x, attrs["dim"], largest)
        shape = _shape(x.type, attrs)
        return (found if found.type.shape == shape else emit("reshape", found, shape=shape),)

    return expand


def _expand_best(largest: bool) -> Any:
    """The value is picked by its place, so that its cotangent goes there alone."""

    def expand(emit: Emit, inputs: Sequence[Operand], attrs: Attrs) -> Sequence[Val]:
        x = only(inputs)
        if not x.type.rank:
            return emit("cast", x, dtype=x.type.dtype), emit("full", shape=(), value=0, dtype=DType.int64)
        at, shape = attrs["dim"], _shape(x.type, attrs)
        place = _place(emit, x, at, largest)
        size = x.type.shape[at]
        column = emit("reshape", emit("arange", end=size), shape=(size, *[ONE] * (x.type.rank - at - 1)))
        zero = 0.0 if x.type.dtype.is_floating else 0
        best = emit("sum", emit("where", emit("eq", column, place), x, zero), dims=(at,), keepdim=True)
        best = to(emit, best, x.type.dtype)
        flat = [v if v.type.shape == shape else emit("reshape", v, shape=shape) for v in (best, place)]
        return flat[0], flat[1]

    return expand


ROWS: tuple[tuple[str, tuple[int, ...], Attrs], ...] = (
    ("float32", (5, 7), {"dim": 1}), ("float32", (5, 7), {"dim": 0, "keepdim": True}),
    ("float32", (2, 3, 33), {"dim": -2}), ("float32", (), {}), ("bfloat16", (5, 7), {"dim": 1}),
    ("float64", (5, 7), {"dim": 0}), ("int64", (5, 7), {"dim": 1}),
)  # fmt: skip


def _samples() -> tuple[Sample, ...]:
    return tuple(Sample((TensorType.of(d, s),), a) for d, s, a in ROWS)


def _cost(operands: Types, outputs: Sequence[TensorType], attrs: Attrs) -> Dim:
    return tensor(operands[0]).numel * 3


def _arg(name: str, largest: bool) -> OpDef:
    return OpDef(
        name=name, infer=_infer_place, vjp=PLACE, lowering=Composite(_expand_place(largest)), arity=(1, 1),
        reference=lambda i, a: (getattr(torch, name)(i[0], a["dim"], keepdim=a["keepdim"]),),
        samples=_samples(), params=(DIM, KEEPDIM), resolve=_resolve, cost=_cost,
        doc=f"torch.{name} along an axis; of equal values the first",
    )  # fmt: skip


def _best(name: str, largest: bool) -> OpDef:
    return OpDef(
        name=name, infer=_infer_best, vjp=ByExpansion(), lowering=Composite(_expand_best(largest)),
        arity=(1, 1), reference=lambda i, a: tuple(getattr(torch, name)(i[0], a["dim"],
            keepdim=a["keepdim"])),
        samples=_samples(), params=(DIM, KEEPDIM), resolve=_resolve, cost=_cost,
        doc=f"torch.{name} along an axis: values and places, of equal values the first",
    )  # fmt: skip


# Sorting.


def _infer_sort(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x = tensor(operands[0])
    accept([x], "number")
    return x, TensorType(DType.int64, x.shape)


def _vjp_sort(
    emit: Emit, inputs: Operands, outputs: Vals, cotangents: Cotangents, attrs: Attrs, wanted: Wanted
) -> Cotangents:
    g = cotangents[0]
    if g is None or not wanted[0]:
        return [None]
    return [emit("unsort", g, outputs[1], dim=attrs["dim"])]


def _sorted(x: Any, attrs: Attrs) -> tuple[Any, ...]:
    return tuple(torch.sort(x, dim=attrs["dim"], descending=attrs["descending"], stable=True))


def _infer_top(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x, at, k = tensor(operands[0]), attrs["dim"], attrs["k"]
    accept([x], "number")
    low = least(x.shape[at])
    if k < 0 or low is None or low < k:
        raise EsperError("E0206", f"cannot prove that axis {at} of {x} has {k} values")
    shape = (*x.shape[:at], Dim.of(k), *x.shape[at + 1 :])
    return TensorType(x.dtype, shape), TensorType(DType.int64, shape)


def _expand_top(emit: Emit, inputs: Sequence[Operand], attrs: Attrs) -> Sequence[Val]:
    at = attrs["dim"]
    both = emit.many("sort", inputs[0], dim=at, descending=attrs["largest"])
    return tuple(emit("slice", v, dim=at, end=attrs["k"]) for v in both)


def _top_reference(inputs: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
    """torch.topk leaves open which of equal values it takes; the first ones here."""
    both = _sorted(inputs[0], {"dim": attrs["dim"], "descending": attrs["largest"]})
    return tuple(v.narrow(attrs["dim"], 0, attrs["k"]) for v in both)


def _infer_ranked(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    """One value and its place; of symbolic axes the least size counts."""
    x = tensor(operands[0])
    accept([x], "number")
    shape = _shape(x, attrs)
    if x.rank and "k" in attrs:
        low = least(x.shape[attrs["dim"]])
        if attrs["k"] < 1 or low is None or low < attrs["k"]:
            raise EsperError("E0206", f"cannot prove that axis {attrs['dim']} of {x} has {attrs['k']} values")
    if x.rank and "k" not in attrs and x.shape[attrs["dim"]].static is None:
        raise EsperError(
            "E0206", f"axis {attrs['dim']} of {x} has no middle", hint="its size is to be static"
        )
    return TensorType(x.dtype, shape), TensorType(DType.int64, shape)


def _resolve_ranked(operands: Types, attrs: Attrs) -> dict[str, Any]:
    return {**attrs, "dim": axis(attrs["dim"], tensor(operands[0]).rank)}


def _expand_ranked(emit: Emit, inputs: Sequence[Operand], attrs: Attrs) -> Sequence[Val]:
    """What stands at a place of the order; the last of the order is NaN where there is any, and a median is
    that then.
    """
    x = only(inputs)
    if not x.type.rank:
        return emit("cast", x, dtype=x.type.dtype), emit("full", shape=(), value=0, dtype=DType.int64)
    at, shape = attrs["dim"], _shape(x.type, attrs)
    size = x.type.shape[at]
    values, places = emit.many("sort", x, dim=at)
    place = attrs["k"] - 1 if "k" in attrs else (size - 1) // 2
    found = [_at(emit, v, at, place) for v in (values, places)]
    if "k" not in attrs and x.type.dtype.is_floating:
        last = [_at(emit, v, at, size - 1) for v in (values, places)]
        broken = emit("isnan", last[0])
        found = [emit("where", broken, a, b) for a, b in zip(last, found, strict=True)]
    flat = [v if v.type.shape == shape else emit("reshape", v, shape=shape) for v in found]
    return flat[0], flat[1]


def _at(emit: Emit, x: Val, at: int, place: Dim | int) -> Val:
    return emit("slice", x, dim=at, start=place, end=place + 1)


def _ranked_reference(inputs: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
    """Of equal values torch may take any; the one that a stable order puts there."""
    x = inputs[0]
    if not x.dim():
        return x.clone(), torch.zeros((), dtype=torch.int64, device=x.device)
    at, keep = attrs["dim"], attrs["keepdim"]
    place = attrs["k"] - 1 if "k" in attrs else (x.shape[at] - 1) // 2
    values, places = torch.sort(x, dim=at, stable=True)
    if "k" not in attrs and x.is_floating_point():
        broken = values.narrow(at, x.shape[at] - 1, 1).isnan()
        values, places = (
            torch.where(broken, v.narrow(at, x.shape[at] - 1, 1), v.narrow(at, place, 1))
            for v in (values, places)
        )
        place = 0
    picked = (v.narrow(at, place, 1) for v in (values, places))
    return tuple(v if keep else v.squeeze(at) for v in picked)


def _ranked(name: str, doc: str, *own: Attr) -> OpDef:
    given = {"k": 2} if own else {}
    return OpDef(
        name=name, infer=_infer_ranked, vjp=ByExpansion(), lowering=Composite(_expand_ranked), arity=(1, 1),
        reference=_ranked_reference, params=(*own, DIM, KEEPDIM), resolve=_resolve_ranked, cost=_cost,
        samples=tuple(Sample((TensorType.of(d, s),), {**a, **given}) for d, s, a in ROWS if s), doc=doc,
    )  # fmt: skip


def _sort_samples(**attrs: Any) -> tuple[Sample, ...]:
    rows = (("float32", (5, 7), 1), ("float32", (5, 7), 0), ("bfloat16", (2, 5, 3), 1), ("float64", (6,), 0),
            ("int64", (5, 7), -1))  # fmt: skip
    return tuple(Sample((TensorType.of(d, s),), {"dim": at, **attrs}) for d, s, at in rows)


OPS = (
    _arg("argmax", True),
    _arg("argmin", False),
    _best("max", True),
    _best("min", False),
    OpDef(
        name="sort", infer=_infer_sort, vjp=_vjp_sort, lowering=Opaque("sort"), arity=(1, 1),
        reference=lambda i, a: _sorted(i[0], a), resolve=resolve_axis, cost=_cost,
        params=(DIM, Attr("descending", "bool", False)),
        samples=(*_sort_samples(), *_sort_samples(descending=True)),
        doc="torch.sort(stable=True): values and places",
    ),
    _ranked("median", "torch.median along an axis: the lower of two in the middle, and its place"),
    _ranked("kthvalue", "torch.kthvalue: the k-th smallest along an axis, and its place", Attr("k", "int")),
    OpDef(
        name="topk", infer=_infer_top, vjp=ByExpansion(), lowering=Composite(_expand_top), arity=(1, 1),
        reference=_top_reference, resolve=resolve_axis, cost=_cost,
        params=(Attr("k", "int"), DIM, Attr("largest", "bool", True)),
        samples=(*_sort_samples(k=3), *_sort_samples(k=2, largest=False)),
        doc="torch.topk, sorted: values and places, of equal values the first",
    ),
)  # fmt: skip
