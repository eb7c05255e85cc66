"""Where an artifact stands among its peers: artifacts of the same class measured on the same hardware.

Blocks of one class differ in size and dtype, so that nothing is compared as it was measured: speed is the
share of the roofline, memory stands over the bytes that have to move, drift counts roundings of the dtype.
Ranks decide, not values between two artifacts: an artifact belongs to the best 20 % when fewer than 20 % of
its peers (itself among them) are strictly better.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from esper_ir.diagnostics import EXIT_NOT_FOUND, EsperError
from gauntlet import statistics

Report = Mapping[str, Any]
"""The JSON of a verdict's report."""
LEAST = 20
"""Fewer peers than this cannot be ranked; a rule decides."""
ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
CUTS = (0.2, 0.25, 0.5, 0.7, 0.75)
Key = tuple[str, str, str]
"""(hardware, class, metric)."""


@dataclass(frozen=True)
class Metric:
    """`of` is None where it was not measured. `up`: a larger number is better."""

    name: str
    text: str
    of: Callable[[Report], float | None]
    up: bool = False


def number(report: Report, name: str) -> float | None:
    """A measured number of the profile."""
    value = report["wep"].get(name)
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if good else None


def throttled(report: Report) -> bool:
    """Its times were taken on a card that was slowed down."""
    return "throttled" in str(report["wep"].get("conditions", ""))


def _speed(report: Report) -> float | None:
    return None if throttled(report) else number(report, "roofline_share")


def _memory(report: Report) -> float | None:
    peak, moved = number(report, "memory_mb_peak"), number(report, "bytes_moved")
    return peak * 1e6 / moved if peak is not None and moved else None


def _drift(report: Report) -> float | None:
    drift, unit = number(report, "precision_drift_vs_fp64"), ROUNDOFF.get(str(report["wep"].get("dtype")))
    return drift / unit if drift is not None and unit else None


METRICS = (
    Metric("speed", "share of the roofline (not while the card was throttled)", _speed, up=True),
    Metric("memory", "peak memory of a call over the bytes that have to move", _memory),
    Metric("power", "watts on average", lambda report: number(report, "power_watts_avg")),
    Metric("drift", "relative error against float64 in roundings of the dtype", _drift),
)
BY_NAME = {metric.name: metric for metric in METRICS}


def metric(name: str) -> Metric:
    """E0911 for one that is not known."""
    if name not in BY_NAME:
        known = ", ".join(BY_NAME)
        raise EsperError("E0911", f"no metric {name!r}", hint=f"one of {known}", exit_code=EXIT_NOT_FOUND)
    return BY_NAME[name]


@dataclass(frozen=True)
class Standing:
    """Shares of the peers that are strictly better and strictly worse, and how many peers there are."""

    better: float
    worse: float
    n: int


class Peers:
    """The distributions of a library, one per (hardware, class, metric)."""

    def __init__(self, reports: Iterable[Report]) -> None:
        found: dict[Key, list[float]] = defaultdict(list)
        for report in reports:
            for one in METRICS:
                value = one.of(report)
                if value is not None:
                    found[(*cohort(report), one.name)].append(value)
        self.values = {key: tuple(sorted(values)) for key, values in found.items()}

    def standing(self, report: Report, name: str) -> Standing | None:
        """None without the number, or where fewer than LEAST have one. The report is among its own peers."""
        one = metric(name)
        value, values = one.of(report), self.values.get((*cohort(report), name), ())
        if value is None or len(values) < LEAST:
            return None
        below, above = sum(v < value for v in values), sum(v > value for v in values)
        better, worse = (above, below) if one.up else (below, above)
        return Standing(better / len(values), worse / len(values), len(values))

    def to_json(self) -> list[dict[str, Any]]:
        """Every distribution: how many, whether that is enough, the cuts and the values."""
        return [
            {
                "hardware": hardware, "op_class": kind, "metric": name, "n": len(values),
                "basis": "percentile" if len(values) >= LEAST else "rule",
                "cuts": {f"{q:g}": statistics.quantile(values, q) for q in CUTS}, "values": list(values),
            }
            for (hardware, kind, name), values in sorted(self.values.items())
        ]  # fmt: skip


def cohort(report: Report) -> tuple[str, str]:
    """(hardware, class)."""
    hardware = report.get("hardware_context", {})
    return str(hardware.get("card", "unknown")), str(report["wep"].get("op_class", "unmeasured"))
