"""What the judge itself does beside running the candidate, counted: seconds say more about a machine than
about the judge."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gauntlet import inputs, meaning
from gauntlet.judge import all_stages
from gauntlet.stage import Context, Failed, Passed, Stage
from gauntlet.stages import determinism, gradients
from gauntlet.subject import SCORES_SHARE, Subject
from library.manifest import unpack
from runtime.executor import Program
from tests.faults import corpus, handmade, toys
from tests.source import ROOT

OWN_OPERATIONS = 56_000
"""Of torch, with the short list of cases, for an artifact with three gradients: 51,500 when this was written,
64,400 while equal results were compared again. Ten microseconds each."""


class _Counting(TorchDispatchMode):
    """Torch operations outside of candidate code."""

    def __init__(self, context: Context) -> None:
        super().__init__()
        self.context, self.count = context, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not self.context.inside
        return func(*args, **(kwargs or {}))


@pytest.fixture
def events() -> Counter[str]:
    return Counter()


@pytest.fixture
def context(events: Counter[str]) -> Context:
    subject = Subject(unpack(handmade.build(toys.affine())), torch.device("cpu"))
    return Context(subject, lambda event: events.update([event["event"]]), threads=1)


def _stage(name: str) -> Stage:
    return next(stage for stage in all_stages() if stage.name == name)


def test_one_word_to_the_supervisor_for_a_round_of_calls(
    context: Context, events: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every round runs all plans; a message for each of them cost more than the kernels."""
    runs, real = [], Program.run
    monkeypatch.setattr(Program, "run", lambda *a, **k: (runs.append(1), real(*a, **k))[1])
    monkeypatch.setattr(determinism, "RACE_SECONDS", 0.0)
    assert isinstance(_stage("determinism").run(context), Passed)
    plans = len(context.subject.launch.plans)
    assert events["launch"] == len(runs) / plans and plans >= 3


@pytest.mark.parametrize("name", [stage.name for stage in all_stages() if stage.quick])
def test_what_the_judge_computes_is_no_launch_of_the_candidate(
    name: str, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launch has a limit of seconds. Weights that took the judge longer to draw than that, and their
    reference longer to compute, were an endless launch of a sound artifact."""
    context.quick = context.subject.hurry = True
    seen: list[str] = []

    def watched(module: Any, call: str) -> None:
        real = getattr(module, call)

        def watch(*args: Any, **named: Any) -> Any:
            seen.extend([call] * context.inside)
            return real(*args, **named)

        monkeypatch.setattr(module, call, watch)

    for module, calls in ((inputs, ("values", "cotangents", "case")), (meaning, ("outputs", "gradients"))):
        for call in calls:
            watched(module, call)
    assert not isinstance(_stage(name).run(context), Failed)
    assert not seen


def test_a_reference_is_computed_once_for_the_same_values(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    context.quick = context.subject.hurry = True
    asked, real = [], meaning.gradients
    monkeypatch.setattr(meaning, "gradients", lambda *a, **k: (asked.append(1), real(*a, **k))[1])
    recipes = [r for r in gradients._recipes(context) if r.layout != gradients.DIRECTIONAL]
    distinct = {(*r.dims.items(), r.draw, r.layout, r.cotangent, r.seed) for r in recipes}
    assert len(recipes) > 1.1 * len(distinct), "the same values, for other gradients"
    assert isinstance(_stage("gradients").run(context), Passed)
    assert len(asked) <= 2 * len(distinct) + 8, "float64 and eager; eager in the test along directions"


def test_the_judges_own_work_is_bounded(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(determinism, "RACE_SECONDS", 0.0)
    context.quick = context.subject.hurry = True
    counting = _Counting(context)
    with counting:
        for stage in all_stages():
            if stage.name != "memory":  # its thousand calls are the candidate's
                assert isinstance(stage.run(context), Passed), stage.name
    assert counting.count < OWN_OPERATIONS


def test_scores_that_only_a_reference_writes_down_count() -> None:
    """No plan of attention has a tensor of rows times rows; in float64 those of 16,384 rows are 34 GB."""
    example = json.loads((ROOT / "examples" / "attention.json").read_text(encoding="utf-8"))
    subject = Subject(unpack(corpus.compiled(example, "cpu").container), torch.device("cpu"))
    assert subject.elements({"batch": 1, "rows": 16}) == 16 * 16 * 64
    assert subject.elements({"batch": 1, "rows": 16384}) == 16 * 16384**2 // SCORES_SHARE
    assert subject.largest_dims()["rows"] < 2048
