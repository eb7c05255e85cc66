"""What one artifact costs here: load, call, forward and backward, beside its eager twin and torch.compile."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from library.launch import TensorSpec, evaluate
from library.store import Library
from runtime import api, loader, timing
from runtime.binding import Block
from runtime.state import given
from runtime.timing import Timing

LOAD_ROUNDS = 20


def measure(
    name: str,
    *,
    library: Library | Path | str | None = None,
    allow_unvalidated: bool = False,
    compiled: bool = False,
    rounds: int = 20,
) -> dict[str, Any]:
    """Microseconds as one document (schema esper-runtime-bench/1). `load_uncached`: id to launch-ready
    program, library open; `call`: one call without gradients, host side; `f`, `fb`: forward, forward and
    backward as a loop sees them; `dev`: on the device alone. A figure that was not measured is the text
    "unmeasured"."""
    options: dict[str, Any] = {"library": library, "allow_unvalidated": allow_unvalidated}
    first, block = _first(name, options)
    dims = tuned(block)
    inputs = make_inputs(block, dims)
    subjects: dict[str, Callable[..., Any]] = {"esper": block}
    twin = api.twin(block.artifact_id, **options)
    twin.load_state_dict({k.replace(".", "_"): v for k, v in block.state_dict().items()}, strict=False)
    subjects["eager"] = twin
    if compiled:
        subjects["compile"] = torch.compile(twin)
    return {
        "schema": "esper-runtime-bench/1",
        "artifact": block.artifact_id,
        "device": str(block.program.device),
        "dims": dict(dims),
        "native": block.program.uses_native,
        "load": {"first_us": first, "uncached": _loads(block, options), "cached": _cached(name, options)},
        "rows": [_row(n, fn, inputs, block.program.device, rounds) for n, fn in subjects.items()],
        "report": block.report(),
    }


def _first(name: str, options: Mapping[str, Any]) -> tuple[float, Block]:
    start = time.perf_counter_ns()
    block = api.load(name, **options)
    return (time.perf_counter_ns() - start) / 1000, block


def _loads(block: Block, options: Mapping[str, Any]) -> dict[str, Any]:
    """Verified, mapped and bound again, past the cache."""
    device, samples, held = block.program.device, [], []
    dims = tuple(v for _, v in tuned(block).items())
    for _ in range(LOAD_ROUNDS):
        start = time.perf_counter_ns()
        entry = loader.load_fresh(block.artifact_id, device, **options)
        entry.program.ready("inference", dims)
        samples.append((time.perf_counter_ns() - start) / 1000)
        held.append(entry)
    return Timing(tuple(samples)).to_json()


def _cached(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    work = {"cached": lambda: loader.load_entry(name, **options)}
    return timing.host_times(work, rounds=5)["cached"].to_json()


def tuned(block: Block) -> dict[str, int]:
    """The first tuned size of every dim, else the smallest."""
    return {d.name: d.tune[0] if d.tune else d.min for d in block.program.interface.dims}


def make_inputs(block: Block, dims: Mapping[str, int]) -> list[Tensor]:
    """Normal inputs of the declared types; those that the block differentiates ask for a gradient."""
    program = block.program
    wanted = program.interface.differentiable
    return [_input(s, dims, program.device, s.name in wanted) for s in given(program.interface)]


def _input(spec: TensorSpec, dims: Mapping[str, int], device: torch.device, wanted: bool) -> Tensor:
    shape, dtype = [evaluate(s, dims) for s in spec.shape], getattr(torch, spec.dtype)
    if not dtype.is_floating_point:
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.randn(shape, device=device).to(dtype).requires_grad_(wanted)


def _row(
    name: str, fn: Callable[..., Any], inputs: list[Tensor], device: torch.device, rounds: int
) -> dict[str, Any]:
    plain = [x.detach() for x in inputs]

    def call() -> None:
        with torch.no_grad():
            fn(*plain)

    def step() -> None:
        found = fn(*inputs)
        outputs = found if isinstance(found, tuple) else (found,)
        torch.autograd.backward(
            [o for o in outputs if o.requires_grad], [torch.ones_like(o) for o in outputs]
        )

    work = {"f": call, "fb": step}
    wall = timing.wall_times(work, rounds=rounds, device=device)
    host = timing.host_times(work, calls=20, rounds=5)
    row: dict[str, Any] = {"impl": name, "dev": "unmeasured"}
    row |= {
        "wall": {k: t.to_json() for k, t in wall.items()},
        "host": {k: t.to_json() for k, t in host.items()},
    }
    if device.type == "cuda":
        spans = timing.device_times(work, device=device, rounds=rounds)
        row["dev"] = {k: t.to_json() for k, t in spans.items()}
    return row
