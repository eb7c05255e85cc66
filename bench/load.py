"""What loading costs: from the cache, past it in pieces, and the first step of a fresh process that has no
compiler, no Triton and no home to write to.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

import runtime
from bench.blocks import Block
from bench.results import ROOT, figure
from library.platform import Platform
from library.records import VALIDATED
from library.store import Library
from runtime import loader, system, timing
from runtime.code import load_code
from runtime.driver import Driver, driver
from runtime.executor import Program
from runtime.timing import Timing

ROUNDS, CACHED_CALLS, FRESH = 300, 200, 3
CACHED_US, UNCACHED_US, FIRST_STEP_MS = 10.0, 1000.0, 50.0
NOWHERE = "/proc/esper-no-such-home"  # not even root can make a directory there

# Runs in the fresh process. Everything that could start a compiler is counted by the audit hook.
FIRST_STEP = """
import importlib.machinery, json, os, sys, time
sys.dont_write_bytecode = True
# As if Triton were not installed; torch looks for it when the card is first used, and may find none.
class Without:
    def find_spec(name, path=None, target=None):
        if name.split(".")[0] == "triton":
            return None
        return importlib.machinery.PathFinder.find_spec(name, path, target)
sys.meta_path = [Without if f is importlib.machinery.PathFinder else f for f in sys.meta_path]
job = json.loads(sys.argv[1])
start = time.perf_counter()
import torch
torch_s = time.perf_counter() - start
device = job["device"]
start = time.perf_counter()
x = torch.ones(256, 256, device=device)
(x @ x).sum().item()
context_s = time.perf_counter() - start
generator = torch.Generator().manual_seed(0)
def made(shape, dtype):
    return torch.randn(shape, generator=generator).to(device, getattr(torch, dtype))
args = [made(*leaf).requires_grad_() for leaf in job["leaves"]]
flow = made(*job["out"])
# torch's own first backward starts the engine's threads and reads torch's own kernels, those of the loss too.
start = time.perf_counter()
(flow.detach().requires_grad_() * flow).sum().backward()
if device == "cuda":
    torch.cuda.synchronize()
backward_s = time.perf_counter() - start
if job["turn"]:  # only the measured part is alone
    import fcntl
    fcntl.flock(os.open(job["turn"], os.O_RDWR | os.O_CREAT, 0o600), fcntl.LOCK_EX)
started = []
watched = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty")
sys.addaudithook(lambda event, _: started.append(event) if event in watched else None)
times = {}
begin = last = time.perf_counter()
def mark(name):
    global last
    now = time.perf_counter()
    times[name], last = 1e3 * (now - last), now
import runtime
load = runtime.load  # what of it is imported late is imported here
mark("import_runtime_ms")
block = load(job["name"], functional=True, allow_unvalidated=job["unproven"])
mark("load_ms")
out = block(*args)
mark("forward_ms")
# As a training loop asks: a scalar. (With cotangents of one's own torch first imports its symbolic shapes.)
(out * flow).sum().backward()
if device == "cuda":
    torch.cuda.synchronize()
mark("backward_ms")
total = sum(times.values()) - times["import_runtime_ms"]
try:
    os.makedirs(os.path.expanduser("~/.triton"))
    home = "writable"
except OSError:
    home = "read-only"
import shutil
print(json.dumps({"first_step_ms": total, **times, "import_torch_ms": 1e3 * torch_s,
    "context_ms": 1e3 * context_s, "torch_backward_ms": 1e3 * backward_s,
    "processes_started": started, "triton": "triton" in sys.modules, "home": home,
    "compilers": [c for c in ("gcc", "cc", "clang", "nvcc", "ptxas") if shutil.which(c)],
    "launches": block.report()["counters"]["launches"]}))
"""


def measure(library: Library, name: str, block: Block, unproven: bool = False) -> dict[str, Any]:
    """Figures and details for one artifact, with the block's first size."""
    loaded = runtime.load(name, library=library, functional=True, allow_unvalidated=unproven)
    program = loaded.program
    sizes = block.sizes[0]
    dims = program.dims_of([leaf.dims(sizes) for leaf in block.leaves])
    proven = library.record(name).state == VALIDATED  # an unproven one is read strictly: another path
    details: dict[str, Any] = {"artifact": name, "bytes": loaded._handle.entry.nbytes, "proven": proven}
    found: dict[str, Any] = {}
    whole = _sampled(lambda: _fresh(library, name, program, dims, unproven), ROUNDS)
    details["uncached"] = whole.to_json()
    details["pieces"] = _pieces(library, name, program, dims, unproven)
    found["load_uncached_us_p50"] = figure(whole.median, "us", UNCACHED_US, lo=whole.low, hi=whole.high)
    found["load_uncached_us_p99"] = figure(whole.p99, "us", None)
    where: dict[str, Any] = {"library": library, "allow_unvalidated": unproven}
    cached = {
        "entry": lambda: loader.load_entry(name, **where),
        "module": lambda: runtime.load(name, functional=True, **where),
        "with_parameters": lambda: runtime.load(name, **where),
    }
    for kind, fn in cached.items():
        one = _sampled(fn, CACHED_CALLS * 5)
        details[f"cached_{kind}"] = one.to_json()
        found[f"load_cached_{kind}_us_p50"] = figure(one.median, "us", CACHED_US if kind == "entry" else None)
        found[f"load_cached_{kind}_us_p99"] = figure(one.p99, "us", None)
    with tempfile.TemporaryDirectory(prefix="esper-turn-") as place, ThreadPoolExecutor(_width()) as pool:
        turn = str(Path(place, "turn"))
        tried = [pool.submit(first_step, library, name, block, unproven, turn) for _ in range(FRESH)]
        fresh: list[Mapping[str, Any]] = [one.result() for one in tried]
    details["fresh"] = fresh
    return {"figures": {**found, **_fresh_figures(fresh)}, "details": details}


def _width() -> int:
    """Fresh processes at a time; with few cores the import of one would disturb what another measures."""
    return FRESH if (os.cpu_count() or 1) >= 8 else 1


def _sampled(fn: Callable[[], Any], rounds: int) -> Timing:
    """One call a sample: a 99th percentile wants single calls, not means of many."""
    samples = []
    with timing.quiet():
        for turn in range(rounds + 20):
            begin = time.perf_counter_ns()
            held = fn()
            spent = (time.perf_counter_ns() - begin) / 1000
            del held
            _let_go()
            if turn >= 20:
                samples.append(spent)
    return Timing(tuple(samples))


def _let_go() -> None:
    """Unload what was given up, which the next load would do: a first one finds nothing to unload."""
    if torch.cuda.is_available():
        driver().bury()


def _fresh(library: Library, name: str, program: Program, dims: tuple[int, ...], unproven: bool) -> Any:
    """Read, verified, decoded, handed to the driver, every kernel primed and one size bound, past the
    process's cache."""
    entry = loader.load_fresh(name, program.device, library=library, allow_unvalidated=unproven)
    entry.program.code.prime()
    entry.program.ready("inference", dims)
    return entry


def _pieces(
    library: Library, name: str, program: Program, dims: tuple[int, ...], unproven: bool
) -> dict[str, Any]:
    """The same in steps; medians in microseconds."""
    at = int(program.device.index or 0)
    spans = walked(library, name, program.device, lambda kind: system.machine(kind, at), dims, 60, unproven)
    return {what: {"p50": statistics.median(s), "p99": Timing(tuple(s)).p99} for what, s in spans.items()}


def walked(
    library: Library, name: str, device: torch.device, machine_of: Callable[[str], Platform],
    dims: tuple[int, ...], rounds: int, unproven: bool = False, cuda: Driver | None = None,
) -> dict[str, list[float]]:  # fmt: skip
    """Microseconds of every step of `rounds` loads past the process's cache. `machine_of`: what the kind of
    artifact meets here; `cuda`: another driver than the one that is there."""
    spans: dict[str, list[float]] = {}

    def timed(what: str, fn: Callable[[], Any]) -> Any:
        begin = time.perf_counter_ns()
        out = fn()
        spans.setdefault(what, []).append((time.perf_counter_ns() - begin) / 1000)
        return out

    def once() -> None:
        got = timed("read_and_verify", lambda: library.load(name, allow_unvalidated=unproven))
        machine = timed("machine", lambda: machine_of(got.record.kind))
        timed("check_machine", lambda: loader.check_machine(got.container.head, machine, False))
        launch = timed("decode", lambda: loader.launch_of(got))
        code = timed("driver", lambda: load_code(launch, got.container.blobs, device, name=name, cuda=cuda))
        made = timed("program", lambda: Program(name, launch, code))
        timed("prime", code.prime)
        timed("bind", lambda: made.ready("inference", dims))
        code.close()
        cuda.bury() if cuda is not None else _let_go()

    with timing.quiet():
        for _ in range(rounds):
            once()
    return spans


def first_step(library: Library, name: str, block: Block, unproven: bool, turn: str = "") -> dict[str, Any]:
    """One forward and backward in a fresh process; {"error": ...} when it does not get there. `turn`: a lock
    to wait for before the clock starts."""
    sizes = block.sizes[0]
    job = {
        "name": name,
        "unproven": unproven,
        "turn": turn,
        "device": "cpu" if "-cpu" in name else "cuda",
        "leaves": [[leaf.dims(sizes), leaf.dtype] for leaf in block.leaves],
        "out": [tuple(sizes[n] if isinstance(n, str) else n for n in block.result), block.leaves[0].dtype],
    }
    done = subprocess.run(
        [sys.executable, "-c", FIRST_STEP, json.dumps(job)],
        cwd=ROOT, env=bare_environment(library), capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    if done.returncode:
        return {"error": done.stderr.strip()[-800:]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def bare_environment(library: Library) -> dict[str, str]:
    """No compiler on PATH, no home that can be written; the library and its keys by name."""
    keep = ("LD_LIBRARY_PATH", "PYTHONPATH", "CUDA_VISIBLE_DEVICES", "ESPER_KEYS", "TMPDIR", "LANG")
    kept = {k: v for k, v in os.environ.items() if k in keep or k.startswith("NVIDIA_")}
    return {**kept, "PATH": "/nonexistent", "HOME": NOWHERE, "ESPER_LIBRARY": str(library.home)}


def _fresh_figures(fresh: list[Mapping[str, Any]]) -> dict[str, Any]:
    good = [f for f in fresh if "error" not in f]
    if not good:
        return {
            "first_step_ms": figure(None, "ms", FIRST_STEP_MS, error=str(fresh[0].get("error", ""))[-300:])
        }
    total = statistics.median(f["first_step_ms"] for f in good)
    imports = statistics.median(f["import_runtime_ms"] for f in good)
    started = max(len(f["processes_started"]) for f in good)
    bare = all(not f["triton"] and not f["compilers"] and f["home"] == "read-only" for f in good)
    return {
        "first_step_ms": figure(total, "ms", FIRST_STEP_MS),
        "import_runtime_ms": figure(imports, "ms"),
        "first_step_processes_started": figure(started, "count", 0),
        "first_step_without_compiler_triton_home": figure(float(bare), "bool", 1.0, at_least=True),
        "fresh_processes_failed": figure(len(fresh) - len(good), "count", 0),
    }
