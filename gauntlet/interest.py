"""How far an artifact's profile lies from its peers': what a designer of new blueprints should look at.

The squared Mahalanobis distance d of the profile to the mean of its peers, in k logarithmic coordinates, as
d / (d + k): 0 at the mean, 1/2 where a peer is expected (E[d] = k), towards 1 for what none of them is like.
The covariance is shrunk towards its diagonal (Ledoit and Wolf, J. Multivariate Anal. 88 (2004), with a fixed
weight), since peers are few.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from gauntlet.peers import LEAST, Report, cohort, number

COORDINATES = (
    ("latency_ms_median",), ("roofline_share",), ("flops", "bytes_moved"), ("memory_mb_peak", "bytes_moved"),
    ("eager_both_ms_median", "both_ms_median"), ("precision_drift_vs_fp64",), ("tolerance_used",),
)  # fmt: skip
"""Numbers of the profile, or a number over another."""
SHRINK, LEAST_VALUE = 0.1, 1e-9


def coordinates(report: Report) -> list[float]:
    """Logarithms; NaN where something was not measured."""
    found = []
    for names in COORDINATES:
        values = [number(report, name) for name in names]
        known = [v for v in values if v is not None and v >= 0]
        if len(known) < len(names):
            found.append(math.nan)
            continue
        value, over = known[0], known[1] if len(known) > 1 else 1.0
        found.append(math.log(max(value, LEAST_VALUE) / max(over, LEAST_VALUE)))
    return found


def interest(report: Report, others: Sequence[Report]) -> float | None:
    """In [0, 1), against the others of its class and hardware; None with fewer than LEAST of them."""
    own = np.array(coordinates(report))
    peers = np.array([coordinates(r) for r in others if cohort(r) == cohort(report)])
    if len(peers) < LEAST:
        return None
    known = ~np.isnan(own) & ~np.isnan(peers).any(axis=0)
    spread = peers[:, known].std(axis=0) > LEAST_VALUE
    peers, own = peers[:, known][:, spread], own[known][spread]
    if not own.size:
        return 0.0
    covariance = np.atleast_2d(np.cov(peers, rowvar=False))
    shrunk = (1 - SHRINK) * covariance + SHRINK * np.diag(np.diag(covariance))
    away = own - peers.mean(axis=0)
    distance = float(away @ np.linalg.solve(shrunk, away))
    return round(distance / (distance + own.size), 6)
