"""A block in eager mode: one shared autograd.Function over launch-ready plans.

Differentiable once. What torch.autograd.Function does per call beyond its C part is left out: `apply` is
the C method, torch.func transforms were refused before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from runtime.errors import fail
from runtime.executor import Counters, Dims, Program, Ready
from runtime.watch import Watched

Mask = tuple[bool, ...]


class State:
    """What one block gives to its calls: the program, its own counters, and which plan answers which
    gradients."""

    __slots__ = ("program", "counters", "ready", "_wanted", "_returns")

    def __init__(self, program: Program, counters: Counters, debug: bool = False) -> None:
        self.program, self.counters = program, counters
        self.ready = _watching(program) if debug else program.ready
        self._wanted: dict[Mask, tuple[str, ...]] = {}
        self._returns: dict[tuple[Mask, tuple[int, ...]], tuple[int, ...]] = {}

    def wanted(self, mask: Mask) -> tuple[str, ...]:
        """Names of the gradients asked for: `mask` per input of the interface."""
        found = self._wanted.get(mask)
        if found is None:
            interface = self.program.interface
            pairs = zip(interface.inputs, mask, strict=True)
            found = tuple(s.name for s, asked in pairs if asked and s.name in interface.differentiable)
            self._wanted[mask] = found
        return found

    def returns(self, mask: Mask, ready: Ready) -> tuple[int, ...]:
        """Per input of the interface the slot of its gradient, -1 for None."""
        key = (mask, ready.layout.gradients)
        found = self._returns.get(key)
        if found is None:
            slot = dict(zip(ready.plan.wanted, ready.layout.gradients, strict=True))
            pairs = zip(self.program.interface.inputs, mask, strict=True)
            found = tuple(slot.get(s.name, -1) if asked else -1 for s, asked in pairs)
            self._returns[key] = found
        return found


def _watching(program: Program) -> Callable[..., Ready]:
    """Like `program.ready`, but every kernel is looked at; prepared anew for each call."""

    def ready(phase: str, dims: Dims, wanted: tuple[str, ...] = ()) -> Ready:
        plan = program.plan_for(phase, dims, wanted)
        return Watched(program, program.prepare(plan, dims, separate=True))

    return ready


class Call(torch.autograd.Function):
    """`call(state, *tensors)`: forward plan now, the smallest backward plan that suffices later."""

    @staticmethod
    def forward(ctx: Any, state: State, *tensors: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        program = state.program
        slots: list[Any] = list(tensors)
        dims = program.admit(slots, state.counters)
        ready = state.ready("forward", dims)
        ready(slots)
        state.counters.launches += ready.launches
        ctx.save_for_backward(*[slots[i] for i in ready.layout.saved])
        ctx.call = (state, dims)
        outputs = ready.layout.outputs
        return slots[outputs[0]] if len(outputs) == 1 else tuple([slots[i] for i in outputs])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        state, dims = ctx.call
        mask = ctx.needs_input_grad[1:]
        saved = ctx.saved_tensors
        if torch.is_grad_enabled():
            return (None, *_refusing(state, dims, mask, saved, cotangents))
        return (None, *differentiate(state, dims, mask, saved, cotangents))


call = super(torch.autograd.Function, Call).apply  # type: ignore[misc]


def differentiate(
    state: State,
    dims: Dims,
    mask: Mask,
    saved: Sequence[Tensor],
    cotangents: Sequence[Tensor | None],
) -> Sequence[Tensor | None]:
    """A gradient per input of the interface, None where not asked for or not differentiable."""
    wanted = state.wanted(mask)
    if not wanted or not any(c is not None for c in cotangents):
        return [None] * len(mask)
    program = state.program
    ready = state.ready("backward", dims, wanted)
    slots = program.backward_feeds(dims, saved, cotangents, state.counters)
    ready(slots)
    state.counters.launches += ready.launches
    return [slots[i] if i >= 0 else None for i in state.returns(mask, ready)]


def _refusing(
    state: State, dims: Dims, mask: Mask, saved: Sequence[Tensor], cotangents: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Under create_graph: the gradients, tied to a refusal that is raised only if they are differentiated
    again."""
    with torch.no_grad():
        found = differentiate(state, dims, mask, saved, cotangents)
    made = [g for g in found if g is not None]
    sources = [t for t in (*saved, *cotangents) if t is not None and t.requires_grad]
    if not made or not sources:
        return list(found)
    tied = iter(_Once.apply(state.program.artifact_id, len(made), *made, *sources))
    return [None if g is None else next(tied) for g in found]


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, artifact_id: str, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.artifact_id = artifact_id
        return tuple(t.view_as(t) for t in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        raise double_backward(ctx.artifact_id)


def double_backward(artifact_id: str) -> Exception:
    """E0816."""
    return fail(
        "E0816",
        f"{artifact_id} is differentiable once; a gradient of its gradient was asked for",
        node=artifact_id,
        hint="use the eager twin for second derivatives: runtime.twin(id)",
    )
