"""Processes that make ready side by side and then measure one at a time. The supervisor's side.

Making ready is most of a short measurement: a context, libraries that plan, weights that are drawn. It may
overlap, since nothing is timed; what is timed has the machine to itself, as if the others were not there.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from gauntlet.isolate import Ending, Errand, Event, ForkServer

READY = "prepared"
"""The event of a process that waits for its turn."""
STARTED = "turn"
"""And of one that has it."""


class Turns:
    """None measures before all are ready or have ended, and none while another does. Each waits until
    something can be read from a pipe of its own: no disk is too full for that, and nobody has to look."""

    def __init__(self, folder: Path, numbers: Sequence[int]) -> None:
        self._pipes = {number: folder / f"turn-{number}" for number in numbers}
        self._ends = dict[int, int]()
        self._preparing, self._ready = set(numbers), list[int]()
        self._running: int | None = None

    @contextlib.contextmanager
    def opened(self) -> Iterator[Turns]:
        """While it lasts, turns are given; who waits when it is over reads the end."""
        try:
            for number, pipe in self._pipes.items():
                os.mkfifo(pipe, 0o600)
                self._ends[number] = os.open(pipe, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            yield self
        finally:
            for number, end in self._ends.items():
                os.close(end)
                self._pipes[number].unlink()

    def pipe(self, number: int) -> str:
        return str(self._pipes[number])

    def ready(self, number: int) -> None:
        if number in self._preparing:
            self._preparing.remove(number)
            self._ready.append(number)
        self._next()

    def ended(self, number: int) -> None:
        """Whatever it was doing."""
        self._preparing.discard(number)
        self._ready = [n for n in self._ready if n != number]
        self._running = None if self._running == number else self._running
        self._next()

    def _next(self) -> None:
        if not self._preparing and self._running is None and self._ready:
            self._running = self._ready.pop(0)
            os.write(self._ends[self._running], b"1")


def wait(pipe: int) -> None:
    """The process's side: until it is its turn."""
    if not os.read(pipe, 1):
        raise SystemExit("nobody gives turns any more")


def side_by_side(
    errand: Callable[[int, str], Errand], numbers: Sequence[int], folder: Path, server: ForkServer
) -> list[Ending]:
    """How each ended, in the order of the numbers. `errand`: of a number and the pipe that it waits at.
    Interrupted, all of them end with the server."""
    turns = Turns(folder, numbers)

    def told(number: int, made: Errand) -> Errand:
        def on_event(event: Event) -> None:
            if event.get("event") == READY:
                turns.ready(number)
            if made.on_event:
                made.on_event(event)

        return replace(made, on_event=on_event, on_end=lambda ending: turns.ended(number))

    with turns.opened():
        try:
            return server.run_all([told(n, errand(n, turns.pipe(n))) for n in numbers])
        except BaseException:
            server.close()
            raise
