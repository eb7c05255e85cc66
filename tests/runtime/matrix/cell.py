"""A row of the table: a feature of torch, what it should do in each mode, and how to find out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

EAGER, COMPILED, DYNAMIC = "eager", "compile", "dynamic"
MODES = (EAGER, COMPILED, DYNAMIC)
WORKS = "works"
CLOSE = {"rtol": 2e-4, "atol": 2e-5}
WIDTH = 64


@dataclass
class Bench:
    """A fresh block (SwiGLU, three weights, library calls inside) on a device, in a mode."""

    mode: str
    device: torch.device
    load: Callable[..., Any]

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.block = self.load()

    def compiled(self, fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """`fn` as the mode runs it: never with a graph break."""
        if self.mode == EAGER:
            return fn
        dynamic = self.mode == DYNAMIC or None
        return torch.compile(fn, fullgraph=True, dynamic=dynamic, backend="aot_eager", **options)

    def x(self, rows: int = 5, **options: Any) -> Tensor:
        return torch.randn(rows, WIDTH, device=self.device, **options)

    def leaf(self, rows: int = 5) -> Tensor:
        return self.x(rows).requires_grad_()

    def launches(self) -> int:
        return self.block._counts()["launches"]

    def copies(self) -> int:
        return self.block._counts()["copies"]


def plain(x: Tensor, block: nn.Module) -> Tensor:
    """The block's mathematics in torch, on the block's own weights."""
    weight: Mapping[str, Tensor] = dict(block.named_parameters())
    gate, up = (F.linear(x, weight[f"{n}.weight"]) for n in ("gate", "up"))
    return F.linear(F.silu(gate) * up, weight["down.weight"])


def same(
    b: Bench, fn: Callable[..., Any], x: Tensor, block: nn.Module | None = None, seen: bool = True
) -> None:
    """Result and every gradient of `fn(x).square().sum()` against plain torch; `seen`: by counters."""
    block = block or b.block
    leaves = [x, *block.parameters()]
    asked = [t for t in leaves if t.requires_grad]
    want = torch.autograd.grad(plain(x, block).square().sum(), asked)
    before = b.launches()
    got = torch.autograd.grad(fn(x).square().sum(), asked)
    torch.testing.assert_close(got, want, **CLOSE)
    assert b.launches() > before or not seen, "nothing of ours ran"


Check = Callable[[Bench], None]


@dataclass(frozen=True)
class Row:
    """`says`: outcome by mode, "works", a code, or "torch" where torch itself refuses; a mode that is absent
    does not apply. `place`: "any" device, "card", "cards" (two of them) or "ranks" (two processes)."""

    feature: str
    check: Check
    says: Mapping[str, str] = field(default_factory=lambda: dict.fromkeys(MODES, WORKS))
    note: str = ""
    place: str = "any"


def everywhere(code: str) -> dict[str, str]:
    return dict.fromkeys(MODES, code)


def eagerly(code: str = WORKS) -> dict[str, str]:
    return {EAGER: code}


def cells(rows: Sequence[Row], place: str) -> list[tuple[Row, str]]:
    return [(row, mode) for row in rows if row.place == place for mode in row.says]
