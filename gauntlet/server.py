"""The fork server: a process that has imported torch and waits, so that a worker costs a fork and not an
import.

    python -m gauntlet.server FD PACKAGES

FD is a UNIX sequenced-packet socket to the supervisor; only functions of PACKAGES (comma-separated) are run.

A request is one packet: JSON {"target", "limits"} with five descriptors (arguments, result pipe, output file,
spill file, status pipe). For each the server forks a nanny, the nanny forks the worker, waits for it, and
writes its exit status to the status pipe: so the supervisor learns how a worker ended even though it is not
its parent. The server creates no CUDA context and no thread, because neither survives a fork. When its
supervisor is gone, all of them end.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from typing import Any

PRELOAD = ("torch", "torch.fx.experimental.symbolic_shapes", "gauntlet.judge")
PACKET = 1 << 16
DESCRIPTORS = 5
_PR_SET_PDEATHSIG = 1


def _die_with_parent(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the request above
        os._exit(1)


def threads_of(pid: int) -> int:
    """Number of threads of a process; a process with more than one may not fork workers."""
    return len(os.listdir(f"/proc/{pid}/task"))


def serve(channel: socket.socket, packages: tuple[str, ...]) -> None:
    """Serve until the supervisor closes its end."""
    for name in PRELOAD:
        importlib.import_module(name)
    importlib.import_module("gauntlet.judge").all_stages()
    gc.collect()
    gc.freeze()  # keeps the pages of the imports shared
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nannies need no burial
    try:
        channel.send(b"ready")
    except OSError:
        return  # the supervisor was interrupted while this began
    while True:
        packet, descriptors, _, _ = socket.recv_fds(channel, PACKET, DESCRIPTORS)
        if not packet:
            return
        request = json.loads(packet)
        if request["target"].split(".")[0] in packages:
            _start(request, descriptors, channel)
        for fd in descriptors:
            os.close(fd)


def _start(request: Mapping[str, Any], descriptors: list[int], channel: socket.socket) -> None:
    parent = os.getpid()
    if os.fork():
        return
    code = 1
    try:
        channel.close()
        _die_with_parent(parent)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        code = _nanny(request, *descriptors)
    finally:
        os._exit(code)


def _nanny(
    request: Mapping[str, Any], arguments: int, result: int, output: int, spill: int, status: int
) -> int:
    parent = os.getpid()
    worker = os.fork()
    if not worker:
        _work(request, parent, arguments, result, output, spill, status)
    for fd in (arguments, result, output, spill):
        os.close(fd)
    os.write(status, json.dumps({"pid": worker}).encode() + b"\n")
    _, how, usage = os.wait4(worker, 0)
    ended = {
        "exit": os.waitstatus_to_exitcode(how),
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "peak_bytes": usage.ru_maxrss * 1024,
    }
    os.write(status, json.dumps(ended).encode() + b"\n")
    return 0


def _work(
    request: Mapping[str, Any],
    parent: int,
    arguments: int,
    result: int,
    output: int,
    spill: int,
    status: int,
) -> None:
    code = 1
    try:
        os.close(status)
        _die_with_parent(parent)
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.dup2(output, 1)
        os.dup2(output, 2)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        _limit(request["limits"])
        _target(request["target"])(arguments, result, spill)
        code = 0
    except (
        BaseException
    ) as error:  # the last handler of the process: whatever it is, it is told and ends here
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        sys.stdout.flush()
        os._exit(code)


def _limit(limits: Mapping[str, int]) -> None:
    """`output_bytes` per file (flooding fails instead of filling a disk), `address_bytes` beyond what is
    mapped now."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    size = limits["output_bytes"]
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    if limits.get("address_bytes"):
        with open("/proc/self/statm", encoding="ascii") as file:
            mapped = int(file.read().split()[0]) * resource.getpagesize()
        most = mapped + limits["address_bytes"]
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _target(name: str) -> Callable[[int, int, int], None]:
    """`module:function`."""
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's goes to the supervisor, which ends this
    serve(socket.socket(fileno=int(sys.argv[1])), tuple(sys.argv[2].split(",")))
