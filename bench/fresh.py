"""One implementation of one block in a fresh process: what loading it costs, and its first step.

    python -m bench.fresh JOB        JOB: JSON with what `bench.side` says

Before the clock starts: torch, the device's context and library handles, the inputs. After it: everything
that an implementation needs to be there, then a forward with backward (forward alone where the peer has no
backward). The hooks count what could be a compilation: processes started, frames that Dynamo compiled,
kernels that Triton's just-in-time compiler built, graphs that Inductor did not find in its cache.
"""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

Fn = Callable[..., Any]
START = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty")


def _esper(job: dict[str, Any], args: list[Any]) -> Fn:
    import runtime

    return runtime.load(job["artifact"], functional=True, allow_unvalidated=job["unproven"])


def _plain(job: dict[str, Any]) -> Fn:
    from bench.blocks import named

    return named(job["block"]).fn


def _eager(job: dict[str, Any], args: list[Any]) -> Fn:
    return _plain(job)


def _compile(job: dict[str, Any], args: list[Any]) -> Fn:
    import torch

    return torch.compile(_plain(job), dynamic=False)


def _mega(job: dict[str, Any], args: list[Any]) -> Fn:
    import torch

    if not job["prepare"]:
        torch.compiler.load_cache_artifacts(Path(job["folder"], "artifacts").read_bytes())
    return _compile(job, args)


def _aot(job: dict[str, Any], args: list[Any]) -> Fn:
    import torch

    path = Path(job["folder"], "function")
    config: Any = importlib.import_module("torch._dynamo.config")
    config.enable_aot_compile = True  # the default from torch 2.12 on
    if job["prepare"]:
        made: Any = torch.compile(_plain(job), dynamic=False, fullgraph=True)
        found = made.aot_compile((tuple(args), {}))
        found.save_compiled_function(str(path))
        return found
    with path.open("rb") as file:
        return torch.compiler.load_compiled_function(file)


def _aoti(job: dict[str, Any], args: list[Any]) -> Fn:
    import torch
    from torch import _inductor as inductor

    path = str(Path(job["folder"], "model.pt2"))
    if job["prepare"]:
        fn = _plain(job)

        class Host(torch.nn.Module):
            def forward(self, *values: Any) -> Any:
                return fn(*values)

        with torch.no_grad():
            program = torch.export.export(Host(), tuple(a.detach() for a in args))
            inductor.aoti_compile_and_package(program, package_path=path)
    return inductor.aoti_load_package(path)


def _triton(job: dict[str, Any], args: list[Any]) -> Fn:
    from bench.jit import rmsnorm_residual

    return rmsnorm_residual


def _kernels(job: dict[str, Any], args: list[Any]) -> Fn:
    import kernels  # type: ignore[import-not-found]

    return getattr(kernels.get_local_kernel(Path(job["folder"], "repository")), job["block"])


LOADERS: dict[str, Callable[[dict[str, Any], list[Any]], Fn]] = {
    "esper": _esper,
    "eager": _eager,
    "torch.compile": _compile,
    "torch.compile, cache file": _mega,
    "aot_compile": _aot,
    "AOTInductor": _aoti,
    "Triton JIT": _triton,
    "HF kernels": _kernels,
}


class Without:
    """Finds modules but Triton, as if it were not installed: for the rows that must not need it."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        return None if name.split(".")[0] == "triton" else PathFinder.find_spec(name, path, target)


def compilations(started: list[str]) -> dict[str, int]:
    """What was counted since the clock started."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    counters: Any = dynamo.counters if dynamo else {}
    frames = counters["frames"] if "frames" in counters else {}
    inductor = counters["inductor"] if "inductor" in counters else {}
    return {
        "processes": len(started),
        "dynamo_frames": int(frames.get("ok", 0)),
        "inductor_misses": int(inductor.get("fxgraph_cache_miss", 0)),
        "triton_kernels": len(_built),
    }


_built: list[str] = []


def _watch_triton() -> None:
    """Triton tells when it built a kernel anew; before 3.4 it does not, and nothing is counted."""
    try:
        from triton import knobs

        knobs.runtime.jit_post_compile_hook = lambda **facts: _built.append(str(facts.get("repr", "")))
    except (ImportError, AttributeError):
        return


def step(fn: Fn, args: list[Any], flow: Any, backward: bool) -> None:
    import torch

    if backward:
        torch.autograd.grad(fn(*args), [a for a in args if a.requires_grad], flow)
    else:
        with torch.no_grad():
            fn(*[a.detach() for a in args])
    if flow.is_cuda:
        torch.cuda.synchronize()


def _wait_for(turn: str) -> None:
    """The lock is kept to the end of the process."""
    if turn:
        fcntl.flock(os.open(turn, os.O_RDWR | os.O_CREAT, 0o600), fcntl.LOCK_EX)


def measure(job: dict[str, Any]) -> dict[str, Any]:
    began = time.perf_counter()
    import torch

    found: dict[str, Any] = {"import_torch_ms": 1e3 * (time.perf_counter() - began)}
    from bench.blocks import named

    torch.set_num_threads(job["threads"] or torch.get_num_threads())
    device, block = torch.device(job["device"]), named(job["block"])
    began = time.perf_counter()
    x = torch.ones(256, 256, device=device, requires_grad=True)
    (x @ x).sum().backward()
    found["context_ms"] = 1e3 * (time.perf_counter() - began)
    args = block.inputs(job["sizes"], device)
    flow = torch.randn_like(block.fn(*[a.detach() for a in args]))
    # What torch imports and reads for its own first gradient is nobody's first step.
    step(lambda y: y * 2, [flow.detach().clone().requires_grad_()], flow, job["backward"])
    if device.type == "cuda":
        torch.cuda.synchronize()
    if job["impl"] == "Triton JIT":
        _watch_triton()
    _wait_for(job.get("turn", ""))
    started: list[str] = []
    sys.addaudithook(lambda event, _: started.append(event) if event in START else None)
    marks = [time.perf_counter()]
    fn = LOADERS[job["impl"]](job, args)
    marks.append(time.perf_counter())
    for _ in range(3):
        step(fn, args, flow, job["backward"])
        marks.append(time.perf_counter())
    spans = [1e3 * (b - a) for a, b in zip(marks, marks[1:], strict=False)]
    names = ("load_ms", "first_step_ms", "second_step_ms", "third_step_ms")
    found |= dict(zip(names, spans, strict=True)) | {"total_ms": spans[0] + spans[1]}
    if job["prepare"] and job["impl"] == "torch.compile, cache file":
        saved = torch.compiler.save_cache_artifacts()
        assert saved is not None
        Path(job["folder"], "artifacts").write_bytes(saved[0])
    return {**found, **compilations(started), "triton": "triton" in sys.modules}


def main() -> int:
    job = json.loads(sys.argv[1])
    if job["impl"] == "esper":
        sys.meta_path[:] = [Without if finder is PathFinder else finder for finder in sys.meta_path]
    print(json.dumps(measure(job)), flush=True)
    os._exit(0)  # compile workers and their pools are not waited for


if __name__ == "__main__":
    sys.exit(main())
