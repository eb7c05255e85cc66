"""What the tuner needs of a library."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class Store(Protocol):
    """Where measurements are kept (library.store.Library)."""

    def measurements(self, group_hash: str, arch: str, toolchain: str) -> list[dict[str, Any]]:
        """All under this key, oldest first."""
        ...

    def put_measurement(
        self, group_hash: str, arch: str, toolchain: str, measurement: Mapping[str, Any]
    ) -> None:
        """Keep one."""
        ...
