"""How much evidence stands behind a risk score. It says nothing about safety: 300 failures are evidence
too."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gauntlet import statistics
from library.contracts import FieldReport

FAILURES = ("CRASHED", "MISMATCH", "DIVERGED", "ROLLED_BACK")
"""Outcomes that are failures. CULLED for lack of gain, CANCELLED and mere exposure are not."""
HIGH, MODERATE, SPECULATIVE = "High", "Moderate", "Speculative"
HIGH_OUTCOMES, HIGH_FAILURES, HIGH_WIDTH = 300, 30, 0.10
MODERATE_OUTCOMES = 50


@dataclass(frozen=True)
class Evidence:
    """Outcomes in a group of artifacts, and the failures among them."""

    outcomes: int = 0
    failures: int = 0

    def __add__(self, other: Evidence) -> Evidence:
        return Evidence(self.outcomes + other.outcomes, self.failures + other.failures)


def evidence(reports: Iterable[FieldReport]) -> Evidence:
    """Every report counts, also those of use without failure."""
    found = [report.outcome in FAILURES for report in reports]
    return Evidence(len(found), sum(found))


def level(group: Evidence) -> str:
    """High: at least 300 outcomes, 30 failures among them, and a 90 % interval (Wilson) of their share of at
    most 0.10; Moderate: at least 50 outcomes; else Speculative."""
    low, high = statistics.wilson(group.failures, group.outcomes)
    if group.outcomes >= HIGH_OUTCOMES and group.failures >= HIGH_FAILURES and high - low <= HIGH_WIDTH:
        return HIGH
    return MODERATE if group.outcomes >= MODERATE_OUTCOMES else SPECULATIVE
