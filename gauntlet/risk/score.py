"""The risk of an artifact in a library: by the model of its own outcomes, by the shipped one, or by a
prior."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from esper_ir.diagnostics import EXIT_NOT_FOUND, EsperError
from gauntlet import opclass
from gauntlet.confidence import Evidence
from gauntlet.report import UNMEASURED, Number
from gauntlet.risk import features, field, model, prior
from gauntlet.risk.learners import Learners, load
from gauntlet.risk.outcomes import FIELD, PRIOR, SIMULATED
from library.manifest import unpack
from library.store import Library

SHIPPED = Path(__file__).with_name("simulated.json")
FOLDER = "risk"
Group = tuple[str, str]


@dataclass(frozen=True)
class Score:
    """`risk`: probability of a failure in use, UNMEASURED where nothing at all is known; `basis`: "field",
    "simulated" or "prior"; `outcomes`, `failures`: in the field, of the artifact's group; `low`, `high`: 90 %
    interval of the group's rate, where the basis is a prior."""

    risk: Number
    basis: str
    outcomes: int
    failures: int
    low: Number = UNMEASURED
    high: Number = UNMEASURED

    def annotation(self) -> dict[str, Any]:
        """What is signed beside a verdict."""
        return {} if self.risk == UNMEASURED else {"risk_score": self.risk, "risk_basis": self.basis}


def place(library: Library, basis: str) -> Path:
    """Where a library keeps the model that was trained for it."""
    return library.home / FOLDER / f"{basis}.json"


def chosen(library: Library) -> model.Model | None:
    """The model of outcomes in the field where one was trained, else that of simulated ones. E0952, E0956."""
    found = next((p for p in (place(library, FIELD), place(library, SIMULATED), SHIPPED) if p.exists()), None)
    return model.read(found) if found else None


class Scorer:
    """Scores artifacts of one library; what all share is read once. Without the extra `risk`: by prior."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self.learners = _learners()
        self.model = chosen(library) if self.learners else None
        self.groups: Mapping[Group, Evidence] = _groups(library)

    def of(self, artifact_id: str) -> Score:
        """E0721 for an unknown artifact, E0957 for one without a verdict."""
        report, manifest = known(self.library, artifact_id)
        key = (opclass.of_graph(features.graph_of(manifest)), features.check_pattern(report))
        group = self.groups.get(key, Evidence())
        if self.model is not None and self.learners is not None:
            row = row_of(features.of(report, manifest))
            risk = float(self.model.probabilities(self.learners, row[None])[0])
            return Score(round(risk, 6), self.model.basis, group.outcomes, group.failures)
        every = sum(self.groups.values(), Evidence())
        if not every.outcomes:
            return Score(UNMEASURED, PRIOR, 0, 0)
        share, low, high = prior.rate(group, every)
        return Score(round(share, 6), PRIOR, group.outcomes, group.failures, low, high)


def known(library: Library, artifact_id: str) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """(report, manifest) of an artifact with a verdict. E0957."""
    record = library.resolve(artifact_id)
    verdict = library.verdict(record.id)
    if verdict is None:
        raise EsperError(
            "E0957",
            f"{record.id} has no verdict, so that nothing is known about it",
            node=record.id,
            hint=f"esper-gauntlet bench {record.id}",
            exit_code=EXIT_NOT_FOUND,
        )
    return verdict.report, unpack(library.read(record.id)).manifest


def row_of(values: Mapping[str, float]) -> Any:
    """[features]."""
    return np.array([values[name] for name in features.NAMES], dtype=float)


def _learners() -> Learners | None:
    try:
        return load()
    except EsperError:
        return None


def _groups(library: Library) -> dict[Group, Evidence]:
    found: dict[Group, Evidence] = defaultdict(Evidence)
    for outcome in field.outcomes(library):
        found[outcome.op_class, outcome.pattern] += Evidence(1, int(outcome.failed))
    return found
