"""The CUDA path without a card: a stub driver records launches, parameters, contexts, errors."""

from __future__ import annotations

import ctypes
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from library.launch import LaunchManifest
from runtime import timing
from runtime.code import Code, load_code
from runtime.dispatch import Choice, Launch, Segment, dispatcher, encode
from runtime.driver import Driver
from tests.runtime import artifacts as a
from tests.runtime.test_executor import BOTH, refusal


class Record(ctypes.Structure):
    _fields_ = [
        ("function", ctypes.c_uint64),
        ("stream", ctypes.c_uint64),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared", ctypes.c_uint32),
        ("param", ctypes.c_uint64 * 16),
    ]


class Stub:
    def __init__(self, path: Path) -> None:
        self.lib = ctypes.CDLL(str(path))
        self.driver = Driver(str(path))

    def number(self, name: str) -> ctypes.c_int:
        return ctypes.c_int.in_dll(self.lib, name)

    @property
    def log(self) -> list[Record]:
        found = (Record * 4096).in_dll(self.lib, "stub_log")
        return list(found[: self.number("stub_count").value])


@pytest.fixture(scope="session")
def stub_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("stub") / "libcuda.so.1"
    source = Path(__file__).with_name("stub_cuda.c")
    subprocess.run(["gcc", "-O2", "-shared", "-fPIC", "-w", "-o", str(out), str(source)], check=True)
    return out


@pytest.fixture
def stub(stub_path: Path) -> Iterator[Stub]:
    found = Stub(stub_path)
    for name, value in (
        ("stub_count", 0),
        ("stub_fail_at", -1),
        ("stub_memsets", 0),
        ("stub_nparams", 5),
    ):
        found.number(name).value = value
    found.driver.enter(0)
    yield found
    found.number("stub_load_code").value = 0


def launch_of(shared: int = 0, scratch: int = 2, **changes: Any) -> Launch:
    choice = Choice("k", (), 0xABC, 256, shared, scratch)
    return replace(Launch("g", (choice,), ((True, 0), (False, 7), (True, 1)), (5, 2, 1)), **changes)


def segment(*launches: Launch, **changes: Any) -> Segment:
    found = Segment(2, ((0, 0), (1, 64)), (), frozenset(), launches or (launch_of(),))
    return replace(found, **changes)


@BOTH
def test_parameters_arrive_as_declared(stub: Stub, native: bool) -> None:
    run = dispatcher(segment(), stub.driver, 0, native)
    run(0x77, [0x1000, 0x2000])
    (row,) = stub.log
    assert (row.function, row.stream, list(row.grid), list(row.block)) == (
        0xABC,
        0x77,
        [5, 2, 1],
        [256, 1, 1],
    )
    assert list(row.param[:5]) == [0x1000, 7, 0x2040, 0, 0]
    x = torch.empty(4)
    run(0, [x, x])
    assert stub.log[1].param[0] == x.data_ptr() and stub.log[1].param[2] == x.data_ptr() + 64
    assert run.counts() == ((2,),)


@BOTH
def test_the_first_aligned_choice_is_taken(stub: Stub, native: bool) -> None:
    both = (Choice("fast", (0, 1), 1, 128, 99, 2), Choice("any", (), 2, 64, 0, 2))
    run = dispatcher(segment(launch_of(choices=both)), stub.driver, 0, native)
    run(0, [0x1000, 0x2000])
    run(0, [0x1008, 0x2000])
    run(0, [0x1000, 0x2004])
    assert [(r.function, r.block[0], r.shared) for r in stub.log] == [(1, 128, 99), (2, 64, 0), (2, 64, 0)]
    assert run.counts() == ((1, 2),)
    only = dispatcher(segment(launch_of(choices=both[:1])), stub.driver, 0, native)
    refusal("E0812", only, 0, [0x1008, 0x2000])


@BOTH
def test_empty_grids_launch_nothing_and_zeros_are_cleared(stub: Stub, native: bool) -> None:
    run = dispatcher(segment(launch_of(grid=(0, 1, 1)), zeros=((1, 0, 16),)), stub.driver, 0, native)
    run(0, [0x1000, 0x2000])
    assert not stub.log and stub.number("stub_memsets").value == 1


@BOTH
def test_a_slot_without_memory_is_refused(stub: Stub, native: bool) -> None:
    run = dispatcher(segment(), stub.driver, 0, native)
    refusal("E0818", run, 0, [0x1000, torch.empty(3, device="meta")])
    dispatcher(segment(nullable=frozenset({1})), stub.driver, 0, native)(0, [0x1000, torch.empty(0)])
    assert len(stub.log) == 1


@BOTH
def test_a_thread_without_context_gets_one(stub: Stub, native: bool) -> None:
    run, problems = dispatcher(segment(), stub.driver, 0, native), []

    def work() -> None:
        try:
            run(0, [0x1000, 0x2000])
        except Exception as error:
            problems.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not problems and len(stub.log) == 1


@BOTH
def test_launch_errors_have_names(stub: Stub, native: bool) -> None:
    run = dispatcher(segment(launch_of(), launch_of(group="second")), stub.driver, 0, native)
    stub.number("stub_fail_at").value, stub.number("stub_fail_code").value = 1, 719
    error = refusal("E0820", run, 0, [0x1000, 0x2000])
    assert (
        error.node == "second" and error.details["cuda_error"] == 719 and "CUDA_ERROR_STUB" in error.message
    )


def test_native_refuses_malformed_programs(stub: Stub) -> None:
    native = pytest.importorskip("runtime._native")
    good = encode(segment(), stub.driver)
    native.segment(good)
    for cut in range(0, len(good), 8):
        with pytest.raises(ValueError):
            native.segment(good[:cut])
    words = list(memoryview(good).cast("q"))
    for at in range(3, len(words)):
        for value in (-5, 1 << 40):
            changed = words[:at] + [value] + words[at + 1 :]
            data = b"".join(w.to_bytes(8, "little", signed=True) for w in changed)
            try:
                native.segment(data)  # accepted or refused, never a crash
            except ValueError:
                continue
    with pytest.raises(TypeError):
        native.launch(native.segment(good), 0, (1, 2))
    with pytest.raises(IndexError):
        native.launch(native.segment(good), 0, [1])


def cuda_code(stub: Stub, launch: LaunchManifest) -> Code:
    return load_code(launch, {"code.so": b"cubin"}, torch.device("cuda", 1), name="x", cuda=stub.driver)


def test_loading_primes_every_kernel(stub: Stub) -> None:
    loads, attributes = stub.number("stub_loads").value, stub.number("stub_attributes").value
    big = replace(a.KERNELS[0], shared=100_000)
    launch = LaunchManifest(a.INTERFACE, (), (big, *a.KERNELS[1:]))
    code = cuda_code(stub, launch)
    assert stub.number("stub_loads").value == loads + 1 and not code.address
    first = code.address[big.name]
    assert stub.number("stub_attributes").value == attributes + 1 and len(code.address) == 1
    code.prime()
    assert code.address[big.name] == first and stub.number("stub_attributes").value == attributes + 1
    assert len(set(code.address.values())) == len(launch.kernels)
    late = cuda_code(stub, launch)
    late.close()
    refusal("E0809", late.prime)
    before = stub.number("stub_unloads").value
    code.close()
    code.close()
    assert stub.number("stub_unloads").value == before  # launches may be under way: not now
    stub.driver.bury()
    assert stub.number("stub_unloads").value == before + 2 and not stub.driver.retired


def test_loading_on_another_card_leaves_the_current_one(stub: Stub) -> None:
    stub.driver.enter(0)
    cuda_code(stub, a.scale()).prime()
    assert stub.driver._get_pointer("cuCtxGetCurrent") == stub.driver.context(0) != stub.driver.context(1)


def test_what_a_load_asks_of_the_driver(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two looks at the context, nothing set where it is current, and two calls a kernel."""
    calls: list[str] = []

    def counted(name: str, call: Any) -> Any:
        return lambda *values: (calls.append(name), call(*values))[1]

    for name, call in list(stub.driver._call.items()):
        monkeypatch.setitem(stub.driver._call, name, counted(name, call))
    stub.driver.enter(1)
    calls.clear()
    cuda_code(stub, a.scale()).prime()
    kernels = len(a.scale().kernels)
    assert calls == [
        "cuCtxGetCurrent", "cuLibraryLoadData", *["cuLibraryGetKernel"] * kernels,
        "cuCtxGetCurrent", *["cuKernelGetFunction"] * kernels,
    ]  # fmt: skip


def test_loading_errors_have_names(stub: Stub) -> None:
    stub.number("stub_load_code").value = 209
    assert refusal("E0803", cuda_code, stub, a.scale()).exit_code == 16
    absent = LaunchManifest(a.INTERFACE, (), (a.kernel("absent", "p"),))
    assert "CUDA_ERROR_NOT_FOUND" in refusal("E0803", cuda_code, stub, absent).message
    huge = LaunchManifest(a.INTERFACE, (), (replace(a.KERNELS[0], shared=1 << 20),))
    refusal("E0802", cuda_code(stub, huge).prime)
    lost = LaunchManifest(a.INTERFACE, (), (replace(a.KERNELS[0], blob="nowhere"),))
    refusal("E0809", cuda_code, stub, lost)
    refusal("E0801", Driver, "libnothere.so.9")


def test_host_cost_of_launching(stub: Stub) -> None:
    """Three launches of one segment: the native dispatcher costs less than half of the ctypes one."""
    pytest.importorskip("runtime._native")
    three = segment(*[launch_of(group=str(i)) for i in range(3)])
    x, y = torch.empty(8), torch.empty(8)
    work = {}
    for name, native in (("native", True), ("python", False)):
        run = dispatcher(three, stub.driver, 0, native)
        work[name] = lambda run=run: run(0, [x, y])
    found = timing.cpu_times(work, rounds=9, at_least_us=2000)
    stub.number("stub_count").value = 0
    assert min(found["native"].samples) < 0.5 * min(found["python"].samples), found
