"""A sample of the planted faults on a card: refused there, and the clean artifacts beside them are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import faults

pytestmark = pytest.mark.gpu
BLOCKS = ("affine_relu_40_f32", "softmax_72_f32", "dense_relu_64_bf16")


def test_a_sample_on_the_card(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    made = faults.make(tmp_path, "auto", 36, 7, BLOCKS)
    assert {case.block for case in made} >= set(BLOCKS)
    rows = faults.judged(tmp_path, made, "cuda:0", 4, 500.0, quick=False)
    found = faults.document(rows, len(made), 7, "cuda:0")
    assert len(rows) == len(made) and not found["wrong"], found["wrong"]
    assert found["figures"]["faults_classes"]["value"] >= 12
