"""Normalisation, dropout, pooling and resampling."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from esper_ir.builder import Value
from esper_ir.importers.aten.contraction import _batched, _numbers
from esper_ir.importers.context import Context, Rule, Scalar, each, static, unsupported
from esper_ir.ops.batch import statistics
from esper_ir.ops.reduction import count as counted
from esper_ir.types import Dim

ONE = Dim.of(1)


def _affine(
    b: Context,
    op: str,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    shape: Sequence[Scalar],
    **attrs: Any,
) -> Value:
    """(x, weight, bias); a bias alone gets a weight of ones."""
    if weight is None and bias is not None:
        weight = b.full(tuple(shape), 1.0, bias.type.dtype)
    return b.op(op, *(v for v in (x, weight, bias) if v is not None), **attrs)


def _layer_norm(
    b: Context,
    x: Value,
    normalized_shape: Sequence[Scalar],
    weight: Value | None = None,
    bias: Value | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Value:
    sizes = tuple(normalized_shape)
    return _affine(b, "layer_norm", x, weight, bias, sizes, normalized_shape=sizes, eps=eps)


def _native_layer_norm(
    b: Context,
    x: Value,
    normalized_shape: Sequence[Scalar],
    weight: Value | None,
    bias: Value | None,
    eps: float,
) -> tuple[Value | None, ...]:
    return _layer_norm(b, x, normalized_shape, weight, bias, eps), None, None


def _rms_norm(
    b: Context,
    x: Value,
    normalized_shape: Sequence[Scalar],
    weight: Value | None = None,
    eps: float | None = None,
) -> Value:
    return _affine(b, "rms_norm", x, weight, None, (), normalized_shape=tuple(normalized_shape), eps=eps)


def _fused_rms_norm(
    b: Context, x: Value, normalized_shape: Sequence[Scalar], weight: Value | None, eps: float | None
) -> tuple[Value | None, ...]:
    return _rms_norm(b, x, normalized_shape, weight, eps), None


def _group_norm(
    b: Context,
    x: Value,
    num_groups: int,
    weight: Value | None = None,
    bias: Value | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Value:
    return _affine(b, "group_norm", x, weight, bias, x.type.shape[1:2], num_groups=num_groups, eps=eps)


def _native_group_norm(
    b: Context,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    n: Any,
    c: Any,
    hw: Any,
    group: int,
    eps: float,
) -> tuple[Value | None, ...]:
    return _group_norm(b, x, group, weight, bias, eps), None, None


def _instance_norm(
    b: Context,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    running_mean: Value | None,
    running_var: Value | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Value:
    if not use_input_stats:
        return _evaluated(b, x, weight, bias, running_mean, running_var, eps)
    if running_mean is not None and running_var is not None:
        axes = tuple(range(2, x.type.rank))
        wide = b.cast(x, x.type.dtype.compute)
        for held, op, more in ((running_mean, "mean", {}), (running_var, "var", {"correction": 1})):
            b.update(held, lambda h=held, o=op, m=more: _running(
                b, h, b.op("mean", b.op(o, wide, dims=axes, **m), dims=(0,)), momentum))  # fmt: skip
    return _affine(b, "instance_norm", x, weight, bias, x.type.shape[1:2], eps=eps)


def _evaluated(
    b: Context,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    mean: Value | None,
    variance: Value | None,
    eps: float,
) -> Value:
    assert mean is not None and variance is not None
    if weight is None and bias is not None:
        weight = b.full(bias.type.shape, 1.0, bias.type.dtype)
    operands = [v for v in (x, mean, variance, weight, bias) if v is not None]
    return b.op("batch_norm", *operands, training=False, eps=eps)


def _batch_norm(
    b: Context,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    mean: Value | None,
    variance: Value | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool = True,
) -> Value:
    """In training by the statistics of the batch; the running ones are updated beside it."""
    if not training:
        return _evaluated(b, x, weight, bias, mean, variance, eps)
    count = ONE
    for size in (*x.type.shape[:1], *x.type.shape[2:]):
        count = count * size
    b.builder.at_least(count, 2)  # torch refuses one value per channel: it has no variance
    made = _affine(b, "batch_norm", x, weight, bias, x.type.shape[1:2], training=True, eps=eps)
    for held, found in zip((mean, variance), _statistics(b, x), strict=True):
        if held is not None:
            b.update(held, lambda held=held, found=found: _running(b, held, found, momentum))
    return made


def _statistics(b: Context, x: Value) -> tuple[Value, Value]:
    """Mean and unbiased variance per channel, written as `batch_norm` expands: computed once."""
    emit: Any = b.op  # values of the builder have what those of operator records have
    image: Any = x
    found: Any = statistics(emit, image, 1)
    mean, variance = found
    size: Any = counted(emit, x.type, [i for i in range(x.type.rank) if i != 1], variance.type.dtype)
    channels = x.type.shape[1:2]
    less = max(size - 1.0, 0.0) if isinstance(size, float) else b.op("sub", size, 1.0)
    unbiased = b.op("div", b.op("mul", b.reshape(variance, channels), size), less)
    return b.reshape(mean, channels), unbiased


def _running(b: Context, held: Value, found: Value, momentum: float) -> Value:
    """(1 - momentum) held + momentum found."""
    part = b.op("mul", b.cast(found, held.type.dtype), momentum)
    return b.op("add", b.op("mul", held, 1.0 - momentum), part)


def _functional_batch_norm(
    b: Context,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    mean: Value,
    variance: Value,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    """The form after functionalisation: also the new running statistics."""
    if not training:
        return _evaluated(b, x, weight, bias, mean, variance, eps), None, None, mean, variance
    made = _batch_norm(b, x, weight, bias, None, None, True, momentum, eps)
    found = zip((mean, variance), _statistics(b, x), strict=True)
    new = (_running(b, held, value, momentum) for held, value in found)
    return (made, None, None, *new)


def _plain_batch_norm(
    b: Context,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    return _batch_norm(b, x, weight, bias, None, None, True, momentum, eps), None, None


def _eval_batch_norm(
    b: Context,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    mean: Value,
    variance: Value,
    momentum: float,
    eps: float,
) -> Any:
    return _evaluated(b, x, weight, bias, mean, variance, eps), None, None


# Dropout: the identity unless something is dropped.


def _dropout(b: Context, x: Value, p: float, train: bool | None) -> Value:
    if train is False or p == 0:
        return x
    seed, place = b.drawn()
    return b.op("dropout", x, seed, p=float(p), offset=place)


def _native_dropout(b: Context, x: Value, p: float, train: bool | None) -> tuple[Value | None, ...]:
    return _dropout(b, x, p, train), None


def _feature_dropout(b: Context, x: Value, p: float, train: bool) -> Value:
    """Whole channels."""
    if not train or p == 0:
        return x
    seed, place = b.drawn()
    ones = b.full((*x.type.shape[:2], *[ONE] * (x.type.rank - 2)), 1.0, x.type.dtype)
    return b.op("mul", x, b.op("dropout", ones, seed, p=float(p), offset=place))


def _alpha_dropout(b: Context, x: Value, p: float, train: bool) -> Value:
    """What is dropped becomes -alpha' of selu; a and b restore mean 0 and variance 1 (Klambauer 2017)."""
    if not train or p == 0:
        return x
    seed, place = b.drawn()
    low = -1.7580993408473766
    kept = b.op("ge", b.op("rand", seed, shape=x.type.shape, offset=place), float(p))
    scale = 1.0 / math.sqrt((1.0 - p) * (1.0 + p * low * low)) if p < 1 else 0.0
    return b.op("add", b.op("mul", b.op("where", kept, x, low), scale), -scale * p * low)


# Pooling.


def _window(rank: int, kernel: Any, stride: Any, padding: Any, ceil_mode: bool) -> dict[str, Any]:
    sizes = _numbers(kernel, rank)
    given = {"kernel": sizes, "stride": _numbers(stride, rank) if stride not in (None, []) else sizes}
    given["padding"] = _numbers(padding, rank)
    return {**given, "ceil_mode": True} if ceil_mode else given


def _max_pool(rank: int) -> Callable[..., Value]:
    def convert(
        b: Context,
        x: Value,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
    ) -> Value:
        given = _spread(_window(rank, kernel_size, stride, padding, ceil_mode), rank, dilation)
        return _batched(b, x, rank, lambda v: b.op(f"max_pool{rank}d", v, **given))

    return convert


def _spread(given: dict[str, Any], rank: int, dilation: Any) -> dict[str, Any]:
    steps = _numbers(dilation, rank)
    return {**given, "dilation": steps} if steps != (1,) * rank else given


def _max_pool_places(rank: int) -> Callable[..., tuple[Value, ...]]:
    def convert(
        b: Context,
        x: Value,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
    ) -> tuple[Value, ...]:
        given = _spread(_window(rank, kernel_size, stride, padding, ceil_mode), rank, dilation)
        if x.type.rank != rank + 2:
            raise unsupported("positions in one image without a batch", "give a batch of one")
        if rank > 1:
            return b.many(f"max_pool{rank}d_with_indices", x, **given)
        flat = {
            k: ((0 if k == "padding" else 1), *v) if isinstance(v, tuple) else v for k, v in given.items()
        }
        n, c, w = x.type.shape
        made = b.many("max_pool2d_with_indices", b.reshape(x, (n, c, ONE, w)), **flat)
        return tuple(b.reshape(v, (n, c, v.type.shape[-1])) for v in made)

    return convert


def _avg_pool(rank: int) -> Callable[..., Value]:
    def convert(
        b: Context,
        x: Value,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Value:
        given = _window(rank, kernel_size, stride, padding, ceil_mode)
        if not count_include_pad:
            given["count_include_pad"] = False
        if divisor_override is not None:
            given["divisor_override"] = divisor_override
        return _batched(b, x, rank, lambda v: b.op(f"avg_pool{rank}d", v, **given))

    return convert


def _adaptive(op: str, rank: int) -> Callable[..., Value]:
    def convert(b: Context, x: Value, output_size: Any) -> Value:
        found = b.shapes[0][-rank:] if b.shapes and b.shapes[0] is not None else ()
        sizes = tuple(static(s, "a size of adaptive pooling") for s in found) or _numbers(output_size, rank)
        return _batched(b, x, rank, lambda v: b.op(f"{op}{rank}d", v, output_size=sizes))

    return convert


def _adaptive_max(rank: int) -> Callable[..., tuple[Value | None, ...]]:
    def convert(b: Context, x: Value, output_size: Any) -> tuple[Value | None, ...]:
        """Positions count within the image."""
        n, c, *sizes = x.type.shape if x.type.rank == rank + 2 else (ONE, *x.type.shape)
        wanted = _numbers(output_size, rank)
        plane = b.reshape(x, (n, c, *([ONE] if rank == 1 else []), *sizes))
        given = (1, *wanted) if rank == 1 else wanted
        made = b.many(f"adaptive_max_pool{max(rank, 2)}d_with_indices", plane, output_size=given)
        shape = (*x.type.shape[: x.type.rank - rank], *wanted)
        return tuple(b.reshape(v, shape) for v in made)

    return convert


# Resampling.


def _resampled(mode: str, rank: int, smooth: bool = False) -> Callable[..., Value]:
    between = mode in ("linear", "cubic")

    def convert(b: Context, x: Value, output_size: Any, *rest: Any) -> Value:
        """(output_size, align_corners, scales...) or, in the form with scales in a list, (.., factors)."""
        corners = rest[0] if between else None
        scales = rest[1:] if between else rest
        scales = scales[0] if scales and isinstance(scales[0], list) else list(scales)
        shape = b.shapes[0] if b.shapes else None
        if shape is None:
            raise unsupported("the sizes of the result have no counterpart")
        sizes = tuple(static(s, "a size of the result") for s in shape[2:])
        scale = None if corners else _scale(x, sizes, [s for s in scales if s is not None])
        attrs = {"align_corners": corners or None, "scale": scale, "antialias": smooth or None}
        given = {name: value for name, value in attrs.items() if value is not None}
        return b.op("interpolate", x, size=sizes, mode=mode, **given)

    return convert


def _scale(x: Value, sizes: Sequence[int], scales: Sequence[float]) -> float | None:
    """torch steps by 1 / scale where a scale is given: the ratio of the sizes only if it divides evenly."""
    rows = list(zip(x.type.shape[2:], sizes, scales, strict=False))
    uneven = [(s, n, by) for s, n, by in rows if static(s, "an image") * by != n]
    if not uneven:
        return None
    if len(set(scales)) > 1:
        size, count, by = uneven[0]
        raise unsupported(f"scale {by} of {size} elements gives {count}, and axes differ in scale",
                          "give the size instead")  # fmt: skip
    return float(scales[0])


def _grid_sample(
    b: Context, x: Value, grid: Value, mode: int, padding_mode: int, align_corners: bool | None = None
) -> Value:
    if x.type.rank != 4 or mode > 1:
        raise unsupported("sampling of volumes, or cubic", "pictures, bilinear or nearest")
    padding = ("zeros", "border", "reflection")[padding_mode]
    given = {"mode": ("bilinear", "nearest")[mode], "padding_mode": padding}
    return b.op("grid_sample", x, grid, **given, align_corners=bool(align_corners))


RULES: tuple[Rule, ...] = (
    *each(_layer_norm, "layer_norm.default"), *each(_native_layer_norm, "native_layer_norm.default"),
    *each(_rms_norm, "rms_norm.default"), *each(_fused_rms_norm, "_fused_rms_norm.default"),
    *each(_group_norm, "group_norm.default"), *each(_native_group_norm, "native_group_norm.default"),
    *each(_instance_norm, "instance_norm.default"), *each(_batch_norm, "batch_norm.default"),
    *each(_functional_batch_norm, "_native_batch_norm_legit_functional.default"),
    *each(_plain_batch_norm, "_native_batch_norm_legit.no_stats"),
    *each(_eval_batch_norm, "_native_batch_norm_legit_no_training.default"),
    *each(_dropout, "dropout.default"), *each(_feature_dropout, "feature_dropout.default"),
    *each(_alpha_dropout, "alpha_dropout.default"),
    *each(_native_dropout, "native_dropout.default"),
    *(r for n in (1, 2, 3) for r in (
        *each(_max_pool(n), f"max_pool{n}d.default"), *each(_max_pool_places(n),
              f"max_pool{n}d_with_indices.default"),
        *each(_avg_pool(n), f"avg_pool{n}d.default"),
        *each(_adaptive("adaptive_avg_pool", n), f"adaptive_avg_pool{n}d.default"),
        *each(_adaptive_max(n), f"adaptive_max_pool{n}d.default"))),
    *each(_adaptive("adaptive_avg_pool", 2), "_adaptive_avg_pool2d.default"),
    *each(_adaptive("adaptive_avg_pool", 3), "_adaptive_avg_pool3d.default"),
    *(r for n in (1, 2, 3) for r in each(_resampled("nearest", n), f"upsample_nearest{n}d.default",
                                         f"upsample_nearest{n}d.vec")),
    *(r for n, k in ((1, "linear"), (2, "bilinear"), (3, "trilinear")) for r in each(
        _resampled("linear", n), f"upsample_{k}{n}d.default", f"upsample_{k}{n}d.vec")),
    *(r for n in (1, 2, 3) for r in each(
        _resampled("nearest-exact", n), f"_upsample_nearest_exact{n}d.default",
        f"_upsample_nearest_exact{n}d.vec")),
    *each(_grid_sample, "grid_sampler.default", "grid_sampler_2d.default"),
    *each(_resampled("cubic", 2), "upsample_bicubic2d.default", "upsample_bicubic2d.vec"),
    *each(_resampled("linear", 2, True), "_upsample_bilinear2d_aa.default", "_upsample_bilinear2d_aa.vec"),
    *each(_resampled("cubic", 2, True), "_upsample_bicubic2d_aa.default", "_upsample_bicubic2d_aa.vec"),
)  # fmt: skip
