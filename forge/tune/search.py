"""The tuner: for every tile that was picked, others built, compared and timed; the best kept.

Candidates are found step by step from the prior: first its neighbours, then those that a model of what was
measured so far ranks highest ("is it among the best tenth", failures are the worst), until the number of
trials is used up. How many a group gets goes by what it could gain: its time less the least its bytes need.
The best few are timed again beside the prior; a new one wins only where it is 2 % faster with its interval.

Everything that was measured is kept by group, architecture and toolchain, and read before anything is timed
again: a search that was killed goes on where it was. Without the device that alone decides.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from forge.lower import Kernels
from forge.plan import Tile
from forge.target import Target
from forge.tune import candidates, space
from forge.tune.candidates import Built, Passing, Subject, Timer
from forge.tune.products import way_hunts, way_sites
from forge.tune.rank import ranked
from forge.tune.store import Store
from forge.tune.trials import Hunt, Trial, gain, report, winners, won

FINALISTS, ENERGY_FINALISTS = 8, 5
ROUNDS, FINAL_ROUNDS = 9, 41
A_CORE, MOST = 6, 96
"""Candidates of one build and one timing, by cores that build them."""
GUESS_S = 10.0
"""Processor seconds that a tile takes to be built and timed, before one was."""
SEED = 20_240


@dataclass(frozen=True)
class Effort:
    """`trials` over all groups of a blueprint; `seconds`: nothing is begun that would hardly end by then,
    going by how long the tiles before took; the finalists, which are built by then, are timed again after it.
    `aim`: the objective; for `power` the finalists' energy is measured where the device counts it, a group at
    a time.
    """

    trials: int = 300
    seconds: float = 300.0
    finalists: int = FINALISTS
    aim: str = "speed"


@dataclass(frozen=True)
class Found:
    """`given`: the tiles that won, by key; `report`: every trial with its time or its reason."""

    given: Mapping[str, Tile]
    report: Mapping[str, Any]


def hunts_of(kernels: Kernels) -> list[Hunt]:
    """A hunt for every tile of a plan that can be tuned."""
    out = []
    for key, site in sorted(kernels.sites.items()):
        prior, origin = kernels.choices.made[key]
        if space.tunable(prior):
            least = candidates.least_us(site, kernels.choices.given)
            shape = kernels.choices.shapes.get(key)
            idle = candidates.idle(site, kernels.choices.given)
            out.append(Hunt(key, site.group.name, prior, least, shape=shape, origin=origin, idle=idle))
    return out


def subjects(
    kernels: Kernels, keys: Collection[str] | None = None
) -> tuple[list[Hunt], dict[str, Subject]]:  # fmt: skip
    """What can be searched of a plan, by key: tiles of groups, and the way of every product (`keys`: of these
    only). A tile that came with a product's way is searched with it.
    """
    found = way_sites(kernels, keys)
    hunts = [*(h for h in hunts_of(kernels) if h.origin != "way"), *way_hunts(found, kernels.choices)]
    return hunts, {**kernels.sites, **found}


def search(
    kernels: Kernels, target: Target, device: str | None, toolchain: str, effort: Effort, store: Store | None,
    progress: Callable[[str], None] = lambda text: None,
) -> Found:  # fmt: skip
    """Tune every site of a finished plan. The result is what was found when the time was up, or when the user
    interrupted it. `device` None: nothing is timed, what the store knows is used.
    """
    known = [k for k in kernels.drafts if store and store.measurements(k, target.arch, toolchain)]
    hunts, sites = subjects(kernels, known if device is None else None)
    for hunt in hunts:
        hunt.recall(store.measurements(hunt.key, target.arch, toolchain) if store else ())
    timer = Timer(device or "", target.arch, toolchain, store)
    bench = _Bench(sites, kernels.choices.given, target, timer)
    if device is not None:
        try:
            _hunt(hunts, bench, effort, progress)
        except KeyboardInterrupt:
            progress("tune: interrupted; the best so far is kept")
    made = report(hunts, target.arch, toolchain, effort.aim, timer.absent)
    told: dict[str, Any] = {"unkept": timer.unkept} if timer.unkept else {}
    late = {h.key for h in bench.left}
    short = [h.group for h in hunts if h.key in late or (h.share > 1 and len(h.trials) <= 1)]
    given = winners(hunts, effort.aim)
    if device is not None:
        told["spent"] = {**bench.spent(), "gain": won(hunts, given)}
    return Found(given, {**made, **told, **({"short": short} if short else {})})


def _hunt(
    hunts: Sequence[Hunt], bench: _Bench, effort: Effort, progress: Callable[[str], None]
) -> None:  # fmt: skip
    started = time.monotonic()
    pace = _Pace(started + effort.seconds)
    bench.left = sorted(hunts, key=lambda h: -h.floor_us)
    count = max(pace.room(), 1)
    while bench.left and count:
        # What moves most first: where the time is short, the others keep their priors.
        pace.measure(bench, [(h, h.prior) for h in bench.left[:count]])
        bench.left, count = bench.left[count:], pace.room()
    late = {h.key for h in bench.left}
    hunts = [h for h in hunts if h.key not in late]
    share_out(hunts, effort.trials)
    while (room := pace.room()) and (batch := next_tiles(hunts, room)):
        done = sum(len(h.trials) for h in hunts)
        if bench.timer.unkept:
            progress(f"tune: measurements are not kept: {bench.timer.unkept}")
        progress(f"tune: {done} of {sum(h.share for h in hunts)} tiles, {gain(hunts):.2f}x so far")
        pace.measure(bench, batch)
    if effort.aim != "power":
        bench.measure([(h, t) for h in hunts for t in h.finalists(effort.finalists)], FINAL_ROUNDS)
        return
    for hunt in hunts:
        if time.monotonic() - started > 2 * effort.seconds:
            break
        progress(f"tune: energy of {hunt.group}")
        tiles = hunt.finalists(ENERGY_FINALISTS, always=True)
        bench.measure([(hunt, tile) for tile in tiles], FINAL_ROUNDS, energy=True)


def share_out(hunts: Sequence[Hunt], trials: int) -> None:
    """So many trials, by what a group could gain as its prior was timed, at least a few each."""
    gains = []
    for hunt in hunts:
        prior = hunt.trials.get(repr(hunt.prior))
        gains.append(max(prior.us - hunt.floor_us, 0.0) if prior and not prior.wrong else 0.0)
    total = sum(gains) or 1.0
    for hunt, each in zip(hunts, gains, strict=True):
        hunt.share = max(int(trials * each / total), 4) if each else 1


@dataclass
class _Pace:
    """How many tiles can still be built and timed before `end`, at the pace of the last."""

    end: float
    each: float = field(default_factory=lambda: GUESS_S / len(os.sched_getaffinity(0)))

    def room(self) -> int:
        return max(int((self.end - time.monotonic()) / self.each), 0)

    def measure(self, bench: _Bench, asked: Sequence[tuple[Hunt, Tile]]) -> None:
        before = time.monotonic()
        bench.measure(asked, ROUNDS)
        self.each = max(time.monotonic() - before, 1e-6) / len(asked)


def next_tiles(hunts: Sequence[Hunt], room: int = MOST) -> list[tuple[Hunt, Tile]]:
    """What to try next, at most `room`: the tiles of all hunts that have trials left, a few of each."""
    out: list[tuple[Hunt, Tile]] = []
    waiting: list[list[tuple[Hunt, Tile]]] = []
    for hunt in hunts:
        left = hunt.share - len(hunt.trials)
        if left <= 0:
            continue
        tiles = ranked(hunt.open(), hunt.trials.values(), random.Random(SEED + len(hunt.trials)))
        if tiles:
            waiting.append([(hunt, tile) for tile in tiles[:left]])
    # In turn, so that every group moves: what is measured of one says where to look next.
    most = min(A_CORE * len(os.sched_getaffinity(0)), MOST, room)
    for at in range(max((len(w) for w in waiting), default=0)):
        out += [w[at] for w in sorted(waiting, key=lambda w: -w[0][0].share) if at < len(w)]
        if len(out) >= most:
            break
    return out[:most]


@dataclass
class _Bench:
    """Builds and times."""

    sites: Mapping[str, Subject]
    given: Mapping[str, Tile]
    target: Target
    timer: Timer
    left: list[Hunt] = field(default_factory=list)
    """Nothing of these was measured."""
    built: dict[tuple[str, str], Built | str] = field(default_factory=dict)
    """By key and tile, as long as it may still be a finalist."""
    tiles: set[tuple[str, str]] = field(default_factory=set)
    building_s: float = 0.0
    measuring_s: float = 0.0

    def spent(self) -> dict[str, Any]:
        """For people: different tiles that were built and timed, seconds of both."""
        seconds = {"building_s": round(self.building_s, 2), "measuring_s": round(self.measuring_s, 2)}
        return {"timed": len(self.tiles), **seconds}

    def _build(self, asked: Sequence[tuple[Hunt, Tile]]) -> list[Built | str]:
        """As code, or why not; finalists were built before."""
        before = time.monotonic()
        fresh = [(h, t) for h, t in asked if (h.key, repr(t)) not in self.built]
        sets = [(self.sites[h.key], h.key, t) for h, t in fresh]
        made = candidates.build(sets, self.given, self.target) if sets else []
        self.built |= {(h.key, repr(t)): found for (h, t), found in zip(fresh, made, strict=True)}
        self.building_s += time.monotonic() - before
        return [self.built[h.key, repr(t)] for h, t in asked]

    def _forget(self, hunts: Iterable[Hunt]) -> None:
        """Code of tiles that will not be timed again."""
        for hunt in {h.key: h for h in hunts}.values():
            best = {repr(t.tile) for t in hunt.good()[:FINALISTS]} | {repr(hunt.prior)}
            for name in [n for n in self.built if n[0] == hunt.key and n[1] not in best]:
                del self.built[name]

    def measure(self, asked: Sequence[tuple[Hunt, Tile]], rounds: int, energy: bool = False) -> None:
        """Every one of these tiles has a trial afterwards."""
        made = self._build(asked)
        before = time.monotonic()
        rows: list[tuple[Hunt, Built]] = []
        failed: list[tuple[Hunt, Trial, bool]] = []
        for (hunt, tile), found in zip(asked, made, strict=True):
            if isinstance(found, str):
                failed.append((hunt, Trial(tile, wrong=found), not isinstance(found, Passing)))
            else:
                rows.append((hunt, found))
        self.timer.time(rows, rounds, energy)
        self.measuring_s += time.monotonic() - before
        self.tiles |= {(b.key, repr(b.tile)) for _, b in rows}
        for hunt, trial, lasting in failed:
            # A failure is a measurement only where the tool works: it built the prior.
            if lasting and hunt.key in self.timer.priors:
                self.timer.keep(hunt, trial)
            else:
                hunt.keep(trial)
        self._forget(h for h, _ in asked)
