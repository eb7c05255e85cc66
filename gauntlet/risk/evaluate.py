"""How good the scores are on what the model has not seen: by kernel family, and by time; never by row.

Everything is told beside what it has to beat (the base rate, a count of rules, a logistic regression on
three features) and beside a control trained on shuffled labels, with the numbers of outcomes, failures,
artifacts and families. Intervals take artifacts as what was drawn, since trainings with one artifact end
alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from gauntlet.risk import features, model
from gauntlet.risk.learners import Learners
from gauntlet.risk.model import Array
from gauntlet.risk.outcomes import Outcome
from gauntlet.statistics import wilson

FOLDS, EARLIER = 5, 0.7
"""Of families; share of the outcomes that come first and train."""
RESAMPLES, LEVEL, SHUFFLES = 400, 0.95, 3
BINS, Z95 = 8, 1.96
THREE = ("worst_used", "size_distance", "numerics_cases")
RULES: tuple[tuple[str, Callable[[Mapping[str, float]], bool]], ...] = (
    ("errors reach half of the bound", lambda f: f["worst_used"] > 0.5),
    ("fewer than 4 cases of outputs", lambda f: f["numerics_cases"] < math.log2(5)),
    ("no case of gradients", lambda f: f["gradients_cases"] == 0),
    ("used more than an octave from what was tested", lambda f: f["size_distance"] > 1),
    ("a rest of a division by 16 that was not tested", lambda f: f["rest_untested"] > 0),
    ("equal bits are not promised", lambda f: f["atomics"] > 0),
)
Predict = Callable[[Sequence[Outcome], Sequence[Outcome], Array], Array]
"""(outcomes to learn from, outcomes to score, labels of the first) -> probabilities of the second."""


@dataclass(frozen=True)
class Interval:
    """A figure with its 95 % interval, by resampling artifacts."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Score:
    """One way to score on one split. `skill`: 1 - Brier / Brier of the base rate; `precision`: area under
    precision and recall (average precision), whose chance level is the share of failures."""

    split: str
    method: str
    outcomes: int
    failures: int
    artifacts: int
    families: int
    brier: float
    skill: Interval
    precision: Interval


@dataclass(frozen=True)
class Bin:
    """Of the reliability plot: mean score, share that failed with its interval (Wilson, artifacts
    counted), and numbers."""

    predicted: float
    observed: Interval
    outcomes: int
    failures: int
    artifacts: int


# -- what is compared


def trees(learners: Learners) -> Predict:
    def predict(known: Sequence[Outcome], asked: Sequence[Outcome], labels: Array) -> Array:
        found = model.fit(learners, known, labels)
        return found.probabilities(learners, model.rows_of(asked))

    return predict


def base_rate(known: Sequence[Outcome], asked: Sequence[Outcome], labels: Array) -> Array:
    return np.full(len(asked), labels.mean())


def rule_count(known: Sequence[Outcome], asked: Sequence[Outcome], labels: Array) -> Array:
    """The share that failed among those with as many rules of thumb against them, with one more outcome
    at the base rate."""
    counts = np.array([_count(o) for o in known])
    rates = [(labels[counts == n].sum() + labels.mean()) / ((counts == n).sum() + 1)
             for n in range(len(RULES) + 1)]  # fmt: skip
    return np.array([rates[_count(o)] for o in asked])


def _count(outcome: Outcome) -> int:
    return sum(holds(outcome.features) for _, holds in RULES)


def logistic(learners: Learners) -> Predict:
    """On THREE, missing values at their mean, standardised."""
    at = [features.NAMES.index(name) for name in THREE]

    def predict(known: Sequence[Outcome], asked: Sequence[Outcome], labels: Array) -> Array:
        rows, others = model.rows_of(known)[:, at], model.rows_of(asked)[:, at]
        mean, spread = np.nanmean(rows, 0), np.nanstd(rows, 0) + 1e-9
        rows, others = (np.nan_to_num((r - mean) / spread) for r in (rows, others))
        return learners.linear.LogisticRegression().fit(rows, labels).predict_proba(others)[:, 1]

    return predict


def shuffled(learners: Learners, seed: int) -> Predict:
    """The trees, taught with the labels of others: what is left is chance."""

    def predict(known: Sequence[Outcome], asked: Sequence[Outcome], labels: Array) -> Array:
        return trees(learners)(known, asked, np.random.default_rng(seed).permutation(labels))

    return predict


# -- splits


def by_family(outcomes: Sequence[Outcome], predict: Predict) -> Array:
    """Scores for each outcome from a model that saw none of its family; [n]."""
    folds = model.groups_of([o.family for o in outcomes], min(FOLDS, len({o.family for o in outcomes})))
    found = np.zeros(len(outcomes))
    for fold in np.unique(folds):
        inside, outside = np.flatnonzero(folds != fold), np.flatnonzero(folds == fold)
        found[outside] = _predicted(outcomes, inside, outside, predict)
    return found


def by_time(outcomes: Sequence[Outcome]) -> tuple[Array, Array]:
    """Numbers of the outcomes that come first, and of those after them of artifacts that none of the first is
    of. `outcomes` in the order of time."""
    cut = int(EARLIER * len(outcomes))
    before = {o.artifact for o in outcomes[:cut]}
    after = [at for at in range(cut, len(outcomes)) if outcomes[at].artifact not in before]
    return np.arange(cut), np.array(after, dtype=int)


def _predicted(outcomes: Sequence[Outcome], inside: Array, outside: Array, predict: Predict) -> Array:
    known = [outcomes[at] for at in inside]
    return predict(known, [outcomes[at] for at in outside], model.labels_of(known))


# -- figures


def evaluate(learners: Learners, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """As plain data: scores, reliability of the model's scores on families left out, what was shuffled.
    E0954, E0955 from `model.enough` are the caller's to ask for."""
    methods: dict[str, Predict] = {
        "model": trees(learners), "rule count": rule_count, "3-feature logistic": logistic(learners),
        **{f"shuffled labels {n + 1}": shuffled(learners, n) for n in range(SHUFFLES)},
    }  # fmt: skip
    first, later = by_time(outcomes)
    afterwards = [outcomes[at] for at in later]
    base = {"family": by_family(outcomes, base_rate), "time": _predicted(outcomes, first, later, base_rate)}
    scores, reliability = [], list[Bin]()
    for name, predict in methods.items():
        found = by_family(outcomes, predict)
        scores.append(score(learners, "family", name, outcomes, found, base["family"]))
        if name == "model":
            reliability = bins(outcomes, found)
        if len({o.failed for o in afterwards}) == 2:
            found = _predicted(outcomes, first, later, predict)
            scores.append(score(learners, "time", name, afterwards, found, base["time"]))
    return {"scores": [asdict(s) for s in scores], "reliability": [asdict(b) for b in reliability],
            "rules": [text for text, _ in RULES], "three": list(THREE)}  # fmt: skip


def score(
    learners: Learners, split: str, method: str, outcomes: Sequence[Outcome], found: Array, base: Array
) -> Score:
    labels = model.labels_of(outcomes)
    artifacts = np.unique([o.artifact for o in outcomes], return_inverse=True)[1]

    def skill(at: Array) -> float:
        against = np.square(base[at] - labels[at]).mean()
        return float(1 - np.square(found[at] - labels[at]).mean() / against) if against else math.nan

    def precision(at: Array) -> float:
        if not labels[at].any():
            return math.nan
        return float(learners.metrics.average_precision_score(labels[at], found[at]))

    return Score(
        split, method, len(labels), int(labels.sum()), int(artifacts.max()) + 1,
        len({o.family for o in outcomes}), float(np.square(found - labels).mean()),
        resampled(skill, artifacts), resampled(precision, artifacts),
    )  # fmt: skip


def resampled(figure: Callable[[Array], float], groups: Array) -> Interval:
    """A figure over numbers of outcomes, with the interval over samples of whole groups."""
    members = [np.flatnonzero(groups == g) for g in range(int(groups.max()) + 1)]
    rng = np.random.default_rng(0)
    values = [
        figure(np.concatenate([members[g] for g in rng.integers(0, len(members), len(members))]))
        for _ in range(RESAMPLES)
    ]
    low, high = np.nanquantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(figure(np.arange(len(groups))), float(low), float(high))


def bins(outcomes: Sequence[Outcome], found: Array) -> list[Bin]:
    """Of about as many outcomes each, in the order of their scores."""
    labels, out = model.labels_of(outcomes), []
    for part in np.array_split(np.argsort(found, kind="stable"), min(BINS, len(found))):
        artifacts = len({outcomes[at].artifact for at in part})
        share = float(labels[part].mean())
        low, high = wilson(share * artifacts, artifacts, Z95)
        out.append(
            Bin(
                float(found[part].mean()),
                Interval(share, low, high),
                len(part),
                int(labels[part].sum()),
                artifacts,
            )
        )
    return out
