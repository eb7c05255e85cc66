"""Pictures read at positions that are values themselves: torch.nn.functional.grid_sample, by primitives."""

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
    Emit,
    Number,
    OpDef,
    Operand,
    Sample,
    Tolerance,
    Val,
)
from esper_ir.ops.gradients import to, up, val
from esper_ir.ops.rules import ONE, accept, same, tensor
from esper_ir.types import Dim, DType, TensorType

Types = Sequence[TensorType | Number]


def _infer(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    """[batch, channels, height, width] at [batch, rows, columns, 2]."""
    x, grid = tensor(operands[0]), tensor(operands[1], 1)
    accept([x, grid], "float")
    if x.rank != 4 or grid.rank != 4 or grid.shape[3].static != 2 or x.dtype is not grid.dtype:
        hint = "[batch, channels, height, width] and [batch, rows, columns, 2] of one dtype"
        raise EsperError("E0204", f"{x} cannot be read at {grid}", hint=hint)
    same(x.shape[0], grid.shape[0], "one grid per picture", x.shape, grid.shape)
    if any(d.static is None or d.static < 1 for d in x.shape[2:]):
        raise EsperError("E0206", f"{x} has a size that is not a number", hint="pictures have static sizes")
    return (TensorType(x.dtype, (*x.shape[:2], *grid.shape[1:3])),)


def _reflected(emit: Emit, at: Val, low: float, span: float) -> Val:
    """Turned back at both ends, as often as needed."""
    if span <= 0.0:
        return emit("mul", at, 0.0)
    away = emit("abs", emit("sub", at, low))
    rest = emit("fmod", away, span)
    even = emit("eq", emit("fmod", emit("floor", emit("div", away, span)), 2.0), 0.0)
    return emit("add", emit("where", even, rest, emit("sub", span, rest)), low)


def _place(emit: Emit, grid: Val, axis: int, size: int, attrs: Attrs) -> Val:
    """Positions in elements, of a grid from -1 to 1: [batch, rows columns]."""
    n, rows, columns, _ = grid.type.shape
    flat = emit("reshape", emit("slice", grid, dim=3, start=axis, end=axis + 1), shape=(n, rows * columns))
    corners, wide = attrs["align_corners"], emit("add", flat, 1.0)
    if corners:
        at = emit("mul", wide, (size - 1) / 2)
    else:
        at = emit("div", emit("sub", emit("mul", wide, float(size)), 1.0), 2.0)
    if attrs["padding_mode"] == "zeros":
        return at
    if attrs["padding_mode"] == "reflection":
        at = _reflected(emit, at, 0.0 if corners else -0.5, float(size - 1 if corners else size))
    return emit("hardtanh", at, min_val=0.0, max_val=float(size - 1))  # a clamp: no gradient at the borders


def _read(emit: Emit, table: Val, x: Val, y: Val, size: tuple[int, int]) -> Val:
    """Elements at whole positions, 0 outside: [batch, channels, positions]. `table`: pictures as rows."""
    height, width = size
    bounds = [emit("ge", x, 0.0), emit("le", x, float(width - 1)), emit("ge", y, 0.0),
              emit("le", y, float(height - 1))]  # fmt: skip
    inside = bounds[0]
    for bound in bounds[1:]:
        inside = emit("logical_and", inside, bound)
    column, row = (emit("cast", emit("where", inside, v, 0.0), dtype=DType.int64) for v in (x, y))
    (n, count), channels = x.type.shape, table.type.shape[1]
    flat = emit("reshape", emit("add", emit("mul", row, width), column), shape=(n, ONE, count))
    found = emit("gather", table, emit("expand", flat, shape=(n, channels, count)), dim=2)
    return emit("where", emit("reshape", inside, shape=(n, ONE, count)), found, 0.0)


def _expand(emit: Emit, inputs: Sequence[Operand], attrs: Attrs) -> Sequence[Val]:
    picture, grid = (up(emit, val(v)) for v in inputs)
    n, channels, *sizes = picture.type.shape
    height, width = (d.static or 0 for d in sizes)
    table = emit("reshape", picture, shape=(n, channels, height * width))
    x, y = (_place(emit, grid, i, s, attrs) for i, s in ((0, width), (1, height)))
    rows, columns = grid.type.shape[1:3]
    if attrs["mode"] == "nearest":
        made = _read(emit, table, emit("round", x), emit("round", y), (height, width))
    else:
        made = _between(emit, table, x, y, (height, width))
    made = emit("reshape", made, shape=(n, channels, rows, columns))
    return (to(emit, made, val(inputs[0]).type.dtype),)


def _between(emit: Emit, table: Val, x: Val, y: Val, size: tuple[int, int]) -> Val:
    """Four neighbours by the areas opposite to them."""
    left, top = emit("floor", x), emit("floor", y)
    across, down = emit("sub", x, left), emit("sub", y, top)
    n, count = x.type.shape
    total: Val | None = None
    for i, j in ((0, 0), (0, 1), (1, 0), (1, 1)):
        found = _read(emit, table, emit("add", left, float(j)), emit("add", top, float(i)), size)
        share = emit("mul", across if j else emit("sub", 1.0, across), down if i else emit("sub", 1.0, down))
        part = emit("mul", found, emit("reshape", share, shape=(n, ONE, count)))
        total = part if total is None else emit("add", total, part)
    assert total is not None
    return total


def _reference(inputs: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
    x, grid = (t.float() if t.dtype.itemsize == 2 else t for t in inputs)
    made = functional.grid_sample(x, grid, attrs["mode"], attrs["padding_mode"], attrs["align_corners"])
    return (made.to(inputs[0].dtype),)


def _cost(operands: Types, outputs: Sequence[TensorType], attrs: Attrs) -> Dim:
    return outputs[0].numel * 12


def _samples() -> tuple[Sample, ...]:
    rows = (
        ("float32", {}), ("float32", {"padding_mode": "border", "align_corners": True}),
        ("float32", {"padding_mode": "reflection"}), ("float32", {"mode": "nearest"}),
        ("float64", {"padding_mode": "reflection", "align_corners": True}), ("bfloat16", {}),
    )  # fmt: skip
    return tuple(
        Sample((TensorType.of(d, (2, 3, 4, 5)), TensorType.of(d, (2, 3, 2, 2))), a, -1.4, 1.4)
        for d, a in rows
    )


OPS = (
    OpDef(
        name="grid_sample", infer=_infer, reference=_reference, vjp=ByExpansion(),
        lowering=Composite(_expand), samples=_samples(), arity=(2, 2), cost=_cost,
        params=(
            Attr("mode", "str", "bilinear", ("bilinear", "nearest")),
            Attr("padding_mode", "str", "zeros", ("zeros", "border", "reflection"), "what lies outside"),
            Attr("align_corners", "bool", False, doc="-1 and 1 are centres of elements, not borders"),
        ),
        tolerance=Tolerance(4.0, "a position keeps the rounding of its coordinate times the size"),
        doc="torch.nn.functional.grid_sample of pictures; its grid is (x, y) from -1 to 1",
    ),
)  # fmt: skip
