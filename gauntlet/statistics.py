"""Order statistics of samples, and the spread of processes. Pure, without torch.

Intervals hold whatever the distribution of the samples is: the number of samples below a quantile q is
binomial(n, q), so that two ranks bound it (David and Nagaraja, Order Statistics, 7.1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

CONFIDENCE = 0.95
QUANTILES = 40
"""Steps of the distribution that a report keeps."""


def quantile(samples: Sequence[float], q: float) -> float:
    """Linear between order statistics."""
    ordered = sorted(samples)
    at = q * (len(ordered) - 1)
    below = math.floor(at)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (at - below) * (ordered[above] - ordered[below])


def median(samples: Sequence[float]) -> float:
    return quantile(samples, 0.5)


@lru_cache(maxsize=1024)
def ranks(n: int, q: float, confidence: float = CONFIDENCE) -> tuple[int, int]:
    """Numbers (from 0) of the order statistics that enclose the quantile `q` of `n` samples, each side
    missing it with at most half of what `confidence` leaves. Where `n` is too small for that, the
    outermost ones."""
    miss = (1 - confidence) / 2
    low, high, below = 0, n - 1, 0.0
    for k in range(n):  # below: P(at most k samples lie under the quantile)
        below += _binomial(n, k, q)
        if below <= miss:
            low = k
        if below >= 1 - miss:
            high = k
            break
    return low, high


def _binomial(n: int, k: int, q: float) -> float:
    log = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
    return math.exp(log + k * math.log(q) + (n - k) * math.log1p(-q))


def interval(samples: Sequence[float], q: float, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Bounds of the quantile `q`."""
    ordered = sorted(samples)
    low, high = ranks(len(ordered), q, confidence)
    return ordered[low], ordered[high]


def width(samples: Sequence[float]) -> float:
    """Of the interval of the median, as a share of it."""
    low, high = interval(samples, 0.5)
    centre = median(samples)
    return (high - low) / centre if centre > 0 else math.inf


def spread(medians: Sequence[float]) -> float:
    """The "variance" of a measurement: how far the medians of its processes lie apart, as a share of their
    median."""
    centre = median(medians)
    return (max(medians) - min(medians)) / centre if centre > 0 else math.inf


def steps(samples: Sequence[float], count: int = QUANTILES) -> list[float]:
    """The distribution as quantiles 0, 1/count, .. 1."""
    return [quantile(samples, at / count) for at in range(count + 1)]


def overlap(a: Sequence[float], b: Sequence[float]) -> bool:
    """Whether two (low, high) meet."""
    return a[0] <= b[1] and b[0] <= a[1]


def wilson(successes: float, n: float, z: float = 1.645) -> tuple[float, float]:
    """Interval of a share (90 % at the default z): Wilson, JASA 22 (1927)."""
    if not n:
        return 0.0, 1.0
    share, square = successes / n, z * z / n
    centre = (share + square / 2) / (1 + square)
    half = z * math.sqrt(share * (1 - share) / n + square / (4 * n)) / (1 + square)
    return max(0.0, centre - half), min(1.0, centre + half)
