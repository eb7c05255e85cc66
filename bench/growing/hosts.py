"""Hosts for growth: several towers side by side, one of which may be planted with a bottleneck.

Each tower sees its own part of the input, lifts it to WIDTH features and adds what a two-layer block makes of
them; a linear head reads all towers. What a crippled block cannot compute no other tower can, so a plant
costs what the block was worth, and a seed behind the block can give it back: the features it needs pass by
the block on the residual path. (A bottleneck through which everything must pass loses what no seed behind it
can restore.)
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, HIDDEN = 64, 64
KINDS = ("dead", "narrow", "low_rank", "noise")
LEFT = 2  # units that work in a dead or narrow block
RANK = 1
NOISE = 1.0  # standard deviation of what a noisy unit gives


class Block(nn.Module):
    """x + b(relu(a(x))). `dead`: all hidden units but LEFT never fire; `noise`: what these give instead, of
    this deviation, drawn anew in every call."""

    def __init__(self, width: int = WIDTH, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.a: nn.Module = nn.Linear(width, hidden)
        self.b = nn.Linear(hidden, width)
        self.register_buffer("alive", torch.ones(hidden))
        self.noise = 0.0

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.a(x)) * self.alive
        if self.noise:
            hidden = hidden + self.noise * (1.0 - self.alive) * torch.randn_like(hidden)
        return x + self.b(hidden)


def plant(block: Block, kind: str) -> None:
    """Cripple a block: "dead" units, "narrow" width, "low_rank" weights, "noise" where units were.

    Noise on top of units that go on working is no bottleneck that a seed behind the block could take away:
    the host learns how much of block and noise to let through, and a seed in its place from the beginning,
    with all the training there is, closes a third to three quarters of the gap. Units that give noise in
    place of what they saw lose it as dead ones do, and a seed can give back what they lost."""
    width, hidden = block.b.out_features, block.b.in_features
    if kind in ("dead", "noise"):
        block.alive[LEFT:] = 0.0
        block.noise = NOISE if kind == "noise" else 0.0
    elif kind == "narrow":
        block.a, block.b, block.alive = nn.Linear(width, LEFT), nn.Linear(LEFT, width), torch.ones(LEFT)
    elif kind == "low_rank":
        block.a = nn.Sequential(nn.Linear(width, RANK, bias=False), nn.Linear(RANK, hidden))
    else:
        raise ValueError(f"no plant {kind!r}")


class Towers(nn.Module):
    """`parts` towers over windows of `size` inputs, `stride` apart; `outputs` numbers. Sites: "blocks.*"."""

    def __init__(self, parts: int, size: int, stride: int, outputs: int) -> None:
        super().__init__()
        self.windows = [(i * stride, i * stride + size) for i in range(parts)]
        self.stems = nn.ModuleList(nn.Linear(size, WIDTH) for _ in range(parts))
        self.blocks = nn.ModuleList(Block() for _ in range(parts))
        self.head = nn.Linear(WIDTH * parts, outputs)

    def forward(self, x: Tensor) -> Tensor:
        found = []
        for (first, end), stem, block in zip(self.windows, self.stems, self.blocks, strict=True):
            found.append(block(stem(x[:, first:end])))
        return self.head(torch.cat(found, 1))


def planted(model: Towers, at: int, kind: str) -> Towers:
    """The same model with one crippled block."""
    block = model.blocks[at]
    assert isinstance(block, Block)
    plant(block, kind)
    return model
