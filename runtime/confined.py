"""The child's side of `runtime.sandbox`: run as a script, it limits and confines itself, then imports the
module.

Uses the standard library only until it is confined, but for torch where a card has to be opened first.
Reads one JSON job from stdin, writes one JSON answer to the descriptor that stdout was; what the module
prints goes to stderr.
"""

from __future__ import annotations

import ctypes
import errno
import importlib
import json
import os
import platform
import resource
import struct
import sys
import traceback
from collections.abc import Iterable
from typing import Any

PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, PR_SET_PDEATHSIG = 38, 22, 1
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_SELF = 444, 445, 446
# Access bits of linux/landlock.h, first version; later bits are added by the version the kernel reports.
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
BITS_BY_VERSION = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
FILE_ONLY = EXECUTE | WRITE_FILE | READ_FILE | 1 << 14 | 1 << 15
IOCTL_DEV = 1 << 15
SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/sbin", "/etc", "/proc", "/sys", "/opt", "/nix")
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random", "/dev/full")
# x86-64 system calls that neither a compiler nor a kernel's host code needs: network, tracing, mounting,
# keys, modules.
DENIED_X86 = (
    41, 42, 43, 49, 50, 53, 101, 161, 165, 166, 169, 175, 176, 246, 248, 249, 250, 272, 288, 298, 308, 310,
    311, 313, 321, 323, 425,
)  # fmt: skip
# fork, vfork, kill, setpgid, setsid, rt_sigqueueinfo, tkill, rt_tgsigqueueinfo, pidfd_send_signal
ALONE_X86 = (57, 58, 62, 109, 112, 129, 200, 297, 424)
CLONE_X86, CLONE3_X86, CLONE_THREAD = 56, 435, 0x10000
X32_CALLS = 0x40000000


def main() -> int:
    job = json.loads(sys.stdin.buffer.read())
    out = os.dup(1)
    os.dup2(2, 1)
    limits, level = job["limits"], "limits"
    limit(limits)
    sys.path[:] = [job["root"], *job["path"]]
    if limits["devices"]:
        _open_card()
    readable = [*SYSTEM, sys.prefix, sys.base_prefix, job["root"], *job["path"], *limits["readable"]]
    if landlock(readable, [job["folder"], *limits["writable"]], limits["devices"]):
        level = "landlock"
        if seccomp():
            level = "full"
    answer = run(job["module"], job["request"])
    peak = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    answer |= {"level": level, "peak_bytes": peak * 1024}
    data = memoryview(json.dumps(answer).encode())
    while data:
        data = data[os.write(out, data) :]
    return 0


def _open_card() -> None:
    """The driver opens files, sockets and threads of its own when a card is first used: before the doors
    close, and before anything of a candidate is read. Without a card there is nothing to open.
    """
    import torch

    if torch.cuda.is_available():
        torch.zeros(1, device="cuda")
        torch.cuda.synchronize()


def run(module: str, request: Any) -> dict[str, Any]:
    """The module's answer, or its exception as data."""
    if isinstance(request, dict) and request.get("probe") and module == "runtime.confined":
        return {"value": None}
    try:
        return {"value": importlib.import_module(module).run(request)}
    except Exception as error:
        described = getattr(error, "to_json", None)
        if described is not None:
            return {"error": described()}
        kind = type(error).__name__
        return {
            "error": {"kind": kind, "text": str(error)[:2000], "traceback": traceback.format_exc()[-4000:]}
        }


def limit(limits: dict[str, Any]) -> None:
    """Resource limits; the parent watches the wall clock, the kernel the processor time."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, 9, 0, 0, 0)
    seconds = int(limits["seconds"]) + 1
    cores = os.cpu_count() or 1
    wanted = {
        resource.RLIMIT_CPU: seconds * cores,
        resource.RLIMIT_FSIZE: limits["file_bytes"],
        resource.RLIMIT_NOFILE: limits["open_files"],
        resource.RLIMIT_CORE: 0,
    }
    if limits["memory_bytes"]:
        wanted[resource.RLIMIT_AS] = limits["memory_bytes"]
    for which, value in wanted.items():
        hard = resource.getrlimit(which)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(which, (value, value))


def landlock(readable: Iterable[str], writable: Iterable[str], devices: bool) -> bool:
    """Only the named places can be read, only the folder written. False where the kernel has no Landlock."""
    libc = ctypes.CDLL(None, use_errno=True)
    version = libc.syscall(LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1)
    if version < 1:
        return False
    every = (1 << BITS_BY_VERSION.get(version, 16)) - 1
    ruleset = libc.syscall(LANDLOCK_CREATE, struct.pack("Q", every), ctypes.c_size_t(8), 0)
    if ruleset < 0:
        return False
    read = EXECUTE | READ_FILE | READ_DIR
    for path in dict.fromkeys(readable):
        _allow(libc, ruleset, path, read & every)
    for path in dict.fromkeys(writable):
        _allow(libc, ruleset, path, every & ~IOCTL_DEV)
    for path in ("/dev",) if devices else DEVICES:
        _allow(libc, ruleset, path, every & (READ_FILE | WRITE_FILE | READ_DIR | IOCTL_DEV))
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    done = libc.syscall(LANDLOCK_SELF, ruleset, 0) == 0
    os.close(ruleset)
    return done


def _allow(libc: ctypes.CDLL, ruleset: int, path: str, access: int) -> None:
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        rule = struct.pack("=Qi", access if os.path.isdir(path) else access & FILE_ONLY, fd)
        libc.syscall(LANDLOCK_ADD, ruleset, 1, rule, 0)
    finally:
        os.close(fd)


def seccomp(alone: bool = False) -> bool:
    """Deny the system calls of DENIED_X86 with EPERM: sockets of every kind among them. False where not
    possible. `alone`: a process that starts another one, leaves its session or sends signals is killed
    (SIGSYS); threads may be started.
    """
    if platform.machine() != "x86_64":
        return False
    load, equal, least, some, ret = 0x20, 0x15, 0x35, 0x45, 0x06
    deny, allow, kill = 0x00050000 | errno.EPERM, 0x7FFF0000, 0x80000000
    listed = [(number, deny) for number in DENIED_X86] + [(n, kill) for n in ALONE_X86 if alone]
    # Another architecture's call numbers would slip past the list: they are killed outright.
    program = [(load, 0, 0, 4), (equal, 1, 0, 0xC000003E), (ret, 0, 0, kill), (load, 0, 0, 0)]
    program += [(least, 0, 1, X32_CALLS), (ret, 0, 0, kill)]
    for number, action in listed:
        program += [(equal, 0, 1, number), (ret, 0, 0, action)]
    if alone:  # clone3 hides its flags in memory: the C library then uses clone, which shows them
        program += [(equal, 0, 1, CLONE3_X86), (ret, 0, 0, 0x00050000 | errno.ENOSYS)]
        program += [(equal, 0, 3, CLONE_X86), (load, 0, 0, 16), (some, 1, 0, CLONE_THREAD), (ret, 0, 0, kill)]
    program += [(ret, 0, 0, allow)]
    code = b"".join(struct.pack("HBBI", *line) for line in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("HxxxxxxQ", len(program), ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    return libc.prctl(PR_SET_SECCOMP, 2, ctypes.c_char_p(header), 0, 0) == 0


if __name__ == "__main__":
    sys.exit(main())
