"""Hand-built kernel plans of the shapes the templates make, with the tensors to run them on."""

from __future__ import annotations

import torch

from esper_ir.scalar import Arg, Expr, prim
from esper_ir.types import Dim, DType
from forge.plan import (
    Access,
    Compute,
    KernelPlan,
    Load,
    PointTile,
    Reduce,
    RowTile,
    Stmt,
    Store,
    SumTile,
    Tile,
)

F32, BF16 = DType.float32, DType.bfloat16
A, B, C = Arg(0), Arg(1), Arg(2)
ZERO, ONE = Dim(), Dim.of(1)


class Builder:
    """Collects accesses and statements of one plan; values are named by their order."""

    def __init__(self, name: str, space: tuple[int | str, ...]) -> None:
        self.name, self.space = name, tuple(Dim.of(s) for s in space)
        self.accesses: list[Access] = []
        self.body: list[Stmt] = []

    def dense(self) -> tuple[Dim, ...]:
        """Row-major strides of the space."""
        out = [ONE]
        for size in reversed(self.space[1:]):
            out.insert(0, out[0] * size)
        return tuple(out)

    def access(self, buffer: str, dtype: DType, axes: str = "rc", partial: bool = False) -> int:
        strides = self.dense()
        if axes != "rc":
            rows = (ONE,) if len(strides) == 2 else strides[:-1]
            strides = (*(rows if "r" in axes else (ZERO,) * (len(strides) - 1)), ONE if "c" in axes else ZERO)
        self.accesses.append(Access(buffer, dtype, strides, partial))
        return len(self.accesses) - 1

    def load(self, buffer: str, dtype: DType, axes: str = "rc") -> str:
        self.body.append(Load(name := f"v{len(self.body)}", self.access(buffer, dtype, axes)))
        return name

    def load_strided(self, buffer: str, dtype: DType, strides: tuple[int | str, ...]) -> str:
        self.accesses.append(Access(buffer, dtype, tuple(Dim.of(s) for s in strides)))
        self.body.append(Load(name := f"v{len(self.body)}", len(self.accesses) - 1))
        return name

    def compute(self, expr: Expr, args: tuple[str, ...], dtype: DType) -> str:
        self.body.append(Compute(name := f"v{len(self.body)}", expr, args, dtype))
        return name

    def reduce(self, arg: str, combine: str = "sum", axis: str = "row") -> str:
        self.body.append(Reduce(name := f"v{len(self.body)}", arg, combine, axis))
        return name

    def store(self, value: str, buffer: str, dtype: DType, axes: str = "rc", partial: bool = False) -> None:
        self.body.append(Store(self.access(buffer, dtype, axes, partial), value))

    def plan(self, tile: Tile, sizes: tuple[str, ...] = ()) -> KernelPlan:
        return KernelPlan(self.name, self.space, tuple(self.accesses), tuple(self.body), tile, sizes)


def rms_forward(cols: int, dtype: DType, rows_per_program: int = 2) -> KernelPlan:
    """y = rms_norm(x + r) * w, saving rstd."""
    b = Builder("rms_forward", ("m", cols))
    h = b.compute(prim("add", A, B), (b.load("x", dtype), b.load("r", dtype)), dtype)
    total = b.reduce(b.compute(prim("mul", A, A), (h,), F32))
    rstd = b.compute(prim("rsqrt", prim("add", prim("div", A, float(cols)), 1e-6)), (total,), F32)
    b.store(rstd, "rstd", F32, "r")
    v = b.compute(prim("mul", A, B), (h, rstd), dtype)
    y = b.compute(prim("mul", A, B), (v, b.load("w", dtype, "c")), dtype)
    b.store(y, "y", dtype)
    return b.plan(RowTile(1, rows_per_program, max(cols, 1), 1), ("m",))


def rms_backward(cols: int, dtype: DType, rows_per_program: int = 4) -> KernelPlan:
    """dh and the partial sums of dw."""
    b = Builder("rms_backward", ("m", cols))
    h = b.compute(prim("add", A, B), (b.load("x", dtype), b.load("r", dtype)), dtype)
    g, w, rstd = b.load("g", dtype), b.load("w", dtype, "c"), b.load("rstd", F32, "r")
    v = b.compute(prim("mul", A, B), (h, rstd), F32)
    dv = b.compute(prim("mul", A, B), (g, w), F32)
    dot = b.reduce(b.compute(prim("mul", A, B), (dv, v), F32))
    mean = b.compute(prim("div", A, float(cols)), (dot,), F32)
    inner = prim("mul", Arg(3), prim("sub", A, prim("mul", B, C)))
    b.store(b.compute(inner, (dv, v, mean, rstd), dtype), "dh", dtype)
    dw = b.reduce(b.compute(prim("mul", A, B), (g, v), F32), "sum", "col")
    b.store(dw, "part", F32, "c", partial=True)
    return b.plan(RowTile(1, rows_per_program, max(cols, 1), 1), ("m",))


def column_sum(cols: int, dtype: DType, block: int = 32) -> KernelPlan:
    """Second stage of a column reduction, rounded to `dtype`."""
    b = Builder("column_sum", ("parts", cols))
    total = b.reduce(b.load("part", F32), "sum", "col")
    b.store(b.compute(A, (total,), dtype), "dw", dtype, "c")
    return b.plan(SumTile(1, block, 1), ("parts",))


def softmax(cols: int, dtype: DType) -> KernelPlan:
    b = Builder("softmax", ("m", cols))
    x = b.load("x", dtype)
    top = b.reduce(x, "max")
    e = b.compute(prim("exp", prim("sub", A, B)), (x, top), F32)
    b.store(b.compute(prim("div", A, B), (e, b.reduce(e)), dtype), "y", dtype)
    return b.plan(RowTile(1, 3, max(cols, 1), 1), ("m",))


def layer_norm(cols: int, dtype: DType) -> KernelPlan:
    b = Builder("layer_norm", ("m", cols))
    x = b.load("x", dtype)
    mean = b.compute(prim("div", A, float(cols)), (b.reduce(x),), F32)
    centred = b.compute(prim("sub", A, B), (x, mean), F32)
    square = b.compute(prim("mul", A, A), (centred,), F32)
    variance = b.compute(prim("div", A, float(cols)), (b.reduce(square),), F32)
    rstd = b.compute(prim("rsqrt", prim("add", A, 1e-5)), (variance,), F32)
    b.store(mean, "mean", F32, "r")
    b.store(rstd, "rstd", F32, "r")
    scaled = prim("add", prim("mul", prim("mul", A, B), C), Arg(3))
    y = b.compute(scaled, (centred, rstd, b.load("w", dtype, "c"), b.load("bias", dtype, "c")), dtype)
    b.store(y, "y", dtype)
    return b.plan(RowTile(1, 1, max(cols, 1), 1), ("m",))


def bias_gelu(cols: int, dtype: DType) -> KernelPlan:
    b = Builder("bias_gelu", ("m", cols))
    h = b.compute(prim("add", A, B), (b.load("x", dtype), b.load("bias", dtype, "c")), dtype)
    gelu = prim("mul", A, prim("mul", 0.5, prim("add", 1.0, prim("erf", prim("mul", A, 0.5**0.5)))))
    b.store(b.compute(gelu, (h,), dtype), "y", dtype)
    return b.plan(RowTile(1, 2, max(cols, 1), 1), ("m",))


def broadcast_point(cols: int, dtype: DType, block: int = 100) -> KernelPlan:
    """y[a, b, c] = x[a, c, b] (a transposed read) * s[a] + t[b, c] over a rank-3 space."""
    b = Builder("broadcast_point", ("n", 5, cols))
    x = b.load_strided("x", dtype, (5 * cols, 1, 5))
    s, t = b.load_strided("s", dtype, (1, 0, 0)), b.load_strided("t", dtype, (0, cols, 1))
    b.store(b.compute(prim("add", prim("mul", A, B), C), (x, s, t), dtype), "y", dtype)
    return b.plan(PointTile(block, 1), ("n",))


def tensors(
    shapes: dict[str, tuple[int, ...]], dtypes: dict[str, DType], seed: int = 0
) -> dict[str, torch.Tensor]:
    """Normal values of the given shapes and types."""
    gen = torch.Generator().manual_seed(seed)
    out = {}
    for name, shape in shapes.items():
        out[name] = torch.randn(shape, generator=gen).to(getattr(torch, dtypes[name].value))
    return out
