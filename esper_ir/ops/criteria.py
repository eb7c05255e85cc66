"""Losses beyond the difference of two tensors: likelihoods, angles, margins. Composites, float32 inside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    OpDef,
    Operand,
    Operands,
    Sample,
    Val,
    Vals,
    VjpRule,
    Wanted,
)
from esper_ir.ops.gradients import to, unbroadcast, up, val
from esper_ir.ops.losses import REDUCTION
from esper_ir.ops.rules import ONE, Shape, accept, axis, broadcast, same, tensor
from esper_ir.types import Dim, DType, TensorType

Types = Sequence[TensorType | Number]
Elements = Callable[[Emit, Sequence[Val], Attrs], Val]
"""Loss per element or row from the operands in their compute type."""


def reduced(emit: Emit, losses: Val, attrs: Attrs) -> Val:
    """The mean or sum over all losses; an empty mean is NaN, as in torch."""
    kind, rank = attrs["reduction"], losses.type.rank
    return losses if kind == "none" or not rank else emit(kind, losses, dims=tuple(range(rank)))


def _alike(operands: Types) -> list[TensorType]:
    types = [tensor(o, i) for i, o in enumerate(operands)]
    accept(types, "float")
    if len({t.dtype for t in types}) > 1:
        found = " and ".join(str(t) for t in types)
        raise EsperError("E0205", f"operands {found} differ in dtype", hint="add a cast")
    return types


def _result(x: TensorType, shape: Shape, attrs: Attrs) -> tuple[TensorType, ...]:
    return (TensorType(x.dtype, shape if attrs.get("reduction", "none") == "none" else ()),)


def _shared(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    """Operands that broadcast."""
    types = _alike(operands)
    return _result(types[0], broadcast([t.shape for t in types]), attrs)


def _paired(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    """Two operands of one shape, and a weight that broadcasts to it."""
    x, t, *weight = _alike(operands)
    if x.rank != t.rank:
        raise EsperError("E0204", f"{x} and {t} differ in rank", hint="operands of this loss have one shape")
    for a, b in zip(x.shape, t.shape, strict=True):
        same(a, b, "operands of this loss have one shape", x.shape, t.shape)
    if any(broadcast([x.shape, w.shape]) != x.shape for w in weight):
        raise EsperError("E0204", f"{weight[0]} is no weight of {x}", hint="it broadcasts to the operand")
    return _result(x, x.shape, attrs)


def _of_one_rank(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    types = _alike(operands)
    if len({t.rank for t in types}) > 1:
        found = ", ".join(map(str, types))
        raise EsperError("E0204", f"{found} differ in rank", hint="operands of this loss have one rank")
    return _shared(operands, attrs)


def _expansion(elements: Elements) -> Any:
    def expand(emit: Emit, inputs: Sequence[Operand], attrs: Attrs) -> Sequence[Val]:
        wide = [up(emit, val(v)) for v in inputs]
        made = elements(emit, wide, attrs)
        out = reduced(emit, made, attrs) if "reduction" in attrs else made
        return (to(emit, out, val(inputs[0]).type.dtype),)

    return expand


# Likelihoods.


def _bce(emit: Emit, v: Sequence[Val], attrs: Attrs) -> Val:
    """-(t log x + (1 - t) log(1 - x)), logarithms no lower than -100, as in torch; then the weight."""
    x, t = v[0], v[1]
    hit = emit("mul", t, emit("maximum", emit("log", x), -100.0))
    miss = emit("mul", emit("sub", 1.0, t), emit("maximum", emit("log1p", emit("neg", x)), -100.0))
    loss = emit("neg", emit("add", hit, miss))
    return emit("mul", loss, v[2]) if len(v) > 2 else loss


def _vjp_bce(
    emit: Emit, inputs: Operands, outputs: Vals, cotangents: Cotangents, attrs: Attrs, wanted: Wanted
) -> Cotangents:
    """dx = g (x - t) / max(x (1 - x), 1e-12); dt = g (log(1 - x) - log x), logarithms from -100 on."""
    found: list[Val | None] = [None] * len(inputs)
    g = cotangents[0]
    if g is None:
        return found
    kinds = [val(o).type for o in inputs]
    v = [up(emit, val(o)) for o in inputs]
    g, shape = up(emit, g), broadcast([k.shape for k in kinds])
    if attrs["reduction"] == "mean":
        total = emit("sum", emit("full", shape=shape, value=1.0, dtype=g.type.dtype))
        g = emit("div", g, total)
    if len(v) > 2:
        g = emit("mul", g, v[2])
    slopes: list[Callable[[], Val]] = [
        lambda: emit("div", emit("sub", v[0], v[1]), emit("maximum", emit("mul", v[0], emit("sub",
            1.0, v[0])), 1e-12)),
        lambda: emit("sub", emit("maximum", emit("log1p", emit("neg", v[0])), -100.0),
                     emit("maximum", emit("log", v[0]), -100.0)),
    ]  # fmt: skip
    for i, slope in enumerate(slopes):
        if wanted[i]:
            whole = emit("mul", slope(), g)
            if whole.type.shape != shape:
                whole = emit("expand", whole, shape=shape)
            found[i] = to(emit, unbroadcast(emit, whole, kinds[i]), kinds[i].dtype)
    return found


def _at(x: TensorType) -> int:
    return 1 if x.rank > 1 else 0


def _infer_nll(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x, t = tensor(operands[0]), tensor(operands[1], 1)
    accept([x], "float")
    if not x.rank or t.dtype is not DType.int64:
        raise EsperError("E0205", f"{x} with targets {t}", hint="[batch, classes, ...] and int64 indices")
    rest = tuple(d for i, d in enumerate(x.shape) if i != _at(x))
    if t.rank != len(rest):
        raise EsperError("E0204", f"{t} does not go with {x}", hint="one index per position")
    for a, b in zip(t.shape, rest, strict=True):
        same(a, b, "one index per position without the classes", t.shape, x.shape)
    if len(operands) > 2:
        w = tensor(operands[2], 2)
        if w.dtype is not x.dtype or w.rank != 1:
            raise EsperError("E0204", f"{w} is no weight per class of {x}", hint="[classes], in its dtype")
        same(w.shape[0], x.shape[_at(x)], "one weight per class", w.shape, x.shape)
    return _result(x, t.shape, attrs)


def _expand_nll(emit: Emit, inputs: Sequence[Operand], attrs: Attrs) -> Sequence[Val]:
    """-w[t] x[t], 0 for ignored targets; the mean divides by the weights that count."""
    x, t = up(emit, val(inputs[0])), val(inputs[1])
    at, rank = _at(x.type), x.type.rank
    classes = x.type.shape[at]
    lifted = emit("reshape", t, shape=(*t.type.shape[:at], ONE, *t.type.shape[at:]))
    column = emit("reshape", emit("arange", end=classes), shape=(classes, *[ONE] * (rank - at - 1)))
    hit = emit("eq", lifted, column)
    valid = emit("ne", t, attrs["ignore_index"])
    picked = emit("neg", emit("sum", emit("where", hit, x, 0.0), dims=(at,)))
    weight: Val | None = None
    if len(inputs) > 2:
        each = emit("reshape", up(emit, val(inputs[2])), shape=(classes, *[ONE] * (rank - at - 1)))
        weight = emit("sum", emit("where", hit, each, 0.0), dims=(at,))
        picked = emit("mul", picked, weight)
    loss = emit("where", valid, picked, 0.0)
    dtype = val(inputs[0]).type.dtype
    if attrs["reduction"] != "mean":
        return (to(emit, reduced(emit, loss, attrs), dtype),)
    share = to(emit, valid, loss.type.dtype) if weight is None else emit("where", valid, weight, 0.0)
    return (to(emit, emit("div", emit("sum", loss), emit("sum", share)), dtype),)


def _nll_reference(inputs: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
    x, t, *w = inputs
    made = functional.nll_loss(x, t, w[0].detach() if w else None, ignore_index=attrs["ignore_index"],
                               reduction=attrs["reduction"])  # fmt: skip
    return (made,)


def _vjp_nll(
    emit: Emit, inputs: Operands, outputs: Vals, cotangents: Cotangents, attrs: Attrs, wanted: Wanted
) -> Cotangents:
    """-g w[t] at the target of every position that counts."""
    found: list[Val | None] = [None] * len(inputs)
    g, x, t = cotangents[0], val(inputs[0]).type, val(inputs[1])
    if g is None or not wanted[0]:
        return found
    at, rank = _at(x), x.rank
    classes = x.shape[at]
    shape = (*t.type.shape[:at], ONE, *t.type.shape[at:])
    hit = emit("eq", emit("reshape", t, shape=shape),
               emit("reshape", emit("arange", end=classes), shape=(classes,
                   *[ONE] * (rank - at - 1))))  # fmt: skip
    g = up(emit, g)
    counts = to(emit, emit("ne", t, attrs["ignore_index"]), g.type.dtype)
    each = emit("reshape", counts, shape=shape)
    if len(inputs) > 2:
        weights = emit("reshape", up(emit, val(inputs[2])), shape=(classes, *[ONE] * (rank - at - 1)))
        each = emit("mul", each, weights)
    share = emit("where", hit, each, 0.0)
    if attrs["reduction"] == "mean":
        g = emit("div", g, emit("sum", share))
    elif attrs["reduction"] == "none":
        g = emit("reshape", g, shape=shape)
    found[0] = to(emit, emit("neg", emit("mul", share, g)), x.dtype)
    return found


# Angles.


def _resolve_angle(operands: Types, attrs: Attrs) -> dict[str, Any]:
    rank = max(tensor(o, i).rank for i, o in enumerate(operands))
    if attrs["eps"] < 0:
        raise EsperError("E0203", f"eps is {attrs['eps']}", hint="not negative")
    if not rank:
        raise EsperError("E0207", "an angle needs an axis", hint="reshape to [1]")
    return {**attrs, "dim": axis(attrs["dim"], rank)}


def _infer_angle(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    types = _alike(operands)
    shape = broadcast([t.shape for t in types])
    return (TensorType(types[0].dtype, (*shape[: attrs["dim"]], *shape[attrs["dim"] + 1 :])),)


def _angle(emit: Emit, v: Sequence[Val], attrs: Attrs) -> Val:
    """sum(a b) / (max(|a|, eps) max(|b|, eps))."""
    shape = broadcast([x.type.shape for x in v])
    dims, units = (attrs["dim"],), []
    for x in v:
        wide = x if x.type.shape == shape else emit("expand", x, shape=shape)
        length = emit("norm", wide, dims=dims, keepdim=True)
        units.append(emit("div", wide, emit("maximum", length, attrs["eps"])))
    return emit("sum", emit("mul", *units), dims=dims)


def _infer_turned(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    a, b, t = _alike(operands)
    if a != b or a.rank not in (1, 2) or t.shape != a.shape[:-1]:
        hint = "two of [batch, width] and targets [batch]"
        raise EsperError("E0204", f"{a}, {b}, {t} do not fit", hint=hint)
    return _result(a, t.shape, attrs)


def _turned(emit: Emit, v: Sequence[Val], attrs: Attrs) -> Val:
    """1 - cos where the target is 1, max(cos - margin, 0) where it is -1."""
    a, b, t = v
    dims = (a.type.rank - 1,)
    dot, aa, bb = (emit("sum", emit("mul", p, q), dims=dims) for p, q in ((a, b), (a, a), (b, b)))
    lengths = emit("mul", emit("add", aa, 1e-12), emit("add", bb, 1e-12))
    cos = emit("div", dot, emit("sqrt", lengths))
    near = emit("where", emit("eq", t, 1.0), emit("sub", 1.0, cos), 0.0)
    far = emit("clamp", emit("sub", cos, attrs["margin"]), min=0.0)
    return emit("add", near, emit("where", emit("eq", t, -1.0), far, 0.0))


# Margins.


def _hinge(emit: Emit, v: Sequence[Val], attrs: Attrs) -> Val:
    """x where the target is 1, max(margin - x, 0) where it is -1, both elsewhere."""
    x, t = v
    far = emit("where", emit("ne", t, 1.0), emit("clamp", emit("sub", attrs["margin"], x), min=0.0), 0.0)
    return emit("add", emit("where", emit("ne", t, -1.0), x, 0.0), far)


def _ranking(emit: Emit, v: Sequence[Val], attrs: Attrs) -> Val:
    """max(-t (a - b) + margin, 0)."""
    a, b, t = v
    apart = emit("mul", emit("neg", t), emit("sub", a, b))
    return emit("clamp", emit("add", apart, attrs["margin"]), min=0.0)


def _soft(emit: Emit, v: Sequence[Val], attrs: Attrs) -> Val:
    """log(1 + exp(-t x))."""
    return emit("log1p", emit("exp", emit("neg", emit("mul", v[1], v[0]))))


def _soft_reference(inputs: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
    """torch.nn.functional.soft_margin_loss has no gradient of the target; its steps have."""
    loss = (-(inputs[0] * inputs[1])).exp().add(1).log()
    return (loss if attrs["reduction"] == "none" else getattr(loss, attrs["reduction"])(),)


def _distance(emit: Emit, a: Val, b: Val, attrs: Attrs, keepdim: bool = False) -> Val:
    apart = emit("add", emit("sub", a, b), attrs["eps"])
    return emit("norm", apart, p=attrs["p"], dims=(apart.type.rank - 1,), keepdim=keepdim)


def _infer_distance(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    types = _alike(operands)
    shape = broadcast([t.shape for t in types])
    if len(types) > 2 and len({t.rank for t in types}) > 1:
        raise EsperError("E0204", "operands differ in rank", hint="three tensors of one rank")
    if not shape:
        raise EsperError("E0207", "a distance needs an axis", hint="reshape to [1]")
    kept = (ONE,) if attrs.get("keepdim") else ()
    return _result(types[0], (*shape[:-1], *kept), attrs)


def _powered(operands: Types, attrs: Attrs) -> dict[str, Any]:
    if attrs["p"] == 0:
        raise EsperError("E0203", "p is 0", hint="any other number")
    if attrs.get("margin", 1.0) <= 0:
        raise EsperError("E0203", f"margin is {attrs['margin']}", hint="larger than 0")
    return dict(attrs)


def _triplet(emit: Emit, v: Sequence[Val], attrs: Attrs) -> Val:
    """max(d(a, p) - d(a, n) + margin, 0); `swap` takes the nearer of a and p for the distance to n."""
    a, p, n = v
    near, far = _distance(emit, a, p, attrs), _distance(emit, a, n, attrs)
    if attrs["swap"]:
        far = emit("minimum", far, _distance(emit, p, n, attrs))
    return emit("clamp", emit("sub", emit("add", near, attrs["margin"]), far), min=0.0)


def _cost(operands: Types, outputs: Sequence[TensorType], attrs: Attrs) -> Dim:
    return tensor(operands[0]).numel * 6


def _reference(name: str, params: Sequence[Attr]) -> Any:
    return lambda i, a: (getattr(functional, name)(*i, **{p.name: a[p.name] for p in params}),)


def criterion(
    name: str, elements: Elements, *params: Attr, infer: Any = _shared, cases: Sequence[Attrs] = ({},),
    shapes: Sequence[tuple[tuple[int, ...], ...]], low: float = -1.5, high: float = 1.5,
        reduction: bool = True,
    vjp: VjpRule | ByExpansion | None = None, resolve: Any = None, most: int = 0, reference: Any = None,
) -> OpDef:  # fmt: skip
    """A record whose reference is `torch.nn.functional.<name>`."""
    every = (*params, REDUCTION) if reduction else params
    kinds = ("none", "mean", "sum") if reduction else ("",)
    rows = [(d, s, c, k) for c in cases for s in shapes for d, k in zip(
        ("float32", "float32", "bfloat16", "float64"), (*kinds, kinds[0], kinds[0], kinds[0]),
            strict=False)]  # fmt: skip
    samples = tuple(
        Sample(tuple(TensorType.of(d, x) for x in s), {**c, **({"reduction": k} if k else {})}, low, high)
        for d, s, c, k in rows
    )
    count = len(shapes[0])
    return OpDef(
        name=name, infer=infer, reference=reference or _reference(name, every), vjp=vjp or ByExpansion(),
        lowering=Composite(_expansion(elements)), samples=samples, arity=(count, most or count),
        params=every, cost=_cost, resolve=resolve, doc=f"torch.nn.functional.{name}",
    )  # fmt: skip


def _number(name: str, default: float) -> Attr:
    return Attr(name, "float", default)


ROWS = ((5, 7), (2, 3, 9))
POWER = Attr("p", "float", 2.0, doc="1: sum of absolute values, 2: Euclidean length; not 0")


def _nll_samples() -> tuple[Sample, ...]:
    out = []
    for d, x, weighted, attrs in (
        ("float32", (5, 7), False, {}), ("float32", (5, 7), True, {"reduction": "sum"}),
        ("float32", (6, 7), True, {"ignore_index": 2}), ("float32", (5, 7), False, {"reduction": "none"}),
        ("float32", (3, 5, 4), False, {}), ("float32", (7,), False, {}), ("bfloat16", (5, 33), False, {}),
        ("float64", (5, 7), True, {}),
    ):  # fmt: skip
        at = min(1, len(x) - 1)
        t = TensorType.of("int64", (*x[:at], *x[at + 1 :]))
        weight = [TensorType.of(d, x[at : at + 1])] if weighted else []
        out.append(Sample((TensorType.of(d, x), t, *weight), attrs, 0.0, 2.0))
    return tuple(out)


OPS = (
    criterion("binary_cross_entropy", _bce, infer=_paired, shapes=[(s, s) for s in ROWS], low=0.05,
              high=0.95, vjp=_vjp_bce, most=3),
    OpDef(
        name="nll_loss", infer=_infer_nll, reference=_nll_reference, vjp=_vjp_nll,
        lowering=Composite(_expand_nll), samples=_nll_samples(), arity=(2, 3), cost=_cost,
        params=(REDUCTION, Attr("ignore_index", "int", -100, doc="targets of this value count for nothing")),
        indices={1: lambda types, attrs: tensor(types[0]).shape[_at(tensor(types[0]))]},
        doc="torch.nn.functional.nll_loss(log-probabilities, class indices, weight)",
    ),
    criterion("cosine_similarity", _angle, Attr("dim", "int", 1), _number("eps", 1e-8), infer=_infer_angle,
              shapes=[((5, 7), (5, 7)), ((2, 3, 9), (3, 9))], reduction=False, resolve=_resolve_angle,
              cases=({}, {"dim": -1})),
    criterion("cosine_embedding_loss", _turned, _number("margin", 0.0), infer=_infer_turned,
              shapes=[((5, 7), (5, 7), (5,))], cases=({}, {"margin": 0.3})),
    criterion("hinge_embedding_loss", _hinge, _number("margin", 1.0), shapes=[(s, s) for s in ROWS],
              cases=({}, {"margin": 0.5})),
    criterion("margin_ranking_loss", _ranking, _number("margin", 0.0), infer=_of_one_rank,
              shapes=[((5,), (5,), (5,))],
              cases=({}, {"margin": 0.5})),
    criterion("soft_margin_loss", _soft, reference=_soft_reference, shapes=[(s, s) for s in ROWS]),
    criterion("pairwise_distance", lambda e, v, a: _distance(e, v[0], v[1], a, a["keepdim"]), POWER,
              _number("eps", 1e-6), Attr("keepdim", "bool", False), infer=_infer_distance, reduction=False,
              resolve=_powered,
              shapes=[((5, 7), (5, 7)), ((2, 3, 9), (9,))], cases=({}, {"p": 1.0, "keepdim": True})),
    criterion("triplet_margin_loss", _triplet, _number("margin", 1.0), POWER, _number("eps", 1e-6),
              Attr("swap", "bool", False), infer=_infer_distance, resolve=_powered,
              shapes=[((5, 7), (5, 7), (5, 7))], cases=({}, {"p": 1.0}, {"swap": True})),
)  # fmt: skip
