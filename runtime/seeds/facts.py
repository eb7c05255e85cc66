"""What the mechanics tell a controller, a board and telemetry: frozen values, and two protocols."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from runtime.seeds.lifecycle import Fault, GateRecord, Lifecycle, Number, Refusal


@dataclass(frozen=True)
class SlotFacts:
    """One slot at a boundary, from the mirror. `features`: first and last-but-one index of its chunk.
    `ready`: whether the gate of its next move would let it pass now (`is_ready_for_transition`).
    `deadline`: epochs left in this state, -1 without one. `health`, `probe`: the columns of
    `runtime.seeds.state`, by name, sums since the boundary before."""

    slot: str
    site: str
    index: int
    features: tuple[int, int]
    state: Lifecycle
    artifact: str
    alpha: float
    round: int
    paused: bool
    fault: Fault
    seed_steps: int
    exec_us: int
    since_epoch: int
    deadline: int
    ready: bool
    strategy: str
    parameters: int
    grafts: int
    health: Mapping[str, float]
    probe: Mapping[str, float]
    evidence: Mapping[str, Number]
    """Everything measured about it: names as in `runtime.seeds.lifecycle.GATES`."""


@dataclass(frozen=True)
class Snapshot:
    """All slots at a boundary. `corrupt`: why a rollback is asked for, "" when every check held."""

    epoch: int
    step: int
    slots: tuple[SlotFacts, ...]
    corrupt: str = ""

    def of(self, slot: str) -> SlotFacts:
        return next(s for s in self.slots if s.slot == slot)


@dataclass(frozen=True)
class Applied:
    """A command that was carried out. `record`: what its gate said; None for a move without one."""

    slot: str
    source: Lifecycle
    target: Lifecycle
    command_id: str
    artifact: str
    reason: str
    record: GateRecord | None = None


@dataclass(frozen=True)
class Boundary:
    """What one `Growth.commit` did, everything or (`aborted`) nothing. `structure`: digest of slots,
    artifacts and parameters, equal on all ranks; empty where there is one. `rollback`: reason why a rollback
    is required, "" else."""

    epoch: int
    applied: tuple[Applied, ...]
    refused: tuple[Refusal, ...]
    optimizer_changed: bool
    structure: str
    rollback: str = ""
    aborted: str = ""


@dataclass(frozen=True)
class Arms:
    """Losses of one validation, batch by batch, in the same order in every arm: with the graft, without it
    (alpha = 0), and by the host as it was before the graft. Empty: not measured."""

    with_graft: tuple[float, ...] = ()
    without: tuple[float, ...] = ()
    snapshot: tuple[float, ...] = ()


@dataclass(frozen=True)
class Event:
    """Something that happened. Kinds: SEED_GERMINATED, SEED_STAGE_CHANGED, SEED_FOSSILIZED, SEED_CULLED,
    SEED_CANCELLED, SEED_ROLLED_BACK, SEED_FAULT, GATE_REFUSED, RAMP_PAUSED, RAMP_RESUMED, BOUNDARY,
    CHECKPOINT, ROLLBACK, STALL."""

    kind: str
    epoch: int
    step: int
    slot: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)


Listener = Callable[[Event], None]
"""`growth.listeners` holds these; called in order, on the training thread; what one raises is logged."""


class Observer(Protocol):
    """Telemetry: called on sampled steps only (`growth.observe(observer, every=50)`), never inside a
    recomputed forward. `columns` is the `health` column of the layer on its device, fp32 [slots, width]: add
    to it, do not read it back. Everything runs under `torch.no_grad()`. An observer may have `seat` and
    `attend` beside these, as `HealthObserver` has, which are asked first."""

    def activation(self, site: Any, h: Tensor, columns: Tensor) -> None:
        """`h`: what the wrapped layer gave, before any seed."""
        ...

    def gradient(self, site: Any, g: Tensor, columns: Tensor) -> None:
        """`g`: the gradient of the loss at the layer's result, of h's shape."""
        ...
