"""Tensors out of nothing: constants, ranges, and what is drawn at random."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from esper_ir.builder import Value
from esper_ir.importers.context import Context, Rule, Scalar, Tensor, each, static, unsupported
from esper_ir.types import Dim, DType


def _dtype(dtype: DType | None, *values: Scalar) -> DType:
    if dtype is not None:
        return dtype
    if all(isinstance(v, bool) for v in values):
        return DType.bool
    return DType.float32 if any(isinstance(v, float) for v in values) else DType.int64


def _full(
    b: Context, size: Sequence[Scalar], fill_value: Scalar, dtype: DType | None = None, **more: Any
) -> Value:
    return b.full(b.shape(size), fill_value, _dtype(dtype, fill_value))


def _filled(number: float) -> Callable[..., Value]:
    def convert(b: Context, size: Sequence[Scalar], dtype: DType | None = None, **more: Any) -> Value:
        return b.full(b.shape(size), number, dtype or DType.float32)

    return convert


def _full_like(b: Context, x: Value, fill_value: Tensor, dtype: DType | None = None, **more: Any) -> Value:
    if isinstance(fill_value, Value):
        return b.op("expand", b.cast(fill_value, dtype or x.type.dtype), shape=x.type.shape)
    return b.full(x.type.shape, fill_value, dtype or x.type.dtype)


def _filled_like(number: float) -> Callable[..., Value]:
    return lambda b, x, dtype=None, **more: b.full(x.type.shape, number, dtype or x.type.dtype)


def _new(number: float) -> Callable[..., Value]:
    return lambda b, x, size, dtype=None, **more: b.full(b.shape(size), number, dtype or x.type.dtype)


def _new_full(
    b: Context, x: Value, size: Sequence[Scalar], fill_value: Scalar, dtype: DType | None = None, **more: Any
) -> Value:
    return b.full(b.shape(size), fill_value, dtype or x.type.dtype)


def _scalar_tensor(b: Context, s: Scalar, dtype: DType | None = None, **more: Any) -> Value:
    return b.full((), s, dtype or DType.float32)


def _arange(b: Context, end: Scalar, dtype: DType | None = None, **more: Any) -> Value:
    return _range(b, 0, end, 1, dtype)


def _arange_start(b: Context, start: Scalar, end: Scalar, dtype: DType | None = None, **more: Any) -> Value:
    return _range(b, start, end, 1, dtype)


def _arange_step(
    b: Context, start: Scalar, end: Scalar, step: Scalar = 1, dtype: DType | None = None, **more: Any
) -> Value:
    return _range(b, start, end, step, dtype)


def _range(b: Context, start: Scalar, end: Scalar, step: Scalar, dtype: DType | None) -> Value:
    """start + step i; the count is torch's."""
    (count,) = b.shape((end,))
    kind = _dtype(dtype, start, end, step)
    base = b.builder.op("arange", end=count)
    if kind.is_floating:
        made = b.cast(base, DType.float64)
    else:
        made = base
    if step != 1:
        made = b.op("mul", made, step)
    if not isinstance(start, Dim) and start == 0:
        return b.cast(made, kind)
    return b.cast(b.op("add", made, start), kind)


def _linspace(
    b: Context, start: float, end: float, steps: int, dtype: DType | None = None, **more: Any
) -> Value:
    """torch counts from both ends towards the middle."""
    wide = b.cast(b.builder.op("arange", end=steps), DType.float64)
    step = (float(end) - float(start)) / (steps - 1) if steps > 1 else 0.0
    low = b.op("add", b.op("mul", wide, step), float(start))
    high = b.op("sub", float(end), b.op("mul", b.op("sub", float(steps - 1), wide), step))
    made = b.op("where", b.op("lt", wide, float(steps // 2)), low, high)
    return b.cast(made, dtype or DType.float32)


def _eye(b: Context, n: Scalar, m: Scalar | None = None, dtype: DType | None = None, **more: Any) -> Value:
    width = n if isinstance(m, DType) or m is None else m
    row = b.reshape(b.builder.op("arange", end=n), (n, 1))
    return b.cast(b.op("eq", row, b.builder.op("arange", end=width)), dtype or DType.float32)


SPAN = 2**24
"""Uniform numbers are multiples of 2^-24: whole numbers from a wider range would have gaps."""


def uniform(b: Context, shape: Sequence[Scalar], low: float = 0.0, high: float = 1.0) -> Value:
    seed, place = b.drawn()
    made = b.op("rand", seed, shape=tuple(shape), offset=place)
    made = made if high - low == 1.0 else b.op("mul", made, float(high) - float(low))
    return made if low == 0.0 else b.op("add", made, float(low))


def _uniform_like(b: Context, x: Value, low: float = 0.0, high: float = 1.0, **more: Any) -> Value:
    return b.cast(uniform(b, x.type.shape, low, high), x.type.dtype)


def _normal(b: Context, shape: Sequence[Scalar], mean: Tensor, std: Tensor, dtype: DType) -> Value:
    seed, place = b.drawn()
    made = b.op("randn", seed, shape=tuple(shape), dtype=dtype, offset=place)
    return b.op("add", b.op("mul", made, std), mean)


def _normal_like(b: Context, x: Value, mean: float = 0.0, std: float = 1.0, **more: Any) -> Value:
    return _normal(b, x.type.shape, float(mean), float(std), x.type.dtype)


def _normal_about(b: Context, mean: Value, std: Tensor = 1.0, **more: Any) -> Value:
    return _normal(b, b.shape(mean.type.shape), mean, std, mean.type.dtype)


def _normal_around(b: Context, mean: float, std: Value, **more: Any) -> Value:
    return _normal(b, std.type.shape, float(mean), std, std.type.dtype)


def _normal_shaped(b: Context, mean: float, std: float, size: Sequence[Scalar],
                   dtype: DType | None = None, **more: Any) -> Value:  # fmt: skip
    return _normal(b, b.shape(size), float(mean), float(std), dtype or DType.float32)


def _exponential(b: Context, x: Value, lambd: float = 1.0, **more: Any) -> Value:
    """-log(1 - u) / lambda; never 0, of which callers take the logarithm."""
    left = b.op("sub", 1.0, uniform(b, x.type.shape))
    made = b.op("maximum", b.op("neg", b.op("log", left)), 2.0**-25)
    return b.cast(made if lambd == 1.0 else b.op("div", made, float(lambd)), x.type.dtype)


def _whole(b: Context, shape: Sequence[Scalar], low: Scalar, high: Scalar, dtype: DType) -> Value:
    start = static(low, "the least number drawn")
    span = static(high, "the bound of the numbers drawn") - start
    if span > SPAN:
        raise unsupported(f"whole numbers drawn from a range of {span}", "draw from at most 2^24")
    found = b.op("floor", b.op("mul", uniform(b, shape), float(span)))
    made = b.cast(found, DType.int64)
    return b.cast(b.op("add", made, start) if start else made, dtype)


def _randint(
    b: Context, high: Scalar, size: Sequence[Scalar], dtype: DType | None = None, **more: Any
) -> Value:
    return _whole(b, b.shape(size), 0, high, dtype or DType.int64)


def _randint_low(b: Context, low: Scalar, high: Scalar, size: Sequence[Scalar], dtype: DType | None = None,
                 **more: Any) -> Value:  # fmt: skip
    return _whole(b, b.shape(size), low, high, dtype or DType.int64)


def _randint_like(b: Context, x: Value, high: Scalar, dtype: DType | None = None, **more: Any) -> Value:
    return _whole(b, x.type.shape, 0, high, dtype or x.type.dtype)


def _randint_like_low(b: Context, x: Value, low: Scalar, high: Scalar, dtype: DType | None = None,
                      **more: Any) -> Value:  # fmt: skip
    return _whole(b, x.type.shape, low, high, dtype or x.type.dtype)


def _randperm(b: Context, n: Scalar, dtype: DType | None = None, **more: Any) -> Value:
    """The order of numbers drawn: every order is as likely, but for equal numbers."""
    return b.cast(b.many("sort", uniform(b, b.shape((n,))), dim=0)[1], dtype or DType.int64)


def _random(b: Context, *rest: Any, **more: Any) -> Value:
    hint = "draw them outside and pass them as an input"
    raise unsupported("numbers of this distribution are drawn at random", hint)


def _drawn(op: str) -> Callable[..., Value]:
    def convert(b: Context, size: Sequence[Scalar], dtype: DType | None = None, **more: Any) -> Value:
        seed, place = b.drawn()
        return b.op(op, seed, shape=b.shape(size), dtype=dtype or DType.float32, offset=place)

    return convert


def _drawn_like(op: str) -> Callable[..., Value]:
    def convert(b: Context, x: Value, dtype: DType | None = None, **more: Any) -> Value:
        seed, place = b.drawn()
        return b.op(op, seed, shape=x.type.shape, dtype=dtype or x.type.dtype, offset=place)

    return convert


def _bernoulli(b: Context, x: Value, p: float | None = None, **more: Any) -> Value:
    seed, place = b.drawn()
    chances = x if p is None else b.full(x.type.shape, float(p), x.type.dtype)
    return b.op("bernoulli", chances, seed, offset=place)


RULES: tuple[Rule, ...] = (
    *each(_full, "full.default"), *each(_filled(0.0), "zeros.default", "empty.memory_format"),
    *each(_filled(1.0), "ones.default"),
    *each(_full_like, "full_like.default"), *each(_filled_like(0.0), "zeros_like.default",
          "empty_like.default"),
    *each(_filled_like(1.0), "ones_like.default"), *each(_new(0.0), "new_zeros.default", "new_empty.default"),
    *each(_new(1.0), "new_ones.default"), *each(_new_full, "new_full.default"),
    *each(_scalar_tensor, "scalar_tensor.default"), *each(_arange, "arange.default"),
    *each(_arange_start, "arange.start"), *each(_arange_step, "arange.start_step"),
    *each(_linspace, "linspace.default"), *each(_eye, "eye.default", "eye.m"),
    *each(_drawn("rand"), "rand.default"), *each(_drawn("randn"), "randn.default"),
    *each(_drawn_like("rand"), "rand_like.default"), *each(_drawn_like("randn"), "randn_like.default"),
    *each(_bernoulli, "bernoulli.default", "bernoulli.p"),
    *each(_uniform_like, "uniform.default"), *each(_exponential, "exponential.default"),
    *each(_normal_like, "normal_functional.default"), *each(_normal_shaped, "normal.float_float"),
    *each(_normal_about, "normal.Tensor_Tensor", "normal.Tensor_float"),
    *each(_normal_around, "normal.float_Tensor"),
    *each(_randint, "randint.default"), *each(_randint_low, "randint.low"),
    *each(_randint_like, "randint_like.default"), *each(_randint_like_low, "randint_like.low_dtype"),
    *each(_randperm, "randperm.default"),
    *each(_random, "multinomial.default", "poisson.default", "cauchy.default", "geometric.default",
          "log_normal.default", "binomial.default"),
)  # fmt: skip
