"""Energy of a call from the driver's counter (NVML), over windows between two of its refreshes.

The counter moves every 20 to 100 ms; a window begins and ends just after it moved while the work goes on, so
that what it counted belongs to the calls in between.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from typing import Any

import torch

from runtime.timing import Timing, Work, captured

WINDOW_S, WINDOWS = 0.5, 3
REFRESH_S = 2.0
"""Longest wait for the counter to move."""


class Meter:
    """The counter of one device. `absent`: why there is none, empty where there is."""

    def __init__(self, device: torch.device) -> None:
        self.absent, self._read = "", None
        if device.type != "cuda":
            self.absent = "no energy counter on a processor"
            return
        try:
            nvml: Any = importlib.import_module("pynvml")
            nvml.nvmlInit()
            index = torch.cuda.current_device() if device.index is None else device.index
            name = f"GPU-{torch.cuda.get_device_properties(index).uuid}"
            handle = nvml.nvmlDeviceGetHandleByUUID(name)
            self._read = lambda: float(nvml.nvmlDeviceGetTotalEnergyConsumption(handle))
            self._read()
        except ImportError:
            self.absent = "no energy counter: nvidia-ml-py is not installed"
        except Exception as error:  # pynvml's own classes exist only where the package does
            self.absent = f"no energy counter: {error}"

    def millijoules(self) -> float:
        """Since the driver was loaded."""
        assert self._read is not None
        return self._read()

    def measure(self, calls: Callable[[], int], window_s: float = WINDOW_S, windows: int = WINDOWS) -> Timing:
        """Microjoules of a call, a sample per window. `calls` runs the work a few milliseconds long, waits
        for the device, and says how often it ran.
        """
        samples = []
        at, level = self._moved(calls)
        for _ in range(windows):
            count, end = 0, at + window_s
            while time.monotonic() < end:
                count += calls()
            done, extra = self._until_moved(calls)
            count += extra
            samples.append(1000.0 * (done - level) / count)
            at, level = time.monotonic(), done
        return Timing(tuple(samples))

    def _moved(self, calls: Callable[[], int]) -> tuple[float, float]:
        """Time and level just after the counter moved."""
        level, _ = self._until_moved(calls)
        return time.monotonic(), level

    def _until_moved(self, calls: Callable[[], int]) -> tuple[float, int]:
        """Work until the counter moves: its level, and how many calls that took."""
        before, count, end = self.millijoules(), 0, time.monotonic() + REFRESH_S
        while True:
            count += calls()
            level = self.millijoules()
            if level != before or time.monotonic() > end:
                return level, count


def calls_of(work: Work) -> Callable[[], int]:
    """The work some milliseconds long, replayed from a graph where it can be; then the device is waited
    for."""
    replay, _ = captured(work)
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(10):
        replay()
    torch.cuda.synchronize()
    often = max(int(0.005 / max((time.perf_counter() - started) / 10, 1e-6)), 1)

    def run() -> int:
        for _ in range(often):
            replay()
        torch.cuda.synchronize()
        return often

    return run


def joules(work: Work, meter: Meter, device: torch.device) -> Timing:
    """Microjoules of a call on a card that has a counter."""
    with torch.cuda.device(device):
        return meter.measure(calls_of(work))
