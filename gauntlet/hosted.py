"""Where a case is thought over: small ones on the processor, also where the artifact runs on a card.

A case of a few thousand elements is a hundred little questions: values in float64, masks, largest elements.
A card that works for others as well answers each of them when it is its turn; a processor has answered all of
them by then. So both measures of a small case, float64 and eager torch, and every comparison are computed on
the processor; what the artifact gave is fetched at once. Nothing is refused for that: eager where the
artifact runs, with the sums and functions of that device, is asked before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from gauntlet.stage import Outcome, Passed
from gauntlet.subject import Subject

Eager = TypeVar("Eager")
ELEMENTS, WORK = 1 << 16, 1 << 24
"""Of the largest tensor, weights too, and operations of a forward: up to these a processor is sooner done."""
CPU = torch.device("cpu")


def device(subject: Subject, dims: Mapping[str, int]) -> torch.device:
    """Where the reference of a case of these sizes is computed."""
    if subject.device.type == "cpu" or max(subject.elements(dims), subject.fixed_elements) > ELEMENTS:
        return subject.device
    return CPU if subject.work(dims) <= WORK else subject.device


def judged(
    subject: Subject,
    dims: Mapping[str, int],
    eager: Callable[[bool], Eager],
    judge: Callable[[Eager], Outcome],
) -> Outcome:
    """`judge` by what `eager` gave: near the reference (True), and where it is refused by that, or torch
    cannot compute it there, where the artifact runs."""
    if device(subject, dims) != subject.device:
        near = _unless_unknown(eager)
        if near is not None and isinstance(outcome := judge(near), Passed):
            return outcome
    return judge(eager(False))


def _unless_unknown(eager: Callable[[bool], Eager]) -> Eager | None:
    """None for what torch has no kernel for on the processor: it has fewer for short types there."""
    try:
        return eager(True)
    except RuntimeError as error:
        if "not implemented" not in str(error):
            raise
        return None


def fetched(tensors: Sequence[Tensor], where: torch.device) -> list[Tensor]:
    """The tensors there; one wait for all of them."""
    if where.type != "cpu" or all(t.is_cpu for t in tensors):
        return [t.to(where) for t in tensors]
    out = [_begun(t.detach()) for t in tensors]
    torch.cuda.synchronize(next(t.device for t in tensors if not t.is_cpu))
    return out


def _begun(tensor: Tensor) -> Tensor:
    if tensor.is_cpu or not tensor.numel():
        return tensor.cpu()
    there = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return there.copy_(tensor, non_blocking=True)


def named(tensors: Mapping[str, Tensor], where: torch.device) -> dict[str, Tensor]:
    """`fetched`, by name."""
    return dict(zip(tensors, fetched(list(tensors.values()), where), strict=True))
