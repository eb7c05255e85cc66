"""The kernels of one artifact on one device: blobs mapped or given to the driver, entry points resolved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from library.launch import Kernel, LaunchManifest
from runtime.driver import Driver, Library, driver
from runtime.errors import fail
from runtime.mapped import Mapped


class Handles(dict[str, int]):
    """Function handles by kernel name, each made when it is first asked for.

    Finding a kernel in a loaded library costs a fraction of a microsecond and is done at once for all; making
    it launchable costs some 20, so that a program pays for the plans it runs. `prime` makes all.
    """

    def __init__(self, libraries: Mapping[str, Library], kernels: Sequence[Kernel]) -> None:
        super().__init__()
        self._found = {
            k.name: (libraries[k.blob], (libraries[k.blob].find(k.entry), k.entry, k.shared)) for k in kernels
        }

    def __missing__(self, name: str) -> int:
        library, found = self._found[name]
        (handle,) = library.prime([found])
        self[name] = handle
        return handle

    def prime(self) -> None:
        """All that were not asked for yet, those of a library together."""
        left: dict[Library, list[str]] = {}
        for name, (library, _) in self._found.items():
            if name not in self:
                left.setdefault(library, []).append(name)
        for library, names in left.items():
            self.update(zip(names, library.prime([self._found[n][1] for n in names]), strict=True))


@dataclass
class Code:
    """`address`: entry point (cpu) or function handle (cuda) by kernel name; `driver` is None on cpu.
    `versions`: the libraries that extern steps call, as found on this machine."""

    device: torch.device
    address: Mapping[str, int]
    objects: tuple[Mapped | Library, ...]
    driver: Driver | None = None
    versions: Mapping[str, Any] = field(default_factory=dict)

    def prime(self) -> None:
        """Make every kernel launchable, so that nothing is left to load under a graph capture."""
        if isinstance(self.address, Handles):
            self.address.prime()

    def close(self) -> None:
        """Unmap and unload; the caller knows that nothing runs any more."""
        close_all(self.objects)


def close_all(objects: Sequence[Mapped | Library]) -> None:
    """Unmap and unload."""
    for item in objects:
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
        address = _addresses(objects, launch.kernels)
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


def _addresses(objects: Mapping[str, Mapped | Library], kernels: Sequence[Kernel]) -> Mapping[str, int]:
    libraries = {blob: item for blob, item in objects.items() if isinstance(item, Library)}
    if libraries:
        return Handles(libraries, kernels)
    mapped = {blob: item for blob, item in objects.items() if isinstance(item, Mapped)}
    return {k.name: mapped[k.blob].address(k.entry) for k in kernels}
