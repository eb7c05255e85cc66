"""A bounded memo whose hit costs one dictionary look-up."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Memo(Generic[K, V]):
    """Two generations of at most `limit` entries: what was used since the last turn survives the next one.

    `hot` may be read directly (`memo.hot.get(key)`); on None call `get`, which also looks at the older
    generation. Safe under threads: the worst that can happen is that a value is made twice.
    """

    __slots__ = ("limit", "hot", "_cold")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.hot: dict[K, V] = {}
        self._cold: dict[K, V] = {}

    def get(self, key: K) -> V | None:
        found = self.hot.get(key)
        if found is None:
            found = self._cold.get(key)
            if found is not None:
                self.put(key, found)
        return found

    def put(self, key: K, value: V) -> V:
        if len(self.hot) >= self.limit:
            self._cold = self.hot
            self.hot = {}
        self.hot[key] = value
        return value

    def values(self) -> list[V]:
        """Everything that is held now."""
        return list({**self._cold, **self.hot}.values())

    def __len__(self) -> int:
        return len(self.hot.keys() | self._cold.keys())
