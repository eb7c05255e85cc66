"""A risk model: boosted trees over the features, a sigmoid that makes a probability of their sum, as JSON.

The trees are held to what features mean (`Feature.more`). The sigmoid (Platt, 1999) is fitted on predictions
for kernel families that the trees had not seen, so that it corrects what they are too sure of there.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from esper_ir.diagnostics import EXIT_INTEGRITY, EXIT_LIMIT, EXIT_NOT_FOUND, EsperError
from gauntlet.risk import features
from gauntlet.risk.learners import Learners
from gauntlet.risk.outcomes import Outcome, same_names, same_schema
from library.paths import writes_to

SCHEMA = "esper-risk-model/1"
LEAST, LEAST_FAILURES = 1000, 100
"""Outcomes and failures among them from which on a model is trained."""
ROUNDS, FOLDS = 120, 5
PARAMETERS: Mapping[str, Any] = {
    "objective": "binary:logistic", "max_depth": 3, "eta": 0.08, "subsample": 0.8, "colsample_bytree": 0.7,
    "min_child_weight": 4, "lambda": 2.0, "seed": 0, "nthread": 1, "tree_method": "hist",
    "monotone_constraints": tuple(f.more for f in features.FEATURES),
}  # fmt: skip
"""Fixed beforehand, not searched."""
Array = Any
"""A numpy array of float64."""


@dataclass(frozen=True)
class Model:
    """`booster`: XGBoost's JSON; the probability is sigmoid(slope * margin + intercept)."""

    basis: str
    booster: Mapping[str, Any]
    slope: float
    intercept: float
    facts: Mapping[str, Any]

    def margins(self, learners: Learners, rows: Array) -> Array:
        """Sums of the trees, log-odds before calibration; [n]."""
        return self._booster(learners).predict(_matrix(learners, rows), output_margin=True).astype(float)

    def probabilities(self, learners: Learners, rows: Array) -> Array:
        """[n], in (0, 1). `rows`: [n, features]."""
        return sigmoid(self.slope * self.margins(learners, rows) + self.intercept)

    def contributions(self, learners: Learners, row: Array) -> tuple[dict[str, float], float]:
        """What each feature adds to the log-odds of one artifact, and the log-odds without any (TreeSHAP:
        Lundberg and Lee, 2017). They sum up to the log-odds of the score."""
        found = self._booster(learners).predict(_matrix(learners, row[None]), pred_contribs=True)[0]
        parts = {n: self.slope * float(v) for n, v in zip(features.NAMES, found[:-1], strict=True)}
        return parts, self.slope * float(found[-1]) + self.intercept

    def _booster(self, learners: Learners) -> Any:
        booster = learners.xgb.Booster({"nthread": 1})
        booster.load_model(bytearray(json.dumps(self.booster).encode()))
        return booster


def sigmoid(values: Array) -> Array:
    return 1.0 / (1.0 + np.exp(-np.clip(values, -500, 500)))


def rows_of(outcomes: Sequence[Outcome]) -> Array:
    """[n, features], NaN where nothing was measured."""
    return np.array([[o.features[n] for n in features.NAMES] for o in outcomes], dtype=float)


def labels_of(outcomes: Sequence[Outcome]) -> Array:
    """[n], 1 for a failure."""
    return np.array([float(o.failed) for o in outcomes])


def groups_of(names: Sequence[str], folds: int) -> Array:
    """A fold per item, all of one name together, folds of about one size: the largest group first, into the
    smallest fold; [n]."""
    known, inverse, counts = np.unique(np.array(names), return_inverse=True, return_counts=True)
    sizes, where = np.zeros(folds), np.zeros(len(known), dtype=int)
    for at in np.argsort(-counts, kind="stable"):
        where[at] = int(sizes.argmin())
        sizes[where[at]] += counts[at]
    return where[inverse]


def _matrix(learners: Learners, rows: Array, labels: Array | None = None) -> Any:
    return learners.xgb.DMatrix(rows, label=labels, feature_names=list(features.NAMES), nthread=1)


def _boosted(learners: Learners, rows: Array, labels: Array) -> Any:
    return learners.xgb.train(dict(PARAMETERS), _matrix(learners, rows, labels), ROUNDS)


def enough(outcomes: Sequence[Outcome], least: int = LEAST, failures: int = LEAST_FAILURES) -> None:
    """E0954 for too few outcomes or failures, E0955 where all ended alike."""
    failed = sum(o.failed for o in outcomes)
    told = f"{len(outcomes)} outcomes with {failed} failures"
    if outcomes and failed in (0, len(outcomes)):
        raise EsperError("E0955", f"{told}: nothing to tell apart", exit_code=EXIT_LIMIT)
    if len(outcomes) < least or failed < failures:
        raise EsperError(
            "E0954",
            f"{told}; a model needs {least} with {failures}",
            hint="until then scores rest on a prior by class of operator",
            exit_code=EXIT_LIMIT,
        )


def fit(
    learners: Learners, outcomes: Sequence[Outcome], labels: Array | None = None, basis: str = ""
) -> Model:
    """Train on these outcomes; no check of their number. `labels` other than the outcomes' own are for
    controls."""
    rows = rows_of(outcomes)
    known = labels_of(outcomes) if labels is None else labels
    booster = _boosted(learners, rows, known)
    slope, intercept = _calibrated(learners, rows, known, [o.family for o in outcomes])
    artifacts, families = {o.artifact for o in outcomes}, {o.family for o in outcomes}
    facts = {
        "outcomes": len(outcomes), "failures": int(known.sum()), "artifacts": len(artifacts),
        "families": len(families), "base_rate": float(known.mean()), "trained": time.time(),
        "xgboost": learners.xgb.__version__,
    }  # fmt: skip
    chosen = basis or (outcomes[0].basis if outcomes else "")
    return Model(chosen, json.loads(bytes(booster.save_raw("json"))), slope, intercept, facts)


def _calibrated(
    learners: Learners, rows: Array, labels: Array, families: Sequence[str]
) -> tuple[float, float]:
    """Slope and intercept by logistic regression on the margins of families left out."""
    folds = groups_of(families, min(FOLDS, len(set(families))))
    margins, seen = np.zeros(len(labels)), np.zeros(len(labels), dtype=bool)
    for fold in np.unique(folds):
        inside = folds != fold
        if len(np.unique(labels[inside])) < 2:
            continue
        booster = _boosted(learners, rows[inside], labels[inside])
        margins[~inside] = booster.predict(_matrix(learners, rows[~inside]), output_margin=True)
        seen |= ~inside
    if len(np.unique(labels[seen])) < 2:
        return 1.0, 0.0  # one family, or one kind of outcome outside of it: nothing to calibrate with
    found = learners.linear.LogisticRegression(C=1e6).fit(margins[seen, None], labels[seen])
    return max(float(found.coef_[0, 0]), 0.0), float(found.intercept_[0])


# -- the file


def save(model: Model, path: Path) -> None:
    """Whole or not at all. E0702, E0703, E0710."""
    body = {
        "schema": SCHEMA, "features_schema": features.SCHEMA, "features": list(features.NAMES),
        "basis": model.basis, "slope": model.slope, "intercept": model.intercept, "facts": dict(model.facts),
        "booster": model.booster,
    }  # fmt: skip
    part = path.with_name(path.name + ".part")
    with writes_to(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(_text({**body, "digest": _digest(body)}) + "\n", encoding="utf-8")
        os.replace(part, path)


def _text(body: Mapping[str, Any]) -> str:
    return json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(_text(body).encode()).hexdigest()


def read(path: Path) -> Model:
    """E0956 for a file that is no model or was changed, E0952 for another schema of features, E0953 for
    features that are not known or are missing."""
    where = str(path)
    try:
        data = json.loads(path.read_bytes())
    except OSError as error:
        raise EsperError(
            "E0956", f"{where}: {error.strerror}", node=where, exit_code=EXIT_NOT_FOUND
        ) from None
    except ValueError:
        raise _no_model(where, "it is not JSON") from None
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise _no_model(where, f"it is not {SCHEMA}")
    same_schema(data.get("features_schema"), where)
    body = {k: v for k, v in data.items() if k != "digest"}
    if data.get("digest") != _digest(body):
        raise _no_model(where, "its digest does not match")
    same_names(body["features"], where)
    if body["features"] != list(features.NAMES):
        raise _no_model(where, "its features stand in another order")
    return Model(body["basis"], body["booster"], body["slope"], body["intercept"], body["facts"])


def _no_model(where: str, why: str) -> EsperError:
    return EsperError(
        "E0956",
        f"{where} is no risk model: {why}",
        node=where,
        hint="train it again: esper-gauntlet risk train",
        exit_code=EXIT_INTEGRITY,
    )


def logit(probability: float) -> float:
    return math.log(probability / (1 - probability))
