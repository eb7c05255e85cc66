"""A small case is thought over on the processor, a large one where the artifact runs; on no device does
anything meet what lies on the other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from gauntlet import inputs
from gauntlet.stage import (
    LEAST_CASES,
    QUICK_PLANNING_SECONDS,
    WARM,
    Context,
    Outcome,
    Pace,
    Passed,
    Recipe,
    Sweep,
)
from gauntlet.stages import gradients, numerics
from gauntlet.subject import Subject
from library.manifest import unpack
from tests.faults import corpus, handmade, toys

STAGES = ("numerics", "gradients", "selftest")


def _judged(*cases: dict[str, Any]) -> list[dict[str, tuple[str, str]]]:
    return _told(json.dumps(cases))


def _told(asked: str) -> Any:
    command = [sys.executable, "-m", "tests.gauntlet.elsewhere", asked]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=dict(os.environ))
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("block", ["seed_norm", "seed_lora_64"])
def test_what_is_right_passes_on_a_device_of_its_own(block: str) -> None:
    case = {"path": f"examples/{block}.json", "wrong": 0.0, "quick": True}
    small, large = _judged({**case, "small": True}, {**case, "small": False})
    assert small == large == {stage: ["Passed", ""] for stage in STAGES}


def test_what_is_wrong_there_is_refused() -> None:
    (found,) = _judged({"path": "examples/seed_norm.json", "wrong": 0.03, "quick": True, "small": True})
    assert found["numerics"][0] == found["gradients"][0] == "Failed", found
    assert "RMSE" in found["numerics"][1]


def test_bits_are_compared_where_they_lie() -> None:
    assert _told("compared") == {
        "alike": True, "one off": False, "another zero": False, "another shape": False,
    }  # fmt: skip


def _walked(costs: list[float], budget: float) -> list[int]:
    pace, at, seen = Pace(budget), 0, list[int]()
    while at < len(costs):
        seen.append(at)
        pace.took(costs[at])
        at = pace.next(at, len(costs))
    return seen


def test_first_cases_that_load_code_leave_nothing_out() -> None:
    assert _walked([3.0] * WARM + [0.01] * 300, 40.0) == list(range(300 + WARM))
    assert _walked([3.0] * WARM + [0.002] * 300, 1.5) == list(range(300 + WARM)), "more than was allowed"


def test_dear_cases_are_spread_and_the_last_stays() -> None:
    seen = _walked([0.5] * 400, 40.0)
    steps = {b - a for a, b in zip(seen[WARM:-1], seen[WARM + 1 :], strict=False)}
    assert seen[-1] == 399 and 60 <= len(seen) <= 90 and max(steps) <= 7, (len(seen), steps)


def test_a_budget_that_is_spent_still_tries_a_few() -> None:
    assert len(_walked([0.9] * 100, 1.0)) >= LEAST_CASES - 1


@pytest.mark.parametrize(
    ("device", "quick", "least", "most"),
    [("cuda", True, LEAST_CASES - 1, 20), ("cuda", False, 200, 200), ("cpu", True, 200, 200)],
)
def test_in_a_hurry_libraries_that_plan_for_every_size_are_asked_less(
    device: str, quick: bool, least: int, most: int
) -> None:
    """Beside a card. On a processor the seconds are the candidate's own, and it chooses nothing."""
    subject = SimpleNamespace(
        declares=lambda dims: True, device=torch.device(device), reached=lambda dims, wanted: {()}
    )
    context = Context(cast(Subject, subject), lambda event: None, quick)
    seen: list[int] = []

    def check(context: Context, recipe: Recipe) -> Outcome:
        seen.append(recipe.seed)
        context.candidate_cpu += 0.3
        return Passed()

    found = Sweep("", 0, lambda c: [Recipe("", {}, seed=at) for at in range(200)], check).run(context)
    assert isinstance(found, Passed) and least <= len(seen) <= most and seen[-1] == 199, seen
    assert found.metrics.get("cases_left_out", 0) == 200 - len(seen)


class Hurried(Context):
    """As beside a card."""

    @property
    def budgets(self) -> tuple[float, float]:
        return 4.0, QUICK_PLANNING_SECONDS


@pytest.mark.parametrize("stage", [numerics.STAGE, gradients.STAGE])
@pytest.mark.parametrize("cost", [0.1, 0.3, 1.2])
def test_however_dear_every_plan_and_the_largest_sizes_are_judged(stage: Sweep, cost: float) -> None:
    """A plan that nothing is asked of may give anything."""
    subject = Subject(unpack(handmade.build(toys.dense())), torch.device("cpu"))
    subject.hurry, seen = True, list[Recipe]()

    def check(context: Context, recipe: Recipe) -> Outcome:
        seen.append(recipe)
        context.candidate_cpu += cost
        return Passed()

    found = replace(stage, check=check).run(Hurried(subject, lambda event: None, quick=True))
    assert isinstance(found, Passed) and found.metrics["cases_left_out"] > 80
    assert subject.largest_dims() in [recipe.dims for recipe in seen]
    if stage is gradients.STAGE:
        asked = {frozenset(recipe.wanted) for recipe in seen}
        assert asked >= {frozenset(p.wanted) for p in subject.launch.plans if p.phase == "backward"}


def test_large_cases_are_drawn_in_part() -> None:
    """Of what is larger than TILE the first rows are drawn, a number that no tile divides."""
    declared = next(d for d in corpus.blueprints() if d["name"] == "layer_norm_40_f32")
    subject = Subject(unpack(corpus.compiled(declared, "cpu").container), torch.device("cpu"))
    recipe = Recipe("gradients", {"rows": 100_000}, "normal", cotangent="normal", seed=1)
    (flow,) = inputs.cotangents(subject, recipe)
    assert flow is not None
    for drawn in (inputs.values(subject, recipe)["x"], flow):
        first = inputs.TILE // 40 | 1
        assert drawn.shape == (100_000, 40) and first % 2
        assert torch.equal(drawn[first : 2 * first], drawn[:first])
        assert drawn[:first].unique(dim=0).shape[0] == first
    small = inputs.values(subject, Recipe("gradients", {"rows": 100}, "normal", seed=1))["x"]
    assert small.unique(dim=0).shape[0] == 100
