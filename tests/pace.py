"""How fast this machine is, so that a limit in seconds means one thing on every machine."""

from __future__ import annotations

import dataclasses
import time

REFERENCE = 0.020
"""Seconds of the piece of work below on the machine that limits are written for: one core of about 3 GHz."""


def _piece() -> None:
    """What importing a module mostly is: code compiled and run, classes made."""
    for k in range(30):
        dataclasses.make_dataclass(f"C{k}", [(f"f{j}", int) for j in range(8)], frozen=True)


def slowness() -> float:
    """Times the reference that this process's core takes now, at least 1: what a limit is multiplied by.

    Processor time, the least of five; to be asked in the process that was timed, right after it.
    """
    found = []
    for _ in range(5):
        began = time.process_time()
        _piece()
        found.append(time.process_time() - began)
    return max(1.0, min(found) / REFERENCE)
