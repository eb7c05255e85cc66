"""How a seed learns beside its host without touching it: the four objectives.

In TRAINING the host computes as if there were no seed. A hook on the layer's result brings the host's
gradient g; then, inside the backward, the seed runs on a detached copy of h and its gradient is added to
buffers of its own. Nothing of the seed is in the host's forward, so no value, no dtype and no random number
of it can reach the host.

With d = z - h, radius t, and eta chosen so that ||eta g|| = t ||h||:

    proximal     ||d + eta g||^2 / s      (default)      s = (t ||h||)^2
    reconstruct  ||d||^2 / s
    ste          <g, d> / (||g|| t ||h||) while ||d|| <= t ||h||, else ||d||^2 / s
    shadow       the task's loss through z, host weights constant (`Growth.shadow_step`)

The identity's proximal loss is 1 by this scale, and every objective is judged by that loss on steps from
which the seed did not learn. Expanding the square, 2 eta <g, d> is the straight-through term and ||d||^2 the
trust in h; alone, the straight-through term has no fixed point, hence the guard.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

OBJECTIVES = ("proximal", "reconstruct", "ste", "shadow")
_TINY = 1e-20


@dataclass(frozen=True)
class Scales:
    """fp32 numbers on the device: norms of h and g, and the trust distance t ||h||."""

    h: Tensor
    g: Tensor
    reach: Tensor


def scales(h: Tensor, g: Tensor, radius: float) -> Scales:
    """Of one batch."""
    norm_h = torch.linalg.vector_norm(h, dtype=torch.float32)
    norm_g = torch.linalg.vector_norm(g, dtype=torch.float32)
    return Scales(norm_h, norm_g, radius * norm_h)


def proximal_loss(d: Tensor, g: Tensor, at: Scales) -> Tensor:
    """||d + eta g||^2 / (t ||h||)^2 in fp32; 1 for d = 0."""
    eta = at.reach / (at.g + _TINY)
    return ((d.float() + eta * g.float()).square().sum()) / (at.reach.square() + _TINY)


def slope(objective: str, d: Tensor, g: Tensor, at: Scales) -> Tensor:
    """Gradient of the objective by z, fp32, of d's shape. "shadow" has none here."""
    square = at.reach.square() + _TINY
    pull = 2 * d.float() / square
    if objective == "reconstruct":
        return pull
    along = g.float() / (at.g + _TINY) / (at.reach + _TINY)
    if objective == "proximal":
        return pull + 2 * along  # 2 (d + eta g) / s, and eta / s = 1 / (||g|| t ||h||)
    outside = torch.linalg.vector_norm(d, dtype=torch.float32) > at.reach
    return torch.where(outside, pull, along)


def held_out(d: Tensor, g: Tensor, at: Scales) -> tuple[Tensor, Tensor, Tensor]:
    """What G2 is judged by, from one batch: gain over the identity's loss, <g, d> by both norms, and
    ||d|| / ||h||."""
    norm_d = torch.linalg.vector_norm(d, dtype=torch.float32)
    gain = 1 - proximal_loss(d, g, at)
    predicted = (g.float() * d.float()).sum() / (at.g * norm_d + _TINY)
    return gain, predicted, norm_d / (at.h + _TINY)
