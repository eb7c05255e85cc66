"""One fresh process per candidate, and what its end means.

The supervisor (this side) imports no torch and opens no CUDA context. It starts `gauntlet.server` once and
asks it for a worker per candidate. A worker reports events, one JSON object a line; around every launch of
candidate code it says `launch` with a time limit, then `landed`, so that a death or a stall is put down to
the right code.

    finished        the worker said `done`
    crash           a signal, or an exit, while or after candidate code ran
    illegal-access  SIGSEGV or SIGBUS then
    endless         a launch went past its limit with the processor busy, or asleep with nothing to wait for
    memory          the worker outgrew its limit
    machine         it died before any candidate code ran, or was starved: the candidate is not blamed
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from esper_ir.diagnostics import EXIT_BACKEND, EsperError

FINISHED, CRASH, ILLEGAL, ENDLESS, MEMORY, MACHINE = (
    "finished", "crash", "illegal-access", "endless", "memory", "machine",
)  # fmt: skip
EVENT_BYTES = 4 << 20
OUTPUT_TAIL = 8192
START_SECONDS = 120.0
_POLL_MS = 50
_STARVED = 20.0
"""A launch that got less than half of a processor is given this many times its limit before it is judged at
all."""
FROM_OUTSIDE = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""How an operator or a service manager ends processes. No candidate gains by sending them to itself: the
artifact stays without a verdict."""
Event = Mapping[str, Any]


@dataclass(frozen=True)
class Limits:
    """Seconds for the whole worker, bytes of memory beyond its start, bytes of any one file it writes."""

    seconds: float = 3600.0
    memory_bytes: int = 8 << 30
    output_bytes: int = 64 << 20
    address_space: bool = True

    def request(self) -> dict[str, int]:
        # The address space is a second fence behind the watch on resident memory; CUDA reserves far more than
        # it uses.
        return {
            "output_bytes": self.output_bytes,
            "address_bytes": 2 * self.memory_bytes if self.address_space else 0,
        }


@dataclass(frozen=True)
class Errand:
    """What a worker is to do. `target`: "gauntlet.module:function"; `word`: what every message of the worker
    begins with; one without it is somebody else's, and ends the worker. `on_event` and `on_end` are called by
    whoever asked for the worker; what they raise reaches him."""

    target: str
    arguments: bytes
    limits: Limits
    on_event: Callable[[Event], None] | None = None
    word: str = ""
    on_end: Callable[[Ending], None] | None = None


@dataclass(frozen=True)
class Ending:
    """How a worker ended. `detail` is a phrase for the reason of a verdict, `spill` what it saved of a
    failing case."""

    kind: str
    detail: str
    events: tuple[Event, ...]
    output: str
    seconds: float
    cpu_seconds: float = 0.0
    peak_bytes: int = 0
    spill: bytes = b""

    def last(self, name: str) -> Event | None:
        """The newest event of this name."""
        return next((e for e in reversed(self.events) if e.get("event") == name), None)


class ForkServer:
    """The waiting process; a context manager. It is started by the first `run` and again after it died.

    `packages`: whose functions it may run.
    """

    def __init__(self, packages: tuple[str, ...] = ("gauntlet",)) -> None:
        self._packages = packages
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def start(self) -> None:
        """E0902 when it does not come up."""
        if self._process and self._process.poll() is None:
            return
        self.close()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "gauntlet.server", str(theirs.fileno()), ",".join(self._packages)]
        self._process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], env=environment(), stdin=subprocess.DEVNULL
        )
        theirs.close()
        self._channel = ours
        ours.settimeout(START_SECONDS)
        try:
            ready = ours.recv(16)
        except OSError:
            ready = b""
        if ready != b"ready":
            self.close()
            raise EsperError(
                "E0902",
                "the process that runs candidates did not start",
                hint="`python -c 'import torch'` must work in this environment; see standard error",
                exit_code=EXIT_BACKEND,
            )

    def close(self) -> None:
        if self._channel:
            self._channel.close()
        if self._process:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(2)
            self._process.kill()
            self._process.wait()
        self._process = self._channel = None

    def run(
        self,
        target: str,
        arguments: bytes,
        limits: Limits,
        on_event: Callable[[Event], None] | None = None,
        word: str = "",
    ) -> Ending:
        """Run one errand in a fresh worker and wait for its end."""
        (ending,) = self.run_all([Errand(target, arguments, limits, on_event, word)])
        return ending

    def run_all(self, errands: Sequence[Errand]) -> list[Ending]:
        """A fresh worker for each, side by side: how they ended, in the order of the errands."""
        with contextlib.ExitStack() as stack:
            watches = [stack.enter_context(self._begun(errand)) for errand in errands]
            _follow(watches)
            return [watch.ending for watch in watches if watch.ending]

    @contextlib.contextmanager
    def _begun(self, errand: Errand) -> Iterator[_Watch]:
        files = [os.memfd_create(name) for name in ("arguments", "output", "spill")]
        watch_read, watch_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        status_read, status_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        os.set_blocking(watch_write, True)
        try:
            try:
                _write_all(files[0], errand.arguments)
                request = json.dumps({"target": errand.target, "limits": errand.limits.request()}).encode()
                self._send(request, [files[0], watch_write, files[1], files[2], status_write])
            finally:
                os.close(watch_write)
                os.close(status_write)
            yield _Watch(watch_read, status_read, files[1], files[2], errand)
        finally:
            for fd in (*files, watch_read, status_read):
                os.close(fd)

    def _send(self, request: bytes, descriptors: list[int]) -> None:
        """To a server that may have died a moment ago: then to a new one."""
        os.lseek(descriptors[0], 0, os.SEEK_SET)
        self.start()
        assert self._channel is not None
        try:
            socket.send_fds(self._channel, [request], descriptors)
        except OSError:
            self.close()
            self.start()
            socket.send_fds(self._channel, [request], descriptors)


def environment() -> dict[str, str]:
    """What a worker may see: no library, no keys, nothing of the user's but what finds Python and the
    card."""
    kept = ("PATH", "HOME", "LANG", "TMPDIR", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "OMP_NUM_THREADS")
    prefixes = ("PYTHON", "CUDA_", "NVIDIA_")
    found = {k: v for k, v in os.environ.items() if k in kept or k.startswith(prefixes)}
    paths = [p for p in sys.path if p]
    # A pass of libgomp's idle threads that spins would be counted as work of the candidate.
    return {**found, "PYTHONPATH": os.pathsep.join(paths), "OMP_WAIT_POLICY": "passive"}


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


@dataclass
class _Launch:
    limit: float
    wall: float
    cpu: float


def _follow(watches: Sequence[_Watch]) -> None:
    """Until all have ended."""
    # Not select(): it refuses descriptors from 1024 on, and a supervisor may have that many.
    owners = {fd: watch for watch in watches for fd in watch.open}
    poll = select.poll()
    for fd in owners:
        poll.register(fd, select.POLLIN)
    while any(watch.ending is None for watch in watches):
        for fd, _ in poll.poll(_POLL_MS):
            owners[fd].look(fd)
        for watch in watches:
            watch.tick()
        for fd in [fd for fd, watch in owners.items() if fd not in watch.open]:
            poll.unregister(fd)
            del owners[fd]


@dataclass
class _Watch:
    """Follows one worker from the two pipes and /proc. `open`: those of the pipes that have not ended."""

    result: int
    status: int
    output: int
    spill: int
    errand: Errand
    began: float = field(default_factory=time.monotonic)
    open: set[int] = field(default_factory=set)
    ending: Ending | None = None
    events: list[Event] = field(default_factory=list)
    pid: int = 0
    ended: dict[str, Any] | None = None
    launch: _Launch | None = None
    launched: bool = False
    verdict: tuple[str, str] | None = None
    base: int = 0
    _buffers: dict[int, bytes] = field(default_factory=dict)
    _bytes: int = 0

    def __post_init__(self) -> None:
        self.open = {self.result, self.status}

    def look(self, fd: int) -> None:
        """There is something to read."""
        if fd in self.open and not self._read(fd):
            self.open.discard(fd)

    def tick(self) -> None:
        """What time brings: limits, and the end."""
        if self.ending:
            return
        if self.status not in self.open:
            self._end()
        elif self.pid and not self.verdict and not self.ended:
            self._judge(time.monotonic() - self.began)

    def _end(self) -> None:
        while self.result in self.open and self._read(self.result):
            pass  # what the worker said before it ended is in the pipe already; a grandchild may hold it open
        self.open.clear()
        kind, detail = self._classify()
        ended = self.ended or {}
        self.ending = Ending(
            kind, detail, tuple(self.events), _tail(self.output), time.monotonic() - self.began,
            ended.get("cpu_seconds", 0.0), ended.get("peak_bytes", 0), _content(self.spill),
        )  # fmt: skip
        if self.errand.on_end:
            self.errand.on_end(self.ending)

    def _read(self, fd: int) -> bool:
        """Take what is there; False at the end (or when nothing is there and the worker has ended)."""
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:
            return self.ended is None
        *lines, self._buffers[fd] = (self._buffers.get(fd, b"") + data).split(b"\n")
        self._bytes += len(data)
        if self._bytes > EVENT_BYTES:
            self._kill(MEMORY, "it flooded the judge with messages")
        for line in lines:
            self._take(fd, line)
        return bool(data)

    def _take(self, fd: int, line: bytes) -> None:
        word = self.errand.word.encode()
        if fd == self.result and not line.startswith(word):
            self._kill(CRASH, "candidate code spoke in the judge's name")
            return
        line = line.removeprefix(word) if fd == self.result else line
        try:
            message = json.loads(line)
        except ValueError:
            return
        if not isinstance(message, dict):
            return
        if fd == self.status:
            self.pid = message.get("pid", self.pid)
            self.ended = message if "exit" in message else None
            return
        if message.get("event") == "launch":
            self.launched = True
            limit = message.get("limit")
            limit = float(limit) if isinstance(limit, int | float) else 0.0  # not one of the judge's messages
            self.launch = _Launch(limit, time.monotonic(), _cpu(self.pid))
        elif message.get("event") == "landed":
            self.launch = None
        else:
            self.events.append(message)
        if self.errand.on_event:
            self.errand.on_event(message)

    def _judge(self, seconds: float) -> None:
        used = _resident(self.pid)
        self.base = self.base or used
        limits = self.errand.limits
        if used - self.base > limits.memory_bytes:
            self._kill(MEMORY, f"it took {(used - self.base) >> 20} MiB")
        elif self.launch and (why := self._stalled(self.launch)):
            self._kill(*why)
        elif seconds > limits.seconds:
            self._kill(MACHINE, f"the worker did not finish in {limits.seconds:.0f} s")

    def _stalled(self, launch: _Launch) -> tuple[str, str] | None:
        wall, cpu = time.monotonic() - launch.wall, _cpu(self.pid) - launch.cpu
        if wall <= launch.limit:
            return None
        if cpu > launch.limit / 2 or not _runnable(self.pid):
            return ENDLESS, f"a launch did not end within {launch.limit:.1f} s"
        if wall > _STARVED * launch.limit:
            return MACHINE, f"a launch got {cpu:.1f} s of processor time in {wall:.0f} s"
        return None

    def _kill(self, kind: str, detail: str) -> None:
        self.verdict = self.verdict or (kind, detail)
        # The worker leads its own session: whatever it started goes with it. It cannot be reaped yet by its
        # nanny's exit message, which we have not seen, so that the number is still its own.
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(self.pid, signal.SIGKILL)

    def _classify(self) -> tuple[str, str]:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL) if self.pid else None
        if self.verdict:
            return self.verdict
        if self.ended is None:
            return MACHINE, "the process that runs candidates was lost"
        if self.ended["exit"] == 0 and not self.launch and any(e.get("event") == "done" for e in self.events):
            return FINISHED, ""
        return _ended_early(self.ended["exit"], self.launched)


def _ended_early(code: int, launched: bool) -> tuple[str, str]:
    if not launched:
        return MACHINE, f"the worker ended with {code} before any candidate code ran"
    if code == -signal.SIGKILL:
        return MEMORY, "the system killed it for memory"
    if -code in FROM_OUTSIDE:
        return MACHINE, f"the worker was ended by {signal.Signals(-code).name} from outside"
    if code in (-signal.SIGSEGV, -signal.SIGBUS):
        return ILLEGAL, f"{signal.Signals(-code).name} in candidate code"
    if code < 0:
        return CRASH, f"{signal.Signals(-code).name} in candidate code"
    return CRASH, f"the process was ended with exit code {code}"


def _proc(pid: int, name: str) -> list[str]:
    try:
        with open(f"/proc/{pid}/{name}", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def _cpu(pid: int) -> float:
    """Processor seconds of all threads so far."""
    values = _proc(pid, "stat")
    return (int(values[11]) + int(values[12])) / os.sysconf("SC_CLK_TCK") if len(values) > 12 else 0.0


def _resident(pid: int) -> int:
    values = _proc(pid, "statm")
    return int(values[1]) * os.sysconf("SC_PAGE_SIZE") if len(values) > 1 else 0


def _runnable(pid: int) -> bool:
    """Whether any thread wants a processor (or a disk) now."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return True
    states = [_proc(pid, f"task/{thread}/stat")[:1] for thread in threads]
    return any(state and state[0] in "RD" for state in states)


def _content(fd: int) -> bytes:
    size = os.fstat(fd).st_size
    return os.pread(fd, size, 0) if size else b""


def _tail(fd: int) -> str:
    size = os.fstat(fd).st_size
    return os.pread(fd, OUTPUT_TAIL, max(0, size - OUTPUT_TAIL)).decode("utf-8", "replace")
