"""torch's own samples of every operator with a counterpart: a few in the fast suite, all in the slow one."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

internal = pytest.importorskip("torch.testing._internal.common_methods_invocations")

from tests.esper_ir.opinfo import run  # noqa: E402

COUNTS = Path(__file__).parent / "counts.json"
RECORDS = run.records()
FEW = 1
MOST_EXCLUDED = 0.05
WITHOUT = {f"nn.functional.lp_pool{n}d" for n in (1, 2, 3)} | {
    "nn.functional.one_hot", "nn.functional.batch_norm.without_cudnn",
}  # fmt: skip
"""Rules for which torch has no samples, or none in a floating type on the CPU."""


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """torch's own calls warn about what its samples do on purpose."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def row(key: str, tallies: dict[str, run.Tally]) -> dict[str, Any]:
    """What is kept of one operator: counts per dtype, reasons over all of them."""
    reasons: dict[str, int] = {}
    for tally in tallies.values():
        for reason, count in tally.excluded.items():
            reasons[run.short(reason)] = reasons.get(run.short(reason), 0) + count
    counts = {kind: [t.run, t.passed, t.gradients, sum(t.excluded.values())] for kind, t in tallies.items()}
    return {"counts": counts, "reasons": dict(sorted(reasons.items()))}


def test_there_is_a_rule_for_most_of_the_language() -> None:
    """Rules name records of torch, and together they reach the operators that torch has by one name."""
    names = {record.name for record in RECORDS.values()}
    orphans = {k for k in run.RULES if k not in RECORDS and k not in names}
    assert len(RECORDS) > 270 and orphans <= WITHOUT, orphans


@pytest.mark.parametrize("key", sorted(RECORDS))
def test_a_few_samples(key: str) -> None:
    tally = run.measure(key, RECORDS[key], torch.float32, FEW)
    assert tally is not None and not tally.failed, tally


@pytest.mark.slow
@pytest.mark.parametrize("key", sorted(RECORDS))
def test_error_inputs_are_refused_with_a_code(key: str) -> None:
    tally = run.refusals(key, RECORDS[key])
    assert not tally.failed, tally.failed


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_samples(request: pytest.FixtureRequest) -> None:
    """Forward and gradient in float64, float32 and bfloat16; at most one in twenty has no counterpart, and no
    dtype of an operator that torch supports is left out.
    """
    found: dict[str, Any] = {}
    failed: list[str] = []
    for key, record in sorted(RECORDS.items()):
        measured = {str(d).removeprefix("torch."): run.measure(key, record, d) for d in run.DTYPES}
        tallies = {kind: t for kind, t in measured.items() if t is not None}
        failed += [f for t in tallies.values() for f in t.failed]
        found[key] = row(key, tallies)
    errors = {key: run.refusals(key, record) for key, record in sorted(RECORDS.items())}
    for key, tally in errors.items():
        failed += tally.failed
        found[key]["refused"] = [tally.passed, sum(tally.excluded.values())]
    assert not failed, failed[:20]
    every = [c for r in found.values() for c in r["counts"].values()]
    ran, left = sum(c[0] for c in every), sum(c[3] for c in every)
    assert ran > 15_000 and left <= MOST_EXCLUDED * (ran + left), (ran, left)
    absent = [(k, kind) for k, r in found.items() for kind, c in r["counts"].items() if c[3] and not c[1]]
    assert not absent, absent
    document = {"torch": torch.__version__.partition("+")[0], "operators": found}
    if request.config.getoption("--update-golden"):
        COUNTS.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    kept = json.loads(COUNTS.read_text(encoding="utf-8"))
    if kept["torch"] == document["torch"]:
        assert kept == document, "stale: pytest --update-golden writes it"
