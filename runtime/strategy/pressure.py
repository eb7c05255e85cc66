"""What gives way when memory runs short, one rung after the other: cached kernels that no block uses, then
telemetry, then the kernels of seeds themselves (their eager twins answer and the machine code can go). Each
step down or up is an event. Nothing here ends a run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import torch

from runtime import loader
from runtime.strategy.packet import HardwareContext

log = logging.getLogger("esper.runtime")
GIB = float(1 << 30)
EASED = 0.05  # below a rung's threshold by so much before it is climbed again


class Rung(IntEnum):
    """How far down the ladder a run stands."""

    NORMAL = 0
    SMALL_CACHE = 1
    LITTLE_TELEMETRY = 2
    EAGER = 3


THRESHOLDS: Sequence[float] = (0.0, 0.85, 0.92, 0.97)
"""Share of memory in use from which each rung is taken."""


def hardware(device: torch.device) -> HardwareContext:
    """The device that trains, as it is now. On the cpu the machine's memory (or the control group's limit),
    caches of files counted as free."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        left = free + unused
        capable = torch.cuda.get_device_capability(device) >= (7, 5)
        return HardwareContext("cuda", left / GIB, capable, 1.0 - left / total)
    left, total = _machine_memory()
    return HardwareContext(device.type, left / GIB, True, 1.0 - left / total if total else 0.0)


def _machine_memory() -> tuple[float, float]:
    """(available, total) bytes; (nan, 0) where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return float("nan"), 0.0
    found = {line.split(":")[0]: float(line.split()[1]) * 1024 for line in lines if len(line.split()) > 1}
    left, total = found.get("MemAvailable", 0.0), found.get("MemTotal", 0.0)
    limit, used = _group("memory.max"), _group("memory.current")
    if limit is not None and used is not None and 0 < limit < total:
        return min(left, max(0.0, limit - used)), limit
    return left, total


def _group(name: str) -> float | None:
    try:
        return float(Path("/sys/fs/cgroup", name).read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


@dataclass
class Ladder:
    """`observe(degraded)` and `eager(on)` are what the growth side does on the last two rungs."""

    observe: Callable[[bool], None]
    eager: Callable[[bool], None]
    rung: Rung = Rung.NORMAL

    def look(self, used: float) -> Rung | None:
        """Take the rung that a share of memory in use asks for, all rungs between included; the new one, None
        when nothing changed."""
        wanted = max((r for r in Rung if used >= THRESHOLDS[r]), default=Rung.NORMAL)
        if wanted < self.rung and used > THRESHOLDS[self.rung] - EASED:
            return None
        if wanted == self.rung:
            return None
        down = wanted > self.rung
        steps = range(self.rung + 1, wanted + 1) if down else range(self.rung, wanted, -1)
        for step in steps:
            self._do(Rung(step), down)
        self.rung = wanted
        log.warning("memory %.0f %% in use: %s", 100 * used, wanted.name)
        return wanted

    def _do(self, rung: Rung, down: bool) -> None:
        if rung is Rung.SMALL_CACHE and down:
            loader.cache().release()
        elif rung is Rung.LITTLE_TELEMETRY:
            self.observe(down)
        elif rung is Rung.EAGER:
            self.eager(down)
