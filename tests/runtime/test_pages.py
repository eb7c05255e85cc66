"""Large results on a processor: huge pages are asked for, by every way that allocates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

import runtime
from forge.service import compile_file
from library.store import Library
from runtime import node, pages

THERE = Path("/sys/kernel/mm/transparent_hugepage/enabled").exists()
BLUEPRINT = {
    "format": "esper-blueprint/1",
    "name": "large",
    "dims": {"rows": {"min": 1, "max": 4096, "tune": [16]}},
    "inputs": {"x": {"dtype": "float32", "shape": ["rows", 1024]}},
    "params": {"w": {"dtype": "float32", "shape": [1024], "init": {"kind": "ones"}}},
    "nodes": [
        {"id": "h", "op": "rms_norm", "inputs": ["x", "w"], "attrs": {"eps": 1e-6}},
        {"id": "y", "op": "gelu", "inputs": ["h"]},
    ],
    "outputs": ["y"],
    "differentiable": ["x", "w"],
}


def asked(t: Tensor) -> bool:
    """Whether the system was asked for huge pages in the middle of where a tensor lies."""
    middle, inside = t.data_ptr() + t.nbytes // 2, False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        first, _, rest = line.partition(" ")
        if "-" in first and ":" not in first:
            low, high = (int(end, 16) for end in first.split("-"))
            inside = low <= middle < high
        elif inside and first == "VmFlags:":
            return "hg" in rest.split()
    return False


@pytest.mark.skipif(not THERE, reason="this kernel has no huge pages")
@pytest.mark.parametrize("native", [True, False])
def test_large_results_and_gradients(
    native: bool, esper_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not native:
        monkeypatch.setattr(node, "available", lambda: False)
        monkeypatch.setattr(node, "execute", lambda *given: False)
    path = tmp_path / "large.json"
    path.write_text(json.dumps(BLUEPRINT))
    with Library.open() as library:
        (made,) = compile_file(path, targets=("cpu",), library=library)
        library.record_verdict(made.artifact_id, {"stages": []}, passed=True)
        block = runtime.load(made.artifact_id, library=library)
    x = torch.randn(2048, 1024, requires_grad=True)
    y = block(x)
    y.backward(torch.ones_like(y))
    with torch.no_grad():
        assert asked(block(x))
    assert asked(y) and x.grad is not None and asked(x.grad)
    torch.testing.assert_close(
        y, torch.nn.functional.gelu(torch.nn.functional.rms_norm(x, (1024,), eps=1e-6))
    )
    assert block(torch.randn(0 + 1, 1024)).shape == (1, 1024)


def test_what_is_large() -> None:
    megabyte = ((1 << 18,), (1,), torch.float32)
    wide = ((1024, 1024), (2048, 1), torch.float32)  # rows with gaps
    kinds = [megabyte, wide, ((0, 4096), (4096, 1), torch.float32), ((1 << 22,), (1,), torch.uint8)]
    assert pages.large(kinds, -1) == (-3, -1)
    assert pages.large(kinds, 0) == (), "memory of a card"
