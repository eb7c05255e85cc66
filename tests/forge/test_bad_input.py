"""Budgets too small, workers that are killed, broken tools, full disks, blocks larger than the card,
interrupts: a named refusal, everything else kept."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from esper_ir.builder import Builder
from esper_ir.diagnostics import EsperError
from esper_ir.graph import Blueprint
from forge import build_worker, toolchain
from forge.plan import RowTile
from forge.service import compile_blueprint, front
from forge.target import resolve
from forge.toolchain import build_candidates, in_parallel
from forge.tune import candidates, halves, search
from forge.tune.candidates import Passing, Timer
from forge.tune.trials import Hunt, Trial
from library.store import Library
from runtime import sandbox

PRIOR, BETTER = RowTile(1, 4, 128, 1), RowTile(1, 8, 128, 1)


@pytest.fixture
def library(tmp_path: Path) -> Library:
    return Library.open(tmp_path / "library", trust=tmp_path / "trust", roles=("compiler",))


def forward(rows: int = 256) -> Blueprint:
    b = Builder("plain")
    b.dim("rows", min=1, max=4096, tune=(rows,))
    x = b.input("x", "float32", ["rows", 128])
    made = b.build(b.layer_norm(x, b.param("w", "float32", [128]), normalized_shape=[128]))
    return replace(made, differentiable=())


# Tools -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [("#!/bin/sh\necho no such instruction >&2\nexit 3\n", "no such instruction"),
     ("#!/bin/sh\nkill -9 $$\n", "ended by signal 9"), ("#!/bin/sh\nexit 0\n", "wrote no code"),
     ("not a program", "cannot be run"), (None, "cannot be run")],
)  # fmt: skip
def test_a_broken_assembler_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, said: str
) -> None:
    tool = tmp_path / "ptxas"
    if text is not None:
        tool.write_text(text)
        tool.chmod(0o755)
    monkeypatch.setattr(build_worker, "_tool", lambda name: tool)
    (tmp_path / "work").mkdir()
    request = {"assemblers": ["ptxas"], "proc": "sm_90a", "ptxas_flags": []}
    with pytest.raises(EsperError, match=said) as refused:
        build_worker._assemble("", request, tmp_path / "work")
    assert refused.value.code == "E0544"


def test_code_that_cannot_be_looked_at_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The look for a known fault of the assembler is never left out in silence."""
    (tmp_path / "ptxas").write_text('#!/bin/sh\ncase "$*" in *-o*) echo code > module.cubin;; esac\n')
    (tmp_path / "nvdisasm").write_text("#!/bin/sh\nexit 1\n")
    for name in ("ptxas", "nvdisasm"):
        (tmp_path / name).chmod(0o755)
    monkeypatch.setattr(build_worker, "_tool", lambda name: tmp_path / name)
    request = {"assemblers": ["ptxas"], "proc": "sm_90a", "ptxas_flags": []}
    with pytest.raises(EsperError, match="nvdisasm failed"):
        build_worker._assemble("", request, tmp_path)


def broken(*arguments: Any, **options: Any) -> Any:
    raise EsperError("E0544", "ptxas cannot be run")


def test_one_target_that_fails_leaves_the_others(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "run_worker", broken)
    failed: list[EsperError] = []
    made = compile_blueprint(forward(), targets=("h100", "cpu"), library=library, failed=failed)
    assert [e.code for e in failed] == ["E0544"] and len(made) == 1 and made[0].target.startswith("cpu")
    with pytest.raises(EsperError, match="E0544"):
        compile_blueprint(forward(), targets=("h100",), library=library)


def test_a_broken_tool_does_not_speak_against_tiles(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its failures are no measurements: another day the same tiles are tried."""
    work = front(forward(), "h100")
    monkeypatch.setattr(
        candidates, "build_candidates", lambda s, t: [toolchain.Candidate(failed="no")] * len(s)
    )
    effort = search.Effort(trials=4, seconds=5.0)
    found = search.search(work.kernels, work.target, "cuda:0", "t", effort, library)
    assert not found.given and all("wrong" in t for g in found.report["groups"] for t in g["trials"])
    assert not any(library.measurements(key, work.target.arch, "t") for key in work.kernels.sites)


# Workers -----------------------------------------------------------------------------------------


def killer(bad: str) -> Any:
    """Stands in for workers: one that is given the kernel `bad` is killed."""

    def run(module: str, request: Mapping[str, Any], *rest: Any, **options: Any) -> Any:
        entries = [[k["entry"] for k in each] for each in request["sets"]]
        if any(bad in each for each in entries):
            raise EsperError("E0830", "the worker died: SIGKILL")
        row = {"cubin": "", "usage": {}}
        facts = {"warps": 4, "shared": 0}
        return {"sets": [{**row, "kernels": dict.fromkeys(each, facts)} for each in entries]}

    return run


def test_a_killed_worker_costs_one_candidate_and_says_nothing_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    work = front(forward(), "h100")
    (source, *_) = work.kernels.by_key.values()
    sets = [(replace(source, plan=replace(source.plan, name=f"k{at}")),) for at in range(9)]
    monkeypatch.setattr(toolchain, "run_worker", killer("k4"))
    made = build_candidates(sets, work.target)
    assert [bool(c.failed) for c in made] == [at == 4 for at in range(9)]
    assert not made[4].lasting and "SIGKILL" in made[4].failed
    site, plan = next(iter(work.kernels.sites.values())), work.lowerings[0].plan
    assert isinstance(candidates._built(site, "k", PRIOR, plan, made[4]), Passing)


def test_an_interrupt_ends_the_workers() -> None:
    started: list[subprocess.Popen[bytes]] = []

    def work(share: int, workers: toolchain.Workers) -> int:
        if share:
            while not started:
                time.sleep(0.01)
            raise KeyboardInterrupt
        process = subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True
        )
        workers.started(process.pid)
        started.append(process)
        return process.wait()

    with pytest.raises(KeyboardInterrupt):
        in_parallel(work, [0, 1])
    assert started[0].wait() == -signal.SIGKILL


# The search --------------------------------------------------------------------------------------


def test_an_interrupt_keeps_the_best(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    work = front(forward(), "h100")
    rounds: list[int] = []

    def measure(self: Any, asked: Any, count: int, energy: bool = False) -> None:
        rounds.append(count)
        if len(rounds) > 2:
            raise KeyboardInterrupt
        for hunt, tile in asked:
            us = 100.0 if tile == hunt.prior else 50.0
            self.timer.keep(hunt, Trial(tile, us, us - 1, us + 1))

    monkeypatch.setattr(search._Bench, "measure", measure)
    told: list[str] = []
    effort = search.Effort(trials=40, seconds=60.0)
    found = search.search(work.kernels, work.target, "cuda:0", "t", effort, library, told.append)
    assert len(rounds) == 3 and found.given and any("interrupted" in line for line in told)
    assert any(library.measurements(key, work.target.arch, "t") for key in found.given), "and is on disk"


def test_a_budget_too_small_gives_the_first_tiles_and_says_so(library: Library) -> None:
    (made,) = compile_blueprint(
        forward(), pipelines=("standard",), targets=("cpu",), library=library, budget_s=1e-3
    )
    assert any("E0549" in w for w in made.warnings)
    report = json.loads(library.side_file(made.artifact_id, "tuning.json"))
    assert report["short"] and all(len(g["trials"]) == 1 for g in report["groups"])


# Disks and memory --------------------------------------------------------------------------------


class Full:
    """A store on a full disk."""

    def measurements(self, group_hash: str, arch: str, toolchain: str) -> list[dict[str, Any]]:
        return []

    def put_measurement(
        self, group_hash: str, arch: str, toolchain: str, measurement: Mapping[str, Any]
    ) -> None:
        raise EsperError("E0703", "no space left")


def test_a_full_disk_ends_the_keeping_and_not_the_search() -> None:
    timer, hunt = Timer("cpu", "a", "t", Full()), Hunt("k", "g", PRIOR)
    for tile in (PRIOR, BETTER):
        timer.keep(hunt, Trial(tile, 1.0, 1.0, 1.0))
    assert len(hunt.trials) == 2 and "E0703" in timer.unkept


def test_a_file_of_candidates_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "candidates"
    halves.write({"schema": halves.SCHEMA}, path)
    before = path.read_bytes()

    def full(self: Path, data: bytes) -> int:
        with self.open("wb") as file:
            file.write(data[:3])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(EsperError) as refused:
        halves.write({"schema": halves.SCHEMA, "more": 1}, path)
    assert refused.value.code == "E0703"
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["candidates"]


def test_a_worker_without_room_for_its_folder_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any, **options: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "mkdtemp", full)
    with pytest.raises(EsperError, match="No space left") as refused:
        sandbox.run_worker("forge.build_worker", {})
    assert refused.value.code == "E0830" and "TMPDIR" in str(refused.value.hint)


def test_a_block_larger_than_the_target_is_refused_there_only(library: Library) -> None:
    b = Builder("huge")
    b.dim("rows", min=1, max=64, tune=(64,))
    x = b.input("x", "float32", ["rows", 1 << 17])
    huge = replace(b.build(b.matmul(x, b.param("w", "float32", [1 << 17, 1 << 18]))), differentiable=())
    failed: list[EsperError] = []
    made = compile_blueprint(huge, targets=("h100", "b200", "cpu"), library=library, failed=failed)
    assert [e.code for e in failed] == ["E0548"], "137 GB: more than 80, less than 180"
    assert [m.target for m in made] == ["b200", resolve("cpu").name]
