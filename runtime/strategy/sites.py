"""Which slots would gain from a seed: a score per slot from the health map, for any number of slots at once.

Two independent signs are added. The *gain* of a slot is the share of its gradient that telemetry predicts a
new branch there could take away (`runtime.seeds.telemetry`): by that of all slots, times its alignment, so
that noise, which has no alignment, counts little. The *distance* is how far effective rank and share of dead
nodes of a slot lie from those of comparable slots (of as many features), in robust standard deviations: a
layer that is narrower, deader or noisier than its siblings. With fewer than three comparable others there is
no such distance. What is dead needs no comparison: a layer loses by it whatever its siblings do, so the
distance is at least one for every further halving of the live nodes once half are dead, and the most where
none is left.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runtime.seeds.lifecycle import Lifecycle
from runtime.strategy.packet import SystemStatePacket
from runtime.strategy.settings import SiteSettings

Array = NDArray[np.float64]
LEAST_SCALE = 0.1  # differences under this are within what healthy siblings show (log rank; share of nodes)
MAD = 1.4826  # median absolute deviation to standard deviation, of a normal distribution
_WIDEST = 1 << 20  # features, where the width is not known
MOST_DISTANCE = 6.0  # beyond, further is no worse
SIBLINGS = 3
HEALTHY_HALVINGS = 1.0  # of the live nodes: half of them dead is no reason by itself


@dataclass(frozen=True)
class Scores:
    """Per slot of the packet's health map: `total` = gain + distance; NaN where too little was measured."""

    slots: tuple[str, ...]
    total: Array
    gain: Array
    distance: Array

    def best(self) -> list[int]:
        """Numbers of the measured slots, best first; ties in the order of slots."""
        known = np.flatnonzero(~np.isnan(self.total))
        return known[np.argsort(-self.total[known], kind="stable")].tolist()

    def of(self, slot: str) -> float:
        """NaN for a slot that is not there."""
        return float(self.total[self.slots.index(slot)]) if slot in self.slots else float("nan")

    def why(self, number: int, packet: SystemStatePacket) -> str:
        """One line about one slot, with the numbers that count."""
        signals = packet.health_map[self.slots[number]]
        constant = signals["dead_node_ratio"] >= 1.0
        return (
            f"score {self.total[number]:.2f} "
            f"(gain {self.gain[number]:.2f}, distance {self.distance[number]:.2f}); "
            f"predicted gain {signals['predicted_gain']:.3g} at alignment {signals['gain_alignment']:.2f}, "
            f"effective rank {signals['effective_rank']:.3f}, dead {signals['dead_node_ratio']:.2f}"
            + (": a seed here sees a constant, one behind what is added to it sees more" if constant else "")
        )


def scores(packet: SystemStatePacket, settings: SiteSettings) -> Scores:
    """Of every slot of the packet; O(slots log slots)."""
    health = packet.health_map
    states = packet.seed_states
    edges = np.array([states[slot].features for slot in health.slots], dtype=np.int64).reshape(-1, 2)
    widths = edges[:, 1] - edges[:, 0]
    aligned = np.nan_to_num(health.column("gain_alignment"))
    predicted = np.nan_to_num(health.column("predicted_gain"))
    sure = (aligned >= settings.min_alignment) & (predicted >= settings.min_gain)
    weighed = np.where(sure, aligned.clip(0.0, 1.0), 0.0)
    total = predicted.sum()
    gain = settings.gain_weight * weighed * (predicted / total if total > 0.0 else 0.0)
    dead = health.column("dead_node_ratio")
    # Of a layer that is all dead the rank is 0; the least that a live one can have is one feature's.
    ranks = np.log(np.maximum(health.column("effective_rank"), 1.0 / np.where(widths > 0, widths, _WIDEST)))
    distance = np.maximum.reduce([_distance(ranks, widths), _distance(dead, widths, high=True), _lost(dead)])
    both = np.where(health.samples >= settings.min_samples, gain + distance, np.nan)
    return Scores(health.slots, both, gain, distance)


def _lost(dead: Array) -> Array:
    """What the share of dead nodes costs by itself: halvings of the live ones beyond the healthy; 0 where
    unknown."""
    halvings = -np.log2(np.maximum(1.0 - np.nan_to_num(dead), 1.0 / _WIDEST))
    return np.clip(halvings - HEALTHY_HALVINGS, 0.0, MOST_DISTANCE)


def _distance(values: Array, widths: NDArray[np.int64], *, high: bool = False) -> Array:
    """Robust distance of each value from the others of its width; only above them with `high`; 0 where
    unknown."""
    found = np.zeros(len(values))
    for width in np.unique(widths):
        members = np.flatnonzero((widths == width) & np.isfinite(values))
        if len(members) <= SIBLINGS:
            continue
        group = values[members]
        away = group - np.median(group)
        scale = max(MAD * float(np.median(np.abs(away))), LEAST_SCALE)
        found[members] = (away if high else np.abs(away)) / scale
    return np.clip(found, 0.0, MOST_DISTANCE)


def free(packet: SystemStatePacket, slot: str) -> bool:
    """Whether a seed can be asked for there."""
    return packet.seed_states[slot].state is Lifecycle.DORMANT
