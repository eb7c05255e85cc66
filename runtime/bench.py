"""What one artifact costs here: load, call, forward and backward, beside its eager twin and torch.compile."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from library.launch import TensorSpec, evaluate
from library.store import Library
from runtime import api, loader, timing
from runtime.binding import Block
from runtime.state import given
from runtime.timing import Calls, Timing, Work

LOAD_ROUNDS = 20
WIDE = 1.5
"""Upper over lower bound of a ratio from which on its size is not known."""
WORKS = ("f", "fb")


def measure(
    name: str,
    *,
    library: Library | Path | str | None = None,
    allow_unvalidated: bool = False,
    compiled: bool = False,
    rounds: int = 20,
) -> dict[str, Any]:
    """Microseconds as one document (schema esper-runtime-bench/1). `load.uncached`: id to launch-ready
    program, library open; rows: `f`, a call without gradients, `fb`, forward and backward, each by `host`
    (until it is enqueued), `wall` (until it is done, as a loop sees it) and `dev` (on the device alone), the
    sides in turns. `comparison`: another side's wall time over ours, round by round, with the 95 % interval
    of its median, and what that says of ours. A figure that was not measured is the text "unmeasured"."""
    options: dict[str, Any] = {"library": library, "allow_unvalidated": allow_unvalidated}
    first, block = _first(name, options)
    dims = tuned(block)
    inputs = make_inputs(block, dims)
    twin = api.twin(block.artifact_id, **options)
    twin.load_state_dict(block.state_dict())
    sides: dict[str, dict[str, Work]] = {"esper": _works(block, inputs), "eager": _works(twin, inputs)}
    notes: list[str] = []
    if compiled:
        try:
            sides["compile"] = _tried(_works(torch.compile(twin), inputs))
        except Exception as error:  # whatever a compiler raises, the others are measured without it
            notes.append(f"torch.compile does not work here: {type(error).__name__}: {error}"[:500])
    rows = _rows(sides, block.program.device, rounds)
    comparison = [_compared(rows[0], row) for row in rows[1:]]
    return {
        "schema": "esper-runtime-bench/1",
        "artifact": block.artifact_id,
        "device": str(block.program.device),
        "dims": dict(dims),
        "native": block.program.uses_native,
        "load": {"first_us": first, "uncached": _loads(block, options), "cached": _cached(name, options)},
        "rows": [row.to_json() for row in rows],
        "comparison": comparison,
        "notes": [*notes, *_doubts(comparison)],
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


def _works(fn: Callable[..., Any], inputs: list[Tensor]) -> dict[str, Work]:
    plain = [x.detach() for x in inputs]

    def call() -> None:
        with torch.no_grad():
            fn(*plain)

    def step() -> None:
        found = fn(*inputs)
        outputs = [o for o in (found if isinstance(found, tuple) else (found,)) if o.requires_grad]
        if outputs:
            torch.autograd.backward(outputs, [torch.ones_like(o) for o in outputs])

    return {"f": call, "fb": step}


def _tried(works: dict[str, Work]) -> dict[str, Work]:
    for work in works.values():
        work()
    return works


@dataclass(frozen=True)
class Row:
    """Times of one side by work."""

    impl: str
    calls: Mapping[str, Calls]
    spans: Mapping[str, Timing] | None

    def to_json(self) -> dict[str, Any]:
        return {
            "impl": self.impl,
            "wall": {k: c.wall.to_json() for k, c in self.calls.items()},
            "host": {k: c.host.to_json() for k, c in self.calls.items()},
            "dev": {k: t.to_json() for k, t in self.spans.items()} if self.spans else "unmeasured",
        }


def _rows(sides: Mapping[str, Mapping[str, Work]], device: torch.device, rounds: int) -> list[Row]:
    """All sides in the same rounds: what slows this machine for a while slows them alike."""
    work = {f"{side} {k}": fn for side, works in sides.items() for k, fn in works.items()}
    calls = timing.call_times(work, device=device, rounds=rounds)
    spans = timing.device_times(work, device=device, rounds=rounds) if device.type == "cuda" else {}
    return [
        Row(
            side,
            {k: calls[f"{side} {k}"] for k in works},
            {k: spans[f"{side} {k}"] for k in works} if spans else None,
        )
        for side, works in sides.items()
    ]


def _compared(ours: Row, theirs: Row) -> dict[str, Any]:
    found: dict[str, Any] = {"impl": theirs.impl}
    for k in WORKS:
        ratio = timing.ratios(theirs.calls[k].wall, ours.calls[k].wall)
        found[k] = {"ratio": ratio.median, "low": ratio.low, "high": ratio.high, "says": _says(ratio)}
    return found


def _says(ratio: Timing) -> str:
    """What is said of ours: "faster" or "slower" where the interval leaves 1 out, else "level", or
    "worthless" where it is wide."""
    if ratio.low > 1 or ratio.high < 1:
        return "faster" if ratio.low > 1 else "slower"
    return "worthless" if _wide(ratio.low, ratio.high) else "level"


def _wide(low: float, high: float) -> bool:
    return high > WIDE * low


def _doubts(comparison: list[dict[str, Any]]) -> list[str]:
    found = [
        f"{k} beside {row['impl']}: {row[k]['low']:.2f}..{row[k]['high']:.2f}"
        for row in comparison
        for k in WORKS
        if _wide(row[k]["low"], row[k]["high"])
    ]
    if not found:
        return []
    return [
        f"these ratios are uncertain ({', '.join(found)}): measure again when this machine is quiet, or with "
        "more --rounds"
    ]
