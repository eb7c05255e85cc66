"""Where a case is thought over: small ones on the processor, also where the artifact runs on a card.

A case of a few thousand elements is a hundred little questions: values in float64, masks, largest elements.
A card that works for others as well answers each of them when it is its turn; a processor has answered all of
them by then. So the float64 reference of a small case, and every comparison, is computed on the processor;
what the artifact gave is fetched at once. Eager torch runs where the artifact does, where it is asked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gauntlet.subject import Subject

ELEMENTS, WORK = 1 << 16, 1 << 24
"""Of the largest tensor, weights too, and operations of a forward: up to these a processor is sooner done."""
CPU = torch.device("cpu")


def device(subject: Subject, dims: Mapping[str, int]) -> torch.device:
    """Where the reference of a case of these sizes is computed."""
    if subject.device.type == "cpu" or max(subject.elements(dims), subject.fixed_elements) > ELEMENTS:
        return subject.device
    return CPU if subject.work(dims) <= WORK else subject.device


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


def flowing(cotangents: Sequence[Tensor | None], where: torch.device) -> list[Tensor | None]:
    """Cotangents there; of what does not flow back there is none."""
    return [None if c is None else c.to(where) for c in cotangents]
