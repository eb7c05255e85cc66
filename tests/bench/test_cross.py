"""Memory of a command and its workers together, and one example compiled for a card that is not here."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from bench import cross
from bench.results import ROOT

CHILD = "import time; held = bytearray(b'x' * (64 << 20)); time.sleep(60)"
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {CHILD!r}])"


def test_memory_counts_workers_too() -> None:
    process, pids = subprocess.Popen([sys.executable, "-c", PARENT], start_new_session=True), list[int]()
    try:
        for _ in range(600):
            pids = cross.children_of(process.pid)
            if len(pids) == 2 and cross.memory_of(pids) > 64 << 20:
                break
            time.sleep(0.05)
        assert cross.memory_of(pids) > 64 << 20 > cross.memory_of([process.pid])
        assert os.getpid() not in pids
    finally:
        os.killpg(process.pid, 9)
        process.wait()
    assert cross.memory_of([process.pid]) == 0, "who has ended has none"


def test_figures_are_none_where_a_block_failed() -> None:
    good = {"block": "a", "seconds": 3.0, "cpu_s": 2.0, "peak_bytes": 1 << 29}
    found = cross.figures([good])
    assert found["seconds_max"]["met"] and found["peak_GiB_max"]["value"] == 0.5
    broken = cross.figures([good, {**good, "why": "E0544"}])
    assert broken["seconds_max"]["value"] is None and broken["compiled"]["met"] is False


def test_an_example_is_compiled_within_a_gibibyte() -> None:
    row = cross.compiled(ROOT / "examples" / "softmax.json", "h100", os.sched_getaffinity(0))
    assert "why" not in row and row["kernels"] and row["stages"]["build"] > 0
    assert 0 < row["peak_bytes"] < cross.MOST_BYTES
    refused = cross.compiled(ROOT / "examples" / "softmax.json", "nowhere", os.sched_getaffinity(0))
    assert "E0510" in refused["why"]
