"""Blending a seed into its host: operators, curves of the ramp, strategies of its progress.

Every operator is written as the value at alpha = 1, `effective(h, out)`; what the host sees is
lerp(h, effective, alpha), so all of them are the identity at alpha = 0 (to the bit, whatever the seed gave)
and the whole graft at alpha = 1. alpha is a function of integers; nothing is accumulated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from runtime.seeds.commands import GraftingStrategy
from runtime.seeds.lifecycle import Limits

OPERATORS = ("lerp", "add", "mul", "gate")
ISOLATION = ("until_fine_tuning", "always", "never")
FOSSIL = ("frozen", "train")


def effective(operator: str, h: Tensor, out: Tensor, gate: Tensor | None = None) -> Tensor:
    """The layer's result at alpha = 1. `h`, `out`: the same shape; `gate`: [features] for the operator of
    that name, over the last axis.

    lerp: out. add: h + out (a seed that gives a residual). mul: h (1 + tanh out). gate: h + s (out - h) with
    s = sigmoid(<gate, h>), one per position.
    """
    if operator == "lerp":
        return out
    if operator == "add":
        return h + out
    if operator == "mul":
        return h * (1 + torch.tanh(out))
    assert gate is not None
    score = torch.sigmoid((h * gate).sum(-1, keepdim=True))
    return torch.lerp(h, out, score)


class _Blend(torch.autograd.Function):
    """lerp(h, z, alpha) in fresh memory; h to the bit where alpha is 0 or where a value of z is not finite.

    With `isolated` the gradient of h is that of the result: the graft is a constant to the host.
    """

    @staticmethod
    def forward(ctx: Any, h: Tensor, z: Tensor, alpha: Tensor, finite: Tensor, isolated: bool) -> Tensor:
        weight = alpha.to(h.dtype)
        ctx.isolated = isolated
        ctx.save_for_backward(weight, finite)
        return torch.where(finite & (alpha != 0), torch.lerp(h, z, weight), h)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        (g,) = cotangents
        weight, finite = ctx.saved_tensors
        share = torch.where(finite, weight, torch.zeros_like(weight))
        to_h = None
        if ctx.needs_input_grad[0]:
            to_h = g if ctx.isolated else g * (1 - share)
        to_z = torch.where(finite, g * weight, torch.zeros_like(g)) if ctx.needs_input_grad[1] else None
        return to_h, to_z, None, None, None


class _Guard(torch.autograd.Function):
    """h on its way into a seed; the gradient that comes back is 0 where the seed's result was not finite (0
    times infinity is not)."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, told: list[Tensor]) -> Tensor:
        ctx.told = told
        return h.view_as(h)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        (g,) = cotangents
        return torch.where(ctx.told[0], g, torch.zeros_like(g)), None


def guarded(h: Tensor, told: list[Tensor]) -> Tensor:
    """h for a seed whose input is not detached. `told` gets the flag of `blend` before the backward."""
    return _Guard.apply(h, told)


def blend(h: Tensor, z: Tensor, alpha: Tensor, finite: Tensor, *, isolated: bool) -> Tensor:
    """What the host sees. `z`: `effective(...)`; `alpha`: fp32, no dimensions or one value per sample (first
    axis); `finite`: bool, no dimensions. The result has h's dtype."""
    if alpha.dim() == 1:
        alpha = alpha.reshape(-1, *[1] * (h.dim() - 1))
    return _Blend.apply(h, z, alpha, finite, isolated)


# -- ramps
# -------------------------------------------------------------------------------------------------------

_STEEP = 6.0
_LOW = 1 / (1 + math.exp(_STEEP))
CURVES: Mapping[str, Callable[[float], float]] = {
    "linear": lambda t: t,
    "sigmoid": lambda t: (1 / (1 + math.exp(_STEEP - 2 * _STEEP * t)) - _LOW) / (1 - 2 * _LOW),
    "cosine": lambda t: (1 - math.cos(math.pi * t)) / 2,
}


def alpha_at(start: float, target: float, total: int, done: int, curve: str = "linear") -> float:
    """alpha after `done` of `total` units of progress: `start` and `target` exactly at the ends."""
    if done <= 0 and total > 0:
        return start
    if done >= total:
        return target
    return start + (target - start) * CURVES[curve](done / total)


@dataclass(frozen=True)
class Reading:
    """What a strategy decides from, as far as it is known. `drift`: relative change of the layer's weights
    since the ramp began; `gradient`: norm of the seed's own gradient by alpha; `falls`: how many boundaries
    running the held-out loss fell."""

    drift: float = 0.0
    gradient: float | None = None
    falls: int = 0


def progress(strategy: GraftingStrategy, reading: Reading, limits: Limits) -> int:
    """Units by which a ramp goes on in this step: 0 is a pause, 1 the rule, more under PERFORMANCE_LINKED."""
    if strategy is GraftingStrategy.PERFORMANCE_LINKED:
        return min(1 + reading.falls, limits.most_progress)
    if strategy is GraftingStrategy.DRIFT_CONTROLLED:
        return 0 if reading.drift > limits.drift else 1
    if strategy is GraftingStrategy.GRAD_NORM_GATED and reading.gradient is not None:
        return 1 if limits.gradient_low <= reading.gradient <= limits.gradient_high else 0
    return 1
