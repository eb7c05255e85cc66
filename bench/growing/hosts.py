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
NOISE = 3.0  # standard deviation, added to every hidden unit


class Block(nn.Module):
    """x + b(relu(a(x))). `dead`: all hidden units but LEFT never fire; `noise`: of this deviation on each."""

    def __init__(self, width: int = WIDTH, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.a: nn.Module = nn.Linear(width, hidden)
        self.b = nn.Linear(hidden, width)
        self.register_buffer("alive", torch.ones(hidden))
        self.noise = 0.0

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.a(x)) * self.alive
        if self.noise:
            hidden = hidden + self.noise * torch.randn_like(hidden)
        return x + self.b(hidden)


def plant(block: Block, kind: str) -> None:
    """Cripple a block: "dead" units, "narrow" width, "low_rank" weights, "noise" on its units."""
    width, hidden = block.b.out_features, block.b.in_features
    if kind == "dead":
        block.alive[LEFT:] = 0.0
    elif kind == "narrow":
        block.a, block.b, block.alive = nn.Linear(width, LEFT), nn.Linear(LEFT, width), torch.ones(LEFT)
    elif kind == "low_rank":
        block.a = nn.Sequential(nn.Linear(width, RANK, bias=False), nn.Linear(RANK, hidden))
    elif kind == "noise":
        block.noise = NOISE
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
