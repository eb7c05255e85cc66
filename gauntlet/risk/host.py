"""A short real training of a small network with the artifact inside, beside its eager twin and float64.

The host is a trained gain and bias with an activation in front of every floating input, the block, and a
fixed head behind every output; the goal is what another host of the same kind gives, with noise. Sizes,
data, optimiser, what is frozen and the length of the last batch are drawn by a seed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from esper_ir import reference
from esper_ir.diagnostics import EsperError
from gauntlet import accuracy, inputs, meaning
from gauntlet.stage import Context, Failed, Recipe
from gauntlet.subject import Subject

STEPS, BATCHES = 12, 4
ELEMENTS = 1 << 17
"""Of the largest tensor of a training."""
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda t: t, "relu": torch.relu, "tanh": torch.tanh,
}  # fmt: skip
HEADS = ("projection", "projection", "projection", "pooled", "mean")
DATA = ("normal", "normal", "normal", "unit", "x10", "zeros", "shifted")
WIDE, NOISE = 3, 0.1
WORSE, STRAY = 0.05, 4.0
"""A run is rolled back when its loss ends worse than the twin's by this share and so many times the distance
of the twin's from float64's."""
Leaves = dict[str, Tensor]
Call = Callable[[Leaves], list[Tensor]]


@dataclass(frozen=True)
class Deployment:
    """One training. `dims`: of a full batch; `last`: of the last one of an epoch; `frozen`: "", "block"
    or "inputs", what is not trained; `rate`: of the optimiser; `checked`: steps at which results are
    compared."""

    seed: int
    dims: Mapping[str, int]
    last: Mapping[str, int]
    data: str
    activation: str
    head: str
    frozen: str
    adam: bool
    rate: float
    checked: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def sizes(self, step: int) -> Mapping[str, int]:
        return self.last if step % BATCHES == BATCHES - 1 else self.dims


def draw(subject: Subject, seed: int) -> Deployment:
    """Batches are multiples of 16 half of the time, as people choose them; last batches are what is left."""
    rng = random.Random(seed)
    dims = _sizes(subject, rng)
    last = {n: subject.nearest(n, max(1, int(size * rng.random()))) for n, size in dims.items()}
    trained = subject.launch.interface.differentiable
    block = any(s.kind == "param" and s.name in trained for s in subject.launch.interface.inputs)
    frozen = rng.choice(("", "", "block", "inputs"))
    adam = rng.random() < 0.5
    return Deployment(
        seed, dims, last, rng.choice(DATA), rng.choice(sorted(ACTIVATIONS)), rng.choice(HEADS),
        frozen if block else "", adam, 10 ** rng.uniform(-3, -1.5 if adam else -1),
        (rng.randrange(STEPS - 1), STEPS - 1),
    )  # fmt: skip


def _sizes(subject: Subject, rng: random.Random) -> dict[str, int]:
    largest = subject.largest_dims(ELEMENTS)
    out = {}
    for dim in subject.launch.interface.dims:
        most = largest[dim.name]
        size = round(math.exp(rng.uniform(math.log(max(dim.min, 1)), math.log(max(most, 1)))))
        if rng.random() < 0.5:
            size = max(16, size // 16 * 16)
        out[dim.name] = subject.nearest(dim.name, min(size, most))
    return out


# -- what happens


def deployed(context: Context, chosen: Deployment) -> tuple[str, str]:
    """(outcome by `library.contracts.OUTCOMES`, why): EXPOSED when nothing happened.

    MISMATCH: a result of a checked step lies beyond the judge's bound; DIVERGED: the loss is not finite where
    the twin's is; ROLLED_BACK: it ends worse; CRASHED: a launch was refused. What kills the process is told
    by whoever watches it.
    """
    subject = context.subject
    host = _Host(subject, chosen)
    context.at(Recipe("deployment", chosen.dims, seed=chosen.seed))
    spots: list[str] = []
    try:
        with context.launching(2 * STEPS):
            ours = host.trained(subject.attached, torch.float32, spots)
    except EsperError as error:
        return "CRASHED", f"{error.code} {error.message}"
    theirs = host.trained(lambda leaves: host.twin(leaves, "declared"), torch.float32)
    truth = host.trained(lambda leaves: host.twin(leaves, "float64"), torch.float64)
    if not all(map(math.isfinite, (*theirs, *truth))):
        return "EXPOSED", "the loss of the eager twin is not finite either"
    if not all(map(math.isfinite, ours)):
        return "DIVERGED", f"the loss is {next(x for x in ours if not math.isfinite(x))}"
    if spots:
        return "MISMATCH", spots[0]
    worse, allowed = _end(ours) - _end(theirs), STRAY * abs(_end(theirs) - _end(truth))
    if worse > WORSE * _end(theirs) + allowed:
        return "ROLLED_BACK", f"the loss ends at {_end(ours):.4g}, the twin's at {_end(theirs):.4g}"
    return "EXPOSED", ""


def _end(losses: Sequence[float]) -> float:
    """Mean over the last epoch."""
    return sum(losses[-BATCHES:]) / BATCHES


class _Optimiser:
    """Gradient descent with momentum, or Adam (Kingma and Ba, 2015), after clipping the norm of all
    gradients to 1. torch's own would import its compiler, which a confined worker may not."""

    def __init__(self, trained: Sequence[Tensor], rate: float, adam: bool) -> None:
        self.trained, self.rate, self.adam, self.steps = trained, rate, adam, 0
        self.mean = [torch.zeros_like(t) for t in trained]
        self.square = [torch.zeros_like(t) for t in trained]

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor | None]) -> None:
        """One update in place; None is a gradient of zeros."""
        self.steps += 1
        found = [
            torch.zeros_like(t) if g is None else g for t, g in zip(self.trained, gradients, strict=True)
        ]
        norm = torch.stack([g.square().sum() for g in found]).sum().sqrt()
        scale = 1.0 / torch.clamp(norm, min=1.0)
        for tensor, gradient, mean, square in zip(self.trained, found, self.mean, self.square, strict=True):
            gradient = gradient * scale
            if not self.adam:
                mean.mul_(0.9).add_(gradient)
                tensor.sub_(self.rate * mean)
                continue
            mean.mul_(0.9).add_(0.1 * gradient)
            square.mul_(0.999).add_(0.001 * gradient.square())
            size = (square / (1 - 0.999**self.steps)).sqrt() + 1e-8
            tensor.sub_(self.rate / (1 - 0.9**self.steps) * mean / size)


class _Host:
    """The network and its data, the same for each of the runs that are compared."""

    def __init__(self, subject: Subject, chosen: Deployment) -> None:
        self.subject, self.chosen = subject, chosen
        self.activation = ACTIVATIONS[chosen.activation]
        self.specs = {s.name: s for s in subject.launch.interface.inputs}
        self.able = set(subject.launch.interface.differentiable)
        self.batches = [self._drawn(chosen.sizes(at), chosen.data, 10 + at) for at in range(BATCHES)]
        self.start = self._drawn(chosen.dims, "normal", 0)
        generator = torch.Generator().manual_seed(chosen.seed)
        self.heads = [self._head(generator, t.shape[-1].static if t.shape else None)
                      for _, _, t in subject.results]  # fmt: skip
        teacher = self._drawn(chosen.dims, "normal", 1)
        self.goals = [self._goal(batch, teacher, generator) for batch in self.batches]

    def _drawn(self, dims: Mapping[str, int], data: str, seed: int) -> Leaves:
        """A tensor per leaf of the block in its declared type."""
        recipe = Recipe("deployment", dims, data, seed=self.chosen.seed * 100 + seed)
        return inputs.values(self.subject, recipe)

    def _head(self, generator: torch.Generator, length: int | None) -> Tensor | None:
        """[length, WIDE], or None where the last axis varies: then its mean is taken."""
        if length is None or self.chosen.head == "mean":
            return None
        return torch.randn((length, WIDE), generator=generator, dtype=torch.float64) / length**0.5

    def _goal(self, batch: Leaves, teacher: Leaves, generator: torch.Generator) -> list[Tensor]:
        kinds = {n: s.kind for n, s in self.specs.items()}
        leaves = {n: batch[n] if kinds[n] == "input" else teacher[n] for n in self.specs}
        found = self._predicted(meaning.outputs(self.subject, leaves, "float64"), torch.float64)
        return [p + NOISE * torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in found]

    def _predicted(self, outputs: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
        out = []
        for found, head in zip(outputs, self.heads, strict=True):
            if not found.is_floating_point():
                continue
            wide = found.to(dtype)
            if head is None:
                out.append(wide.mean(-1) if wide.dim() else wide)
                continue
            pooled = self.chosen.head == "pooled" and wide.dim() > 1
            out.append((wide.mean(0) if pooled else wide) @ head.to(dtype))
        return out

    def twin(self, leaves: Leaves, precision: reference.Precision) -> list[Tensor]:
        """The reference as part of torch's autograd graph."""
        found = reference.evaluate(self.subject.graph, leaves, precision=precision)
        return [found[name] for name in self.subject.graph.outputs]

    def trained(self, call: Call, dtype: torch.dtype, spots: list[str] | None = None) -> list[float]:
        """Loss per step. What is trained is kept in `dtype`; in float64 nothing is rounded to the declared
        types. Reasons of mismatches go to `spots`, where one is given."""
        state = self._state(dtype)
        every = [t for t in state.values() if t.requires_grad]
        optimiser = _Optimiser(every, self.chosen.rate, self.chosen.adam)
        losses = []
        for step in range(STEPS):
            leaves = self._leaves(state, self.batches[step % BATCHES], dtype)
            outputs = call(leaves)
            pairs = zip(self._predicted(outputs, dtype), self.goals[step % BATCHES], strict=True)
            loss = torch.stack([(p - g.to(dtype)).square().mean() for p, g in pairs]).sum()
            losses.append(float(loss.detach()))
            if not math.isfinite(losses[-1]):
                break
            if spots is not None and not spots and step in self.chosen.checked:
                spots += self._wrong(step, leaves, outputs, loss)
            optimiser.step(torch.autograd.grad(loss, every, allow_unused=True))
        return losses

    def _state(self, dtype: torch.dtype) -> Leaves:
        """Gain and bias by input ("x*", "x+"), and the block's parameters."""
        state: Leaves = {}
        for name, spec in self.specs.items():
            value = self.start[name]
            if not value.is_floating_point():
                continue
            learns = name in self.able
            if spec.kind == "input":
                shape = [n for n in spec.shape[-1:] if isinstance(n, int)]
                on = learns and self.chosen.frozen != "inputs"
                state[f"{name}*"] = torch.ones(shape, dtype=dtype).requires_grad_(on)
                state[f"{name}+"] = torch.zeros(shape, dtype=dtype).requires_grad_(on)
            elif spec.kind == "param":
                on = learns and self.chosen.frozen != "block"
                state[name] = value.to(dtype, copy=True).requires_grad_(on)
        return state

    def _leaves(self, state: Leaves, batch: Leaves, dtype: torch.dtype) -> Leaves:
        out = {}
        for name in self.specs:
            declared = dtype if dtype is torch.float64 else batch[name].dtype
            if f"{name}*" in state:
                mixed = batch[name].to(dtype) * state[f"{name}*"] + state[f"{name}+"]
                out[name] = self.activation(mixed).to(declared)
            elif name in state:
                out[name] = state[name].to(declared)
            else:
                floating = batch[name].is_floating_point()
                out[name] = self.start[name].to(declared) if floating else batch[name]
        return out

    def _wrong(self, step: int, leaves: Leaves, outputs: Sequence[Tensor], loss: Tensor) -> list[str]:
        """Reasons why outputs and gradients of this step are not what the blueprint means, by the judge's
        rule."""
        subject = self.subject
        values = {n: t.detach() for n, t in leaves.items()}
        wanted = tuple(n for n, t in leaves.items() if t.requires_grad)
        live = [o for o in outputs if o.requires_grad]
        flows = torch.autograd.grad(loss, live, retain_graph=True, allow_unused=True)
        found = torch.autograd.grad(loss, [leaves[n] for n in wanted], retain_graph=True, allow_unused=True)
        given = iter(flows)
        cotangents = [next(given) if o.requires_grad else None for o in outputs]
        rows: list[accuracy.Row] = []
        wide = meaning.outputs(subject, values, "float64")
        eager = meaning.outputs(subject, values, "declared")
        for name, *row in zip(subject.blueprint.outputs, outputs, wide, eager, strict=True):
            rows.append((name, row[0].detach(), row[1], row[2]))
        exact = meaning.gradients(subject, values, cotangents, wanted, "float64")
        theirs = meaning.gradients(subject, values, cotangents, wanted, "declared")
        for name, got in zip(wanted, found, strict=True):
            full = torch.zeros_like(values[name]) if got is None else got
            rows.append((f"d({name})", full, exact[name], theirs[name]))
        recipe = Recipe("deployment", self.chosen.sizes(step), seed=self.chosen.seed)
        judged = accuracy.all_of(subject, recipe, rows, self._others(values, cotangents))
        return [f"step {step}: {judged.reason}"] if isinstance(judged, Failed) else []

    def _others(self, values: Leaves, cotangents: Sequence[Tensor | None]) -> accuracy.Others:
        """More float64 results, as for the stages of numerics and gradients."""
        subject = self.subject
        wanted = subject.launch.interface.differentiable

        def nearby(turn: int) -> dict[str, Tensor]:
            outputs = meaning.rounded(subject, values, None, turn)
            return {**outputs, **meaning.rounded(subject, values, cotangents, turn)}

        def flat() -> dict[str, Tensor]:
            outputs = meaning.outputs(subject, values, "float64", flat=True)
            grads = meaning.gradients(subject, values, cotangents, wanted, "float64", flat=True)
            named = dict(zip(subject.blueprint.outputs, outputs, strict=True))
            return {**named, **{f"d({name})": grad for name, grad in grads.items()}}

        def rules() -> dict[str, Tensor]:
            return {**meaning.by_bodies(subject, values), **meaning.by_rules(subject, values, cotangents)}

        def flushed() -> dict[str, Tensor]:
            outputs = meaning.flushed(subject, values, None)
            return {**outputs, **meaning.flushed(subject, values, cotangents)}

        return accuracy.Others(nearby, (flat, rules), flushed)
