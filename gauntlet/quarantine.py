"""A device that does not come back is put aside, and no artifact is blamed for it.

One small file per device in the library, `devices/NAME.json`, says since when and why; while it is there,
nothing is proven on that device, unless a fresh process can compute on it again.
"""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

from esper_ir.diagnostics import EXIT_BACKEND, EsperError
from gauntlet.isolate import FINISHED, ForkServer, Limits
from gauntlet.jobs import encode_job
from library.paths import writes_to

FOLDER = "devices"
TRIES = 3
PROBE_SECONDS = 30.0


def place(home: Path, device: str) -> Path:
    return home / FOLDER / (re.sub(r"[^a-z0-9]", "-", device.lower()) + ".json")


def alive(device: str, server: ForkServer) -> str:
    """Empty when a fresh process computes on the device; else what happened, after a bounded number of
    tries. E0903 for one that is not in this machine: nothing is to be put aside."""
    what = ""
    for _ in range(TRIES):
        limits = Limits(seconds=PROBE_SECONDS, address_space=False)
        ending = server.run("gauntlet.judge:probe", encode_job({"device": device}, b""), limits)
        answer = ending.last("probe")
        if ending.kind == FINISHED and answer and answer["good"]:
            return ""
        if answer and answer.get("absent"):
            raise EsperError(
                "E0903",
                f"no {device} in this machine: {answer['absent']}",
                node=device,
                hint="prove it on a machine that has the card; nothing was recorded",
                exit_code=EXIT_BACKEND,
            )
        what = ending.detail or ending.output.strip()[-200:] or "a wrong answer"
    return what


def probe(home: Path, device: str, server: ForkServer) -> None:
    """After something went wrong: put the device aside if it does not come back (E0906)."""
    what = alive(device, server)
    if not what:
        _take_back(home, device)
        return
    path = place(home, device)
    with writes_to(path):
        path.parent.mkdir(mode=0o700, exist_ok=True)
        path.write_text(json.dumps({"device": device, "since": time.time(), "reason": what}))
    raise _aside(device, what)


def admit(home: Path, device: str, server: ForkServer) -> None:
    """E0906 while the device is put aside; one that answers again is taken back."""
    path = place(home, device)
    if not path.exists():
        return
    if what := alive(device, server):
        raise _aside(device, what)
    _take_back(home, device)


def _take_back(home: Path, device: str) -> None:
    path = place(home, device)
    with writes_to(path):
        path.unlink(missing_ok=True)


def _aside(device: str, what: str) -> EsperError:
    return EsperError(
        "E0906",
        f"{device} does not answer and is put aside: {what}",
        node=device,
        hint="reset the device and try again: it is taken back when it answers; nothing was recorded",
        exit_code=EXIT_BACKEND,
    )
