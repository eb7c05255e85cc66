"""What happens, told to whoever listens: a bus, and a file of JSON lines that a board reads back.

A bus has `publish(event)` and `subscribe(listener)`; the default one calls its listeners in this process. A
run is a folder with `events.jsonl`, one event per line: {"schema", "kind", "epoch", "step", "slot", "time",
"facts"}. Numbers that are not finite are written as null.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from runtime.seeds.facts import Event, Listener

log = logging.getLogger("esper.runtime")
SCHEMA = "esper-event/1"
FILE = "events.jsonl"


class EventBus(Protocol):
    """Where events go. An implementation may send them to another process; `publish` never raises and never
    waits for a reader."""

    def publish(self, event: Event) -> None: ...

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Listen from now on; the result stops it."""
        ...


class LocalBus:
    """In this process, on the thread that publishes, in the order of subscription. A listener that raises is
    logged once and heard no more."""

    def __init__(self) -> None:
        self._listeners: list[Listener] = []

    def publish(self, event: Event) -> None:
        for listener in tuple(self._listeners):
            try:
                listener(event)
            except Exception:  # a listener is anybody's code
                log.exception("a listener of growth events failed and is not called again")
                self._listeners = [one for one in self._listeners if one is not listener]

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        self._listeners.append(listener)

        def stop() -> None:
            self._listeners = [one for one in self._listeners if one is not listener]

        return stop


class EventFile:
    """A listener that appends every event to `folder`/events.jsonl. What cannot be written is logged once and
    left out: a full disk never stops a run."""

    def __init__(self, folder: Path | str) -> None:
        self.path = Path(folder) / FILE
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._failed = False

    def __call__(self, event: Event) -> None:
        try:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                os.write(descriptor, line_of(event))  # one write: lines of several ranks do not mix
            finally:
                os.close(descriptor)
        except OSError as error:
            if not self._failed:
                log.warning("events are not written: %s: %s", self.path, error)
            self._failed = True


def line_of(event: Event) -> bytes:
    """One event as a line of the file."""
    document = {
        "schema": SCHEMA,
        "kind": event.kind,
        "epoch": event.epoch,
        "step": event.step,
        "slot": event.slot,
        "time": time.time(),
        "facts": plain(event.facts),
    }
    return (json.dumps(document, allow_nan=False) + "\n").encode()


def plain(value: Any) -> Any:
    """JSON data: numbers that are not finite become None, other objects their text."""
    if isinstance(value, bool | int | str) or value is None:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(v) for v in value]
    to_json = getattr(value, "to_json", None)
    return plain(to_json()) if callable(to_json) else getattr(value, "name", None) or str(value)


class EventReader:
    """Reads a run's events as they come: each `read` gives what was appended since the last one. A torn last
    line waits for its end; lines that are no events are skipped."""

    def __init__(self, folder: Path | str) -> None:
        self.path = Path(folder) / FILE
        self._at, self._rest = 0, b""

    def read(self) -> Iterator[dict[str, Any]]:
        try:
            with self.path.open("rb") as file:
                file.seek(self._at)
                data = file.read()
        except FileNotFoundError:
            return
        self._at += len(data)
        *whole, self._rest = (self._rest + data).split(b"\n")
        for line in whole:
            try:
                found = json.loads(line)
            except ValueError:
                continue
            if isinstance(found, dict) and found.get("schema") == SCHEMA:
                yield found
