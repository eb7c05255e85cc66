"""What the driver says about a card: clocks, temperature, throttle reasons, energy. By name where it says
nothing: without the package nvidia-ml-py, or where the driver refuses a question, a field is `unmeasured`.

The energy counter is refreshed every 100 ms or so and on some cards sees a quarter of the time (arXiv
2312.02741); over windows of several seconds that averages out.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gauntlet.report import UNMEASURED, Number

WINDOW_S, WINDOWS, IDLE_S = 5.0, 3, 2.0
"""Length and number of the windows of energy; how long the idle card is watched."""
REASONS = {
    0x4: "power cap", 0x8: "hardware slowdown", 0x20: "thermal slowdown by software",
    0x40: "thermal slowdown by hardware", 0x80: "power brake",
}  # fmt: skip
"""Bits of nvmlClocksEventReasons (nvml.h) that slow a card down; idle, and clocks that somebody set, do
not."""


@dataclass(frozen=True)
class Reading:
    """`throttled`: reasons in words; the rest is `unmeasured` where nobody tells."""

    clock_mhz: Number = UNMEASURED
    temperature_c: Number = UNMEASURED
    throttled: tuple[str, ...] = ()


@dataclass(frozen=True)
class Energy:
    """Watts while the work runs and while nothing does, joules per call, and the seconds of every window."""

    watts: Number = UNMEASURED
    idle_watts: Number = UNMEASURED
    joules_per_call: Number = UNMEASURED
    windows_s: tuple[float, ...] = ()


class Card:
    """One card as NVML shows it. `name`: its number or UUID, whatever CUDA_VISIBLE_DEVICES hides;
    `absent`: why it shows nothing, empty where it does."""

    def __init__(self, name: str) -> None:
        self.absent, self._nvml, self._handle = "", None, None
        try:
            nvml: Any = importlib.import_module("pynvml")
            nvml.nvmlInit()
            by_number = name.isdigit()
            found = nvml.nvmlDeviceGetHandleByIndex if by_number else nvml.nvmlDeviceGetHandleByUUID
            self._nvml, self._handle = nvml, found(int(name) if by_number else name)
        except ImportError:
            self.absent = "nvidia-ml-py is not installed"
        except Exception as error:  # pynvml's own classes exist only where the package does
            self.absent = f"NVML: {error}"

    def _asked(self, function: str, *arguments: Any) -> Any:
        """None where the driver does not answer this question."""
        if self._nvml is None:
            return None
        try:
            return getattr(self._nvml, function)(self._handle, *arguments)
        except Exception:  # NVMLError_NotSupported and its kin, or a function that this version lacks
            return None

    def reading(self) -> Reading:
        bits = self._asked("nvmlDeviceGetCurrentClocksEventReasons")
        if bits is None:
            bits = self._asked("nvmlDeviceGetCurrentClocksThrottleReasons") or 0
        return Reading(
            _number(self._asked("nvmlDeviceGetClockInfo", 1)),  # NVML_CLOCK_SM
            _number(self._asked("nvmlDeviceGetTemperature", 0)),  # NVML_TEMPERATURE_GPU
            tuple(text for bit, text in REASONS.items() if bits & bit),
        )

    def context(self) -> dict[str, Any]:
        """What belongs into the hardware context of a report."""
        ecc = self._asked("nvmlDeviceGetEccMode")
        return {
            "nvml": self.absent or "present",
            "driver": self._driver(),
            "ecc": bool(ecc[0]) if ecc else UNMEASURED,
            "power_limit_watts": _number(self._asked("nvmlDeviceGetEnforcedPowerLimit"), 1e-3),
            "max_clock_mhz": _number(self._asked("nvmlDeviceGetMaxClockInfo", 1)),
        }

    def _driver(self) -> str:
        if self._nvml is None:
            return UNMEASURED
        try:
            return str(self._nvml.nvmlSystemGetDriverVersion())
        except Exception:  # as above
            return UNMEASURED

    def millijoules(self) -> float | None:
        """Since the driver was loaded."""
        return self._asked("nvmlDeviceGetTotalEnergyConsumption")

    def energy(self, calls: Callable[[], int], window_s: float = WINDOW_S, windows: int = WINDOWS) -> Energy:
        """`calls` runs the work a while, waits for the device, and says how often it ran."""
        if self.millijoules() is None:
            return Energy()
        idle = self._window(lambda: time.sleep(0.05) or 0, IDLE_S)
        found = [self._window(calls, window_s) for _ in range(windows)]
        seconds = sum(s for s, _, _ in found)
        joules, count = sum(j for _, j, _ in found), sum(n for _, _, n in found)
        return Energy(
            round(joules / seconds, 3),
            round(idle[1] / idle[0], 3),
            joules / count if count else UNMEASURED,
            tuple(round(s, 2) for s, _, _ in found),
        )

    def _window(self, calls: Callable[[], int], seconds: float) -> tuple[float, float, int]:
        """(seconds, joules, calls)."""
        began, before, count = time.monotonic(), self.millijoules() or 0.0, 0
        while time.monotonic() - began < seconds:
            count += calls()
        after = self.millijoules() or before
        return time.monotonic() - began, (after - before) / 1e3, count


def _number(value: Any, scale: float = 1.0) -> Number:
    return UNMEASURED if value is None else float(value) * scale
