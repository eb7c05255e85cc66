"""Products under other names: stacks of matrices, vectors, sums with a product, einsum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from esper_ir.diagnostics import EsperError
from esper_ir.lazy import torch
from esper_ir.opdef import Attr, Attrs, ByExpansion, Composite, Emit, Number, OpDef, Operand, Sample, Val
from esper_ir.ops.contraction import PRECISION
from esper_ir.ops.gradients import to, up, val
from esper_ir.ops.rules import ONE, Shape, accept, broadcast, conflict, numel, same, tensor
from esper_ir.types import Dim, TensorType

Types = Sequence[TensorType | Number]


def _alike(operands: Types) -> list[TensorType]:
    types = [tensor(o, i) for i, o in enumerate(operands)]
    accept(types, "float")
    if len({t.dtype for t in types}) > 1:
        found = " and ".join(str(t) for t in types)
        raise EsperError("E0205", f"operands {found} differ in dtype", hint="add a cast")
    return types


def _ranked(types: Sequence[TensorType], ranks: Sequence[int], name: str) -> None:
    if [t.rank for t in types] != list(ranks):
        raise conflict(f"{name} takes operands of rank {', '.join(map(str, ranks))}", *types)


def _inner(a: TensorType, b: TensorType, i: int, j: int) -> None:
    same(a.shape[i], b.shape[j], "the summed sizes are equal", a.shape, b.shape)


# Without a sum: bmm, mv, dot, outer.


def _infer_bmm(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    a, b = _alike(operands)
    _ranked((a, b), (3, 3), "bmm")
    same(a.shape[0], b.shape[0], "as many matrices on both sides", a.shape, b.shape)
    _inner(a, b, 2, 1)
    return (TensorType(a.dtype, (*a.shape[:2], b.shape[2])),)


def _infer_mv(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    a, b = _alike(operands)
    _ranked((a, b), (2, 1), "mv")
    _inner(a, b, 1, 0)
    return (TensorType(a.dtype, a.shape[:1]),)


def _infer_dot(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    a, b = _alike(operands)
    _ranked((a, b), (1, 1), "dot")
    _inner(a, b, 0, 0)
    return (TensorType(a.dtype, ()),)


def _infer_outer(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    a, b = _alike(operands)
    _ranked((a, b), (1, 1), "outer")
    return (TensorType(a.dtype, (a.shape[0], b.shape[0])),)


def _expand_bmm(emit: Emit, inputs: Sequence[Operand], attrs: Attrs) -> Sequence[Val]:
    return (emit("matmul", *inputs, precision=attrs["precision"]),)


def _matrix(emit: Emit, x: Val, column: bool) -> Val:
    size = x.type.shape[0]
    return emit("reshape", x, shape=(size, ONE) if column else (ONE, size))


def _expand_mv(emit: Emit, inputs: Sequence[Operand], attrs: Attrs) -> Sequence[Val]:
    a, b = val(inputs[0]), _matrix(emit, val(inputs[1]), True)
    return (emit("reshape", emit("matmul", a, b, precision=attrs["precision"]), shape=a.type.shape[:1]),)


def _expand_dot(emit: Emit, inputs: Sequence[Operand], attrs: Attrs) -> Sequence[Val]:
    a, b = (up(emit, val(o)) for o in inputs)
    return (to(emit, emit("sum", emit("mul", a, b)), val(inputs[0]).type.dtype),)


def _expand_outer(emit: Emit, inputs: Sequence[Operand], attrs: Attrs) -> Sequence[Val]:
    return (emit("mul", _matrix(emit, val(inputs[0]), True), inputs[1]),)


# With a sum: beta * x + alpha * (a @ b).


def _infer_added(rank: int) -> Any:
    def infer(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
        x, a, b = _alike(operands)
        made = (_infer_bmm if rank == 3 else _infer_mm)((a, b), attrs)[0]
        if broadcast([x.shape, made.shape]) != made.shape:
            raise conflict("the first operand broadcasts to the product", x, made)
        return (made,)

    return infer


def _infer_mm(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    a, b = _alike(operands)
    _ranked((a, b), (2, 2), "mm")
    _inner(a, b, 1, 0)
    return (TensorType(a.dtype, (a.shape[0], b.shape[1])),)


def _expand_added(emit: Emit, inputs: Sequence[Operand], attrs: Attrs) -> Sequence[Val]:
    """Float32 between the product and the sum; torch ignores the first operand, even NaN, where beta is 0."""
    x, a, b = (val(o) for o in inputs)
    product = emit("matmul", a, b, precision=attrs["precision"])
    y = up(emit, product)
    if attrs["alpha"] != 1:
        y = emit("mul", y, attrs["alpha"])
    if attrs["beta"] != 0:
        wide = up(emit, x)
        y = emit("add", wide if attrs["beta"] == 1 else emit("mul", wide, attrs["beta"]), y)
    return (to(emit, y, product.type.dtype),)


# einsum.


def terms(equation: str, ranks: Sequence[int]) -> tuple[list[str], str]:
    """Labels per operand and of the result; "..." becomes capital letters that the equation lacks. E0203
    when the equation does not fit.
    """
    text = equation.replace(" ", "")
    left, arrow, right = text.partition("->")
    parts = left.split(",")
    allowed = all(c.isalpha() and c.isascii() or c in ".,->" for c in text)
    if not allowed or len(parts) != len(ranks) or any(p.count(".") not in (0, 3) for p in [*parts, right]):
        raise EsperError("E0203", f"equation {equation[:80]!r} of {len(ranks)} operands")
    spare = [c for c in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" if c not in text]
    dots = [r - len(p.replace("...", "")) for p, r in zip(parts, ranks, strict=True)]
    if any(d < 0 or (d and "..." not in p) for p, d in zip(parts, dots, strict=True)):
        raise EsperError("E0203", f"equation {equation[:80]!r} of operands of ranks {list(ranks)}")
    wide = spare[: max(dots, default=0)]
    out = [p.replace("...", "".join(wide[len(wide) - d :])) for p, d in zip(parts, dots, strict=True)]
    if not arrow:
        letters = sorted(c for c in set("".join(out)) if "".join(out).count(c) == 1 and c not in wide)
        return out, "".join(wide) + "".join(letters)
    result = right.replace("...", "".join(wide))
    if len(set(result)) != len(result) or not set(result) <= set("".join(out)):
        raise EsperError("E0203", f"the result {right!r} of equation {equation[:80]!r}")
    return out, result


def _sizes(labels: Sequence[str], types: Sequence[TensorType]) -> dict[str, Dim]:
    sizes: dict[str, Dim] = {}
    for part, kind in zip(labels, types, strict=True):
        for label, size in zip(part, kind.shape, strict=True):
            known = sizes.get(label, ONE)
            if known != ONE and size != ONE:
                same(known, size, f"every {label!r} has one size", kind.shape)
            sizes[label] = size if known == ONE else known
    return sizes


def _infer_einsum(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    types = _alike(operands)
    labels, result = terms(attrs["equation"], [t.rank for t in types])
    for part, kind in zip(labels, types, strict=True):
        _repeated(part, kind)
    sizes = _sizes(labels, types)
    return (TensorType(types[0].dtype, tuple(sizes[c] for c in result)),)


def _repeated(part: str, kind: TensorType) -> None:
    for label in set(part):
        found = [kind.shape[i] for i, c in enumerate(part) if c == label]
        for other in found[1:]:
            same(found[0], other, f"a repeated {label!r} is a diagonal", kind.shape)
            if other.static is None:
                raise EsperError("E0206", f"the diagonal {part!r} of {kind} is symbolic")


def _undoubled(emit: Emit, x: Val, part: str) -> tuple[Val, str]:
    """Repeated labels as diagonals."""
    while len(set(part)) != len(part):
        label = next(c for c in part if part.count(c) > 1)
        a, b = [i for i, c in enumerate(part) if c == label][:2]
        x = emit("diagonal", x, dim1=a, dim2=b)
        part = "".join(c for i, c in enumerate(part) if i not in (a, b)) + label
    return x, part


def _summed(emit: Emit, x: Val, part: str, kept: set[str]) -> tuple[Val, str]:
    """Without the labels that nobody else has."""
    dims = tuple(i for i, c in enumerate(part) if c not in kept)
    return (emit("sum", x, dims=dims) if dims else x), "".join(c for c in part if c in kept)


def _arranged(emit: Emit, x: Val, part: str, order: str) -> Val:
    dims = tuple(part.index(c) for c in order)
    return x if dims == tuple(range(len(dims))) else emit("permute", x, dims=dims)


def _product(emit: Emit, a: tuple[Val, str], b: tuple[Val, str], kept: set[str], precision: str
             ) -> tuple[Val, str]:  # fmt: skip
    """One product of stacks: shared and kept, own of the left, own of the right; the rest is summed."""
    (x, xs), (y, ys) = _summed(emit, *a, kept | set(b[1])), _summed(emit, *b, kept | set(a[1]))
    batch = "".join(c for c in xs if c in ys and c in kept)
    inner = "".join(c for c in xs if c in ys and c not in kept)
    left, right = "".join(c for c in xs if c not in ys), "".join(c for c in ys if c not in xs)
    x, y = _arranged(emit, x, xs, batch + left + inner), _arranged(emit, y, ys, batch + inner + right)
    lead = broadcast([x.type.shape[: len(batch)], y.type.shape[: len(batch)]]) if batch else ()
    rows, columns = x.type.shape[len(batch) : len(batch + left)], y.type.shape[len(batch + inner) :]
    sizes = [x.type.shape[len(batch + left) :], y.type.shape[len(batch) : len(batch + inner)]]
    x, y = _evened(emit, x, sizes[1], True), _evened(emit, y, sizes[0], False, len(batch))
    depth = numel(x.type.shape[len(batch + left) :])
    x = emit("reshape", x, shape=(*x.type.shape[: len(batch)], numel(rows), depth))
    y = emit("reshape", y, shape=(*y.type.shape[: len(batch)], depth, numel(columns)))
    made = emit("matmul", x, y, precision=precision)
    return emit("reshape", made, shape=(*lead, *rows, *columns)), batch + left + right


def _evened(emit: Emit, x: Val, other: Shape, end: bool, start: int = 0) -> Val:
    """Summed axes of size 1 as long as the other side's."""
    first = x.type.rank - len(other) if end else start
    own = x.type.shape[first : first + len(other)]
    shape = tuple(b if a == ONE else a for a, b in zip(own, other, strict=True))
    if shape == own:
        return x
    return emit("expand", x, shape=(*x.type.shape[:first], *shape, *x.type.shape[first + len(other) :]))


def _expand_einsum(emit: Emit, inputs: Sequence[Operand], attrs: Attrs) -> Sequence[Val]:
    """From left to right, a matrix product for each pair."""
    values = [val(o) for o in inputs]
    labels, result = terms(attrs["equation"], [v.type.rank for v in values])
    sizes = _sizes(labels, [v.type for v in values])
    pairs = [_undoubled(emit, v, part) for v, part in zip(values, labels, strict=True)]
    at = pairs[0]
    for i, other in enumerate(pairs[1:], 1):
        later = set(result).union(*(set(p) for _, p in pairs[i + 1 :]))
        at = _product(emit, at, other, later, attrs["precision"])
    x, part = _summed(emit, *at, set(result))
    x = _arranged(emit, x, part, result)
    shape = tuple(sizes[c] for c in result)
    return (x if x.type.shape == shape else emit("expand", x, shape=shape),)


def _cost(operands: Types, outputs: Sequence[TensorType], attrs: Attrs) -> Dim:
    """Two per element of the result and summed size."""
    types = [tensor(o, i) for i, o in enumerate(operands)][-2:]
    return outputs[0].numel * types[0].shape[-1] * 2 if types[0].rank else outputs[0].numel * 2


def _cost_einsum(operands: Types, outputs: Sequence[TensorType], attrs: Attrs) -> Dim:
    """As if all labels were looped over at once for each pair."""
    types = [tensor(o, i) for i, o in enumerate(operands)]
    labels, result = terms(attrs["equation"], [t.rank for t in types])
    sizes, total = _sizes(labels, types), Dim()
    seen = set(labels[0])
    for i, part in enumerate(labels[1:], 1):
        seen |= set(part)
        total = total + numel([sizes[c] for c in sorted(seen)]) * 2
        seen &= set(result).union(*(set(p) for p in labels[i + 1 :]))
    return total + types[0].numel


def _samples(*rows: tuple[tuple[int, ...], ...], **attrs: Any) -> tuple[Sample, ...]:
    kinds = ("float32", "bfloat16", "float64")
    pairs = [(d, r) for d in kinds for r in (rows if d == "float32" else rows[:1])]
    return tuple(Sample(tuple(TensorType.of(d, s) for s in r), attrs) for d, r in pairs)


def _plain(name: str, infer: Any, expand: Any, samples: tuple[Sample, ...], precise: bool = True) -> OpDef:
    return OpDef(
        name=name, infer=infer, reference=lambda i, a: (getattr(torch, name)(*i),), vjp=ByExpansion(),
        lowering=Composite(expand), samples=samples, arity=(2, 2), params=(PRECISION,) if precise else (),
        cost=_cost, doc=f"torch.{name}",
    )  # fmt: skip


def _added(name: str, rank: int, samples: tuple[Sample, ...]) -> OpDef:
    return OpDef(
        name=name, infer=_infer_added(rank), vjp=ByExpansion(), lowering=Composite(_expand_added),
        reference=lambda i, a: (getattr(torch, name)(*i, beta=a["beta"], alpha=a["alpha"]),), arity=(3, 3),
        params=(Attr("beta", "number", 1), Attr("alpha", "number", 1), PRECISION), cost=_cost,
        samples=samples, doc=f"torch.{name}: beta x + alpha a b",
    )  # fmt: skip


EQUATIONS: tuple[tuple[str, tuple[tuple[int, ...], ...]], ...] = (
    ("ij,jk->ik", ((3, 4), (4, 5))), ("bij,bjk->bik", ((2, 3, 4), (2, 4, 5))),
    ("bhid,bhjd->bhij", ((2, 2, 3, 4), (2, 2, 5, 4))), ("...i,ij->...j", ((2, 3, 4), (4, 5))),
    ("ij->ji", ((3, 4),)), ("ii->i", ((3, 3),)), ("ij->", ((3, 4),)), ("i,j->ij", ((3,), (4,))),
    ("ij,ij->i", ((3, 4), (3, 4))), ("ijk,kl,lm->ijm", ((2, 3, 4), (4, 5), (5, 2))),
    ("bclh,bclh,bc->bch", ((2, 3, 4, 2), (2, 3, 4, 2), (2, 3))), ("ij,jk", ((3, 4), (4, 5))),
)  # fmt: skip

OPS = (
    _plain("bmm", _infer_bmm, _expand_bmm, _samples(((2, 5, 7), (2, 7, 3)), ((1, 2, 1), (1, 1, 2)))),
    _plain("mv", _infer_mv, _expand_mv, _samples(((5, 7), (7,)), ((1, 3), (3,)))),
    _plain("dot", _infer_dot, _expand_dot, _samples(((33,), (33,)), ((1,), (1,))), precise=False),
    _plain("outer", _infer_outer, _expand_outer, _samples(((5,), (7,)), ((1,), (3,))), precise=False),
    _added("addmm", 2, (*_samples(((5, 3), (5, 7), (7, 3)), ((3,), (5, 7), (7, 3))),
                        *_samples(((5, 1), (5, 7), (7, 3)), beta=0.5, alpha=2.0))),
    _added("baddbmm", 3, (*_samples(((2, 5, 3), (2, 5, 7), (2, 7, 3))),
                          *_samples(((5, 3), (2, 5, 7), (2, 7, 3)), beta=0, alpha=2.0))),
    OpDef(
        name="einsum", infer=_infer_einsum, vjp=ByExpansion(), lowering=Composite(_expand_einsum),
        reference=lambda i, a: (torch.einsum(a["equation"], *i),), arity=(1, 8),
        params=(Attr("equation", "str", doc='such as "bij,bjk->bik"'), PRECISION), cost=_cost_einsum,
        samples=(*(s for e, shapes in EQUATIONS for s in _samples(shapes, equation=e)[:1]),
                 *_samples(EQUATIONS[0][1], equation=EQUATIONS[0][0])[1:]),
        doc="torch.einsum, one product after the other",
    ),
)  # fmt: skip
