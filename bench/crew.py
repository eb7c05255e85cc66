"""The processes that prepare and measure blocks: many that compile side by side, then one a card that is
timed while a few get ready.

Whatever happens to a process, what it told before its end is kept; whatever happens to this one, its
children go with it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any

import click

from bench.blocks import Block, Sizes
from bench.peers import MAX, OURS
from bench.results import ROOT

READY_AHEAD = 3  # processes of a card that load while one of them measures
TUNING_THREADS = 4  # of a process that tunes; the others compile in their own
CONTEXT_BYTES = 2 << 30  # of a process on a card beside its tensors
MIN_S = 15.0  # less is not begun
_alive: set[subprocess.Popen[bytes]] = set()


@dataclass(frozen=True)
class Job:
    """One block at one size; `data` is what the worker is told."""

    block: Block
    sizes: Sizes
    data: Mapping[str, Any]

    @property
    def label(self) -> str:
        return f"{self.block.name} {self.block.size_label(self.sizes)}"

    @property
    def tunes(self) -> bool:
        return MAX in self.data["impls"]


@dataclass(frozen=True)
class Means:
    """`cards`: numbers for CUDA_VISIBLE_DEVICES, "" for the one that is there; none: a processor. `width`:
    processes that compile side by side, as long as `room` bytes of each card hold what they compare.
    Monotonic times at which compiling and all of it end, seconds of one
    measurement, and where compilers keep what they made."""

    cards: tuple[str, ...]
    width: int
    compile_end: float
    end: float
    limit: float
    caches: Path
    room: float = math.inf


class Crew:
    """`tell` gets the lines of a job, once after it was prepared and once after it was measured, from one
    thread at a time."""

    def __init__(
        self, jobs: list[Job], means: Means, tell: Callable[[Job, list[dict[str, Any]]], None]
    ) -> None:
        self.jobs, self.means, self._tell = jobs, means, tell
        self.changed = threading.Condition()
        self.unfinished = len(jobs)  # of the preparations
        self.ready: dict[int, dict[str, Any]] = {}
        self.taken = dict.fromkeys(means.cards or ("",), 0.0)
        self.place = Path()

    def go(self) -> None:
        lanes = [card for card in self.means.cards for _ in range(READY_AHEAD)] or [""]
        with tempfile.TemporaryDirectory(prefix="esper-turns-") as place:
            self.place = Path(place)
            with ThreadPoolExecutor(len(lanes)) as measuring, ThreadPoolExecutor(self.means.width) as making:
                found = [measuring.submit(self._lane, card) for card in lanes]
                found += [making.submit(self._prepare, at) for at in range(len(self.jobs))]
            for future in found:
                future.result()

    def _prepare(self, at: int) -> None:
        job, card = self.jobs[at], list(self.taken)[at % len(self.taken)]
        lines: list[dict[str, Any]] = [{"kind": "killed", "why": "no time was left to compile"}]
        needed = job.block.memory(job.sizes) + CONTEXT_BYTES
        self._room(card, needed)
        try:
            left = self.means.compile_end - time.monotonic()
            left = left if self.means.cards else min(left, self.means.limit)  # nothing else gets ready there
            if left > MIN_S:
                lines = self._process(job, "prepare", card, left, {})
                left = self.means.compile_end - time.monotonic()
                if ours_brought_it_down(lines) and left > MIN_S:
                    lines += self._process(job, "prepare", card, left, {"without_ours": True})
        finally:
            facts = {line["name"]: line["facts"] for line in lines if line["kind"] == "ready"}
            with self.changed:
                self._tell(job, lines)
                self.unfinished -= 1
                self.taken[card] -= needed
                if facts:
                    self.ready[at] = facts
                self.changed.notify_all()

    def _room(self, card: str, needed: float) -> None:
        """Wait until the card has it, or nobody else is there."""
        with self.changed:
            self.changed.wait_for(
                lambda: not self.taken[card] or self.taken[card] + needed <= self.means.room
            )
            self.taken[card] += needed

    def _lane(self, card: str) -> None:
        while (taken := self._take()) is not None:
            at, facts = taken
            left = self.means.end - time.monotonic()
            lines = [{"kind": "killed", "why": "no time was left to measure"}]
            if left > MIN_S:
                lines = self._process(
                    self.jobs[at], "measure", card, min(left, self.means.limit), {"ready": facts}
                )
            with self.changed:
                self._tell(self.jobs[at], lines)

    def _take(self) -> tuple[int, dict[str, Any]] | None:
        """The first that is ready, once few compile; None when nothing can come any more."""
        with self.changed:
            few = self.means.width // 4
            self.changed.wait_for(lambda: self.unfinished <= few and (self.ready or not self.unfinished))
            at = min(self.ready, default=None)
            return None if at is None else (at, self.ready.pop(at))

    def _process(
        self, job: Job, do: str, card: str, seconds: float, more: Mapping[str, Any]
    ) -> list[dict[str, Any]]:
        begin = time.monotonic()
        data = {**job.data, **more, "do": do}
        if self.means.cards:
            data |= {f"{name}_lock": str(self.place / f"{name}-{card or 0}") for name in ("card", "turn")}
        with tempfile.TemporaryDirectory(prefix="esper-bench-") as folder:
            place, out = Path(folder) / "job.json", Path(folder) / "out.jsonl"
            place.write_text(json.dumps(data), encoding="utf-8")
            command = [sys.executable, "-m", "bench.worker", str(place), str(out)]
            threads = TUNING_THREADS if do == "prepare" and job.tunes and self.means.cards else 1
            ended = bounded(command, seconds, self._environment(card, threads))
            text = out.read_text(encoding="utf-8") if out.exists() else ""
        lines = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
        lines += unfinished(lines, ended, job)
        spent, rows = time.monotonic() - begin, sum(x["kind"] == "row" for x in lines)
        say(f"{do} {job.label}: {spent:.0f} s, {rows} rows, {ended or 'done'}")
        for line in lines:
            if line.get("why"):
                say(f"  {line.get('impl', 'worker')}: {str(line['why'])[-300:]}")
        return lines

    def _environment(self, card: str, threads: int) -> dict[str, str]:
        caches = self.means.caches
        return {
            **({"CUDA_VISIBLE_DEVICES": card} if card else {}),
            "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
            "TRITON_CACHE_DIR": str(caches / "triton"),
            "TORCHINDUCTOR_COMPILE_THREADS": str(threads),
            **(
                {"OMP_NUM_THREADS": "2"} if self.means.cards else {}
            ),  # many processes, and the work is not there
        }


def say(text: str) -> None:
    click.echo(f"[{time.strftime('%H:%M:%S')}] {text}", err=True)


def ours_brought_it_down(lines: list[dict[str, Any]]) -> bool:
    """Whether the process, or the card's context in it, ended at our own block: its peers were not tried."""
    tried = [line["impl"] for line in lines if line["kind"] == "trying"]
    ended = any(line["kind"] in ("card_lost", "killed") for line in lines)
    ready = any(line["kind"] == "ready" and line["name"] == OURS for line in lines)
    return ended and tried[-1:] == [OURS] and not ready


def unfinished(lines: list[dict[str, Any]], ended: str, job: Job) -> list[dict[str, Any]]:
    """What a process that did not end well leaves to say: the peer it was at did not get there."""
    if any(line["kind"] == "done" for line in lines):
        return []
    done = {line["name"] for line in lines if line["kind"] == "ready"}
    tried = [line["impl"] for line in lines if line["kind"] == "trying" and line["impl"] not in done]
    base = {
        "kind": "row", "block": job.block.name, "size": job.block.size_label(job.sizes), "mode": "plain",
        "dtype": job.block.leaves[0].dtype, "wall_ms": None, "dev_ms": None, "correct": False, "why": ended,
    }  # fmt: skip
    names = ["esper-fast" if impl == "esper" else impl for impl in tried[-1:]]
    rows = [{**base, "phase": phase, "impl": impl} for impl in names for phase in ("f", "fb")]
    return [*rows, {"kind": "killed", "why": ended}]


def bounded(command: list[str], seconds: float, environment: Mapping[str, str] = MappingProxyType({})) -> str:
    """Empty when the process ended well; the process and all its children are gone afterwards."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=sys.stderr,
        start_new_session=True,
        env={**os.environ, **environment},
    )
    _alive.add(process)
    try:
        code = process.wait(timeout=seconds)
        return "" if code == 0 else f"exit code {code}"
    except subprocess.TimeoutExpired:
        return f"stopped after {seconds:.0f} s"
    finally:
        _kill_group(process)
        _alive.discard(process)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass
    process.wait()


def end_well(last: Callable[[], object]) -> None:
    """A time limit on this process takes its children along and writes what is there."""

    def end(number: int, frame: FrameType | None) -> None:
        for process in list(_alive):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        last()
        os._exit(128 + number)

    signal.signal(signal.SIGTERM, end)
