"""Processes that make ready side by side and then measure one at a time. The supervisor's side.

Making ready is most of a short measurement: a context, libraries that plan, weights that are drawn. It may
overlap, since nothing is timed; what is timed has the machine to itself, as if the others were not there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gauntlet.isolate import Ending, Event, ForkServer

READY = "prepared"
"""The event of a process that waits for its turn."""
Tell = Callable[[Event], None]
Run = Callable[[int, str, Tell], Ending]
"""Runs the process of this number to its end; it waits until the file of this name is not empty."""


class Turns:
    """None measures before all are ready or have ended, and none while another does."""

    def __init__(self, folder: Path, numbers: Sequence[int]) -> None:
        self._files = {n: folder / f"turn-{n}" for n in numbers}
        for file in self._files.values():
            file.write_bytes(b"")
        self._preparing, self._ready = set(numbers), list[int]()
        self._running: int | None = None
        self._lock = threading.Lock()

    def file(self, number: int) -> str:
        return str(self._files[number])

    def ready(self, number: int) -> None:
        with self._lock:
            if number in self._preparing:
                self._preparing.remove(number)
                self._ready.append(number)
            self._next()

    def ended(self, number: int) -> None:
        """Whatever it was doing."""
        with self._lock:
            self._preparing.discard(number)
            self._ready = [n for n in self._ready if n != number]
            self._running = None if self._running == number else self._running
            self._next()

    def _next(self) -> None:
        if not self._preparing and self._running is None and self._ready:
            self._running = self._ready.pop(0)
            self._files[self._running].write_bytes(b"go")


def side_by_side(
    run: Run, numbers: Sequence[int], folder: str, server: ForkServer, tell: Tell
) -> list[Ending]:
    """How each ended, in the order of the numbers. Interrupted, all of them end with the server."""
    turns, one = Turns(Path(folder), numbers), threading.Lock()
    server.start()  # by this thread: a process may die with the thread that began it

    def process(number: int) -> Ending:
        def told(event: Event) -> None:
            if event.get("event") == READY:
                turns.ready(number)
            with one:
                tell(event)

        try:
            return run(number, turns.file(number), told)
        finally:
            turns.ended(number)

    with ThreadPoolExecutor(len(numbers)) as pool:
        try:
            return list(pool.map(process, numbers))
        except BaseException:
            server.close()
            raise
