"""Carrying out a move that was prepared and judged. Nothing in this file may fail."""

from __future__ import annotations

from typing import Any

import torch

from library.contracts import FieldReport
from library.store import Library
from runtime import loader, outcomes
from runtime.seeds.evidence import kept
from runtime.seeds.facts import Applied
from runtime.seeds.layer import Slot
from runtime.seeds.lifecycle import Fault, GateRecord, Lifecycle, Move
from runtime.seeds.modules import Committed

S = Lifecycle
EVENTS = {
    S.GERMINATED: "SEED_GERMINATED",
    S.FOSSILIZED: "SEED_FOSSILIZED",
    S.CULLED: "SEED_CULLED",
    S.CANCELLED: "SEED_CANCELLED",
    S.ROLLED_BACK: "SEED_ROLLED_BACK",
}
_RELEASED = ("alpha", "ramp_start", "ramp_target", "ramp_total", "ramp_done", "paused")


def carry_out(growth: Any, ready: Any, move: Move | None, record: GateRecord | None) -> Applied:
    """The command of `ready`, by this move; None turns a ramp round."""
    slot, command = ready.slot, ready.command
    source = slot.state
    if move is None:
        ramp(slot, slot.alpha, 0.0, max(slot.get("ramp_done"), 1))
        target = source
    else:
        target = move.target
        _ENTER[target](growth, ready, slot)
        enter(growth, slot, target)
    if command.reason:
        slot.notes["reason"] = command.reason
    facts = {"source": source.name, "target": target.name, "artifact": slot.artifact, "alpha": slot.alpha,
             "reason": command.reason, "tags": list(command.selected_for_tags)}  # fmt: skip
    growth.emit("SEED_STAGE_CHANGED", slot.id, **facts)
    if target in EVENTS and move is not None:
        growth.emit(EVENTS[target], slot.id, **facts)
    return Applied(slot.id, source, target, command.command_id, slot.artifact, command.reason, record)


def enter(growth: Any, slot: Slot, target: Lifecycle) -> None:
    """The bookkeeping of every move."""
    growth.tally[slot.state] -= 1
    growth.tally[target] += 1
    slot.set(lifecycle=int(target), last_update_epoch=growth.epoch, entered_step=growth.step)
    slot.site.refresh()
    growth.forget(slot.id)


def told(growth: Any, ready: Any, done: Applied) -> dict[str, Any]:
    """What the journal says of it."""
    slot: Slot = ready.slot
    facts: dict[str, Any] = {
        "from": done.source.name,
        "to": done.target.name,
        "artifact": done.artifact,
        "gate": done.record.to_json() if done.record is not None else None,
    }
    if done.target is S.FOSSILIZED:
        facts["graft"] = {**slot.graft.__dict__, "place": len(slot.site.chain) - 1, "alpha": done_alpha(slot)}
    return facts


def done_alpha(slot: Slot) -> float:
    """alpha of the newest committed graft."""
    graft = slot.site.chain[-1]
    return float(getattr(graft, "alpha", 1.0))


def ramp(slot: Slot, start: float, target: float, total: int) -> None:
    """Begin a ramp at its start."""
    slot.set(alpha=start, ramp_start=start, ramp_target=target, ramp_total=total, ramp_done=0, paused=0)


def release(growth: Any, slot: Slot) -> None:
    """The seed, its group and its memory are gone; what the column says of its fault stays."""
    slot.deaf()
    slot.drop()
    if growth.surgeon is not None:
        growth.surgeon.remove(slot.id)
    slot.seed = slot.before = None
    slot.broken = False
    slot.set(**dict.fromkeys(_RELEASED, 0))


def _germinated(growth: Any, ready: Any, slot: Slot) -> None:
    command = ready.command
    slot.artifact, slot.graft, slot.strategy = (
        command.kernel_artifact_id, command.graft, command.grafting_strategy
    )  # fmt: skip
    slot.notes = {"tags": list(command.selected_for_tags)}


def _loading(growth: Any, ready: Any, slot: Slot) -> None:
    slot.notes.pop("load_failed", None)


def _seated(growth: Any, ready: Any, slot: Slot) -> None:
    seed = slot.seed = ready.seed
    assert seed is not None
    seed.train(growth.model.training)
    seed.learn(True)
    slot.site.state.clear(slot.index, "probe")
    slot.drop()
    slot.set(artifact=seed.prefix, exec_us=ready.exec_us, seed_steps=0, round=1, fault=0)


def _grafting(growth: Any, ready: Any, slot: Slot) -> None:
    if slot.state is S.LOADING:
        _seated(growth, ready, slot)
    if slot.state in (S.LOADING, S.TRAINING):
        slot.before = kept(growth.model)
        total = slot.graft.ramp_steps or growth.limits.ramp_steps
        ramp(slot, 0.0, growth.limits.alpha_target, total)
        slot.drop()
        slot.listen()
        return
    ramp(slot, slot.alpha, 0.0, slot.graft.ramp_steps or growth.limits.ramp_steps)


def _still(growth: Any, ready: Any, slot: Slot) -> None:
    slot.deaf()
    slot.drop()
    if slot.seed is not None:
        slot.seed.learn(False)
    if slot.state is S.FINE_TUNING:
        slot.set(round=2)


def _evaluating(growth: Any, ready: Any, slot: Slot) -> None:
    """Nothing but the state: the arms that count are measured from here on."""


def _fine_tuning(growth: Any, ready: Any, slot: Slot) -> None:
    if slot.seed is not None:
        slot.seed.learn(True)
    slot.drop()
    slot.listen()


def _fossilized(growth: Any, ready: Any, slot: Slot) -> None:
    seed = slot.seed
    assert seed is not None
    first, end = slot.bounds()
    spec = slot.spec()
    assert spec is not None
    graft = Committed(seed, first, end, slot.site.axis, slot.alpha, spec)
    name = f"{slot.site.name}:graft{len(slot.site.chain)}"
    slot.deaf()
    trains = seed.graft.fossil == "train" and bool(seed.named())
    seed.learn(trains)
    if trains and growth.surgeon is not None:
        growth.surgeon.rename(slot.id, name)
    graft.train(growth.model.get_submodule(slot.site.name).training)
    slot.site.chain.append(graft)
    release(growth, slot)


def _culled(growth: Any, ready: Any, slot: Slot) -> None:
    failed = slot.notes.pop("load_failed", None)
    slot.expires = growth.epoch
    if failed is not None:
        slot.set(fault=int(Fault.LOAD))
        _tell(growth, slot, outcomes.CRASHED, str(failed))
    else:
        slot.expires += growth.limits.embargo_epochs
        growth.bans.embargo(slot.site.name, slot.artifact, slot.expires)
    if slot.fault in (Fault.EXEC, Fault.NONFINITE):
        _tell(growth, slot, outcomes.CRASHED if slot.fault is Fault.EXEC else "DIVERGED", slot.fault.name)
    release(growth, slot)


def _tell(growth: Any, slot: Slot, outcome: str, reason: str) -> None:
    """The artifact failed here: evicted, ranked last, told to the gauntlet; another one is asked for."""
    growth.bans.quarantine[slot.artifact] = reason
    growth.emit("SEED_FAULT", slot.id, artifact=slot.artifact, reason=reason, ask_another=True)
    loader.mark_faulty(slot.artifact)
    if not growth.ranks.first or slot.fault is Fault.EXEC:
        return  # of a launch that failed the block itself has told
    blueprint = slot.seed.block.record.blueprint if slot.seed is not None else slot.artifact.partition("-")[0]
    report = FieldReport(blueprint, slot.artifact, slot.id, 0.0, 0.0, outcome,
                         {"reason": reason, "torch": torch.__version__, "epoch": growth.epoch})  # fmt: skip
    home = growth.library
    outcomes.tell(report, home.home if isinstance(home, Library) else home)


def _cancelled(growth: Any, ready: Any, slot: Slot) -> None:
    release(growth, slot)


def _embargoed(growth: Any, ready: Any, slot: Slot) -> None:
    """Waits for `slot.expires`."""


def _resetting(growth: Any, ready: Any, slot: Slot) -> None:
    if slot.state is S.ROLLED_BACK:
        growth.bans.unlock(slot.id, growth.epoch)
    release(growth, slot)


def _dormant(growth: Any, ready: Any, slot: Slot) -> None:
    slot.artifact, slot.notes, slot.expires = "", {}, 0
    slot.site.state.clear(slot.index, "probe")
    slot.set(artifact=0, exec_us=0, seed_steps=0, round=0, fault=0)


def _rolled_back(growth: Any, ready: Any, slot: Slot) -> None:
    release(growth, slot)


_ENTER = {
    S.GERMINATED: _germinated,
    S.LOADING: _loading,
    S.TRAINING: _seated,
    S.GRAFTING: _grafting,
    S.STABILIZATION: _still,
    S.EVALUATING: _evaluating,
    S.FINE_TUNING: _fine_tuning,
    S.FOSSILIZED: _fossilized,
    S.CULLED: _culled,
    S.CANCELLED: _cancelled,
    S.EMBARGOED: _embargoed,
    S.RESETTING: _resetting,
    S.DORMANT: _dormant,
    S.ROLLED_BACK: _rolled_back,
}
