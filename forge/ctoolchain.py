"""C text -> shared object with the system's compiler, in a sandboxed worker; same text and compiler, same
bytes.

The object needs libc, libm and an OpenMP runtime called libgomp.so.1. Inside a process that imported torch
the loader finds torch's own copy under that name; elsewhere it finds the system's."""

from __future__ import annotations

import base64
import os
import shutil
import subprocess
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from esper_ir.diagnostics import EXIT_BACKEND, EsperError
from forge.target import Target
from runtime.sandbox import Limits, ask

COMPILERS = ("gcc", "cc", "clang")
SECONDS = 600.0  # as for cubins: hundreds of kernels are one text, and a busy machine is slow
# Bits: no contraction but where fma is written, integers wrap, errno and traps are of no interest (both let
# loops become vector code without changing a value). Speed: partial redundancy elimination and jump threading
# turn selections into branches, which do not become vector code. Bytes: no build id, no paths, no compiler
# banner, no symbols. No start files: nothing runs when the object is mapped.
FLAGS = (
    "-std=gnu11", "-O3", "-fopenmp", "-fPIC", "-shared", "-x", "c",
    "-ffp-contract=off", "-fwrapv", "-fno-math-errno", "-fno-trapping-math", "-fno-strict-aliasing",
    "-fno-tree-pre", "-fno-thread-jumps",
    "-fvisibility=hidden", "-fno-ident", "-fno-asynchronous-unwind-tables", "-g0", "-s", "-w",
    "-nostartfiles", "-Wl,--build-id=none", "-Wl,--as-needed", "-Wl,--hash-style=gnu", "-Wl,-z,noexecstack",
    "-Wl,-z,relro",
)  # fmt: skip
GCC_ONLY = ("-fno-tree-pre", "-fno-thread-jumps")
VECTOR_BITS = {64: 512, 32: 256}


@dataclass(frozen=True)
class CompiledObject:
    """`data`: the shared object. `version`: first line of the compiler's --version. `flags`: all that shape
    the code. `level`: sandbox level reached. `seconds`: wall time of the compiler.
    """

    data: bytes
    version: str
    flags: tuple[str, ...]
    seconds: float
    level: str


def find_compiler(wanted: str | None = None) -> Path:
    """The compiler named, or the first of gcc, cc and clang on PATH. E0520 when there is none."""
    for name in (wanted,) if wanted else COMPILERS:
        found = shutil.which(name)
        if found:
            return Path(found)
    raise EsperError(
        "E0520",
        f"no C compiler: looked for {wanted or ', '.join(COMPILERS)}",
        hint="install gcc (for example apt-get install gcc libc6-dev), or choose a target that needs none",
        exit_code=EXIT_BACKEND,
    )


@lru_cache(maxsize=8)
def compiler_version(compiler: Path) -> str:
    """First line of `--version`: part of an artifact's identity."""
    done = subprocess.run(
        [str(compiler), "--version"], capture_output=True, text=True, timeout=60.0, env=_scrubbed()
    )
    if done.returncode or not done.stdout.strip():
        raise EsperError("E0520", f"{compiler} does not run", hint=done.stderr[-500:], exit_code=EXIT_BACKEND)
    return done.stdout.splitlines()[0].strip()


def _scrubbed() -> dict[str, str]:
    return {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"}


def flags_of(target: Target, version: str = "gcc") -> tuple[str, ...]:
    """Every option that shapes the code for a target. clang's OpenMP would bring a second runtime beside
    torch's: its objects run on the calling thread.
    """
    chosen = FLAGS
    if "clang" in version:
        chosen = tuple("-fopenmp-simd" if f == "-fopenmp" else f for f in FLAGS if f not in GCC_ONLY)
    return (*chosen, f"-march={target.arch}", f"-mprefer-vector-width={VECTOR_BITS[target.vector_bytes]}")


def compile_c(
    text: str, target: Target, *, compiler: str | None = None, seconds: float = SECONDS
) -> CompiledObject:
    """Compile one translation unit. `compiler` names another one than the default; the environment is not
    asked.

    Raises E0520 without a compiler, E0521 with its messages when it refuses the text, E0831 past `seconds`.
    """
    chosen = find_compiler(compiler)
    version = compiler_version(chosen)
    flags = flags_of(target, version)
    request = {"compiler": str(chosen), "flags": list(flags), "text": text, "seconds": seconds}
    limits = Limits(seconds=seconds, memory_bytes=4 << 30, readable=(str(chosen.resolve().parent),))
    answer = ask("forge.c_worker", request, limits)
    if "error" in answer.value:
        raise EsperError("E0521", "the C compiler refused generated code", hint=answer.value["error"])
    data = base64.b64decode(answer.value["data"])
    return CompiledObject(data, version, flags, answer.value["seconds"], answer.level)
