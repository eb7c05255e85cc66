"""A core for what is timed, and the others for everybody else."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def siblings(core: int) -> set[int]:
    """Logical processors of one core, itself among them."""
    path = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
    found = {core}
    try:
        for piece in path.read_text(encoding="ascii").strip().split(","):
            first, _, last = piece.partition("-")
            found |= set(range(int(first), int(last or first) + 1))
    except (OSError, ValueError):
        return {core}
    return found


def own() -> int:
    """The last one this process may use: interrupts usually go to the first."""
    return max(os.sched_getaffinity(0))


def others() -> set[int]:
    """All that share no core with `own`; all where there are none."""
    allowed = os.sched_getaffinity(0)
    return allowed - siblings(own()) or allowed


@contextmanager
def pinned() -> Iterator[None]:
    """This thread, and what it starts inside, on `own` alone."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {own()})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
