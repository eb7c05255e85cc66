"""The few things that differ with several processes: who decides, and losses of all of them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from runtime.strategy.errors import fail


def several() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def rank() -> int:
    """0 in a single process."""
    return dist.get_rank() if several() else 0


def checked(found: Any) -> Any:
    """What a `validate` gave, before it is read; E1031 unless it is a number, a tensor or an iterable of
    them."""
    if isinstance(found, str | bytes | dict) or not isinstance(found, int | float | Tensor | Iterable):
        raise fail("E1031", f"validate gave {type(found).__name__}", hint="return the loss of every batch")
    return found


def mean_loss(losses: tuple[float, ...]) -> float:
    """Over the validation batches of all ranks; E1031 when there is none."""
    total, count = math.fsum(losses), len(losses)
    if several():
        parts: list[tuple[float, int]] = [(0.0, 0) for _ in range(dist.get_world_size())]
        dist.all_gather_object(parts, (total, count))
        total, count = math.fsum(t for t, _ in parts), sum(n for _, n in parts)
    if not count:
        raise fail("E1031", "validate gave no loss", hint="the validation loader is empty")
    return total / count
