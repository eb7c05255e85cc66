"""Loaded artifacts of the process: bounded in bytes, least recently used first out, never one that is in
use."""

from __future__ import annotations

import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

log = logging.getLogger("esper.runtime")
DEFAULT_MB = 512


class Weighed(Protocol):
    """What the cache holds: its size in bytes and how many users pin it."""

    @property
    def nbytes(self) -> int: ...

    @property
    def pins(self) -> int: ...

    def forked(self) -> bool:
        """Called in a forked child: whether it still works there."""
        ...


V = TypeVar("V", bound=Weighed)


@dataclass(frozen=True)
class CacheInfo:
    """Counters since the process began; `bytes` and `entries` now; `limit` in bytes."""

    hits: int
    misses: int
    evictions: int
    bytes: int
    entries: int
    pinned: int
    limit: int


class _Pending:
    """A load under way: others wait for it instead of repeating it."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.value: Any = None
        self.error: BaseException | None = None


class Cache(Generic[V]):
    """`get(key, make)`: one `make` per key however many threads ask; a failure is raised to all of them
    and not kept."""

    def __init__(self, limit: int | None = None) -> None:
        megabytes = float(os.environ.get("ESPER_CACHE_MB", DEFAULT_MB))
        self.limit = int(megabytes * (1 << 20)) if limit is None else limit
        self._entries: OrderedDict[Hashable, V] = OrderedDict()
        self._pending: dict[Hashable, _Pending] = {}
        self._lock = threading.Lock()
        self._hits = self._misses = self._evictions = self._bytes = 0

    def get(self, key: Hashable, make: Callable[[], V]) -> V:
        with self._lock:
            found = self._entries.get(key)
            if found is not None:
                self._entries.move_to_end(key)
                self._hits += 1
                return found
            pending = self._pending.get(key)
            mine = pending is None
            if pending is None:
                pending = self._pending[key] = _Pending()
                self._misses += 1
        return self._make(key, pending, make) if mine else self._wait(pending)

    def _wait(self, pending: _Pending) -> V:
        pending.done.wait()
        if pending.error is not None:
            raise pending.error
        with self._lock:
            self._hits += 1
        return pending.value

    def _make(self, key: Hashable, pending: _Pending, make: Callable[[], V]) -> V:
        try:
            pending.value = make()
        except BaseException as error:
            pending.error = error
            raise
        finally:
            with self._lock:
                self._pending.pop(key, None)
                if pending.error is None:
                    self._entries[key] = pending.value
                    self._bytes += pending.value.nbytes
                    self._shrink(self.limit, keep=key)
            pending.done.set()
        return pending.value

    def _shrink(self, limit: int, keep: Hashable = None) -> int:
        freed = 0
        for key in list(self._entries):
            if self._bytes <= limit:
                break
            entry = self._entries[key]
            if key == keep or entry.pins:
                continue
            del self._entries[key]
            self._bytes -= entry.nbytes
            freed += entry.nbytes
            self._evictions += 1
        return freed

    def release(self) -> int:
        """Evict everything that no module uses (memory pressure); bytes given back."""
        with self._lock:
            freed = self._shrink(-1)
        if freed:
            log.warning("memory pressure: %d bytes of unused artifacts were evicted", freed)
        return freed

    def drop(self, key: Hashable) -> None:
        """Forget one entry; whoever holds it keeps it."""
        with self._lock:
            entry = self._entries.pop(key, None)
            if entry is not None:
                self._bytes -= entry.nbytes
                self._evictions += 1

    def info(self) -> CacheInfo:
        with self._lock:
            pinned = sum(1 for entry in self._entries.values() if entry.pins)
            counts = (self._hits, self._misses, self._evictions)
            return CacheInfo(*counts, self._bytes, len(self._entries), pinned, self.limit)

    def after_fork(self) -> None:
        """In the child: locks anew, loads of other threads forgotten, entries kept that survive a fork."""
        self._lock = threading.Lock()
        self._pending = {}
        kept = [(key, entry) for key, entry in self._entries.items() if entry.forked()]
        self._entries = OrderedDict(kept)
        self._bytes = sum(entry.nbytes for _, entry in kept)
