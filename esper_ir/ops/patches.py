"""Windows of pictures as columns, and columns added up to pictures: slices, joins and sums."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from esper_ir.diagnostics import EsperError
from esper_ir.lazy import functional
from esper_ir.opdef import Attr, Attrs, ByExpansion, Composite, Emit, Number, OpDef, Operand, Sample, Val
from esper_ir.ops.gradients import to, up, val
from esper_ir.ops.rules import accept, tensor
from esper_ir.ops.volume import tuned
from esper_ir.types import Dim, TensorType

Types = Sequence[TensorType | Number]
WINDOW = (
    Attr("kernel", "ints"), Attr("dilation", "ints", (1, 1)), Attr("padding", "ints", (0, 0)),
    Attr("stride", "ints", (1, 1)),
)  # fmt: skip
JOINED = 64
"""Most operands of one join."""


def _resolve(operands: Types, attrs: Attrs) -> dict[str, Any]:
    out = dict(attrs)
    for name, least in (("kernel", 1), ("dilation", 1), ("padding", 0), ("stride", 1)):
        out[name] = tuned(attrs[name], name, least, 2)
    if "output_size" in attrs:
        out["output_size"] = tuned(attrs["output_size"], "output_size", 1, 2)
    return out


def _counts(sizes: Sequence[int], attrs: Attrs) -> tuple[int, int]:
    """Windows along both axes."""
    found = []
    for at, size in enumerate(sizes):
        reach = attrs["dilation"][at] * (attrs["kernel"][at] - 1) + 1
        found.append((size + 2 * attrs["padding"][at] - reach) // attrs["stride"][at] + 1)
    if min(found) < 1:
        raise EsperError("E0204", f"the window {attrs['kernel']} does not fit into {list(sizes)}")
    return found[0], found[1]


def _sizes(x: TensorType) -> tuple[int, int]:
    height, width = x.shape[2].static, x.shape[3].static
    if height is None or width is None:
        raise EsperError("E0206", f"windows of {x} of symbolic size", hint="sizes of pictures are static")
    return height, width


def _infer_unfold(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x = tensor(operands[0])
    if x.rank != 4 or any(d.static == 0 for d in x.shape[1:]):
        raise EsperError("E0204", f"{x} is no batch of pictures", hint="[batch, channels, height, width]")
    rows, columns = _counts(_sizes(x), attrs)
    taps = attrs["kernel"][0] * attrs["kernel"][1]
    return (TensorType(x.dtype, (x.shape[0], x.shape[1] * taps, Dim.of(rows * columns))),)


def _taps(attrs: Attrs) -> Iterator[tuple[int, int]]:
    """Where in a window each element stands, in order."""
    for i in range(attrs["kernel"][0]):
        for j in range(attrs["kernel"][1]):
            yield i * attrs["dilation"][0], j * attrs["dilation"][1]


def _joined(emit: Emit, parts: Sequence[Val], dim: int) -> Val:
    while len(parts) > 1:
        groups = [parts[i : i + JOINED] for i in range(0, len(parts), JOINED)]
        parts = [g[0] if len(g) == 1 else emit("cat", *g, dim=dim) for g in groups]
    return parts[0]


def _expand_unfold(emit: Emit, inputs: Sequence[Operand], attrs: Attrs) -> Sequence[Val]:
    x = val(inputs[0])
    n, c = x.type.shape[:2]
    counts = _counts(_sizes(x.type), attrs)
    (up_, left), (down, across) = attrs["padding"], attrs["stride"]
    if up_ or left:
        x = emit("pad", x, before=(0, 0, up_, left), after=(0, 0, up_, left))
    parts = []
    for i, j in _taps(attrs):
        row = emit("slice", x, dim=2, start=i, end=i + (counts[0] - 1) * down + 1, step=down)
        cut = emit("slice", row, dim=3, start=j, end=j + (counts[1] - 1) * across + 1, step=across)
        parts.append(emit("reshape", cut, shape=(n, c, 1, counts[0] * counts[1])))
    whole = _joined(emit, parts, 2)
    return (emit("reshape", whole, shape=(n, c * len(parts), counts[0] * counts[1])),)


def _infer_fold(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x = tensor(operands[0])
    accept([x], "float")
    taps = attrs["kernel"][0] * attrs["kernel"][1]
    if x.rank != 3 or not x.shape[1].static or x.shape[1].static % taps:
        raise EsperError(
            "E0204", f"{x} are no columns of {taps} elements", hint="[batch, channels taps, windows]"
        )
    rows, columns = _counts(attrs["output_size"], attrs)
    if x.shape[2] != Dim.of(rows * columns):
        raise EsperError("E0204", f"{x} has not {rows * columns} windows", hint="as many as unfold gives")
    height, width = attrs["output_size"]
    shape = (x.shape[0], Dim.of(x.shape[1].static // taps), Dim.of(height), Dim.of(width))
    return (TensorType(x.dtype, shape),)


def _spaced(emit: Emit, x: Val, axis: int, step: int, start: int, total: int) -> Val:
    """Elements `step` apart from `start` on along an axis of `total`, zeros between."""
    shape, rank = x.type.shape, x.type.rank
    count = shape[axis].static
    assert count is not None
    if step > 1:
        apart = emit("reshape", x, shape=(*shape[: axis + 1], 1, *shape[axis + 1 :]))
        after = tuple(step - 1 if i == axis + 1 else 0 for i in range(rank + 1))
        apart = emit("pad", apart, before=(0,) * (rank + 1), after=after)
        x = emit("reshape", apart, shape=(*shape[:axis], count * step, *shape[axis + 1 :]))
        x = emit("slice", x, dim=axis, end=(count - 1) * step + 1)
    rest = total - start - ((count - 1) * step + 1)
    before = tuple(start if i == axis else 0 for i in range(rank))
    return emit("pad", x, before=before, after=tuple(rest if i == axis else 0 for i in range(rank)))


def _expand_fold(emit: Emit, inputs: Sequence[Operand], attrs: Attrs) -> Sequence[Val]:
    """Every window at its place, added up in the compute type, the padding cut off."""
    x = val(inputs[0])
    _, c, height, width = _infer_fold((x.type,), attrs)[0].shape
    n, counts = x.type.shape[0], _counts(attrs["output_size"], attrs)
    (up_, left), (down, across) = attrs["padding"], attrs["stride"]
    tall, wide = attrs["output_size"][0] + 2 * up_, attrs["output_size"][1] + 2 * left
    columns = emit("reshape", up(emit, x), shape=(n, c, attrs["kernel"][0] * attrs["kernel"][1], *counts))
    total: Val | None = None
    for at, (i, j) in enumerate(_taps(attrs)):
        part = emit("reshape", emit("slice", columns, dim=2, start=at, end=at + 1), shape=(n, c, *counts))
        part = _spaced(emit, _spaced(emit, part, 2, down, i, tall), 3, across, j, wide)
        total = part if total is None else emit("add", total, part)
    assert total is not None
    total = emit("slice", total, dim=2, start=up_, end=height + up_)
    return (to(emit, emit("slice", total, dim=3, start=left, end=width + left), x.type.dtype),)


def _reference(name: str) -> Any:
    def reference(inputs: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
        numbers = [attrs[k] for k in ("kernel", "dilation", "padding", "stride")]
        if name == "unfold":
            return (functional.unfold(inputs[0], *numbers),)
        return (functional.fold(inputs[0], attrs["output_size"], *numbers),)

    return reference


CASES: tuple[dict[str, Any], ...] = (
    {"kernel": (2, 3)}, {"kernel": (3,), "padding": (1, 2), "stride": (2,)},
    {"kernel": (2, 2), "dilation": (2, 1), "stride": (1, 3)},
)  # fmt: skip
PICTURE = (2, 3, 5, 7)


def _samples(fold: bool) -> tuple[Sample, ...]:
    out = []
    for attrs in CASES:
        full = _resolve((), {**{a.name: a.default for a in WINDOW}, **attrs})
        rows, columns = _counts(PICTURE[2:], full)
        taps = full["kernel"][0] * full["kernel"][1]
        shape = (PICTURE[0], PICTURE[1] * taps, rows * columns) if fold else PICTURE
        more = {"output_size": PICTURE[2:]} if fold else {}
        kinds = ("float32", "bfloat16", "float64") if attrs is CASES[0] else ("float32",)
        out += [Sample((TensorType.of(d, shape),), {**attrs, **more}) for d in kinds]
    return tuple(out)


def _cost(operands: Types, outputs: Sequence[TensorType], attrs: Attrs) -> Dim:
    return tensor(operands[0]).numel


OPS = (
    OpDef(
        name="unfold", infer=_infer_unfold, reference=_reference("unfold"), vjp=ByExpansion(),
        lowering=Composite(_expand_unfold), samples=_samples(False), arity=(1, 1), params=WINDOW,
        resolve=_resolve, cost=lambda i, o, a: Dim(), doc="torch.nn.functional.unfold: windows as columns",
    ),
    OpDef(
        name="fold", infer=_infer_fold, reference=_reference("fold"), vjp=ByExpansion(),
        lowering=Composite(_expand_fold), samples=_samples(True), arity=(1, 1),
        params=(Attr("output_size", "ints"), *WINDOW), resolve=_resolve, cost=_cost,
        doc="torch.nn.functional.fold: columns added up to a picture",
    ),
)  # fmt: skip
