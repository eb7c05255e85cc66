"""Nothing is run: does what the artifact says about itself agree with its blueprint and with its machine
code?

Signatures and digests were verified by the library before the bytes came here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from esper_ir.diagnostics import EsperError
from esper_ir.types import DType, TensorType
from gauntlet import cubin, elf
from gauntlet.extents import Range, outside
from gauntlet.stage import Context, Failed, Outcome, Passed, Recipe
from gauntlet.subject import Subject
from library.launch import ExternStep, Kernel, Plan, TensorSpec, evaluate
from runtime import externs

FUNCTION = 2
TYPES = frozenset(d.value for d in DType)
WIDTH = {"ptr": 8, "i64": 8, "i32": 4}
LIBRARIES = (
    "libm.so.6",
    "libgomp.so.1",
    "libc.so.6",
    "ld-linux-x86-64.so.2",
    "ld-linux-aarch64.so.1",
    "libmvec.so.1",
)
MEMORY = frozenset({"memcpy", "memset", "memmove", "malloc", "free", "aligned_alloc", "__stack_chk_fail"})
WEAK = frozenset(
    {"_ITM_deregisterTMCloneTable", "_ITM_registerTMCloneTable", "__gmon_start__", "__cxa_finalize"}
)
MATH = frozenset(
    "acos acosh asin asinh atan atan2 atanh cbrt ceil copysign cos cosh erf erfc exp exp2 expm1 fabs floor"
    " fma fmax fmin fmod hypot ldexp lgamma log log10 log1p log2 nearbyint pow remainder rint round"
    " roundeven sin sincos sinh sqrt tan tanh tgamma trunc".split()
)
OPENMP = ("GOMP_", "omp_get_", "__kmpc_", "_ZGV")
MAX_GRID = (2**31 - 1, 65535, 65535)
MAX_SIZE = 1 << 40
"""Of one axis of a buffer."""
MAX_ELEMENTS = 1 << 48
"""Of a buffer: its bytes still fit 64 bits. Sizes that no memory holds together are within their ranges all
the same: the allocator refuses those, not the judge."""
MAX_SHARED = 1 << 20
"""More than any card has; what this card has is checked by its driver."""
SM = re.compile(r"sm_(\d+)[af]?")


@dataclass(frozen=True)
class Integrity:
    name: str = "integrity"
    order: int = 0
    quick: bool = True

    def run(self, context: Context) -> Outcome:
        try:
            wrong = next(_findings(context.subject), "")
        except EsperError as error:
            wrong = error.render()
        except elf.Malformed as error:
            wrong = f"machine code: {error}"
        if wrong:
            return Failed(wrong)
        launch = context.subject.launch
        return Passed({"kernels": len(launch.kernels), "plans": len(launch.plans)})

    def check(self, context: Context, recipe: Recipe) -> Outcome:
        return self.run(context)


STAGE = Integrity()


def _findings(subject: Subject) -> Iterator[str]:
    """Whatever is wrong, the first thing first."""
    yield from _blueprint(subject)
    yield from _kernels(subject)
    for at, plan in enumerate(subject.launch.plans):
        for wrong in (
            *_results(subject, plan),
            *_arguments(subject, plan),
            *_feeds(subject, plan),
            *_extents(subject, plan),
            *_externs(plan),
        ):
            yield f"plan {at} ({plan.phase}): {wrong}"
    phases = {plan.phase for plan in subject.launch.plans}
    wanted = (
        {"inference", "forward", "backward"} if subject.launch.interface.differentiable else {"inference"}
    )
    if missing := sorted(wanted - phases):
        yield f"no {' and no '.join(missing)} plan"


def _blueprint(subject: Subject) -> Iterator[str]:
    declared = subject.manifest["blueprint"]["id"]
    if subject.blueprint_id != declared:
        yield f"the blueprint inside has the id {subject.blueprint_id[:12]}, declared is {declared[:12]}"
    theirs = subject.launch.interface
    for part, ours, found in (
        ("inputs", subject.leaves, theirs.inputs),
        ("outputs", subject.results, theirs.outputs),
    ):
        if not _same_tensors(subject, ours, found):
            yield f"{part} of the launch manifest are not those of the blueprint: {found}"
    if theirs.differentiable != subject.differentiable:
        yield f"gradients of {theirs.differentiable}, the blueprint wants {subject.differentiable}"
    declared_dims = [(n, d.min, d.max, d.multiple_of) for n, d in subject.blueprint.dims.items()]
    if sorted(declared_dims) != sorted((d.name, d.min, d.max, d.multiple_of) for d in theirs.dims):
        yield "dims of the launch manifest are not those of the blueprint"
    for dim in theirs.dims:
        shape = theirs.inputs[dim.tensor].shape if 0 <= dim.tensor < len(theirs.inputs) else ()
        if not 0 <= dim.axis < len(shape) or shape[dim.axis] != dim.name:
            yield f"dim {dim.name!r} is not axis {dim.axis} of input {dim.tensor}"


def _same_tensors(
    subject: Subject, ours: Sequence[tuple[str, str, TensorType]], found: Sequence[TensorSpec]
) -> bool:
    """Names, kinds and dtypes equal; shapes equal as numbers at sizes that tell polynomials apart."""
    if [(n, k, t.dtype.value) for n, k, t in ours] != [(s.name, s.kind, s.dtype) for s in found]:
        return False
    names = [d.name for d in subject.launch.interface.dims]
    probes = [{n: 60 * (p + 7 * i) for i, n in enumerate(names)} for p in (1, 5, 11)]
    return all(
        [d.value(dims) for d in t.shape] == [evaluate(n, dims) for n in spec.shape]
        for dims in probes
        for (_, _, t), spec in zip(ours, found, strict=True)
    )


def _kernels(subject: Subject) -> Iterator[str]:
    readers: dict[str, Callable[[Subject, Kernel], Iterator[str]]] = {"cpu": _shared_object, "cuda": _cubin}
    kind = subject.manifest["target"]["kind"]
    if kind not in readers:
        yield f"no check of machine code for targets of kind {kind!r}"
        return
    for kernel in subject.launch.kernels:
        if kernel.blob not in subject.blobs:
            yield f"kernel {kernel.name!r}: no blob {kernel.blob!r}"
            continue
        if any(WIDTH.get(p.kind) != p.size for p in kernel.params):
            yield f"kernel {kernel.name!r}: a parameter of a wrong kind or size"
        for wrong in readers[kind](subject, kernel):
            yield f"kernel {kernel.name!r}: {wrong}"


def _shared_object(subject: Subject, kernel: Kernel) -> Iterator[str]:
    code = elf.read(bytes(subject.blobs[kernel.blob]))
    arch = str(subject.manifest["target"]["arch"])
    if code.machine != ("x86_64" if arch.startswith("x86-64-v") else arch):
        yield f"machine code for {code.machine}, the target is {arch}"
    if code.exports.get(kernel.entry) != FUNCTION:
        yield f"no function {kernel.entry!r} is exported"
    if strange := sorted(name for name in code.imports | code.weak if not known(name)):
        yield f"it asks for {', '.join(strange[:4])}; only mathematics, memory and OpenMP are given"
    if strange := sorted(set(code.needed) - set(LIBRARIES)):
        yield f"it asks for the libraries {', '.join(strange)}"
    if code.constructors:
        yield "it runs code when it is loaded"
    if code.state:
        yield f"it keeps {code.state} bytes of its own between calls; kernels have no state"
    if code.search:
        yield "it names its own library path"


def known(name: str) -> bool:
    """Whether a shared object may ask for this function."""
    plain = name.rstrip("0123456789").removeprefix("__").removesuffix("_finite")
    bare = name.removesuffix("f") if name.removesuffix("f") in MATH else plain
    return bare in MATH or name in MATH or name in MEMORY or name in WEAK or name.startswith(OPENMP)


def _cubin(subject: Subject, kernel: Kernel) -> Iterator[str]:
    code = cubin.read(bytes(subject.blobs[kernel.blob]))
    arch = str(subject.manifest["target"]["arch"])
    if (found := SM.fullmatch(arch)) is None or int(found[1]) != code.arch:
        yield f"machine code for sm_{code.arch}, the target is {arch}"
    if code.state:
        yield f"it keeps {code.state} bytes in device variables between launches; kernels have no state"
    if kernel.entry not in code.kernels:
        yield f"no entry {kernel.entry!r}"
        return
    real = [(p.offset, p.size) for p in code.kernels[kernel.entry]]
    end = max((p.offset + p.size for p in kernel.params), default=0)
    start = -(-end // 8) * 8
    told = [(p.offset, p.size) for p in kernel.params] + [(start + 8 * i, 8) for i in range(kernel.scratch)]
    if real != told:
        yield f"the parameter table says {told}, the machine code {real}"
    if not 0 < kernel.warps <= 32:
        yield f"{kernel.warps} warps"
    if not 0 <= kernel.shared <= MAX_SHARED:
        yield f"{kernel.shared} bytes of shared memory"


def _results(subject: Subject, plan: Plan) -> Iterator[str]:
    interface = subject.launch.interface
    if plan.phase == "backward":
        unknown = sorted(set(plan.wanted) - set(interface.differentiable))
        if unknown or len(plan.gradients) != len(plan.wanted):
            yield f"{len(plan.gradients)} gradients for {plan.wanted}"
            return
        specs = {t.name: t for t in interface.inputs}
        pairs = [(n, specs[w]) for n, w in zip(plan.gradients, plan.wanted, strict=True)]
    else:
        if len(plan.outputs) != len(interface.outputs):
            yield f"{len(plan.outputs)} outputs, the blueprint has {len(interface.outputs)}"
            return
        pairs = list(zip(plan.outputs, interface.outputs, strict=True))
    for number, spec in pairs:
        buffer = plan.buffers[number]
        if (buffer.dtype, buffer.shape) != (spec.dtype, spec.shape):
            yield f"buffer {buffer.name!r} is {buffer.dtype}{buffer.shape}, not {spec.dtype}{spec.shape}"


def _arguments(subject: Subject, plan: Plan) -> Iterator[str]:
    """Every launch gives every kernel it may choose what that kernel's table asks for."""
    kernels = {k.name: k for k in subject.launch.kernels}
    for step in plan.steps:
        if isinstance(step, ExternStep):
            continue
        given = ["ptr" if a.kind == "buffer" else "size" for a in step.args]
        for variant in step.variants:
            asked = ["ptr" if p.kind == "ptr" else "size" for p in kernels[variant.kernel].params]
            if given != asked:
                yield f"step {step.group!r} gives {given} to kernel {variant.kernel!r}, which takes {asked}"


def _feeds(subject: Subject, plan: Plan) -> Iterator[str]:
    """Buffers hold elements of a type; those that come from outside are what the interface, or the forward
    plan, says."""
    interface, forward = subject.launch.interface, [p for p in subject.launch.plans if p.phase == "forward"]
    saved = [forward[0].buffers[n] for n in forward[0].saved] if forward else []
    sources: Mapping[str, Any] = {"input": interface.inputs, "cotangent": interface.outputs, "saved": saved}
    for buffer in plan.buffers:
        if buffer.dtype not in TYPES:
            yield f"buffer {buffer.name!r} has the dtype {buffer.dtype!r}, which there is not"
        if buffer.source not in sources:
            continue
        rows = sources[buffer.source]
        if not 0 <= buffer.index < len(rows):
            yield f"buffer {buffer.name!r} reads {buffer.source} {buffer.index} of {len(rows)}"
        elif (buffer.dtype, buffer.shape) != (rows[buffer.index].dtype, rows[buffer.index].shape):
            yield f"buffer {buffer.name!r} is {buffer.dtype}{buffer.shape}, not {rows[buffer.index]}"


def _extents(subject: Subject, plan: Plan) -> Iterator[str]:
    """Grids, buffers and size arguments stay sane over the whole of the plan's range of sizes."""
    ranges = {d.name: Range(d.min, d.max, d.multiple_of) for d in subject.launch.interface.dims}
    for bound in plan.bucket:
        ranges[bound.dim] = Range(bound.low, bound.high, ranges[bound.dim].step)
    kernels = {k.name: k for k in subject.launch.kernels}
    for step in plan.steps:
        if isinstance(step, ExternStep):
            continue
        for axis, (size, most) in enumerate(zip(step.grid, MAX_GRID, strict=True)):
            if wrong := outside((size,), ranges, 0, most):
                yield f"step {step.group!r} has the grid {wrong} on axis {axis}"
        short = [
            size for variant in step.variants
            for size, param in zip(step.args, kernels[variant.kernel].params, strict=False)
            if size.kind == "size" and param.kind == "i32"
        ]  # fmt: skip
        for argument in dict.fromkeys(short):
            if wrong := outside((argument.value,), ranges, -(2**31), 2**31 - 1):
                yield f"step {step.group!r} gives {wrong} to a parameter of 32 bits"
    for buffer in plan.buffers:
        sides = [outside((size,), ranges, 0, MAX_SIZE) for size in dict.fromkeys(buffer.shape)]
        if wrong := next(filter(None, sides), "") or outside(buffer.shape, ranges, 0, MAX_ELEMENTS):
            yield f"buffer {buffer.name!r} has {wrong} elements"


def _externs(plan: Plan) -> Iterator[str]:
    for step in plan.steps:
        if isinstance(step, ExternStep):
            externs.prepare(step.op, step.attrs, len(step.inputs))
    yield from ()
