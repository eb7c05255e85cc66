"""Who may use a card: a file that one process holds at a time, so that nothing runs beside what is timed."""

from __future__ import annotations

import fcntl
import functools
import inspect
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class Turn:
    """A lock between processes that one thread may take several times; it goes with the process."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        self._inside = threading.RLock()
        self._depth = 0

    @contextmanager
    def held(self) -> Iterator[None]:
        with self._inside:
            if not self._depth:
                fcntl.flock(self._fd, fcntl.LOCK_EX)
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
                if not self._depth:
                    fcntl.flock(self._fd, fcntl.LOCK_UN)


def guard_tuning(turn: Turn) -> list[str]:
    """Every timing that Inductor makes to choose between kernels waits for the card; the methods guarded.
    Without it the choices of processes that tune side by side would be noise."""
    from torch._inductor.runtime import benchmarking

    guarded = []
    for kind in type(benchmarking.benchmarker).__mro__[:-1]:
        for name, method in list(vars(kind).items()):
            if name.startswith("benchmark") and inspect.isfunction(method):
                setattr(kind, name, _guarded(method, turn))
                guarded.append(f"{kind.__name__}.{name}")
    return guarded


def _guarded(method: Callable[..., Any], turn: Turn) -> Callable[..., Any]:
    @functools.wraps(method)
    def inside(*args: Any, **options: Any) -> Any:
        with turn.held():
            return method(*args, **options)

    return inside


class Late(Exception):
    """What was bounded took longer."""


@contextmanager
def bounded(seconds: float) -> Iterator[None]:
    """`Late` is raised in the main thread after this time."""

    def ring(number: int, frame: Any) -> None:
        raise Late(f"not done after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
