"""Convolutions, pooling, resampling and losses."""

from __future__ import annotations

import math
from typing import Any

from tests.esper_ir.opinfo.structure import sizes
from tests.esper_ir.opinfo.table import Excluded, Rule, listed


def _batched(rank: int, rule: Rule) -> Rule:
    """One image is a batch of one."""

    def wrapped(b: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        if x.type.rank != rank + 1:
            return rule(b, x, *args, **kwargs)
        made = rule(b, b.op("unsqueeze", x, dim=0), *args, **kwargs)
        many = isinstance(made, tuple)
        out = tuple(b.op("reshape", v, shape=sizes(v)[1:]) for v in (made if many else (made,)))
        return out if many else out[0]

    return wrapped


def _padded(b: Any, x: Any, w: Any, padding: Any, dilation: tuple[int, ...]) -> tuple[Any, tuple[int, ...]]:
    """`padding` as numbers; uneven borders of "same" are added before."""
    rank = len(dilation)
    if not isinstance(padding, str):
        return x, listed(padding, rank)
    if padding == "valid":
        return x, (0,) * rank
    total = [d * (k - 1) for d, k in zip(dilation, sizes(w)[2:], strict=True)]
    before, after = [t // 2 for t in total], [t - t // 2 for t in total]
    if before == after:
        return x, tuple(before)
    return b.op("pad", x, before=[0, 0, *before], after=[0, 0, *after]), (0,) * rank


def _conv(rank: int) -> Rule:
    def rule(b: Any, x: Any, w: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
             groups: int = 1) -> Any:  # fmt: skip
        spread = listed(dilation, rank)
        if padding == "same" and set(listed(stride, rank)) != {1}:
            raise Excluded("the language has numbers for padding, not names")
        x, border = _padded(b, x, w, padding, spread)
        return b.op(f"conv{rank}d", x, w, *([] if bias is None else [bias]), stride=listed(stride, rank),
                    padding=border, dilation=spread, groups=groups)  # fmt: skip

    return _batched(rank, rule)


def _transposed(rank: int) -> Rule:
    def rule(b: Any, x: Any, w: Any, bias: Any = None, stride: Any = 1, padding: Any = 0,
             output_padding: Any = 0, groups: int = 1, dilation: Any = 1) -> Any:  # fmt: skip
        numbers = {
            "stride": stride,
            "padding": padding,
            "output_padding": output_padding,
            "dilation": dilation,
        }
        attrs = {k: listed(v, rank) for k, v in numbers.items()}
        return b.op(f"conv_transpose{rank}d", x, w, *([] if bias is None else [bias]), groups=groups, **attrs)

    return _batched(rank, rule)


def _line(b: Any, name: str, x: Any, attrs: dict[str, Any]) -> Any:
    """One axis as a picture of height 1."""
    made = b.op(name, b.op("unsqueeze", x, dim=2), **attrs)
    return tuple(b.op("squeeze", v, dims=[2]) for v in made)


def _max(rank: int) -> Rule:
    def rule(b: Any, x: Any, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1,
             ceil_mode: bool = False, return_indices: bool = False) -> Any:  # fmt: skip
        attrs: dict[str, Any] = {
            "kernel": listed(kernel_size, rank), "padding": listed(padding, rank),
            "dilation": listed(dilation, rank), "ceil_mode": ceil_mode,
        }  # fmt: skip
        if stride is not None and stride != ():
            attrs["stride"] = listed(stride, rank)
        if not return_indices:
            return b.op(f"max_pool{rank}d", x, **attrs)
        if rank == 1:
            flat = {"kernel": 1, "padding": 0, "dilation": 1, "stride": 1}
            attrs = {k: (flat[k], *v) if k in flat else v for k, v in attrs.items()}
            return _line(b, "max_pool2d_with_indices", x, attrs)
        return b.op(f"max_pool{rank}d_with_indices", x, **attrs)

    return _batched(rank, rule)


def _avg(rank: int) -> Rule:
    def rule(b: Any, x: Any, kernel_size: Any, stride: Any = None, padding: Any = 0, ceil_mode: bool = False,
             count_include_pad: bool = True, divisor_override: Any = None) -> Any:  # fmt: skip
        attrs: dict[str, Any] = {
            "kernel": listed(kernel_size, rank), "padding": listed(padding, rank), "ceil_mode": ceil_mode,
            "count_include_pad": count_include_pad,
        }  # fmt: skip
        if stride is not None and stride != ():
            attrs["stride"] = listed(stride, rank)
        if divisor_override is not None:
            attrs["divisor_override"] = divisor_override
        return b.op(f"avg_pool{rank}d", x, **attrs)

    return _batched(rank, rule)


def _adaptive(name: str, rank: int) -> Rule:
    def rule(b: Any, x: Any, output_size: Any, return_indices: bool = False) -> Any:
        wanted = [sizes(x)[i - rank] if n is None else n for i, n in enumerate(listed(output_size, rank))]
        full = f"adaptive_{name}_pool{rank}d"
        if not return_indices:
            return b.op(full, x, output_size=wanted)
        if rank == 1:
            return _line(b, "adaptive_max_pool2d_with_indices", x, {"output_size": [1, *wanted]})
        return b.op(f"{full}_with_indices", x, output_size=wanted)

    return _batched(rank, rule)


def _interpolate(b: Any, x: Any, size: Any = None, scale_factor: Any = None, mode: str = "nearest",
                 align_corners: Any = None, recompute_scale_factor: Any = None,
                 antialias: bool = False) -> Any:  # fmt: skip
    rank = x.type.rank - 2
    if mode == "area":
        raise Excluded(f"resampling by {mode}")
    more: dict[str, Any] = {"antialias": True} if antialias else {}
    if size is None:
        factors = listed(scale_factor, rank)
        wanted = [int(n * f) for n, f in zip(sizes(x)[2:], factors, strict=True)]
        exact = all(w == n * f for w, n, f in zip(wanted, sizes(x)[2:], factors, strict=True))
        if not recompute_scale_factor and not exact:
            if len(set(factors)) > 1:
                raise Excluded("factors that differ and are not the quotients of the sizes")
            more["scale"] = float(factors[0])
    else:
        wanted = list(listed(size, rank))
    if mode.startswith("nearest"):
        return b.op("interpolate", x, size=wanted, mode=mode, **more)
    kind = "cubic" if mode == "bicubic" else "linear"
    return b.op("interpolate", x, size=wanted, mode=kind, align_corners=bool(align_corners), **more)


def _upsample_nearest(b: Any, x: Any, size: Any = None, scale_factor: Any = None) -> Any:
    return _interpolate(b, x, size, scale_factor)


def _upsample_bilinear(b: Any, x: Any, size: Any = None, scale_factor: Any = None) -> Any:
    return _interpolate(b, x, size, scale_factor, "bilinear", True)


def _unfold(b: Any, x: Any, kernel_size: Any, dilation: Any = 1, padding: Any = 0, stride: Any = 1) -> Any:
    numbers = {"kernel": kernel_size, "dilation": dilation, "padding": padding, "stride": stride}
    return b.op("unfold", x, **{k: listed(v, 2) for k, v in numbers.items()})


# Losses.


def _wide(b: Any, x: Any, other: Any) -> tuple[Any, Any]:
    """Both with the shape that they broadcast to: the difference has it."""
    if x.type.shape == other.type.shape:
        return x, other
    shape = sizes(b.op("sub", x, other))
    return tuple(b.op("expand", v, shape=shape) for v in (x, other))  # type: ignore[return-value]


def _reduction(size_average: Any, reduce: Any, reduction: str) -> str:
    if size_average is None and reduce is None:
        return reduction
    if reduce is False:
        return "none"
    return "mean" if size_average in (None, True) else "sum"


def _loss(name: str, *params: str, wide: bool = True) -> Rule:
    def rule(b: Any, x: Any, y: Any, *args: Any, size_average: Any = None, reduce: Any = None,
             reduction: str = "mean", **kwargs: Any) -> Any:  # fmt: skip
        if kwargs.get("weight") is not None or kwargs.get("pos_weight") is not None:
            return _weighted(b, name, x, y, reduction, kwargs)
        attrs = {k: float(v) if k in FLOATS else v for k, v in zip(params, args, strict=False)}
        attrs |= {k: float(v) if k in FLOATS else v for k, v in kwargs.items() if v is not None}
        pair = _wide(b, x, y) if wide else (x, y)
        return b.op(name, *pair, reduction=_reduction(size_average, reduce, reduction), **attrs)

    return rule


FLOATS = ("beta", "delta", "margin", "eps", "p")


def _weighted(b: Any, name: str, x: Any, y: Any, reduction: str, kwargs: dict[str, Any]) -> Any:
    """Per element first, then the weight; `pos_weight` scales the part of the positive target."""
    weight, positive = kwargs.get("weight"), kwargs.get("pos_weight")
    if positive is None:
        loss = b.op(name, x, y, reduction="none")
    else:
        near = b.op("mul", b.op("mul", positive, y), b.op("logsigmoid", x))
        far = b.op("mul", b.op("sub", 1.0, y), b.op("logsigmoid", b.op("neg", x)))
        loss = b.op("neg", b.op("add", near, far))
    if weight is not None:
        loss = b.op("mul", loss, weight)
    return loss if reduction == "none" else b.op(reduction, loss)


def _bce(b: Any, x: Any, y: Any, weight: Any = None, reduction: str = "mean", **kwargs: Any) -> Any:
    given = (x, y) if weight is None else (x, y, weight)
    return b.op("binary_cross_entropy", *given, reduction=reduction)


def _class_loss(name: str) -> Rule:
    def rule(b: Any, x: Any, y: Any, weight: Any = None, ignore_index: int = -100, reduction: str = "mean",
             label_smoothing: float = 0.0, **kwargs: Any) -> Any:  # fmt: skip
        if y.type.dtype.is_floating:
            return _shares(b, x, y, weight, reduction, label_smoothing)
        extra = {"label_smoothing": label_smoothing} if name == "cross_entropy" else {}
        return b.op(name, x, y, *([] if weight is None else [weight]), ignore_index=ignore_index,
                    reduction=reduction, **extra)  # fmt: skip

    return rule


def _shares(b: Any, x: Any, y: Any, weight: Any, reduction: str, smooth: float) -> Any:
    """Cross entropy of probabilities: the mean is over positions, whatever the weights."""
    at = 1 if x.type.rank > 1 else 0
    if smooth:
        y = b.op("add", b.op("mul", y, 1.0 - smooth), smooth / sizes(x)[at])
    rows = b.op("mul", b.op("log_softmax", x, dim=at), y)
    if weight is not None:
        rows = b.op("mul", rows, b.op("reshape", weight, shape=[-1, *[1] * (x.type.rank - at - 1)]))
    loss = b.op("neg", b.op("sum", rows, dims=[at]))
    return loss if reduction == "none" else b.op(reduction, loss)


def _kl(b: Any, x: Any, y: Any, size_average: Any = None, reduce: Any = None, reduction: str = "mean",
        log_target: bool = False) -> Any:  # fmt: skip
    pair = _wide(b, x, y)
    return b.op("kl_div", *pair, reduction=reduction, log_target=log_target)


def _poisson(b: Any, x: Any, y: Any, log_input: bool = True, full: bool = False, size_average: Any = None,
             eps: float = 1e-8, reduce: Any = None, reduction: str = "mean") -> Any:  # fmt: skip
    pair = _wide(b, x, y)
    if not full:
        return b.op("poisson_nll_loss", *pair, log_input=log_input, eps=eps, reduction=reduction)
    loss = b.op("poisson_nll_loss", *pair, log_input=log_input, eps=eps, reduction="none")
    t = pair[1]
    tail = b.op("mul", b.op("log", b.op("mul", t, 2 * math.pi)), 0.5)
    stirling = b.op("add", b.op("sub", b.op("mul", t, b.op("log", t)), t), tail)
    loss = b.op("add", loss, b.op("where", b.op("gt", t, 1.0), stirling, 0.0))
    return loss if reduction == "none" else b.op(reduction, loss)


def _gaussian(b: Any, x: Any, y: Any, var: Any, full: bool = False, eps: float = 1e-6,
              reduction: str = "mean") -> Any:  # fmt: skip
    x, y = _wide(b, x, y)
    if not hasattr(var, "type"):
        var = b.op("full", shape=sizes(x), value=float(var), dtype=x.type.dtype.value)
    elif var.type.rank == x.type.rank - 1:
        var = b.op("unsqueeze", var, dim=x.type.rank - 1)
    if sizes(var) != sizes(x):
        var = b.op("expand", var, shape=sizes(x))
    return b.op("gaussian_nll_loss", x, y, var, full=full, eps=eps, reduction=reduction)


def _margin(name: str) -> Rule:
    def rule(b: Any, *operands: Any, size_average: Any = None, reduce: Any = None, **kwargs: Any) -> Any:
        tensors = [o for o in operands if hasattr(o, "type")]
        if len(tensors) != len(operands):
            kwargs = {"margin": next(o for o in operands if not hasattr(o, "type")), **kwargs}
        attrs = {k: float(v) if k in FLOATS else v for k, v in kwargs.items()}
        return b.op(name, *tensors, **attrs)

    return rule


def _cosine(b: Any, x: Any, y: Any, dim: int = 1, eps: float = 1e-8) -> Any:
    return b.op("cosine_similarity", x, y, dim=dim, eps=eps)


def _distance(b: Any, x: Any, y: Any, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False) -> Any:
    return b.op("pairwise_distance", x, y, p=float(p), eps=eps, keepdim=keepdim)


def _power(rank: int) -> Rule:
    def rule(
        b: Any, x: Any, norm_type: Any, kernel_size: Any, stride: Any = None, ceil_mode: bool = False
    ) -> Any:
        extra = {} if stride is None else {"stride": listed(stride, rank)}
        return b.op(f"lp_pool{rank}d", x, p=float(norm_type), kernel=listed(kernel_size, rank),
                    ceil_mode=ceil_mode, **extra)  # fmt: skip

    return _batched(rank, rule)


LOSSES: dict[str, Rule] = {
    "mse_loss": _loss("mse_loss"), "l1_loss": _loss("l1_loss"),
    "smooth_l1_loss": _loss("smooth_l1_loss", "beta"), "huber_loss": _loss("huber_loss", "delta"),
    "binary_cross_entropy_with_logits": _loss("binary_cross_entropy_with_logits"),
    "soft_margin_loss": _loss("soft_margin_loss"), "binary_cross_entropy": _bce,
    "cross_entropy": _class_loss("cross_entropy"), "nll_loss": _class_loss("nll_loss"), "kl_div": _kl,
    "poisson_nll_loss": _poisson, "gaussian_nll_loss": _gaussian,
    **{n: _margin(n) for n in ("hinge_embedding_loss", "margin_ranking_loss", "cosine_embedding_loss",
                               "triplet_margin_loss")},
    "cosine_similarity": _cosine, "pairwise_distance": _distance,
}  # fmt: skip
IMAGES: dict[str, Rule] = {
    **{f"nn.functional.conv{n}d": _conv(n) for n in (1, 2, 3)},
    **{f"nn.functional.conv_transpose{n}d": _transposed(n) for n in (1, 2, 3)},
    **{f"nn.functional.max_pool{n}d": _max(n) for n in (1, 2, 3)},
    **{f"nn.functional.avg_pool{n}d": _avg(n) for n in (1, 2, 3)},
    **{f"nn.functional.lp_pool{n}d": _power(n) for n in (1, 2, 3)},
    **{f"nn.functional.adaptive_{k}_pool{n}d": _adaptive(k, n) for n in (1, 2, 3) for k in ("avg", "max")},
    **{
        f"nn.functional.interpolate.{m}": _interpolate
        for m in ("nearest", "nearest-exact", "linear", "bilinear", "trilinear", "bicubic")
    },
    "nn.functional.unfold": _batched(2, _unfold),
    "nn.functional.upsample_nearest": _upsample_nearest,
    "nn.functional.upsample_bilinear": _upsample_bilinear,
    **{f"nn.functional.{n}": r for n, r in LOSSES.items()},
}  # fmt: skip
