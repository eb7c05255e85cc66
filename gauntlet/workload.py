"""What is timed at one size: the artifact's plans, eager torch (and torch.compile where asked) on the same
tensors, and a copy of as many bytes as have to move.

Every work of the artifact stands ready on several sets of inputs, drawn as the validation draws normal ones;
launches rotate over them, so that nothing can answer from what it saw last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from esper_ir.show import flops
from esper_ir.straight import straight
from gauntlet import accuracy, inputs, meaning
from gauntlet.stage import Recipe
from gauntlet.subject import Subject
from library.launch import Plan, evaluate
from runtime.timing import Work

ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 27}
"""Of the largest tensor that is measured."""
SETS, SET_BYTES = 3, {"cpu": 1 << 28, "cuda": 2 << 30}
"""Sets of inputs, and what all together may take; one set is always there."""
COPY = "copy"
Leaves = dict[str, Tensor]


@dataclass(frozen=True)
class Workload:
    """`works` by name ("both", "forward", "backward", "eager both", .. "compile both", "copy"), one per
    set of inputs. `bytes_moved`: at least, by forward and backward; `flops`: of both, by the operators'
    records. `leaves`: the first set."""

    dims: Mapping[str, int]
    works: Mapping[str, tuple[Work, ...]]
    primary: str
    bytes_moved: int
    flops: int
    leaves: Leaves

    @property
    def label(self) -> str:
        """Its key in `wep.shapes`: "rows=512"."""
        return ", ".join(f"{name}={size}" for name, size in sorted(self.dims.items())) or "fixed"


def sizes(subject: Subject, quick: bool) -> list[dict[str, int]]:
    """Tuned sizes that fit a measurement here (quick: the largest of a quarter of that), largest last;
    without any, the largest sizes that fit."""
    most = ELEMENTS[subject.device.type] // (4 if quick else 1)
    dims = subject.launch.interface.dims
    rows = max((len(d.tune) for d in dims), default=0)
    tuned = [
        {d.name: d.tune[min(at, len(d.tune) - 1)] if d.tune else d.max for d in dims} for at in range(rows)
    ]
    fitting = [t for t in tuned if subject.admits(t, most)]
    found = sorted(fitting, key=subject.elements) or [subject.largest_dims(most)]
    return found[-1:] if quick else found


def workload(
    subject: Subject, dims: Mapping[str, int], seed: int, compiled: Mapping[int, Callable[..., Any]],
    baselines: int = SETS,
) -> Workload:  # fmt: skip
    """Everything at one size. `compiled`: torch.compile's function by number of the set, made before.
    `baselines`: sets that eager stands ready on: it makes ready by running, four times for a graph, and what
    takes thousands of launches takes seconds each time."""
    least = least_bytes(subject, dims)
    count = max(1, min(SETS, SET_BYTES[subject.device.type] // max(2 * least, 1)))
    drawn = [(at, leaves_of(subject, at)) for at in (recipe(dims, seed + turn) for turn in range(count))]
    sets = [
        _works(subject, *one, compiled.get(turn), beside=turn < baselines) for turn, one in enumerate(drawn)
    ]
    works = {name: tuple(s[name] for s in sets if name in s) for name in sets[0]}
    works[COPY] = (_copy(least, subject.device),)
    primary = "both" if "both" in works else "forward"
    graph = subject.joint.graph if "both" in works else subject.flat
    total = sum(flops(graph, node).value(dims) for node in graph)
    return Workload(dict(dims), works, primary, least, int(total), drawn[0][1])


def recipe(dims: Mapping[str, int], seed: int) -> Recipe:
    return Recipe("measurement", dict(dims), cotangent="normal", seed=seed)


def leaves_of(subject: Subject, at: Recipe) -> Leaves:
    """The tensors of one set; those that are differentiated ask for a gradient."""
    wanted = subject.launch.interface.differentiable
    return {n: t.detach().requires_grad_(n in wanted) for n, t in inputs.values(subject, at).items()}


def eager(subject: Subject) -> Callable[[Leaves], list[Tensor]]:
    """The reference as a function of its leaves: the baseline, and what torch.compile is given."""
    run, names = straight(subject.graph), list(subject.graph.inputs)
    return lambda leaves: list(run(*[leaves[name] for name in names]))


def _works(
    subject: Subject, at: Recipe, leaves: Leaves, compiled: Callable[..., Any] | None, beside: bool
) -> dict[str, Work]:
    found = _ours(subject, at, leaves)
    if not beside:
        return found
    found |= {f"eager {n}": w for n, w in baseline(subject, at, leaves, eager(subject)).items()}
    if compiled is not None:
        found |= {f"compile {n}": w for n, w in baseline(subject, at, leaves, compiled).items()}
    return found


def _ours(subject: Subject, at: Recipe, leaves: Leaves) -> dict[str, Work]:
    """Launch-ready plans, called as the runtime calls them."""
    program, dims = subject.program, subject.dims_tuple(at.dims)
    plain = {name: t.detach() for name, t in leaves.items()}
    ordered = [plain[s.name] for s in subject.launch.interface.inputs]
    wanted = subject.launch.interface.differentiable
    forward = program.ready("forward" if wanted else "inference", dims)
    found: dict[str, Work] = {"forward": lambda: forward(list(ordered))}
    if not wanted:
        return found
    saved = subject.forward(plain)[1]
    specs = subject.launch.interface.outputs
    flowing = [
        program.zeros(spec, dims) if c is None else c
        for c, spec in zip(_flowing(subject, at), specs, strict=True)
    ]
    backward = program.ready("backward", dims, tuple(sorted(wanted)))

    def both() -> None:
        slots = forward(list(ordered))
        backward([*[slots[i] for i in forward.layout.saved], *flowing])

    return {**found, "backward": lambda: backward([*saved, *flowing]), "both": both}


def _flowing(subject: Subject, at: Recipe) -> list[Tensor | None]:
    return [None if c is None else c.contiguous() for c in inputs.cotangents(subject, at)]


def baseline(
    subject: Subject, at: Recipe, leaves: Leaves, function: Callable[[Leaves], Sequence[Tensor]]
) -> dict[str, Work]:
    """Torch's way to the same results and gradients; for the backward alone the graph is kept."""
    wanted = [leaves[n] for n in subject.launch.interface.differentiable]
    if not wanted:
        return {"forward": lambda: function(leaves)}
    flowing = _flowing(subject, at)

    def backward(results: Sequence[Tensor], keep: bool) -> None:
        pairs = [(r, c) for r, c in zip(results, flowing, strict=True) if c is not None and r.requires_grad]
        outputs, cotangents = [r for r, _ in pairs], [c for _, c in pairs]
        torch.autograd.grad(outputs, wanted, cotangents, retain_graph=keep, allow_unused=True)

    kept = function(leaves)
    return {
        "forward": lambda: function(leaves),
        "backward": lambda: backward(kept, True),
        "both": lambda: backward(function(leaves), False),
    }


def _copy(count: int, device: torch.device) -> Work:
    """Reads and writes `count` bytes together: what the memory gives at this working set."""
    size = max(count // 2, 1)
    source, target = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    return lambda: target.copy_(source)


def least_bytes(subject: Subject, dims: Mapping[str, int]) -> int:
    """Every input read once and every output written once; with gradients, cotangents read and gradients
    written too."""
    types = [t for _, _, t in (*subject.leaves, *subject.results)]
    total = sum(t.nbytes.value(dims) for t in types)
    return 2 * total if subject.launch.interface.differentiable else total


def workspace_bytes(subject: Subject, dims: Mapping[str, int]) -> int:
    """Temporaries of the hungriest plan that serves these sizes."""
    phases = ("inference", "forward", "backward")
    return max((_temporary(p, dims) for phase in phases for p in subject.plans(phase, dims)), default=0)


def _temporary(plan: Plan, dims: Mapping[str, int]) -> int:
    total = 0
    for buffer in plan.buffers:
        if buffer.source in ("temp", "zeroed"):
            count = getattr(torch, buffer.dtype).itemsize
            for size in buffer.shape:
                count *= evaluate(size, dims)
            total += count
    return total


def drift(subject: Subject, leaves: Leaves) -> dict[str, float]:
    """Root mean square error over the root mean square of a reference, of the worst output: against
    float64, and against float32 (torch's own float32 result where the block is declared so, else the
    float64 one rounded)."""
    values = {name: leaf.detach() for name, leaf in leaves.items()}
    ours = subject.infer(values)
    exact = meaning.outputs(subject, values, "float64")
    plain = all(t.dtype is torch.float32 for t in values.values() if t.is_floating_point())
    single = meaning.outputs(subject, values, "declared") if plain else [_single(t) for t in exact]
    return {"precision_drift_vs_fp64": _worst(ours, exact), "precision_drift_vs_fp32": _worst(ours, single)}


def _single(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


def _worst(ours: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    return max((accuracy.relative(a, b) for a, b in zip(ours, wanted, strict=True)), default=0.0)
