"""Losses: whole where the language has them, torch's own reductions otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from esper_ir.builder import Value
from esper_ir.importers.context import Context, Rule, each
from esper_ir.types import Dim, DType

KINDS = ("none", "mean", "sum")
ONE = Dim.of(1)


def _pair(op: str) -> Callable[..., Value]:
    return lambda b, x, target, reduction=1: b.op(op, *_alike(b, x, target), reduction=KINDS[reduction])


def _alike(b: Context, x: Value, target: Value) -> tuple[Value, Value]:
    """One type, as the records ask for: the wider one, and one shape."""
    wide = x.type.dtype if x.type.dtype is target.type.dtype else b.op("add", x, target).type.dtype
    x, target = b.cast(x, wide), b.cast(target, wide)
    if x.type.shape == target.type.shape:
        return x, target
    shape = b.op("add", x, target).type.shape
    wide_x, wide_target = (
        v if v.type.shape == shape else b.op("expand", v, shape=shape) for v in (x, target)
    )
    return wide_x, wide_target


def _smooth_l1(b: Context, x: Value, target: Value, reduction: int = 1, beta: float = 1.0) -> Value:
    return b.op("smooth_l1_loss", *_alike(b, x, target), reduction=KINDS[reduction], beta=float(beta))


def _huber(b: Context, x: Value, target: Value, reduction: int = 1, delta: float = 1.0) -> Value:
    return b.op("huber_loss", *_alike(b, x, target), reduction=KINDS[reduction], delta=float(delta))


def _kl_div(b: Context, x: Value, target: Value, reduction: int = 1, *, log_target: bool = False) -> Value:
    return b.op("kl_div", *_alike(b, x, target), reduction=KINDS[reduction], log_target=log_target)


def _poisson(
    b: Context, x: Value, target: Value, log_input: bool, full: bool, eps: float, reduction: int
) -> Value:
    """`full` adds Stirling's approximation of log t! where t is above 1."""
    plain = _alike(b, x, target)
    if not full:
        return b.op("poisson_nll_loss", *plain, log_input=log_input, eps=eps, reduction=KINDS[reduction])
    loss = b.op("poisson_nll_loss", *plain, log_input=log_input, eps=eps, reduction="none")
    t = plain[1]
    above = b.op("gt", t, 1.0)
    safe = b.op("where", above, t, 1.0)
    stirling = b.op("add", b.op("sub", b.op("mul", safe, b.op("log", safe)), safe),
                    b.op("mul", b.op("log", b.op("mul", safe, 6.283185307179586)), 0.5))  # fmt: skip
    return _reduced(b, b.op("add", loss, b.op("where", above, stirling, 0.0)), reduction)


def _reduced(b: Context, loss: Value, reduction: int) -> Value:
    return loss if reduction == 0 else b.op("mean" if reduction == 1 else "sum", loss)


def _bce(b: Context, x: Value, target: Value, weight: Value | None = None, reduction: int = 1) -> Value:
    """-(t log x + (1 - t) log(1 - x)), logarithms not below -100 as in torch."""
    if weight is None:
        return b.op("binary_cross_entropy", *_alike(b, x, target), reduction=KINDS[reduction])
    logs = [b.op("clamp", b.op("log", v), min=-100.0) for v in (x, b.op("sub", 1.0, x))]
    loss = b.op("sub", b.op("mul", b.op("sub", target, 1.0), logs[1]), b.op("mul", target, logs[0]))
    return _reduced(b, b.op("mul", loss, weight), reduction)


def _bce_with_logits(
    b: Context,
    x: Value,
    target: Value,
    weight: Value | None = None,
    pos_weight: Value | None = None,
    reduction: int = 1,
) -> Value:
    """(1 - t) x - (1 + (p - 1) t) logsigmoid(x)."""
    if weight is None and pos_weight is None:
        pair = _alike(b, x, target)
        return b.op("binary_cross_entropy_with_logits", *pair, reduction=KINDS[reduction])
    soft = b.op("logsigmoid", x)
    if pos_weight is not None:
        soft = b.op("mul", soft, b.op("add", b.op("mul", b.op("sub", pos_weight, 1.0), target), 1.0))
    loss = b.op("sub", b.op("mul", b.op("sub", 1.0, target), x), soft)
    return _reduced(b, loss if weight is None else b.op("mul", loss, weight), reduction)


def _cross_entropy(
    b: Context,
    x: Value,
    target: Value,
    weight: Value | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Value:
    if target.type.dtype.is_floating:
        return _soft_cross_entropy(b, x, target, weight, reduction, label_smoothing)
    target = target if target.type.dtype in (DType.int64, DType.int32) else b.cast(target, DType.int64)
    operands = (x, target) if weight is None else (x, target, weight)
    attrs = {
        "reduction": KINDS[reduction],
        "ignore_index": ignore_index,
        "label_smoothing": float(label_smoothing),
    }
    return b.op("cross_entropy", *operands, **attrs)


def _soft_cross_entropy(
    b: Context, x: Value, target: Value, weight: Value | None, reduction: int, smoothing: float
) -> Value:
    """Targets that are probabilities; a mean is over the positions, not over the classes."""
    at = 1 if x.type.rank > 1 else 0
    classes = x.type.shape[at]
    if smoothing:
        even = (
            b.op("div", smoothing, b.size(classes)) if classes.static is None else smoothing / classes.static
        )
        target = b.op("add", b.op("mul", target, 1.0 - smoothing), even)
    each_class = b.op("mul", b.op("log_softmax", x, dim=at), target)
    if weight is not None:
        each_class = b.op("mul", each_class, b.reshape(weight, (classes, *[ONE] * (x.type.rank - 1 - at))))
    loss = b.op("neg", b.op("sum", each_class, dims=(at,)))
    return _reduced(b, loss, reduction) if loss.type.rank else loss


def _nll(
    b: Context,
    x: Value,
    target: Value,
    weight: Value | None = None,
    reduction: int = 1,
    ignore_index: Any = -100,
) -> Value:
    operands = (x, target) if weight is None else (x, target, weight)
    return b.op("nll_loss", *operands, reduction=KINDS[reduction], ignore_index=ignore_index)


def _similarity(b: Context, x: Value, y: Value, dim: int = 1, eps: float = 1e-8) -> Value:
    return b.op("cosine_similarity", *_alike(b, x, y), dim=dim, eps=eps)


def _distance(
    b: Context, x: Value, y: Value, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False
) -> Value:
    return b.op("pairwise_distance", *_alike(b, x, y), p=float(p), eps=eps, keepdim=keepdim)


def _triplet(
    b: Context,
    anchor: Value,
    positive: Value,
    negative: Value,
    margin: float = 1.0,
    p: float = 2.0,
    eps: float = 1e-6,
    swap: bool = False,
    reduction: int = 1,
) -> Value:
    attrs = {"margin": float(margin), "p": float(p), "eps": eps, "swap": swap, "reduction": KINDS[reduction]}
    return b.op("triplet_margin_loss", anchor, positive, negative, **attrs)


def _margin(op: str, default: float) -> Callable[..., Value]:
    def convert(b: Context, *operands: Value, **attrs: Any) -> Value:
        """The last two arguments of the schema are the margin and the reduction."""
        tensors = [o for o in operands if isinstance(o, Value)]
        rest = [o for o in operands if not isinstance(o, Value)]
        margin, reduction = (*rest, *[default, 1][len(rest) :])
        return b.op(op, *tensors, margin=float(margin), reduction=KINDS[int(reduction)])

    return convert


RULES: tuple[Rule, ...] = (
    *each(_pair("mse_loss"), "mse_loss.default"), *each(_pair("l1_loss"), "l1_loss.default"),
    *each(_smooth_l1, "smooth_l1_loss.default"), *each(_huber, "huber_loss.default"),
    *each(_kl_div, "kl_div.default"), *each(_poisson, "poisson_nll_loss.default"),
    *each(_bce, "binary_cross_entropy.default"),
    *each(_bce_with_logits, "binary_cross_entropy_with_logits.default"),
    *each(_cross_entropy, "cross_entropy_loss.default"),
    *each(_pair("soft_margin_loss"), "soft_margin_loss.default"),
    *each(_similarity, "cosine_similarity.default"), *each(_distance, "pairwise_distance.default"),
    *each(_triplet, "triplet_margin_loss.default"),
    *each(_margin("hinge_embedding_loss", 1.0), "hinge_embedding_loss.default"),
    *each(_margin("margin_ranking_loss", 0.0), "margin_ranking_loss.default"),
    *each(_margin("cosine_embedding_loss", 0.0), "cosine_embedding_loss.default"),
    *each(_nll, "nll_loss.default", "nll_loss2d.default", "nll_loss_nd.default"),
)  # fmt: skip
