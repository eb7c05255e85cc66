"""The examples compiled once for a test session, and a worker that says which bits an artifact computes."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import runtime
from forge.service import compile_file
from gauntlet.runner import prove
from gauntlet.sampling import BRIEF
from library.store import Library
from tests.source import ROOT


@dataclass
class Shelf:
    """A library with keys of its own; artifacts are compiled when first asked for."""

    library: Library
    keys: Path
    ids: dict[tuple[str, str], str] = field(default_factory=dict)

    def artifact(self, example: str, target: str = "cpu") -> str:
        """Id of an example, compiled with the fast pipeline and not proven."""
        if (example, target) not in self.ids:
            path = ROOT / "examples" / f"{example}.json"
            (made,) = compile_file(path, targets=(target,), library=self.library)
            self.ids[example, target] = made.artifact_id
        return self.ids[example, target]

    def proven(self, example: str, target: str = "cpu") -> str:
        """The same after the gauntlet."""
        artifact_id = self.artifact(example, target)
        verdict = prove(artifact_id, library=self.library, quick=True, effort=BRIEF)
        assert verdict.passed, verdict.reason
        return artifact_id

    def block(self, example: str, target: str = "cpu", **options: Any) -> runtime.Block:
        """An example's artifact, loaded from here before any verdict."""
        return block_of(self.artifact(example, target), library=self.library, **options)

    def environment(self, **more: str) -> dict[str, str]:
        """For a child process that is to see this library and these keys."""
        return {**os.environ, "ESPER_LIBRARY": str(self.library.home), "ESPER_KEYS": str(self.keys), **more}

    def child(self, script: str, **more: str) -> subprocess.Popen[str]:
        """A fresh Python that runs `script` in the repository; it prints one JSON document."""
        return subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", script],
            cwd=ROOT, env=self.environment(**more), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip


def answer(process: subprocess.Popen[str]) -> Any:
    """What a child printed; its error output is the failure."""
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    return json.loads(out)


def block_of(name: str, **options: Any) -> runtime.Block:
    """Loaded before any verdict: these tests are about bits, not about trust."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", runtime.UnvalidatedWarning)
        return runtime.load(name, allow_unvalidated=True, **options)


def drawn(block: runtime.Block, example: str, rows: int, seed: int = 0) -> list[torch.Tensor]:
    """Normal parameters and inputs from the seed, on the block's device; returns the inputs, which want
    gradients. Every symbolic size is `rows`."""
    generator, device = torch.Generator().manual_seed(seed), block.report()["device"]
    with torch.no_grad():
        for _, parameter in sorted(block.named_parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    blueprint = json.loads((ROOT / "examples" / f"{example}.json").read_text(encoding="utf-8"))
    found = []
    for spec in blueprint["inputs"].values():
        shape = [size if isinstance(size, int) else rows for size in spec["shape"]]
        value = torch.randn(shape, generator=generator)
        found.append(value.to(device=device, dtype=getattr(torch, spec["dtype"])).requires_grad_())
    return found


def bits(block: runtime.Block, example: str, rows: int, seed: int = 0) -> str:
    """sha256 over the bytes of the output and of every gradient of one forward and backward."""
    inputs = drawn(block, example, rows, seed)
    block.zero_grad(set_to_none=True)
    out = block(*inputs)
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed + 1))
    out.backward(cotangent.to(device=out.device, dtype=out.dtype))
    tensors = [out, *(t.grad for t in inputs), *(p.grad for _, p in sorted(block.named_parameters()))]
    digest = hashlib.sha256()
    for tensor in tensors:
        assert tensor is not None
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
