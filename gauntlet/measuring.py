"""One of the fresh processes that measure an artifact: heats up, samples, and says what it saw.

Nothing is judged here. What needs files or a compiler (torch.compile's code of the eager baseline) is made
before the process gives both up, and no candidate code is loaded before that.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from gauntlet import waves, workload
from gauntlet.clock import CANARY, CardClock, CpuClock
from gauntlet.exclusive import physical
from gauntlet.jobs import decode_job
from gauntlet.judge import confine, hardware, settle
from gauntlet.nvbench import cold_medians
from gauntlet.nvml import Card, Energy
from gauntlet.report import UNMEASURED
from gauntlet.sampling import Clock, Effort, sample
from gauntlet.subject import Subject
from gauntlet.workload import Leaves, Workload
from library.manifest import unpack
from runtime import confined, timing
from runtime.sandbox import ROOT
from runtime.timing import Work

OF_SHAPES = ("both", "forward", "eager both", "eager forward")
"""What is measured at sizes other than the largest."""
LIMIT_S, PATIENCE = 60.0, 200.0
"""What the supervisor waits for beyond the time that sampling should take: so long, and so many times eager's
time, since a batch has five rounds of everything however slow they are."""
ENERGY_CALLS = 50
Wait = Callable[[Callable[[], Any]], None]
"""Returns when this process may measure; where that is not at once, what it is given is done before."""
LATER = {"absent": "not with --quick"}


class Spent(dict[str, float]):
    """Seconds of this process by what it did, each since the one before."""

    def __init__(self) -> None:
        super().__init__()
        self._last = time.monotonic()

    def mark(self, what: str) -> None:
        now = time.monotonic()
        self[what], self._last = round(now - self._last, 3), now


def run(arguments: int, result: int, spill: int) -> None:
    """The worker. Its job: device, quick, seed, effort, compare (names of baselines), number (the
    first also reads what needs to be read once), turn (the pipe of `gauntlet.waves`),
    word (what its messages begin with)."""
    spent = Spent()
    with open(arguments, "rb") as file:
        job, _, container = decode_job(file.read())
    word = str(job.pop("word")).encode()

    def emit(event: Mapping[str, Any]) -> None:
        os.write(result, word + json.dumps(event).encode() + b"\n")

    subject = Subject(unpack(container), settle(job["device"]))
    effort = Effort(**job["effort"])
    dims = workload.sizes(subject, job["quick"] or effort.together)
    card = Card(physical(str(subject.device)).partition(" ")[2]) if subject.device.type == "cuda" else None
    compiled: dict[int, Callable[..., Any]] = {}
    if "torch.compile" in job["compare"]:
        compiled = _compiled(subject, dims[-1], job, emit, _baselines(subject.device, effort))
    slow = sum(_eager_seconds(subject, d) for d in dims)
    turn = os.open(job["turn"], os.O_RDONLY) if job["turn"] else -1
    emit(
        {"event": "context", **hardware(subject.device), "sandbox": _confined(subject.device, job["scratch"])}
    )
    limit = 4 * len(dims) * (effort.seconds + effort.heat_s) + PATIENCE * slow + LIMIT_S

    def wait(prepare: Callable[[], Any]) -> None:
        if turn < 0:
            return
        prepare()
        spent.mark("made ready")
        emit({"event": "landed"})
        emit({"event": waves.READY})
        waves.wait(turn)
        emit({"event": waves.STARTED})
        emit({"event": "launch", "limit": limit})

    emit({"event": "launch", "limit": limit})
    with timing.quiet():
        spent.mark("begun")
        emit({"event": "measured", **_measured(subject, dims, job, effort, card, compiled, wait, spent)})
    emit({"event": "landed"})
    emit({"event": "done"})


def _eager_seconds(subject: Subject, dims: Mapping[str, int]) -> float:
    """What the reference takes at these sizes. On a card measured there, and before this process gives files
    up: libraries compile what they have for these sizes now (attention's does, a second each way), and the
    driver keeps it on disk for the next process. No candidate code is loaded yet."""
    if subject.device.type == "cpu":
        return subject.eager_seconds(dims)
    try:
        return subject.eager_at(dims)
    except torch.OutOfMemoryError:
        return subject.eager_seconds(dims)


def _confined(device: torch.device, scratch: str) -> str:
    """As the judge's workers; on a card `scratch` can be written, where cuda-bench puts its samples."""
    if not scratch:
        return confine(device)
    readable = [*confined.SYSTEM, sys.prefix, sys.base_prefix, str(ROOT), *filter(None, sys.path)]
    if not confined.landlock(readable, [scratch], True):
        return "limits"
    return "full" if confined.seccomp() else "landlock"


def _measured(
    subject: Subject, sizes: Sequence[Mapping[str, int]], job: Mapping[str, Any], effort: Effort,
    card: Card | None, compiled: Mapping[int, Callable[..., Any]], wait: Wait, spent: Spent,
) -> dict[str, Any]:  # fmt: skip
    began = time.perf_counter_ns()
    subject.program.ready("inference", subject.dims_tuple(sizes[-1]))
    found: dict[str, Any] = {"load_us": (time.perf_counter_ns() - began) / 1000}
    clock = _clock(subject, card)
    brief = Effort(60, effort.width, effort.patience_s / 4, effort.seconds / 4, effort.heat_s / 4)
    shapes = dict[str, Any]()
    for dims in sizes[:-1]:
        at = workload.workload(subject, dims, job["seed"], {})
        few = {n: w for n, w in at.works.items() if n in OF_SHAPES}
        shapes[at.label] = sample(few, clock, brief, at.primary).to_json()
    at = workload.workload(subject, sizes[-1], job["seed"], compiled, _baselines(subject.device, effort))
    wait(lambda: clock.launches(at.works, range(workload.SETS)))
    spent.mark("waited")
    shapes[at.label] = sample(at.works, clock, effort, at.primary).to_json()
    spent.mark("sampled")
    found |= {
        "dims": at.dims,
        "label": at.label,
        "primary": at.primary,
        "shapes": shapes,
        "clock": clock.told,
    }
    if job["number"] == 0:
        found["once"] = _once(subject, at, job, card)
        spent.mark("read once")
    return {**found, "seconds": dict(spent)}


def _baselines(device: torch.device, effort: Effort) -> int:
    """Sets of inputs that eager stands ready on. On a card every launch finds the cache flushed, and to make
    graphs of thousands of launches takes seconds a set; a processor would have one set in its cache."""
    return 1 if effort.together and device.type == "cuda" else workload.SETS


def _clock(subject: Subject, card: Card | None) -> Clock:
    dtype = canary_dtype(subject)
    return CpuClock(dtype) if card is None else CardClock(subject.device, card, dtype)


def canary_dtype(subject: Subject) -> torch.dtype:
    """Of the first floating result, so that the canary's products are also the ceiling of the block's."""
    kinds = (getattr(torch, t.dtype.value) for _, _, t in subject.results if t.dtype.is_floating)
    return next(kinds, torch.float32)


def _once(subject: Subject, at: Workload, job: Mapping[str, Any], card: Card | None) -> dict[str, Any]:
    """What one process reads for all."""
    work = at.works[at.primary][0]
    found: dict[str, Any] = {
        "bytes_moved": at.bytes_moved,
        "flops": at.flops,
        "canary_flops": 2 * CANARY[subject.device.type] ** 3,
        "workspace_bytes": workload.workspace_bytes(subject, at.dims),
        "memory_mb_peak": round(peak_bytes(work, subject.device) / 1e6, 6),
        "elements": subject.elements(at.dims),
        **workload.drift(subject, at.leaves),
    }
    if card is not None:
        found |= _of_card(subject, at, card, job)
    return found


def _of_card(subject: Subject, at: Workload, card: Card, job: Mapping[str, Any]) -> dict[str, Any]:
    work = at.works[at.primary][0]
    hosts = timing.host_times({"call": work}, calls=20, rounds=5)
    run, _ = timing.captured(work)

    def calls() -> int:
        for _ in range(ENERGY_CALLS):
            run()
        torch.cuda.synchronize(subject.device)
        return ENERGY_CALLS

    ours = {n: w[0] for n, w in at.works.items() if n in ("forward", "backward", "both")}
    return {
        "host_us_per_call": round(hosts["call"].median, 3),
        "energy": asdict(Energy() if job["quick"] else card.energy(calls)),
        "card": card.context(),
        "nvbench": LATER if job["quick"] else cold_medians(ours, subject.device, job["scratch"]),
        "occupancy": occupancy(subject),
    }


def occupancy(subject: Subject) -> float | str:
    """Share of a multiprocessor's warps that can be resident, of the kernel where it is least, from its
    registers, warps and shared memory (CUDA programming guide, "Hardware multithreading")."""
    card = torch.cuda.get_device_properties(subject.device)
    warps = card.max_threads_per_multi_processor // 32
    shares = []
    for kernel in subject.launch.kernels:
        by_registers = warps
        if kernel.registers:
            rounded = -(-kernel.registers // 8) * 8 * 32  # registers are given to warps in eights per thread
            by_registers = card.regs_per_multiprocessor // rounded // kernel.warps * kernel.warps
        shared = card.shared_memory_per_multiprocessor // kernel.shared if kernel.shared else warps
        shares.append(min(warps, by_registers, shared * kernel.warps) / warps)
    return round(min(shares), 4) if shares else UNMEASURED


def _compiled(
    subject: Subject,
    dims: Mapping[str, int],
    job: Mapping[str, Any],
    emit: Callable[[Mapping[str, Any]], None],
    sets: int,
) -> dict[int, Callable[..., Any]]:
    """torch.compile's code of the eager baseline for so many sets of inputs, made and run once; {} where it
    fails."""
    function = torch.compile(workload.eager(subject), dynamic=False)
    try:
        for turn in range(sets):
            at = workload.recipe(dims, job["seed"] + turn)
            leaves: Leaves = workload.leaves_of(subject, at)
            for work in workload.baseline(subject, at, leaves, function).values():
                work()
    except Exception as error:  # whatever a compiler raises, the artifact is measured without it
        emit(
            {"event": "no baseline", "name": "torch.compile", "why": f"{type(error).__name__}: {error}"[:500]}
        )
        return {}
    return dict.fromkeys(range(sets), function)


def peak_bytes(work: Work, device: torch.device) -> int:
    """Most bytes of torch's allocator that one call holds beyond its inputs: results, saved tensors,
    workspace. What a library takes for itself behind the allocator's back is not in it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    seen: Any = torch.autograd.profiler.profile(profile_memory=True)
    with seen:
        work()
    return _highest(_allocations(seen.kineto_results.experimental_event_tree()))


def _allocations(events: Sequence[Any]) -> list[tuple[int, int]]:
    """(time, bytes) of every allocation and release below these events."""
    found = []
    for event in events:
        if event.tag.name == "Allocation":
            found.append((event.start_time_ns, event.extra_fields.alloc_size))
        found += _allocations(event.children)
    return found


def _highest(changes: Sequence[tuple[int, int]]) -> int:
    held = most = 0
    for _, size in sorted(changes, key=lambda change: change[0]):
        held += size
        most = max(most, held)
    return most
