"""Processes that make ready together measure one at a time."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gauntlet import profile, waves
from gauntlet.isolate import CRASH, FINISHED, ILLEGAL, Ending, ForkServer
from tests.faults import handmade, toys
from tests.gauntlet.test_measuring import SHORT

TOGETHER = replace(SHORT, processes=5, together=True)


def allowed(turns: waves.Turns, *numbers: int) -> list[bool]:
    return [bool(os.stat(turns.file(n)).st_size) for n in numbers]


def test_none_before_all_are_ready_and_none_beside_another(tmp_path: Path) -> None:
    turns = waves.Turns(tmp_path, (0, 1, 2, 3))
    turns.ready(2)
    turns.ready(0)
    turns.ended(3)  # while it made ready
    assert allowed(turns, 0, 1, 2, 3) == [False] * 4
    turns.ready(1)
    assert allowed(turns, 0, 1, 2) == [False, False, True]
    turns.ended(0)  # while it waited
    assert allowed(turns, 1) == [False]
    turns.ended(2)
    assert allowed(turns, 1) == [True]


def test_on_a_processor(server: ForkServer) -> None:
    told: list[str] = []
    measuring = most = 0

    def tell(event: Mapping[str, Any]) -> None:
        nonlocal measuring, most
        told.append(event["event"])
        measuring += {"launch": 1, "landed": -1}.get(told[-1], 0)
        if told.count(waves.READY) >= 3:
            most = max(most, measuring)

    job = profile.Job("cpu", effort=replace(TOGETHER, processes=3))
    said = profile.measure(handmade.build(toys.norm()), job, server, tell)
    assert said.outcome == "passed" and said.metrics["processes"] == 3, said.reason
    assert said.metrics["failed_processes"] == []
    assert Counter(told)["measured"] == Counter(told)[waves.READY] == 3
    assert told.index("measured") > [i for i, name in enumerate(told) if name == waves.READY][2]
    assert most == 1


@pytest.mark.parametrize(
    ("narrow", "killed", "turns"),
    [
        ((), (), [(0, True), (1, True), (2, True), (3, True), (4, True)]),
        ((1,), (), [(0, True), (1, True), (2, True), (1, False), (3, False), (4, False)]),
        ((), (0,), [(0, True), (1, True), (2, True), (3, False), (4, False)]),
    ],
)
def test_what_has_no_room_beside_others_is_run_alone(
    monkeypatch: pytest.MonkeyPatch, narrow: tuple[int, ...], killed: tuple[int, ...], turns: list[Any]
) -> None:
    seen: list[tuple[int, bool]] = []

    def process(container: bytes, job: object, server: object, number: int, *rest: Any) -> Ending:
        seen.append((number, bool(rest[-1])))
        if number in killed:
            return Ending(ILLEGAL, "SIGSEGV in candidate code", (), "", 0.0)
        if number in narrow and rest[-1]:
            return Ending(CRASH, "exit code 1", (), "OutOfMemoryError: no room", 0.0)
        return Ending(FINISHED, "", ({"event": "measured"},), "", 0.0)

    monkeypatch.setattr(profile, "_process", process)
    monkeypatch.setattr(ForkServer, "start", lambda self: None)
    monkeypatch.setattr(profile, "metrics_of", lambda found, job: {"n": len(found)})
    said = profile.measure(b"", profile.Job("cpu", effort=TOGETHER), ForkServer())
    assert sorted(seen) == sorted(turns) and said.outcome == "passed"
    assert said.metrics["n"] == 5 - len(killed) and len(said.metrics["failed_processes"]) == len(killed)


def test_interrupted_all_of_them_end(server: ForkServer) -> None:
    pids = list[int]()

    def tell(event: Mapping[str, Any]) -> None:
        if event["event"] == waves.READY:
            pids.append(server.pid or 0)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        job = profile.Job("cpu", effort=replace(TOGETHER, processes=3))
        profile.measure(handmade.build(toys.norm()), job, server, tell)
    assert pids[0] and server.pid is None and not Path(f"/proc/{pids[0]}").exists()
    assert threading.active_count() == 1 or not any("Pool" in t.name for t in threading.enumerate())
