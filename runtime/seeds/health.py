"""The health of all slots at a boundary, as columns: what sites are chosen by."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from runtime.seeds.facts import SlotFacts
from runtime.seeds.state import HEALTH

SIGNALS = (
    "chunk_variance",
    "dead_node_ratio",
    "effective_rank",
    "avg_inter_node_correlation",
    "activation_entropy",
    "gradient_norm",
    "gradient_variance",
    "predicted_gain",
    "gain_alignment",
)
"""Columns of a health map; what was not measured is NaN. `runtime.seeds.telemetry` says what each is."""
ALIASES = {"activation_variance": "chunk_variance", "dead_neuron_ratio": "dead_node_ratio"}


class HealthMap(Mapping[str, Mapping[str, float]]):
    """Health per slot as columns: `table[i]` are the SIGNALS of slot `slots[i]`, float64 [slots, signals];
    `samples[i]` the sampled steps behind them. Read as a mapping it gives a slot's signals by name."""

    def __init__(
        self, slots: Sequence[str], table: NDArray[np.float64], samples: NDArray[np.float64]
    ) -> None:
        self.slots, self.table, self.samples = tuple(slots), table, samples
        self._at = {slot: i for i, slot in enumerate(self.slots)}

    def __getitem__(self, slot: str) -> Mapping[str, float]:
        row = self.table[self._at[slot]]
        return dict(zip(SIGNALS, row.tolist(), strict=True))

    def __iter__(self) -> Iterator[str]:
        return iter(self.slots)

    def __len__(self) -> int:
        return len(self.slots)

    def column(self, signal: str) -> NDArray[np.float64]:
        """One signal of all slots."""
        return self.table[:, SIGNALS.index(signal)]


@dataclass(frozen=True)
class HealthReport:
    """One slot at one epoch, as it is shown and stored. `is_ready_for_transition`: whether the gate of its
    next move would let it pass; `signals`: SIGNALS by name, without those that were not measured; times in
    microseconds, memory in bytes, `cache_hit_ratio` of the process's cache of artifacts."""

    slot: str
    epoch: int
    is_ready_for_transition: bool
    signals: Mapping[str, float]
    execution_latency_us: float
    kernel_load_latency_us: float
    max_latency: float
    avg_memory: float
    cache_hit_ratio: float

    def __getitem__(self, name: str) -> float:
        """A signal by name or alias."""
        return self.signals[ALIASES.get(name, name)]


_all = itemgetter(*HEALTH)


def _sums(health: Sequence[Mapping[str, float]]) -> NDArray[np.float64]:
    """float64 [slots, len(HEALTH)]; 0 for what a slot does not have."""
    try:
        flat = np.fromiter(chain.from_iterable(map(_all, health)), np.float64, len(health) * len(HEALTH))
    except KeyError:
        whole = [{**dict.fromkeys(HEALTH, 0.0), **one} for one in health]
        flat = np.array([_all(one) for one in whole], np.float64)
    return flat.reshape(-1, len(HEALTH))


def health_of(facts: Sequence[SlotFacts]) -> HealthMap:
    """Means from the sums of all slots; what has no samples is NaN."""
    sums = _sums([f.health for f in facts])
    by = {name: sums[:, at] for at, name in enumerate(HEALTH)}
    with np.errstate(invalid="ignore", divide="ignore"):
        norm = by["grad_norm"] / by["grad_samples"]
        found = (
            *(by[name] / by["samples"] for name in ("variance", "dead", "rank", "correlation", "entropy")),
            norm,
            np.maximum(by["grad_norm_sq"] / by["grad_samples"] - norm**2, 0.0),
            by["gain"] / by["windows"],
            by["alignment"] / by["windows"],
        )
    return HealthMap([f.slot for f in facts], np.stack(found, axis=1), by["samples"])
