"""Verdicts over planted faults are kept as they come: a later run goes on; what was cut off is no verdict."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from bench import faults
from gauntlet.runner import Judgement


class Idle:
    """In place of a server whose processes judge: one that is closed lets go of whoever waits."""

    def __init__(self, packages: tuple[str, ...]) -> None:
        self.gone = threading.Event()

    def start(self) -> None: ...

    def close(self) -> None:
        self.gone.set()


def planted(folder: Path, names: str) -> list[faults.Planted]:
    for name in names:
        (folder / name).write_text(name)
    return [faults.Planted("constant output", "b", "k", "here", name, 3, False, False) for name in names]


def judging(monkeypatch: pytest.MonkeyPatch, stuck: str = "") -> list[str]:
    """Refuses all; waits over `stuck` until its server is closed. Names in the order of asking."""
    asked: list[str] = []

    def judge(data: bytes, device: str, server: Any, **options: Any) -> Judgement:
        asked.append(data.decode())
        if data.decode() in stuck:
            server.gone.wait(60)
            raise OSError("the server is gone")
        return Judgement(False, "wrong", (), {}, 0.1)

    monkeypatch.setattr(faults, "judge", judge)
    monkeypatch.setattr(faults.ordinary, "error", lambda *given, **options: 2.5)
    monkeypatch.setattr(faults, "ForkServer", Idle)
    monkeypatch.setattr(faults, "GRACE_S", 0.2)
    return asked


def test_goes_on_from_what_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, cases = tmp_path / "rows.jsonl", planted(tmp_path, "abcd")
    judging(monkeypatch, stuck="c")
    first = faults.judged(tmp_path, cases[:3], "cpu", 2, 1.0, True, kept)
    assert sorted(r["file"] for r in first) == ["a", "b"], "what was cut off is no verdict"
    with kept.open("a") as file:
        file.write('{"file": "d", "pas')  # the machine went away while it wrote
    asked = judging(monkeypatch)
    rows = faults.judged(tmp_path, cases, "cpu", 1, 60.0, True, kept)
    assert asked == ["c", "d"] and sorted(r["file"] for r in rows) == list("abcd")
    assert all(r["passed"] is False and r["ordinary"] == 2.5 for r in rows)


def test_rows_of_other_artifacts_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = tmp_path / "rows.jsonl"
    kept.write_text("".join(json.dumps({"file": f, "seed": s}) + "\n" for f, s in (("z", 3), ("a", 4))))
    judging(monkeypatch)
    rows = faults.judged(tmp_path, planted(tmp_path, "a"), "cpu", 1, 60.0, True, kept)
    assert [(r["file"], r["seed"]) for r in rows] == [("a", 3)]
