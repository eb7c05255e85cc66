"""The pipelines, each a visible tuple of named steps from blueprint to container. Order is meaning."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from esper_ir.diagnostics import EXIT_USAGE, Accepted, EsperError
from esper_ir.expand import expand
from esper_ir.grad import joint
from esper_ir.graph import Graph
from esper_ir.verify import typed, verify
from forge.analysis import analyse, deny, refuse_larger
from forge.lower import Kernels, PhaseLowering, buckets, lower_phase, same_work
from forge.objectives import share_of
from forge.package import interface_of, package
from forge.passes.chunks import chunked, pieces
from forge.passes.clean import eliminate_dead, merge_equal
from forge.passes.convolution import bias_inside
from forge.passes.depthwise import depthwise
from forge.passes.fold import fold
from forge.passes.heads import heads_inside
from forge.passes.moments import one_reading, two_readings
from forge.passes.phases import Phase, backward_phase, choose_saved, forward_phases
from forge.passes.pools import pools_called
from forge.passes.pushing import windows_to_leaves
from forge.passes.reductions import straighten
from forge.passes.scale import carry
from forge.passes.shifts import shifted
from forge.passes.turned import turned
from forge.settle import settled
from forge.target import Target
from forge.templates.choice import tuned_sizes
from forge.toolchain import build, toolchain_of
from forge.tune.journal import Choices
from forge.tune.search import Effort, search
from forge.work import Work
from library.launch import Bound
from runtime.system import extern_versions, machine

Step = tuple[str, Callable[[Work], Work]]


@dataclass(frozen=True)
class Pipeline:
    """`steps` run in order; `summary` is what `esper-forge pipelines` prints."""

    name: str
    summary: str
    steps: tuple[Step, ...]


def check(work: Work) -> Work:
    """Verify the text; every error at once."""
    graph = typed(work.blueprint)
    for name, kind in graph.types.items():
        if kind.dtype not in work.target.dtypes:
            known = ", ".join(d.value for d in work.target.dtypes)
            raise EsperError(
                "E0537", f"{work.target.name} has no {kind.dtype.value}", node=name, hint=f"one of: {known}"
            )
    refuse_larger(work.blueprint, graph, work.target)
    findings = (*verify(work.blueprint), *analyse(work.blueprint, graph, work.target))
    deny(findings, work.denied)
    graph = heads_inside(pools_called(graph) if work.target.kind == "cpu" else graph)
    return replace(work, graph=graph, findings=findings)


def canonicalise(work: Work) -> Work:
    """Composites to primitives, reductions over first or last axes; equal work once, what is dead or changes
    no bit gone.
    """
    assert work.graph is not None
    return replace(work, graph=_plain(work.graph, apart=True))


def _plain(graph: Graph, apart: bool = False) -> Graph:
    plain = merge_equal(carry(fold(straighten(two_readings(expand(graph))))), apart=apart)
    return eliminate_dead(one_reading(plain))


def differentiate(work: Work) -> Work:
    """Reverse mode on the graph as written: composites give their own gradients (softmax from its result,
    norms from their statistics), then the joint graph of forward and gradients becomes primitives.
    """
    assert work.graph is not None
    wanted = work.blueprint.differentiable
    if wanted is None:
        floating = [
            v for v in work.blueprint.leaves if v.kind in ("input", "param") and v.type.dtype.is_floating
        ]
        wanted = tuple(v.name for v in floating)
    if not wanted:
        return work
    made = joint(work.graph, wanted)
    plain = _plain(made.graph)
    names = dict(zip(made.graph.outputs, plain.outputs, strict=True))
    plain = turned(plain, {names.get(v, v) for v in made.gradients.values() if v})
    gradients = {k: names.get(v, v) for k, v in made.gradients.items() if v}
    missing = [k for k in wanted if k not in gradients]
    if missing and work.blueprint.differentiable is not None:
        raise EsperError("E0534", f"no gradient reaches {missing}", hint='leave them out of "differentiable"')
    return replace(work, joint=replace(made, graph=plain, gradients=gradients) if gradients else None)


def save(work: Work) -> Work:
    """Choose what the backward keeps."""
    if work.joint is None:
        return work
    resident = frozenset(v.name for v in work.blueprint.leaves if v.kind != "input")
    sizes = tuned_sizes(work.joint.graph)
    return replace(work, saved=choose_saved(work.joint, sizes, work.target, work.objective, resident))


def plan(work: Work) -> Work:
    """Groups, templates and tiles for every phase and bucket."""
    assert work.graph is not None
    dims = work.blueprint.dims
    tuned = {n: d.tune or (min(max(d.min, 4096), d.max),) for n, d in dims.items()}
    ranges = {n: (d.min, d.max) for n, d in dims.items()}
    found = buckets(tuned, ranges)
    if share_of(work.objective) < 1.0:
        found = [piece for b in found for piece in pieces(work.graph, b, _sizes(work, b))]
    out: list[PhaseLowering] = []
    for phase, tag in _phases(work):
        out += _merged([_lower(work, phase, tag, bucket, at) for at, bucket in enumerate(found)])
    return replace(work, lowerings=tuple(out))


def _phases(work: Work) -> list[tuple[Phase, str]]:
    assert work.graph is not None
    training, inference = forward_phases(work.graph, work.joint, work.saved)
    out = [(inference, "inf")]
    if work.joint is None:
        return out
    out.append((training, "fwd"))
    names = tuple(work.joint.gradients)
    params = {v.name for v in work.blueprint.of_kind("param")}
    subsets = [tuple(n for n in names if n in params), tuple(n for n in names if n not in params), names]
    for position, wanted in enumerate(s for s in dict.fromkeys(subsets) if s):
        out.append((backward_phase(work.joint, work.saved, wanted), f"bwd{position}_"))
    return out


def _lower(work: Work, phase: Phase, tag: str, bucket: Mapping[str, Bound], at: int) -> PhaseLowering:
    assert work.graph is not None
    if work.target.kind == "cpu":
        phase = replace(phase, graph=bias_inside(phase.graph))
    else:
        phase = replace(phase, graph=depthwise(windows_to_leaves(shifted(phase.graph))))
    sizes = _sizes(work, bucket)
    phase = replace(phase, graph=settled(phase.graph, work.target, sizes))
    if share_of(work.objective) < 1.0:
        least = {name: bound.low for name, bound in bucket.items()}
        phase = replace(phase, graph=chunked(phase.graph, sizes, least))
    interface = interface_of(work.blueprint, work.graph.types, ())
    bounds = tuple(bucket.values())
    return lower_phase(
        phase, work.target, work.kernels, sizes, bounds, interface.inputs, interface.outputs, f"{tag}{at}_"
    )


def _sizes(work: Work, bucket: Mapping[str, Bound]) -> dict[str, int]:
    """The sizes that the plans of a bucket are to be fast at."""
    return {name: _inside(work.blueprint.dims[name].tune, bound) for name, bound in bucket.items()}


def _inside(tune: tuple[int, ...], bound: Bound) -> int:
    """The tuned size that lies in a bucket."""
    return next((t for t in tune if bound.low <= t <= bound.high), min(max(4096, bound.low), bound.high))


def _merged(plans: list[PhaseLowering]) -> list[PhaseLowering]:
    """Neighbouring buckets of one dim with the same steps become one."""
    out: list[PhaseLowering] = []
    for low in plans:
        last = out[-1] if out else None
        if last is not None and len(low.plan.bucket) == 1 and same_work(last.plan, low.plan):
            joined = replace(last.plan.bucket[0], high=low.plan.bucket[0].high)
            out[-1] = replace(last, plan=replace(last.plan, bucket=(joined,)))
            continue
        out.append(low)
    return out


def tune(work: Work) -> Work:
    """Tiles measured on this machine in place of the priors; where the target is not here, those that were
    measured elsewhere and are kept in the library. Without any the priors stay.
    """
    if work.tuning.replayed:
        return work
    device = device_of(work.target)
    effort = Effort(work.tuning.trials, work.tuning.seconds, aim=work.objective)
    found = search(
        work.kernels, work.target, device, toolchain_of(work.target), effort, work.tuning.store,
        work.tuning.progress,
    )  # fmt: skip
    if not any(group["trials"] for group in found.report["groups"]):
        why = "nothing to tune" if device is not None else f"no {work.target.name} here"
        return replace(work, trials={"schema": "esper-tuning/1", "untimed": why})
    given = {**work.kernels.choices.given, **found.given}
    fresh = replace(work, kernels=Kernels(choices=Choices(given)), lowerings=(), trials=found.report)
    return plan(fresh) if found.given else replace(work, trials=found.report)


def device_of(target: Target) -> str | None:
    """Where code of the target runs in this process, if anywhere."""
    kind = "cpu" if target.kind == "cpu" else "cuda"
    if target.kind not in ("cpu", "cuda") or (kind == "cuda" and not torch.cuda.is_available()):
        return None
    here = machine(kind)
    accepted = isinstance(here.accepts(target.kind, target.arch), Accepted)
    return ("cpu" if kind == "cpu" else f"cuda:{torch.cuda.current_device()}") if accepted else None


def build_kernels(work: Work) -> Work:
    """Text to machine code in sandboxed workers."""
    return replace(work, built=build(work.kernels, work.target))


def pack_artifact(work: Work) -> Work:
    """Manifest and container."""
    versions = extern_versions() if work.target.kind == "cpu" else {}
    manifest, container = package(work, versions)
    return replace(work, manifest=manifest, container=container)


FRONT: tuple[Step, ...] = (
    ("check", check),
    ("differentiate", differentiate),
    ("canonicalise", canonicalise),
    ("save", save),
    ("plan", plan),
)
BACK: tuple[Step, ...] = (("build", build_kernels), ("package", pack_artifact))
FAST = Pipeline("fast", "rules and shipped priors, nothing timed", (*FRONT, *BACK))
TUNED: tuple[Step, ...] = (*FRONT, ("tune", tune), *BACK)
STANDARD = Pipeline("standard", "300 tiles measured on the card that is here, within 5 minutes", TUNED)
AGGRESSIVE = Pipeline("aggressive", "as many tiles as the budget allows (30 minutes if not told)", TUNED)
PIPELINES = {p.name: p for p in (FAST, STANDARD, AGGRESSIVE)}
EFFORTS: dict[str, tuple[int, float]] = {"standard": (300, 300.0), "aggressive": (100_000, 1800.0)}
"""Trials and seconds of the pipelines that measure."""


def pipeline(name: str) -> Pipeline:
    """By name; E0513 names the known ones."""
    if name not in PIPELINES:
        raise EsperError(
            "E0513",
            f"unknown pipeline {name!r}",
            hint=f"one of: {', '.join(PIPELINES)}",
            exit_code=EXIT_USAGE,
        )
    return PIPELINES[name]
