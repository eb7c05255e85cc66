"""rmsnorm_residual as one would write it in Triton, compiled where it runs. A peer for loading, not for
speed."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from triton import language as tl

EPS = 1e-6


@triton.jit
def _forward(x, r, w, y, rstd, cols, eps, BLOCK: tl.constexpr):  # noqa: ANN001, ANN202
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < cols
    s = tl.load(x + row * cols + at, inside, 0.0) + tl.load(r + row * cols + at, inside, 0.0)
    h = s.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(h * h, 0) / cols + eps)
    tl.store(rstd + row, scale)
    weight = tl.load(w + at, inside, 0.0)
    tl.store(y + row * cols + at, (h * scale).to(y.dtype.element_ty) * weight, inside)


@triton.jit
def _backward(x, r, w, rstd, dy, dx, dw, rows, cols, BLOCK: tl.constexpr):  # noqa: ANN001, ANN202
    at = tl.arange(0, BLOCK)
    inside = at < cols
    weight = tl.load(w + at, inside, 0.0).to(tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        place = (row + tl.zeros([BLOCK], tl.int64)) * cols + at
        h = (tl.load(x + place, inside, 0.0) + tl.load(r + place, inside, 0.0)).to(tl.float32)
        scale = tl.load(rstd + row)
        unit = h * scale
        flow = tl.load(dy + place, inside, 0.0).to(tl.float32)
        total += flow * unit.to(dx.dtype.element_ty).to(tl.float32)
        inner = flow * weight
        back = (inner - unit * (tl.sum(inner * unit, 0) / cols)) * scale
        tl.store(dx + place, back.to(dx.dtype.element_ty), inside)
    tl.store(dw + tl.program_id(0) * cols + at, total, inside)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, r: Tensor, w: Tensor) -> Tensor:
        rows, cols = x.shape
        y, rstd = torch.empty_like(x), torch.empty(rows, device=x.device)
        _forward[(rows,)](x, r, w, y, rstd, cols, EPS, BLOCK=triton.next_power_of_2(cols), num_warps=8)
        ctx.save_for_backward(x, r, w, rstd)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, r, w, rstd = ctx.saved_tensors
        (rows, cols), dx = x.shape, torch.empty_like(x)
        programs = min(rows, 256)
        partial = torch.empty(programs, cols, device=x.device)
        block = triton.next_power_of_2(cols)
        flow = gradients[0].contiguous()
        _backward[(programs,)](x, r, w, rstd, flow, dx, partial, rows, cols, BLOCK=block, num_warps=8)
        return dx, dx, partial.sum(0).to(w.dtype)


def rmsnorm_residual(x: Tensor, r: Tensor, w: Tensor) -> Tensor:
    """rms(x + r) * w over rows; x and r [rows, cols], w [cols], on a card."""
    return _Norm.apply(x, r, w)
