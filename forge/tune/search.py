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
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forge.lower import Kernels
from forge.plan import Tile
from forge.target import Target
from forge.tune import candidates, space
from forge.tune.candidates import Built, Passing, Subject, Timer
from forge.tune.products import way_hunts, way_sites
from forge.tune.rank import ranked
from forge.tune.store import Store
from forge.tune.trials import Hunt, Trial, gain, report, winners

FINALISTS, ENERGY_FINALISTS = 8, 5
ROUNDS, FINAL_ROUNDS = 9, 41
A_CORE, MOST = 6, 96
"""Candidates of one build and one timing, by cores that build them."""
SEED = 20_240


@dataclass(frozen=True)
class Effort:
    """`trials` over all groups of a blueprint; `seconds`: no new batch begins after that. `aim`: the
    objective; for `power` the finalists' energy is measured where the device counts it, a group at a time.
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
    if device is not None:
        try:
            _hunt(hunts, _Bench(sites, kernels.choices.given, target, timer), effort, progress)
        except KeyboardInterrupt:
            progress("tune: interrupted; the best so far is kept")
    made = report(hunts, target.arch, toolchain, effort.aim, timer.absent)
    told = {"unkept": timer.unkept} if timer.unkept else {}
    short = [h.group for h in hunts if h.share > 1 and len(h.trials) <= 1]
    return Found(winners(hunts, effort.aim), {**made, **told, **({"short": short} if short else {})})


def _hunt(
    hunts: Sequence[Hunt], bench: _Bench, effort: Effort, progress: Callable[[str], None]
) -> None:  # fmt: skip
    started = time.monotonic()
    bench.measure([(h, h.prior) for h in hunts], ROUNDS)
    _shares(hunts, effort)
    while time.monotonic() - started < effort.seconds:
        batch = next_tiles(hunts)
        if not batch:
            break
        done = sum(len(h.trials) for h in hunts)
        if bench.timer.unkept:
            progress(f"tune: measurements are not kept: {bench.timer.unkept}")
        progress(f"tune: {done} of {sum(h.share for h in hunts)} tiles, {gain(hunts):.2f}x so far")
        bench.measure(batch, ROUNDS)
    if effort.aim != "power":
        bench.measure([(h, t) for h in hunts for t in h.finalists(effort.finalists)], FINAL_ROUNDS)
        return
    for hunt in hunts:
        if time.monotonic() - started > 2 * effort.seconds:
            break
        progress(f"tune: energy of {hunt.group}")
        tiles = hunt.finalists(ENERGY_FINALISTS, always=True)
        bench.measure([(hunt, tile) for tile in tiles], FINAL_ROUNDS, energy=True)


def _shares(hunts: Sequence[Hunt], effort: Effort) -> None:
    """Trials by what a group could gain, at least a few each."""
    gains = []
    for hunt in hunts:
        prior = hunt.trials.get(repr(hunt.prior))
        gains.append(max(prior.us - hunt.floor_us, 0.0) if prior and not prior.wrong else 0.0)
    total = sum(gains) or 1.0
    for hunt, each in zip(hunts, gains, strict=True):
        hunt.share = max(int(effort.trials * each / total), 4) if each else 1


def next_tiles(hunts: Sequence[Hunt]) -> list[tuple[Hunt, Tile]]:
    """What to try next: the tiles of all hunts that have trials left, a few of each."""
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
    most = min(A_CORE * len(os.sched_getaffinity(0)), MOST)
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

    def measure(self, asked: Sequence[tuple[Hunt, Tile]], rounds: int, energy: bool = False) -> None:
        """Every one of these tiles has a trial afterwards."""
        made = candidates.build([(self.sites[h.key], h.key, t) for h, t in asked], self.given, self.target)
        rows: list[tuple[Hunt, Built]] = []
        failed: list[tuple[Hunt, Trial, bool]] = []
        for (hunt, tile), found in zip(asked, made, strict=True):
            if isinstance(found, str):
                failed.append((hunt, Trial(tile, wrong=found), not isinstance(found, Passing)))
            else:
                rows.append((hunt, found))
        self.timer.time(rows, rounds, energy)
        for hunt, trial, lasting in failed:
            # A failure is a measurement only where the tool works: it built the prior.
            if lasting and hunt.key in self.timer.priors:
                self.timer.keep(hunt, trial)
            else:
                hunt.keep(trial)
