"""NVBench (the package cuda-bench) as a second opinion on cold device times, where it is installed.

Its own clock, stopping rule and throttle check; it cannot interleave a baseline or rotate inputs, so that the
profile's figures are those of `gauntlet.clock`, and these stand beside them.
"""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from runtime.timing import Work

TIMEOUT_S = 15.0


def cold_medians(works: Mapping[str, Work], device: torch.device, scratch: str) -> dict[str, Any]:
    """{"<name>_ms": median of cold launches}; {"absent": reason} where the package is missing or fails."""
    try:
        bench: Any = importlib.import_module("cuda.bench")
        found: Any = importlib.import_module("cuda.bench.results")
    except ImportError:
        return {"absent": "cuda-bench is not installed"}
    try:
        return _measured(bench, found, works, device, Path(scratch) / "nvbench.json")
    except Exception as error:  # its own classes; a second opinion never costs the first
        return {"absent": f"{type(error).__name__}: {error}"[:300]}


def _measured(
    bench: Any, found: Any, works: Mapping[str, Work], device: torch.device, out: Path
) -> dict[str, Any]:
    for name, work in works.items():
        registered = bench.register(_benchmark(work, device))
        registered.set_name(name).set_timeout(TIMEOUT_S)
    bench.run_all_benchmarks(["nvbench", "--devices", str(device.index or 0), "--jsonbin", str(out)])
    told = {}
    for name, states in found.BenchmarkResult.from_json(out).items():
        samples = states[0].samples  # seconds
        if samples:
            told[f"{name}_ms"] = round(statistics.median(samples) * 1e3, 6)
    return told


def _benchmark(work: Work, device: torch.device) -> Any:
    def launch(where: Any) -> None:
        stream = torch.cuda.ExternalStream(where.get_stream().addressof(), device=device)
        with torch.cuda.stream(stream):
            work()

    return lambda state: state.exec(launch)
