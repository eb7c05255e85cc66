"""Puts the samples of several fresh processes together into an evaluation profile. The supervisor's side: no
torch, no CUDA context.

A process sees one state of memory and machine; how far the medians of processes lie apart says more about a
number than any spread within one. So the interval of the median that a profile states is the span of the
process medians (five of them enclose the median of all processes with 94 %), and the p99 comes from the
samples of all, from 300 on.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gauntlet import statistics, waves
from gauntlet.isolate import CRASH, FINISHED, ILLEGAL, Ending, Errand, Event, ForkServer, Limits
from gauntlet.jobs import encode_job
from gauntlet.report import UNMEASURED, UNRESOLVED, StageReport
from gauntlet.sampling import FULL, LEAST_PROCESSES, QUICK, STEADY, Effort
from runtime import scratch

NAME = "measurement"
TARGET = "gauntlet.measuring:run"
LEAST_P99 = 300
UNRESOLVED_US = 5.0
"""Shorter calls say more about the clock and the launch than about the kernels."""
PHASES = ("forward", "backward", "both")
Tell = Callable[[Event], None]


@dataclass(frozen=True)
class Job:
    """`compare`: baselines beside eager; `effort`: None for what `quick` asks for."""

    device: str
    quick: bool = False
    seed: int = 0
    compare: tuple[str, ...] = ("eager",)
    effort: Effort | None = None

    @property
    def spends(self) -> Effort:
        return self.effort or (QUICK if self.quick else FULL)


def measure(container: bytes, job: Job, server: ForkServer, tell: Tell | None = None) -> StageReport:
    """Run the processes; the stage with the profile. Passed even where a number could not be had: nothing is
    refused for being slow. Skipped when no process could measure; failed when candidate code killed two."""
    began, seen = time.monotonic(), _Seen()
    left, together, last = list(range(job.spends.processes)), job.spends.together, 0.0
    with ExitStack() as held:
        try:
            place = held.enter_context(scratch.folder("esper-measure-"))
        except OSError as error:
            return StageReport(NAME, "skipped", 0.0, f"no folder to measure in: {error}")
        # None is begun for which there is no time, if it takes as long as the one before.
        while left and (
            len(seen.found) < LEAST_PROCESSES or time.monotonic() - began + last <= job.spends.enough_s
        ):
            begun = time.monotonic()
            wave, left = _wave(left, len(seen.found), together)
            endings = _endings(container, job, server, wave, place, tell or _nobody)
            again = [number for number, ending in endings if not seen.take(number, ending, len(wave) > 1)]
            left, together, last = [*again, *left], together and not again, time.monotonic() - begun
    seconds = round(time.monotonic() - began, 3)
    if len(seen.killed) > 1:
        return StageReport(NAME, "failed", seconds, "; ".join(seen.killed))
    if not seen.found:
        return StageReport(NAME, "skipped", seconds, f"no process could measure: {seen.failed[0]}")
    metrics = {**metrics_of(seen.found, job), "failed_processes": seen.failed, "context": seen.context}
    return StageReport(NAME, "passed", seconds, metrics=metrics)


@dataclass
class _Seen:
    """What the processes came to."""

    found: list[Mapping[str, Any]] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    killed: list[str] = field(default_factory=list)
    context: dict[str, Any] = field(default_factory=dict)

    def take(self, number: int, ending: Ending, together: bool) -> bool:
        """False: to be run again, alone: beside others there may not have been room for it, which some
        libraries say by a signal."""
        measured = ending.last("measured")
        if ending.kind == FINISHED and measured:
            self.found.append(measured)
            self.context |= _context(ending)
            return True
        if together:
            return False
        self.failed.append(f"process {number + 1}: {_why(ending)}")
        self.killed += self.failed[-1:] if _of_the_candidate(ending) else []
        return True


def _nobody(event: Event) -> None:
    """Who listens when nobody does."""


def _wave(left: list[int], measured: int, together: bool) -> tuple[list[int], list[int]]:
    """(those to run now, the others): one, or as many as are needed, and then all."""
    most = max(LEAST_PROCESSES - measured, 0) or len(left)
    return (left[:most], left[most:]) if together else (left[:1], left[1:])


def _endings(
    container: bytes, job: Job, server: ForkServer, wave: Sequence[int], scratch: str, tell: Tell
) -> list[tuple[int, Ending]]:
    """How each of a wave ended; its part is told when it measures."""
    parts = {"event": "stage", "name": NAME, "parts": job.spends.processes}
    tell({**parts, "part": wave[0] + 1})
    if len(wave) == 1:
        return [(wave[0], server.run_all([_errand(container, job, wave[0], scratch, "", tell)])[0])]

    def errand(number: int, pipe: str) -> Errand:
        def told(event: Event) -> None:
            tell(event)
            if event.get("event") == waves.STARTED:
                tell({**parts, "part": number + 1})

        return _errand(container, job, number, scratch, pipe, told)

    return list(zip(wave, waves.side_by_side(errand, wave, Path(scratch), server), strict=True))


def _errand(container: bytes, job: Job, number: int, scratch: str, turn: str, tell: Tell) -> Errand:
    word = secrets.token_hex(16)
    request = {
        "device": job.device, "quick": job.quick, "seed": job.seed, "compare": list(job.compare),
        "effort": asdict(job.spends), "number": number, "turn": turn, "word": word,
        "scratch": scratch if job.device != "cpu" else "",
    }  # fmt: skip
    limits = Limits() if job.device == "cpu" else Limits(output_bytes=4 << 30, address_space=False)
    return Errand(TARGET, encode_job(request, container), limits, tell, word)


def _of_the_candidate(ending: Ending) -> bool:
    """Ended by a signal while candidate code ran. An exit is the judge's own doing, and so is taking too
    long: no launch is endless that the stages before have seen end."""
    return ending.kind == ILLEGAL or (ending.kind == CRASH and "SIG" in ending.detail)


def _why(ending: Ending) -> str:
    """How it ended, and the last line that it printed."""
    last = (ending.output.strip().splitlines() or [""])[-1]
    return " ".join(part for part in (ending.kind, ending.detail, last) if part)


def _context(ending: Ending) -> dict[str, Any]:
    missing = ending.last("no baseline")
    told = {"torch.compile": str(missing["why"])} if missing else {}
    return {**told, "sandbox": (ending.last("context") or {}).get("sandbox", UNMEASURED)}


def metrics_of(processes: Sequence[Mapping[str, Any]], job: Job) -> dict[str, Any]:
    """What the processes sampled, as numbers: dims, works, conditions, profile, and what one of them read."""
    first = processes[0]
    label, primary = first["label"], first["primary"]
    series = [p["shapes"][label] for p in processes]
    works = {name: _work([s["samples"][name] for s in series]) for name in series[0]["samples"]}
    once = next((p["once"] for p in processes if "once" in p), {})
    profile = {
        **_times(works, primary),
        **_ceilings(works, primary, series, once),
        **{k: once[k] for k in ONCE if k in once},
        **_energy(once),
        "load_us": round(statistics.median([p["load_us"] for p in processes]), 1),
        "conditions": conditions([s["conditions"] for s in series]),
        "shapes": {name: _shape([p["shapes"][name] for p in processes], primary) for name in first["shapes"]},
    }
    profile["shapes"][label]["memory_mb_peak"] = profile.get("memory_mb_peak", UNMEASURED)
    return {
        "dims": first["dims"], "processes": len(processes), "quick": job.quick, "works": works,
        "process_seconds": [p["seconds"] for p in processes],
        "batches": sum(s["batches"] for s in series), "voided": sum(s["voided"] for s in series),
        "canary_us": [s["canary_us"] for s in series], "clock_mhz": [s["clock_mhz"] for s in series],
        "temperature_c": [s["temperature_c"] for s in series], "clock": [p["clock"] for p in processes],
        "throttled": dict(sum((Counter(s["throttled"]) for s in series), Counter[str]())),
        **{k: once[k] for k in ("nvbench", "card", "energy") if k in once}, "profile": profile,
    }  # fmt: skip


ONCE = (
    "bytes_moved", "flops", "workspace_bytes", "memory_mb_peak", "host_us_per_call", "occupancy",
    "precision_drift_vs_fp64", "precision_drift_vs_fp32",
)  # fmt: skip


def conditions(found: Sequence[str]) -> str:
    """STEADY when every process was; else what the first that was not says, and how many were not."""
    spoiled = [c for c in found if c != STEADY]
    return f"{len(spoiled)} of {len(found)} processes: {spoiled[0]}" if spoiled else STEADY


def _work(samples: Sequence[Sequence[float]]) -> dict[str, Any]:
    """One work over the processes; microseconds."""
    pooled = [s for process in samples for s in process]
    medians = [statistics.median(process) for process in samples]
    return {
        "n": len(pooled),
        "mean_us": round(sum(pooled) / len(pooled), 3),
        "median_us": round(statistics.median(medians), 3),
        "process_medians_us": [round(m, 3) for m in medians],
        "p99_us": round(statistics.quantile(pooled, 0.99), 3),
        "p99_interval_us": [round(v, 3) for v in statistics.interval(pooled, 0.99)],
        "quantiles_us": [round(v, 3) for v in statistics.steps(pooled)],
    }


def _times(works: Mapping[str, Mapping[str, Any]], primary: str) -> dict[str, Any]:
    """The latencies of a profile, milliseconds."""
    own = works[primary]
    medians = own["process_medians_us"]
    found: dict[str, Any] = {
        "latency_ms_mean": _ms(own["mean_us"]),
        "latency_ms_median": _ms(own["median_us"]),
        "latency_interval_ms": [round(min(medians) / 1e3, 6), round(max(medians) / 1e3, 6)],
        "throughput_ops_per_sec": round(1e6 / own["median_us"], 3) if own["median_us"] else UNMEASURED,
        "samples": own["n"],
        "processes": len(medians),
        "variance": round(statistics.spread(medians), 6) if len(medians) > 1 else UNMEASURED,
    }
    if own["n"] >= LEAST_P99:
        found["latency_ms_p99"] = _ms(own["p99_us"])
        found["latency_p99_interval_ms"] = [round(v / 1e3, 6) for v in own["p99_interval_us"]]
    for phase in PHASES:
        for name, key in ((phase, ""), (f"eager {phase}", "eager_"), (f"compile {phase}", "compile_")):
            if name in works:
                found[f"{key}{phase}_ms_median"] = _ms(works[name]["median_us"])
    return found


def _ms(us: float) -> float | str:
    return round(us / 1e3, 6) if us >= UNRESOLVED_US else UNRESOLVED


def _ceilings(
    works: Mapping[str, Mapping[str, Any]], primary: str, series: Sequence[Mapping[str, Any]],
    once: Mapping[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """The roofline (Williams, Waterman and Patterson, CACM 52 (2009)) with ceilings measured beside: a
    copy of as many bytes, cold or warm as the artifact's own, and the canary's products."""
    copy, canary = works["copy"]["median_us"], min(s["canary_us"] for s in series)
    if not copy or not canary or not once:
        return {}
    bandwidth = once["bytes_moved"] / copy * 1e6
    peak = once["canary_flops"] / canary * 1e6
    by_memory, by_compute = copy, once["flops"] / peak * 1e6
    floor = max(by_memory, by_compute)
    return {
        "bandwidth_bytes_per_s": float(f"{bandwidth:.4g}"),
        "peak_flops_per_s": float(f"{peak:.4g}"),
        "roofline_ms": round(floor / 1e3, 6),
        "roofline_share": round(floor / works[primary]["median_us"], 4),
        "bound_by": "memory" if by_memory >= by_compute else "compute",
    }


def _energy(once: Mapping[str, Any]) -> dict[str, Any]:
    energy = once.get("energy", {})
    return {
        "power_watts_avg": energy.get("watts", UNMEASURED),
        "power_watts_idle": energy.get("idle_watts", UNMEASURED),
        "joules_per_call": energy.get("joules_per_call", UNMEASURED),
    }


def _shape(series: Sequence[Mapping[str, Any]], primary: str) -> dict[str, Any]:
    """What `find` and a reader want to know of one size."""
    own = _work([s["samples"][primary] for s in series])
    eager = _work([s["samples"][f"eager {primary}"] for s in series])
    found = {
        "latency_ms_median": _ms(own["median_us"]),
        "eager_ms_median": _ms(eager["median_us"]),
        "variance": round(statistics.spread(own["process_medians_us"]), 6),
        "samples": own["n"],
    }
    return found | ({"latency_ms_p99": _ms(own["p99_us"])} if own["n"] >= LEAST_P99 else {})


def gains(profile: Mapping[str, Any]) -> dict[str, Any]:
    """`baseline_comparison`: percent gained against eager by phase (positive is faster), and the time of
    torch.compile over the artifact's where it was measured."""
    found: dict[str, Any] = {}
    for phase in PHASES:
        ours, eager, compiled = (profile.get(f"{p}{phase}_ms_median") for p in ("", "eager_", "compile_"))
        if isinstance(ours, float) and isinstance(eager, float) and eager:
            found[phase] = round(100 * (1 - ours / eager), 2)
        if isinstance(ours, float) and isinstance(compiled, float) and ours:
            found[f"{phase}_compile_ratio"] = round(compiled / ours, 4)
    return found or {"eager": UNMEASURED}
