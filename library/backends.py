"""What a store of bytes and a store of rows must do. The local ones are `library.blobs` and `library.index`;
a later one (S3 for bytes, PostgreSQL for rows) implements these and passes
`tests/library/test_conformance.py`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, Self


class BlobStore(Protocol):
    """Immutable bytes by SHA-256.

    A put is durable and whole when it returns, and harmless when repeated or done by two at once. A reader
    gets the bytes of the digest or E0731 (absent) or E0730 (others found, which are set aside), never
    anything else. What is no digest is E0709 everywhere (`library.blobs.place_of`): a row may have
    been edited to lead elsewhere.
    """

    def put(self, data: bytes) -> str:
        """Digest of `data`, durable. E0703 full, E0702 not writable, E0710 failing, E0735 too large."""
        ...

    def put_many(self, items: Iterable[bytes]) -> list[str]:
        """As `put`, for several; on failure none is promised."""
        ...

    def read(self, digest: str) -> bytes:
        """Bytes that hash to `digest`."""
        ...

    def read_raw(self, digest: str) -> bytes:
        """Bytes kept under `digest`, for a caller that hashes them itself."""
        ...

    def quarantine(self, digest: str, reason: str) -> Exception:
        """Set wrong bytes aside; the E0730 to raise."""
        ...

    def has(self, digest: str) -> bool:
        """Whether something is kept under `digest`."""
        ...

    def size(self, digest: str) -> int:
        """Bytes kept under `digest`, 0 when absent."""
        ...

    def remove(self, digest: str) -> int:
        """Forget an object; bytes freed, 0 when absent."""
        ...

    def digests(self) -> list[str]:
        """All that is kept."""
        ...

    def staged(self) -> list[tuple[str, float]]:
        """Unfinished uploads with their age in seconds."""
        ...

    def drop_staged(self, name: str) -> None:
        """Forget an unfinished upload."""
        ...

    def close(self) -> None:
        """Idempotent."""
        ...


class RowStore(Protocol):
    """Rows under transactions: one writer at a time, all or nothing, durable at commit;
    readers see committed rows."""

    readonly: bool

    def write(self, *, durable: bool = True) -> AbstractContextManager[Self]:
        """A transaction; rolled back on any exception; joined when nested. E0708 locked, E0712 read-only."""
        ...

    def rows(self, statement: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """All rows of a reading statement."""
        ...

    def row(self, statement: str, values: Sequence[Any] = ()) -> tuple[Any, ...] | None:
        """The first row."""
        ...

    def run(self, statement: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """One statement inside `write()`."""
        ...

    def version(self) -> int:
        """Number of migrations applied."""
        ...

    def close(self) -> None:
        """Idempotent."""
        ...
