"""Arrangements written with slices, joins and reshapes: roll, repeat, diagonals, borders, patches."""

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
    Emit,
    NotDifferentiable,
    Number,
    OpDef,
    Operand,
    Sample,
    Val,
)
from esper_ir.ops.gradients import val
from esper_ir.ops.movement import divide
from esper_ir.ops.reduction import only
from esper_ir.ops.rules import ONE, Shape, accept, axis, tensor, torch_dtype
from esper_ir.types import Dim, DType, TensorType

Types = Sequence[TensorType | Number]
Rule = Callable[[TensorType, Attrs], Shape]
Expand = Callable[[Emit, Sequence[Operand], Attrs], Sequence[Val]]


def _no_cost(operands: Any, outputs: Any, attrs: Any) -> Dim:
    return Dim()


def _record(
    name: str, shape: Rule, expand: Expand, reference: Any, params: tuple[Attr, ...], rows: Sequence[Any],
    doc: str, resolve: Any = None,
) -> OpDef:  # fmt: skip
    """A movement of one operand: its shape rule, its parts, its cases (shape, attributes)."""

    def infer(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
        x = tensor(operands[0])
        return (TensorType(x.dtype, shape(x, attrs)),)

    samples = [Sample((TensorType.of("float32", s),), a) for s, a in rows]
    samples.append(Sample((TensorType.of("bfloat16", rows[0][0]),), rows[0][1]))
    return OpDef(
        name=name, infer=infer, reference=reference, vjp=ByExpansion(), lowering=Composite(expand),
        samples=tuple(samples), arity=(1, 1), params=params, cost=_no_cost, resolve=resolve, doc=doc,
    )  # fmt: skip


def _roll_shape(x: TensorType, attrs: Attrs) -> Shape:
    for at in range(x.rank) if attrs["dims"] is None else attrs["dims"]:
        _static(x, at)
    return x.shape


def _static(x: TensorType, at: int) -> int:
    size = x.shape[at].static
    if size is None:
        raise EsperError("E0206", f"axis {at} of {x} is symbolic", hint="make it a number")
    return size


# Turning round and repeating.


def _resolve_roll(operands: Types, attrs: Attrs) -> dict[str, Any]:
    x, dims = tensor(operands[0]), attrs["dims"]
    if dims and not x.rank:
        raise EsperError("E0207", f"axes {list(dims)} of {x}", hint="it has none")
    if len(dims or (0,)) != len(attrs["shifts"]):
        raise EsperError("E0203", f"shifts {list(attrs['shifts'])} along {dims}", hint="one shift per axis")
    return {**attrs, "dims": None if not dims else tuple(axis(d, x.rank) for d in dims)}


def _rolled(emit: Emit, x: Val, at: int, shift: int) -> Val:
    size = _static(x.type, at)
    cut = -shift % size if size else 0
    if not cut:
        return x
    head, tail = emit("slice", x, dim=at, start=cut), emit("slice", x, dim=at, end=cut)
    return emit("cat", head, tail, dim=at)


def _expand_roll(emit: Emit, inputs: Sequence[Operand], attrs: Attrs) -> Sequence[Val]:
    x = only(inputs)
    if not x.type.rank:
        return (x,)
    if attrs["dims"] is None:
        flat = _rolled(emit, emit("reshape", x, shape=(x.type.numel,)), 0, attrs["shifts"][0])
        return (emit("reshape", flat, shape=x.type.shape),)
    for at, shift in zip(attrs["dims"], attrs["shifts"], strict=True):
        x = _rolled(emit, x, at, shift)
    return (x,)


def _repeats(x: TensorType, attrs: Attrs) -> tuple[Shape, tuple[int, ...]]:
    """The shape with leading axes of size 1, and how often each axis comes."""
    times = attrs["repeats"]
    if len(times) < x.rank or any(t < 0 for t in times):
        hint = "a number per axis, none negative"
        raise EsperError("E0203", f"repeats {list(times)} of {x}", hint=hint)
    return (*[ONE] * (len(times) - x.rank), *x.shape), times


def _repeat_shape(x: TensorType, attrs: Attrs) -> Shape:
    return tuple(d * t for d, t in zip(*_repeats(x, attrs), strict=True))


def _expand_repeat(emit: Emit, inputs: Sequence[Operand], attrs: Attrs) -> Sequence[Val]:
    x = only(inputs)
    shape, times = _repeats(x.type, attrs)
    apart = emit("reshape", x, shape=tuple(s for d in shape for s in (ONE, d)))
    wide = emit("expand", apart, shape=tuple(s for d, t in zip(shape, times, strict=True) for s in (t, d)))
    return (emit("reshape", wide, shape=_repeat_shape(x.type, attrs)),)


def _tiles(x: TensorType, attrs: Attrs) -> dict[str, Any]:
    return {"repeats": (*[1] * (x.rank - len(attrs["dims"])), *attrs["dims"])}


def _moved(x: TensorType, attrs: Attrs) -> tuple[int, ...]:
    """The order of the operand's axes that torch.movedim gives."""
    source = [axis(d, x.rank) for d in attrs["source"]]
    target = [axis(d, x.rank) for d in attrs["destination"]]
    if len(set(source)) != len(source) or len(set(target)) != len(target) or len(source) != len(target):
        raise EsperError("E0207", f"axes {source} to {target}", hint="as many, each once")
    rest = iter(i for i in range(x.rank) if i not in source)
    return tuple(source[target.index(i)] if i in target else next(rest) for i in range(x.rank))


# Diagonals.


def _diagonal_axes(x: TensorType, attrs: Attrs) -> tuple[int, int, Dim]:
    """Both axes and the length of the diagonal."""
    a, b = axis(attrs["dim1"], x.rank), axis(attrs["dim2"], x.rank)
    if a == b or x.rank < 2:
        raise EsperError("E0207", f"a diagonal of axes {a} and {b} of {x}", hint="two different axes")
    height, width, offset = _static(x, a), _static(x, b), attrs["offset"]
    return a, b, Dim.of(max(min(height, width - offset) if offset >= 0 else min(height + offset, width), 0))


def _diagonal_shape(x: TensorType, attrs: Attrs) -> Shape:
    a, b, length = _diagonal_axes(x, attrs)
    return (*(d for i, d in enumerate(x.shape) if i not in (a, b)), length)


def _expand_diagonal(emit: Emit, inputs: Sequence[Operand], attrs: Attrs) -> Sequence[Val]:
    """Every width + 1st element of the flattened matrix."""
    x = only(inputs)
    a, b, length = _diagonal_axes(x.type, attrs)
    rest = tuple(i for i in range(x.type.rank) if i not in (a, b))
    x = emit("permute", x, dims=(*rest, a, b))
    *lead, height, width = x.type.shape
    assert length.static is not None and height.static is not None and width.static is not None
    if not length.static:
        return (emit("full", shape=(*lead, length), value=0.0, dtype=x.type.dtype),)
    start = attrs["offset"] if attrs["offset"] >= 0 else -attrs["offset"] * width.static
    end = start + (length.static - 1) * (width.static + 1) + 1
    flat = emit("reshape", x, shape=(*lead, height * width))
    return (emit("slice", flat, dim=len(lead), start=start, end=end, step=width.static + 1),)


# Pictures.


def _resolve_factor(operands: Types, attrs: Attrs) -> dict[str, Any]:
    x = tensor(operands[0])
    if x.rank < 3 or attrs["factor"] < 1:
        raise EsperError("E0204", f"{x} by {attrs['factor']}", hint="[.., channels, height, width], from 1")
    return dict(attrs)


def _part(whole: Dim, factor: int, x: TensorType) -> Dim:
    found = divide(whole, Dim.of(factor))
    if found is None:
        raise EsperError("E0206", f"cannot prove that {factor} divides {whole} of {x}")
    return found


def _shuffled(x: TensorType, attrs: Attrs) -> Shape:
    *lead, c, h, w = x.shape
    r = attrs["factor"]
    return (*lead, _part(c, r * r, x), h * r, w * r)


def _expand_shuffle(emit: Emit, inputs: Sequence[Operand], attrs: Attrs) -> Sequence[Val]:
    x, r = only(inputs), attrs["factor"]
    *lead, c, h, w = x.type.shape
    n = len(lead)
    apart = emit("reshape", x, shape=(*lead, _part(c, r * r, x.type), r, r, h, w))
    turned = emit("permute", apart, dims=(*range(n), n, n + 3, n + 1, n + 4, n + 2))
    return (emit("reshape", turned, shape=_shuffled(x.type, attrs)),)


def _unshuffled(x: TensorType, attrs: Attrs) -> Shape:
    *lead, c, h, w = x.shape
    r = attrs["factor"]
    return (*lead, c * (r * r), _part(h, r, x), _part(w, r, x))


def _expand_unshuffle(emit: Emit, inputs: Sequence[Operand], attrs: Attrs) -> Sequence[Val]:
    x, r = only(inputs), attrs["factor"]
    *lead, c, h, w = x.type.shape
    n = len(lead)
    apart = emit("reshape", x, shape=(*lead, c, _part(h, r, x.type), r, _part(w, r, x.type), r))
    turned = emit("permute", apart, dims=(*range(n), n, n + 2, n + 4, n + 1, n + 3))
    return (emit("reshape", turned, shape=_unshuffled(x.type, attrs)),)


def _unshuffle_reference(inputs: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
    """torch leaves the shape of an empty tensor as it is; here it changes as any other's."""
    x, r = inputs[0], attrs["factor"]
    if x.numel():
        return (functional.pixel_unshuffle(x, r),)
    *lead, c, h, w = x.shape
    return (x.reshape(*lead, c * r * r, h // r, w // r),)


# Borders that repeat the operand.


def _border_shape(x: TensorType, attrs: Attrs) -> Shape:
    before, after, mode = attrs["before"], attrs["after"], attrs["mode"]
    if not len(before) == len(after) == x.rank or any(n < 0 for n in (*before, *after)):
        raise EsperError("E0203", f"borders {list(before)} of {x}", hint="a number per axis, none negative")
    for at, (b, a) in enumerate(zip(before, after, strict=True)):
        most = {"reflect": -1, "circular": 0}.get(mode)
        size = _static(x, at) if b or a else 1
        if not size or (most is not None and max(b, a) > size + most and (b or a)):
            raise EsperError("E0203", f"a {mode} border of {max(b, a)} along axis {at} of {x}")
    return tuple(n + (b + a) for n, b, a in zip(x.shape, before, after, strict=True))


def _sides(emit: Emit, x: Val, at: int, before: int, after: int, mode: str) -> list[Val]:
    """What stands before, the operand, what stands behind."""
    size = x.type.shape[at]
    if mode == "replicate":
        edges = emit("slice", x, dim=at, end=1), emit("slice", x, dim=at, start=size - 1, end=size)
        wide = [(*x.type.shape[:at], Dim.of(n), *x.type.shape[at + 1 :]) for n in (before, after)]
        parts = [emit("expand", e, shape=s) for e, s in zip(edges, wide, strict=True)]
    elif mode == "circular":
        parts = [emit("slice", x, dim=at, start=size - before, end=size), emit("slice", x, dim=at, end=after)]
    else:
        left = emit("slice", x, dim=at, start=1, end=before + 1)
        right = emit("slice", x, dim=at, start=size - (after + 1), end=size - 1)
        parts = [emit("reverse", left, dim=at), emit("reverse", right, dim=at)]
    return [*([parts[0]] if before else []), x, *([parts[1]] if after else [])]


def _expand_border(emit: Emit, inputs: Sequence[Operand], attrs: Attrs) -> Sequence[Val]:
    x = only(inputs)
    for at, (before, after) in enumerate(zip(attrs["before"], attrs["after"], strict=True)):
        if before or after:
            x = emit("cat", *_sides(emit, x, at, before, after, attrs["mode"]), dim=at)
    return (x,)


def _border_reference(inputs: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
    """By positions, which torch.nn.functional.pad takes for the last axes only."""
    x = inputs[0]
    for at, (before, after) in enumerate(zip(attrs["before"], attrs["after"], strict=True)):
        size = x.shape[at]
        if not before and not after:
            continue
        index = torch.arange(-before, size + after)
        if attrs["mode"] == "replicate":
            index = index.clamp(0, size - 1)
        elif attrs["mode"] == "circular":
            index = index % size
        else:
            index = (size - 1) - ((size - 1) - index.abs()).abs() if size > 1 else index * 0
        x = x.index_select(at, index)
    return (x,)


# Gates and numbers.


def _glu_shape(x: TensorType, attrs: Attrs) -> Shape:
    accept([x], "float")
    at = attrs["dim"]
    if not x.rank or _static(x, at) % 2:
        raise EsperError("E0204", f"{x} has no halves along axis {at}", hint="an even number")
    return (*x.shape[:at], _part(x.shape[at], 2, x), *x.shape[at + 1 :])


def _expand_glu(emit: Emit, inputs: Sequence[Operand], attrs: Attrs) -> Sequence[Val]:
    x, at = only(inputs), attrs["dim"]
    half = _part(x.type.shape[at], 2, x.type)
    a, b = emit("slice", x, dim=at, end=half), emit("slice", x, dim=at, start=half, end=half * 2)
    return (emit("mul", a, emit("sigmoid", b)),)


def _resolve_dim(operands: Types, attrs: Attrs) -> dict[str, Any]:
    return {**attrs, "dim": axis(attrs["dim"], tensor(operands[0]).rank)}


def _like(name: str, value: float) -> OpDef:
    def infer(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
        x = tensor(operands[0])
        return (TensorType(attrs["dtype"] or x.dtype, x.shape),)

    def expand(emit: Emit, inputs: Sequence[Operand], attrs: Attrs) -> Sequence[Val]:
        x = only(inputs).type
        dtype = attrs["dtype"] or x.dtype
        number = value if dtype.is_floating else bool(value) if dtype is DType.bool else int(value)
        return (emit("full", shape=x.shape, value=number, dtype=dtype),)

    def reference(inputs: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
        dtype = inputs[0].dtype if attrs["dtype"] is None else torch_dtype(attrs["dtype"])
        return (torch.full_like(inputs[0], value, dtype=dtype),)

    return OpDef(
        name=name, infer=infer, reference=reference, lowering=Composite(expand), arity=(1, 1),
        vjp=NotDifferentiable("the result does not depend on the operand's values"), cost=_no_cost,
        samples=tuple(Sample((TensorType.of(d, (3, 4)),), a) for d, a in (
            ("float32", {}), ("bfloat16", {}), ("float32", {"dtype": "int64"}), ("bool", {}))),
        params=(Attr("dtype", "dtype", None, doc="null: the operand's"),), doc=f"torch.{name}",
    )  # fmt: skip


def _infer_eye(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    given = [attrs[k] for k in ("rows", "columns") if attrs[k] is not None]
    if any(isinstance(v, (bool, float)) or (isinstance(v, int) and not 0 <= v < 2**31) for v in given):
        raise EsperError("E0203", f"eye of {attrs['rows']}, {attrs['columns']}", hint="sizes")
    rows = Dim.of(attrs["rows"])
    columns = rows if attrs["columns"] is None else Dim.of(attrs["columns"])
    return (TensorType(attrs["dtype"], (rows, columns)),)


def _expand_eye(emit: Emit, inputs: Sequence[Operand], attrs: Attrs) -> Sequence[Val]:
    rows, columns = _infer_eye((), attrs)[0].shape
    down = emit("reshape", emit("arange", end=rows), shape=(rows, ONE))
    return (emit("cast", emit("eq", down, emit("arange", end=columns)), dtype=attrs["dtype"]),)


EYE = OpDef(
    name="eye", infer=_infer_eye, vjp=NotDifferentiable("there is no operand"), arity=(0, 0), cost=_no_cost,
    reference=lambda i, a: (torch.eye(a["rows"], a["rows"] if a["columns"] is None else a["columns"],
                                      dtype=torch_dtype(a["dtype"])),),
    lowering=Composite(_expand_eye),
    samples=(Sample((), {"rows": 3}), Sample((), {"rows": 2, "columns": 4, "dtype": "bfloat16"})),
    params=(Attr("rows", "scalar"), Attr("columns", "scalar", None, doc="null: as many as rows"),
            Attr("dtype", "dtype", "float32")),
    doc="torch.eye",
)  # fmt: skip
PAIR = (Attr("before", "ints", doc="per axis"), Attr("after", "ints", doc="per axis"))

OPS = (
    _record("roll", _roll_shape, _expand_roll, lambda i, a: (torch.roll(i[0], a["shifts"], a["dims"]),),
            (Attr("shifts", "ints"), Attr("dims", "ints", None, doc="null: as one axis")),
            [((4, 6), {"shifts": (2,), "dims": (1,)}), ((4, 6), {"shifts": (1, -2), "dims": (0, -1)}),
             ((4, 6), {"shifts": (5,)}), ((4, 6), {"shifts": (6,), "dims": (1,)})], "torch.roll",
            _resolve_roll),
    _record("repeat", _repeat_shape, _expand_repeat, lambda i, a: (i[0].repeat(a["repeats"]),),
            (Attr("repeats", "ints"),),
            [((4, 3), {"repeats": (2, 3)}), ((3,), {"repeats": (2, 1, 2)}), ((), {"repeats": (3,)}),
             ((2, 3), {"repeats": (0, 1)})], "torch.Tensor.repeat"),
    _record("tile", lambda x, a: _repeat_shape(x, _tiles(x, a)),
            lambda e, i, a: _expand_repeat(e, i, _tiles(val(i[0]).type, a)),
            lambda i, a: (torch.tile(i[0], a["dims"]),), (Attr("dims", "ints"),),
            [((4, 3), {"dims": (2,)}), ((3,), {"dims": (2, 2)}), ((2, 3), {"dims": (2, 1)})], "torch.tile"),
    _record("movedim", lambda x, a: tuple(x.shape[i] for i in _moved(x, a)),
            lambda e, i, a: (e("permute", i[0], dims=_moved(val(i[0]).type, a)),),
            lambda i, a: (torch.movedim(i[0], a["source"], a["destination"]),),
            (Attr("source", "ints"), Attr("destination", "ints")),
            [((2, 3, 4), {"source": (0,), "destination": (-1,)}),
             ((2, 3, 4), {"source": (0, 2), "destination": (1, 0)})], "torch.movedim"),
    _record("diagonal", _diagonal_shape, _expand_diagonal,
            lambda i, a: (torch.diagonal(i[0], a["offset"], a["dim1"], a["dim2"]),),
            (Attr("offset", "int", 0), Attr("dim1", "int", 0), Attr("dim2", "int", 1)),
            [((4, 4), {}), ((4, 6), {"offset": 1}), ((4, 3), {"offset": -2}),
             ((2, 3, 4), {"dim1": 1, "dim2": 2}), ((2, 3, 4), {"dim1": -1, "dim2": 0}),
             ((3, 3), {"offset": 5})], "torch.diagonal"),
    _record("pixel_shuffle", _shuffled, _expand_shuffle,
            lambda i, a: (functional.pixel_shuffle(i[0], a["factor"]),), (Attr("factor", "int"),),
            [((2, 8, 3, 2), {"factor": 2}), ((9, 2, 2), {"factor": 3})], "torch.nn.functional.pixel_shuffle",
            _resolve_factor),
    _record("pixel_unshuffle", _unshuffled, _expand_unshuffle,
            _unshuffle_reference, (Attr("factor", "int"),),
            [((2, 3, 4, 6), {"factor": 2}), ((1, 3, 6), {"factor": 3})],
            "torch.nn.functional.pixel_unshuffle", _resolve_factor),
    _record("pad_border", _border_shape, _expand_border, _border_reference,
            (Attr("mode", "str", choices=("reflect", "replicate", "circular")), *PAIR),
            [((2, 5), {"mode": mode, "before": b, "after": a}) for mode in ("reflect", "replicate",
                "circular")
             for b, a in (((0, 2), (0, 1)), ((1, 0), (1, 3)))],
            "torch.nn.functional.pad with a border taken from the operand, per axis"),
    _record("glu", _glu_shape, _expand_glu, lambda i, a: (functional.glu(i[0], a["dim"]),),
            (Attr("dim", "int", -1),), [((4, 6), {}), ((4, 6), {"dim": 0}), ((2, 4, 3), {"dim": 1})],
            "torch.nn.functional.glu", _resolve_dim),
    _like("zeros_like", 0.0),
    _like("ones_like", 1.0),
    EYE,
)  # fmt: skip
