"""Several processes that train one model: rank 0 decides, all prepare, and all commit or none.

Numbers that decide are sums over all ranks. A rank that cannot prepare a command aborts that command
everywhere, and the run goes on. Seeds are in no reducer: their gradients are averaged in the optimizer's
hook, so a wrapper that was made before a seed came needs nothing done for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.seeds.errors import fail


def sharded(tensor: Tensor) -> bool:
    """Whether this rank holds a part of it (a DTensor)."""
    return hasattr(tensor, "full_tensor")


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor; of a sharded one a collective call."""
    held: Any = tensor
    return held.full_tensor() if sharded(tensor) else tensor


class Ranks:
    """The processes of one group; with one process every answer is its own."""

    def __init__(self, group: Any = None) -> None:
        self.group = group
        self._counted: int | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Ranks:
        return Ranks(self.group)

    @property
    def many(self) -> int:
        if self._counted is not None:
            return self._counted
        return dist.get_world_size(self.group) if dist.is_available() and dist.is_initialized() else 1

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Inside, how many they are is not asked anew: none comes or goes within a boundary."""
        self._counted = self.many
        try:
            yield
        finally:
            self._counted = None

    @property
    def mine(self) -> int:
        return dist.get_rank(self.group) if self.many > 1 else 0

    @property
    def first(self) -> bool:
        return self.mine == 0

    def share(self, value: Any) -> Any:
        """What rank 0 says."""
        if self.many == 1:
            return value
        held = [value]
        source = 0 if self.group is None else dist.get_global_rank(self.group, 0)
        dist.broadcast_object_list(held, src=source, group=self.group)
        return held[0]

    def gather(self, value: Any) -> list[Any]:
        """What every rank says, in their order."""
        if self.many == 1:
            return [value]
        found: list[Any] = [None] * self.many
        dist.all_gather_object(found, value, group=self.group)
        return found

    def total(self, tensor: Tensor) -> Tensor:
        """Sum over ranks, in place."""
        if self.many > 1:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def most(self, tensor: Tensor) -> Tensor:
        """Largest over ranks, in place."""
        if self.many > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.group)
        return tensor

    def mean(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Averages over ranks, in one call."""
        if self.many == 1:
            return list(tensors)
        flat = torch.cat([t.reshape(-1).float() for t in tensors])
        dist.all_reduce(flat, group=self.group)
        flat /= self.many
        parts = flat.split([t.numel() for t in tensors])
        return [p.reshape(t.shape).to(t.dtype) for p, t in zip(parts, tensors, strict=True)]

    def agree(self, what: str, value: str) -> None:
        """E1012 where ranks say different things."""
        found = self.gather(value)
        if len(set(found)) > 1:
            listed = ", ".join(f"rank {rank}: {v[:12]}" for rank, v in enumerate(found))
            raise fail("E1012", f"{what} differs between ranks ({listed})", node=what)
