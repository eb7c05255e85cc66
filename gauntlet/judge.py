"""What a worker does: take the artifact's bytes, run the stages in order up to the first that fails,
report."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sys
import time
import traceback
from collections.abc import Mapping
from typing import Any

import torch

from esper_ir.diagnostics import EsperError
from esper_ir.discover import collect
from gauntlet import cases, inputs, stages
from gauntlet.jobs import decode_job
from gauntlet.stage import Context, Failed, Outcome, Passed, Recipe, Skipped, Stage
from gauntlet.subject import Subject
from library.manifest import unpack
from runtime import confined
from runtime.sandbox import ROOT

MANY = 1 << 20
BLOCKING_SYNC = 4  # CU_CTX_SCHED_BLOCKING_SYNC
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
MAPPED = 32 << 20
"""Bytes from which on memory that was freed goes back: the most that mallopt takes for it."""
MEMORY_SIGNS = ("can't allocate memory", "out of memory", "Cannot allocate memory")
CUDA_SIGNS = ("CUDA error", "CUDA driver error", "CUBLAS_STATUS", "device-side assert")


def all_stages() -> list[Stage]:
    """In their order."""
    return sorted(collect(stages, "STAGE").values(), key=lambda s: s.order)


def _read(fd: int) -> bytes:
    size = os.fstat(fd).st_size
    return os.pread(fd, size, 0)


def opened(arguments: int, result: int) -> tuple[dict[str, Any], Context]:
    """The job of a worker and the artifact under test, in a process that has given up what it does not need.
    No candidate code is loaded."""

    job, case, container = decode_job(_read(arguments))
    os.close(arguments)
    word = str(job.pop("word", "")).encode()

    def emit(event: Mapping[str, Any]) -> None:
        os.write(result, word + json.dumps(event).encode() + b"\n")

    _wait_asleep(job["device"])
    subject = Subject(unpack(container), settle(job["device"]))
    subject.hurry = bool(job["quick"])
    if case:
        subject.stored = {
            n: inputs.tensor_of(raw, subject.device) for n, raw in cases.decode(case).tensors.items()
        }
    _keep_pages()
    context = Context(subject, emit, job["quick"], job["seed"], threads=torch.get_num_threads())
    emit({"event": "context", **hardware(subject.device), "sandbox": confine(subject.device),
                  "cases": "quick" if job["quick"] else "full", "seed": job["seed"]})  # fmt: skip
    if subject.device.type != "cpu" or subject.fixed_elements < MANY:
        # The determinism stage tries others; waking idle threads costs more than it saves, and beside a card
        # the processor has small cases only.
        torch.set_num_threads(1)
    return job, context


def settle(name: str) -> torch.device:
    """The device of a worker, which is the current one from then on: torch and the runtime make tensors on
    the current card where they are not told another."""
    device = torch.device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def _wait_asleep(name: str) -> None:
    """A wait for the card leaves the processor to others: by default the driver asks again and again, and
    many judges share a machine. It has to be told before there is a context."""
    device = torch.device(name)
    if device.type != "cuda" or torch.cuda.is_initialized():
        return
    with contextlib.suppress(OSError, AttributeError):  # an old driver: nothing is lost but time
        driver, handle = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
        if not driver.cuInit(0) and not driver.cuDeviceGet(ctypes.byref(handle), device.index or 0):
            driver.cuDevicePrimaryCtxSetFlags_v2(handle, BLOCKING_SYNC)


def run(arguments: int, result: int, spill: int) -> None:
    """The worker of `prove` and `replay`."""
    job, context = opened(arguments, result)
    recipe = Recipe.of(job["recipe"]) if job.get("recipe") else None
    chosen = [
        stage for stage in all_stages()
        if (not job.get("stages") or stage.name in job["stages"]) and (stage.quick or not job["quick"])
    ]  # fmt: skip
    context.emit({"event": "plan", "stages": [stage.name for stage in chosen]})
    try:
        for stage in chosen:
            if not run_stage(stage, context, recipe, spill):
                break
    except Exception as error:
        code = error.code if isinstance(error, EsperError) else ""
        context.emit({"event": "broke", "what": f"{type(error).__name__}: {error}", "code": code})
        traceback.print_exc()
        raise
    context.emit({"event": "done"})


def _keep_pages() -> None:
    """Memory that was freed stays with the process (mallopt: no mappings of their own below MAPPED, no
    trimming): tensors come and go by the thousand, and the system would clear every page of each. The largest
    go back: pieces of them that lie between others are room for nothing."""
    libc = ctypes.CDLL(None)
    for option, value in ((M_MMAP_THRESHOLD, MAPPED), (M_TRIM_THRESHOLD, 2**31 - 1)):
        if hasattr(libc, "mallopt"):
            libc.mallopt(option, value)


def confine(device: torch.device) -> str:
    """Give up files, network and tracing before any candidate code is near; the level that this kernel
    allows."""
    readable = [*confined.SYSTEM, sys.prefix, sys.base_prefix, str(ROOT), *filter(None, sys.path)]
    if not confined.landlock(readable, [], device.type == "cuda"):
        return "limits"
    # No code of a candidate runs on the host for a card; the driver there may do what it likes.
    return "full" if confined.seccomp(alone=device.type == "cpu") else "landlock"


def run_stage(stage: Stage, context: Context, recipe: Recipe | None, spill: int) -> bool:
    """Whether the stages after it still matter."""
    context.emit({"event": "stage", "name": stage.name})
    began, before = time.monotonic(), context.candidate_seconds
    cpu = time.process_time() - context.candidate_cpu
    outcome = _guarded(stage, context, recipe)
    own = (
        time.process_time() - context.candidate_cpu - cpu
    )  # of processors: others on the machine cost nothing
    told: dict[str, Any] = {"event": "result", "name": stage.name, "seconds": time.monotonic() - began}
    spent = {
        "kernel_seconds": round(context.candidate_seconds - before, 4), "own_seconds": round(own, 4),
    }  # fmt: skip
    if isinstance(outcome, Passed):
        told |= {"outcome": "passed", "metrics": {**outcome.metrics, **spent}}
    elif isinstance(outcome, Skipped):
        told |= {"outcome": "skipped", "reason": outcome.reason}
    else:
        told |= {"outcome": "failed", "reason": outcome.reason, "metrics": {**outcome.metrics, **spent}}
        if outcome.case:
            told["recipe"] = outcome.case.to_json()
            _spill(stage, context, outcome, spill)
    context.emit(told)
    return not isinstance(outcome, Failed)


def _guarded(stage: Stage, context: Context, recipe: Recipe | None) -> Outcome:
    """What the runtime refuses, or the device reports, while a candidate runs is the candidate's failure.

    Every launch is waited for (`Context.launching`), so that what a card reports outside of one comes from
    the judge's own work with torch, and the artifact is not blamed for it.
    """
    try:
        return stage.check(context, recipe) if recipe else stage.run(context)
    except EsperError as error:
        if not error.code.startswith(("E07", "E08")):
            raise
        return Failed(_at(context, error.render().replace("\n", " ")), context.latest)
    except (RuntimeError, MemoryError) as error:
        text = str(error) or "out of memory"
        if isinstance(error, torch.OutOfMemoryError):
            raise  # of a card that others may use too: nobody's fault
        if isinstance(error, MemoryError) or any(sign in text for sign in MEMORY_SIGNS):
            return Failed(_at(context, f"memory: {text.splitlines()[0]}"), context.latest)
        if context.inside and any(sign in text for sign in CUDA_SIGNS):
            return Failed(_at(context, f"the device reports: {text.splitlines()[0]}"), context.latest)
        raise
    finally:
        context.emit({"event": "landed"})


def _at(context: Context, what: str) -> str:
    """With the case that was tried."""
    return f"{what} (at {context.latest})" if context.latest else what


def _spill(stage: Stage, context: Context, failed: Failed, spill: int) -> None:
    """The failing case's tensors; a device that no longer answers costs only the tensors."""
    assert failed.case is not None
    try:
        tensors = inputs.stored_form(context.subject, failed.case)
    except RuntimeError:
        traceback.print_exc()
        return
    subject = context.subject
    data = cases.encode(
        cases.Case(subject.artifact_id, stage.name, failed.reason, failed.case.to_json(), tensors)
    )
    os.ftruncate(spill, 0)
    os.pwrite(spill, data, 0)


def materialise(arguments: int, result: int, spill: int) -> None:
    """Make the tensors of a case without loading any candidate code: after a worker died on it."""

    def emit(event: Mapping[str, Any]) -> None:
        os.write(result, json.dumps(event).encode() + b"\n")

    job, _, container = decode_job(_read(arguments))
    subject = Subject(unpack(container), torch.device("cpu"))
    recipe = Recipe.of(job["recipe"])
    tensors = inputs.stored_form(subject, recipe)
    data = cases.encode(
        cases.Case(subject.artifact_id, recipe.stage, job["reason"], recipe.to_json(), tensors)
    )
    os.pwrite(spill, data, 0)
    emit({"event": "done"})


def probe(arguments: int, result: int, spill: int) -> None:
    """Does the device still compute? A fresh context, a small sum, its answer."""
    device = torch.device(decode_job(_read(arguments))[0]["device"])
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        absent = f"torch {torch.__version__} sees {torch.cuda.device_count()} CUDA cards"
        os.write(result, json.dumps({"event": "probe", "good": False, "absent": absent}).encode() + b"\n")
        os.write(result, b'{"event": "done"}\n')
        return
    total = int(torch.arange(1 << 16, device=device).sum())
    os.write(
        result,
        json.dumps({"event": "probe", "good": total == (1 << 16) * ((1 << 16) - 1) // 2}).encode() + b"\n",
    )
    os.write(result, b'{"event": "done"}\n')


def hardware(device: torch.device) -> dict[str, Any]:
    """What ran it."""
    if device.type == "cpu":
        return {
            "device": "cpu",
            "card": _processor(),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
        }
    properties = torch.cuda.get_device_properties(device)
    return {
        "device": str(device),
        "card": properties.name,
        "arch": f"sm_{properties.major}{properties.minor}",
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            return next(
                (line.partition(":")[2].strip() for line in file if line.startswith("model name")), "cpu"
            )
    except OSError:
        return "cpu"
