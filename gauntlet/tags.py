"""Rule-based tags: what a report says about an artifact in words, while there are too few peers to rank it.

Each tag has one rule over numbers of the evaluation profile; where a number was not measured, its tags are
not given. `share` is the share of the roofline, `ratio` eager's time over the artifact's. Conservative on
purpose: a tag stands only where the number lies clearly on its side. Every annotation names its basis.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

BASIS = "basis:rule"


@dataclass(frozen=True)
class Rule:
    """`text` is the rule in words, for `esper-gauntlet tags --rules`. `holds` sees the report as JSON."""

    tag: str
    text: str
    holds: Callable[[Mapping[str, Any]], bool]


def _number(report: Mapping[str, Any], name: str) -> float | None:
    value = report["wep"].get(name)
    return float(value) if isinstance(value, int | float) else None


def _ratio(report: Mapping[str, Any]) -> float | None:
    """Eager's time over the artifact's, forward and backward together where both were measured."""
    ours = [_number(report, n) for n in ("forward_ms_median", "backward_ms_median")]
    eager = [_number(report, f"eager_{n}") for n in ("forward_ms_median", "backward_ms_median")]
    pairs = [(a, b) for a, b in zip(ours, eager, strict=True) if a and b]
    return sum(b for _, b in pairs) / sum(a for a, _ in pairs) if pairs else None


def _speed(low: float, high: float) -> Callable[[Mapping[str, Any]], bool]:
    """The share of the roofline, or without it the ratio to eager, lies in a range."""

    def holds(report: Mapping[str, Any]) -> bool:
        share, ratio = _number(report, "roofline_share"), _ratio(report)
        value = share if share is not None else ratio / RATIO_OF_SHARE if ratio is not None else None
        return value is not None and low <= value < high

    return holds


RATIO_OF_SHARE = 4.0
"""Without a roofline four times eager's speed counts as the whole of it."""


def _margin(report: Mapping[str, Any]) -> bool:
    used = _number(report, "tolerance_used")
    return used is not None and used <= 0.5


def _passed(stage: str) -> Callable[[Mapping[str, Any]], bool]:
    return lambda report: any(s["name"] == stage and s["outcome"] == "passed" for s in report["stages"])


def _workspace(low: float, high: float) -> Callable[[Mapping[str, Any]], bool]:
    """Workspace in shares of the bytes that have to move anyway."""

    def holds(report: Mapping[str, Any]) -> bool:
        own, moved = _number(report, "workspace_bytes"), _number(report, "bytes_moved")
        return own is not None and bool(moved) and low <= own / (moved or 1.0) < high

    return holds


def _faster(report: Mapping[str, Any]) -> bool:
    ratio = _ratio(report)
    return ratio is not None and ratio >= 1.05


INF = float("inf")
RULES = (
    Rule("high_speed", "share of the roofline >= 0.85, else ratio to eager >= 3.4", _speed(0.85, INF)),
    Rule("medium_speed", "share from 0.4 to 0.85, else ratio from 1.6 to 3.4", _speed(0.4, 0.85)),
    Rule("low_speed", "share < 0.4, else ratio < 1.6", _speed(0.0, 0.4)),
    Rule("low_memory", "workspace < 5 % of the bytes that have to move", _workspace(0.0, 0.05)),
    Rule("medium_memory", "workspace from 5 to 50 %", _workspace(0.05, 0.5)),
    Rule("high_memory", "workspace >= 50 %", _workspace(0.5, INF)),
    Rule("numerically_stable", "the worst error of all cases is at most half of its bound", _margin),
    Rule("deterministic", "the stage of determinism passed", _passed("determinism")),
    Rule("trainable", "the stage of gradients passed", _passed("gradients")),
    Rule("faster_than_eager", "ratio to eager >= 1.05", _faster),
)


def of(report: Mapping[str, Any]) -> tuple[str, ...]:
    """The tags of a report (the JSON of a verdict), in the order of RULES, and what they rest on."""
    found = [rule.tag for rule in RULES if rule.holds(report)]
    return (*found, BASIS) if found else ()


def annotation(report: Mapping[str, Any]) -> dict[str, Any]:
    """What is signed beside a VALIDATED verdict: nothing was seen in use yet."""
    return {"generated_tags": list(of(report)), "conf_level": "Speculative"}
