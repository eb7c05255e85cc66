"""The mechanical moves: what follows from states, gates and deadlines without anybody's judgement."""

from __future__ import annotations

from typing import Any

from library.records import VALIDATED
from runtime.seeds.commands import KasminaControlCommand
from runtime.seeds.layer import Slot
from runtime.seeds.lifecycle import WAITING, Fault, Issuer, Lifecycle, Measured, Verb, ask

S = Lifecycle
ALWAYS = frozenset({S.FOSSILIZED, S.CULLED, S.CANCELLED})
GATED = {S.GRAFTING: "G3", S.STABILIZATION: "G3s", S.EMBARGOED: "embargo", S.RESETTING: "reset"}
ALPHA_UP = frozenset({S.GRAFTING, S.STABILIZATION, S.EVALUATING})


def commands(growth: Any) -> list[KasminaControlCommand]:
    """One command for every slot that moves by itself now, in the order of slots."""
    found: list[KasminaControlCommand] = []
    held = growth.held_states()
    room = growth.limits.concurrent - sum(growth.tally[s] for s in WAITING if s is not S.GERMINATED)
    for slot in growth.busy():
        state = slot.state
        made = _leave(growth, slot, state, held.get(slot.id, VALIDATED))
        if made is None and state is S.GERMINATED and room > 0:
            room -= 1
            made = (Verb.ADVANCE, "there is room", False)
        made = made or _forward(growth, slot, state)
        if made is not None:
            verb, reason, hard = made
            name = f"auto:{growth.epoch}:{growth.step}:{slot.id}:{state.name}:{verb.value}"
            found.append(
                KasminaControlCommand(
                    slot.site.name, slot.index, verb, slot.artifact, issuer=Issuer.AUTOPILOT, reason=reason,
                    hard=hard, command_id=name,
                )
            )  # fmt: skip
    return found


Wish = tuple[Verb, str, bool]


def _leave(growth: Any, slot: Slot, state: Lifecycle, held: str) -> Wish | None:
    """Why a slot must give up, if it must: a failure, a deadline, a negative contribution."""
    if state not in WAITING:
        return None
    failed = slot.notes.get("load_failed")
    if state is S.LOADING and failed:
        return Verb.CULL, str(failed), True
    down = state is S.GRAFTING and slot.get("ramp_target") == 0.0
    if down:
        return (Verb.CULL, "alpha is down", True) if slot.alpha == 0.0 else None
    if state is not S.GERMINATED:
        reason = _failure(growth, slot, state, held)
        if reason:
            return Verb.CULL, reason, False
    if growth.epoch - slot.get("last_update_epoch") >= growth.limits.deadline():
        verb = Verb.CANCEL_GERMINATION if state is S.GERMINATED else Verb.CULL
        return verb, f"{state.name} for {growth.limits.deadline()} epochs", False
    return None


def _failure(growth: Any, slot: Slot, state: Lifecycle, held: str) -> str:
    if slot.fault is Fault.NONFINITE and slot.alpha > 0.0:
        return ""  # the trainer's: it rolls back
    if slot.fault is not Fault.NONE:
        return f"fault {slot.fault.name}"
    if held != VALIDATED and not growth.allow_unvalidated:
        return f"the artifact is {held} now"
    if state is S.EVALUATING:
        found = growth.evidence(slot).get("contribution")
        value = found.value if isinstance(found, Measured) else found
        if value is not None and value < 0:
            return f"contribution {float(value):.6g}"
    return ""


def _forward(growth: Any, slot: Slot, state: Lifecycle) -> Wish | None:
    if state in ALWAYS or state is S.LOADING:
        return Verb.ADVANCE, "", False
    gate = GATED.get(state)
    if gate is None or (state is S.GRAFTING and slot.get("ramp_target") == 0.0):
        return None
    passed = ask(gate, growth.evidence(slot), growth.limits).passed
    return (Verb.ADVANCE, f"{gate} passed", False) if passed else None


def rollback(growth: Any) -> str:
    """Why the trainer must roll back; "" when it need not."""
    for slot in growth.busy():
        if slot.fault is Fault.NONFINITE and slot.alpha > 0.0:
            return f"{slot.id}: the seed gave values that are not finite while alpha was {slot.alpha:.3g}"
    return ""
