"""Tags: what a report says about an artifact in words.

With enough peers (artifacts of its class on the same hardware, `gauntlet.peers`) ranks among them decide the
tags of speed, memory, power and stability; while there are too few, a rule over numbers of the evaluation
profile does. Where a number was not measured, its tags are not given. In the rules `share` is the share of
the roofline, `ratio` eager's time over the artifact's. Conservative on purpose: by rule a tag stands only
where the number lies clearly on its side. The last tags name the basis of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gauntlet.peers import Peers, Standing
from gauntlet.peers import number as _number
from gauntlet.peers import throttled as _throttled

BASIS, PERCENTILE = "basis:rule", "basis:percentile"


@dataclass(frozen=True)
class Rule:
    """`text` is the rule in words, for `esper-gauntlet tags --rules`. `holds` sees the report as JSON."""

    tag: str
    text: str
    holds: Callable[[Mapping[str, Any]], bool]


def _ratio(report: Mapping[str, Any]) -> float | None:
    """Eager's time over the artifact's, forward and backward together: in one call where that was timed."""
    for names in (("both_ms_median",), ("forward_ms_median", "backward_ms_median")):
        pairs = [(_number(report, n), _number(report, f"eager_{n}")) for n in names]
        known = [(ours, eager) for ours, eager in pairs if ours and eager]
        if known:
            return sum(eager for _, eager in known) / sum(ours for ours, _ in known)
    return None


def _speed(low: float, high: float) -> Callable[[Mapping[str, Any]], bool]:
    """The share of the roofline, or without it the ratio to eager, lies in a range."""

    def holds(report: Mapping[str, Any]) -> bool:
        if _throttled(report):
            return False
        share, ratio = _number(report, "roofline_share"), _ratio(report)
        value = share if share is not None else ratio / RATIO_OF_SHARE if ratio is not None else None
        return value is not None and low <= value < high

    return holds


RATIO_OF_SHARE = 4.0
"""Without a roofline four times eager's speed counts as the whole of it."""


def _margin(report: Mapping[str, Any]) -> bool:
    used = _number(report, "tolerance_used")
    return used is not None and used <= 0.5


def _repeats(report: Mapping[str, Any]) -> bool:
    """Equal bits that were promised and seen; of library calls that promise none, none that differed say
    nothing of the next machine. Reports before that was told had promises only."""
    passed = [s for s in report["stages"] if s["name"] == "determinism" and s["outcome"] == "passed"]
    return any(stage.get("metrics", {}).get("bits_promised", 1) for stage in passed)


def _learns(report: Mapping[str, Any]) -> bool:
    """Gradients that were proven, of something that learns; reports before that was counted tell only the
    first."""
    passed = [s for s in report["stages"] if s["name"] == "gradients" and s["outcome"] == "passed"]
    return any(stage.get("metrics", {}).get("parameters", 1) > 0 for stage in passed)


def _workspace(low: float, high: float) -> Callable[[Mapping[str, Any]], bool]:
    """Workspace in shares of the bytes that have to move anyway."""

    def holds(report: Mapping[str, Any]) -> bool:
        own, moved = _number(report, "workspace_bytes"), _number(report, "bytes_moved")
        return own is not None and bool(moved) and low <= own / (moved or 1.0) < high

    return holds


def _faster(report: Mapping[str, Any]) -> bool:
    ratio = _ratio(report)
    return ratio is not None and ratio >= 1.05


def _faster_than_compile(report: Mapping[str, Any]) -> bool:
    phase = "both" if _number(report, "both_ms_median") else "forward"
    ours, theirs = _number(report, f"{phase}_ms_median"), _number(report, f"compile_{phase}_ms_median")
    return bool(ours and theirs and theirs / ours >= 1.05)


def _bound(by: str) -> Callable[[Mapping[str, Any]], bool]:
    return lambda report: report["wep"].get("bound_by") == by


INF = float("inf")
RULES = (
    Rule("high_speed", "share of the roofline >= 0.85, else ratio to eager >= 3.4", _speed(0.85, INF)),
    Rule("medium_speed", "share from 0.4 to 0.85, else ratio from 1.6 to 3.4", _speed(0.4, 0.85)),
    Rule("low_speed", "share < 0.4, else ratio < 1.6", _speed(0.0, 0.4)),
    Rule("low_memory", "workspace < 5 % of the bytes that have to move", _workspace(0.0, 0.05)),
    Rule("medium_memory", "workspace from 5 to 50 %", _workspace(0.05, 0.5)),
    Rule("high_memory", "workspace >= 50 %", _workspace(0.5, INF)),
    Rule("numerically_stable", "the worst error of all cases is at most half of its bound", _margin),
    Rule("deterministic", "equal bits are promised, and the stage of determinism passed", _repeats),
    Rule("trainable", "the stage of gradients passed, and there are parameters that learn", _learns),
    Rule("memory_bound", "moving the bytes takes longer than the operations", _bound("memory")),
    Rule("compute_bound", "the operations take longer than moving the bytes", _bound("compute")),
    Rule("faster_than_eager", "ratio to eager >= 1.05", _faster),
    Rule("faster_than_compile", "torch.compile's time over the artifact's >= 1.05", _faster_than_compile),
)


@dataclass(frozen=True)
class Rank:
    """A tag by its place among peers, from 20 on: `holds` sees how many are strictly better and worse."""

    metric: str
    tag: str
    text: str
    holds: Callable[[Standing], bool]
    also: Callable[[Mapping[str, Any]], bool] = lambda report: True


RANKS = (
    Rank("speed", "high_speed", "the fastest 20 %", lambda at: at.better < 0.2),
    Rank("speed", "medium_speed", "from there to 70 %", lambda at: 0.2 <= at.better < 0.7),
    Rank("speed", "low_speed", "the rest", lambda at: at.better >= 0.7),
    Rank("memory", "low_memory", "the lowest 25 %", lambda at: at.better < 0.25),
    Rank("memory", "medium_memory", "between", lambda at: min(at.better, at.worse) >= 0.25),
    Rank("memory", "high_memory", "the highest 25 %", lambda at: at.worse < 0.25 <= at.better),
    Rank("power", "low_power", "the lowest 25 %", lambda at: at.better < 0.25),
    Rank("power", "high_power", "the highest 25 %", lambda at: at.worse < 0.25 <= at.better),
    Rank("drift", "numerically_stable", "the better half, and the worst error at most half of its bound",
         lambda at: at.better < 0.5, _margin),
)  # fmt: skip
ORDER = tuple(dict.fromkeys([*(r.tag for r in RULES), *(r.tag for r in RANKS)]))


def of(report: Mapping[str, Any], peers: Peers | None = None) -> tuple[str, ...]:
    """The tags of a report (the JSON of a verdict), in one order, and what they rest on. `peers`: None while
    nobody knows any."""
    found, ranked, ruled = set[str](), set[str](), False
    for rank in RANKS:
        standing = peers.standing(report, rank.metric) if peers else None
        if standing is not None:
            ranked.add(rank.tag)
            found |= {rank.tag} if rank.holds(standing) and rank.also(report) else set()
    for rule in RULES:
        if rule.tag not in ranked and rule.holds(report):
            found.add(rule.tag)
            ruled = ruled or rule.tag in RELATIVE
    if not found:
        return ()
    basis = [PERCENTILE] * bool(ranked) + [BASIS] * (ruled or not ranked)
    return (*(tag for tag in ORDER if tag in found), *basis)


RELATIVE = frozenset(rank.tag for rank in RANKS)
"""Tags that compare with peers; the others state what is so."""
