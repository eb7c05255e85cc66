"""The CUDA driver through its public C interface (libcuda.so.1 by ctypes): load, prime and launch, errors
with names."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy

from runtime.errors import fail

_p, _i, _u, _s, _z = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint, ctypes.c_char_p, ctypes.c_size_t
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (_u,),
    "cuDriverGetVersion": (_p,),
    "cuDeviceGetCount": (_p,),
    "cuDeviceGet": (_p, _i),
    "cuDeviceGetAttribute": (_p, _i, _i),
    "cuDevicePrimaryCtxRetain": (_p, _i),
    "cuDevicePrimaryCtxRelease_v2": (_i,),
    "cuCtxGetCurrent": (_p,),
    "cuCtxSetCurrent": (_p,),
    "cuCtxSynchronize": (),
    "cuLibraryLoadData": (_p, _p, _p, _p, _u, _p, _p, _u),
    "cuLibraryUnload": (_p,),
    "cuLibraryGetKernel": (_p, _p, _s),
    "cuKernelGetFunction": (_p, _p),
    "cuFuncSetAttribute": (_p, _i, _i),
    "cuLaunchKernel": (_p, _u, _u, _u, _u, _u, _u, _u, _p, _p, _p),
    "cuMemsetD8Async": (_p, ctypes.c_ubyte, _z, _p),
    "cuGetErrorName": (_i, _p),
}
COMPUTE_MAJOR, COMPUTE_MINOR = 75, 76
MAX_SHARED_OPTIN = 97
FUNC_MAX_DYNAMIC_SHARED = 8
SHARED_WITHOUT_OPTIN = 48 * 1024
INVALID_CONTEXT, INVALID_HANDLE = 201, 400
# After these the whole device context is lost for the process.
STICKY = frozenset({700, 702, 704, 710, 714, 715, 716, 717, 718, 719})


class Driver:
    """One loaded libcuda. Cheap to share; all methods are safe from any thread."""

    def __init__(self, path: str = "libcuda.so.1") -> None:
        try:
            self._lib = ctypes.CDLL(path)
        except OSError as error:
            raise fail(
                "E0801",
                f"the CUDA driver cannot be loaded: {error}",
                hint="install the NVIDIA driver, or load a cpu artifact",
            ) from error
        self._call: dict[str, Callable[..., int]] = {}
        self._addresses: dict[str, int] = {}
        for name, kinds in _SIGNATURES.items():
            self._bind(name, kinds)
        self._contexts: dict[int, int] = {}
        self.retired: list[tuple[int, int]] = []
        self.check(self._call["cuInit"](0), "cuInit")
        self.version = self._get_int("cuDriverGetVersion")

    def _bind(self, name: str, kinds: tuple[Any, ...]) -> None:
        try:
            function = self._lib[name]
        except AttributeError as error:
            raise fail(
                "E0804",
                f"the CUDA driver lacks {name}",
                node=name,
                hint="driver 525 (CUDA 12) or newer is needed",
            ) from error
        function.argtypes, function.restype = kinds, ctypes.c_int
        self._call[name] = function

    def function(self, name: str) -> Callable[..., int]:
        """The raw driver function (returns CUresult)."""
        return self._call[name]

    def address(self, name: str) -> int:
        """Address of a driver function, for the native dispatcher."""
        if name not in self._addresses:
            self._addresses[name] = ctypes.cast(self._lib[name], ctypes.c_void_p).value or 0
        return self._addresses[name]

    def error_name(self, code: int) -> str:
        """CUDA_ERROR_... of a CUresult."""
        text = ctypes.c_char_p()
        if self._call["cuGetErrorName"](code, ctypes.byref(text)) or not text.value:
            return f"CUDA error {code}"
        return text.value.decode()

    def check(self, code: int, what: str, node: str | None = None) -> None:
        """E0803 with the driver's own name of the error unless `code` is success."""
        if code:
            raise fail(
                "E0803",
                f"{what}: {self.error_name(code)} ({code})",
                node=node,
                hint="`python -m runtime doctor` shows driver, card and what this artifact needs",
                details={"cuda_error": code},
            )

    def _get_int(self, name: str, *args: Any) -> int:
        out = ctypes.c_int()
        self.check(self._call[name](ctypes.byref(out), *args), name)
        return out.value

    def _get_pointer(self, name: str, *args: Any, node: str | None = None) -> int:
        out = ctypes.c_void_p()
        self.check(self._call[name](ctypes.byref(out), *args), name, node)
        return out.value or 0

    def device_count(self) -> int:
        """Cards that the driver shows to this process."""
        return self._get_int("cuDeviceGetCount")

    def attribute(self, which: int, device: int) -> int:
        """cuDeviceGetAttribute."""
        return self._get_int("cuDeviceGetAttribute", which, self._get_int("cuDeviceGet", device))

    def capability(self, device: int) -> int:
        """Compute capability as one number: 90 for an H100."""
        return 10 * self.attribute(COMPUTE_MAJOR, device) + self.attribute(COMPUTE_MINOR, device)

    def context(self, device: int) -> int:
        """The primary context of a device (torch's own), retained once per process."""
        if device not in self._contexts:
            handle = self._get_int("cuDeviceGet", device)
            self._contexts[device] = self._get_pointer("cuDevicePrimaryCtxRetain", handle)
        return self._contexts[device]

    def enter(self, device: int) -> None:
        """Make the primary context of `device` current in this thread, if it is not."""
        wanted = self.context(device)
        if self._get_pointer("cuCtxGetCurrent") != wanted:
            self.check(self._call["cuCtxSetCurrent"](wanted), "cuCtxSetCurrent")

    @contextmanager
    def inside(self, device: int) -> Iterator[None]:
        """The primary context of `device` for a while; then the thread's own again, since torch takes its
        current device from it."""
        before, wanted = self._get_pointer("cuCtxGetCurrent"), self.context(device)
        if before == wanted:
            yield
            return
        self.check(self._call["cuCtxSetCurrent"](wanted), "cuCtxSetCurrent")
        try:
            yield
        finally:
            self.check(self._call["cuCtxSetCurrent"](before), "cuCtxSetCurrent")

    def bury(self) -> None:
        """Unload what was given up, once nothing of it can be running any more."""
        while self.retired:
            device, handle = self.retired.pop()
            with self.inside(device):
                self.check(self._call["cuCtxSynchronize"](), "cuCtxSynchronize")
                self._call["cuLibraryUnload"](handle)


class Library:
    """One cubin loaded on one device, its kernels primed so that nothing is left for the first launch."""

    def __init__(self, driver: Driver, device: int, name: str, data: bytes | memoryview) -> None:
        self.driver, self.device, self.name = driver, device, name
        self._handle = 0
        # The verified bytes themselves, by address: no copy between check and use.
        self._data = numpy.frombuffer(data, dtype=numpy.uint8)
        address = self._data.__array_interface__["data"][0]
        with driver.inside(device):
            driver.bury()
            self._handle = driver._get_pointer(
                "cuLibraryLoadData", address, None, None, 0, None, None, 0, node=name
            )

    def find(self, entry: str) -> int:
        """The kernel of that name, not yet loaded. E0803 when there is none."""
        return self.driver._get_pointer("cuLibraryGetKernel", self._handle, entry.encode(), node=entry)

    def prime(self, kernels: Sequence[tuple[int, str, int]]) -> list[int]:
        """Launchable handles of kernels (found, entry, bytes of dynamic shared memory to allow), their code
        on the device."""
        driver, made = self.driver, []
        if not self._handle:
            raise fail("E0809", f"{self.name} is unloaded already", node=kernels[0][1] if kernels else None)
        with driver.inside(self.device):
            for kernel, entry, shared in kernels:
                made.append(driver._get_pointer("cuKernelGetFunction", kernel, node=entry))
                if shared > SHARED_WITHOUT_OPTIN:
                    self._allow(made[-1], entry, shared)
        return made

    def _allow(self, function: int, entry: str, shared: int) -> None:
        limit = self.driver.attribute(MAX_SHARED_OPTIN, self.device)
        if shared > limit:
            raise fail("E0802", f"needs {shared} bytes of shared memory, this card has {limit}", node=entry)
        code = self.driver.function("cuFuncSetAttribute")(function, FUNC_MAX_DYNAMIC_SHARED, shared)
        self.driver.check(code, "cuFuncSetAttribute", entry)

    def close(self) -> None:
        """Give the code up; idempotent. It is unloaded at the next load: launches of it may still be under
        way, and neither waiting for them nor unloading is allowed while a graph is captured, which may be
        now."""
        if self._handle:
            handle, self._handle = self._handle, 0
            self.driver.retired.append((self.device, handle))


_drivers: dict[str, Driver] = {}


def driver(path: str = "libcuda.so.1") -> Driver:
    """The process-wide driver, opened on first use. E0801 without one."""
    if path not in _drivers:
        _drivers[path] = Driver(path)
    return _drivers[path]
