"""What a library call is: inputs and attributes to results, below autograd and with no autocast."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
Attrs = Mapping[str, Any]
Run = Callable[[Sequence[Tensor], Sequence[Tensor]], Sequence[Tensor] | None]


@dataclass(frozen=True)
class Extern:
    """`arity` inputs, up to `most`; `attrs` it understands; `flag`: the TF32 flag that changes its
    meaning, "matmul", "cudnn" or empty; `wide`: the call for float32 in the place of 16-bit operands, for
    which a processor may have no instructions (runtime/widening.py).
    """

    arity: int
    attrs: frozenset[str]
    prepare: Callable[[Attrs], Run]
    flag: str = ""
    most: int = 0
    wide: Callable[[Attrs], Run] | None = None


def plain(run: Run) -> Run:
    """The call with autocast off, which would change the types of functional calls."""

    def outside(inputs: Sequence[Tensor], outs: Sequence[Tensor]) -> Sequence[Tensor] | None:
        kind = outs[0].device.type
        if not torch.is_autocast_enabled(kind):
            return run(inputs, outs)
        with torch.autocast(kind, enabled=False):
            return run(inputs, outs)

    return outside


def ints(text: object) -> list[int]:
    return [int(part) for part in str(text).split(",") if part]
