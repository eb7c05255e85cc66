"""The model of risk, its file, its evaluation and its commands, on outcomes whose law is known."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from esper_ir.diagnostics import EsperError
from gauntlet.cli import main
from gauntlet.confidence import Evidence
from gauntlet.risk import evaluate, features, learners, model, outcomes, picture, prior
from library.store import Library
from tests.gauntlet import risks

pytest.importorskip("xgboost", reason="the extra `risk` is not installed")
COUNT = 1000


@pytest.fixture(scope="module")
def known() -> learners.Learners:
    return learners.load()


@pytest.fixture(scope="module")
def found() -> list[outcomes.Outcome]:
    return list(risks.outcomes(COUNT))


@pytest.fixture(scope="module")
def made(known: learners.Learners, found: list[outcomes.Outcome]) -> model.Model:
    return model.fit(known, found, basis=outcomes.SIMULATED)


@pytest.fixture
def stored(made: model.Model, tmp_path: Path) -> Path:
    model.save(made, tmp_path / "model.json")
    return tmp_path / "model.json"


def _code(what: Any, *arguments: Any) -> str:
    with pytest.raises(EsperError) as caught:
        what(*arguments)
    return caught.value.code


def test_scores_come_near_the_law(known: learners.Learners, made: model.Model) -> None:
    fresh = list(risks.outcomes(400, seed=9))
    truth = np.array([risks.chance(dict(o.features)) for o in fresh])
    scores = made.probabilities(known, model.rows_of(fresh))
    assert np.corrcoef(truth, scores)[0, 1] > 0.8
    assert abs(scores.mean() - truth.mean()) < 0.05


def test_more_tests_never_raise_a_score(known: learners.Learners, made: model.Model) -> None:
    rows = model.rows_of(list(risks.outcomes(50, seed=3)))
    more = rows.copy()
    more[:, features.NAMES.index("numerics_cases")] += 4
    assert (made.margins(known, more) <= made.margins(known, rows)).all()


def test_contributions_sum_up_to_the_score(
    known: learners.Learners, made: model.Model, found: list[outcomes.Outcome]
) -> None:
    row = model.rows_of(found[:1])
    parts, base = made.contributions(known, row[0])
    total = base + sum(parts.values())
    assert 1 / (1 + math.exp(-total)) == pytest.approx(made.probabilities(known, row)[0], abs=1e-5)


def test_the_file_is_the_model(known: learners.Learners, made: model.Model, stored: Path) -> None:
    rows = model.rows_of(list(risks.outcomes(50, seed=3)))
    again = model.read(stored)
    assert again.basis == outcomes.SIMULATED and again.facts["outcomes"] == COUNT
    assert (again.probabilities(known, rows) == made.probabilities(known, rows)).all()


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda d: {**d, "slope": d["slope"] * 2}, "E0956"),
        (lambda d: {**d, "schema": "esper-risk-model/0"}, "E0956"),
        (lambda d: {**d, "features_schema": "esper-risk-features/0"}, "E0952"),
        (lambda d: _signed({**d, "features": [*d["features"], "weather"]}), "E0953"),
        (lambda d: _signed({**d, "features": d["features"][:-1]}), "E0953"),
    ],
)
def test_a_model_that_is_not_ours_is_refused_by_name(stored: Path, change: Any, code: str) -> None:
    stored.write_text(json.dumps(change(json.loads(stored.read_text()))))
    before = stored.read_bytes()
    assert _code(model.read, stored) == code and stored.read_bytes() == before


def _signed(data: dict[str, Any]) -> dict[str, Any]:
    body = {k: v for k, v in data.items() if k != "digest"}
    return {**body, "digest": model._digest(body)}


def test_a_model_cut_short_is_refused_by_name(stored: Path) -> None:
    stored.write_bytes(stored.read_bytes()[:-200])
    assert _code(model.read, stored) == "E0956" and _code(model.read, stored / "none") == "E0956"


def test_too_few_outcomes_and_one_kind_of_them(found: list[outcomes.Outcome]) -> None:
    model.enough(found)
    assert _code(model.enough, found[:-1]) == _code(model.enough, []) == "E0954"
    good = [o for o in found if not o.failed]
    assert _code(model.enough, good) == "E0955"
    assert _code(model.enough, [*good, *[o for o in found if o.failed][:5]]) == "E0954"


# -- evaluation


def test_groups_are_never_split() -> None:
    names = [f"family {n % 7}" for n in range(100)]
    folds = model.groups_of(names, 3)
    assert set(folds) == {0, 1, 2}
    assert len({(name, fold) for name, fold in zip(names, folds, strict=True)}) == 7


def test_later_outcomes_are_of_other_artifacts(found: list[outcomes.Outcome]) -> None:
    first, later = evaluate.by_time(found)
    assert max(found[at].time for at in first) < min(found[at].time for at in later)
    assert not {found[at].artifact for at in first} & {found[at].artifact for at in later}


def test_families_that_are_scored_were_not_seen(found: list[outcomes.Outcome]) -> None:
    def predict(known: Any, asked: Any, labels: Any) -> Any:
        assert not {o.family for o in known} & {o.family for o in asked}
        assert (labels == model.labels_of(known)).all()
        return np.full(len(asked), 0.5)

    assert (evaluate.by_family(found, predict) == 0.5).all()


@pytest.fixture(scope="module")
def said(known: learners.Learners, found: list[outcomes.Outcome]) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate, "RESAMPLES", 40)
        patch.setattr(evaluate, "SHUFFLES", 1)
        patch.setattr(model, "ROUNDS", 30)
        return evaluate.evaluate(known, found)


def test_skill_is_found_where_there_is_some_and_not_in_the_control(said: dict[str, Any]) -> None:
    rows = {(r["split"], r["method"]): r for r in said["scores"]}
    for split in ("family", "time"):
        ours, control = rows[split, "model"], rows[split, "shuffled labels 1"]
        assert ours["skill"]["low"] > 0 and ours["skill"]["value"] > control["skill"]["value"] + 0.05
        assert control["skill"]["value"] < 0.05
        assert ours["skill"]["low"] <= ours["skill"]["value"] <= ours["skill"]["high"]
        assert ours["precision"]["value"] > ours["failures"] / ours["outcomes"]
    assert rows["family", "model"]["outcomes"] == COUNT and rows["family", "model"]["families"] == 10


def test_reliability_counts_every_outcome_once(said: dict[str, Any]) -> None:
    bins = said["reliability"]
    assert sum(b["outcomes"] for b in bins) == COUNT
    assert [b["predicted"] for b in bins] == sorted(b["predicted"] for b in bins)
    for b in bins:
        assert b["observed"]["low"] <= b["observed"]["value"] <= b["observed"]["high"]
    drawn = picture.reliability(bins, "a < b")
    assert drawn.count("<circle") == len(bins) and "a &lt; b" in drawn


def test_a_prior_is_drawn_towards_the_rate_of_all() -> None:
    every = Evidence(1000, 100)
    bare, low, high = prior.rate(Evidence(), every)
    assert bare == pytest.approx(0.1, abs=0.001) and low < bare < high
    group, *narrow = prior.rate(Evidence(200, 60), every)
    assert 0.25 < group < 0.3 and narrow[1] - narrow[0] < high - low


# -- commands


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ESPER_KEYS", str(tmp_path / "trust"))
    with Library.open(tmp_path / "library", roles=("compiler", "validator")):
        return tmp_path / "library"


def _run(*words: str | Path) -> tuple[int, dict[str, Any]]:
    done = CliRunner().invoke(main, ["risk", *map(str, words), "--json"])
    return done.exit_code, json.loads(done.stdout)


def test_train_writes_the_library_its_model(home: Path, found: list[outcomes.Outcome]) -> None:
    path = home.parent / "outcomes.jsonl"
    with outcomes.Log(path) as log:
        log.append(found)
    code, told = _run("train", "--library", home, "--outcomes", path)
    assert code == 0 and told["basis"] == "simulated" and told["outcomes"] == COUNT
    kept = Path(told["model"])
    assert model.read(kept).basis == "simulated"
    before = kept.read_bytes()
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:200]))
    code, told = _run("train", "--library", home, "--outcomes", path)
    assert code == 15 and told["error"]["code"] == "E0954"
    assert kept.read_bytes() == before  # the model that is there stays


def test_evaluate_tells_its_basis_and_draws(
    home: Path, found: list[outcomes.Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluate, "RESAMPLES", 5)
    monkeypatch.setattr(evaluate, "SHUFFLES", 1)
    monkeypatch.setattr(model, "ROUNDS", 5)
    path, drawn = home.parent / "outcomes.jsonl", home.parent / "drawn.svg"
    with outcomes.Log(path) as log:
        log.append(found)
    code, told = _run("evaluate", "--outcomes", path, "--svg", drawn)  # needs no library
    assert code == 0 and told["basis"] == "simulated" and drawn.read_text().startswith("<svg")
    methods = {row["method"] for row in told["scores"]}
    assert methods == {"model", "rule count", "3-feature logistic", "shuffled labels 1"}
    plain = CliRunner().invoke(main, ["risk", "evaluate", "--outcomes", str(path)])
    assert plain.exit_code == 0 and f"{COUNT} outcomes" in plain.output


def test_a_library_that_was_told_nothing(home: Path) -> None:
    for command in ("train", "evaluate"):
        code, told = _run(command, "--library", home)
        assert code == 15 and told["error"]["code"] == "E0954"


def test_a_missing_package_is_named(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "xgboost", None)
    assert _code(learners.load) == "E0950"
