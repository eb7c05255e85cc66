"""What the sandbox tests run inside a worker."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

from esper_ir.diagnostics import EsperError


def run(request: dict[str, Any]) -> Any:
    return globals()[request["do"]](request)


def echo(request: dict[str, Any]) -> Any:
    print("noise on stdout")
    return request["value"]


def environment(request: dict[str, Any]) -> dict[str, str]:
    return dict(os.environ)


def session(request: dict[str, Any]) -> str:
    """What the kernel says of the session; its leader may have been told a moment later."""
    found = ""
    for _ in range(100):
        found = Path("/proc/self/autogroup").read_text(encoding="ascii")
        if found.endswith(f"nice {request['until']}\n"):
            break
        time.sleep(0.01)
    return found


def niceness(request: dict[str, Any]) -> int:
    return os.getpriority(os.PRIO_PROCESS, 0)


def read(request: dict[str, Any]) -> str:
    return Path(request["path"]).read_text()


def write(request: dict[str, Any]) -> int:
    return Path(request["path"]).write_text("x" * request.get("size", 1))


def connect(request: dict[str, Any]) -> None:
    socket.socket().connect(("127.0.0.1", 9))


def crash(request: dict[str, Any]) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def leave(request: dict[str, Any]) -> None:
    os._exit(3)


def spin(request: dict[str, Any]) -> None:
    subprocess.Popen(["sleep", "1000"])
    Path(request["mark"]).write_text(str(os.getpid())) if "mark" in request else None
    while True:
        time.sleep(0.01)


def hoard(request: dict[str, Any]) -> int:
    return len(bytearray(64 << 30))


def refuse(request: dict[str, Any]) -> None:
    raise EsperError("E0312", "a named refusal", node="n", hint="h", exit_code=15)


def stumble(request: dict[str, Any]) -> None:
    raise ValueError("no such thing")


def compile_c(request: dict[str, Any]) -> int:
    source = Path(request["workdir"]) / "a.c"
    source.write_text("int f(void) { return 1; }")
    out = source.with_suffix(".so")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(out), str(source)], check=True)
    return out.stat().st_size
