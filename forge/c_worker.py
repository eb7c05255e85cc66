"""The confined side of `forge.ctoolchain`: one run of the C compiler, text in by stdin, object out as
base64."""

from __future__ import annotations

import base64
import subprocess
import time
from pathlib import Path
from typing import Any


def run(request: dict[str, Any]) -> dict[str, Any]:
    """{"compiler", "flags", "text", "workdir"} -> {"data", "seconds"} or {"error"}; no path reaches the
    object."""
    out = Path(request["workdir"]) / "module.so"
    command = [request["compiler"], *request["flags"], "-o", out.name, "-", "-lm"]
    started = time.perf_counter()
    done = subprocess.run(
        command, input=request["text"], capture_output=True, text=True, cwd=out.parent, check=False
    )
    if done.returncode:
        return {"error": done.stderr[-4000:]}
    return {"data": base64.b64encode(out.read_bytes()).decode(), "seconds": time.perf_counter() - started}
