"""Faults in Triton text are seen without a card: wrong results, and races between programs of one launch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.source import ROOT

pytest.importorskip("triton")
EXTENT = "off-by-one extent"
KINDS = (
    "race", EXTENT, "gradient of one input wrong", "constant output", "wrong axis",
    "skipped epilogue", "output is an input", "input overwritten",
)  # fmt: skip


def _told(block: str, rows: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What came of the clean block and of its mutants."""
    command = [sys.executable, "-m", "tests.faults.interpreted", block, str(rows), *KINDS]
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    clean, *faults = json.loads(done.stdout)
    return clean, faults


def _all_seen(clean: dict[str, Any], faults: list[dict[str, Any]], *but: str) -> None:
    """Of every kind some; of the kinds that may be hidden (`but` that one) perhaps none."""
    assert not clean["wrong"] and not clean["races"], "a clean block shows neither"
    seen = [bool(f["races"] if f["kind"] == "race" else f["wrong"]) for f in faults]
    hidden = [f for f, s in zip(faults, seen, strict=True) if not s]
    # Where blocks of rows end with the last row, as those of one row do, one row too many is no program's.
    assert all(f["kind"] == EXTENT for f in hidden), hidden
    kinds = {f["kind"] for f, s in zip(faults, seen, strict=True) if s}
    assert {f["kind"] for f in faults} - {*but} <= kinds


def test_faults_in_triton_text_show_under_the_interpreter() -> None:
    clean, faults = _told("affine_relu_40_f32", 37)
    assert {f["kind"] for f in faults} == set(KINDS)
    _all_seen(clean, faults)


@pytest.mark.slow
@pytest.mark.parametrize("block", ["rms_residual_40_f32", "softmax_72_f32", "sigmoid_blend_96_f32"])
def test_they_show_in_blocks_with_sums_and_maxima(block: str) -> None:
    clean, faults = _told(block, 37)
    assert len({f["kind"] for f in faults}) >= 5
    _all_seen(clean, faults, EXTENT)
