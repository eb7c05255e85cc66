"""Small artifacts written by hand: C compiled with gcc for the cpu target, a launch manifest beside it.

`scale` is y = x * w over rows of N: inputs x [rows, N] and w [N], saved tensors x and w, and a backward in
two launches (dx with partial sums of dw in the workspace, then their ordered sum). `product` adds an
extern step.
"""

from __future__ import annotations

import subprocess
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from library.launch import (
    Argument,
    Bound,
    Buffer,
    DimSource,
    ExternStep,
    Guard,
    Interface,
    Kernel,
    KernelStep,
    LaunchManifest,
    Param,
    Plan,
    TensorSpec,
    Variant,
    View,
)
from runtime.code import Code, load_code
from runtime.executor import Program

N = 8
PARTS = 4
SOURCE = """
#include <stdint.h>
#define P(T, i) (*(T *const *)args[i])
#define I(i) (*(const int64_t *)args[i])
static void scale(void *const *args, int64_t gx) {
    const float *x = P(float, 0), *w = P(float, 1); float *y = P(float, 2);
    int64_t rows = I(3);
    for (int64_t r = 0; r < rows && r < gx; r++)
        for (int j = 0; j < 8; j++) y[r * 8 + j] = x[r * 8 + j] * w[j];
}
void forward_aligned(void *const *args, int64_t gx, int64_t gy, int64_t gz) { scale(args, gx); }
void forward_general(void *const *args, int64_t gx, int64_t gy, int64_t gz) { scale(args, gx); }
/* x w g dx partial rows32 */
void backward(void *const *args, int64_t gx, int64_t gy, int64_t gz) {
    const float *x = P(float, 0), *w = P(float, 1), *g = P(float, 2);
    float *dx = P(float, 3), *partial = P(float, 4);
    int64_t rows = *(const int32_t *)args[5];
    for (int64_t p = 0; p < gx; p++) {
        float *sum = partial + p * 8;
        for (int j = 0; j < 8; j++) sum[j] = 0;
        for (int64_t r = p; r < rows; r += gx)
            for (int j = 0; j < 8; j++) {
                if (dx) dx[r * 8 + j] = g[r * 8 + j] * w[j];
                sum[j] += g[r * 8 + j] * x[r * 8 + j];
            }
    }
}
/* partial dw */
void total(void *const *args, int64_t gx, int64_t gy, int64_t gz) {
    const float *partial = P(float, 0); float *dw = P(float, 1);
    for (int j = 0; j < 8; j++) { dw[j] = 0; for (int p = 0; p < 4; p++) dw[j] += partial[p * 8 + j]; }
}
/* zeroed counter, out: proves that the counter was zero */
void tally(void *const *args, int64_t gx, int64_t gy, int64_t gz) {
    int32_t *counter = P(int32_t, 0); float *y = P(float, 1);
    for (int64_t i = 0; i < gx; i++) counter[0]++;
    y[0] = counter[0];
}
void poison(void *const *args, int64_t gx, int64_t gy, int64_t gz) { P(float, 2)[0] = 0.0f / 0.0f; }
void slow(void *const *args, int64_t gx, int64_t gy, int64_t gz) {
    volatile int64_t n = 0; for (int64_t i = 0; i < 400000000; i++) n += i;
    scale(args, gx);
}
"""


@cache
def compiled(source: str = SOURCE) -> bytes:
    """The shared object of a C text."""
    with TemporaryDirectory() as folder:
        text, out = Path(folder) / "k.c", Path(folder) / "k.so"
        text.write_text(source)
        subprocess.run(["gcc", "-O2", "-shared", "-fPIC", "-w", "-o", str(out), str(text)], check=True)
        return out.read_bytes()


def _params(kinds: str) -> tuple[Param, ...]:
    names = {"p": ("ptr", 8), "i": ("i32", 4), "l": ("i64", 8)}
    return tuple(Param(names[k][0], 8 * at, names[k][1]) for at, k in enumerate(kinds))


def kernel(name: str, kinds: str, entry: str | None = None) -> Kernel:
    return Kernel(name, "code.so", entry or name, _params(kinds), warps=4, scratch=2)


def args(*values: int | str) -> tuple[Argument, ...]:
    """Buffer numbers, and sizes by name."""
    return tuple(Argument("buffer" if isinstance(v, int) else "size", v) for v in values)


def step(
    group: str, kernels: str | tuple[Variant, ...], arguments: tuple[Argument, ...], *grid: int | str
) -> KernelStep:
    variants = (Variant(Guard(), kernels),) if isinstance(kernels, str) else kernels
    full = (*grid, 1, 1, 1)
    return KernelStep(group, variants, arguments, (full[0], full[1], full[2]))


INTERFACE = Interface(
    inputs=(TensorSpec("x", "input", "float32", ("rows", N)), TensorSpec("w", "param", "float32", (N,))),
    outputs=(TensorSpec("y", "output", "float32", ("rows", N)),),
    dims=(DimSource("rows", 1, 1000, 1, (16, 128), 0, 0),),
    differentiable=("x", "w"),
)
KERNELS = (
    kernel("forward_aligned", "pppl"),
    kernel("forward_general", "pppl"),
    kernel("backward", "pppppi"),
    kernel("total", "pp"),
    kernel("tally", "pp"),
    kernel("poison", "pppl"),
    kernel("slow", "pppl"),
)
X = Buffer("x", "input", 0, "float32", ("rows", N))
W = Buffer("w", "input", 1, "float32", (N,))
Y = Buffer("y", "output", 0, "float32", ("rows", N))
CHOOSE = (
    Variant(Guard(aligned=(0, 1, 2), divisible=(("rows", 4),)), "forward_aligned"),
    Variant(Guard(), "forward_general"),
)
FORWARD_STEP = step("scale", CHOOSE, args(0, 1, 2, "rows"), "rows")


def forward(phase: str = "forward", bucket: tuple[Bound, ...] = ()) -> Plan:
    saved = (0, 1) if phase == "forward" else ()
    return Plan(phase, bucket, (), (X, W, Y), (FORWARD_STEP,), outputs=(2,), saved=saved)


def backward(wanted: tuple[str, ...] = ("x", "w")) -> Plan:
    buffers = (
        replace(X, source="saved"),
        replace(W, source="saved"),
        Buffer("g", "cotangent", 0, "float32", ("rows", N)),
        Buffer("dx", "gradient", 0, "float32", ("rows", N)),
        Buffer("partial", "temp", 0, "float32", (PARTS, N)),
        Buffer("dw", "gradient", 1, "float32", (N,)),
    )
    steps = (
        step("backward", "backward", args(0, 1, 2, 3, 4, "rows"), PARTS),
        step("total", "total", args(4, 5)),
    )
    gradients = {"x": 3, "w": 5}
    return Plan("backward", (), wanted, buffers, steps, gradients=tuple(gradients[name] for name in wanted))


def scale() -> LaunchManifest:
    return LaunchManifest(INTERFACE, (forward("inference"), forward(), backward()), KERNELS)


def product() -> LaunchManifest:
    """y = (x * w) @ m^T with the scaled x in a temporary that a library call reads."""
    m = Buffer("m", "input", 2, "float32", (5, N))
    buffers = (
        X,
        W,
        m,
        Buffer("t", "temp", 0, "float32", ("rows", N)),
        Buffer("y", "output", 0, "float32", ("rows", 5)),
    )
    steps = (
        step("scale", "forward_general", args(0, 1, 3, "rows"), "rows"),
        ExternStep("mm", "mm", (View(3), View(2, (), (1, 0))), (View(4),), {"precision": "ieee"}),
    )
    plan = Plan("inference", (), (), buffers, steps, outputs=(4,))
    interface = replace(
        INTERFACE,
        inputs=(*INTERFACE.inputs, TensorSpec("m", "param", "float32", (5, N))),
        outputs=(TensorSpec("y", "output", "float32", ("rows", 5)),),
    )
    return LaunchManifest(interface, (plan,), KERNELS)


def cpu_code(launch: LaunchManifest) -> Code:
    return load_code(launch, {"code.so": compiled()}, torch.device("cpu"), name="hand-made")


def program(
    launch: LaunchManifest | None = None, *, native: bool | None = None, strict: bool = False
) -> Program:
    chosen = launch or scale()
    return Program("hand-made", chosen, cpu_code(chosen), native=native, strict=strict)
