"""Activations: pointwise bodies, so that they fuse, each rounded once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from esper_ir.lazy import functional as F
from esper_ir.opdef import Attr, Attrs, OpDef
from esper_ir.ops.gradients import Derivatives
from esper_ir.ops.pointwise import unary
from esper_ir.scalar import Arg, Expr, prim

X, Y = Arg(0), Arg(1)
Body = Callable[[Attrs], Expr]


def _where(condition: Expr, a: Expr | float, b: Expr | float) -> Expr:
    return prim("where", condition, a, b)


def _gelu(attrs: Attrs) -> Expr:
    """x Phi(x), with Phi by erf or by the tanh fit of Hendrycks and Gimpel."""
    return prim("mul", X, _phi(attrs))


def _phi(attrs: Attrs) -> Expr:
    if attrs["approximate"] == "none":
        return prim("mul", 0.5, prim("add", 1.0, prim("erf", prim("mul", X, math.sqrt(0.5)))))
    # (1 + tanh u) / 2 is the logistic function of 2u, which keeps its relative precision where tanh nears -1.
    cube = prim("mul", prim("mul", X, X), X)
    return prim(
        "sigmoid", prim("mul", 2.0 * math.sqrt(2.0 / math.pi), prim("add", X, prim("mul", 0.044715, cube)))
    )


def _gelu_derivative(attrs: Attrs) -> tuple[Expr]:
    """Phi(x) + x Phi'(x)."""
    if attrs["approximate"] == "none":
        density = prim(
            "mul", prim("exp", prim("mul", prim("mul", X, X), -0.5)), 1.0 / math.sqrt(2.0 * math.pi)
        )
        return (prim("add", _phi(attrs), prim("mul", X, density)),)
    s = _phi(attrs)
    slope = prim(
        "mul", 2.0 * math.sqrt(2.0 / math.pi), prim("add", 1.0, prim("mul", 3 * 0.044715, prim("mul", X, X)))
    )
    return (prim("add", s, prim("mul", X, prim("mul", prim("mul", s, prim("sub", 1.0, s)), slope))),)


def _silu_derivative(attrs: Attrs) -> tuple[Expr]:
    """s (1 + x (1 - s))."""
    s = prim("sigmoid", X)
    return (prim("mul", s, prim("add", 1.0, prim("mul", X, prim("sub", 1.0, s)))),)


def _softplus(attrs: Attrs) -> Expr:
    beta, threshold = attrs["beta"], attrs["threshold"]
    scaled = prim("mul", X, beta)
    soft = prim("div", prim("log1p", prim("exp", scaled)), beta)
    return _where(prim("gt", scaled, threshold), X, soft)


def _softplus_derivative(attrs: Attrs) -> tuple[Expr]:
    scaled = prim("mul", X, attrs["beta"])
    return (_where(prim("gt", scaled, attrs["threshold"]), 1.0, prim("sigmoid", scaled)),)


def _log_sigmoid(attrs: Attrs) -> Expr:
    """min(x, 0) - log1p(exp(-|x|)): no overflow on either side."""
    tail = prim("log1p", prim("exp", prim("neg", prim("abs", X))))
    return prim("sub", prim("minimum", X, 0.0), tail)


def _tanh_softplus() -> Expr:
    """tanh(log(1 + exp(x))) with e = exp(-|x|) as the only exponential: (1 + 2e) / (1 + 2e + 2e^2) from 0 on,
    e (e + 2) / (e (e + 2) + 2) below. Neither overflows or cancels."""
    e, up = prim("exp", prim("neg", prim("abs", X))), prim("ge", X, 0.0)
    above = prim("add", 1.0, prim("mul", 2.0, e))
    n = _where(up, above, prim("mul", e, prim("add", e, 2.0)))
    return prim("div", n, prim("add", n, _where(up, prim("mul", 2.0, prim("mul", e, e)), 2.0)))


def _mish(attrs: Attrs) -> Expr:
    return prim("mul", X, _tanh_softplus())


def _mish_derivative(attrs: Attrs) -> tuple[Expr]:
    t = _tanh_softplus()
    slope = prim("mul", prim("sigmoid", X), prim("sub", 1.0, prim("mul", t, t)))
    return (prim("add", t, prim("mul", X, slope)),)


def _elu_like(scale: float, alpha: float, rate: float) -> tuple[Expr, tuple[Expr]]:
    """scale * (alpha * expm1(rate * x) where x <= 0, else x), and its derivative."""
    below = prim("mul", scale * alpha, prim("expm1", prim("mul", X, rate)))
    above: Expr = X if scale == 1.0 else prim("mul", X, scale)
    slope = prim("mul", scale * alpha * rate, prim("exp", prim("mul", X, rate)))
    negative = prim("le", X, 0.0)
    return _where(negative, below, above), (_where(negative, slope, scale),)


SELU = _elu_like(1.0507009873554804934193349852946, 1.6732632423543772848170429916717, 1.0)


def _relu6(attrs: Attrs) -> Expr:
    return prim("minimum", prim("maximum", X, 0.0), 6.0)


def _inside(low: float, high: float) -> Expr:
    """torch's hardtanh family gives no gradient at the bounds."""
    return prim("or", prim("le", X, low), prim("ge", X, high))


def _hardsigmoid(attrs: Attrs) -> Expr:
    return prim("div", prim("minimum", prim("maximum", prim("add", X, 3.0), 0.0), 6.0), 6.0)


def _hardswish(attrs: Attrs) -> Expr:
    return prim("div", prim("mul", X, prim("minimum", prim("maximum", prim("add", X, 3.0), 0.0), 6.0)), 6.0)


def _hardswish_derivative(attrs: Attrs) -> tuple[Expr]:
    middle = prim("add", prim("div", X, 3.0), 0.5)
    return (_where(prim("le", X, -3.0), 0.0, _where(prim("lt", X, 3.0), middle, 1.0)),)


def _shrink(attrs: Attrs, soft: bool) -> Expr:
    c = attrs["lambd"]
    high: Expr = prim("sub", X, c) if soft else X
    low: Expr = prim("add", X, c) if soft else X
    kept = _where(prim("gt", X, c), high, _where(prim("lt", X, -c), low, prim("mul", X, 0.0)))
    return kept if soft else _where(prim("isnan", X), X, kept)


def _shrink_derivative(attrs: Attrs) -> tuple[Expr]:
    c = attrs["lambd"]
    return (_where(prim("and", prim("ge", X, -c), prim("le", X, c)), 0.0, 1.0),)


def _softsign(attrs: Attrs) -> Expr:
    return prim("div", X, prim("add", 1.0, prim("abs", X)))


def _softsign_derivative(attrs: Attrs) -> tuple[Expr]:
    d = prim("add", 1.0, prim("abs", X))
    return (prim("div", 1.0, prim("mul", d, d)),)


def _threshold(attrs: Attrs) -> Expr:
    return _where(prim("le", X, attrs["threshold"]), attrs["value"], X)


def activation(
    name: str,
    body: Body,
    derivatives: Derivatives | None,
    params: tuple[Attr, ...] = (),
    cases: Sequence[Attrs] = ({},),
    check: tuple[Callable[[Attrs], bool], str] | None = None,
) -> OpDef:
    """A record whose reference is `torch.nn.functional.<name>` with the attributes by name."""

    def reference(inputs: Sequence[Any], attrs: Attrs) -> tuple[Any, ...]:
        return (getattr(F, name)(inputs[0], **{p.name: attrs[p.name] for p in params}),)

    return unary(
        name, body, out="same", accepts="float", low=-4.0, high=4.0, derivatives=derivatives, params=params,
        cases=cases, reference=reference, check=check, doc=f"torch.nn.functional.{name}",
    )  # fmt: skip


def number(name: str, default: float) -> Attr:
    return Attr(name, "float", default)


OPS = (
    # From the result, which is kept anyway by whoever reads it: it is positive where the operand is.
    activation("relu", lambda a: prim("maximum", X, 0.0),
               lambda a: (_where(prim("le", Y, 0.0), 0.0, 1.0),)),
    activation("gelu", _gelu, _gelu_derivative,
               (Attr("approximate", "str", "none", ("none", "tanh"), "erf, or its tanh approximation"),),
               ({"approximate": "none"}, {"approximate": "tanh"})),
    activation("silu", lambda a: prim("mul", X, prim("sigmoid", X)), _silu_derivative),
    activation("leaky_relu", lambda a: _where(prim("gt", X, 0.0), X, prim("mul", X, a["negative_slope"])),
               lambda a: (_where(prim("gt", X, 0.0), 1.0, a["negative_slope"]),),
               (number("negative_slope", 0.01),), ({}, {"negative_slope": 0.3})),
    activation("elu", lambda a: _elu_like(1.0, a["alpha"], 1.0)[0],
               lambda a: _elu_like(1.0, a["alpha"], 1.0)[1],
               (number("alpha", 1.0),), ({}, {"alpha": 0.7})),
    activation("celu", lambda a: _elu_like(1.0, a["alpha"], 1.0 / a["alpha"])[0],
               lambda a: _elu_like(1.0, a["alpha"], 1.0 / a["alpha"])[1],
               (number("alpha", 1.0),), ({}, {"alpha": 0.7}), (lambda a: a["alpha"] != 0, "alpha is not 0")),
    activation("selu", lambda a: SELU[0], lambda a: SELU[1]),
    activation("softplus", _softplus, _softplus_derivative,
               (number("beta", 1.0), number("threshold", 20.0)), ({}, {"beta": 2.0, "threshold": 3.0})),
    activation("mish", _mish, _mish_derivative),
    activation("logsigmoid", _log_sigmoid, lambda a: (prim("sigmoid", prim("neg", X)),)),
    activation("relu6", _relu6, lambda a: (_where(_inside(0.0, 6.0), 0.0, 1.0),)),
    activation("hardtanh", lambda a: prim("minimum", prim("maximum", X, a["min_val"]), a["max_val"]),
               lambda a: (_where(_inside(a["min_val"], a["max_val"]), 0.0, 1.0),),
               (number("min_val", -1.0), number("max_val", 1.0)), ({}, {"min_val": -0.5, "max_val": 2.0}),
               (lambda a: a["min_val"] <= a["max_val"], "min_val is at most max_val")),
    activation("hardsigmoid", _hardsigmoid,
               lambda a: (_where(prim("and", prim("gt", X, -3.0), prim("lt", X, 3.0)), 1.0 / 6.0, 0.0),)),
    activation("hardswish", _hardswish, _hardswish_derivative),
    activation("softsign", _softsign, _softsign_derivative),
    activation("tanhshrink", lambda a: prim("sub", X, prim("tanh", X)),
               lambda a: (prim("mul", prim("tanh", X), prim("tanh", X)),)),
    activation("softshrink", lambda a: _shrink(a, True), _shrink_derivative,
               (number("lambd", 0.5),), ({}, {"lambd": 1.0}),
               (lambda a: a["lambd"] >= 0, "lambd is not negative")),
    activation("hardshrink", lambda a: _shrink(a, False), _shrink_derivative,
               (number("lambd", 0.5),), ({}, {"lambd": 1.0})),
    activation("threshold", _threshold, lambda a: (_where(prim("le", X, a["threshold"]), 0.0, 1.0),),
               (Attr("threshold", "float"), Attr("value", "float")), ({"threshold": 0.1, "value": 0.25},)),
)  # fmt: skip
