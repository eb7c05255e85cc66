"""Workers: fresh, limited, and their end is put down to the right cause."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import time

import pytest

from gauntlet import isolate, quarantine
from gauntlet.isolate import ForkServer, Limits

STANDINS = "tests.gauntlet.standins:"


def run(server: ForkServer, name: str, **limits: int) -> isolate.Ending:
    return server.run(STANDINS + name, b"hello", Limits(seconds=30.0, **limits))


def test_a_good_worker_finishes(server: ForkServer) -> None:
    ending = run(server, "good")
    assert ending.kind == isolate.FINISHED, ending
    assert ending.last("text") == {"event": "text", "text": "hello", "threads": 1}
    assert ending.spill == b"spilled" and ending.seconds < 20


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("endless", isolate.ENDLESS),
        ("asleep", isolate.ENDLESS),
        ("illegal", isolate.ILLEGAL),
        ("abort", isolate.CRASH),
        ("leaves", isolate.CRASH),
        ("early", isolate.MACHINE),
        ("told_to_stop", isolate.MACHINE),
        ("floods_messages", isolate.MEMORY),
        ("talks_nonsense", isolate.FINISHED),
    ],
)
def test_the_end_is_named(server: ForkServer, name: str, kind: str) -> None:
    ending = run(server, name)
    assert ending.kind == kind, ending
    assert ending.detail or kind == isolate.FINISHED


def test_memory_is_limited(server: ForkServer) -> None:
    ending = run(server, "hungry", memory_bytes=128 << 20)
    assert ending.kind == isolate.MEMORY, ending
    assert ending.peak_bytes < 1 << 30


def test_output_is_limited(server: ForkServer) -> None:
    ending = run(server, "floods_output", output_bytes=4 << 20)
    assert ending.kind == isolate.FINISHED and ending.last("refused") and len(ending.output) <= 8192


def test_children_go_with_their_worker(server: ForkServer) -> None:
    ending = run(server, "leaves_children")
    event = ending.last("child")
    assert ending.kind == isolate.FINISHED and event
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and _alive(event["session"]):
        time.sleep(0.02)
    assert not _alive(event["session"])


def _alive(session: int) -> bool:
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", encoding="ascii", errors="replace") as file:
                values = file.read().rpartition(")")[2].split()
        except OSError:
            continue
        if int(values[3]) == session and values[0] not in "ZX":
            return True
    return False


def test_a_worker_sees_no_keys(server: ForkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ESPER_LIBRARY", "/somewhere")
    monkeypatch.setenv("ESPER_PASSPHRASE", "secret")
    with ForkServer(packages=("tests",)) as fresh:
        seen = run(fresh, "sees").last("seen")
    assert seen
    assert not [name for name in seen["environment"] if "ESPER" in name]
    assert all(name.startswith(("/memfd:", "pipe:", "/proc", "/dev")) for name in seen["files"]), seen[
        "files"
    ]


def test_the_server_is_started_again_after_it_died() -> None:
    with ForkServer(packages=("tests",)) as server:
        server.start()
        first = server.pid
        assert first
        os.kill(first, signal.SIGKILL)
        deadline = time.monotonic() + 60
        while (
            server.run(STANDINS + "good", b"", Limits()).kind != isolate.FINISHED
            and time.monotonic() < deadline
        ):
            pass
        assert server.pid != first and time.monotonic() < deadline


def test_other_packages_are_not_run() -> None:
    with ForkServer(packages=("gauntlet",)) as server:
        ending = server.run("os:abort", b"", Limits(seconds=5))
    assert ending.kind == isolate.MACHINE


def test_a_supervisor_may_hold_a_thousand_files() -> None:
    """select() refuses descriptors from 1024 on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 1200:
        pytest.skip(f"a process may open {hard} files here: NOT tested")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1200), hard))
    held: list[int] = []
    try:
        while not held or held[-1] < 1024:
            held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        with ForkServer(packages=("tests",)) as server:
            assert run(server, "good").kind == isolate.FINISHED
    finally:
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_workers_die_with_their_supervisor() -> None:
    script = (
        "from gauntlet.isolate import ForkServer, Limits\n"
        "s = ForkServer(packages=('tests',)); s.start(); print(s.pid, flush=True)\n"
        f"s.run({STANDINS!r} + 'asleep', b'', Limits(), print)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout
    pid = int(process.stdout.readline())
    process.kill()
    process.wait()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and os.path.exists(f"/proc/{pid}"):
        time.sleep(0.02)
    assert not os.path.exists(f"/proc/{pid}")


def test_the_supervisor_imports_no_torch() -> None:
    check = "import sys, gauntlet.isolate, gauntlet.report, gauntlet.cases; assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_device_that_computes_is_alive(server: ForkServer) -> None:
    """The probe reads the job that the supervisor sends (a card's absence is the only thing not tried
    here).
    """
    assert quarantine.alive("cpu", server) == ""


def test_an_interrupt_from_the_terminal_is_the_supervisors(server: ForkServer) -> None:
    """It reaches every process of the group; a server that took it would leave a traceback behind."""
    assert server.pid is not None
    os.kill(server.pid, signal.SIGINT)
    assert run(server, "good").kind == isolate.FINISHED


def test_a_server_whose_supervisor_left_while_it_began_ends_in_silence() -> None:
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, its:
        command = [sys.executable, "-m", "gauntlet.server", str(its.fileno()), "gauntlet"]
        server = subprocess.Popen(command, pass_fds=[its.fileno()], stderr=subprocess.PIPE)
    _, said = server.communicate(timeout=60)
    assert server.returncode == 0 and not said, said
