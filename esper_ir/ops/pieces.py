"""Parts of tensors and tensors from parts: slice, reverse, pad, cat and what is written with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    Movement,
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
from esper_ir.ops.reduction import only
from esper_ir.ops.rules import ONE, Shape, axis, same, tensor
from esper_ir.types import Dim, TensorType, least

Types = Sequence[TensorType | Number]
DIM = Attr("dim", "int", 0, doc="the axis")


def _no_cost(operands: Any, outputs: Any, attrs: Any) -> Dim:
    return Dim()


def _replaced(shape: Shape, at: int, size: Dim) -> Shape:
    return (*shape[:at], size, *shape[at + 1 :])


def _axis_of(operands: Types, attrs: Attrs) -> tuple[TensorType, int]:
    x = tensor(operands[0])
    if not x.rank:
        raise EsperError("E0207", "a tensor without axes has no parts", hint="reshape to [1]")
    return x, axis(attrs["dim"], x.rank)


def _bound(value: Any, size: Dim, default: Dim) -> Dim:
    """A position as torch reads it: from the end when negative, cut at the size."""
    if value is None:
        return default
    if isinstance(value, float):
        raise EsperError("E0203", f"a position is {value}", hint="an integer or a dimension expression")
    if isinstance(value, int) and value < 0:
        return size + value if size.static is None else Dim.of(max(size.static + value, 0))
    if isinstance(value, int) and size.static is not None:
        return Dim.of(min(value, size.static))
    return Dim.of(value)


def _resolve_slice(operands: Types, attrs: Attrs) -> dict[str, Any]:
    x, at = _axis_of(operands, attrs)
    size = x.shape[at]
    start, end = _bound(attrs["start"], size, Dim()), _bound(attrs["end"], size, size)
    if start.static is not None and end.static is not None and end.static < start.static:
        end = start
    for part, name in ((start, "start"), (end - start, "end - start"), (size - end, "size - end")):
        low = least(part)
        if low is None or low < 0:
            raise EsperError("E0206", f"cannot prove that {name} = {part} >= 0 for axis {at} of {x}")
    if attrs["step"] > 1 and (end - start).static is None:
        raise EsperError("E0206", f"a step of {attrs['step']} along the symbolic axis {at} of {x}")
    if attrs["step"] < 1:
        raise EsperError("E0203", f"step is {attrs['step']}", hint="steps are positive; see reverse")
    return {**attrs, "dim": at, "start": start, "end": end}


def _infer_slice(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x = tensor(operands[0])
    step = attrs["step"]
    size = (attrs["end"] - attrs["start"] + (step - 1)) // step
    return (TensorType(x.dtype, _replaced(x.shape, attrs["dim"], size)),)


def _cut(x: Any, attrs: Attrs) -> Any:
    index = [slice(None)] * x.dim()
    index[attrs["dim"]] = slice(int(attrs["start"]), int(attrs["end"]), attrs["step"])
    return x[tuple(index)]


def _padded(emit: Emit, x: Val, at: int, before: Dim, after: Dim) -> Val:
    if before == Dim() == after:
        return x
    if before.static is None:
        return _between(emit, x, at, before, after)
    rank = x.type.rank
    first = tuple(before.static if i == at else 0 for i in range(rank))
    return emit("pad", x, before=first, after=tuple(after if i == at else Dim() for i in range(rank)))


def _between(emit: Emit, x: Val, at: int, before: Dim, after: Dim) -> Val:
    """The same where the zeros in front have a symbolic size."""
    parts = [x]
    for size, place in ((before, 0), (after, 2)):
        if size != Dim():
            zeros = emit("full", shape=_replaced(x.type.shape, at, size), value=0.0, dtype=x.type.dtype)
            parts.insert(place, zeros)
    return emit("cat", *parts, dim=at)


def _vjp_slice(
    emit: Emit, inputs: Operands, outputs: Vals, cotangents: Cotangents, attrs: Attrs, wanted: Wanted
) -> Cotangents:
    """Zeros elsewhere. With a step every element is followed by step - 1 zeros first."""
    g = cotangents[0]
    if g is None or not wanted[0]:
        return [None]
    at, step, size = attrs["dim"], attrs["step"], only(inputs).type.shape[attrs["dim"]]
    span = size - attrs["start"]
    if step > 1:
        count, shape = g.type.shape[at], g.type.shape
        apart = emit("reshape", g, shape=(*shape[: at + 1], ONE, *shape[at + 1 :]))
        apart = _padded(emit, apart, at + 1, Dim(), Dim.of(step - 1))
        g = emit("reshape", apart, shape=_replaced(shape, at, count * step))
        g = emit("slice", g, dim=at, end=attrs["end"] - attrs["start"])
    return [_padded(emit, g, at, attrs["start"], span - g.type.shape[at])]


def _resolve_reverse(operands: Types, attrs: Attrs) -> dict[str, Any]:
    return {**attrs, "dim": _axis_of(operands, attrs)[1]}


def _infer_same(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    return (tensor(operands[0]),)


def _vjp_reverse(
    emit: Emit, inputs: Operands, outputs: Vals, cotangents: Cotangents, attrs: Attrs, wanted: Wanted
) -> Cotangents:
    g = cotangents[0]
    return [None if g is None or not wanted[0] else emit("reverse", g, dim=attrs["dim"])]


# Joining.


def _infer_cat(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    first, at = tensor(operands[0]), attrs["dim"]
    total = first.shape[at]
    for position, operand in enumerate(operands[1:], 1):
        other = tensor(operand, position)
        if other.dtype is not first.dtype or other.rank != first.rank:
            raise EsperError("E0205", f"{first} and {other} cannot be joined", hint="one dtype and one rank")
        for i, (a, b) in enumerate(zip(first.shape, other.shape, strict=True)):
            if i != at:
                same(a, b, "joined tensors differ along `dim` only", first.shape, other.shape)
        total = total + other.shape[at]
    return (TensorType(first.dtype, _replaced(first.shape, at, total)),)


def _vjp_cat(
    emit: Emit, inputs: Operands, outputs: Vals, cotangents: Cotangents, attrs: Attrs, wanted: Wanted
) -> Cotangents:
    g, at, start = cotangents[0], attrs["dim"], Dim()
    found: list[Val | None] = []
    for operand, asked in zip(inputs, wanted, strict=True):
        end = start + val(operand).type.shape[at]
        taken = g is not None and asked
        found.append(emit("slice", g, dim=at, start=start, end=end) if taken and g is not None else None)
        start = end
    return found


def _resolve_stack(operands: Types, attrs: Attrs) -> dict[str, Any]:
    return {**attrs, "dim": axis(attrs["dim"], tensor(operands[0]).rank + 1)}


def _infer_stack(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    first = tensor(operands[0])
    for position, operand in enumerate(operands[1:], 1):
        other = tensor(operand, position)
        if other != first:
            raise EsperError("E0204", f"{first} and {other} cannot be stacked", hint="they have one type")
    at = attrs["dim"]
    return (TensorType(first.dtype, (*first.shape[:at], Dim.of(len(operands)), *first.shape[at:])),)


def _expand_stack(emit: Emit, inputs: Sequence[Operand], attrs: Attrs) -> Sequence[Val]:
    at = attrs["dim"]
    parts = []
    for operand in inputs:
        x = val(operand)
        parts.append(emit("reshape", x, shape=(*x.type.shape[:at], ONE, *x.type.shape[at:])))
    return (emit("cat", *parts, dim=at),)


# Borders.


def _infer_pad(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x, before, after = tensor(operands[0]), attrs["before"], attrs["after"]
    if not len(before) == len(after) == x.rank or any(b < 0 for b in before):
        raise EsperError("E0203", f"pads {list(before)} of {x}", hint="a number per axis, none negative")
    shape = tuple(n + b + a for n, b, a in zip(x.shape, before, after, strict=True))
    return (TensorType(x.dtype, shape),)


def _pad_reference(inputs: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
    pairs = list(zip(attrs["before"], attrs["after"], strict=True))[::-1]
    return (functional.pad(inputs[0], [n for pair in pairs for n in pair], value=attrs["value"]),)


def _vjp_pad(
    emit: Emit, inputs: Operands, outputs: Vals, cotangents: Cotangents, attrs: Attrs, wanted: Wanted
) -> Cotangents:
    g = cotangents[0]
    if g is None or not wanted[0]:
        return [None]
    for i, (first, size) in enumerate(zip(attrs["before"], only(inputs).type.shape, strict=True)):
        if g.type.shape[i] != size:
            g = emit("slice", g, dim=i, start=first, end=size + first)
    return [g]


# Written with slices.


Parts = Callable[[TensorType, Attrs], list[tuple[Dim, Dim]]]


def _narrowed(x: TensorType, attrs: Attrs) -> list[tuple[Dim, Dim]]:
    start, length = attrs["start"], attrs["length"]
    if isinstance(length, (bool, float)) or (isinstance(length, int) and length < 0):
        raise EsperError("E0203", f"length is {length}", hint="a size")
    first = x.shape[attrs["dim"]] + start if start < 0 else Dim.of(start)
    return [(first, first + Dim.of(length))]


def _selected(x: TensorType, attrs: Attrs) -> list[tuple[Dim, Dim]]:
    index, size = attrs["index"], x.shape[attrs["dim"]]
    start = size + index if index < 0 else Dim.of(index)
    return [(start, start + 1)]


def _split(x: TensorType, attrs: Attrs) -> list[tuple[Dim, Dim]]:
    ends = [sum(attrs["sizes"][: i + 1]) for i in range(len(attrs["sizes"]))]
    same(Dim.of(ends[-1] if ends else 0), x.shape[attrs["dim"]], "the sizes add up to the axis", x.shape)
    return [(Dim.of(e - n), Dim.of(e)) for n, e in zip(attrs["sizes"], ends, strict=True)]


def _chunked(x: TensorType, attrs: Attrs) -> list[tuple[Dim, Dim]]:
    """Equal parts: the size must be a number."""
    size, count = x.shape[attrs["dim"]].static, attrs["chunks"]
    if size is None or count < 1 or size % count:
        raise EsperError("E0206", f"cannot prove that {count} equal parts make axis {attrs['dim']} of {x}")
    return [(Dim.of(i * size // count), Dim.of((i + 1) * size // count)) for i in range(count)]


def _sliced(
    name: str, parts: Parts, params: tuple[Attr, ...], reference: Any, cases: Sequence[Attrs],
    drop: bool = False,
) -> OpDef:  # fmt: skip
    """An operator that cuts one axis; `drop` removes it."""

    def shape(x: TensorType, attrs: Attrs, size: Dim) -> Shape:
        at = attrs["dim"]
        return (*x.shape[:at], *(() if drop else (size,)), *x.shape[at + 1 :])

    def infer(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
        x = tensor(operands[0])
        found = parts(x, attrs)
        for start, end in found:
            _resolve_slice(operands, {"dim": attrs["dim"], "start": start, "end": end, "step": 1})
            if end.static is not None and (x.shape[attrs["dim"]].static or end.static) < end.static:
                raise EsperError("E0203", f"{name} up to {end} of axis {attrs['dim']} of {x}")
        return tuple(TensorType(x.dtype, shape(x, attrs, end - start)) for start, end in found)

    def expand(emit: Emit, inputs: Sequence[Operand], attrs: Attrs) -> Sequence[Val]:
        x, out = only(inputs), []
        for start, end in parts(x.type, attrs):
            cut = emit("slice", x, dim=attrs["dim"], start=start, end=end)
            out.append(emit("reshape", cut, shape=shape(x.type, attrs, end - start)) if drop else cut)
        return out

    return OpDef(
        name=name, infer=infer, reference=reference, vjp=ByExpansion(), lowering=Composite(expand),
        samples=tuple(Sample((TensorType.of("float32", (4, 6, 3)),), c) for c in cases), arity=(1, 1),
        params=params, cost=_no_cost, resolve=_resolve_reverse, doc=f"torch.{name}",
    )  # fmt: skip


def _samples(*shapes: tuple[int, ...], **attrs: Any) -> Sample:
    return Sample(tuple(TensorType.of("float32", s) for s in shapes), attrs)


def _flipped(operands: Types, attrs: Attrs) -> dict[str, Any]:
    x = tensor(operands[0])
    return {**attrs, "dims": tuple(sorted({axis(d, x.rank) for d in attrs["dims"]}))}


def _expand_flip(emit: Emit, inputs: Sequence[Operand], attrs: Attrs) -> Sequence[Val]:
    x = only(inputs)
    for d in attrs["dims"] if x.type.rank else ():
        x = emit("reverse", x, dim=d)
    return (x,)


OPS = (
    OpDef(
        name="slice", infer=_infer_slice, reference=lambda i, a: (_cut(i[0], a),), vjp=_vjp_slice,
        lowering=Movement("slice"), arity=(1, 1), cost=_no_cost, resolve=_resolve_slice,
        samples=(
            _samples((4, 6), dim=1, start=2, end=5), _samples((4, 6), dim=0, start=-3),
            _samples((4, 7), dim=1, step=3), _samples((4, 7), dim=1, start=1, end=6, step=2),
            _samples((5,), start=4, end=2), _samples((5,), end=99),
        ),
        params=(DIM, Attr("start", "scalar", 0), Attr("end", "scalar", None, doc="null: the whole axis"),
                Attr("step", "int", 1)),
        doc="x[start:end:step] along one axis",
    ),
    OpDef(
        name="reverse", infer=_infer_same, reference=lambda i, a: (torch.flip(i[0], (a["dim"],)),),
        vjp=_vjp_reverse, lowering=Movement("flip"), arity=(1, 1), cost=_no_cost, resolve=_resolve_reverse,
        samples=(_samples((4, 6), dim=1), _samples((4, 6), dim=0), _samples((1,), dim=0)), params=(DIM,),
        doc="one axis read backwards",
    ),
    OpDef(
        name="flip", infer=_infer_same, reference=lambda i, a: (torch.flip(i[0], a["dims"]),),
        vjp=ByExpansion(), lowering=Composite(_expand_flip), arity=(1, 1), cost=_no_cost, resolve=_flipped,
        samples=(_samples((4, 6), dims=(0, 1)), _samples((4, 6), dims=(-1,))), params=(Attr("dims", "ints"),),
        doc="torch.flip",
    ),
    OpDef(
        name="cat", infer=_infer_cat, reference=lambda i, a: (torch.cat(list(i), a["dim"]),), vjp=_vjp_cat,
        lowering=Opaque("cat"), arity=(1, 64), cost=_no_cost, resolve=_resolve_reverse,
        samples=(_samples((4, 6), (2, 6)), _samples((4, 6), (4, 1), (4, 3), dim=-1), _samples((3,))),
        params=(DIM,), doc="torch.cat",
    ),
    OpDef(
        name="stack", infer=_infer_stack, reference=lambda i, a: (torch.stack(list(i), a["dim"]),),
        vjp=ByExpansion(), lowering=Composite(_expand_stack), arity=(1, 64), cost=_no_cost,
        resolve=_resolve_stack, samples=(_samples((4, 6), (4, 6)), _samples((3,), (3,), dim=-1)),
        params=(DIM,), doc="torch.stack",
    ),
    OpDef(
        name="pad", infer=_infer_pad, reference=_pad_reference, vjp=_vjp_pad, lowering=Opaque("pad"),
        arity=(1, 1), cost=_no_cost,
        samples=(_samples((4, 6), before=(1, 0), after=(0, 2)),
                 _samples((3,), before=(2,), after=(1,), value=1.5)),
        params=(Attr("before", "ints"), Attr("after", "shape"), Attr("value", "number", 0.0)),
        doc="torch.nn.functional.pad (constant), with the border per axis",
    ),
    _sliced("narrow", _narrowed, (DIM, Attr("start", "int"), Attr("length", "scalar")),
            lambda i, a: (torch.narrow(i[0], a["dim"], a["start"], a["length"]),),
            [{"dim": 1, "start": 2, "length": 3}, {"dim": 0, "start": 0, "length": 4}]),
    _sliced("select", _selected, (DIM, Attr("index", "int")),
            lambda i, a: (torch.select(i[0], a["dim"], a["index"]),),
            [{"dim": 1, "index": 2}, {"dim": -1, "index": -1}], drop=True),
    _sliced("split", _split, (DIM, Attr("sizes", "ints")),
            lambda i, a: torch.split(i[0], a["sizes"], a["dim"]),
            [{"dim": 1, "sizes": (1, 2, 3)}, {"dim": 0, "sizes": (4,)}]),
    _sliced("chunk", _chunked, (DIM, Attr("chunks", "int")),
            lambda i, a: torch.chunk(i[0], a["chunks"], a["dim"]),
            [{"dim": 1, "chunks": 3}, {"dim": -1, "chunks": 1}]),
)  # fmt: skip
