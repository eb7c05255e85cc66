"""What a run says of its beginning and its end, and whether one that said nothing of its end still goes on.

RUN_STARTED names the process. The end is RUN_FINISHED or RUN_FAILED, said by whoever knows it (`close`, a
trainer), else when the controller is given up or the interpreter ends; a process that was killed says
neither, and a reader of its events looks whether it is there.
"""

from __future__ import annotations

import os
import platform
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runtime.seeds.events import EventBus
from runtime.seeds.facts import Event

STARTED, FINISHED, FAILED = "RUN_STARTED", "RUN_FINISHED", "RUN_FAILED"
_PROC = Path("/proc")


class Run:
    """One run on one bus; `epoch` and `step` as they were last told. Holds no model, so that it may outlive
    it."""

    def __init__(self, bus: EventBus, epoch: int, step: int) -> None:
        self.bus, self.epoch, self.step, self.ended = bus, epoch, step, False
        self._process, self._name = os.getpid(), uuid.uuid4().hex
        self._before = id(getattr(sys, "last_value", None))
        bus.publish(Event(STARTED, epoch, step, "", {"run": self._name, **process()}))

    def at(self, epoch: int, step: int) -> None:
        """The run goes on, or goes on again."""
        self.epoch, self.step, self.ended = epoch, step, False

    def heard(self, event: Event) -> None:
        """An end that another said, such as a trainer."""
        self.ended = self.ended or event.kind in (FINISHED, FAILED)

    def end(self, error: BaseException | None = None) -> None:
        """Say the end, once."""
        if self.ended:
            return
        self.ended = True
        kind, why = (FINISHED, {}) if error is None else (FAILED, {"reason": reason_of(error)})
        self.bus.publish(Event(kind, self.epoch, self.step, "", {"run": self._name, **why}))

    def given_up(self) -> None:
        """Nobody holds the controller any more, or the interpreter ends: by an error that nobody caught, if
        it printed one. Not in a process that was forked from the run's."""
        if os.getpid() == self._process:
            error = getattr(sys, "last_value", None)
            self.end(None if id(error) == self._before or hasattr(sys, "ps1") else error)


def reason_of(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {error}".partition("\n")[0].rstrip(": ")


def process() -> dict[str, Any]:
    """This process, as `gone` finds it again."""
    return {"pid": os.getpid(), **_machine(), "began": _began(os.getpid())}


def gone(told: Mapping[str, Any]) -> bool:
    """Whether the process of a RUN_STARTED is not there any more; False where that cannot be seen from here
    (another machine or container)."""
    pid = told.get("pid")
    if not isinstance(pid, int) or any(told.get(k) != v for k, v in _machine().items()):
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass  # somebody else's
    return _began(pid) != told.get("began")


def _machine() -> dict[str, str]:
    try:
        return {"host": platform.node(), "namespace": os.readlink(_PROC / "self" / "ns" / "pid")}
    except OSError:
        return {"host": platform.node(), "namespace": ""}


def _began(pid: int) -> str:
    """When a process began, ticks since the machine did; "" where that is not told, "ended" for one that only
    waits to be asked how it ended."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    fields = text.rpartition(")")[2].split()  # behind the name, which may hold anything
    return "ended" if fields[0] in "ZX" else fields[19]
