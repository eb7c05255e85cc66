"""Faults in Triton text are seen without a card: wrong results, and races between programs of one launch."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.source import ROOT

pytest.importorskip("triton")
KINDS = (
    "race", "off-by-one extent", "gradient of one input wrong", "constant output", "wrong axis",
    "skipped epilogue", "output is an input", "input overwritten",
)  # fmt: skip


def test_faults_in_triton_text_show_under_the_interpreter() -> None:
    command = [sys.executable, "-m", "tests.faults.interpreted", "affine_relu_40_f32", "70", *KINDS]
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    clean, *faults = json.loads(done.stdout)
    assert not clean["wrong"] and not clean["races"], "a clean block shows neither"
    assert {f["kind"] for f in faults} == set(KINDS)
    seen = [bool(f["races"] if f["kind"] == "race" else f["wrong"]) for f in faults]
    hidden = [f for f, s in zip(faults, seen, strict=True) if not s]
    # One row too many is written where nothing lies: fences around every buffer see it, results do not.
    assert all(f["kind"] == "off-by-one extent" for f in hidden), hidden
    assert {f["kind"] for f, s in zip(faults, seen, strict=True) if s} == set(KINDS)
