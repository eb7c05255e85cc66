"""What this machine is: the only place where it is probed. The answer is a `library.platform.Platform`, a
value.

Nothing here makes a CUDA context; `machine("cpu")` does not even look for a driver, so that a process
which only runs cpu artifacts can still fork.
"""

from __future__ import annotations

import ctypes
import os
import re
from functools import lru_cache
from pathlib import Path

import torch

from esper_ir.diagnostics import EsperError
from library.platform import Platform
from runtime.driver import Driver, driver

# Flags of /proc/cpuinfo that each x86-64 level adds (System V ABI, processor supplement).
_LEVELS: tuple[frozenset[str], ...] = (
    frozenset("cx8 cmov fxsr mmx sse sse2 syscall".split()),
    frozenset("cx16 lahf_lm popcnt sse4_1 sse4_2 ssse3".split()),
    frozenset("avx avx2 bmi1 bmi2 f16c fma abm movbe xsave".split()),
    frozenset("avx512f avx512bw avx512cd avx512dq avx512vl".split()),
)
_FIRST_PROCESSOR = 8192  # bytes of /proc/cpuinfo that surely hold the flags of one processor
_MKL = re.compile(r"Math Kernel Library Version ([\w.]+)")
_OPENBLAS = re.compile(r"OpenBLAS ([\d.]+)")


def level_of(flags: frozenset[str]) -> int:
    """x86-64 level 1 to 4 of a set of processor flags; 0 for none."""
    level = 0
    for number, needed in enumerate(_LEVELS, 1):
        if not needed <= flags:
            break
        level = number
    return level


@lru_cache(maxsize=1)
def cpu_level() -> int:
    """x86-64 level of this processor; 0 on another architecture."""
    try:
        with open("/proc/cpuinfo", "rb") as file:
            text = file.read(_FIRST_PROCESSOR).decode("ascii", "replace")
    except OSError:
        return 0
    found = re.search(r"^flags\s*:\s*(.*)$", text, re.MULTILINE)
    return level_of(frozenset(found[1].split())) if found else 0


@lru_cache(maxsize=1)
def torch_version() -> str:
    """torch's version without the local part: "2.13.0" for the CPU and the CUDA build of one release."""
    return torch.__version__.partition("+")[0]


@lru_cache(maxsize=4)
def extern_versions(kind: str = "cpu") -> dict[str, str]:
    """Versions of the libraries that extern steps reach on a `kind` of device, by name; those not found
    are absent."""
    found = {"torch": torch_version()}
    if kind == "cpu":
        text = torch.__config__.show()
        for name, pattern in (("mkl", _MKL), ("openblas", _OPENBLAS)):
            version = pattern.search(text)
            if version:
                found[name] = version[1]
        return found
    cublas = _cublas_version()
    cudnn = torch.backends.cudnn.version() if torch.version.cuda else None
    return found | ({"cublas": cublas} if cublas else {}) | ({"cudnn": str(cudnn)} if cudnn else {})


def _cublas_version() -> str | None:
    """Of the library that torch has loaded already, by its property call (needs no handle and no context)."""
    if not torch.version.cuda:
        return None
    name = f"libcublas.so.{torch.version.cuda.partition('.')[0]}"
    try:
        ask = ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_NOW).cublasGetProperty
    except (OSError, AttributeError):
        return None
    parts = []
    for which in range(3):
        value = ctypes.c_int()
        if ask(which, ctypes.byref(value)):
            return None
        parts.append(str(value.value))
    return ".".join(parts)


def cuda_driver() -> Driver | None:
    """The driver when torch can use it here, else None."""
    if not torch.cuda.is_available():
        return None
    try:
        return driver()
    except EsperError:
        return None


@lru_cache(maxsize=32)
def machine(kind: str, index: int = 0) -> Platform:
    """This machine as a platform for artifacts of `kind` (cuda, cpu, hip) on card number `index`."""
    if kind != "cuda":
        return Platform(cpu_level=cpu_level(), torch=torch_version(), externs=extern_versions("cpu"))
    chosen = cuda_driver()
    if chosen is None:
        return Platform(cpu_level=cpu_level(), torch=torch_version())
    capability = chosen.capability(index)
    return Platform(
        cuda_cc=(capability // 10, capability % 10),
        driver=chosen.version,
        cpu_level=cpu_level(),
        torch=torch_version(),
        externs=extern_versions("cuda"),
        card=torch.cuda.get_device_name(index),
    )


def default_device(kind: str) -> torch.device:
    """Where an artifact of `kind` runs when the caller names no device: torch's current card, or the cpu."""
    if kind == "cuda":
        return torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_available() else 0)
    return torch.device("cpu")


def native_built() -> bool:
    """Whether the C dispatcher lies beside this file."""
    return any(Path(__file__).parent.glob("_native*.so"))
