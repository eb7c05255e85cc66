"""A block as a torch module, to import: `esper-forge import examples/gated_mlp.py:GatedMLP ...`."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class GatedMLP(nn.Module):
    """x + down(silu(gate(norm(x))) * up(norm(x)))."""

    def __init__(self, width: int = 64, wide: int = 160) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.gate, self.up = (nn.Linear(width, wide, bias=False) for _ in range(2))
        self.down = nn.Linear(wide, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.down(torch.nn.functional.silu(self.gate(h)) * self.up(h))
