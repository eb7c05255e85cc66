"""The judge before it judges: a wrong answer that some values say nothing of has to be refused for others."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gauntlet import accuracy, inputs
from gauntlet.stage import Context, Failed, Passed, Recipe
from gauntlet.stages import selftest
from gauntlet.subject import Subject
from library.manifest import unpack
from tests.faults import corpus


def _context() -> Context:
    declared = next(d for d in corpus.blueprints() if d["name"] == "layer_norm_40_f32")
    subject = Subject(unpack(corpus.compiled(declared, "cpu").container), torch.device("cpu"))
    return Context(subject, lambda event: None)


def _blind(monkeypatch: pytest.MonkeyPatch, *draws: str) -> None:
    """The rule takes anything at these draws."""
    told = accuracy.one

    def one(subject: Subject, recipe: Recipe, row: accuracy.Row) -> str:
        return "" if recipe.draw in draws else told(subject, recipe, row)

    monkeypatch.setattr(accuracy, "one", one)


def test_values_that_say_nothing_are_made_up_for_by_others(monkeypatch: pytest.MonkeyPatch) -> None:
    _blind(monkeypatch, "normal", "shifted")
    found = selftest.STAGE.run(_context())
    assert isinstance(found, Passed) and found.metrics["cases"] > 2 and found.metrics["refused"] > 20, found


def test_in_a_hurry_one_draw_has_to_do_that_refuses_all(monkeypatch: pytest.MonkeyPatch) -> None:
    for quick, blind, cases in ((False, (), 6), (True, (), 1), (True, ("normal", "x10"), 3)):
        with monkeypatch.context() as patched:
            _blind(patched, *blind)
            found = selftest.STAGE.run(replace(_context(), quick=quick))
            assert isinstance(found, Passed) and found.metrics["cases"] == cases, (quick, blind, found)


def test_where_a_case_is_dear_others_are_asked_for_what_the_first_accepts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(selftest, "DEAR", 100)
    found = selftest.STAGE.run(_context())
    assert isinstance(found, Passed) and found.metrics["cases"] == 1
    _blind(monkeypatch, "normal")
    found = selftest.STAGE.run(_context())
    assert isinstance(found, Passed) and found.metrics["cases"] == 2


def test_what_no_values_refuse_cannot_be_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    context = _context()
    _blind(monkeypatch, *(r.draw for r in selftest.STAGE.recipes(context)))
    found = selftest.STAGE.run(context)
    assert isinstance(found, Failed) and "the rule would accept" in found.reason, found
    assert found.case is not None and isinstance(selftest.STAGE.check(context, found.case), Failed)


def test_a_stored_case_is_offered_the_same_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the tensors of a case are given, other values are still other values."""
    context, real, offered = _context(), selftest._wrong_answers, list[torch.Tensor]()
    recipe = next(iter(selftest.STAGE.recipes(context)))
    monkeypatch.setattr(selftest, "_wrong_answers", lambda *a: (offered.append(a[2]), real(*a))[1])
    selftest.STAGE.check(context, recipe)
    context.subject.stored = {
        name: inputs.tensor_of(raw, torch.device("cpu"))
        for name, raw in inputs.stored_form(context.subject, recipe).items()
    }
    selftest.STAGE.check(context, recipe)
    half = len(offered) // 2
    assert half and all(map(torch.equal, offered[:half], offered[half:]))


def test_eagers_own_answer_has_to_be_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accuracy, "one", lambda *asked: "off")
    found = selftest.STAGE.run(_context())
    assert isinstance(found, Failed) and found.reason == "the rule refuses eager's own y: off", found
