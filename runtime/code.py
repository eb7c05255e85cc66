"""The kernels of one artifact on one device: blobs mapped or given to the driver, entry points resolved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from library.launch import LaunchManifest
from runtime.driver import Driver, Library, driver
from runtime.errors import fail
from runtime.mapped import Mapped


@dataclass
class Code:
    """`address`: entry point (cpu) or function handle (cuda) by kernel name; `driver` is None on cpu.
    `versions`: the libraries that extern steps call, as found on this machine."""

    device: torch.device
    address: Mapping[str, int]
    objects: tuple[Mapped | Library, ...]
    driver: Driver | None = None
    versions: Mapping[str, Any] = field(default_factory=dict)

    def close(self) -> None:
        """Unmap and unload; the caller knows that nothing runs any more."""
        for item in self.objects:
            item.close()


def load_code(
    launch: LaunchManifest,
    blobs: Mapping[str, bytes | memoryview],
    device: torch.device,
    *,
    name: str = "artifact",
    versions: Mapping[str, Any] | None = None,
    cuda: Driver | None = None,
) -> Code:
    """Map or load the blobs that kernels name, on `device`. The bytes must be verified already. E0801,
    E0803, E0805, E0809 for a kernel whose blob or entry is missing."""
    wanted = dict.fromkeys(k.blob for k in launch.kernels)
    absent = [blob for blob in wanted if blob not in blobs]
    if absent:
        raise fail("E0809", f"kernels name blobs that the container lacks: {absent}", node=name)
    chosen = (cuda or driver()) if device.type == "cuda" else None
    objects: dict[str, Mapped | Library] = {}
    try:
        for blob in wanted:
            objects[blob] = _open(f"{name}/{blob}", blobs[blob], device, chosen)
        address = {k.name: _resolve(objects[k.blob], k.entry, k.shared) for k in launch.kernels}
    except BaseException:
        for item in objects.values():
            item.close()
        raise
    return Code(device, address, tuple(objects.values()), chosen, dict(versions or {}))


def _open(
    name: str, data: bytes | memoryview, device: torch.device, chosen: Driver | None
) -> Mapped | Library:
    if chosen is None:
        return Mapped(name, data)
    return Library(chosen, int(device.index or 0), name, data)


def _resolve(item: Mapped | Library, entry: str, shared: int) -> int:
    return item.address(entry) if isinstance(item, Mapped) else item.prime(entry, shared)
