"""Machine code of `cpu` targets: verified bytes in a sealed memory file, mapped by the dynamic linker.

Nothing touches a disk: the bytes that were verified are copied into an anonymous file which the kernel
then seals, so that what is mapped is what was checked.
"""

from __future__ import annotations

import _ctypes
import ctypes
import fcntl
import os
from pathlib import Path

import torch

from runtime.errors import fail

MFD_CLOEXEC, MFD_ALLOW_SEALING, MFD_EXEC = 0x1, 0x2, 0x10
F_ADD_SEALS = 1033
SEALS = 0x1 | 0x2 | 0x4 | 0x8  # no further seals, no shrinking, no growing, no writing
ENTRY = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)


def sealed(name: str, data: bytes | memoryview) -> int:
    """Descriptor of an anonymous file that holds `data` and can never change. E0805."""
    try:
        fd = _create(name)
    except OSError as error:
        raise _unmapped(name, error) from error
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        fcntl.fcntl(fd, F_ADD_SEALS, SEALS)
    except OSError as error:
        os.close(fd)
        raise _unmapped(name, error) from error
    return fd


def _create(name: str) -> int:
    short = f"esper-{name}"[:200]
    try:
        return os.memfd_create(short, MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_EXEC)
    except OSError:  # kernels before 6.3 do not know MFD_EXEC
        return os.memfd_create(short, MFD_CLOEXEC | MFD_ALLOW_SEALING)


def _unmapped(name: str, error: OSError) -> Exception:
    return fail(
        "E0805",
        f"machine code {name} cannot be mapped: {error}",
        node=name,
        hint="the system must allow executable memory files (sysctl vm.memfd_noexec=0)",
    )


class Mapped:
    """One shared object. `address(entry)` gives the address of a symbol.

    The descriptor stays open as long as the code is mapped: the linker knows an object by the path it was
    opened with, so that a reused descriptor number would return the older object.
    """

    def __init__(self, name: str, data: bytes | memoryview) -> None:
        promote_openmp()
        self.name = name
        self._fd = sealed(name, data)
        try:
            self._lib: ctypes.CDLL | None = ctypes.CDLL(
                f"/proc/self/fd/{self._fd}", mode=os.RTLD_NOW | os.RTLD_LOCAL
            )
        except OSError as error:
            os.close(self._fd)
            raise _unmapped(name, error) from error

    def address(self, entry: str) -> int:
        """Address of `entry`; E0809 when the object has no such symbol."""
        if self._lib is None:
            raise fail("E0809", f"{self.name} is unmapped already", node=self.name)
        try:
            return ctypes.cast(self._lib[entry], ctypes.c_void_p).value or 0
        except AttributeError as error:
            raise fail(
                "E0809", f"no entry point {entry!r}", node=self.name, hint="recompile the artifact"
            ) from error

    def close(self) -> None:
        """Unmap; idempotent. The caller knows that no thread is inside the code."""
        if self._lib is None:
            return
        handle, self._lib = self._lib._handle, None
        _ctypes.dlclose(handle)
        os.close(self._fd)


_promoted: list[ctypes.CDLL] = []


def promote_openmp() -> None:
    """Make the OpenMP runtime that torch loaded visible to objects that name none themselves (once per
    process)."""
    if _promoted:
        return
    for path in sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*")):
        _promoted.append(ctypes.CDLL(str(path), mode=os.RTLD_GLOBAL | os.RTLD_NOW))
        return
    _promoted.append(ctypes.CDLL(None))
