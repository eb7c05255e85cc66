"""A short real optimisation with the artifact inside, step by step beside its eager twin and beside float64.

The block is followed by a fixed random projection of each output, the loss is the mean squared distance to
what other parameters of the same block would give. Parameters (where there are none: the inputs) are trained
by gradient descent with momentum, at the first of a few rates at which the float64 curve does not climb: one
that flies apart doubles every rounding at every step. The artifact's loss curve may stray from the float64
curve as far as eager's does, times a small factor, up to where eager's leaves the range of its types.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from gauntlet import inputs, meaning
from gauntlet.stage import Context, Failed, Outcome, Passed, Recipe, Skipped, Sweep
from gauntlet.subject import Subject

STEPS, QUICK_STEPS, HEAVY_STEPS = 60, 12, 4
BATCHES = 4
RATES, MOMENTUM = (1e-2, 1e-3, 1e-4, 1e-5), 0.8
CLIMBED = 4.0
"""Times the largest loss of the first turn over the batches."""
STRAY = 4.0
FLOOR = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""Least allowed relative distance of the curves: some rounding steps of the loss in the widest dtype
involved."""

Gradient = Callable[[Mapping[str, Tensor], Sequence[Tensor]], tuple[list[Tensor], dict[str, Tensor]]]


def _recipes(context: Context) -> Iterator[Recipe]:
    subject = context.subject
    steps = HEAVY_STEPS if subject.heavy else QUICK_STEPS if context.quick else STEPS
    yield Recipe("soak", subject.base_dims(), seed=context.seed, repeat=steps)


def _trained(subject: Subject) -> tuple[str, ...]:
    wanted = subject.launch.interface.differentiable
    params = tuple(s.name for s in subject.launch.interface.inputs if s.kind == "param" and s.name in wanted)
    return params or wanted


def _check(context: Context, recipe: Recipe) -> Outcome:
    subject = context.subject
    trained = _trained(subject)
    outputs = [i for i, (_, _, t) in enumerate(subject.results) if t.dtype.is_floating]
    if not trained or not outputs:
        return Skipped("nothing to train")
    narrow = [
        getattr(torch, s.dtype) for s in (*subject.launch.interface.inputs, *subject.launch.interface.outputs)
    ]
    floor = max(FLOOR[d] for d in narrow if d in FLOOR)

    def native(
        values: Mapping[str, Tensor], targets: Sequence[Tensor]
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        with context.launching():
            found, saved = subject.forward(values)
        flowing = _cotangents(found, targets, outputs)
        with context.launching():
            return found, subject.backward(saved, flowing, recipe.dims, trained)

    def eager(
        values: Mapping[str, Tensor], targets: Sequence[Tensor]
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        found = meaning.outputs(subject, values, "declared")
        flowing = _cotangents(found, targets, outputs)
        return found, meaning.gradients(subject, values, flowing, trained, "declared")

    def exact(
        values: Mapping[str, Tensor], targets: Sequence[Tensor]
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        found = meaning.outputs(subject, values, "float64")
        flowing = _cotangents(found, [t.double() for t in targets], outputs)
        return found, meaning.gradients(subject, values, flowing, trained, "float64")

    steps = recipe.repeat
    for rate in RATES:
        truth = _curve(subject, recipe, exact, outputs, rate, steps)
        if not _climbs(truth):
            break
    else:
        return Skipped("this optimisation diverges in float64 too")
    theirs = _curve(subject, recipe, eager, outputs, rate, steps)
    steps = next((i for i, x in enumerate(theirs) if not math.isfinite(x)), steps)
    if not steps:
        return Skipped("what is trained leaves the range of its types in eager too")
    ours = _curve(subject, recipe, native, outputs, rate, steps)
    if bad := [i for i, x in enumerate(ours) if not math.isfinite(x)]:
        return Failed(f"the loss is {ours[bad[0]]} at step {bad[0]}")
    return _compare(ours, theirs[:steps], truth[:steps], floor)


def _climbs(losses: Sequence[float]) -> bool:
    """Whether it is no descent: a loss without end, or far above those it began with."""
    return not all(x <= CLIMBED * max(losses[:BATCHES]) < math.inf for x in losses)


def _compare(ours: list[float], theirs: list[float], truth: list[float], floor: float) -> Outcome:
    top = max(abs(x) for x in truth) or 1.0
    allowed = max(STRAY * max(abs(a - b) for a, b in zip(theirs, truth, strict=True)) / top, floor)
    stray = [abs(a - b) / top for a, b in zip(ours, truth, strict=True)]
    worst = max(range(len(stray)), key=stray.__getitem__)
    if stray[worst] > allowed:
        return Failed(
            f"the loss at step {worst} is {ours[worst]:.6g}, in float64 {truth[worst]:.6g}, "
            f"in eager {theirs[worst]:.6g}"
        )
    return Passed({"steps": len(ours), "first_loss": truth[0], "last_loss": ours[-1], "stray": stray[worst]})


def _cotangents(
    found: Sequence[Tensor], targets: Sequence[Tensor], outputs: Sequence[int]
) -> list[Tensor | None]:
    flowing: list[Tensor | None] = [None] * len(found)
    for at in outputs:
        wide = torch.float64 if found[at].dtype is torch.float64 else torch.float32
        difference = found[at].to(wide) - targets[at].to(wide)
        flowing[at] = (2 * difference / max(difference.numel(), 1)).to(found[at].dtype)
    return flowing


def _curve(
    subject: Subject, recipe: Recipe, gradient: Gradient, outputs: Sequence[int], rate: float, steps: int
) -> list[float]:
    """Loss per step. State is kept in float64 and rounded to the declared dtypes for each call."""
    trained = _trained(subject)
    goal = replace(recipe, seed=recipe.seed + 1)
    batches = [inputs.values(subject, replace(recipe, seed=recipe.seed + 10 + i)) for i in range(BATCHES)]
    start, other = inputs.values(subject, recipe), inputs.values(subject, goal)
    targets = [meaning.outputs(subject, {**b, **{n: other[n] for n in trained}}, "declared") for b in batches]
    state = {n: start[n].double() for n in trained}
    speed = {n: torch.zeros_like(t) for n, t in state.items()}
    first = {**batches[1 % BATCHES], **{n: start[n] for n in trained}}
    rates = _rates(subject, first, targets[1 % BATCHES], outputs, rate)
    losses = []
    for step in range(1, steps + 1):
        at = step % BATCHES
        values = {**batches[at], **{n: state[n].to(start[n].dtype) for n in trained}}
        found, grads = gradient(values, targets[at])
        losses.append(_loss(found, targets[at], outputs))
        for name in trained:
            speed[name] = MOMENTUM * speed[name] + grads[name].double()
            state[name] = state[name] - rates[name] * speed[name]
    return losses


def _rates(
    subject: Subject, values: Mapping[str, Tensor], targets: Sequence[Tensor], outputs: Sequence[int],
    rate: float,
) -> dict[str, float]:  # fmt: skip
    """A first step moves each trained tensor by about this share of its size; the same for all three runs."""
    trained = _trained(subject)
    found = meaning.outputs(subject, values, "float64")
    flowing = _cotangents(found, [t.double() for t in targets], outputs)
    grads = meaning.gradients(subject, values, flowing, trained, "float64")
    out = {}
    for name in trained:
        size, slope = _rms(values[name].double()), _rms(grads[name])
        out[name] = rate * (size or 1.0) / slope if slope else 0.0
    return out


def _rms(tensor: Tensor) -> float:
    return float(tensor.square().mean().sqrt()) if tensor.numel() else 0.0


def _loss(found: Sequence[Tensor], targets: Sequence[Tensor], outputs: Sequence[int]) -> float:
    return sum(float((found[at].double() - targets[at].double()).square().mean()) for at in outputs)


STAGE = Sweep("soak", 70, _recipes, _check, shrink=False)
