"""The tuner: for every tile that was picked, others built, compared and timed; the best kept.

Candidates are found step by step from the prior: first its neighbours, then those that a model of what was
measured so far ranks highest ("is it among the best tenth", failures are the worst), until the number of
trials is used up. How many a group gets goes by what it could gain: its time less the least its bytes need.
The best few are timed again beside the prior; a new one wins only where it is 2 % faster with its interval.

Everything that was measured is kept by group, architecture and toolchain, and read before anything is timed
again: a search that was killed goes on where it was.
"""

from __future__ import annotations

import base64
import math
import os
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from esper_ir.diagnostics import EsperError
from forge.lower import Kernels, Site
from forge.plan import Tile
from forge.target import Target
from forge.toolchain import Candidate, build_candidates
from forge.tune import space
from forge.tune.journal import Choices, tile_of
from forge.tune.rank import ranked
from forge.tune.store import Store
from library.launch import Guard, KernelStep, Plan, Variant, evaluate, to_json
from runtime.sandbox import Limits, run_worker

MARGIN = 0.02
FINALISTS = 8
ROUNDS, FINAL_ROUNDS = 9, 41
A_CORE, MOST = 6, 96
"""Candidates of one build and one timing, by cores that build them."""
CLOCK_LIMITS = Limits(seconds=300.0, memory_bytes=0, devices=True)
COPY_BYTES_PER_US = 3.0e6
"""Least time of a group's bytes, to share the trials: about an H100's copy rate."""
SEED = 20_240


@dataclass(frozen=True)
class Effort:
    """`trials` over all groups of a blueprint; `seconds`: no new batch begins after that."""

    trials: int = 300
    seconds: float = 300.0
    finalists: int = FINALISTS


@dataclass
class Trial:
    """One tile: median and interval in microseconds, or why it is out."""

    tile: Tile
    us: float = math.inf
    low: float = math.inf
    high: float = math.inf
    wrong: str = ""


@dataclass
class Hunt:
    """The search for one tile."""

    key: str
    site: Site
    prior: Tile
    trials: dict[str, Trial] = field(default_factory=dict)
    share: int = 0
    floor_us: float = 0.0
    reference: _Built | None = None

    @property
    def best(self) -> Trial:
        return min(self.trials.values(), key=lambda t: t.us)

    def keep(self, trial: Trial) -> None:
        self.trials[repr(trial.tile)] = trial

    def open(self) -> list[Tile]:
        """Untried neighbours of the best tiles, the best one's first."""
        good = sorted((t for t in self.trials.values() if not t.wrong), key=lambda t: t.us)[:4]
        found: dict[str, Tile] = {}
        for trial in good:
            for tile in space.neighbours(trial.tile):
                if repr(tile) not in self.trials:
                    found.setdefault(repr(tile), tile)
        return list(found.values())


@dataclass(frozen=True)
class Found:
    """`given`: the tiles that won, by key; `report`: every trial with its time or its reason."""

    given: Mapping[str, Tile]
    report: Mapping[str, Any]


def search(
    kernels: Kernels, target: Target, device: str, toolchain: str, effort: Effort, store: Store | None,
    progress: Callable[[str], None] = lambda text: None,
) -> Found:  # fmt: skip
    """Tune every site of a finished plan. The result is what was found when the time was up, or when the user
    interrupted it.
    """
    started = time.monotonic()
    hunts = [Hunt(k, s, kernels.choices.made[k][0]) for k, s in sorted(kernels.sites.items())]
    hunts = [h for h in hunts if space.tunable(h.prior)]
    bench = _Bench(target, device, toolchain, store, kernels.choices)
    try:
        _first(hunts, bench)
        _shares(hunts, effort)
        while time.monotonic() - started < effort.seconds:
            batch = _batch(hunts)
            if not batch:
                break
            done = sum(len(h.trials) for h in hunts)
            progress(f"tune: {done} of {sum(h.share for h in hunts)} tiles, {_gain(hunts):.2f}x so far")
            bench.measure(batch, ROUNDS)
        _finals(hunts, bench, effort)
    except KeyboardInterrupt:
        progress("tune: interrupted; the best so far is kept")
    return Found(_winners(hunts), _report(hunts, target, toolchain))


def _first(hunts: Sequence[Hunt], bench: _Bench) -> None:
    """The priors, and whatever is known from before."""
    for hunt in hunts:
        bench.recall(hunt)
    bench.measure([(h, h.prior) for h in hunts], ROUNDS)


def _shares(hunts: Sequence[Hunt], effort: Effort) -> None:
    """Trials by what a group could gain, at least a few each."""
    gains = []
    for hunt in hunts:
        prior = hunt.trials.get(repr(hunt.prior))
        gains.append(max(prior.us - hunt.floor_us, 0.0) if prior and not prior.wrong else 0.0)
    total = sum(gains) or 1.0
    for hunt, gain in zip(hunts, gains, strict=True):
        hunt.share = max(int(effort.trials * gain / total), 4) if gain else 1


def _batch(hunts: Sequence[Hunt]) -> list[tuple[Hunt, Tile]]:
    """The next tiles of all hunts that have trials left, a few of each."""
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


def _finals(hunts: Sequence[Hunt], bench: _Bench, effort: Effort) -> None:
    """The best of every hunt again, beside its prior, in many rounds."""
    asked: list[tuple[Hunt, Tile]] = []
    for hunt in hunts:
        good = sorted((t for t in hunt.trials.values() if not t.wrong), key=lambda t: t.us)
        if len(good) < 2 or good[0].tile == hunt.prior:
            continue
        tiles = [t.tile for t in good[: effort.finalists] if t.tile != hunt.prior]
        asked += [(hunt, hunt.prior), *((hunt, t) for t in tiles)]
    bench.measure(asked, FINAL_ROUNDS)


def _winners(hunts: Iterable[Hunt]) -> dict[str, Tile]:
    """Tiles that beat their prior by the margin, outside the noise; among equals the first in the order of
    fields.
    """
    out: dict[str, Tile] = {}
    for hunt in hunts:
        prior = hunt.trials.get(repr(hunt.prior))
        if prior is None or prior.wrong:
            continue
        better = [
            t for t in hunt.trials.values()
            if not t.wrong and t.us < prior.us * (1 - MARGIN) and t.high < prior.low
        ]  # fmt: skip
        if better:
            fastest = min(t.us for t in better)
            even = [t for t in better if t.us <= fastest * 1.005]
            out[hunt.key] = min(even, key=lambda t: (space.distance(t.tile, hunt.prior), repr(t.tile))).tile
    return out


def _gain(hunts: Sequence[Hunt]) -> float:
    """How much faster all groups together are with the best tiles so far."""
    priors = [h.trials[repr(h.prior)].us for h in hunts if repr(h.prior) in h.trials]
    best = [h.best.us for h in hunts if repr(h.prior) in h.trials]
    pairs = [(p, b) for p, b in zip(priors, best, strict=True) if math.isfinite(p)]
    return sum(p for p, _ in pairs) / (sum(b for _, b in pairs) or 1.0) if pairs else 1.0


def _report(hunts: Sequence[Hunt], target: Target, toolchain: str) -> dict[str, Any]:
    rows = []
    for hunt in hunts:
        trials = [_row(t) for t in sorted(hunt.trials.values(), key=lambda t: (bool(t.wrong), t.us))]
        rows.append({"key": hunt.key, "group": hunt.site.group.name, "kind": type(hunt.prior).__name__,
                     "prior": asdict(hunt.prior), "floor_us": hunt.floor_us, "trials": trials})  # fmt: skip
    return {"schema": "esper-tuning/1", "arch": target.arch, "toolchain": toolchain, "groups": rows}


@dataclass(frozen=True)
class _Built:
    """A tile as code, ready to be timed."""

    hunt: Hunt
    tile: Tile
    plan: Plan
    code: Candidate

    def request(self, number: int) -> dict[str, Any]:
        return {
            "name": str(number), "plan": to_json(self.plan), "kernels": to_json(self.code.kernels),
            "code": base64.b64encode(self.code.code).decode(),
        }  # fmt: skip


@dataclass
class _Bench:
    """Builds and times; asks the store first and tells it everything."""

    target: Target
    device: str
    toolchain: str
    store: Store | None
    choices: Choices

    def recall(self, hunt: Hunt) -> None:
        _, plan, _ = self.job(hunt, hunt.prior)
        hunt.floor_us = 0.0 if plan is None else _least_us(plan, hunt.site)
        rows = self.store.measurements(hunt.key, self.target.arch, self.toolchain) if self.store else []
        for row in rows:
            trial = _trial(row)
            if trial is not None and type(trial.tile) is type(hunt.prior):
                hunt.trials[repr(trial.tile)] = trial

    def measure(self, asked: Sequence[tuple[Hunt, Tile]], rounds: int) -> None:
        """Build and time these tiles; every one has a trial afterwards."""
        ready = []
        for hunt, tile in asked:
            sources, plan, why = self.job(hunt, tile)
            if plan is None:
                self.keep(hunt, Trial(tile, wrong=why))
            else:
                ready.append((hunt, tile, sources, plan))
        built = build_candidates([r[2] for r in ready], self.target)
        rows: list[_Built] = []
        for (hunt, tile, _, plan), code in zip(ready, built, strict=True):
            if code.failed:
                self.keep(hunt, Trial(tile, wrong=code.failed))
                continue
            rows.append(_Built(hunt, tile, plan, code))
            if tile == hunt.prior:
                hunt.reference = rows[-1]
        self.time(rows, rounds)

    def job(self, hunt: Hunt, tile: Tile) -> tuple[tuple[Any, ...], Plan | None, str]:
        """Kernels and steps of a group with one tile; no plan where the template cannot use it."""
        given = {**self.choices.given, hunt.key: tile}
        try:
            plan, kernels = hunt.site.plan(Choices(given))
        except EsperError as error:
            return (), None, str(error)[:200]
        sizes = dict(hunt.site.low.sizes)
        plan, used = _specialised(plan, sizes)
        sources = tuple(s for s in kernels.by_key.values() if s.plan.name in used)
        return sources, plan, ""

    def time(self, rows: Sequence[_Built], rounds: int) -> None:
        """In one worker; a crash or an endless launch is found by halving."""
        if not rows:
            return
        jobs: dict[str, dict[str, Any]] = {}
        for number, row in enumerate(rows):
            site = row.hunt.site
            values = {
                "name": row.hunt.key,
                "dims": dict(site.low.sizes),
                "values": sorted(site.low.graph.types),
            }
            job = jobs.setdefault(row.hunt.key, {**values, "candidates": []})
            first = row.hunt.reference
            if not job["candidates"] and first is not None and row.tile != row.hunt.prior:
                job["candidates"].append(first.request(-1))  # what the others are compared with
            job["candidates"].append(row.request(number))
        request = {"device": self.device, "rounds": rounds, "jobs": list(jobs.values())}
        try:
            found = run_worker("forge.tune.clock", request, CLOCK_LIMITS)
        except EsperError as error:
            if len(rows) == 1:
                rows[0].hunt.keep(Trial(rows[0].tile, wrong=str(error)[:200]))  # may be the machine's fault
                return
            self.time(rows[: len(rows) // 2], rounds)
            self.time(rows[len(rows) // 2 :], rounds)
            return
        for number, row in enumerate(rows):
            self.keep(row.hunt, Trial(row.tile, **found[row.hunt.key][str(number)]))

    def keep(self, hunt: Hunt, trial: Trial) -> None:
        hunt.keep(trial)
        if self.store is not None:
            self.store.put_measurement(hunt.key, self.target.arch, self.toolchain, _row(trial))


def _specialised(plan: Plan, sizes: Mapping[str, int]) -> tuple[Plan, set[str]]:
    """The plan with the one kernel of each step that these sizes run, and the kernels' names."""
    steps, used = [], set[str]()
    for step in plan.steps:
        if isinstance(step, KernelStep):
            chosen = next(
                v for v in step.variants
                if all(int(evaluate(s, sizes)) % d == 0 for s, d in v.guard.divisible)
            )  # fmt: skip
            used.add(chosen.kernel)
            step = replace(step, variants=(Variant(Guard(), chosen.kernel),))
        steps.append(step)
    return replace(plan, steps=tuple(steps)), used


def _least_us(plan: Plan, site: Site) -> float:
    """Microseconds that the values of the group take at the rate of a copy, each once."""
    sizes, total = dict(site.low.sizes), 0
    for buffer in plan.buffers:
        used = any(
            a.kind == "buffer" and plan.buffers[int(a.value)] is buffer  # type: ignore[arg-type]
            for s in plan.steps if isinstance(s, KernelStep) for a in s.args
        )  # fmt: skip
        if used and buffer.name in site.low.graph.types:
            count = math.prod(int(evaluate(s, sizes)) for s in buffer.shape)
            total += count * site.low.graph.types[buffer.name].dtype.itemsize
    return total / COPY_BYTES_PER_US


def _row(trial: Trial) -> dict[str, Any]:
    base = {"kind": type(trial.tile).__name__, "tile": asdict(trial.tile)}
    return {**base, "wrong": trial.wrong} if trial.wrong else {
        **base, "us": trial.us, "low": trial.low, "high": trial.high,
    }  # fmt: skip


def _trial(row: Mapping[str, Any]) -> Trial | None:
    """A kept measurement; None for one that this version does not know."""
    try:
        tile = tile_of("kept", row)
    except EsperError:
        return None
    if row.get("wrong"):
        return Trial(tile, wrong=str(row["wrong"]))
    return Trial(tile, float(row["us"]), float(row["low"]), float(row["high"]))
