"""Scores of artifacts in a library: which basis, what they rest on, why they are what they are."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from esper_ir.diagnostics import EsperError
from gauntlet.cli import main
from gauntlet.report import UNMEASURED
from gauntlet.risk import explain, features, field, learners, model, outcomes, score
from library.contracts import FieldReport
from library.store import Library
from tests.gauntlet import risks
from tests.gauntlet.conftest import affine, put


@pytest.fixture
def opened(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    """A library with one validated artifact, and no shipped model."""
    monkeypatch.setattr(score, "SHIPPED", home / "none")
    name = put(home, affine())
    with Library.open(home, roles=("validator",)) as library:
        library.record_verdict(name, {"policy": "p", **risks.report()}, passed=True)
        yield library


def _name(library: Library) -> str:
    return library.artifacts()[0].id


def _tell(library: Library, *found: str, **metrics: Any) -> None:
    """What became of the artifact in as many trainings."""
    name = _name(library)
    library.record_outcomes(
        [FieldReport("b", name, f"{n}", 0.0, 0.0, o, metrics) for n, o in enumerate(found)]
    )


def test_without_a_model_and_without_outcomes_there_is_no_number(
    opened: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(score, "_learners", lambda: None)
    found = score.Scorer(opened).of(_name(opened))
    assert (found.risk, found.basis) == (UNMEASURED, "prior") and found.annotation() == {}


def test_outcomes_make_a_prior(opened: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(score, "_learners", lambda: None)
    _tell(opened, *["EXPOSED"] * 30, "CRASHED", "CULLED", "MISMATCH")
    found = score.Scorer(opened).of(_name(opened))
    assert (found.basis, found.outcomes, found.failures) == ("prior", 33, 2)
    assert isinstance(found.risk, float) and 2 / 33 < found.risk < 0.1
    assert found.annotation() == {"risk_score": found.risk, "risk_basis": "prior"}
    opened.annotate(_name(opened), found.annotation())
    assert opened.annotation(_name(opened))["risk_basis"] == "prior"


def test_outcomes_of_the_field_know_where_the_artifact_was_used(opened: Library) -> None:
    _tell(opened, "EXPOSED", sizes=[{"rows": 48}])
    _tell(opened, "DIVERGED", sizes=[{"rows": 4000}])
    near, far = field.outcomes(opened)
    assert near.time <= far.time and (near.failed, far.failed) == (False, True)
    assert (near.basis, near.op_class, near.planted) == ("field", "pointwise", "")
    assert near.features["size_distance"] == 0 < far.features["size_distance"]


def test_an_artifact_without_a_verdict_is_named(home: Path, opened: Library) -> None:
    pending = put(home, affine().__class__(**{**vars(affine()), "name": "other"}))
    with pytest.raises(EsperError) as caught:
        score.Scorer(opened).of(pending)
    assert caught.value.code == "E0957"


@pytest.fixture
def modelled(opened: Library) -> Library:
    """With a model of its own."""
    pytest.importorskip("xgboost", reason="the extra `risk` is not installed")
    made = model.fit(learners.load(), list(risks.outcomes(300)), basis=outcomes.SIMULATED)
    model.save(made, score.place(opened, outcomes.SIMULATED))
    return opened


def test_a_model_scores_and_names_its_basis(modelled: Library) -> None:
    found = score.Scorer(modelled).of(_name(modelled))
    assert found.basis == "simulated" and isinstance(found.risk, float) and 0 < found.risk < 1
    made = model.fit(learners.load(), list(risks.outcomes(300)), basis=outcomes.FIELD)
    model.save(made, score.place(modelled, outcomes.FIELD))
    assert score.Scorer(modelled).of(_name(modelled)).basis == "field"  # what was seen in use comes first


def test_a_damaged_model_is_named_and_left(modelled: Library) -> None:
    path = score.place(modelled, outcomes.SIMULATED)
    path.write_text(path.read_text()[:-9])
    before = path.read_bytes()
    with pytest.raises(EsperError) as caught:
        score.Scorer(modelled)
    assert caught.value.code == "E0956" and path.read_bytes() == before


def test_a_score_is_explained(modelled: Library, home: Path) -> None:
    name = _name(modelled)
    said = explain.explain(modelled, name)
    found = score.Scorer(modelled).of(name)
    assert said["risk"] == pytest.approx(found.risk, abs=1e-5)
    total = said["base"] + sum(row["log_odds"] for row in said["contributions"])
    assert 1 / (1 + math.exp(-total)) == pytest.approx(said["risk"])
    assert {row["feature"] for row in said["contributions"]} == set(features.NAMES)
    done = CliRunner().invoke(main, ["risk", "explain", name, "--library", str(home), "--json"])
    told = json.loads(done.stdout)
    assert done.exit_code == 0 and told["risk"] == pytest.approx(said["risk"])
    plain = CliRunner().invoke(main, ["risk", "explain", name, "--library", str(home)])
    assert "basis simulated" in plain.output and "worst_used = 0.4" in plain.output


def test_nothing_to_explain_with(opened: Library, home: Path) -> None:
    done = CliRunner().invoke(main, ["risk", "explain", _name(opened), "--library", str(home), "--json"])
    assert done.exit_code == 10 and json.loads(done.stdout)["error"]["code"] == "E0956"
