"""Outcomes and verdicts made up for tests of the risk model."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

from gauntlet.risk import features
from gauntlet.risk.outcomes import SIMULATED, Outcome


def values(rng: random.Random) -> dict[str, float]:
    """Features as they could be, some missing."""
    made = dict.fromkeys(features.NAMES, math.nan)
    used = rng.random()
    return {
        **made, "worst_used": used, "numerics_used": used, "numerics_cases": rng.uniform(1, 5),
        "gradients_cases": rng.choice((0.0, 3.0)), "size_distance": rng.expovariate(1), "rest_untested": 0.0,
        "atomics": float(rng.random() < 0.2), "width": rng.choice((16.0, 32.0)),
    }  # fmt: skip


def chance(known: dict[str, float]) -> float:
    """Of failing, in these tests: what was tested far from its use and near the bound fails."""
    odds = -4 + 3 * known["worst_used"] + 1.2 * known["size_distance"] - known["gradients_cases"] / 2
    return 1 / (1 + math.exp(-odds))


def outcomes(count: int, seed: int = 0, basis: str = SIMULATED) -> Iterator[Outcome]:
    """Two trainings with each artifact, ten families."""
    rng = random.Random(seed)
    for at in range(count):
        known = values(rng)
        failed = rng.random() < chance(known)
        artifact, family = f"artifact {at // 2}", f"family {at // 2 % 10}"
        yield Outcome(
            f"{artifact}:{at % 2}", artifact, family, family, "pointwise", "numerics",
            "MISMATCH" if failed else "EXPOSED", "", "", basis, 1e9 + at, known,
        )  # fmt: skip


def report() -> dict[str, Any]:
    """Of a verdict: what is read of it here."""
    cases: dict[str, Any] = {"cases": 7, "tolerance_used": 0.2, "sizes": {"rows": [1, 16, 48]}}
    stages = [
        {"name": "numerics", "outcome": "passed", "metrics": {**cases, "drift": 1e-7}, "reason": ""},
        {"name": "gradients", "outcome": "passed", "metrics": {**cases, "tolerance_used": 0.4}, "reason": ""},
        {"name": "soak", "outcome": "skipped", "metrics": {}, "reason": "nothing to train"},
    ]
    return {"stages": stages, "wep": {"workspace_bytes": 4096, "registers": "unmeasured"}}
