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
    for fault in faults:
        seen = fault["races"] if fault["kind"] == "race" else fault["wrong"]
        assert seen, fault
