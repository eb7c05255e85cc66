"""Kernel plans to machine code, in sandboxed workers: Triton text -> PTX -> cubin, or C text -> shared
object.
"""

from __future__ import annotations

import base64
import importlib.metadata
import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from esper_ir.diagnostics import EsperError
from forge.ctoolchain import compile_c, compiler_version, find_compiler
from forge.emit import c as emit_c
from forge.emit import triton as emit_triton
from forge.emit.triton_scalars import POINTER_TYPE
from forge.emit.writer import size_name
from forge.lower import Kernels, KernelSource
from forge.lowered import DESCRIPTOR_BYTES
from forge.plan import KernelPlan, RowTile
from forge.ptx import entries
from forge.target import Target
from forge.work import Built
from library.launch import Kernel, Param
from runtime.sandbox import Limits, run_worker

# Contraction of a*b+c to one rounding: stated, because Triton's default changes between versions.
FP_FUSION = True
SCRATCH_POINTERS = 2
"""Behind the sizes; the first is the workspace of a kernel that makes descriptors, else both are null."""
DESCRIPTORS_PTX = 86
"""The first PTX version in which a tensor is loaded as Triton does it."""
KERNELS_PER_WORKER = 4
BUILD_LIMITS = Limits(seconds=600.0, memory_bytes=8 << 30)


def build(kernels: Kernels, target: Target) -> Built:
    """Build every kernel of an artifact."""
    sources = tuple(kernels.by_key.values())
    if not sources:
        return Built((), (), {}, {"fp_fusion": FP_FUSION})
    return _build_c(sources, target) if target.kind == "cpu" else _build_triton(sources, target)


def toolchain_of(target: Target) -> str:
    """The compiler that measurements of a target belong to."""
    if target.kind == "cpu":
        return compiler_version(find_compiler())
    return f"triton {importlib.metadata.version('triton')}"


# C ------------------------------------------------------------------------------------------------


def _build_c(sources: tuple[KernelSource, ...], target: Target) -> Built:
    text = emit_c.emit_module(tuple(s.plan for s in sources), target)
    done = compile_c(text, target)
    kernels = tuple(Kernel(s.plan.name, "module", s.plan.name, _params(s.plan)) for s in sources)
    toolchain = {
        "compiler": done.version,
        "flags": list(done.flags),
        "march": target.arch,
        "fp_fusion": False,
    }
    return Built((("module", "so", done.data),), kernels, {"module.c": text.encode()}, toolchain)


def _params(plan: KernelPlan) -> tuple[Param, ...]:
    """Pointers, then sizes, at natural offsets."""
    out = [Param("ptr", 8 * i, 8) for i in range(len(plan.buffers))]
    offset = 8 * len(out)
    for _ in plan.sizes:
        out.append(Param("i64", offset, 8) if plan.wide else Param("i32", offset, 4))
        offset += out[-1].size
    return (*out, Param("ptr", -(-offset // 8) * 8, 8)) if _scratch(plan) else tuple(out)


def _scratch(plan: KernelPlan) -> int:
    """Bytes of memory that a program of the kernel keeps its descriptors in: one for each operand."""
    return 2 * DESCRIPTOR_BYTES if getattr(plan.tile, "descriptors", False) else 0


def pairs(target: Target) -> bool:
    """Whether the target rounds two float32 values to bfloat16 in one instruction."""
    return target.kind == "cuda" and target.capability >= 80


# Triton -------------------------------------------------------------------------------------------


def request(sources: tuple[KernelSource, ...], target: Target) -> dict[str, Any]:
    """What the worker is asked to build."""
    return {
        "backend": "hip" if target.kind == "hip" else "cuda",
        "arch": target.arch if target.kind == "hip" else target.capability,
        "proc": target.arch,
        "warp": target.warp,
        "assemblers": ["ptxas", "ptxas-blackwell"] if target.capability < 100 else ["ptxas-blackwell"],
        "ptxas_flags": [] if FP_FUSION else ["--fmad=false"],
        "kernels": [_kernel_request(s, target) for s in sources],
    }


def _kernel_request(source: KernelSource, target: Target) -> dict[str, Any]:
    plan = source.plan
    signature = {f"p_{i}": POINTER_TYPE[d] for i, d in enumerate(plan.buffer_dtypes)}
    signature |= dict.fromkeys(map(size_name, plan.sizes), "i64" if plan.wide else "i32")
    pointers = range(len(plan.buffers))
    sizes = range(len(plan.buffers), len(signature)) if source.divisible_sizes else ()
    stages = 1 if isinstance(plan.tile, RowTile) else getattr(plan.tile, "stages", 1)
    options: dict[str, Any] = {
        "num_warps": plan.tile.warps,
        "num_stages": stages,
        "enable_fp_fusion": FP_FUSION,
    }
    if target.kind == "cuda" and target.ptx_version:
        options["ptx_version"] = max(target.ptx_version, DESCRIPTORS_PTX if _scratch(plan) else 0)
    return {
        "entry": plan.name,
        "text": emit_triton.emit(plan, pairs=pairs(target)),
        "signature": signature,
        "divisible": [*pointers, *sizes],
        "scratch": _scratch(plan),
        "options": options,
    }


def _build_triton(sources: tuple[KernelSource, ...], target: Target) -> Built:
    asked = request(sources, target)
    parts = _compile_parallel(asked)
    code = {k: v for p in parts for k, v in p["code"].items()}
    facts = {k: v for p in parts for k, v in p["kernels"].items()}
    texts = {f"{k['entry']}.triton.py": k["text"].encode() for k in asked["kernels"]}
    toolchain = {"triton": parts[0]["triton"], "fp_fusion": FP_FUSION, "arch": target.arch}
    if target.kind == "hip":
        blobs = tuple((s.plan.name, "hsaco", base64.b64decode(code[s.plan.name])) for s in sources)
        kernels = tuple(_record(s, s.plan.name, _params(s.plan), facts) for s in sources)
        return Built(blobs, kernels, texts, toolchain)
    # One order, whatever worker was first: the module's bytes depend on it.
    ordered = [code[s.plan.name] for s in sources]
    made = run_worker(
        "forge.build_worker", {**asked, "kernels": [], "stage": "assemble", "texts": ordered}, BUILD_LIMITS
    )
    for entry in facts.keys() & made["usage"].keys():  # else a function that libdevice calls
        facts[entry].update(made["usage"][entry])
    declared = {e.name: e.params for e in entries(made["ptx"])}
    kernels = tuple(_record(s, "module", _checked(s, declared), facts) for s in sources)
    side = {**texts, "module.ptx": made["ptx"].encode()}
    blob = ("module", "cubin", base64.b64decode(made["cubin"]))
    return Built((blob,), kernels, side, {**toolchain, "ptxas": made["ptxas"], "elf_abi": made["elf_abi"]})


@dataclass(frozen=True)
class Candidate:
    """One set of kernels as a module of its own, or why it could not be built. `lasting`: what failed would
    fail again; not so where its worker died.
    """

    kernels: tuple[Kernel, ...] = ()
    kind: str = ""
    code: bytes = b""
    failed: str = ""
    lasting: bool = True


def build_candidates(sets: Sequence[tuple[KernelSource, ...]], target: Target) -> list[Candidate]:
    """Every set by itself, dealt to as many workers as there are cores. The share of a worker that dies is
    halved until what kills it stands alone.
    """
    if target.kind == "cpu":
        with ThreadPoolExecutor(_cores()) as pool:
            return list(pool.map(lambda s: _c_candidate(s, target), sets))
    asked = {**request((), target), "stage": "candidates"}
    count = max(min(_cores(), -(-len(sets) // KERNELS_PER_WORKER)), 1)

    def share(mine: Sequence[tuple[KernelSource, ...]], workers: Workers) -> list[Candidate]:
        texts = [[_kernel_request(s, target) for s in each] for each in mine]
        try:
            request = {**asked, "sets": texts}
            made = run_worker("forge.build_worker", request, BUILD_LIMITS, on_start=workers.started)["sets"]
        except EsperError as error:
            half = len(mine) // 2
            if not half or workers.stopped:
                return [Candidate(failed=str(error)[:300], lasting=False)] * len(mine)
            return share(mine[:half], workers) + share(mine[half:], workers)
        return [_cuda_candidate(each, row) for each, row in zip(mine, made, strict=True)]

    shares = in_parallel(share, [sets[at::count] for at in range(count)])
    return [shares[at % count][at // count] for at in range(len(sets))]


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _cuda_candidate(sources: tuple[KernelSource, ...], row: dict[str, Any]) -> Candidate:
    if "failed" in row:
        return Candidate(failed=row["failed"])
    facts = {e: {**known, **row["usage"].get(e, {})} for e, known in row["kernels"].items()}
    kernels = tuple(_record(s, "module", _params(s.plan), facts) for s in sources)
    return Candidate(kernels, "cubin", base64.b64decode(row["cubin"]))


def _c_candidate(sources: tuple[KernelSource, ...], target: Target) -> Candidate:
    try:
        built = _build_c(sources, target)
    except EsperError as error:
        return Candidate(failed=str(error)[:300])
    return Candidate(built.kernels, "so", built.blobs[0][2])


def _compile_parallel(asked: dict[str, Any]) -> list[dict[str, Any]]:
    """Kernels dealt to as many workers as there are cores (each pays about a second to start)."""
    kernels = asked["kernels"]
    count = max(min(_cores(), -(-len(kernels) // KERNELS_PER_WORKER)), 1)
    shares = [{**asked, "stage": "compile", "kernels": kernels[i::count]} for i in range(count)]
    return in_parallel(
        lambda share, workers: run_worker(
            "forge.build_worker", share, BUILD_LIMITS, on_start=workers.started
        ),
        shares,
    )


T = TypeVar("T")
R = TypeVar("R")


@dataclass
class Workers:
    """Workers of one call, to be ended with it."""

    pids: list[int] = field(default_factory=list)
    stopped: bool = False

    def started(self, pid: int) -> None:
        self.pids.append(pid)
        if self.stopped:
            self.stop()

    def stop(self) -> None:
        """They end, and whoever is started later; each leads a session of its own."""
        self.stopped = True
        for pid in self.pids:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)


def in_parallel(work: Callable[[T, Workers], R], shares: Sequence[T]) -> list[R]:
    """Each share in a thread that waits for a worker. An interrupt ends the workers instead of waiting."""
    workers = Workers()
    with ThreadPoolExecutor(max(len(shares), 1)) as pool:
        try:
            made = [pool.submit(work, share, workers) for share in shares]
            wait(made, return_when=FIRST_EXCEPTION)
            return [future.result() for future in made if future.done()]
        except BaseException:
            workers.stop()
            raise


def _checked(source: KernelSource, declared: dict[str, tuple[Param, ...]]) -> tuple[Param, ...]:
    """Our parameter table against the entry's: same sizes and offsets, then the two scratch pointers of the
    ABI.
    """
    ours = _params(source.plan)
    theirs = declared.get(source.plan.name, ())
    same = [(p.offset, p.size) for p in ours] == [(p.offset, p.size) for p in theirs[: len(ours)]]
    if not same or len(theirs) != len(ours) + _null_pointers(source.plan):
        raise EsperError("E0546", "the entry's parameters are not what the plan says", node=source.plan.name)
    return ours


def _null_pointers(plan: KernelPlan) -> int:
    return SCRATCH_POINTERS - bool(_scratch(plan))


def _record(source: KernelSource, blob: str, params: tuple[Param, ...], facts: dict[str, Any]) -> Kernel:
    known = facts[source.plan.name]
    return Kernel(
        source.plan.name, blob, source.plan.name, params, warps=known["warps"], shared=known["shared"],
        scratch=_null_pointers(source.plan), registers=known.get("registers", 0),
        spills=known.get("spills", 0),
    )  # fmt: skip
