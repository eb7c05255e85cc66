"""What was tried for one tile and what it took; who wins."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from esper_ir.diagnostics import EsperError
from forge.plan import Tile
from forge.tune import space
from forge.tune.shapes import Shape
from forge.tune.tiles import tile_of, tile_row

MARGIN = 0.02


@dataclass(frozen=True)
class Trial:
    """One tile: median and interval in microseconds, or why it is out."""

    tile: Tile
    us: float = math.inf
    low: float = math.inf
    high: float = math.inf
    wrong: str = ""

    def row(self) -> dict[str, Any]:
        """As data, for a report and for the store."""
        base = tile_row(self.tile)
        times = {"us": self.us, "low": self.low, "high": self.high}
        return {**base, "wrong": self.wrong} if self.wrong else {**base, **times}


def trial_of(row: Mapping[str, Any]) -> Trial | None:
    """A kept measurement; None for one that this version does not know."""
    try:
        tile = tile_of("kept", row)
        if row.get("wrong"):
            return Trial(tile, wrong=str(row["wrong"]))
        return Trial(tile, float(row["us"]), float(row["low"]), float(row["high"]))
    except (EsperError, KeyError, TypeError, ValueError):
        return None


@dataclass
class Hunt:
    """The search for one tile: `group` is the name it has in a plan, `floor_us` the least time of its bytes,
    `share` how many tiles may be tried; `shape` and `origin`: what the prior is for and where it came from.
    """

    key: str
    group: str
    prior: Tile
    floor_us: float = 0.0
    trials: dict[str, Trial] = field(default_factory=dict)
    share: int = 0
    shape: Shape | None = None
    origin: str = "rule"

    def keep(self, trial: Trial) -> None:
        self.trials[repr(trial.tile)] = trial

    def recall(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """What was measured before, oldest first."""
        for trial in map(trial_of, rows):
            if trial is not None and type(trial.tile) is type(self.prior):
                self.keep(trial)

    def good(self) -> list[Trial]:
        """Trials that count, fastest first."""
        return sorted((t for t in self.trials.values() if not t.wrong), key=lambda t: t.us)

    def finalists(self, count: int) -> list[Tile]:
        """The prior and the best others, to be timed side by side; none where nothing is faster."""
        good = self.good()
        if len(good) < 2 or good[0].tile == self.prior:
            return []
        return [self.prior, *(t.tile for t in good[:count] if t.tile != self.prior)]

    def open(self) -> list[Tile]:
        """Untried neighbours of the best tiles, the best one's first."""
        found: dict[str, Tile] = {}
        for trial in self.good()[:4]:
            for tile in space.neighbours(trial.tile):
                if repr(tile) not in self.trials:
                    found.setdefault(repr(tile), tile)
        return list(found.values())

    def winner(self) -> Tile | None:
        """A tile that beats the prior by the margin, outside the noise; among equals the nearest."""
        prior = self.trials.get(repr(self.prior))
        if prior is None or prior.wrong:
            return None
        better = [t for t in self.good() if t.us < prior.us * (1 - MARGIN) and t.high < prior.low]
        even = [t.tile for t in better if t.us <= better[0].us * 1.005]
        return min(even, key=lambda t: (space.distance(t, self.prior), repr(t)), default=None)

    def report(self) -> dict[str, Any]:
        trials = sorted(self.trials.values(), key=lambda t: (bool(t.wrong), t.us))
        shape = {"family": self.shape.family, "sizes": list(self.shape.sizes)} if self.shape else {}
        return {
            "key": self.key, "group": self.group, "kind": type(self.prior).__name__,
            "prior": asdict(self.prior), "origin": self.origin, **shape, "floor_us": self.floor_us,
            "trials": [t.row() for t in trials],
        }  # fmt: skip


def winners(hunts: Iterable[Hunt]) -> dict[str, Tile]:
    found = {h.key: h.winner() for h in hunts}
    return {key: tile for key, tile in found.items() if tile is not None}


def gain(hunts: Sequence[Hunt]) -> float:
    """How much faster all groups together are with the best tiles so far."""
    pairs = [(h.trials[repr(h.prior)].us, h.good()) for h in hunts if repr(h.prior) in h.trials]
    timed = [(prior, good[0].us) for prior, good in pairs if math.isfinite(prior) and good]
    return sum(p for p, _ in timed) / sum(b for _, b in timed) if timed else 1.0


def report(hunts: Iterable[Hunt], arch: str, toolchain: str) -> dict[str, Any]:
    """The document kept beside an artifact."""
    groups = [h.report() for h in hunts]
    return {"schema": "esper-tuning/1", "arch": arch, "toolchain": toolchain, "groups": groups}
