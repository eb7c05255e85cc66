"""What happens around an optimizer step: gradients for seeds before it, counters and ramps after it.

Nothing here reads a value back from the device in the step that made it: what a strategy decides from is a
step old, and copied without waiting.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from runtime.seeds.commands import GraftingStrategy
from runtime.seeds.grafting import alpha_at, progress
from runtime.seeds.layer import Slot, overriding
from runtime.seeds.lifecycle import Evidence, Lifecycle, ask
from runtime.seeds.ranks import whole
from runtime.seeds.seed import same_random

GATE_OF = {
    Lifecycle.GERMINATED: "G0b",
    Lifecycle.TRAINING: "G2",
    Lifecycle.GRAFTING: "G3",
    Lifecycle.STABILIZATION: "G3s",
    Lifecycle.EMBARGOED: "embargo",
    Lifecycle.RESETTING: "reset",
}


class Late:
    """A number on the device, read one step after it was made."""

    def __init__(self, value: Tensor) -> None:
        self._event: Any = None
        self._host = value.detach()
        if value.is_cuda:
            self._host = torch.empty((), dtype=value.dtype, pin_memory=True)
            self._host.copy_(value.detach(), non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> float:
        if self._event is not None:
            self._event.synchronize()
        return float(self._host)


def before(growth: Any, accompanied: bool = False) -> None:
    """Hand every learning seed its gradient: averaged over ranks, finite, clipped by its own norm. Those in
    the companion get theirs after the host's step, in which LBFGS and its like make gradients."""
    for slot in growth.moving:
        if slot.seed is None or not slot.seed.learns:
            continue  # a fixed function, or frozen on its way down
        if growth.surgeon.accompanies(slot.id) == accompanied:
            _hand_over(growth, slot, slot.seed.named())
    if growth.ranks.many > 1 and not accompanied:
        _mean_committed(growth)


def _hand_over(growth: Any, slot: Slot, named: dict[str, nn.Parameter]) -> None:
    held, batches = slot.grads, slot.batches
    slot.drop()
    teaching = slot.state is not Lifecycle.TRAINING or slot.site.teaching
    if not teaching or not (held or growth.ranks.many > 1):
        for parameter in named.values():
            parameter.grad = None
        return
    share = 1.0 / batches if slot.state is Lifecycle.TRAINING and batches > 1 else 1.0
    grads = [held[n] * share if n in held else torch.zeros_like(p) for n, p in named.items()]
    grads = growth.ranks.mean(grads)
    norm = torch.stack([torch.linalg.vector_norm(g, dtype=torch.float32) for g in grads]).norm()
    fine = torch.isfinite(norm)
    coefficient = torch.clamp(growth.limits.seed_clip / (norm + 1e-6), max=1.0)
    scale = getattr(growth.surgeon.optimizer, "grad_scale", None)  # a fused step divides by it
    if scale is not None and growth.surgeon.companion is None:
        coefficient = coefficient * scale
    for grad, parameter in zip(grads, named.values(), strict=True):
        value = torch.where(fine, grad * coefficient.to(grad.dtype), torch.zeros_like(grad))
        parameter.grad = value.to(parameter.dtype)
    if slot.strategy is GraftingStrategy.GRAD_NORM_GATED:
        slot.notes["norm"] = Late(norm)


def _mean_committed(growth: Any) -> None:
    """Committed grafts that learn are in no reducer either."""
    for name in growth.surgeon.names():
        if name not in growth.order:
            parameters = [p for p in growth.surgeon.parameters(name) if p.grad is not None]
            for parameter, grad in zip(
                parameters, growth.ranks.mean([p.grad for p in parameters] or []), strict=True
            ):
                parameter.grad = grad


def after(growth: Any) -> None:
    """Step the companion, forget gradients, count, advance ramps."""
    companion = growth.surgeon.companion if growth.surgeon is not None else None
    if companion is not None:
        before(growth, accompanied=True)
        companion.step()
    for slot in growth.moving:
        if slot.seed is None:
            continue
        for parameter in slot.seed.named().values():
            parameter.grad = None
        if slot.seed.learns and (slot.site.teaching or slot.state is not Lifecycle.TRAINING):
            slot.set(seed_steps=slot.get("seed_steps") + 1)
        if slot.state is Lifecycle.GRAFTING:
            _advance(growth, slot)


def _advance(growth: Any, slot: Slot) -> None:
    total, done = slot.get("ramp_total"), slot.get("ramp_done")
    start, target = slot.get("ramp_start"), slot.get("ramp_target")
    if done >= total:
        return
    _read(growth, slot)
    rising = target > start
    units = progress(slot.strategy, slot.reading, growth.limits) if rising else 1
    paused = int(units == 0)
    if paused != slot.get("paused"):
        growth.emit("RAMP_PAUSED" if paused else "RAMP_RESUMED", slot.id)
    done = min(done + units, total)
    slot.set(alpha=alpha_at(start, target, total, done, slot.graft.curve), ramp_done=done, paused=paused)


def _read(growth: Any, slot: Slot) -> None:
    """The reading of a step ago; and begin the one for the next step."""
    if slot.strategy is GraftingStrategy.GRAD_NORM_GATED and isinstance(slot.notes.get("norm"), Late):
        alpha = slot.alpha
        found = slot.notes.pop("norm").read()
        slot.reading = replace(slot.reading, gradient=found / alpha if alpha > 0 else None)
    if slot.strategy is GraftingStrategy.DRIFT_CONTROLLED:
        late = slot.notes.pop("drift", None)
        if isinstance(late, Late):
            slot.reading = replace(slot.reading, drift=late.read())
        made = drift(growth, slot)
        if made is not None:
            slot.notes["drift"] = Late(made)


def drift(growth: Any, slot: Slot) -> Tensor | None:
    """||W - W0|| / ||W0|| over the wrapped layer's parameters, W0 as the graft began; fp32, on the device.
    None where the layer has none."""
    if slot.before is None:
        return None
    module = growth.model.get_submodule(slot.site.name)
    moved: list[Tensor] = []
    was: list[Tensor] = []
    for name, parameter in module.named_parameters(prefix=slot.site.name):
        first = slot.before.get(name)
        if first is not None:
            first = first.to(parameter.device)
            moved.append(torch.linalg.vector_norm(parameter.detach() - first, dtype=torch.float32))
            was.append(torch.linalg.vector_norm(first, dtype=torch.float32))
    if not moved:
        return None
    sizes = [torch.stack([whole(size) for size in found]).norm() for found in (moved, was)]
    return sizes[0] / (sizes[1] + 1e-20)


def heard(slot: Slot, loss: float) -> None:
    """A held-out loss at a boundary: how often running it fell."""
    last = slot.notes.get("held_out_loss")
    falls = slot.reading.falls + 1 if last is not None and loss < last else 0
    slot.reading = replace(slot.reading, falls=falls)
    slot.notes["held_out_loss"] = loss


def shadow(growth: Any, slot: Slot, closure: Callable[[], Tensor]) -> float:
    """One pass of the task's loss through a seed at alpha = 1; only the seed learns from it."""
    seed, model = slot.seed, growth.model
    assert seed is not None
    named = seed.named()
    buffers = {b: b.detach().clone() for b in model.buffers()}
    place = slot.site.state.place
    try:
        with same_random(place), overriding(growth.sites, {slot.id: 1.0}), torch.enable_grad():
            loss = closure()
            hooks, slot._hooks = slot._hooks, []
            grads = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
            slot._hooks = hooks
    finally:
        with torch.no_grad():
            for buffer, value in buffers.items():
                buffer.copy_(value)
    _learnt(slot, dict(zip(named, grads, strict=True)))
    return float(loss.detach())


def _learnt(slot: Slot, grads: dict[str, Tensor | None]) -> None:
    """Keep what a shadow step found, and count it for G2."""
    found = {name: g for name, g in grads.items() if g is not None}
    pull, slot.pull = slot.pull, None
    if not found or pull is None:
        return  # the model was not called, or the layer was not
    norm = torch.stack([torch.linalg.vector_norm(g, dtype=torch.float32) for g in found.values()]).norm()
    fine = torch.isfinite(norm)
    slot.add("nonfinite", (~fine).float())
    slot.add("grads", fine.float())
    count = max(sum(g.numel() for g in found.values()), 1)
    slot.add("seed_grad", torch.where(fine, norm / count**0.5, 0.0))
    slot.add("host_grad", torch.where(fine, pull, 0.0))
    for name, grad in found.items():
        slot.take(name, torch.where(fine, grad, torch.zeros_like(grad)))
    slot.batches += 1


def gate_of(slot: Slot, state: Lifecycle) -> str:
    """The gate before the next move of the usual way; "" where there is none."""
    if state is Lifecycle.EVALUATING:
        fixed = slot.seed is not None and not slot.seed.named()
        return "G5" if fixed or slot.get("round") >= 2 else "G4"
    return GATE_OF.get(state, "")


def ready(growth: Any, slot: Slot, state: Lifecycle, evidence: Evidence) -> bool:
    """Whether the next move's gate would let the slot pass now."""
    gate = gate_of(slot, state)
    if not gate:
        return state is Lifecycle.FINE_TUNING
    return ask(gate, evidence, growth.limits).passed
