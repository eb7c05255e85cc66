"""After a launch failed and the device survived: the step goes on by the eager twin, and others are told."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from esper_ir.diagnostics import EsperError
from library.contracts import FieldReport
from library.store import Library
from runtime import loader, outcomes
from runtime.driver import STICKY
from runtime.errors import fail
from runtime.executor import Program
from runtime.functions import Mask, State

LAUNCH_FAILED = "E0820"


def tell(entry: loader.Entry, library: Any, error: EsperError) -> None:
    """Choose this artifact last, drop it from the cache, write the outcome: once per process and artifact."""
    record, device = entry.record, entry.program.device
    error.details["artifact"] = record.id
    if not loader.mark_faulty(record.id):
        return
    facts = {
        "code": error.code,
        "message": error.message,
        "group": error.node or "",
        "cuda_error": error.details.get("cuda_error", 0),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "time": time.time(),
    }
    report = FieldReport(record.blueprint, record.id, "", 0.0, 0.0, outcomes.CRASHED, facts)
    outcomes.tell(report, library.home if isinstance(library, Library) else library)


def survived(error: EsperError) -> bool:
    """Whether anything else can still run on the device in this process, and the caller wants it to."""
    return error.details.get("cuda_error") not in STICKY and not loader.strict()


def broken(state: State, error: EsperError) -> State:
    """A state whose every call meets the same refusal before anything is launched."""
    state.tally(state.counters)
    made = State(state.program, state.counters)
    made.node, made.gradients = None, state.gradients

    # Not the error itself: its traceback holds every tensor of the step.
    code, message, node, details = error.code, error.message, error.node, dict(error.details)

    def refuse(*_: Any) -> Any:
        raise fail(code, message, node=node, details=dict(details))

    made.ready = refuse
    return made


def recoverer(block: Callable[[], Any]) -> Callable[..., Sequence[Tensor | None]]:
    """What a backward of this block turns to after an error. `block`: a weak reference."""

    def recover(
        error: EsperError, mask: Mask, saved: Sequence[Tensor], cotangents: Sequence[Tensor | None]
    ) -> Sequence[Tensor | None]:
        found = block()
        if error.code != LAUNCH_FAILED or found is None:
            raise error
        return gradients(found, error, mask, saved, cotangents)

    return recover


def gradients(
    block: Any,
    error: EsperError,
    mask: Mask,
    saved: Sequence[Tensor],
    cotangents: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """What a backward whose launch failed should have given, by the twin; raises the error where the device
    is lost, or an input of the forward is not at hand any more."""
    program = block.program
    block.give_up(error)
    leaves = _leaves(program, saved, block.own_leaves())
    if leaves is None:
        error.details["unrecoverable"] = "an input of the forward was not kept for the backward"
        raise error
    wanted = [leaf for leaf, asked in zip(leaves, mask, strict=True) if asked]
    with torch.enable_grad():
        found = block.by_twin(leaves)
    outputs = found if isinstance(found, tuple) else (found,)
    pairs = [(o, c) for o, c in zip(outputs, cotangents, strict=True) if c is not None and o.requires_grad]
    made = iter(torch.autograd.grad([o for o, _ in pairs], wanted, [c for _, c in pairs], allow_unused=True))
    return [next(made) if asked else None for asked in mask]


def _leaves(program: Program, saved: Sequence[Tensor], own: Sequence[Tensor]) -> list[Tensor] | None:
    """Every leaf of the forward, detached: saved for the backward, or the block's own."""
    plan = next(p for p in program.launch.plans if p.phase == "forward")
    specs = program.interface.inputs
    first = len(specs) - len(own)
    found = {first + i: tensor for i, tensor in enumerate(own)}
    for number, tensor in zip(plan.saved, saved, strict=True):
        buffer = plan.buffers[number]
        if buffer.source == "input":
            found[buffer.index] = tensor
    if len(found) < len(specs):
        return None
    can = program.interface.differentiable
    return [found[i].detach().requires_grad_(spec.name in can) for i, spec in enumerate(specs)]
