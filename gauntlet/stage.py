"""What a stage is: a name, its place in the order, the cases it draws and the check of one case.

A stage is one file in `stages/` with a constant STAGE. The worker runs `run`; `gauntlet replay` runs `check`
on one stored case. A failing candidate is a value here (`Failed`); an exception means that the judge itself
broke.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

import torch

from esper_ir.diagnostics import EsperError
from gauntlet.subject import Subject

LAUNCH_SECONDS, PATIENCE = 2.5, 60.0
"""A call of the candidate may take so many seconds, and that many times as long as eager takes."""
BUDGET_SECONDS, QUICK_BUDGET_SECONDS = 40.0, 2.5
QUICK_PLANNING_SECONDS = 1.5
"""What libraries may plan in a stage that is in a hurry, in seconds of processors: some plan anew for every
size, and take most of a second for each."""
LEAST_CASES, LEAST_DEAR_CASES, DEAR_SECONDS = 12, 6, 1.0
"""What a stage may spend on its own work, in seconds; where a case is dear, the list is thinned evenly, to no
fewer than so many cases (of more than a second each: than so many)."""


@dataclass(frozen=True)
class Recipe:
    """Everything that makes one case again.

    `draw`: which values (a name of `esper_ir.oracle`'s battery, or of `gauntlet.draws`); `layout`: how they
    lie in memory; `cotangent`: which values flow back (empty: forward only); `wanted`: gradients asked for;
    `threads`: of the CPU, 0 as they are; `repeat`: calls in a row.
    """

    stage: str
    dims: Mapping[str, int]
    draw: str = "normal"
    layout: str = "dense"
    cotangent: str = ""
    wanted: tuple[str, ...] = ()
    seed: int = 0
    threads: int = 0
    repeat: int = 1

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def of(data: Mapping[str, Any]) -> Recipe:
        return Recipe(**{**data, "dims": dict(data["dims"]), "wanted": tuple(data["wanted"])})

    def __str__(self) -> str:
        sizes = " ".join(f"{k}={v}" for k, v in self.dims.items())
        parts = [sizes, self.draw, "" if self.layout == "dense" else self.layout]
        parts += [
            f"cotangent {self.cotangent}" if self.cotangent else "",
            f"d({','.join(self.wanted)})" if self.wanted else "",
        ]
        parts += [
            f"{self.threads} threads" if self.threads else "",
            f"{self.repeat} calls" if self.repeat > 1 else "",
        ]
        return ", ".join(p for p in parts if p)


@dataclass(frozen=True)
class Passed:
    """`metrics`: plain numbers for the report, units in their names."""

    metrics: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Failed:
    """`reason`: one sentence with numbers. `case`: the smallest recipe found that fails (None: no input is
    needed)."""

    reason: str
    case: Recipe | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Skipped:
    """Nothing to check here; `reason` stands in the verdict."""

    reason: str


Outcome = Passed | Failed | Skipped
Emit = Callable[[Mapping[str, Any]], None]


@dataclass
class Context:
    """What a stage is given. `emit` tells the supervisor; `quick` asks for the short list of cases.

    `latest`: the case that was begun last. `threads`: of the CPU, as many as the process was given.
    `candidate_seconds`, `candidate_cpu`: spent in candidate code so far, by the clock and by processors.
    `inside`: candidate code runs, or failed just now.
    """

    subject: Subject
    emit: Emit
    quick: bool = False
    seed: int = 0
    latest: Recipe | None = None
    threads: int = 1
    candidate_seconds: float = 0.0
    candidate_cpu: float = 0.0
    inside: bool = False

    @contextlib.contextmanager
    def launching(self, calls: int = 1) -> Iterator[None]:
        """Candidate code runs inside: so many calls of forward and backward at the sizes of the case."""
        dims = self.latest.dims if self.latest else self.subject.base_dims()
        limit = LAUNCH_SECONDS + calls * PATIENCE * self.subject.eager_seconds(dims)
        if self.subject.device.type == "cuda":
            torch.cuda.synchronize(self.subject.device)  # what was begun before is not the candidate's
        self.emit({"event": "launch", "limit": limit})
        began, cpu, self.inside = time.monotonic(), time.process_time(), True
        try:
            yield
            if self.subject.device.type == "cuda":
                torch.cuda.synchronize(self.subject.device)  # what hangs or fails shows here, not later
            self.inside = False
        except EsperError:
            self.inside = False  # refused before anything ran
            raise
        finally:
            self.candidate_seconds += time.monotonic() - began
            self.candidate_cpu += time.process_time() - cpu
            self.emit({"event": "landed"})

    @property
    def budgets(self) -> tuple[float, float]:
        """Seconds that a stage may spend on its own work, and in what the artifact does on the processor:
        beside a card these are libraries that plan. Code for a processor is the candidate's own, and must not
        choose its cases by taking long."""
        planning = self.quick and self.subject.device.type != "cpu"
        own = QUICK_BUDGET_SECONDS if self.quick else BUDGET_SECONDS
        return own, QUICK_PLANNING_SECONDS if planning else math.inf

    def at(self, recipe: Recipe) -> None:
        """The supervisor saves this case if the worker does not live to tell."""
        self.latest, self.inside = recipe, False
        self.emit({"event": "case", "recipe": recipe.to_json()})


class Stage(Protocol):
    """`order` sorts the stages; `quick` says whether it also runs when asked to be short."""

    @property
    def name(self) -> str: ...
    @property
    def order(self) -> int: ...
    @property
    def quick(self) -> bool: ...

    def run(self, context: Context) -> Outcome:
        """All cases of this stage, up to the first that fails."""
        ...

    def check(self, context: Context, recipe: Recipe) -> Outcome:
        """One case alone, as `replay` does."""
        ...


@dataclass(frozen=True)
class Sweep:
    """A stage that is a list of cases and one check; it passes when every case does."""

    name: str
    order: int
    recipes: Callable[[Context], Iterable[Recipe]]
    check: Callable[[Context, Recipe], Outcome]
    quick: bool = True
    shrink: bool = True

    def run(self, context: Context) -> Outcome:
        count, worst, sizes = 0, dict[str, Any](), dict[str, set[int]]()
        recipes, (own, theirs) = list(self.recipes(context)), map(Pace, context.budgets)
        at, kept = 0, _kept(context.subject, recipes)
        while at < len(recipes):
            recipe = recipes[at]
            began, before = time.process_time(), context.candidate_cpu  # a busy machine costs no case
            outcome = self.checked(context, recipe)
            launched = context.candidate_cpu - before
            own.took(time.process_time() - began - launched)
            theirs.took(launched)
            after = max(own.next(at, len(recipes)), theirs.next(at, len(recipes)))
            at = next((early for early in kept if at < early < after), after)
            if isinstance(outcome, Failed):
                return self._smaller(context, recipe, outcome)
            if isinstance(outcome, Passed):
                count += 1
                worst = _worst(worst, outcome.metrics)
                if context.subject.declares(recipe.dims):
                    sizes = {name: sizes.get(name, set()) | {size} for name, size in recipe.dims.items()}
        if not count:
            return Skipped("no case applies")
        left_out = {"cases_left_out": len(recipes) - own.done} if len(recipes) > own.done else {}
        tested = {"sizes": {name: sorted(found) for name, found in sizes.items()}}
        return Passed({"cases": count, **left_out, **tested, **worst})

    def checked(self, context: Context, recipe: Recipe) -> Outcome:
        context.at(recipe)
        outcome = self.check(context, recipe)
        if isinstance(outcome, Failed) and outcome.case is None:
            return replace(outcome, case=recipe)
        return outcome

    def _smaller(self, context: Context, recipe: Recipe, found: Failed) -> Failed:
        """The same failure at the smallest sizes that still show it: one pass over the dims, a few tries
        each."""
        if not self.shrink:
            return found
        for name in recipe.dims:
            for size in context.subject.sizes_below(name, recipe.dims[name]):
                trial = replace(recipe, dims={**recipe.dims, name: size})
                outcome = self.checked(context, trial)
                if isinstance(outcome, Failed):
                    recipe, found = trial, outcome
                    break
        return found


def _kept(subject: Subject, recipes: Sequence[Recipe]) -> list[int]:
    """Numbers of the cases that always stay: the first of every plan, variant and of the largest sizes."""
    alike, seen, found = set[tuple[Any, ...]](), set[tuple[Any, ...]](), list[int]()
    for at, recipe in enumerate(recipes):
        asked = (*sorted(recipe.dims.items()), recipe.wanted)
        if asked in alike:
            continue
        alike.add(asked)
        here = subject.reached(recipe.dims, recipe.wanted)
        if not here <= seen:
            found.append(at)
            seen |= here
    return found


class Pace:
    """Which case comes next. Where all of them would cost more than is allowed, some are left out, evenly
    spaced; the last one always stays. What a case costs is learnt as they are done; the first ones also load
    code: they say little of the others, and leave these half of what is allowed.
    """

    def __init__(self, budget: float) -> None:
        self.budget, self.costs, self.done = budget, list[float](), 0

    def took(self, seconds: float) -> None:
        """Of the case that was just done."""
        self.costs.append(seconds)
        self.done += 1

    def next(self, at: int, count: int) -> int:
        """The number of the case after case `at` of `count`; `count` after the last."""
        left, learnt = count - 1 - at, self.costs[WARM:]
        if not learnt:
            return at + 1
        each = max(sum(last) / len(last) for last in (learnt, learnt[-RECENT:]))  # later ones may be larger
        spent = min(sum(self.costs[:WARM]), self.budget / 2) + sum(learnt)
        keep = int(min((self.budget - spent) / max(each, 1e-9), count))
        least = LEAST_DEAR_CASES if each > DEAR_SECONDS else LEAST_CASES
        keep = max(keep, least - self.done, 1)
        return at + 1 if left <= keep else at + -(-left // keep)


WARM, RECENT = 3, 8
"""Cases that say nothing of what others cost; and so many say what the next ones will cost."""


def _worst(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
    """Largest of every number over the cases."""
    out = dict(a)
    for key, value in b.items():
        out[key] = max(out[key], value) if key in out else value
    return out
