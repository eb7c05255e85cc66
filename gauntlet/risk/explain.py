"""Why an artifact has its score: what each feature adds to the log-odds."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from esper_ir.diagnostics import EXIT_NOT_FOUND, EsperError
from gauntlet.risk import features, learners, model, score
from library.store import Library


def explain(library: Library, artifact: str, path: Path | None = None) -> dict[str, Any]:
    """As plain data, the largest contribution first; base and contributions sum up to the log-odds of `risk`.
    E0721, E0950, E0952, E0956, E0957."""
    record = library.resolve(artifact)
    report, manifest = score.known(library, record.id)
    found = model.read(path) if path else score.chosen(library)
    if found is None:
        raise EsperError(
            "E0956", "there is no risk model", hint="esper-gauntlet risk train", exit_code=EXIT_NOT_FOUND
        )
    values = features.of(report, manifest)
    parts, base = found.contributions(learners.load(), score.row_of(values))
    texts = {f.name: f.text for f in features.FEATURES}
    rows = [
        {
            "feature": n, "value": None if math.isnan(values[n]) else values[n], "log_odds": parts[n],
            "text": texts[n],
        }
        for n in sorted(parts, key=lambda n: -abs(parts[n]))
    ]  # fmt: skip
    total = base + sum(parts.values())
    return {
        "artifact_id": record.id, "risk": 1 / (1 + math.exp(-total)), "basis": found.basis, "base": base,
        "contributions": rows, "facts": dict(found.facts),
    }  # fmt: skip
