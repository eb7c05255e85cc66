"""What is kept from case to case, within a bound."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

from torch import Tensor

T = TypeVar("T")


class Kept(Generic[T]):
    """The last values by key: at most `count`, and but for the last one at most so many bytes."""

    def __init__(self, count: int, nbytes: int) -> None:
        self.count, self.nbytes = count, nbytes
        self._found: dict[Hashable, tuple[T, int, Tensor | None]] = {}
        self._bytes = 0

    def get(self, key: Hashable) -> T | None:
        return self._found[key][0] if key in self._found else None

    def put(self, key: Hashable, value: T, nbytes: int, of: Tensor | None = None) -> None:
        """`of`: what it was made from, which lives as long."""
        self._forget(key)
        self._found[key] = (value, nbytes, of)
        self._bytes += nbytes
        while len(self._found) > self.count or (len(self._found) > 1 and self._bytes > self.nbytes):
            self._forget(next(iter(self._found)))

    def holds(self, value: T) -> bool:
        return any(value is kept for kept, _, _ in self._found.values())

    def _forget(self, key: Hashable) -> None:
        self._bytes -= self._found.pop(key, (None, 0, None))[1]
