"""Random chains of layers and operators, of the kinds of tests/esper_ir/chains.py."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.esper_ir.chains import Residual, Step, Steps, With

Shape = tuple[int, ...]
Move = tuple[Step, Shape]
"""A step and the shape behind it, without the batch."""

POINTWISE: tuple[Step, ...] = (
    torch.relu, torch.tanh, torch.sigmoid, F.gelu, F.silu, F.mish, F.hardswish, F.hardtanh, F.softplus, F.elu,
    F.leaky_relu, F.selu, F.hardsigmoid, F.softsign, F.logsigmoid, torch.abs, torch.sin, torch.square,
          F.relu6,
    lambda x: x * 2.0, lambda x: x / 3 + 1, lambda x: x - 0.5, lambda x: torch.clamp(x, -0.7, 0.9),
    lambda x: x * torch.sigmoid(x), lambda x: torch.clamp(x, min=0.1).sqrt(), lambda x: torch.exp(-x.abs()),
    lambda x: torch.where(x > 0, x, 0.3 * x), lambda x: x.clone().add_(1.5), lambda x: F.relu(x * 1.0,
          inplace=True),
    lambda x: torch.maximum(x, -x * 0.5), lambda x: x.masked_fill(x < -0.5, 0.25), lambda x: torch.pow(x, 3),
    lambda x: x + x.detach(), lambda x: torch.log1p(x.abs()),
    lambda x: (x if x.dtype is torch.float64 else x.float()) * 1.5,
          lambda x: 1.0 / (2 + x.abs()),
    lambda x: F.dropout(x, 0.0), lambda x: torch.floor(x) * 0.5 + x,
)  # fmt: skip


def flat_moves(rng: random.Random, shape: Shape) -> list[Callable[[], Move]]:
    """Moves of [batch, n]."""
    (n,) = shape
    wide = rng.choice([4, 6, 8, 12])
    moves: list[Callable[[], Move]] = [
        lambda: (nn.Linear(n, wide, bias=rng.random() < 0.7), (wide,)),
        lambda: (nn.LayerNorm(n), shape),
        lambda: (lambda x: torch.softmax(x, 1), shape),
        lambda: (lambda x: torch.log_softmax(x, -1), shape),
        lambda: (lambda x: torch.logsumexp(x, 1, keepdim=True), (1,)),
        lambda: (lambda x: x.sum(1, keepdim=True), (1,)),
        lambda: (lambda x: x.mean(dim=1, keepdim=True), (1,)),
        lambda: (lambda x: torch.max(x, 1, keepdim=True)[0], (1,)),
        lambda: (lambda x: torch.min(x, dim=1, keepdim=True).values, (1,)),
        lambda: (With(torch.add, n), shape),
        lambda: (With(torch.mul, n), shape),
        lambda: (With(torch.sub, 1), shape),
        lambda: (lambda x: x - x.mean(1, keepdim=True), shape),
        lambda: (lambda x: torch.cumsum(x, 1), shape),
        lambda: (lambda x: torch.flip(x, (1,)), shape),
        lambda: (lambda x: torch.cat([x, x * 2], 1), (2 * n,)),
        lambda: (lambda x: F.normalize(x, dim=1), shape),
        lambda: (lambda x: F.pad(x, (1, 2)), (n + 3,)),
        lambda: (lambda x: x[:, :1] * x, shape),
        lambda: (lambda x: x / torch.norm(x, p=2, dim=1, keepdim=True).clamp(min=0.1), shape),
        lambda: (Residual(Steps(nn.Linear(n, n), torch.tanh)), shape),
    ]
    if n > 1:
        moves += [lambda: (nn.BatchNorm1d(n), shape), lambda: (lambda x: torch.roll(x, 1, 1), shape)]
    if n % 2 == 0:
        moves += [
            lambda: (nn.GroupNorm(2, n), shape),
            lambda: (lambda x: F.glu(x, 1), (n // 2,)),
            lambda: (lambda x: F.avg_pool1d(x.unsqueeze(1), 2).squeeze(1), (n // 2,)),
            lambda: (lambda x: torch.mul(*x.chunk(2, dim=1)), (n // 2,)),
            lambda: (lambda x: x.view(-1, 2, n // 2).transpose(1, 2).reshape(x.shape[0], n), shape),
        ]
    return moves


def image_moves(rng: random.Random, shape: Shape) -> list[Callable[[], Move]]:
    """Moves of [batch, channels, sizes...] with one to three sizes."""
    c, *sizes = shape
    rank = len(sizes)
    wide, least = rng.choice([2, 4, 6]), min(sizes)
    conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[rank - 1]
    up = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[rank - 1]
    norm = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[rank - 1]
    alone = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)[rank - 1]
    dims = tuple(range(2, 2 + rank))
    ones = (1,) * rank
    moves: list[Callable[[], Move]] = [
        lambda: (conv(c, wide, 1), (wide, *sizes)),
        lambda: (conv(c, wide, 3, padding=1, bias=rng.random() < 0.5), (wide, *sizes)),
        lambda: (conv(c, c, 3, padding="same", groups=c), shape),
        lambda: (norm(c), shape),
        lambda: (With(torch.add, c, *ones), shape),
        lambda: (With(torch.mul, c, *ones), shape),
        lambda: (lambda x: torch.softmax(x, 1), shape),
        lambda: (lambda x: torch.logsumexp(x, dim=1, keepdim=True), (1, *sizes)),
        lambda: (lambda x: torch.min(x, dim=1, keepdim=True)[0], (1, *sizes)),
        lambda: (lambda x: x.mean(dims, keepdim=True), (c, *ones)),
        lambda: (lambda x: torch.flatten(x.amax(dims), 1), (c,)),
        lambda: (lambda x: x.sum(dim=-1), (c, *sizes[:-1])) if rank > 1 else (lambda x: x.sum(-1), (c,)),
        lambda: (lambda x: torch.cat([x, torch.relu(x)], 1), (2 * c, *sizes)),
        lambda: (Residual(Steps(conv(c, c, 3, padding=1), torch.relu)), shape),
        lambda: (
            lambda x: x.permute(0, *dims, 1).contiguous().permute(0, rank + 1, *range(1, rank + 1)),
            shape,
        ),
    ]
    if max(sizes) > 1:
        moves += [lambda: (alone(c, affine=rng.random() < 0.5), shape)]
    if c % 2 == 0:
        moves += [lambda: (nn.GroupNorm(2, c), shape)]
    if least >= 4:
        pooled = tuple(s // 2 for s in sizes)
        moves += [
            lambda: (conv(c, wide, 3), (wide, *(s - 2 for s in sizes))),
            lambda: ((nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)[rank - 1](2), (c, *pooled)),
            lambda: ((nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)[rank - 1](2), (c, *pooled)),
        ]
        adaptive = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)[rank - 1]
        moves += [lambda: (adaptive(2), (c, *[2] * rank))]
    if max(sizes) <= 6:
        doubled = tuple(2 * s for s in sizes)
        moves += [
            lambda: (up(c, wide, 3, stride=2, padding=1, output_padding=1), (wide, *doubled)),
            lambda: (nn.Upsample(scale_factor=2), (c, *doubled)),
        ]
    return moves


def random_chain(seed: int) -> tuple[nn.Module, tuple[Shape, ...]]:
    """A module of four to eight steps, and the shape of its input with a batch of 3."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    first = rng.choice([(8,), (6,), (4, 9), (4, 8, 7), (3, 6, 8), (2, 4, 6, 5)])
    shape, steps = first, []
    for _ in range(rng.randint(4, 8)):
        if rng.random() < 0.35:
            steps.append(rng.choice(POINTWISE))
            continue
        moves = flat_moves(rng, shape) if len(shape) == 1 else image_moves(rng, shape)
        step, shape = rng.choice(moves)()
        steps.append(step)
    return Steps(*steps), ((3, *first),)


def module_of(seed: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The chain and an input for it."""
    module, shapes = random_chain(seed)
    gen = torch.Generator().manual_seed(seed)
    return module, tuple(torch.rand(s, generator=gen) * 2.0 - 1.0 for s in shapes)
