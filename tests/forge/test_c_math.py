"""Float32 functions of the C spelling against float64, over the whole range and around the hard places."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

import pytest
import torch

from forge.ctoolchain import compile_c
from forge.emit.c_math import PARAGRAPHS, preamble, turns
from forge.target import resolve
from tests.forge.native import load
from tests.forge.test_emit_c import ulps

FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "exp": torch.exp, "exp2": torch.exp2, "expm1": torch.expm1, "log": torch.log, "log2": torch.log2,
    "log1p": torch.log1p, "tanh": torch.tanh, "erf": torch.erf, "sin": torch.sin, "cos": torch.cos,
    "sigmoid": torch.sigmoid, "rsqrt": torch.rsqrt,
}  # fmt: skip


@cache
def code() -> ctypes.CDLL:
    head = '__attribute__((visibility("default"))) void'
    loop = "\n#pragma omp simd\n    for (int64_t i = 0; i < n; i++)"
    text = "".join(
        f"{head} t_{f}(const float *x, float *y, int64_t n)\n{{{loop} y[i] = {f}_f(x[i]);\n}}\n"
        for f in FUNCTIONS
    )
    for kind in ("bf16", "f16"):
        text += (
            f"{head} t_{kind}(const float *x, float *y, int64_t n)\n{{{loop} y[i] = round_{kind}(x[i]);\n}}\n"
        )
    pow_head = f"{head} t_pow(const float *x, const float *z, float *y, int64_t n)"
    text += f"{pow_head}\n{{{loop} y[i] = pow_f(x[i], z[i]);\n}}\n"
    target = resolve("cpu")
    return load(compile_c(preamble(text) + text, target).data)


def apply(name: str, *inputs: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(inputs[0])
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (*inputs, out)]
    getattr(code(), f"t_{name}")(*pointers, ctypes.c_int64(len(out)))
    return out


def every(step: int) -> torch.Tensor:
    """Every `step`-th float32 in order of its bits, and dense samples where functions have their steps."""
    bits = torch.arange(-(2**31), 2**31, step, dtype=torch.int64).to(torch.int32)
    hard = [
        -104.0,
        -103.9,
        88.72283,
        88.8,
        128.0,
        -149.5,
        1e-45,
        -1e-45,
        0.0,
        -0.0,
        torch.inf,
        -torch.inf,
        torch.nan,
    ]
    return torch.cat(
        [
            bits.view(torch.float32),
            torch.linspace(-20, 20, 1 << 17),
            torch.linspace(-1.2, 1.2, 1 << 17),
            torch.tensor(hard),
        ]
    )


@pytest.mark.parametrize("name", FUNCTIONS)
def test_within_two_ulp(name: str) -> None:
    x = every(8191)
    wanted = FUNCTIONS[name](x.double())
    found = apply(name, x)
    rounded = wanted.float()
    assert ulps(found, rounded) <= 2.0
    zero = (found == 0) & (rounded == 0)
    assert torch.equal(found[zero].signbit(), rounded[zero].signbit()), "the sign of zero"


def test_pow() -> None:
    gen = torch.Generator().manual_seed(0)
    special = torch.tensor(
        [
            0.0,
            -0.0,
            1.0,
            -1.0,
            2.0,
            -2.0,
            3.0,
            -3.0,
            0.5,
            -0.5,
            torch.inf,
            -torch.inf,
            torch.nan,
            1e-45,
            3e38,
            16777215.0,
        ]
    )
    grid = torch.cartesian_prod(special, special)
    wide = torch.rand((2, 1 << 17), generator=gen)
    x = torch.cat([grid[:, 0], torch.exp(wide[0] * 176 - 88), wide[0] * 20 - 10])
    y = torch.cat([grid[:, 1], wide[1] * 4 - 2, (wide[1] * 80 - 40).round()])
    wanted = torch.pow(x.double(), y.double()).float()
    found = apply("pow", x.contiguous(), y.contiguous())
    assert ulps(found, wanted) <= 2.0
    zero = (found == 0) & (wanted == 0)
    assert torch.equal(found[zero].signbit(), wanted[zero].signbit())


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("f16", torch.float16)])
def test_rounding_to_16_bits_is_torchs(name: str, dtype: torch.dtype) -> None:
    x = torch.cat([every(4093), torch.linspace(-70000, 70000, 1 << 16), torch.linspace(-1e-4, 1e-4, 1 << 16)])
    found, wanted = apply(name, x), x.to(dtype).float()
    same = (found.view(torch.int32) == wanted.view(torch.int32)) | (found.isnan() & wanted.isnan())
    assert bool(same.all()), x[~same][:5]


def test_table_of_powers_of_two_modulo_a_turn() -> None:
    table = turns()
    assert table[0] == (1.0, 0.0) and len(table) == 103
    assert all(abs(high) <= 3.1415926535897936 and abs(low) < 2**-51 for high, low in table[1:])


def test_preamble_carries_only_what_is_used() -> None:
    text = preamble("y = tanh_f(x);")
    assert "tanh_f" in text and "exp_inside" in text and "log_f" not in text and "TURNS" not in text
    assert text.index("fma_f(float") < text.index("exp_reduce(") < text.index("tanh_f(")
    assert all("\n\n" not in paragraph for paragraph in PARAGRAPHS.values())
