"""What a step may do only once: whether this forward is the step's own or one repeated by a backward."""

from __future__ import annotations

from collections.abc import Callable

import torch

_graph_task: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: -1)


def recomputing() -> bool:
    """Whether a backward is running in this thread, so that a forward now is one of activation checkpointing
    that repeats what the step did before."""
    return _graph_task() != -1
