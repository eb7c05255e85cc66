"""What the blueprint means, in float64 and as eager torch computes it: the two measures of every
comparison."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from esper_ir import reference
from esper_ir.reference import Precision
from gauntlet.subject import Subject


def outputs(subject: Subject, values: Mapping[str, Tensor], precision: Precision) -> list[Tensor]:
    """Results in the order of the blueprint."""
    with torch.no_grad():
        found = reference.evaluate(subject.blueprint, values, precision=precision)
    return [found[name] for name in subject.blueprint.outputs]


def gradients(
    subject: Subject,
    values: Mapping[str, Tensor],
    cotangents: Sequence[Tensor | None],
    wanted: Iterable[str],
    precision: Precision,
) -> dict[str, Tensor]:
    """By torch's autograd through the reference; zeros where no path leads. None is a cotangent of zeros."""
    names = tuple(wanted)
    leaves = {name: _leaf(tensor, precision, name in names) for name, tensor in values.items()}
    with torch.enable_grad():
        found = reference.evaluate(subject.blueprint, leaves, precision=precision)
        results = [found[name] for name in subject.blueprint.outputs]
    pairs = [(r, c) for r, c in zip(results, cotangents, strict=True) if c is not None and r.requires_grad]
    if not pairs:
        return {name: torch.zeros_like(leaves[name]) for name in names}
    grads = torch.autograd.grad(
        [r for r, _ in pairs],
        [leaves[n] for n in names],
        [c.to(r.dtype) for r, c in pairs],
        allow_unused=True,
    )
    return {
        name: torch.zeros_like(leaves[name]) if grad is None else grad
        for name, grad in zip(names, grads, strict=True)
    }


def _leaf(tensor: Tensor, precision: Precision, wanted: bool) -> Tensor:
    wide = precision == "float64" and tensor.is_floating_point()
    out = tensor.detach().to(torch.float64) if wide else tensor.detach()
    return out.clone().requires_grad_() if wanted else out


def directional(
    subject: Subject, values: Mapping[str, Tensor], along: Mapping[str, Tensor], step: float
) -> list[Tensor]:
    """(f(v + step*d) - f(v - step*d)) / (2*step) in float64: the derivative without any gradient rule."""
    wide = {n: t.to(torch.float64) if t.is_floating_point() else t for n, t in values.items()}
    moved = [
        outputs(
            subject, {n: t + sign * step * along[n] if n in along else t for n, t in wide.items()}, "float64"
        )
        for sign in (1, -1)
    ]
    return [(up - down) / (2 * step) for up, down in zip(*moved, strict=True)]
