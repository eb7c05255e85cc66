"""What was tried for one tile and what it took; who wins."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from esper_ir.diagnostics import EsperError
from forge.plan import Tile
from forge.tune import space
from forge.tune.shapes import Shape
from forge.tune.tiles import tile_of, tile_row, values_of

MARGIN = 0.02
ENERGY = ("uj", "uj_low", "uj_high")


@dataclass(frozen=True)
class Trial:
    """One tile: median and interval in microseconds, where it was measured also in microjoules; or why it is
    out.
    """

    tile: Tile
    us: float = math.inf
    low: float = math.inf
    high: float = math.inf
    wrong: str = ""
    uj: float = math.inf
    uj_low: float = math.inf
    uj_high: float = math.inf

    def row(self) -> dict[str, Any]:
        """As data, for a report and for the store."""
        base = tile_row(self.tile)
        times = {"us": self.us, "low": self.low, "high": self.high}
        if math.isfinite(self.uj):
            times |= {"uj": self.uj, "uj_low": self.uj_low, "uj_high": self.uj_high}
        return {**base, "wrong": self.wrong} if self.wrong else {**base, **times}


def trial_of(row: Mapping[str, Any]) -> Trial | None:
    """A kept measurement; None for one that this version does not know."""
    try:
        tile = tile_of("kept", row)
        if row.get("wrong"):
            return Trial(tile, wrong=str(row["wrong"]))
        spent = [float(row.get(name, math.inf)) for name in ENERGY]
        return Trial(tile, float(row["us"]), float(row["low"]), float(row["high"]), "", *spent)
    except (EsperError, KeyError, TypeError, ValueError):
        return None


@dataclass
class Hunt:
    """The search for one tile: `group` is the name it has in a plan, `floor_us` the least time of its bytes,
    `share` how many tiles may be tried; `shape` and `origin`: what the prior is for and where it came from;
    `idle`: fields of a tile that change nothing of this group on its target.
    """

    key: str
    group: str
    prior: Tile
    floor_us: float = 0.0
    trials: dict[str, Trial] = field(default_factory=dict)
    share: int = 0
    shape: Shape | None = None
    origin: str = "rule"
    idle: tuple[str, ...] = ()

    def keep(self, trial: Trial) -> None:
        """The newest counts; energy that it did not measure stays."""
        old = self.trials.get(repr(trial.tile))
        if old is not None and not trial.wrong and not math.isfinite(trial.uj):
            trial = replace(trial, uj=old.uj, uj_low=old.uj_low, uj_high=old.uj_high)
        self.trials[repr(trial.tile)] = trial

    def recall(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """What was measured before, oldest first."""
        for trial in map(trial_of, rows):
            if trial is not None and type(trial.tile) is type(self.prior):
                self.keep(trial)

    def good(self) -> list[Trial]:
        """Trials that count, fastest first."""
        return sorted((t for t in self.trials.values() if not t.wrong), key=lambda t: t.us)

    def finalists(self, count: int, always: bool = False) -> list[Tile]:
        """The prior and the best others, to be timed side by side; none where nothing is faster, unless
        `always`.
        """
        good = self.good()
        if not always and (len(good) < 2 or good[0].tile == self.prior):
            return []
        if always and not any(t.tile == self.prior for t in good):
            return []
        return [self.prior, *(t.tile for t in good[:count] if t.tile != self.prior)]

    def open(self) -> list[Tile]:
        """Untried neighbours of the best tiles, the best one's first."""
        found: dict[str, Tile] = {}
        for trial in self.good()[:4]:
            for tile in space.neighbours(trial.tile, self.idle):
                if repr(tile) not in self.trials:
                    found.setdefault(repr(tile), tile)
        return list(found.values())

    def by_energy(self, aim: str) -> bool:
        """Whether joules decide: they were asked for, and are known of the prior."""
        prior = self.trials.get(repr(self.prior))
        return aim == "power" and prior is not None and math.isfinite(prior.uj)

    def winner(self, aim: str = "speed") -> Tile | None:
        """A tile that beats the prior by the margin, outside the noise; among equals the nearest. For `power`
        what counts is energy where it was measured, else time.
        """
        prior = self.trials.get(repr(self.prior))
        if prior is None or prior.wrong:
            return None
        cost = _joules if self.by_energy(aim) else _time
        least, low, _ = cost(prior)
        good = sorted(self.good(), key=lambda t: cost(t)[0])
        better = [t for t in good if cost(t)[0] < least * (1 - MARGIN) and cost(t)[2] < low]
        even = [t.tile for t in better if cost(t)[0] <= cost(better[0])[0] * 1.005]
        return min(even, key=lambda t: (space.distance(t, self.prior), repr(t)), default=None)

    def report(self) -> dict[str, Any]:
        trials = sorted(self.trials.values(), key=lambda t: (bool(t.wrong), t.us))
        shape = {"family": self.shape.family, "sizes": list(self.shape.sizes)} if self.shape else {}
        shape |= {"idle": list(self.idle)} if self.idle else {}
        return {
            "key": self.key, "group": self.group, "kind": type(self.prior).__name__,
            "prior": values_of(self.prior), "origin": self.origin, **shape, "floor_us": self.floor_us,
            "trials": [t.row() for t in trials],
        }  # fmt: skip


def _time(t: Trial) -> tuple[float, float, float]:
    return t.us, t.low, t.high


def _joules(t: Trial) -> tuple[float, float, float]:
    return t.uj, t.uj_low, t.uj_high


def winners(hunts: Iterable[Hunt], aim: str = "speed") -> dict[str, Tile]:
    found = {h.key: h.winner(aim) for h in hunts}
    return {key: tile for key, tile in found.items() if tile is not None}


def gain(hunts: Sequence[Hunt]) -> float:
    """How much faster all groups together are with the best tiles so far."""
    pairs = [(h.trials[repr(h.prior)].us, h.good()) for h in hunts if repr(h.prior) in h.trials]
    timed = [(prior, good[0].us) for prior, good in pairs if math.isfinite(prior) and good]
    return sum(p for p, _ in timed) / sum(b for _, b in timed) if timed else 1.0


def won(hunts: Iterable[Hunt], given: Mapping[str, Tile]) -> float:
    """How much faster the groups with the tiles of `given` are together than with their first; 1 for none."""
    pairs = [(h.trials[repr(h.prior)].us, h.trials[repr(given[h.key])].us) for h in hunts if h.key in given]
    timed = [(old, new) for old, new in pairs if math.isfinite(old) and math.isfinite(new)]
    return round(sum(old for old, _ in timed) / sum(new for _, new in timed), 3) if timed else 1.0


def report(
    hunts: Sequence[Hunt], arch: str, toolchain: str, aim: str = "speed", absent: str = ""
) -> dict[str, Any]:
    """The document kept beside an artifact. `decided`: by what the tiles of each group were chosen; `absent`:
    why no energy was measured for `power`.
    """
    groups = [{**h.report(), "decided": "energy" if h.by_energy(aim) else "time"} for h in hunts]
    document = {"schema": "esper-tuning/1", "arch": arch, "toolchain": toolchain, "groups": groups}
    return {**document, "objective": aim, **({"absent": absent} if absent else {})}
