"""The artifact under test as the stages see it: what it claims, what its blueprint means, and how to run
it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor

from esper_ir import canonical, grad, oracle, reference, text, verify
from esper_ir.expand import expand
from esper_ir.graph import Blueprint, Graph, Node
from esper_ir.graphbuilder import GraphBuilder, rewritten
from esper_ir.opdef import Val
from esper_ir.ops.attention import OPENED
from esper_ir.show import flops
from esper_ir.types import Dim, DType, TensorType
from gauntlet.kept import Kept
from library import launch as launch_manifest
from library.launch import DimSource, ExternStep, Guard, LaunchManifest, Plan, evaluate
from library.manifest import Container, blueprint_text
from runtime import functions
from runtime.code import load_code
from runtime.executor import Counters, Program

ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 25}
"""Largest tensor of the largest case: what a reference in float64 computes in a fraction of a second."""
SWEPT = {"cpu": 1 << 19, "cuda": 1 << 20}
"""Largest tensor of the many cases; an eighth of that in a hurry."""
SCORES_SHARE = 4
"""So many scores of attention, which only a reference writes down, count as one element."""
SIZES = (1, 2, 3, 7, 16, 17, 31, 61, 64, 65, 127, 251, 256, 509, 1021, 4093)
BASE, BASE_ELEMENTS, BASE_WORK = 48, 1 << 14, 1 << 24
"""A size that most cases use: small, no power of two, several times the smallest tile; less where tensors are
wide, and on the CPU where weights are large."""

HEAVY = 1 << 21
"""Elements of a weight beyond which the CPU is spared: fewer draws and steps, small numbers of rows."""
WIDE, KEPT_WIDE = 1 << 20, 4
"""Elements from which on a float64 copy of a weight is kept, and of how many."""
KEPT, KEPT_BYTES = 24, 1 << 30
"""Drawn weights kept at a time, and bytes of them."""


def _opened(graph: Graph) -> Graph:
    if not any(node.op in OPENED for node in graph):
        return graph

    def change(builder: GraphBuilder, node: Node, values: dict[str, Val]) -> Sequence[Val] | None:
        if node.op not in OPENED:
            return None
        builder.scope = node.id
        made = OPENED[node.op](builder, [values[v] for v in node.tensors], dict(node.attrs))
        builder.scope = ""
        return made

    return expand(rewritten(graph, change))


class Subject:
    """`container` was verified by the supervisor; nothing of it is loaded before `program` is asked for."""

    def __init__(self, container: Container, device: torch.device) -> None:
        self.container, self.device = container, device
        self.manifest: Mapping[str, Any] = container.manifest
        self.blobs: Mapping[str, memoryview] = container.blobs
        self.stored: Mapping[str, Tensor] = {}
        self.kept: Kept[Tensor] = Kept(KEPT, KEPT_BYTES)
        self.hurry = False
        self._eager = 0.0
        self._lengths: dict[tuple[Any, ...], int] = {}
        self._elements: dict[tuple[Any, ...], int] = {}
        self._work: dict[tuple[Any, ...], int] = {}
        self._wide: Kept[Tensor] = Kept(KEPT_WIDE, 2 * KEPT_BYTES)
        self.artifact_id: str = container.manifest["artifact_id"]

    # -- claims
    # --------------------------------------------------------------------------------------------------

    @cached_property
    def launch(self) -> LaunchManifest:
        """The launch manifest, strictly decoded (E0720)."""
        return launch_manifest.from_json(self.manifest["launch"])

    @cached_property
    def blueprint(self) -> Blueprint:
        """Parsed, the leaves in the order of a call. That the order is the right one is proven by the
        blueprint's id, which covers it.
        """
        return text.parse(blueprint_text(self.manifest))

    @cached_property
    def graph(self) -> Graph:
        """The blueprint, verified and typed."""
        return verify.typed(self.blueprint)

    @cached_property
    def flat(self) -> Graph:
        """The graph with every composite written out in primitives."""
        return expand(self.graph)

    @cached_property
    def opened(self) -> Graph:
        """The same with what libraries compute in several steps written out too."""
        return _opened(self.flat)

    @cached_property
    def roundoff(self) -> float:
        """Of the type that is computed in: float32, unless something is float64."""
        wide = any(t.dtype is DType.float64 for _, _, t in (*self.leaves, *self.results))
        return oracle.BOUNDS[DType.float64 if wide else DType.float32].roundoff

    def bound(self, values: Mapping[str, Tensor]) -> dict[str, int]:
        """The dims that the shapes of these leaves mean."""
        return reference.sizes_of(self.graph.inputs, values)

    def widened(self, tensor: Tensor) -> Tensor:
        """In float64, dense; of weights that are kept from case to case the last ones are kept so too."""
        if (found := self._wide.get(id(tensor))) is not None:
            return found
        wide = tensor.to(torch.float64, memory_format=torch.contiguous_format)
        if tensor.numel() >= WIDE and self.kept.holds(tensor):
            self._wide.put(id(tensor), wide, wide.nbytes, of=tensor)
        return wide

    @cached_property
    def blueprint_id(self) -> str:
        return canonical.blueprint_id(self.blueprint)

    @cached_property
    def leaves(self) -> list[tuple[str, str, TensorType]]:
        """(name, kind, type) of every tensor that comes in, in the order of a call."""
        return [(v.name, v.kind, v.type) for v in self.blueprint.leaves]

    @cached_property
    def results(self) -> list[tuple[str, str, TensorType]]:
        types = [self.graph.types[name] for name in self.graph.outputs]
        return [(n, "output", t) for n, t in zip(self.blueprint.outputs, types, strict=True)]

    @cached_property
    def differentiable(self) -> tuple[str, ...]:
        """Leaves whose gradient the blueprint wants; where it names none, the floating ones that a gradient
        reaches."""
        if self.blueprint.differentiable is not None:
            return tuple(self.blueprint.differentiable)
        floating = [n for n, kind, t in self.leaves if kind in ("input", "param") and t.dtype.is_floating]
        reached = grad.joint(self.graph, floating).gradients if floating else {}
        return tuple(n for n in floating if reached[n] is not None)

    @property
    def deterministic(self) -> bool:
        """Whether the artifact promises equal bits."""
        return self.manifest["determinism"] == "deterministic"

    def accumulation(self, dims: Mapping[str, int], gradient: bool) -> int:
        """Roundings on the longest way to an output, or to a gradient
        (`esper_ir.oracle.accumulation_length`)."""
        key = (gradient, *sorted(dims.items()))
        if key not in self._lengths:
            graph = self.joint.graph if gradient else self.graph
            flat = self.flat_joint[0] if gradient else self.flat
            self._lengths[key] = oracle.accumulation_length(graph, dims, flat=flat)
        return self._lengths[key]

    @cached_property
    def joint(self) -> grad.Joint:
        """Forward and backward in one graph."""
        return grad.joint(self.graph, self.differentiable)

    @cached_property
    def flat_joint(self) -> tuple[Graph, dict[str, str]]:
        """The same with every composite written out in primitives, and its name there of every gradient's
        leaf."""
        flat = expand(self.joint.graph)
        names = dict(zip(self.joint.graph.outputs, flat.outputs, strict=True))
        return flat, {leaf: names[at] for leaf, at in self.joint.gradients.items() if at is not None}

    @cached_property
    def opened_joint(self) -> tuple[Graph, dict[str, str]]:
        """`flat_joint` with what libraries compute in several steps written out too."""
        flat, names = self.flat_joint
        opened = _opened(flat)
        renamed = dict(zip(flat.outputs, opened.outputs, strict=True))
        return opened, {leaf: renamed[at] for leaf, at in names.items()}

    # -- sizes
    # ---------------------------------------------------------------------------------------------------

    def admits(self, dims: Mapping[str, int], elements: int = 0) -> bool:
        """Inside the declared range, and small enough for a reference here."""
        least = self.elements(self.least_dims())
        return self.declares(dims) and self.elements(dims) <= max(
            elements or ELEMENTS[self.device.type], least
        )

    def declares(self, dims: Mapping[str, int]) -> bool:
        """Inside the declared range."""
        return all(_inside(d, dims[d.name]) for d in self.launch.interface.dims)

    def elements(self, dims: Mapping[str, int]) -> int:
        """Of the largest tensor of any plan at these sizes; tensors of one size only do not count, scores of
        attention in part."""
        key = tuple(dims.items())
        if key not in self._elements:
            found = (prod(evaluate(n, dims) for n in shape) for shape in self._growing)
            scores = (work.value(dims) // each // SCORES_SHARE for work, each in self._scores)
            self._elements[key] = max((*found, *scores), default=1)
        return self._elements[key]

    def work(self, dims: Mapping[str, int]) -> int:
        """Operations of a forward at these sizes."""
        key = tuple(dims.items())
        if key not in self._work:
            self._work[key] = sum(flops(self.flat, node).value(dims) for node in self.flat)
        return self._work[key]

    @cached_property
    def _scores(self) -> list[tuple[Dim, int]]:
        """Operations of every attention, and how many of them are for one score."""
        nodes = [node for node in self.flat if node.op == "attention"]
        widths = [self.flat.types[str(node.inputs[0])].shape[-1].static or 1 for node in nodes]
        return [(flops(self.flat, node), 4 * width) for node, width in zip(nodes, widths, strict=True)]

    @cached_property
    def _growing(self) -> list[tuple[Any, ...]]:
        """Shapes that depend on a dim."""
        shapes = [s.shape for s in (*self.launch.interface.inputs, *self.launch.interface.outputs)]
        shapes += [b.shape for plan in self.launch.plans for b in plan.buffers]
        return list({shape for shape in shapes if any(_names(n) for n in shape)})

    @cached_property
    def fixed_elements(self) -> int:
        """Of the largest tensor whose size is always the same: weights."""
        shapes = [t.shape for _, _, t in self.leaves]
        fixed = [[d.static or 1 for d in s] for s in shapes if all(d.static is not None for d in s)]
        return max((prod(sizes) for sizes in fixed), default=1)

    @property
    def heavy(self) -> bool:
        """Its weights are so large that every case on the CPU is dear."""
        return self.device.type == "cpu" and self.fixed_elements > HEAVY

    @property
    def swept(self) -> int:
        """Elements of the largest tensor of the many cases."""
        return SWEPT[self.device.type] // (8 if self.hurry else 1)

    def sizes(self, name: str) -> list[int]:
        """Sizes of one dim worth trying: small ones, primes, the edges of tiles, buckets, guards and of the
        range."""
        dim = next(d for d in self.launch.interface.dims if d.name == name)
        marks = {*SIZES, dim.min, dim.max, *dim.tune}
        for constant in self._constants(name):
            marks |= {constant - 1, constant, constant + 1, 2 * constant + 1}
        marks |= {dim.max - 1, dim.min + 1}
        step = dim.multiple_of
        rounded = {m // step * step for m in marks} | {-(-m // step) * step for m in marks}
        base = self.base_dims()
        return sorted(m for m in rounded if self.admits({**base, name: m}, self.swept))

    def _constants(self, name: str) -> set[int]:
        """Numbers that the plans compare or divide this dim with."""
        found: set[int] = set()
        for plan in self.launch.plans:
            found |= {n for b in plan.bucket if b.dim == name for n in (b.low, b.high)}
            for step in plan.steps:
                if isinstance(step, ExternStep):
                    continue
                sizes = [*step.grid, *(a.value for a in step.args if a.kind == "size")]
                sizes += [s for v in step.variants for s, _ in (*v.guard.divisible, *v.guard.at_most)]
                found |= {n for s in sizes for n in _beside(s, name)}
                found |= {
                    n
                    for v in step.variants
                    for s, n in (*v.guard.divisible, *v.guard.at_most)
                    if name in _names(s)
                }
        return {n for n in found if 1 < n < 1 << 20}

    @cached_property
    def regions(self) -> list[dict[str, int]]:
        """Sizes at which, together, every plan and every variant of a kernel runs that small sizes reach: the
        base sizes, then those next to them that bring a new one, larger ones first. In a row or two what is
        rare among random values does not come about."""
        base, seen = self.base_dims(), set[tuple[int, str]]()
        tried = [{**base, name: size} for name in base for size in self.sizes(name)]
        found, usual = [], self.elements(base)

        def distance(dims: Mapping[str, int]) -> tuple[bool, int]:
            return self.elements(dims) < usual, abs(self.elements(dims) - usual)

        for dims in (base, *sorted(tried, key=distance)):
            here = self.launched(dims)
            if not here <= seen:
                found.append(dims)
                seen |= here
        return found

    def launched(self, dims: Mapping[str, int]) -> set[tuple[int, str]]:
        """(number of the plan, kernel) of everything that may be launched at these sizes."""
        found: set[tuple[int, str]] = set()
        for at, plan in enumerate(self.launch.plans):
            if not all(b.low <= dims[b.dim] <= b.high for b in plan.bucket):
                continue
            found.add((at, ""))
            for step in plan.steps:
                if not isinstance(step, ExternStep):
                    fitting = (v.kernel for v in step.variants if _holds(v.guard, dims))
                    found.add((at, next(fitting, "")))
        return found

    def reached(self, dims: Mapping[str, int], wanted: Sequence[str]) -> set[tuple[Any, ...]]:
        """What a case at these sizes, for these gradients (none: for any), may show to be wrong as a whole:
        plans, variants of kernels, and the largest sizes."""
        if not self.declares(dims):
            return set()
        plans = self.launch.plans
        asked = {at for at, plan in enumerate(plans) if set(plan.wanted) in (set(), set(wanted))}
        found = {(at, kernel) for at, kernel in self.launched(dims) if not wanted or at in asked}
        return found | ({("largest",)} if dims == self.largest_dims() else set())

    def base_dims(self) -> dict[str, int]:
        """The sizes that most cases use."""
        return dict(self._base)

    @cached_property
    def _base(self) -> dict[str, int]:
        size = BASE
        while size > 3 and self._dear({d.name: _nearest(d, size) for d in self.launch.interface.dims}):
            size -= 5
        return {d.name: _nearest(d, size) for d in self.launch.interface.dims}

    def _dear(self, dims: Mapping[str, int]) -> bool:
        """Too much for a case among hundreds: wide tensors, or large weights that every row goes through."""
        rows = max(dims.values(), default=1)
        work = rows * self.fixed_elements if self.device.type == "cpu" else 0
        return self.elements(dims) > BASE_ELEMENTS or work > BASE_WORK

    def nearest(self, name: str, size: int) -> int:
        """The admitted size of a dim nearest to `size` from below."""
        return _nearest(next(d for d in self.launch.interface.dims if d.name == name), size)

    def least_dims(self) -> dict[str, int]:
        return {d.name: _nearest(d, d.min) for d in self.launch.interface.dims}

    def largest_dims(self, elements: int = 0) -> dict[str, int]:
        """The largest admitted sizes, all dims grown together."""
        dims = {d.name: _nearest(d, d.max) for d in self.launch.interface.dims}
        while not self.admits(dims, elements):
            shrunk = {
                d.name: max(_nearest(d, d.min), _nearest(d, dims[d.name] * 3 // 4))
                for d in self.launch.interface.dims
            }
            if shrunk == dims:
                break
            dims = shrunk
        return dims

    def sizes_below(self, name: str, size: int) -> list[int]:
        """A few smaller sizes, smallest first, to shrink a failing case with."""
        return [s for s in self.sizes(name) if s < size][:6]

    def eager_seconds(self, dims: Mapping[str, int]) -> float:
        """About what the reference takes for forward and backward at these sizes, from one run at the base
        sizes.
        """
        if not self._eager:
            first = self._measured(self.base_dims())  # the first run also loads libraries
            self._eager = min(first, self._measured(self.base_dims()))
        return self._eager * max(1.0, self.elements(dims) / max(self.elements(self.base_dims()), 1))

    def eager_at(self, dims: Mapping[str, int]) -> float:
        """What the reference takes for forward and backward at these sizes, run there twice: what libraries
        plan in the first run is kept by thread, so that the backward runs in this one."""
        with torch.autograd.set_multithreading_enabled(False):
            self._measured(dims)
            return self._measured(dims)

    def _measured(self, dims: Mapping[str, int]) -> float:
        began = time.monotonic()
        values = {}
        for name, _, kind in self.leaves:
            shape, dtype = [d.value(dims) for d in kind.shape], getattr(torch, kind.dtype.value)
            values[name] = torch.ones(shape, dtype=dtype, device=self.device)
            values[name].requires_grad_(name in self.differentiable)
        found = [t for t in reference.evaluate(self.graph, values).values() if t.requires_grad]
        if found:
            torch.autograd.backward(found, [torch.ones_like(t) for t in found])
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.monotonic() - began

    # -- running
    # -------------------------------------------------------------------------------------------------

    @cached_property
    def program(self) -> Program:
        """Candidate code is loaded here, once."""
        code = load_code(self.launch, self.blobs, self.device, name=self.artifact_id)
        return Program(self.artifact_id, self.launch, code)

    def dims_tuple(self, dims: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(dims[d.name] for d in self.launch.interface.dims)

    def plans(self, phase: str, dims: Mapping[str, int]) -> list[Plan]:
        """All plans of a phase that serve these sizes."""
        return [
            p for p in self.launch.plans
            if p.phase == phase and all(b.low <= dims[b.dim] <= b.high for b in p.bucket)
        ]  # fmt: skip

    def infer(self, values: Mapping[str, Tensor]) -> list[Tensor]:
        """Outputs of a call without gradients."""
        return self._call("inference", values)

    def forward(self, values: Mapping[str, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Outputs, and what is saved for the backward."""
        found = self._call("forward", values)
        count = len(self.launch.interface.outputs)
        return found[:count], found[count:]

    def _call(self, phase: str, values: Mapping[str, Tensor]) -> list[Tensor]:
        tensors = [values[s.name] for s in self.launch.interface.inputs]
        dims = self.program.dims_of([t.shape for t in tensors])
        return self.program.run(self.program.plan_for(phase, dims), tensors)

    def backward(
        self,
        saved: Sequence[Tensor],
        cotangents: Sequence[Tensor | None],
        dims: Mapping[str, int],
        wanted: Iterable[str],
    ) -> dict[str, Tensor]:
        """Gradients by name: those wanted, of the plan that the runtime would choose."""
        names, values = tuple(wanted), self.dims_tuple(dims)
        plan = self.program.plan_for("backward", values, names)
        found = self.program.run(plan, [*saved, *cotangents], dims=values)
        named = dict(zip(plan.wanted, found, strict=True))
        return {name: named[name] for name in names}

    def trained(
        self, values: Mapping[str, Tensor], cotangents: Sequence[Tensor | None], wanted: Sequence[str]
    ) -> dict[str, Tensor]:
        """Gradients by torch's autograd through the runtime's function, as in training."""
        leaves = {n: t.detach().requires_grad_(n in wanted) for n, t in values.items()}
        outputs = self.attached(leaves)
        pairs = [(o, c) for o, c in zip(outputs, cotangents, strict=True) if c is not None]
        grads = torch.autograd.grad([o for o, _ in pairs], [leaves[n] for n in wanted], [c for _, c in pairs])
        return dict(zip(wanted, grads, strict=True))

    def attached(self, leaves: Mapping[str, Tensor]) -> list[Tensor]:
        """Outputs as part of torch's autograd graph; which leaves want a gradient chooses the plan."""
        tensors = [leaves[s.name] for s in self.launch.interface.inputs]
        with torch.enable_grad():
            ready, _ = self._state.choose(tensors, True)
            found = functions.call(self._state, ready, *tensors)
        return [found] if isinstance(found, Tensor) else list(found)

    @cached_property
    def _state(self) -> functions.State:
        return functions.State(self.program, Counters())


def _inside(dim: DimSource, size: int) -> bool:
    return dim.min <= size <= dim.max and size % dim.multiple_of == 0


def _nearest(dim: DimSource, size: int) -> int:
    """The admitted size nearest to `size` from below, else the smallest."""
    step = dim.multiple_of
    least = -(-dim.min // step) * step
    return max(least, min(size, dim.max) // step * step)


def _holds(guard: Guard, dims: Mapping[str, int]) -> bool:
    """As far as sizes decide."""
    divisible = all(evaluate(s, dims) % n == 0 for s, n in guard.divisible)
    return divisible and all(evaluate(s, dims) <= most for s, most in guard.at_most)


def _names(size: Any) -> set[str]:
    if isinstance(size, str):
        return {size}
    return _names(size[1]) | _names(size[2]) if isinstance(size, tuple) else set()


def _beside(size: Any, name: str) -> set[int]:
    """Constants inside an expression that mentions the dim."""
    if not isinstance(size, tuple) or name not in _names(size):
        return set()
    here = {n for n in size[1:] if isinstance(n, int)}
    return here | _beside(size[1], name) | _beside(size[2], name)
