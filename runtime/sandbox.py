"""Worker processes for what is not trusted yet: compilers on generated text, kernels that are not proven.

`run_worker(module, request, limits)` starts a fresh Python, confines it, imports `module` there and returns
`module.run(request)`. Both travel as JSON. The child gets an environment made from an allow-list, a
private empty folder as HOME and TMPDIR, resource limits, and, where the kernel has them, Landlock (which
files) and seccomp (no network, no tracing). It never sees a key, and a crash, an endless loop or an
out-of-memory kill costs that call only.

Levels: "limits" (environment, rlimits, new session), "landlock" (files too), "full" (system calls too).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from esper_ir.diagnostics import EsperError
from runtime import scratch
from runtime.errors import fail

LEVELS = ("none", "limits", "landlock", "full")
PASSED = ("LANG", "LC_ALL", "TZ", "SYSTEMROOT")
MAX_ANSWER_BYTES = 256 << 20
GRACE_S = 2.0
LEAST_PRIORITY = 19  # niceness
RETRIES, RETRY_S = 4, 0.1
ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Limits:
    """What one worker may use. `seconds` of wall time; `memory_bytes` of address space (0: no limit, which
    CUDA needs); `file_bytes` per written file; `open_files`; `processes` 0 leaves the user's own limit;
    `writable` and `readable`: paths beyond its own folder and the system's libraries; `devices`: may open
    device nodes (a card); `threads`: how many OpenMP threads it is told to use, 0 for all; `level`: refuse
    to run below it (E0833)."""

    seconds: float = 60.0
    memory_bytes: int = 8 << 30
    file_bytes: int = 1 << 30
    open_files: int = 1024
    writable: tuple[str, ...] = ()
    readable: tuple[str, ...] = ()
    devices: bool = False
    threads: int = 0
    level: str = "limits"
    environment: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Answer:
    """What the worker returned, the level it ran under, and what it cost."""

    value: Any
    level: str
    seconds: float
    peak_bytes: int


def run_worker(
    module: str,
    request: Any,
    limits: Limits | None = None,
    *,
    on_start: Callable[[int], None] | None = None,
) -> Any:
    """`module.run(request)` in a confined worker; see `ask` for errors."""
    return ask(module, request, limits, on_start=on_start).value


def ask(
    module: str,
    request: Any,
    limits: Limits | None = None,
    *,
    on_start: Callable[[int], None] | None = None,
) -> Answer:
    """The same with the circumstances. A dictionary without "workdir" gets the worker's own folder under
    that name.

    E0830 the worker died (details: signal, returncode, stderr), E0831 time, E0832 memory, E0833 level not
    reached; an EsperError of the worker is raised here again as it was, another exception as E0834 with
    its traceback.
    """
    chosen = limits or Limits()
    if chosen.level not in LEVELS:
        raise fail("E0833", f"unknown sandbox level {chosen.level!r}", hint=f"one of {', '.join(LEVELS)}")
    with _folder(module) as folder:
        given = {"workdir": folder, **request} if isinstance(request, dict) else request
        job = {
            "module": module,
            "request": given,
            "limits": {name: getattr(chosen, name) for name in chosen.__dataclass_fields__},
            "root": str(ROOT),
            "path": [p for p in sys.path if p and Path(p).is_dir()],
            "folder": folder,
        }
        started = time.perf_counter()
        text = _communicate(job, chosen, Path(folder), on_start)
        return _answer(text, module, chosen, time.perf_counter() - started)


@contextmanager
def _folder(module: str) -> Iterator[str]:
    """A worker's own folder; E0830 where there is no room for one."""
    with ExitStack() as held:
        try:
            made = held.enter_context(scratch.folder("esper-work-"))
        except OSError as error:
            hint = f"free space below {tempfile.gettempdir()}, or name another place in TMPDIR"
            text = f"the worker {module} has no folder: {os.strerror(error.errno or 0)}"
            raise fail("E0830", text, node=module, hint=hint) from error
        yield made


def environment(folder: Path, limits: Limits) -> dict[str, str]:
    """The child's whole environment: nothing of ours leaks in but what is listed."""
    kept = {name: os.environ[name] for name in PASSED if name in os.environ}
    threads = {"OMP_NUM_THREADS": str(limits.threads)} if limits.threads else {}
    own = str(folder)
    return {
        **kept,
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": own,
        "TMPDIR": own,
        "XDG_CACHE_HOME": own,
        "TORCHINDUCTOR_CACHE_DIR": own,
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONNOUSERSITE": "1",
        "PYTHONHASHSEED": "0",
        **threads,
        **dict(limits.environment),
    }


def _communicate(
    job: dict[str, Any], limits: Limits, folder: Path, on_start: Callable[[int], None] | None
) -> bytes:
    command = [sys.executable, "-P", "-s", str(Path(__file__).with_name("confined.py"))]
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            cwd=folder,
            env=environment(folder, limits),
            start_new_session=True,
            close_fds=True,
        )
        if os.getpriority(os.PRIO_PROCESS, 0) == LEAST_PRIORITY:
            session_gives_way(process.pid)
        if on_start is not None:
            on_start(process.pid)
        try:
            text, _ = process.communicate(json.dumps(job).encode(), timeout=limits.seconds)
        except subprocess.TimeoutExpired:
            raise fail(
                "E0831",
                f"the worker {job['module']} ran longer than {limits.seconds:g} s",
                node=job["module"],
                hint="less work at once (a blueprint in parts), or a machine that is less busy",
                details={"seconds": limits.seconds, "stderr": _tail(errors)},
            ) from None
        finally:
            _end(process)
        if process.returncode:
            raise _died(job["module"], process.returncode, _tail(errors))
        return text


def _end(process: subprocess.Popen[bytes]) -> None:
    """Nothing of the worker's session outlives the call: compilers it started end with it."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except (ProcessLookupError, PermissionError):
            break
        if number == signal.SIGTERM:
            _wait(process, GRACE_S)
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def _wait(process: subprocess.Popen[bytes], seconds: float) -> None:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return


def _tail(file: Any, size: int = 4000) -> str:
    end = file.seek(0, os.SEEK_END)
    file.seek(max(0, end - size))
    return file.read().decode("utf-8", "replace")


def _died(module: str, returncode: int, stderr: str) -> EsperError:
    name = signal.Signals(-returncode).name if returncode < 0 else f"exit code {returncode}"
    details = {"returncode": returncode, "stderr": stderr}
    if "MemoryError" in stderr or "bad_alloc" in stderr or "annot allocate memory" in stderr:
        return fail("E0832", f"the worker {module} ran out of memory ({name})", node=module, details=details)
    if returncode == -signal.SIGXCPU:
        spent, hint = f"the worker {module} used up its processor time", "a blueprint in parts needs less"
        return fail("E0831", spent, node=module, hint=hint, details=details)
    last = stderr.strip().rpartition("\n")[2][:500]
    return fail("E0830", f"the worker {module} died: {name}. {last}", node=module, details=details)


def _answer(text: bytes, module: str, limits: Limits, seconds: float) -> Answer:
    if len(text) > MAX_ANSWER_BYTES:
        raise fail("E0834", f"the worker {module} answered with {len(text)} bytes", node=module)
    try:
        found = json.loads(text)
        level, peak = str(found["level"]), int(found["peak_bytes"])
    except (ValueError, KeyError, TypeError) as error:
        raise fail("E0834", f"the worker {module} gave no answer: {error}", node=module) from error
    if found.get("error") is not None:
        raise _raised(found["error"], module)
    if LEVELS.index(level) < LEVELS.index(limits.level):
        raise fail("E0833", f"sandbox level {limits.level} was asked for, {level} reached", node=module)
    return Answer(found.get("value"), level, seconds, peak)


def _raised(error: Mapping[str, Any], module: str) -> EsperError:
    if "code" in error:
        return EsperError(
            error["code"],
            error["message"],
            node=error.get("node"),
            hint=error.get("hint"),
            exit_code=int(error.get("exit_code", 1)),
            details=error.get("details"),
        )
    code = "E0832" if error.get("kind") == "MemoryError" else "E0834"
    what = f"the worker {module} raised {error.get('kind')}: {error.get('text')}"
    return fail(code, what, node=module, details={"traceback": error.get("traceback", "")})


def give_way(*, whole: bool = False) -> str:
    """Have this thread, and all that it starts from now on (workers too), run on processors that nobody else
    wants: beside a training, whose steps then find theirs free. What was reached: "idle", "nice" or "".

    A kernel with autogroups shares its processors between sessions first, and what a thread asks for counts
    within its own session alone. So the sessions of its workers give way too; and that of this process, if
    all of it does (`whole`) and leads one (under `setsid`, cron or systemd). In a terminal the session is the
    shell's, and is left as it is."""
    reached = ""
    try:
        os.setpriority(os.PRIO_PROCESS, 0, LEAST_PRIORITY)
        reached = "nice"
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        reached = "idle"
    except (AttributeError, OSError):  # another system, or a sandbox that forbids it
        pass
    if reached and whole and os.getsid(0) == os.getpid():
        session_gives_way(os.getpid())
    return reached


def session_gives_way(leader: int) -> None:
    """Have the session that a process leads yield to all others, where the kernel groups by sessions."""
    for _ in range(RETRIES):
        try:
            Path(f"/proc/{leader}/autogroup").write_text(str(LEAST_PRIORITY), encoding="ascii")
        except BlockingIOError:  # somebody on this machine did so within the last tenth of a second
            time.sleep(RETRY_S)
        except OSError:
            return
        else:
            return


def levels_here() -> Sequence[str]:
    """Levels that this kernel can reach, lowest first."""
    reached = ask("runtime.confined", {"probe": True}, Limits(level="none")).level
    return LEVELS[: LEVELS.index(reached) + 1]
