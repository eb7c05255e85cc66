"""`debug=True`: one kernel at a time, red zones around everything it may write, NaN looked for after each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from runtime.dispatch import Dispatch
from runtime.errors import fail
from runtime.executor import Program, Ready

RED_BYTES = 256
RED = 0xA5


class Watched(Ready):
    """A plan prepared with one slot per buffer and one segment per launch; called like `Ready`, and slow.

    E0822 names the first step after which a result holds a NaN that no input held, E0823 the first that
    changed a byte outside its memory.
    """

    def __init__(self, program: Program, ready: Ready) -> None:
        super().__init__(program, ready.plan, ready.dims, ready.layout)
        self._device, self._artifact = program.device, program.artifact_id

    def __call__(self, slots: list[Any]) -> list[Any]:
        tainted = any(_bad(slot) for slot in slots)
        zones = [self._guarded(shape, dtype) for shape, _, dtype in self._fresh]
        results = [inner for _, inner in zones]
        slots.extend(results)
        for part in self.parts:
            part(self._stream(), slots)
            group = _group(part)
            self._synchronise()
            for zone, inner in zones:
                self._check_zone(group, zone, inner)
            if not tainted:
                self._check_values(group, results)
        return slots

    def _guarded(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        size = dtype.itemsize
        for extent in shape:
            size *= extent
        zone = torch.full((size + 2 * RED_BYTES,), RED, dtype=torch.uint8, device=self._device)
        inner = zone[RED_BYTES : RED_BYTES + size].view(dtype).view(shape)
        return zone, inner.zero_()

    def _synchronise(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _check_zone(self, group: str, zone: Tensor, inner: Tensor) -> None:
        before, after = zone[:RED_BYTES], zone[-RED_BYTES:]
        if bool((before != RED).any()) or bool((after != RED).any()):
            raise fail(
                "E0823",
                f"{group} wrote outside a buffer of shape {list(inner.shape)}",
                node=self._artifact,
                hint="do not use this artifact: `esper-gauntlet bench` it again and keep the case",
            )

    def _check_values(self, group: str, results: list[Tensor]) -> None:
        for tensor in results:
            if _bad(tensor):
                count = int(tensor.isnan().sum())
                raise fail(
                    "E0822",
                    f"{group} is the first to write NaN: {count} of {tensor.numel()} in {list(tensor.shape)}",
                    node=self._artifact,
                )


def _bad(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and bool(value.isnan().any())


def _group(part: Any) -> str:
    if isinstance(part, Dispatch):
        return part.segment.launches[0].group if part.segment.launches else "memset"
    return str(part.call.step.group)
