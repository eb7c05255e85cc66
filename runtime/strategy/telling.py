"""What the controller tells others: field reports to the library, one event per epoch to the bus."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from esper_ir.diagnostics import EsperError
from library.contracts import FieldReport
from library.store import Library
from runtime import outcomes
from runtime.seeds.facts import Applied, Event, SlotFacts
from runtime.seeds.lifecycle import OUTCOMES, Lifecycle, Measured
from runtime.strategy.decisions import Decision
from runtime.strategy.packet import SystemStatePacket
from runtime.strategy.sites import Scores

SHOWN = 24  # slots in an event: all that are not dormant, then those with the highest scores


def reports(
    applied: Iterable[Applied], packet: SystemStatePacket, begun: Mapping[str, float], library: Library
) -> list[FieldReport]:
    """One report per adaptation that ended at this boundary. `begun`: validation loss at which each slot's
    adaptation began; a loss that is not known is the present one."""
    found = []
    for move in applied:
        outcome = OUTCOMES.get(move.target)
        if outcome is None or not move.artifact:
            continue
        facts = packet.seed_states.get(move.slot)
        before = begun.get(move.slot, packet.validation_loss)
        metrics = {"epoch": packet.current_epoch, "reason": move.reason, **_evidence(facts)}
        found.append(
            FieldReport(
                _blueprint(library, move.artifact),
                move.artifact,
                move.slot,
                _finite(before),
                _finite(packet.validation_loss),
                outcome,
                metrics,
            )
        )
    return found


def rolled_back(event: Event, before: float | None, now: float | None, library: Library) -> FieldReport:
    """The report of an adaptation that the trainer took back."""
    artifact = str(event.facts["artifact"])
    pre, post = (0.0 if value is None else _finite(value) for value in (before, now))
    metrics = {"epoch": event.epoch, "step": event.step}
    return FieldReport(_blueprint(library, artifact), artifact, event.slot, pre, post, "ROLLED_BACK", metrics)


def tell(found: Iterable[FieldReport], library: Library) -> list[str]:
    """Write reports where they can be written; where each went."""
    return [outcomes.tell(report, library.home) for report in found]


def _blueprint(library: Library, artifact_id: str) -> str:
    try:
        return library.record(artifact_id).blueprint
    except EsperError:
        return ""


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 0.0


def _evidence(facts: SlotFacts | None) -> dict[str, float]:
    if facts is None:
        return {}
    found = {}
    for name in ("contribution", "ablation", "held_out_gain"):
        given = facts.evidence.get(name)
        value = given.value if isinstance(given, Measured) else given
        if isinstance(value, int | float) and math.isfinite(value):
            found[name] = float(value)
    return found


def epoch_facts(
    packet: SystemStatePacket, scores: Scores, decisions: Iterable[Decision], policy: str, hit_ratio: float
) -> dict[str, Any]:
    """The facts of an EPOCH event: what a board shows."""
    context = packet.hardware_context
    return {
        "policy": policy,
        "validation_loss": packet.validation_loss,
        "validation_accuracy": packet.validation_accuracy,
        "device": context.device_type,
        "memory_available_gb": context.memory_available_gb,
        "cache_hit_ratio": hit_ratio,
        "slots_total": len(packet.seed_states),
        "slots": _rows(packet, scores),
        "decisions": [d.text() for d in decisions],
    }


def _rows(packet: SystemStatePacket, scores: Scores) -> list[dict[str, Any]]:
    numbers = {slot: at for at, slot in enumerate(scores.slots)}
    busy = [s for s, f in packet.seed_states.items() if f.state is not Lifecycle.DORMANT or f.grafts]
    ranked = [scores.slots[n] for n in scores.best()[:SHOWN]]
    chosen = set([*busy, *ranked][:SHOWN]) or set(list(packet.seed_states)[:SHOWN])
    return [
        _row(packet, slot, float(scores.total[numbers[slot]]))
        for slot in packet.seed_states
        if slot in chosen
    ]


def _row(packet: SystemStatePacket, slot: str, score: float) -> dict[str, Any]:
    facts = packet.seed_states[slot]
    return {
        "slot": slot,
        "state": facts.state.name,
        "alpha": facts.alpha,
        "round": facts.round,
        "artifact": facts.artifact,
        "grafts": facts.grafts,
        "ready": facts.ready,
        "exec_us": facts.exec_us,
        "score": score,
        "health": dict(packet.health_map[slot]),
    }
