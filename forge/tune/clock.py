"""Runs in a sandboxed worker: the steps of a group with several tiles, compared and timed on the device.

Every candidate gets the same values in the buffers that all of them share; what it leaves there is compared
with what the first one (the prior) leaves. Buffers of one candidate alone are its workspace.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping
from typing import Any

import torch

from esper_ir.diagnostics import EsperError
from library import launch
from runtime import timing
from runtime.code import load_code
from runtime.energy import Meter, joules
from runtime.executor import Program, Ready

SLACK = 32.0
"""Of the result type's rounding, relative to the largest element: two orders of one sum differ by less."""
REPEATS = 5


def run(request: Mapping[str, Any]) -> dict[str, Any]:
    """`jobs`: each {"name", "dims", "values", "candidates": [{"name", "plan", "kernels", "code"}]};
    `rounds` of the measurement. Answers {job: {candidate: {"us", "low", "high"} or {"wrong": why}}}, with
    `energy` also {"uj", "uj_low", "uj_high"} (microjoules) where the device has a counter, else "absent".
    """
    device = torch.device(request["device"])
    meter = Meter(device) if request.get("energy") else None
    done = {job["name"]: _job(job, device, int(request["rounds"]), meter) for job in request["jobs"]}
    return {**done, **({"absent": meter.absent} if meter is not None and meter.absent else {})}


def _job(
    job: Mapping[str, Any], device: torch.device, rounds: int, meter: Meter | None = None
) -> dict[str, Any]:
    out: dict[str, Any] = {}
    shared: dict[str, torch.Tensor] = {}
    work: dict[str, Any] = {}
    want: dict[str, torch.Tensor] = {}
    for candidate in job["candidates"]:
        name = candidate["name"]
        try:
            ready, memory = _bound(job, candidate, shared, device)
        except EsperError as error:
            out[name] = {"wrong": str(error)[:200]}
            continue
        found = _results(ready, memory, shared)
        why = _why_wrong(found, want) if want else ""
        unstable = any(not _same(found, _results(ready, memory, shared)) for _ in range(REPEATS))
        if why or unstable:
            out[name] = {"wrong": why or "other bits from one run to the next"}
            continue
        want = want or found
        work[name] = lambda r=ready, m=memory: r(list(m))
    times = _times(work, device, rounds) if work else {}
    out |= {n: {"us": t.median, "low": t.low, "high": t.high} for n, t in times.items()}
    for name in work:
        if meter is None or meter.absent:
            break
        spent = joules(work[name], meter, device)
        out[name] |= {"uj": spent.median, "uj_low": min(spent.samples), "uj_high": max(spent.samples)}
    return out


def _times(work: Mapping[str, Any], device: torch.device, rounds: int) -> dict[str, timing.Timing]:
    if device.type == "cuda":
        return timing.device_times(work, device=device, rounds=rounds)
    return timing.cpu_times(work, rounds=rounds)


def _bound(
    job: Mapping[str, Any],
    candidate: Mapping[str, Any],
    shared: dict[str, torch.Tensor],
    device: torch.device,
) -> tuple[Ready, list[torch.Tensor]]:
    """The candidate's steps, launch-ready, and memory for every buffer of theirs."""
    named = [
        {"name": n, "min": 0, "max": 1 << 62, "multiple_of": 1, "tune": [], "tensor": 0, "axis": 0}
        for n in sorted(job["dims"])
    ]
    interface = {"inputs": [], "outputs": [], "dims": named, "differentiable": []}
    data = {"interface": interface, "plans": [candidate["plan"]], "kernels": candidate["kernels"]}
    manifest = launch.from_json(data)
    code = load_code(manifest, {"module": base64.b64decode(candidate["code"])}, device, name=job["name"])
    code.prime()
    program = Program(job["name"], manifest, code)
    (plan,) = manifest.plans
    dims = tuple(int(job["dims"][n]) for n in program.dim_names)
    ready = program.prepare(plan, dims, given=range(len(plan.buffers)))
    values = dict(zip(program.dim_names, dims, strict=True))
    memory = [_memory(b, values, shared, job, device) for b in plan.buffers]
    return ready, memory


def _memory(
    buffer: launch.Buffer, dims: Mapping[str, int], shared: dict[str, torch.Tensor], job: Mapping[str, Any],
    device: torch.device,
) -> torch.Tensor:  # fmt: skip
    """Values between -1 and 1, positions 0: the same for a name in every candidate of a job."""
    shape = tuple(int(launch.evaluate(s, dims)) for s in buffer.shape)
    kind = getattr(torch, buffer.dtype)
    known = shared.get(buffer.name)
    if known is not None and known.shape == shape and known.dtype is kind:
        return known
    made = torch.zeros(shape, dtype=kind, device=device)
    if kind.is_floating_point:
        generator = torch.Generator(device=device).manual_seed(zlib.crc32(buffer.name.encode()))
        made.uniform_(-1.0, 1.0, generator=generator)
    if buffer.name in job["values"]:
        shared[buffer.name] = made
    return made


def _results(
    ready: Ready, memory: list[torch.Tensor], shared: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """What one run leaves in the buffers that all candidates share; they are as before afterwards."""
    before = {n: t.clone() for n, t in shared.items()}
    ready(list(memory))
    changed = {n: t.clone() for n, t in shared.items() if not _equal(t, before[n])}
    for name, value in before.items():
        shared[name].copy_(value)
    return changed


def _same(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(_equal(a[n], b[n]) for n in a)


_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit, undefined numbers too."""
    if a.is_floating_point():
        a, b = (t.view(_BITS[t.dtype.itemsize]) for t in (a, b))
    return torch.equal(a, b)


def _why_wrong(found: Mapping[str, torch.Tensor], want: Mapping[str, torch.Tensor]) -> str:
    if found.keys() != want.keys():
        return f"writes {sorted(found)}, not {sorted(want)}"
    for name, value in want.items():
        if not value.is_floating_point():
            if not torch.equal(found[name], value):
                return f"{name} differs"
            continue
        a, b = found[name].double(), value.double()
        finite = torch.isfinite(b)
        if not torch.equal(torch.isfinite(a), finite):
            return f"{name} is not finite where the prior's is"
        scale = float(b[finite].abs().max()) if bool(finite.any()) else 0.0
        off = float((a - b)[finite].abs().max()) if bool(finite.any()) else 0.0
        if off > SLACK * torch.finfo(value.dtype).eps * max(scale, 1e-30):
            return f"{name} is off by {off:.3g} at a scale of {scale:.3g}"
    return ""
