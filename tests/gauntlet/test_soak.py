"""The short training inside the artifact is one that learns, and whose end says something."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from gauntlet.stage import Context, Failed, Outcome, Passed, Skipped
from gauntlet.stages import soak
from gauntlet.subject import Subject
from library.manifest import unpack
from tests.faults import corpus, handmade, toys


def _run(container: bytes, seed: int = 0) -> Outcome:
    context = Context(Subject(unpack(container), torch.device("cpu")), lambda event: None, seed=seed)
    (recipe,) = soak.STAGE.recipes(context)
    return soak.STAGE.checked(context, recipe)


@pytest.mark.parametrize("seed", range(3))
def test_where_a_step_explodes_a_smaller_one_is_taken(seed: int) -> None:
    """exp(q) (q - p) summed: at the first rate it was NaN at step 14, in eager too, and right was refused."""
    exploding = {
        "format": "esper-blueprint/1", "name": "exploding", "dims": {"rows": {"min": 1, "max": 4096}},
        "inputs": {n: {"dtype": "bfloat16", "shape": ["rows", 8192]} for n in ("p", "q")}, "params": {},
        "nodes": [{
            "id": "y", "op": "kl_div", "inputs": ["p", "q"], "attrs": {"log_target": True, "reduction": "sum"}
        }],
        "outputs": ["y"],
    }  # fmt: skip
    outcome = _run(corpus.compiled(exploding, "cpu").container, seed)
    assert isinstance(outcome, Passed), outcome
    assert outcome.metrics["steps"] == soak.STEPS
    assert outcome.metrics["last_loss"] < soak.CLIMBED * outcome.metrics["first_loss"]


def _with(monkeypatch: pytest.MonkeyPatch, told: dict[str, Callable[[float], list[float]]]) -> Outcome:
    """The outcome where the curve of a way ("exact", "eager", "native") is another than all ones."""

    def curve(subject: Subject, recipe: Any, gradient: Any, outputs: Any, rate: float, steps: int) -> Any:
        name = gradient.__name__
        return told[name](rate)[:steps] if name in told else [1.0] * steps

    monkeypatch.setattr(soak, "_curve", curve)
    return _run(handmade.build(toys.affine()))


def test_a_curve_that_always_climbs_is_no_test(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = _with(monkeypatch, {"exact": lambda rate: [1.0] * 10 + [1e9] * 50})
    assert isinstance(outcome, Skipped) and "diverges in float64 too" in outcome.reason


def test_it_is_judged_up_to_where_eager_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = {"eager": lambda rate: [1.0] * 5 + [math.nan] * 55}
    told = _with(monkeypatch, {**ended, "native": lambda rate: [1.0] * 5 + [math.inf] * 55})
    assert isinstance(told, Passed) and told.metrics["steps"] == 5
    told = _with(monkeypatch, {**ended, "native": lambda rate: [1.0, 1.0, 1.5, 1.0, 1.0] + [1.0] * 55})
    assert isinstance(told, Failed) and "at step 2" in told.reason
    told = _with(monkeypatch, {"eager": lambda rate: [math.inf] * 60})
    assert isinstance(told, Skipped) and "range of its types" in told.reason
    told = _with(monkeypatch, {"native": lambda rate: [1.0] * 30 + [math.nan] * 30})
    assert isinstance(told, Failed) and "nan at step 30" in told.reason
