"""Workers that misbehave on purpose, run by the fork server in the tests of isolation."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time

from gauntlet.jobs import decode_job
from gauntlet.server import threads_of


def _say(fd: int, **event: object) -> None:
    os.write(fd, json.dumps(event).encode() + b"\n")


def good(arguments: int, result: int, spill: int) -> None:
    os.write(spill, b"spilled")
    _say(result, event="text", text=os.read(arguments, 100).decode(), threads=threads_of(os.getppid()))
    _say(result, event="launch", limit=5)
    _say(result, event="landed")
    _say(result, event="done")


def endless(arguments: int, result: int, spill: int) -> None:
    _say(result, event="launch", limit=0.4)
    while True:
        pass


def asleep(arguments: int, result: int, spill: int) -> None:
    _say(result, event="launch", limit=0.4)
    time.sleep(1000)


def illegal(arguments: int, result: int, spill: int) -> None:
    _say(result, event="launch", limit=5)
    ctypes.string_at(16)


def illegal_measured(arguments: int, result: int, spill: int) -> None:
    """As a process that measures."""
    with open(arguments, "rb") as file:
        word = decode_job(file.read())[0]["word"]
    os.write(result, word.encode() + json.dumps({"event": "launch", "limit": 5}).encode() + b"\n")
    ctypes.string_at(16)


def pretender(arguments: int, result: int, spill: int) -> None:
    """Candidate code in a process that measures, which says that it is done."""
    for event in ({"event": "launch"}, {"event": "measured"}, {"event": "landed"}, {"event": "done"}):
        _say(result, **event)
    os._exit(0)


def abort(arguments: int, result: int, spill: int) -> None:
    _say(result, event="launch", limit=5)
    os.abort()


def leaves(arguments: int, result: int, spill: int) -> None:
    _say(result, event="launch", limit=5)
    os._exit(0)


def told_to_stop(arguments: int, result: int, spill: int) -> None:
    _say(result, event="launch", limit=5)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(5)


def early(arguments: int, result: int, spill: int) -> None:
    os.abort()


def hungry(arguments: int, result: int, spill: int) -> None:
    _say(result, event="launch", limit=30)
    kept = []
    while True:
        kept.append(bytearray(8 << 20))
        kept[-1][::4096] = b"x" * len(kept[-1][::4096])


def floods_output(arguments: int, result: int, spill: int) -> None:
    _say(result, event="launch", limit=30)
    try:
        while True:
            os.write(1, b"x" * (1 << 20))
    except OSError:
        _say(result, event="refused")
    _say(result, event="landed")
    _say(result, event="done")


def floods_messages(arguments: int, result: int, spill: int) -> None:
    _say(result, event="launch", limit=60)
    while True:
        os.write(result, b'{"event":"x"}\n' * 4096)


def talks_nonsense(arguments: int, result: int, spill: int) -> None:
    os.write(result, b"\xff\x00garbage\n[1,2]\n17\n")
    _say(result, event="done")


def leaves_children(arguments: int, result: int, spill: int) -> None:
    if not os.fork():
        time.sleep(1000)
    _say(result, event="child", session=os.getsid(0))
    _say(result, event="done")


def sees(arguments: int, result: int, spill: int) -> None:
    listed = [f"/proc/self/fd/{n}" for n in os.listdir("/proc/self/fd") if int(n) > 2]
    open_files = [os.readlink(name) for name in listed if os.path.islink(name)]
    _say(
        result,
        event="seen",
        environment=sorted(os.environ),
        files=open_files,
        cuda="torch.cuda" in sys.modules,
    )
    _say(result, event="done")
