"""The error of a mutant on ordinary values, and what the table counts of it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from bench import faults
from gauntlet.isolate import ForkServer
from tests.faults import corpus, ordinary
from tests.faults.fault import Mutant

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="no C compiler")


@pytest.fixture(scope="module")
def block() -> corpus.Block:
    data = next(d for d in corpus.blueprints() if d["name"] == "scale_shift_40_f32")
    return corpus.compiled(data, "cpu")


def test_it_is_of_ordinary_values(block: corpus.Block, server: ForkServer, tmp_path: Path) -> None:
    """Whatever would refuse the mutant first: of a result that is scaled a little and not finite for zeros it
    is that little, in a plan for one gradient only too; of NaN there is no number."""
    (store,) = [f for f in faults.KINDS["scaled result"].mutants(block) if f.kernel == "inf0_0_g"]
    kernel, gradient = store.kernel, next(iter(faults.KINDS["gradient of one input wrong"].mutants(block)))
    value = store.text.partition("[o3 + j] = ")[2].partition(";")[0]
    texts = [
        store.text,
        store.text.replace(value, f"b0_x[o0 + j] == 0 ? 1.0f / b0_x[o0 + j] : {value}"),
        store.text.replace(value, f'{value} + __builtin_nanf("")'),
        store.text.replace(value, f"1.01f * {value}"),
    ]
    chosen = [Mutant("scaled result", kernel, str(at), text=text) for at, text in enumerate(texts)]
    made = list(faults._written(tmp_path, block, [*chosen, gradient], 0))
    errors = [ordinary.error((tmp_path / p.file).read_bytes(), "cpu", server, ("normal",)) for p in made]
    little, hidden, none, much, one = errors
    assert little is not None and 1 < little < 10 and hidden == little
    assert none is None and much is not None and much > 1000
    assert one is not None and 1 < one < 10
    clean = ordinary.error(block.container, "cpu", server, ("normal", "ones"))
    assert clean is not None and 0 < clean < 1
    assert ordinary.error(b"no artifact", "cpu", server, ("normal",)) is None


def _row(kind: str, passed: bool, error: float | None, stage: str = "numerics") -> dict[str, object]:
    return {"kind": kind, "block": "b", "kernel": "k", "place": "p", "stage": stage, "margin": 1e30,
            "reason": "", "passed": passed, "by_value": False, "witness": "", "beyond": False,
            "subtle": error is not None and error < 10, "ordinary": error}  # fmt: skip


def test_only_what_was_refused_and_is_near_counts() -> None:
    kind, none = "wrong axis", "endless loop"
    errors = [*(9 * [3.0]), 0.5, 10.0, None]
    rows = [*(_row(kind, False, e) for e in errors), _row(kind, True, 2.0), _row(none, False, None)]
    found = faults.document(rows, len(rows), 0, "cpu")
    (axis,) = [r for r in found["rows"] if r["class"] == kind]
    assert (axis["planted"], axis["caught"], axis["small"]) == (13, 12, 11)
    assert (axis["under_10x"], axis["hidden"]) == (10, 1) and "no_small" not in axis
    (endless,) = [r for r in found["rows"] if r["class"] == none]
    assert endless["under_10x"] == 0 and endless["no_small"]
    figures = found["figures"]
    small = sum(not k.no_small for k in faults.KINDS.values())
    assert figures["classes_with_small_forms"]["value"] == small >= 20
    reached = figures["classes_with_10_under_10x_the_bound"]
    assert reached["value"] == 1 and reached["target"] == small and not reached["met"]
