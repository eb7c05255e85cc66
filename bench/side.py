"""Side by side: what it costs to have a compiled block, in a fresh process, by each way there is to have one.

Everything that can be prepared is: compiler caches filled, cache files saved, functions and packages
compiled ahead. Then each implementation is loaded and stepped in processes of its own (`bench.fresh`).
Several start at a time, since importing torch takes longer than what is measured; the measured part they do
one by one.
"""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from bench.blocks import Block, Sizes
from bench.load import bare_environment
from bench.results import ROOT, figure
from library import hub
from library.store import Library

OURS = "esper"
FORWARD_ONLY = ("AOTInductor",)
ROUNDS, SECONDS = 3, 120.0
PREPARED = ("torch.compile", "torch.compile, cache file", "aot_compile", "AOTInductor", "Triton JIT")


def available(block: Block, device: torch.device) -> dict[str, str]:
    """Implementation -> "" or why it is not measured here."""
    compiler, inductor = torch.compiler, torch._inductor
    absent = {
        "torch.compile, cache file": hasattr(compiler, "save_cache_artifacts"),
        "aot_compile": hasattr(compiler, "load_compiled_function"),
        "AOTInductor": hasattr(inductor, "aoti_compile_and_package"),
    }
    found = {name: "" if there else f"not in torch {torch.__version__}" for name, there in absent.items()}
    jit = block.name == "rmsnorm_residual" and device.type == "cuda" and importlib.util.find_spec("triton")
    found["Triton JIT"] = "" if jit else "written for rmsnorm_residual on a card"
    installed = importlib.util.find_spec("kernels") is not None
    found["HF kernels"] = "" if installed else "the package `kernels` is not installed"
    return {OURS: "", "eager": "", "torch.compile": "", **found}


class Side:
    """One block at one size, all implementations."""

    def __init__(
        self, library: Library, artifact: str, block: Block, sizes: Sizes, unproven: bool, threads: int = 0
    ) -> None:
        self.library, self.artifact, self.block, self.sizes = library, artifact, block, sizes
        self.unproven, self.threads, self.turn = unproven, threads, ""
        self.device = torch.device("cpu" if "-cpu" in artifact else "cuda")

    def job(self, impl: str, folder: Path, prepare: bool) -> dict[str, Any]:
        return {
            "impl": impl,
            "folder": str(folder),
            "prepare": prepare,
            "artifact": self.artifact,
            "block": self.block.name,
            "sizes": dict(self.sizes),
            "device": self.device.type,
            "unproven": self.unproven,
            "backward": impl not in FORWARD_ONLY,
            "threads": self.threads,
            "turn": "" if prepare else self.turn,
        }

    def environment(self, impl: str, folder: Path, prepare: bool) -> dict[str, str]:
        """Ours has no compiler, no home and no cache; the others what they ask for, in a folder of their
        own."""
        if impl == OURS:
            return bare_environment(self.library)
        kept = {**os.environ, "ESPER_LIBRARY": str(self.library.home), "PYTHONFAULTHANDLER": "1"}
        caches = folder / ("unused" if impl == "torch.compile, cache file" and not prepare else "cache")
        places = {"TORCHINDUCTOR_CACHE_DIR": str(caches / "i"), "TRITON_CACHE_DIR": str(caches / "t")}
        return {**kept, **places, "TORCHINDUCTOR_FX_GRAPH_CACHE": "1", "HF_HUB_OFFLINE": "1"}

    def fresh(self, impl: str, folder: Path, prepare: bool = False) -> dict[str, Any]:
        """Its figures, or {"error": ...}."""
        job, environment = self.job(impl, folder, prepare), self.environment(impl, folder, prepare)
        try:
            done = subprocess.run(
                [sys.executable, "-m", "bench.fresh", json.dumps(job)],
                cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SECONDS,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return {"error": f"stopped after {SECONDS:.0f} s"}
        if done.returncode:
            return {"error": f"exit {done.returncode}: {_said(done.stderr.strip())}"}
        return json.loads(done.stdout.strip().splitlines()[-1])

    def prepare(self, impl: str, folder: Path) -> dict[str, Any]:
        return self.fresh(impl, folder, prepare=True) if impl in PREPARED else {}

    def export(self, folder: Path) -> str:
        """For the kernels package; why not, where it cannot be."""
        try:
            hub.export_kernel(self.library, self.library.record(self.artifact), folder / "repository")
        except Exception as error:
            return f"{type(error).__name__}: {str(error)[:300]}"
        return ""


def measure(side: Side, rounds: int = ROUNDS) -> dict[str, Any]:
    """{"rows": one per implementation, "figures": ...}; what is not there or fails stays as a row that says
    why."""
    ways = available(side.block, side.device)
    with tempfile.TemporaryDirectory(prefix="esper-side-") as place:
        folders = {impl: Path(place, str(at)) for at, impl in enumerate(ways)}
        for folder in folders.values():
            folder.mkdir()
        side.turn = str(Path(place, "turn"))
        kernels = ways["HF kernels"]
        ways["HF kernels"] = kernels or side.export(folders["HF kernels"])
        prepared = {impl: {"error": why} for impl, why in ways.items() if why}
        there = [impl for impl in ways if not ways[impl]]
        with ThreadPoolExecutor(_width(side.device)) as pool:
            tried = pool.map(lambda impl: side.prepare(impl, folders[impl]), there)
            prepared |= dict(zip(there, tried, strict=True))
            found: dict[str, list[dict[str, Any]]] = {impl: [] for impl in ways}
            turns = [impl for impl in ways if "error" not in prepared[impl]] * rounds
            for impl, one in zip(turns, pool.map(lambda i: side.fresh(i, folders[i]), turns), strict=True):
                found[impl].append(one)
        rows = [_row(side, impl, prepared[impl], found[impl], folders[impl]) for impl in ways]
    return {"rows": rows, "figures": figures(rows)}


def _said(errors: str) -> str:
    """Where it was when it crashed, innermost frame first; else the last words."""
    at = errors.find("Fatal Python error")
    return errors[at : at + 380] if at >= 0 else errors[-600:]


def _width(device: torch.device) -> int:
    """Processes at a time: a few of the cores beside a card, one where the processor is what is measured."""
    return max(1, min(5, (os.cpu_count() or 1) // 3)) if device.type == "cuda" else 1


def _row(
    side: Side, impl: str, prepared: Mapping[str, Any], found: list[dict[str, Any]], folder: Path
) -> dict[str, Any]:
    base = {
        "block": side.block.name,
        "size": side.block.size_label(side.sizes),
        "dtype": side.block.leaves[0].dtype,
        "impl": impl,
        "phase": "f" if impl in FORWARD_ONLY else "fb",
        "mode": "fresh process",
    }
    good = [f for f in found if "error" not in f]
    if not good:
        why = prepared.get("error") or next((f["error"] for f in found if "error" in f), "not run")
        return {**base, "why": str(why)[:20] + str(why)[20:][-400:]}
    names = ("import_torch_ms", "context_ms", "load_ms", "first_step_ms", "second_step_ms", "total_ms")
    medians = {name: statistics.median(f[name] for f in good) for name in names}
    counts = ("processes", "dynamo_frames", "inductor_misses", "triton_kernels")
    worst = {name: max(f[name] for f in good) for name in counts}
    ahead = prepared.get("total_ms")
    kept = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
    size = side.library.record(side.artifact).size if impl == OURS else kept
    return {
        **base,
        **medians,
        **worst,
        "ahead_s": ahead / 1e3 if ahead else None,
        "bytes": size,
        "failed": len(found) - len(good),
    }


def figures(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Load and first step together, of ours and of each peer, and how many times ours the peer takes."""
    by_name = {row["impl"]: row for row in rows}
    ours = by_name[OURS].get("total_ms")
    counts = ("processes", "dynamo_frames", "inductor_misses", "triton_kernels")
    compiled = sum(by_name[OURS][c] for c in counts) if ours else None
    found = {"side_esper_compilations": figure(compiled, "count", 0)}
    for row in rows:
        label = "".join(c if c.isalnum() else "_" for c in row["impl"].lower()).replace("__", "_")
        found[f"side_{label}_load_and_first_step_ms"] = figure(row.get("total_ms"), "ms")
        if row["impl"] != OURS and ours and row.get("total_ms"):
            found[f"side_{label}_over_esper"] = figure(row["total_ms"] / ours, "ratio")
    return found
