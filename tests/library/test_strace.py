"""Dying or failing at real system calls, injected from outside by strace. Each point is a process of its
own.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.library.victim import BEGIN, END
from tests.library.world import OPERATIONS, World, check, prepare

STRACE = shutil.which("strace")
CALLS: tuple[str, ...] = (
    "fsync",
    "fdatasync",
    "linkat",
    "renameat",
    "rename",
    "unlinkat",
    "unlink",
    "openat",
    "pwrite64",
    "write",
    "mkdirat",
    "ftruncate",
)
# What a failure of each call may end in: not writable or input/output 16, full 15, or nothing where it may be
# ignored.
CODES = {"EIO": {0, 16}, "ENOSPC": {0, 15, 16}}
LINE = re.compile(r"^\d*\s*(\w+)\(")


def test_strace_is_here() -> None:
    """Loud where the rest of this file cannot run."""
    if STRACE is None:
        pytest.fail("strace is not installed: the injection tests did NOT run (apt install strace)")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """On a real disk: these are real system calls."""
    if STRACE is None:
        pytest.skip("no strace: see test_strace_is_here")
    yield prepare(tmp_path_factory.mktemp("strace") / "world")


def run(world: World, operation: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [STRACE or "", "-f", "-qq", *options, sys.executable, "-m", "tests.library.victim", operation]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    root = Path(__file__).resolve().parents[2]
    return subprocess.run(
        [*command, str(world.root)], cwd=root, env=environment, capture_output=True, text=True, timeout=120
    )


def points(base: World, tmp: Path, operation: str) -> dict[str, range]:
    """For each call, which of its occurrences lie inside the operation."""
    log, world = tmp / "trace", base.copy(tmp / "dry")
    trace = ",".join((*CALLS, "newfstatat"))
    done = run(world, operation, "-o", str(log), "-e", f"trace={trace}")
    assert done.returncode == 0, done.stderr
    counts = dict.fromkeys(CALLS, 0)
    begin: dict[str, int] = {}
    end: dict[str, int] = {}
    for line in log.read_text(errors="replace").splitlines():
        if BEGIN in line:
            begin = dict(counts)
        elif END in line:
            end = dict(counts)
        found = LINE.match(line)
        if found and found[1] in counts:
            counts[found[1]] += 1
    assert begin and end, "markers not seen"
    return {call: range(begin[call] + 1, end[call] + 1) for call in CALLS if end[call] > begin[call]}


def visit(base: World, tmp: Path, operation: str, call: str, number: int, fault: str) -> None:
    world = base.copy(tmp / f"{call}-{number}-{fault}")
    inject = f"inject={call}:{'signal=KILL' if fault == 'KILL' else f'error={fault}'}:when={number}"
    done = run(world, operation, "-o", "/dev/null", "-e", f"trace={call}", "-e", inject)
    if fault == "KILL":
        assert done.returncode in (-9, 137), (call, number, done)
    else:
        assert done.returncode in CODES[fault], (call, number, fault, done)
    check(world, operation)
    shutil.rmtree(world.root)


def ends(numbers: range) -> list[int]:
    return sorted({numbers[0], numbers[-1]})


@pytest.mark.parametrize(
    ("call", "fault"),
    [("fsync", "KILL"), ("linkat", "KILL"), ("fdatasync", "KILL"), ("fsync", "EIO"), ("pwrite64", "ENOSPC")],
)
def test_put_short(base: World, tmp_path: Path, call: str, fault: str) -> None:
    """First and last of the calls that matter most; every one of all calls is in the slow suite."""
    here = points(base, tmp_path, "put")
    assert here[call]
    for number in ends(here[call]):
        visit(base, tmp_path, "put", call, number, fault)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["KILL", "EIO", "ENOSPC"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_call_of_every_operation(
    base: World, tmp_path: Path, operation: str, fault: str, record_property: Callable[[str, object], None]
) -> None:
    visited = 0
    for call, numbers in points(base, tmp_path, operation).items():
        for number in numbers:
            visit(base, tmp_path, operation, call, number, fault)
            visited += 1
    record_property("counters", f"{visited} points, each sound afterwards")
    assert visited > 3


def test_the_forge_opens_only_the_compiler_key(base: World, tmp_path: Path) -> None:
    """Traced: a handle for one role never opens another role's private key."""
    world, log = base.copy(tmp_path / "roles"), tmp_path / "trace"
    program = (
        "import sys; from pathlib import Path; from library.store import Library\n"
        "from tests.library.helpers import make_container\n"
        "root = Path(sys.argv[1])\n"
        "with Library.open(root / 'library', trust=root / 'keys', roles=('compiler',)) as lib:\n"
        "    lib.put_artifact(make_container(70))\n"
    )
    command = [
        STRACE or "",
        "-f",
        "-qq",
        "-o",
        str(log),
        "-e",
        "trace=openat,open",
        sys.executable,
        "-c",
        program,
    ]
    root = Path(__file__).resolve().parents[2]
    subprocess.run([*command, str(world.root)], cwd=root, check=True, timeout=120)
    opened = {m[1] for m in re.finditer(r"keys/keys/(\w+)/\w+\.pem", log.read_text())}
    assert opened == {"compiler"}


def test_workers_of_the_forge_see_no_key(base: World, tmp_path: Path) -> None:
    """Traced with every child: a compilation opens the compiler key, in the one process that stores; what it
    starts opens nothing of the trust home.
    """
    root, log = Path(__file__).resolve().parents[2], tmp_path / "trace"
    world = base.copy(tmp_path / "forge")
    command = [
        STRACE or "",
        "-f",
        "-qq",
        "-o",
        str(log),
        "-e",
        "trace=openat,open,execve",
        sys.executable,
        "-m",
    ]
    forge = ["forge.cli", "compile", "examples/rmsnorm_residual.json", "--target", "cpu"]
    places = {"ESPER_LIBRARY": str(world.home), "ESPER_KEYS": str(world.root / "keys")}
    done = subprocess.run(
        [*command, *forge],
        cwd=root,
        env={**os.environ, **places},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    lines = log.read_text(errors="replace").splitlines()
    first = lines[0].split()[0]
    assert {m[1] for line in lines for m in re.finditer(r"keys/keys/(\w+)/\w+\.pem", line)} == {"compiler"}
    opened = {line.split()[0] for line in lines if f'"{world.root}/keys' in line and "execve" not in line}
    assert opened == {first}, "a process that the forge started looked into the trust home"
    assert len({line.split()[0] for line in lines}) > 2, "no worker was seen at all"
