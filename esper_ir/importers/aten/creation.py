"""Tensors out of nothing: constants, ranges; random ones are refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from esper_ir.builder import Value
from esper_ir.importers.context import Context, Rule, Scalar, Tensor, each, unsupported
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
    *each(_random, "randint.default", "randint.low", "randint_like.default", "randperm.default",
          "normal_functional.default", "uniform.default", "multinomial.default", "normal.Tensor_Tensor"),
)  # fmt: skip
