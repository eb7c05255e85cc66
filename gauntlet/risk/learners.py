"""XGBoost and scikit-learn: the extra `risk`, imported by the commands that train, evaluate or explain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from esper_ir.diagnostics import EXIT_BACKEND, EsperError


@dataclass(frozen=True)
class Learners:
    """The modules `xgboost`, `sklearn.linear_model` and `sklearn.metrics`."""

    xgb: Any
    linear: Any
    metrics: Any


def load() -> Learners:
    """E0950 where one is missing."""
    try:
        import sklearn.linear_model
        import sklearn.metrics
        import xgboost
    except ImportError as error:
        raise EsperError(
            "E0950",
            f"risk models need the package {error.name}",
            hint="pip install 'esper-forge[risk]'",
            exit_code=EXIT_BACKEND,
        ) from None
    return Learners(xgboost, sklearn.linear_model, sklearn.metrics)
