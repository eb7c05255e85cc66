"""What a call does beyond computing: buffers that a training step updates, and numbers drawn from torch's
generator. Once per step, the same again under recomputation, anew in every replay of a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from library.launch import Interface, TensorSpec

graph_task: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: -1)
_is_compiling = torch.compiler.is_compiling


def recomputing() -> bool:
    """Whether a backward is running in this thread, so that a forward now is one of activation checkpointing
    that repeats what the step did before. A trace runs no backward."""
    return not _is_compiling() and graph_task() != -1


def given(interface: Interface) -> list[TensorSpec]:
    """Inputs that a caller passes, in order."""
    return [s for s in interface.inputs if s.kind == "input" and s.name not in interface.random]


def with_drawn(interface: Interface, inputs: Sequence[Any], device: torch.device) -> list[Any]:
    """All inputs in blueprint order: those given, and the others drawn from torch's generator of the device.

    `torch.utils.checkpoint` puts that generator back before it repeats a forward, and a captured graph draws
    anew in each replay; so a repeated forward draws the same numbers, and a replayed one others.
    """
    if not interface.random:
        return list(inputs)
    left, found = iter(inputs), []
    for spec in interface.inputs:
        if spec.kind != "input":
            continue
        if spec.name in interface.random:
            shape = [size for size in spec.shape if isinstance(size, int)]
            found.append(torch.randint(0, 1 << 62, shape, dtype=torch.int64, device=device))
        else:
            found.extend([value for value in [next(left, None)] if value is not None])
    return [*found, *left]


def device_of(inputs: Sequence[Any], default: torch.device) -> torch.device:
    """Where the call's tensors are."""
    return next((t.device for t in inputs if isinstance(t, Tensor)), default)
