"""Digests of results and gradients for inputs that are the same everywhere: two runs of one file, on other
cards, Pythons or versions of torch, must give the same ones.
"""

from __future__ import annotations

from typing import Any

import torch

from bench import peers
from bench.blocks import Block, Sizes
from bench.correct import digest, results
from bench.results import device_here, figure
from library.store import Library
from runtime.binding import Block as Native

RUNS = 3
DETERMINISTIC = "deterministic"  # what other artifacts declare may change from run to run
PATHS = {"function": "auto", "operator": "op"}


def _inputs(block: Block, sizes: Sizes) -> tuple[list[torch.Tensor], torch.Tensor]:
    device = device_here()
    args = block.inputs(sizes, device)
    shape = tuple(sizes[n] if isinstance(n, str) else n for n in block.result)
    flow = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    return args, flow.to(device, getattr(torch, block.leaves[0].dtype))


def rows(library: Library, block: Block, sizes: Sizes, unproven: bool = False) -> list[dict[str, Any]]:
    """One row per way of calling; `repeatable`: several calls gave the same bits."""
    args, flow = _inputs(block, sizes)
    found = []
    for path, dispatch in PATHS.items():
        native = peers.esper(
            peers.blueprint_id(block.blueprint), library, dispatch=dispatch, allow_unvalidated=unproven
        )
        seen = [_once(native, args, flow) for _ in range(RUNS)]
        with torch.no_grad():
            seen[0]["y, no gradient"] = digest(native(*args))
        same = all(one[k] == seen[0][k] for one in seen[1:] for k in one)
        base = {
            "block": block.name,
            "size": block.size_label(sizes),
            "dtype": block.leaves[0].dtype,
            "phase": "fb",
        }
        report = native.report()
        impl = f"esper-{report['pipeline']}"
        found.append(
            {
                **base,
                "impl": impl,
                "path": path,
                "artifact": native.artifact_id,
                "determinism": report["determinism"],
                "repeatable": same,
                "digests": seen[0],
            }
        )
    return found


def _once(native: Native, args: list[torch.Tensor], flow: torch.Tensor) -> dict[str, str]:
    specs = native.program.interface.inputs
    labels = ["y", *(f"d({s.name})" for s, t in zip(specs, args, strict=True) if t.requires_grad)]
    return dict(zip(labels, map(digest, results(native, args, flow)), strict=True))


def figures(found: list[dict[str, Any]]) -> dict[str, Any]:
    by_key: dict[tuple[str, str], set[str]] = {}
    for row in found:
        key = (row["block"], row["size"])
        if row["determinism"] == DETERMINISTIC:
            by_key.setdefault(key, set()).add(str(sorted(row["digests"].items())))
    differ = [row for row in found if not row["repeatable"]]
    broken = [f"{r['block']} {r['size']}" for r in differ if r["determinism"] == DETERMINISTIC]
    paths = [" ".join(key) for key, seen in by_key.items() if len(seen) > 1]
    return {
        "bits_not_repeatable": figure(len(broken), "rows", 0, over=len(found), which=broken),
        "bits_vary_as_declared": figure(len(differ) - len(broken), "rows"),
        "bits_differ_between_paths": figure(len(paths), "sizes", 0, which=paths),
    }
