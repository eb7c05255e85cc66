"""Launching a run of kernels with everything but the addresses decided: one class, two implementations.

A `Segment` is a run of consecutive kernel launches of one plan, bound to sizes: grids and size arguments
are numbers. What remains per call is a list of slots (tensors or raw addresses): inputs, fresh results,
the workspace. A place says where each buffer of the plan lies: slot and byte offset. `dispatcher` gives
the native implementation (`runtime/_native.c`, one call for all launches) when it is built and
ESPER_NATIVE is not 0, else the ctypes one. Both are safe from any number of threads: argument blocks live
on the stack or in thread-local storage.
"""

from __future__ import annotations

import ctypes
import os
import threading
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from runtime.driver import Driver
from runtime.errors import fail
from runtime.mapped import ENTRY

try:
    from runtime import _native  # type: ignore[attr-defined]
except ImportError:
    _native = None

_bind = getattr(_native, "bound", None)
CPU, CUDA = 0, 1
NULL_SLOT, NO_VARIANT = -1, -2
ALIGNMENT = 16
MAX_BUFFERS, MAX_ARGS, MAX_CHOICES = 256, 256, 64  # as in `runtime/_segment.h` and `runtime/_native.c`


@dataclass(frozen=True)
class Choice:
    """One variant: buffers whose address must be a multiple of 16, and the function to launch when they
    are."""

    kernel: str
    aligned: tuple[int, ...]
    function: int
    threads: int
    shared: int
    scratch: int


@dataclass(frozen=True)
class Launch:
    """One launch: the first choice that fits is taken. `args`: (True, buffer number) or (False, value)."""

    group: str
    choices: tuple[Choice, ...]
    args: tuple[tuple[bool, int], ...]
    grid: tuple[int, int, int]


@dataclass(frozen=True)
class Segment:
    """`places`: (slot, byte offset) per buffer of the plan, slot -1 where the segment does not use it;
    `zeros`: (slot, offset, bytes) cleared first; `nullable`: slots that may be empty."""

    slots: int
    places: tuple[tuple[int, int], ...]
    zeros: tuple[tuple[int, int, int], ...]
    nullable: frozenset[int]
    launches: tuple[Launch, ...]


class Dispatch:
    """`dispatch(stream, slots)` launches the segment; `counts()` says how often each choice of each launch
    was taken."""

    native = False

    def __init__(self, segment: Segment, driver: Driver | None, device: int) -> None:
        self.segment, self.driver, self.device = segment, driver, device

    def __call__(self, stream: int, slots: Sequence[Any]) -> None:
        outcome = self.attempt(stream, slots)
        if outcome is not None:
            self._recover(outcome, stream, slots)

    def attempt(self, stream: int, slots: Sequence[Any]) -> tuple[int, int] | None:
        """None when all was launched, else (code, launch number): a CUresult, NULL_SLOT (slot number) or
        NO_VARIANT."""
        raise NotImplementedError

    def counts(self) -> tuple[tuple[int, ...], ...]:
        raise NotImplementedError

    def _recover(self, outcome: tuple[int, int], stream: int, slots: Sequence[Any]) -> None:
        # A thread that never called into CUDA has no current context: nothing was launched, so try once more.
        code, at = outcome
        if at == 0 and self.driver is not None and code in (201, 400):
            self.driver.enter(self.device)
            again = self.attempt(stream, slots)
            if again is None:
                return
            code, at = again
        raise self._failure(code, at)

    def _failure(self, code: int, at: int) -> Exception:
        if code == NULL_SLOT:
            return fail(
                "E0818",
                f"tensor {at} has no memory (meta, fake or freed storage)",
                hint="give it values first: to_empty() and load_state_dict(), or gather what was sharded",
            )
        launch = (
            self.segment.launches[min(at, len(self.segment.launches) - 1)] if self.segment.launches else None
        )
        group = launch.group if launch else "memset"
        if code == NO_VARIANT:
            return fail(
                "E0812",
                f"no kernel of {group} accepts these sizes and addresses",
                node=group,
                hint="pass tensors whose address is a multiple of 16 bytes, or load with fallback='eager'",
            )
        name = self.driver.error_name(code) if self.driver else str(code)
        return fail("E0820", f"launch of {group} failed: {name}", node=group, details={"cuda_error": code})


class NativeDispatch(Dispatch):
    """All launches of the segment in one call of the C extension."""

    native = True

    def __init__(self, segment: Segment, driver: Driver | None, device: int) -> None:
        super().__init__(segment, driver, device)
        assert _native is not None
        self.program = _native.segment(encode(segment, driver))
        self._launch = _native.launch

    def attempt(self, stream: int, slots: Sequence[Any]) -> tuple[int, int] | None:
        return self._launch(self.program, stream, slots)

    def __call__(self, stream: int, slots: Sequence[Any]) -> None:
        outcome = self._launch(self.program, stream, slots)
        if outcome is not None:
            self._recover(outcome, stream, slots)

    def counts(self) -> tuple[tuple[int, ...], ...]:
        assert _native is not None
        flat = iter(_native.counts(self.program))
        return tuple(tuple(next(flat) for _ in launch.choices) for launch in self.segment.launches)


def fits_native(segment: Segment) -> bool:
    """Whether the tables of `runtime/_segment.h` hold it; plans of hundreds of kernels go through ctypes."""
    return max(segment.slots, len(segment.places)) <= MAX_BUFFERS and all(
        len(step.args) <= MAX_ARGS - 8 and len(step.choices) <= MAX_CHOICES for step in segment.launches
    )


def encode(segment: Segment, driver: Driver | None) -> bytes:
    """The segment as 64-bit integers, in the order that `runtime/_native.c` reads."""
    kind = CPU if driver is None else CUDA
    launch = 0 if driver is None else driver.address("cuLaunchKernel")
    clear = 0 if driver is None else driver.address("cuMemsetD8Async")
    words = [
        kind,
        launch,
        clear,
        segment.slots,
        len(segment.places),
        len(segment.zeros),
        len(segment.launches),
    ]
    words += [1 if slot in segment.nullable else 0 for slot in range(segment.slots)]
    for place in segment.places:
        words += place
    for zero in segment.zeros:
        words += zero
    for step in segment.launches:
        words += (*step.grid, len(step.args), len(step.choices))
        for is_buffer, value in step.args:
            words += (1 if is_buffer else 0, value)
        for c in step.choices:
            words += (c.function, c.threads, c.shared, c.scratch, len(c.aligned), *c.aligned)
    return array("q", words).tobytes()


class _Block:
    """Argument memory of one thread: one word per buffer, then the constant arguments; pointers to them
    per launch."""

    def __init__(self, segment: Segment) -> None:
        constants = [value for step in segment.launches for is_buffer, value in step.args if not is_buffer]
        count = len(segment.places)
        self.words = (ctypes.c_int64 * (count + len(constants) + 1))()
        for i, value in enumerate(constants):
            self.words[count + i] = value
        base = ctypes.addressof(self.words)
        null, at = base + 8 * (count + len(constants)), count
        self.arguments: list[Any] = []
        for step in segment.launches:
            addresses = []
            for is_buffer, value in step.args:
                addresses.append(base + 8 * (value if is_buffer else at))
                at += not is_buffer
            scratch = max(c.scratch for c in step.choices)
            self.arguments.append(
                (ctypes.c_void_p * (len(addresses) + scratch))(*addresses, *[null] * scratch)
            )


class PythonDispatch(Dispatch):
    """The same through ctypes: needs nothing built."""

    def __init__(self, segment: Segment, driver: Driver | None, device: int) -> None:
        super().__init__(segment, driver, device)
        self._local = threading.local()
        self._counts = [[0] * len(step.choices) for step in segment.launches]
        self._places = segment.places
        self._run = _cuda_run(driver) if driver is not None else _cpu_run(segment)

    def attempt(self, stream: int, slots: Sequence[Any]) -> tuple[int, int] | None:
        block = getattr(self._local, "block", None)
        if block is None:
            block = self._local.block = _Block(self.segment)
        bases = [slot if slot.__class__ is int else slot.data_ptr() for slot in slots]
        if 0 in bases:
            for number, base in enumerate(bases):
                if not base and number not in self.segment.nullable:
                    return NULL_SLOT, number
        addresses = [bases[slot] + offset if slot >= 0 else 0 for slot, offset in self._places]
        block.words[: len(addresses)] = addresses
        code = self._clear(stream, bases)
        if code:
            return code, 0
        return self._steps(stream, addresses, block)

    def _clear(self, stream: int, bases: list[int]) -> int:
        for slot, offset, size in self.segment.zeros:
            if self.driver is None:
                ctypes.memset(bases[slot] + offset, 0, size)
                continue
            code = self.driver.function("cuMemsetD8Async")(bases[slot] + offset, 0, size, stream)
            if code:
                return code
        return 0

    def _steps(self, stream: int, addresses: list[int], block: _Block) -> tuple[int, int] | None:
        for at, step in enumerate(self.segment.launches):
            if 0 in step.grid:
                continue
            chosen = choose(step, addresses)
            if chosen < 0:
                return NO_VARIANT, at
            self._counts[at][chosen] += 1
            code = self._run(step.choices[chosen], step.grid, stream, block.arguments[at])
            if code:
                return code, at
        return None

    def counts(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(row) for row in self._counts)


def choose(step: Launch, addresses: Sequence[int]) -> int:
    """Number of the first choice whose aligned buffers are aligned; -1 for none."""
    for number, choice in enumerate(step.choices):
        bits = 0
        for buffer in choice.aligned:
            bits |= addresses[buffer]
        if not bits % ALIGNMENT:
            return number
    return -1


def _cuda_run(driver: Driver) -> Callable[[Choice, tuple[int, int, int], int, Any], int]:
    launch = driver.function("cuLaunchKernel")

    def run(choice: Choice, grid: tuple[int, int, int], stream: int, arguments: Any) -> int:
        return launch(choice.function, *grid, choice.threads, 1, 1, choice.shared, stream, arguments, None)

    return run


def _cpu_run(segment: Segment) -> Callable[[Choice, tuple[int, int, int], int, Any], int]:
    entries = {c.function: ENTRY(c.function) for step in segment.launches for c in step.choices}

    def run(choice: Choice, grid: tuple[int, int, int], stream: int, arguments: Any) -> int:
        entries[choice.function](ctypes.addressof(arguments), *grid)
        return 0

    return run


def native_available() -> bool:
    """Whether the C extension is built and not switched off by ESPER_NATIVE=0."""
    return _native is not None and os.environ.get("ESPER_NATIVE", "1") != "0"


def native_segment(words: bytes) -> tuple[Any, Callable[..., Any]]:
    """An encoded segment for the C dispatcher, and the function that launches it."""
    assert _native is not None
    return _native.segment(words), _native.launch


def native_bind(*given: Any) -> tuple[bytes, Any, Any, Any, int, Any] | None:
    """`bind` of `runtime/_bind.h`; None also where the extension was built without it."""
    return _bind(*given) if _bind is not None else None


def native_lookup() -> Callable[..., Any] | None:
    """The C implementation of `runtime.functions.python_lookup`, when it is built and not switched off."""
    return _native.lookup if _native is not None and native_available() else None


def dispatcher(segment: Segment, driver: Driver | None, device: int, native: bool | None = None) -> Dispatch:
    """The faster implementation at hand; `native` forces one."""
    wanted = native_available() if native is None else native
    return (NativeDispatch if wanted and fits_native(segment) else PythonDispatch)(segment, driver, device)
