"""Attention and rotary positions. Scores, softmax and sums are float32 (float64 for float64)."""

from __future__ import annotations

import math
from collections.abc import Sequence
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
    NotDifferentiable,
    Number,
    Opaque,
    OpDef,
    Operand,
    Operands,
    Sample,
    Tolerance,
    Val,
    Vals,
    Wanted,
)
from esper_ir.ops.gradients import to, unbroadcast, up, val
from esper_ir.ops.movement import divide
from esper_ir.ops.rules import ONE, accept, broadcast, same, tensor
from esper_ir.types import Dim, DType, TensorType

Types = Sequence[TensorType | Number]
CAUSAL = Attr("is_causal", "bool", False, doc="a query sees the keys up to its own position")
SCALE = Attr("scale", "float", None, doc="factor on the scores; null: 1 / sqrt(width)")
LAYOUT = Attr(
    "layout", "str", "BHSD", ("BHSD", "BSHD"), "order of the axes: batch, heads (h), length (s) and width (d)"
)
ROWS_FIRST = (0, 2, 1, 3)


def _resolve(operands: Types, attrs: Attrs) -> dict[str, Any]:
    q = tensor(operands[0])
    if attrs["scale"] is not None or not q.rank:
        return dict(attrs)
    width = q.shape[-1].static
    if not width:
        raise EsperError("E0206", f"1 / sqrt({q.shape[-1]}) is no number", hint="give scale")
    return {**attrs, "scale": 1.0 / math.sqrt(width)}


def _same_dtype(types: Sequence[TensorType]) -> None:
    accept(types, "float")
    if len({t.dtype for t in types}) > 1:
        found = ", ".join(str(t) for t in types)
        raise EsperError("E0205", f"operands {found} differ in dtype", hint="add a cast")


def _check(q: TensorType, k: TensorType, v: TensorType) -> None:
    _same_dtype((q, k, v))
    if not q.rank == k.rank == v.rank == 4:
        raise EsperError("E0204", f"{q}, {k}, {v}", hint="operands are [batch, heads, length, width]")
    for a, b in ((q, k), (k, v)):
        same(a.shape[0], b.shape[0], "one batch", a.shape, b.shape)
    same(k.shape[1], v.shape[1], "keys and values have the same heads", k.shape, v.shape)
    same(k.shape[2], v.shape[2], "keys and values have the same length", k.shape, v.shape)
    same(q.shape[3], k.shape[3], "queries and keys have the same width", q.shape, k.shape)


def _infer_whole(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    q, k, v = (tensor(o, i) for i, o in enumerate(operands[:3]))
    _check(q, k, v)
    if divide(q.shape[1], k.shape[1]) is None:
        raise EsperError("E0206", f"cannot prove that {k.shape[1]} key heads divide {q.shape[1]} query heads")
    if len(operands) > 3:
        mask = tensor(operands[3], 3)
        if attrs["is_causal"]:
            raise EsperError("E0203", "is_causal with a mask", hint="put the triangle into the mask")
        scores = (*q.shape[:3], k.shape[2])
        if broadcast([mask.shape, scores]) != scores:
            raise EsperError("E0204", f"{mask} does not broadcast to the scores", hint="[.., queries, keys]")
        if mask.dtype not in (DType.bool, q.dtype):
            raise EsperError("E0205", f"{mask} is no mask of {q.dtype.value}", hint="bool, or that dtype")
    return (TensorType(q.dtype, (*q.shape[:3], v.shape[3])),)


def _repeated(emit: Emit, x: Val, heads: Dim) -> Val:
    """Every head as often as there are query heads to it, one after the other."""
    batch, own, length, width = x.type.shape
    times = divide(heads, own)
    if times is None or times == ONE:
        return x
    x = emit("reshape", x, shape=(batch, own, ONE, length, width))
    x = emit("expand", x, shape=(batch, own, times, length, width))
    return emit("reshape", x, shape=(batch, heads, length, width))


def _expand(emit: Emit, inputs: Sequence[Operand], attrs: Attrs) -> Sequence[Val]:
    q, k, v = (val(o) for o in inputs[:3])
    k, v = (_repeated(emit, t, q.type.shape[1]) for t in (k, v))
    scale = attrs["scale"]
    if len(inputs) == 3:
        return emit.many("attention", q, k, v, is_causal=attrs["is_causal"], scale=scale)[:1]
    mask, wide = val(inputs[3]), q.type.dtype.compute
    turned = emit("permute", up(emit, k), dims=(0, 1, 3, 2))
    scores = emit("mul", emit("matmul", up(emit, q), turned), scale)
    if mask.type.dtype is DType.bool:
        scores = emit("where", mask, scores, -math.inf)
    else:
        scores = emit("add", scores, to(emit, mask, wide))
    out = emit("matmul", emit("softmax", scores, dim=-1), up(emit, v))
    return (to(emit, out, q.type.dtype),)


def _reference(inputs: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
    q, k, v, *mask = inputs
    return (_attended(q, k, v, mask[0] if mask else None, attrs),)


def _attended(q: Any, k: Any, v: Any, mask: Any, attrs: Attrs) -> Any:
    if not q.numel():  # torch 2.11 divides by the number of heads on the CPU, which ends the process
        return q.new_zeros((*q.shape[:-1], v.shape[-1])) + (q.sum() + k.sum() + v.sum())
    many = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
    return functional.scaled_dot_product_attention(
        q, k, v, mask, is_causal=attrs["is_causal"], scale=attrs["scale"], **many
    )


# The primitive: also the logarithm of the sum of exponentials, which the gradient needs.


def _turned(kind: TensorType, attrs: Attrs) -> TensorType:
    """Heads before rows, or back."""
    if attrs["layout"] == "BHSD" or kind.rank != 4:
        return kind
    return TensorType(kind.dtype, tuple(kind.shape[i] for i in ROWS_FIRST))


def _first(x: Any, attrs: Attrs) -> Any:
    """The same for a tensor."""
    return x if attrs["layout"] == "BHSD" else x.transpose(1, 2)


def _infer(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    q, k, v = (_turned(tensor(o, i), attrs) for i, o in enumerate(operands))
    _check(q, k, v)
    same(q.shape[1], k.shape[1], "queries and keys have the same heads", q.shape, k.shape)
    out = TensorType(q.dtype, (*q.shape[:3], v.shape[3]))
    return _turned(out, attrs), TensorType(q.dtype.compute, q.shape[:3])


def _scores(q: Any, k: Any, attrs: Attrs) -> Any:
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = torch.matmul(q.to(wide), k.to(wide).transpose(-1, -2)) * attrs["scale"]
    if not attrs["is_causal"]:
        return scores
    return scores.masked_fill(~torch.ones_like(scores[0, 0], dtype=torch.bool).tril(), -math.inf)


def _reference_primitive(inputs: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
    q, k, v = (_first(t, attrs) for t in inputs)
    out = _first(_attended(q, k, v, None, attrs), attrs)
    return out, torch.logsumexp(_scores(q, k, attrs), -1)


def _vjp(
    emit: Emit, inputs: Operands, outputs: Vals, cotangents: Cotangents, attrs: Attrs, wanted: Wanted
) -> Cotangents:
    g, lse = cotangents
    if lse is not None:
        raise EsperError("E0401", "the logarithm of the sum has no gradient", hint="use logsumexp")
    if g is None:
        return [None] * 3
    made = emit.many("attention_grad", g, *inputs, *outputs, **attrs)
    return [v if asked else None for v, asked in zip(made, wanted, strict=True)]


def _infer_gradient(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    g, q, k, v, out, lse = (tensor(o, i) for i, o in enumerate(operands))
    made, sums = _infer((q, k, v), attrs)
    if (g, out) != (made, made) or lse != sums:
        hint = f"{made}, {made}, {sums}"
        raise EsperError("E0204", f"{g}, {out}, {lse} are not of this attention", hint=hint)
    return q, k, v


def _reference_gradient(inputs: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
    """dv = p^T g; ds = p (g v^T - sum(g out)); dq = scale ds k; dk = scale ds^T q (Dao 2022, section 3)."""
    g, q, k, v, out = (_first(t, attrs) for t in inputs[:5])
    lse = inputs[5]
    scores = _scores(q, k, attrs)
    p = torch.exp(scores - lse.to(scores.dtype).unsqueeze(-1))
    wg, wq, wk, wv, wo = (t.to(scores.dtype) for t in (g, q, k, v, out))
    ds = p * (wg @ wv.transpose(-1, -2) - (wg * wo).sum(-1, keepdim=True)) * attrs["scale"]
    found = (ds @ wk, ds.transpose(-1, -2) @ wq, p.transpose(-1, -2) @ wg)
    return tuple(_first(t.to(q.dtype), attrs) for t in found)


# What the library computes, in primitives: for whoever asks what another order of operations may give.


def _scores_of(emit: Emit, q: Val, k: Val, attrs: Attrs) -> Val:
    """[batch, heads, queries, keys] from operands with heads first, in the wide type."""
    scores = emit("mul", emit("matmul", q, emit("permute", k, dims=(0, 1, 3, 2))), attrs["scale"])
    if not attrs["is_causal"]:
        return scores
    queries, keys = scores.type.shape[2:]
    row = emit("reshape", emit("arange", end=queries, dtype=DType.int64), shape=(queries, ONE))
    seen = emit("le", emit("arange", end=keys, dtype=DType.int64), row)
    return emit("where", seen, scores, -math.inf)


def _heads_first(emit: Emit, x: Val, attrs: Attrs) -> Val:
    """Heads before rows, or back."""
    return x if attrs["layout"] == "BHSD" else emit("permute", x, dims=ROWS_FIRST)


def _opened(emit: Emit, inputs: Sequence[Operand], attrs: Attrs) -> Sequence[Val]:
    q, k, v = (up(emit, _heads_first(emit, val(o), attrs)) for o in inputs)
    scores = _scores_of(emit, q, k, attrs)
    out = emit("matmul", emit("softmax", scores, dim=-1), v)
    lse = emit("logsumexp", scores, dims=(-1,))
    return _heads_first(emit, to(emit, out, val(inputs[0]).type.dtype), attrs), lse


def _opened_gradient(emit: Emit, inputs: Sequence[Operand], attrs: Attrs) -> Sequence[Val]:
    """As `_reference_gradient`, but for p, which is of the scores themselves: a rounding of them that the
    logarithm of the sum did not see may be an exponent beyond all range."""
    g, q, k, v, out = (up(emit, _heads_first(emit, val(o), attrs)) for o in inputs[:5])
    p = emit("softmax", _scores_of(emit, q, k, attrs), dim=-1)
    over = emit("matmul", g, emit("permute", v, dims=(0, 1, 3, 2)))
    mean = emit("sum", emit("mul", g, out), dims=(-1,), keepdim=True)
    ds = emit("mul", emit("mul", p, emit("sub", over, mean)), attrs["scale"])
    ds_t, p_t = (emit("permute", t, dims=(0, 1, 3, 2)) for t in (ds, p))
    found = (emit("matmul", ds, k), emit("matmul", ds_t, q), emit("matmul", p_t, g))
    kind = val(inputs[0]).type.dtype
    return tuple(_heads_first(emit, to(emit, t, kind), attrs) for t in found)


OPENED = {"attention": _opened, "attention_grad": _opened_gradient}


def _cost(products: int) -> Any:
    def cost(operands: Types, outputs: Sequence[TensorType], attrs: Attrs) -> Dim:
        at = 0 if products == 2 else 1
        q, k = tensor(operands[at], at), tensor(operands[at + 1], at + 1)
        return q.numel * k.shape[1 if attrs.get("layout") == "BSHD" else 2] * 2 * products

    return cost


# Rotary positions.


def _infer_rope(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x, cos, sin = (tensor(o, i) for i, o in enumerate(operands))
    _same_dtype((x, cos, sin))
    half = divide(x.shape[-1], Dim.of(2)) if x.rank else None
    if half is None:
        raise EsperError("E0204", f"{x} has no pairs along its last axis", hint="the width is even")
    wanted = (*x.shape[:-1], half)
    for part in (cos, sin):
        if not part.rank or part.shape[-1] != half or broadcast([part.shape, wanted]) != wanted:
            raise EsperError("E0204", f"{part} is no table for {x}", hint="[length, width / 2]")
    return (x,)


def _halves(emit: Emit, x: Val) -> Val:
    """[..., 2, width / 2]."""
    half = divide(x.type.shape[-1], Dim.of(2))
    return emit("reshape", x, shape=(*x.type.shape[:-1], 2, half))


def _table(emit: Emit, x: Val) -> Val:
    """[..., 1, width / 2] in the compute type."""
    return up(emit, emit("reshape", x, shape=(*x.type.shape[:-1], ONE, x.type.shape[-1])))


def _signed(emit: Emit, x: Val) -> Val:
    """-x for the first half, x for the second."""
    second = emit("reshape", emit("arange", end=2), shape=(2, 1))
    return emit("where", emit("eq", second, 0), emit("neg", x), x)


def _rotated(emit: Emit, x: Val, cos: Val, sin: Val) -> Val:
    pairs = _halves(emit, x)
    other = emit("reverse", pairs, dim=-2)
    out = emit("add", emit("mul", up(emit, pairs), cos), emit("mul", up(emit, other), _signed(emit, sin)))
    return emit("reshape", to(emit, out, x.type.dtype), shape=x.type.shape)


def _expand_rope(emit: Emit, inputs: Sequence[Operand], attrs: Attrs) -> Sequence[Val]:
    x, cos, sin = (val(o) for o in inputs)
    return (_rotated(emit, x, _table(emit, cos), _table(emit, sin)),)


def _vjp_rope(
    emit: Emit, inputs: Operands, outputs: Vals, cotangents: Cotangents, attrs: Attrs, wanted: Wanted
) -> Cotangents:
    """The rotation back: the same with -sin."""
    found: list[Val | None] = [None] * 3
    g, (x, cos, sin) = cotangents[0], (val(o) for o in inputs)
    if g is None:
        return found
    if wanted[0]:
        found[0] = _rotated(emit, g, _table(emit, cos), emit("neg", _table(emit, sin)))
    if wanted[1] or wanted[2]:
        pairs = _halves(emit, x)
        wide = up(emit, _halves(emit, g))
        parts = (up(emit, pairs), _signed(emit, up(emit, emit("reverse", pairs, dim=-2))))
        for i, (table, part) in enumerate(zip((cos, sin), parts, strict=True), 1):
            each = emit("sum", emit("mul", wide, part), dims=(wide.type.rank - 2,))
            found[i] = to(emit, unbroadcast(emit, each, table.type), table.type.dtype) if wanted[i] else None
    return found


def _reference_rope(inputs: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
    x, cos, sin = (t.to(torch.promote_types(t.dtype, torch.float32)) for t in inputs)
    a, b = x.chunk(2, -1)
    return (torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(inputs[0].dtype),)


def _samples(*rows: tuple[str, tuple[tuple[int, ...], ...], Attrs]) -> tuple[Sample, ...]:
    return tuple(Sample(tuple(TensorType.of(d, s) for s in shapes), attrs) for d, shapes, attrs in rows)


def _backward_samples() -> tuple[Sample, ...]:
    out = []
    for dtype, attrs in (("float32", {}), ("float32", {"is_causal": True, "scale": 0.3}), ("bfloat16", {})):
        wide = TensorType.of("float32", (2, 3, 5))
        q, k = (TensorType.of(dtype, (2, 3, n, 8)) for n in (5, 6))
        out.append(Sample((q, q, k, k, q, wide), {"scale": 0.25, **attrs}, 0.5, 1.0))
    q = TensorType.of("float32", (2, 5, 3, 8))
    attrs = {"scale": 0.25, "is_causal": True, "layout": "BSHD"}
    out.append(Sample((q,) * 5 + (TensorType.of("float32", (2, 3, 5)),), attrs, 0.5, 1.0))
    return tuple(out)


QKV = ((2, 3, 5, 8), (2, 3, 6, 8), (2, 3, 6, 8))
LOOSE = Tolerance(4.0, "some kernels round softmax weights to the operands' type before the second product")

OPS = (
    OpDef(
        name="scaled_dot_product_attention", infer=_infer_whole, reference=_reference, vjp=ByExpansion(),
        lowering=Composite(_expand), arity=(3, 4), params=(CAUSAL, SCALE), resolve=_resolve, cost=_cost(2),
        samples=(
            *_samples(
                ("float32", QKV, {}), ("float32", ((2, 4, 5, 8),) * 3, {"is_causal": True, "scale": 0.5}),
                ("float32", ((2, 4, 5, 8), (2, 2, 5, 8), (2, 2, 5, 8)), {"is_causal": True}),
                ("float32", (*QKV, (5, 6)), {}), ("float64", QKV, {}),
            ),
            Sample((*(TensorType.of("float32", s) for s in QKV), TensorType.of("float32", (2, 1, 5, 6))), {}),
        ),
        tolerance=LOOSE,
        doc="torch.nn.functional.scaled_dot_product_attention(q, k, v, mask); fewer key heads are repeated",
    ),
    OpDef(
        name="attention", infer=_infer, reference=_reference_primitive, vjp=_vjp,
        lowering=Opaque("attention"), arity=(3, 3), params=(CAUSAL, SCALE, LAYOUT), resolve=_resolve,
        cost=_cost(2), tolerance=LOOSE,
        samples=_samples(("float32", QKV, {}), ("float32", ((1, 2, 5, 8),) * 3, {"is_causal": True}),
                         ("float64", QKV, {"scale": 0.3}),
                         ("float32", ((2, 5, 3, 8), (2, 6, 3, 8), (2, 6, 3, 8)), {"layout": "BSHD"})),
        doc="attention without a mask, and the logarithm of the sum of exponentials of the scores",
    ),
    OpDef(
        name="attention_grad", infer=_infer_gradient, reference=_reference_gradient,
        vjp=NotDifferentiable("second derivatives of attention are not implemented"),
        lowering=Opaque("attention_grad"), arity=(6, 6), params=(CAUSAL, Attr("scale", "float"), LAYOUT),
        cost=_cost(5), tolerance=LOOSE, samples=_backward_samples(),
        doc="gradients of attention from (cotangent, q, k, v, result, logarithm of the sum)",
    ),
    OpDef(
        name="rope", infer=_infer_rope, reference=_reference_rope, vjp=_vjp_rope,
        lowering=Composite(_expand_rope), arity=(3, 3), cost=lambda i, o, a: o[0].numel * 3,
        samples=_samples(
            ("float32", ((2, 3, 5, 8), (5, 4), (5, 4)), {}), ("float32", ((5, 2), (5, 1), (1, 1)), {}),
            ("bfloat16", ((2, 3, 5, 8), (5, 4), (5, 4)), {}), ("float64", ((3, 5, 6), (5, 3), (5, 3)), {}),
        ),
        doc="rotary positions: (a cos - b sin, b cos + a sin) of the halves a, b of the last axis",
    ),
)  # fmt: skip
