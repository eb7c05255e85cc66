"""What is kept from case to case, within a bound."""

from __future__ import annotations

from collections.abc import Hashable

from torch import Tensor


class Kept:
    """The last tensors by key: at most `count`, and but for the last one at most so many bytes."""

    def __init__(self, count: int, nbytes: int) -> None:
        self.count, self.nbytes = count, nbytes
        self._found: dict[Hashable, tuple[Tensor, Tensor | None]] = {}

    def get(self, key: Hashable) -> Tensor | None:
        return self._found[key][0] if key in self._found else None

    def put(self, key: Hashable, tensor: Tensor, of: Tensor | None = None) -> None:
        """`of`: what it was made from, which lives as long."""
        self._found[key] = (tensor, of)
        while len(self._found) > self.count or (len(self._found) > 1 and self._bytes() > self.nbytes):
            self._found.pop(next(iter(self._found)))

    def holds(self, tensor: Tensor) -> bool:
        return any(tensor is kept for kept, _ in self._found.values())

    def _bytes(self) -> int:
        return sum(kept.nbytes for kept, _ in self._found.values())
