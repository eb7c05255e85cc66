"""Library calls on 16-bit numbers, on a processor that has no instructions for them.

Torch multiplies 16-bit tensors with oneDNN where the processor can (AVX-512, or Arm's bfloat16). Elsewhere it
has loops of its own, which take 10 to 300 times as long as a float32 product with copies of its operands. So
there products, convolutions and the backward of attention are given float32 copies, and what they give is
rounded once. `runtime/_calls.h` does the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from runtime import pages
from runtime.extern import Run

FEW = 4
"""Rows, or columns, up to which torch's own sums along the memory of both operands are as quick."""
_ASKED = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}


@cache
def slow(kind: torch.dtype) -> bool:
    """Whether torch has nothing but its own loops for this type here."""
    asked = getattr(torch.ops.mkldnn, _ASKED[kind], None) if kind in _ASKED else None
    return kind in _ASKED and not (asked is not None and asked())


def lacking() -> bool:
    """Whether that is so for any type."""
    return any(slow(kind) for kind in _ASKED)


def widened(run: Run, instead: Run, product: bool = False) -> Run:
    """The call, or `instead` on float32 wherever that is quicker. `product`: of the last two operands."""

    def wide(inputs: Sequence[Tensor], outs: Sequence[Tensor]) -> Sequence[Tensor] | None:
        first = inputs[0]
        if first.device.type != "cpu" or not slow(first.dtype) or (product and _quick(*inputs[-2:])):
            return run(inputs, outs)
        lent = [_room(o) if _short(o) else o for o in outs]
        made = instead([_room(t).copy_(t) if _short(t) else t for t in inputs], lent)
        for out, found in zip(outs, lent if made is None else made, strict=False):
            if found is not out:
                out.copy_(found)
        return None

    return wide


def _room(t: Tensor) -> Tensor:
    return pages.asked(torch.empty_like(t, dtype=torch.float32))


def _short(t: Tensor) -> bool:
    return t.dtype in _ASKED


def _quick(a: Tensor, b: Tensor) -> bool:
    return min(a.shape[-2], b.shape[-1]) <= FEW and a.stride(-1) == 1 and b.stride(-2) == 1
