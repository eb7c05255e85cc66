"""compute-sanitizer, where it is installed, over one call of every phase at small odd sizes.

memcheck    accesses outside of allocations, misaligned ones
racecheck   threads of one block that share memory without a barrier between (shared memory only)
initcheck   reads of global memory that nothing wrote

It sees what the other stages cannot: a race inside a block whose outcome happens to be stable. What it cannot
see, races between blocks, the stage of determinism looks for. The report says which tools ran.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import gauntlet.isolate
from gauntlet.report import StageReport
from library.manifest import unpack
from runtime import scratch

NAME = "sanitizer"
PROGRAM = "compute-sanitizer"
TOOLS = ("memcheck", "racecheck", "initcheck")
FOUND = 86
"""Exit code that the tool is told to end with when it found something."""
TOOL_SECONDS = 120.0
LATER = StageReport(NAME, "skipped", 0.0, "not with --quick")
"""A process of torch under each tool takes longer than all other stages together."""
LISTED = 50
"""Findings that a tool prints: one of ours may stand behind those of a library."""
_KERNEL = re.compile(r"access at (\w+)\+0x")


def checks(container: bytes, device: str, program: str | None = None) -> StageReport:
    """Every tool in turn, up to the first that finds something. A tool that does not finish is no verdict."""
    program = program or shutil.which(PROGRAM)
    if program is None:
        return StageReport(NAME, "skipped", 0.0, f"{PROGRAM} is not installed")
    began, ran, left_out, output = time.monotonic(), [], [], ""
    libraries: list[str] = []
    with scratch.folder("esper-sanitizer-") as folder:
        path = Path(folder) / "artifact"
        path.write_bytes(container)
        for tool in TOOLS:
            code, output = _run(program, tool, path, device)
            if code == FOUND and tool == "racecheck" and not _ours(output, container):
                libraries, code = [*libraries, _first(output)], 0
            if code == FOUND:
                reason = f"{tool}: {_first(output)}"
                return StageReport(
                    NAME,
                    "failed",
                    round(time.monotonic() - began, 3),
                    reason,
                    metrics={"tools": [*ran, tool]},
                )
            (ran if code == 0 else left_out).append(tool)
    seconds = round(time.monotonic() - began, 3)
    if not ran:
        return StageReport(NAME, "skipped", seconds, f"{PROGRAM} did not finish: {_first(output)}")
    return StageReport(
        NAME, "passed", seconds, metrics={"tools": ran, "not_finished": left_out, "in_libraries": libraries}
    )


def _ours(output: str, container: bytes) -> bool:
    """Whether a race is in a kernel of the artifact. cuBLAS synchronises in ways that the tool does not know:
    what it reports of a library's own kernel says nothing about who called it.
    """
    named = set(_KERNEL.findall(output))
    if not named:
        return True
    kernels = unpack(container, verified=True).manifest["launch"]["kernels"]
    return bool(named & {str(kernel["entry"]) for kernel in kernels})


def _run(program: str, tool: str, path: Path, device: str) -> tuple[int, str]:
    options = ["--tool", tool, "--error-exitcode", str(FOUND), "--print-limit", str(LISTED)]
    command = [program, *options, sys.executable, "-m", "gauntlet.sanitized", str(path), device]
    # Without torch's cache every tensor is an allocation of its own: its neighbours are out of bounds.
    environment = {**gauntlet.isolate.environment(), "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=TOOL_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return -1, f"no end within {TOOL_SECONDS:.0f} s"
    return done.returncode, done.stdout + done.stderr


def _first(output: str) -> str:
    """The tool's first finding, else the last thing that was said."""
    lines = [line.strip("= \t") for line in output.splitlines() if line.strip("= \t")]
    told = [line for line in lines if not line.startswith("COMPUTE-SANITIZER")]
    return (told[:1] or lines[-1:] or ["it said nothing"])[0][:200]
