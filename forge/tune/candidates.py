"""A group with one tile as code, and the worker that compares and times such."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from esper_ir.diagnostics import EsperError
from forge.along import apart, in_line
from forge.lower import Kernels, KernelSource, Site
from forge.online import joins
from forge.plan import Tile
from forge.target import Target
from forge.templates.rows import reduces
from forge.toolchain import Candidate, build_candidates
from forge.tune.journal import Choices
from forge.tune.store import Store
from forge.tune.trials import Hunt, Trial
from library.launch import Guard, KernelStep, Plan, Variant, evaluate, to_json
from runtime.sandbox import Limits, run_worker

CLOCK_LIMITS = Limits(seconds=300.0, memory_bytes=0, devices=True)
COPY_BYTES_PER_US = 3.0e6
"""Least time of a group's bytes, to share the trials: about an H100's copy rate."""


@dataclass(frozen=True)
class Built:
    """A tile as code, ready to be timed: `dims` are the sizes, `values` the buffers that other tiles of the
    group have too; `plan` and `kernels` as data.
    """

    key: str
    tile: Tile
    dims: Mapping[str, int]
    values: tuple[str, ...]
    plan: Mapping[str, Any]
    kernels: Any
    code: bytes

    def request(self, name: str) -> dict[str, Any]:
        code = base64.b64encode(self.code).decode()
        return {"name": name, "plan": self.plan, "kernels": self.kernels, "code": code}


class Passing(str):
    """Why there is no code this time: its worker died, which says nothing of the tile."""


class Subject(Protocol):
    """What tiles are tried for: a group (forge.lower.Site), or the groups of a product (WaySite)."""

    @property
    def sizes(self) -> Mapping[str, int]: ...

    @property
    def values(self) -> tuple[str, ...]: ...

    def plan(self, choices: Choices) -> tuple[Plan, Kernels]: ...


def build(
    asked: Sequence[tuple[Subject, str, Tile]], given: Mapping[str, Tile], target: Target
) -> list[Built | str]:
    """Each (site, its key, tile) as code, or why there is none. Library calls alone have none to build."""
    plans = [_plan(site, {**given, key: tile}) for site, key, tile in asked]
    sets = [p[0] for p in plans if not isinstance(p, str)]
    built = iter(build_candidates([s for s in sets if s], target))
    made = iter([next(built) if s else Candidate() for s in sets])
    out: list[Built | str] = []
    for (site, key, tile), plan in zip(asked, plans, strict=True):
        out.append(plan if isinstance(plan, str) else _built(site, key, tile, plan[1], next(made)))
    return out


def _built(site: Subject, key: str, tile: Tile, plan: Plan, code: Candidate) -> Built | str:
    if code.failed:
        return code.failed if code.lasting else Passing(code.failed)
    return Built(key, tile, dict(site.sizes), site.values, to_json(plan), to_json(code.kernels), code.code)


def _plan(site: Subject, given: Mapping[str, Tile]) -> tuple[tuple[KernelSource, ...], Plan] | str:
    """Kernels and steps of a group; why not where the template cannot use a tile."""
    try:
        plan, kernels = site.plan(Choices(given))
    except EsperError as error:
        return str(error)[:200]
    plan, used = _specialised(plan, site.sizes)
    return tuple(s for s in kernels.by_key.values() if s.plan.name in used), plan


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


def idle(site: Site, given: Mapping[str, Tile]) -> tuple[str, ...]:
    """Fields of a tile that mean nothing for the group on its target, or have one value for it: rows that are
    reduced and added down their columns are held whole, two products of one kernel are not split.
    """
    found = _plan(site, given)
    plans = () if isinstance(found, str) else tuple(s.plan for s in found[0])
    if any(p.matmul and p.matmul.second for p in plans):
        return ("split_k", "descriptors")
    turns = site.low.target.async_copies and not any(apart(p) or in_line(p) for p in plans)
    copies = () if turns else ("stages",)
    if site.low.target.kind != "cpu" and any(all(reduces(p.body)) for p in plans):
        copies = (*copies, "block_cols")
    return copies if any(joins(p) for p in plans) and site.low.target.kind != "cpu" else (*copies, "online")


def least_us(site: Site, given: Mapping[str, Tile]) -> float:
    """Microseconds that the values of the group take at the rate of a copy, each once."""
    found = _plan(site, given)
    if isinstance(found, str):
        return 0.0
    plan, total = found[1], 0
    steps = [s for s in plan.steps if isinstance(s, KernelStep)]
    used = {a.value for s in steps for a in s.args if a.kind == "buffer"}
    for number, buffer in enumerate(plan.buffers):
        if number in used and buffer.name in site.low.graph.types:
            count = math.prod(int(evaluate(s, site.low.sizes)) for s in buffer.shape)
            total += count * site.low.graph.types[buffer.name].dtype.itemsize
    return total / COPY_BYTES_PER_US


@dataclass
class Timer:
    """Compares and times in a worker; everything found goes to the store."""

    device: str
    arch: str
    toolchain: str
    store: Store | None
    priors: dict[str, Built] = field(default_factory=dict)
    """What the other tiles of a key are compared with."""
    absent: str = ""
    """Why the device counts no energy, once it was asked."""
    unkept: str = ""
    """Why measurements are no longer kept in the store, where its disk is full or gone."""

    def time(self, rows: Sequence[tuple[Hunt, Built]], rounds: int, energy: bool = False) -> None:
        """In one worker; a crash or an endless launch is found by halving. With `energy` joules too."""
        self.priors.update({b.key: b for h, b in rows if b.tile == h.prior})
        if not rows:
            return
        request = {"device": self.device, "rounds": rounds, "jobs": self._jobs(rows), "energy": energy}
        try:
            found = run_worker("forge.tune.clock", request, CLOCK_LIMITS)
        except EsperError as error:
            if len(rows) == 1:
                rows[0][0].keep(Trial(rows[0][1].tile, wrong=str(error)[:200]))  # may be the machine's fault
                return
            self.time(rows[: len(rows) // 2], rounds, energy)
            self.time(rows[len(rows) // 2 :], rounds, energy)
            return
        self.absent = found.pop("absent", self.absent)
        for number, (hunt, built) in enumerate(rows):
            self.keep(hunt, Trial(built.tile, **found[built.key][str(number)]))

    def _jobs(self, rows: Sequence[tuple[Hunt, Built]]) -> list[dict[str, Any]]:
        jobs: dict[str, dict[str, Any]] = {}
        for number, (hunt, built) in enumerate(rows):
            fresh = {"name": built.key, "dims": built.dims, "values": built.values, "candidates": []}
            job = jobs.setdefault(built.key, fresh)
            prior = self.priors.get(built.key)
            if not job["candidates"] and prior is not None and built.tile != hunt.prior:
                job["candidates"].append(prior.request("prior"))
            job["candidates"].append(built.request(str(number)))
        return list(jobs.values())

    def keep(self, hunt: Hunt, trial: Trial) -> None:
        hunt.keep(trial)
        if self.store is None or self.unkept:
            return
        try:
            self.store.put_measurement(hunt.key, self.arch, self.toolchain, trial.row())
        except EsperError as error:
            self.unkept = str(error)  # what was found is still worth having
