"""Losses: composites, float32 inside, reduced at the end. Gradients are those of the expansion."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from esper_ir.diagnostics import EsperError
from esper_ir.lazy import functional
from esper_ir.opdef import Attr, Attrs, ByExpansion, Composite, Emit, Number, OpDef, Operand, Sample, Val
from esper_ir.ops.gradients import to, up, val
from esper_ir.ops.reduction import count
from esper_ir.ops.rules import accept, demand, numel, same, tensor
from esper_ir.types import Dim, TensorType

Types = Sequence[TensorType | Number]
Elements = Callable[[Emit, Sequence[Val], Attrs], Val]
"""Loss per element from the operands in their compute type."""

REDUCTION = Attr(
    "reduction", "str", "mean", ("none", "mean", "sum"), "what becomes of the losses per element"
)
BATCH = Attr(
    "reduction", "str", "mean", ("none", "mean", "sum", "batchmean"), "batchmean: sum over first axis"
)


def _infer(operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    types = [tensor(o, i) for i, o in enumerate(operands)]
    accept(types, "float")
    first = types[0]
    for other in types[1:]:
        if other.dtype is not first.dtype:
            raise EsperError("E0205", f"{first} and {other} differ in dtype", hint="add a cast")
        if other.rank != first.rank:
            raise EsperError(
                "E0204", f"{first} and {other} differ in rank", hint="operands of a loss have one shape"
            )
        for a, b in zip(first.shape, other.shape, strict=True):
            same(a, b, "operands of a loss have one shape", first.shape, other.shape)
    if attrs["reduction"] == "batchmean" and not first.rank:
        raise EsperError("E0204", f"{first} has no batch axis", hint="use reduction sum")
    return (TensorType(first.dtype, first.shape if attrs["reduction"] == "none" else ()),)


def _reduced(emit: Emit, losses: Val, attrs: Attrs) -> Val:
    """The sum or mean over all elements; an empty mean is NaN, as in torch."""
    kind, shape = attrs["reduction"], losses.type.shape
    if kind == "none" or (not shape and kind != "batchmean"):
        return losses
    dims = tuple(range(len(shape)))
    if kind == "mean":
        return emit("mean", losses, dims=dims)
    total = emit("sum", losses, dims=dims)
    if kind == "sum":
        return total
    return emit("div", total, count(emit, losses.type, (0,), losses.type.dtype))


def _expansion(elements: Elements) -> Callable[[Emit, Sequence[Operand], Attrs], Sequence[Val]]:
    def expand(emit: Emit, inputs: Sequence[Operand], attrs: Attrs) -> Sequence[Val]:
        dtype = val(inputs[0]).type.dtype
        wide = [up(emit, val(v)) for v in inputs]
        return (to(emit, _reduced(emit, elements(emit, wide, attrs), attrs), dtype),)

    return expand


def _mse(emit: Emit, v: Sequence[Val], attrs: Attrs) -> Val:
    return emit("square", emit("sub", v[0], v[1]))


def _l1(emit: Emit, v: Sequence[Val], attrs: Attrs) -> Val:
    return emit("abs", emit("sub", v[0], v[1]))


def _smooth_l1(emit: Emit, v: Sequence[Val], attrs: Attrs) -> Val:
    beta, d = attrs["beta"], emit("sub", v[0], v[1])
    size = emit("abs", d)
    if beta == 0:
        return size
    near = emit("mul", emit("square", d), 0.5 / beta)
    return emit("where", emit("lt", size, beta), near, emit("sub", size, 0.5 * beta))


def _huber(emit: Emit, v: Sequence[Val], attrs: Attrs) -> Val:
    delta, d = attrs["delta"], emit("sub", v[0], v[1])
    size = emit("abs", d)
    far = emit("mul", emit("sub", size, 0.5 * delta), delta)
    return emit("where", emit("le", size, delta), emit("mul", emit("square", d), 0.5), far)


def _bce_with_logits(emit: Emit, v: Sequence[Val], attrs: Attrs) -> Val:
    """(1 - t) x - logsigmoid(x)."""
    return emit("sub", emit("mul", emit("sub", 1.0, v[1]), v[0]), emit("logsigmoid", v[0]))


def _kl_div(emit: Emit, v: Sequence[Val], attrs: Attrs) -> Val:
    """t (log t - x), with 0 log 0 = 0; `log_target`: exp(t) (t - x)."""
    x, t = v
    if attrs["log_target"]:
        return emit("mul", emit("exp", t), emit("sub", t, x))
    zero = emit("eq", t, 0.0)
    entropy = emit("where", zero, 0.0, emit("mul", t, emit("log", emit("where", zero, 1.0, t))))
    return emit("sub", entropy, emit("mul", t, x))


def _poisson(emit: Emit, v: Sequence[Val], attrs: Attrs) -> Val:
    x, t = v
    if attrs["log_input"]:
        return emit("sub", emit("exp", x), emit("mul", t, x))
    return emit("sub", x, emit("mul", t, emit("log", emit("add", x, attrs["eps"]))))


def _gaussian(emit: Emit, v: Sequence[Val], attrs: Attrs) -> Val:
    """0.5 (log var + (x - t)^2 / var), var clamped from below behind autograd's back, as torch does."""
    x, t, var = v
    least = emit("add", emit("sub", var, emit("detach", var)), attrs["eps"])
    var = emit("where", emit("lt", var, attrs["eps"]), least, var)
    loss = emit("add", emit("log", var), emit("div", emit("square", emit("sub", x, t)), var))
    loss = emit("mul", loss, 0.5)
    return emit("add", loss, 0.5 * math.log(2.0 * math.pi)) if attrs["full"] else loss


def _cases(operands: int, attrs: Attrs, low: float, high: float) -> tuple[Sample, ...]:
    shapes: list[tuple[str, tuple[int, ...], str]] = [
        ("float32", (5, 7), "mean"),
        ("float32", (5, 7), "none"),
        ("float32", (2, 3, 33), "sum"),
        ("float32", (1,), "mean"),
        ("bfloat16", (5, 7), "mean"),
        ("float64", (5, 7), "sum"),
    ]
    return tuple(
        Sample((TensorType.of(d, s),) * operands, {**attrs, "reduction": r}, low, high) for d, s, r in shapes
    )


def _cost(operands: Types, outputs: Sequence[TensorType], attrs: Attrs) -> Dim:
    return numel(tensor(operands[0]).shape) * 4


def _reference(name: str, order: Sequence[str]) -> Callable[[Sequence[Any], Attrs], tuple[Any, ...]]:
    return lambda inputs, attrs: (getattr(functional, name)(*inputs, **{n: attrs[n] for n in order}),)


def loss(
    name: str, elements: Elements, *params: Attr, cases: Sequence[Attrs] = ({},), operands: int = 2,
    low: float = -2.0, high: float = 2.0, check: tuple[Callable[[Attrs], bool], str] | None = None,
    reduction: Attr = REDUCTION,
) -> OpDef:  # fmt: skip
    """A record whose reference is `torch.nn.functional.<name>`."""
    every = (*params, reduction)
    return OpDef(
        name=name,
        infer=_infer,
        reference=_reference(name, [p.name for p in every]),
        vjp=ByExpansion(),
        lowering=Composite(_expansion(elements)),
        samples=tuple(s for c in cases for s in _cases(operands, c, low, high)),
        arity=(operands, operands),
        params=every,
        resolve=demand(*check) if check else None,
        cost=_cost,
        doc=f"torch.nn.functional.{name}",
    )


OPS = (
    loss("mse_loss", _mse),
    loss("l1_loss", _l1),
    loss("smooth_l1_loss", _smooth_l1, Attr("beta", "float", 1.0), cases=({}, {"beta": 0.5}, {"beta": 0.0}),
         check=(lambda a: a["beta"] >= 0, "beta is not negative")),
    loss("huber_loss", _huber, Attr("delta", "float", 1.0), cases=({}, {"delta": 0.5}),
         check=(lambda a: a["delta"] > 0, "delta is positive")),
    loss("binary_cross_entropy_with_logits", _bce_with_logits, low=0.0, high=1.0),
    loss("kl_div", _kl_div, Attr("log_target", "bool", False), cases=({}, {"log_target": True}), low=0.1,
         reduction=BATCH),
    loss("poisson_nll_loss", _poisson, Attr("log_input", "bool", True), Attr("eps", "float", 1e-8),
         cases=({}, {"log_input": False}), low=0.1),
    loss("gaussian_nll_loss", _gaussian, Attr("full", "bool", False), Attr("eps", "float", 1e-6), operands=3,
         cases=({}, {"full": True}), low=0.2, check=(lambda a: a["eps"] > 0, "eps is positive")),
)  # fmt: skip
