"""Before anything is judged, the judge is: it must refuse answers that are certainly wrong.

For the cases of the battery, and for every output and gradient, these are offered as answers: nothing done
(the memory as it was), zeros, a copy of an input, a constant (the mean), the mean over the first axis, and
the right answer to other values. An answer that happens to be right (zeros for a block that is zero there)
proves nothing and is passed over. What is far off in any case must be refused in one: values may leave
nothing of a gradient but roundings of eager's own (the scores of an attention where one key has all of the
weight), and say nothing of an answer then; others have to.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from gauntlet import accuracy, arena, hosted, inputs, meaning
from gauntlet.stage import Context, Failed, Outcome, Passed, Recipe, Skipped, Sweep

DEAR = 1 << 18
"""Elements of the largest tensor beyond which one draw has to do, where it accepts no wrong answer. In a
hurry one has to do at any size."""
FAR = 0.05
"""Relative root mean square distance from the right answer that makes an answer certainly wrong."""
CLEAR = 4
"""An answer also has to be so many times further off than eager is, of which the rule allows up to three."""
NOTHING_FAR = "no wrong answer is far from the right one"
VISIBLE = 64
"""Some element has to be off by so many times the smallest normal number of the type."""


def _recipes(context: Context) -> Iterator[Recipe]:
    subject = context.subject
    wanted = subject.launch.interface.differentiable
    dims = subject.base_dims()
    allowed = inputs.draws(subject, quick=context.quick)
    draws = [draw for draw in inputs.smooth_draws(subject) if draw in allowed]
    for draw in draws:
        yield Recipe("selftest", dims, draw, cotangent="normal" if wanted else "", seed=context.seed)


def _dear(context: Context) -> bool:
    subject = context.subject
    return subject.heavy or subject.elements(subject.base_dims()) > DEAR


@dataclass
class _Told:
    """(tensor, wrong answer) of those that were refused, and of those that would have been accepted."""

    refused: set[tuple[str, str]] = field(default_factory=set)
    accepted: dict[tuple[str, str], Recipe] = field(default_factory=dict)

    @property
    def outcome(self) -> Outcome:
        for name, label in self.accepted:
            if (name, label) not in self.refused:
                why = f"the rule would accept {label} for {name}: this blueprint cannot be judged"
                return Failed(why, self.accepted[name, label])
        return Passed({"refused": len(self.refused)}) if self.refused else Skipped(NOTHING_FAR)


def _check(context: Context, recipe: Recipe) -> Outcome:
    told = _Told()
    return _offer(context, recipe, told) or told.outcome


def _offer(context: Context, recipe: Recipe, told: _Told) -> Failed | None:
    """What the rule says of wrong answers to one case; `Failed` where it refuses eager's own."""
    subject = context.subject
    other = replace(recipe, seed=recipe.seed + 1, repeat=2)  # drawn, also where a case's own are stored
    (values, meant), others = inputs.case(subject, recipe), inputs.values(subject, other)
    wanted = subject.launch.interface.differentiable
    here = hosted.device(subject, recipe.dims)
    exact = dict(zip(subject.blueprint.outputs, meaning.outputs(subject, meant, "float64"), strict=True))
    eager = dict(zip(subject.blueprint.outputs, meaning.outputs(subject, values, "declared"), strict=True))
    elsewhere = dict(
        zip(subject.blueprint.outputs, meaning.outputs(subject, others, "declared"), strict=True)
    )
    if recipe.cotangent:
        flowing, flowing_other = inputs.cotangents(subject, recipe), inputs.cotangents(subject, other)
        meant_flow = inputs.cotangents(subject, recipe, here)
        for name, grad in meaning.gradients(subject, meant, meant_flow, wanted, "float64").items():
            exact[f"d({name})"] = grad
        for name, grad in meaning.gradients(subject, values, flowing, wanted, "declared").items():
            eager[f"d({name})"] = grad
        for name, grad in meaning.gradients(subject, others, flowing_other, wanted, "declared").items():
            elsewhere[f"d({name})"] = grad
    eager, elsewhere = hosted.named(eager, here), hosted.named(elsewhere, here)
    for name in exact:
        right, plain, other = (_some(t[name]) for t in (exact, eager, elsewhere))
        if wrong := accuracy.one(subject, recipe, (name, plain, right, plain)):
            return Failed(f"the rule refuses eager's own {name}: {wrong}")
        share = max(FAR, CLEAR * accuracy.relative(plain, right))
        for label, answer in _wrong_answers(recipe, plain, other, meant):
            if not _far(answer, right, share):
                continue
            if accuracy.one(subject, recipe, (name, answer, right, plain)):
                told.refused.add((name, label))
            else:
                told.accepted.setdefault((name, label), recipe)
    return None


def _some(tensor: Tensor) -> Tensor:
    """The first rows, as many as make `DEAR` elements: the rule judges row by row."""
    if tensor.numel() <= DEAR or tensor.dim() < 2:
        return tensor
    return tensor[: max(1, DEAR // (tensor.numel() // tensor.shape[0]))]


def _wrong_answers(
    recipe: Recipe, right: Tensor, elsewhere: Tensor, values: dict[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    poison = torch.empty_like(right)
    arena.poison(poison, recipe.seed + 17)
    yield "memory as it was", poison
    yield "zeros", torch.zeros_like(right)
    yield "the answer to other values", elsewhere
    if right.is_floating_point():
        yield "a constant", torch.full_like(right, float(right.double().mean()))
        if right.dim() > 1:
            yield (
                "the mean of the first axis",
                right.double().mean(0, keepdim=True).expand_as(right).to(right.dtype),
            )
        yield "the right answer negated", -right
        yield "the right answer shifted by one element", right.reshape(-1).roll(1).reshape(right.shape)
    for name, value in values.items():
        if value.numel() >= right.numel() and value.dtype is right.dtype:
            yield f"a copy of {name}", value.reshape(-1)[: right.numel()].reshape(right.shape)


def _far(answer: Tensor, right: Tensor, share: float) -> bool:
    """Far from the right answer as its own type can hold it: long chains may leave nothing above the smallest
    number of the type (1e-250, say), and then zeros are right."""
    if not right.is_floating_point():
        return bool((answer != right).any())
    a, b = answer.double(), right.to(answer.dtype).double()
    if not torch.isfinite(b).all():
        return False
    if not torch.isfinite(a).all():
        return True
    off = a - b
    least = VISIBLE * torch.finfo(answer.dtype).smallest_normal
    return float(off.norm()) > share * float(b.norm()) and bool((off.abs() > least).any())


@dataclass(frozen=True)
class SelfTest(Sweep):
    """Passes when wrong answers were refused with the values of at least one draw."""

    def run(self, context: Context) -> Outcome:
        told, count = _Told(), 0
        for recipe in self.recipes(context):
            context.at(recipe)
            if (wrong := _offer(context, recipe, told)) is not None:
                return replace(wrong, case=recipe)
            count += 1
            if (context.quick or _dear(context)) and isinstance(told.outcome, Passed):
                break
        outcome = told.outcome
        if isinstance(outcome, Skipped):
            return Failed(f"{NOTHING_FAR}: this blueprint cannot be judged")
        return Passed({**outcome.metrics, "cases": count}) if isinstance(outcome, Passed) else outcome


STAGE = SelfTest("selftest", 20, _recipes, _check, shrink=False)
