"""What a worker may use, and who is blamed where that is too little."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest
import torch

from gauntlet import runner
from gauntlet.isolate import MEMORY, Ending, ForkServer, Limits
from gauntlet.kept import Kept
from library.manifest import pack, unpack
from tests.faults import handmade, toys


def _with_weights(shape: list[Any]) -> bytes:
    """affine with another shape of its first input in the manifest."""
    made = unpack(handmade.build(toys.affine()))
    manifest = json.loads(json.dumps(made.manifest))
    manifest["launch"]["interface"]["inputs"][0]["shape"] = shape
    blobs = [(b["name"], b["kind"], bytes(made.blobs[b["name"]])) for b in manifest["blobs"]]
    return pack({k: v for k, v in manifest.items() if k not in ("artifact_id", "blobs")}, blobs)


def test_large_weights_are_given_room() -> None:
    """The judge holds them in float64, in several forms; what the candidate may take stays as it is."""
    small, enough = runner.limits_of(_with_weights(["rows", 64]), "cpu")
    assert enough and Limits().memory_bytes <= small.memory_bytes < Limits().memory_bytes + (1 << 20)
    large, enough = runner.limits_of(_with_weights([1024, 1024]), "cpu")
    assert large.memory_bytes >= Limits().memory_bytes + (runner.OWN_COPIES << 23) or not enough
    assert runner.limits_of(b"no artifact", "cpu")[0] == Limits()
    assert not runner.limits_of(_with_weights([1024, 1024]), "cuda:0")[0].address_space


@pytest.mark.parametrize(("shape", "passed"), [([4, 4], False), ([1 << 20, 1 << 20], None)])
def test_a_machine_with_too_little_memory_blames_nobody(shape: list[int], passed: bool | None) -> None:
    """8 TiB of weights are in nobody's memory: no verdict. A few bytes are: the artifact took the rest."""

    class Full:
        def run(self, *args: Any) -> Ending:
            return Ending(MEMORY, "it took 9000 MiB", ({"event": "stage", "name": "numerics"},), "", 1.0)

    found = runner.judge(_with_weights(shape), "cpu", cast(ForkServer, Full()))
    assert found.passed is passed and "it took 9000 MiB" in found.reason
    assert ("this machine has too little" in found.reason) == (passed is None)


def test_what_is_kept_is_bounded() -> None:
    """By number and by bytes; the last one stays however large it is."""
    kept: Kept[torch.Tensor] = Kept(count=3, nbytes=1000)
    tensors = [torch.zeros(100) for _ in range(5)]  # 400 bytes each
    for at, tensor in enumerate(tensors):
        kept.put(at, tensor, tensor.nbytes)
    assert [kept.get(at) is not None for at in range(5)] == [False, False, False, True, True]
    assert kept.holds(tensors[4]) and not kept.holds(tensors[0])
    kept.put("large", torch.zeros(5000), 20_000)
    assert kept.get(4) is None and kept.get("large") is not None
    kept.put("large", torch.zeros(100), 400)
    kept.put("small", torch.zeros(100), 400)
    assert kept.get("large") is not None and kept.get("small") is not None
    many: Kept[torch.Tensor] = Kept(count=3, nbytes=1 << 30)
    for at, tensor in enumerate(tensors):
        many.put(at, tensor, tensor.nbytes)
    assert sum(many.get(at) is not None for at in range(5)) == 3
