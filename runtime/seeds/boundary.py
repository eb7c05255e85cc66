"""An epoch boundary: commands are prepared on all ranks, judged by rank 0, and carried out by all or by none.

    queued commands -> rounds of: prepare, acknowledge, judge, apply   (one command per slot and round)
                    -> rounds of the same for what is mechanical (`runtime.seeds.autopilot`)

Preparing may fail and is undone; applying only writes numbers that are at hand, so a boundary ends with all
of its accepted commands done. The journal takes all lines of a round in one write, and is on the disk when
the boundary ends.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from esper_ir.diagnostics import EsperError
from library.records import VALIDATED
from runtime.driver import STICKY
from runtime.seeds import applying, autopilot, structure
from runtime.seeds.commands import Graft, KasminaControlCommand
from runtime.seeds.errors import fail
from runtime.seeds.facts import Applied, Boundary
from runtime.seeds.grafting import CURVES, FOSSIL, ISOLATION, OPERATORS
from runtime.seeds.incubation import OBJECTIVES
from runtime.seeds.layer import Slot
from runtime.seeds.lifecycle import (
    ADAPTING,
    GateRecord,
    Lifecycle,
    Move,
    Number,
    Refusal,
    Verb,
    allowed,
    ask,
    choose,
    moves_from,
)
from runtime.seeds.seed import Seed, declared, known_facts, make, probe

ROUNDS = 16
S = Lifecycle


@dataclass
class Prepared:
    """What one rank has ready for a command. `error`: code and reason why it has not."""

    command: KasminaControlCommand
    slot: Slot | None
    numbers: dict[str, Number] = field(default_factory=dict)
    facts: frozenset[str] = frozenset()
    seed: Seed | None = None
    exec_us: int = 0
    inserted: bool = False
    error: tuple[str, str] | None = None


@dataclass(frozen=True)
class Verdict:
    """What rank 0 decided. `move` None with no refusal: a ramp is turned round."""

    move: Move | None = None
    record: GateRecord | None = None
    refusal: Refusal | None = None


def reached(phase: str) -> None:
    """Called between the phases of a round: a seam for tests that stop there."""


@contextmanager
def uncollected() -> Iterator[None]:
    """Inside, no search for garbage in cycles: a boundary makes many small values of which few live on, and
    whoever looks in between looks at all of them."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def commit(growth: Any, corrupt: str, pilot: bool) -> Boundary:
    """Carry out what waits, unless a check of the state tensors failed; see `Growth.commit`."""
    structure.agree(growth)
    if corrupt:
        return Boundary(growth.epoch, (), (), False, structure.shared(growth), corrupt)
    applied: list[Applied] = []
    refused: list[Refusal] = []
    waiting = growth.ranks.share(growth.queue.take(growth.order))
    growth.queue.seen(c.command_id for c in waiting)
    groups = growth.surgeon.names() if growth.surgeon is not None else []
    for _ in range(ROUNDS):
        if not waiting:
            tried = {(r.slot, r.verb) for r in refused}  # what was refused waits for the next boundary
            wanted = [c for c in autopilot.commands(growth) if (c.slot, c.command) not in tried]
            waiting = growth.ranks.share(wanted) if pilot else []
        if not waiting:
            break
        now, waiting = _first_of_each(waiting)
        done, refusals = _round(growth, now)
        applied += done
        refused += refusals
    growth.journal.sync()
    growth.reselect()
    structure.agree(growth)
    after = growth.surgeon.names() if growth.surgeon is not None else []
    rollback = autopilot.rollback(growth)
    growth.emit("BOUNDARY", applied=len(applied), refused=len(refused), rollback=rollback)
    return Boundary(
        growth.epoch, tuple(applied), tuple(refused), groups != after, structure.shared(growth), rollback
    )


def _first_of_each(
    waiting: Sequence[KasminaControlCommand],
) -> tuple[list[KasminaControlCommand], list[KasminaControlCommand]]:
    """One command per slot, and the others in their order."""
    now: dict[str, KasminaControlCommand] = {}
    later: list[KasminaControlCommand] = []
    for command in waiting:
        if command.slot in now:
            later.append(command)
        else:
            now[command.slot] = command
    return list(now.values()), later


def _round(growth: Any, commands: Sequence[KasminaControlCommand]) -> tuple[list[Applied], list[Refusal]]:
    prepared = [_prepare(growth, command) for command in commands]
    reached("prepared")
    acknowledged = growth.ranks.gather([p.error for p in prepared])
    verdicts: list[Verdict] = growth.ranks.share(
        _judge_all(growth, prepared, acknowledged) if growth.ranks.first else None
    )
    reached("judged")
    lines: list[dict[str, Any]] = []
    applied: list[Applied] = []
    refused: list[Refusal] = []
    for ready, verdict in zip(prepared, verdicts, strict=True):
        if verdict.refusal is not None:
            _undo(growth, ready)
            _note(growth, ready, verdict.refusal)
            refused.append(verdict.refusal)
            lines.append(_line(growth, "refused", ready, refusal=verdict.refusal.to_json()))
            continue
        done = applying.carry_out(growth, ready, verdict.move, verdict.record)
        applied.append(done)
        lines.append(_line(growth, "command", ready, **applying.told(growth, ready, done)))
    reached("applied")
    growth.journal.extend(lines)
    reached("journalled")
    return applied, refused


def _line(growth: Any, kind: str, ready: Prepared, **facts: Any) -> dict[str, Any]:
    command = ready.command
    return {
        "kind": kind, "epoch": growth.epoch, "step": growth.step, "slot": command.slot,
        "command": command.to_json(), **facts,
    }  # fmt: skip


# -- preparing
# -------------------------------------------------------------------------------------------------------


def _prepare(growth: Any, command: KasminaControlCommand) -> Prepared:
    """Everything that can fail. A device that is lost is the only error that is raised."""
    ready = Prepared(command, growth.find(command.slot))
    if ready.slot is None:
        return ready
    try:
        state = ready.slot.state
        if state is S.DORMANT and command.command is Verb.REQUEST_GERMINATION:
            _ask_library(growth, ready)
        elif state is S.LOADING and command.command is Verb.ADVANCE:
            _build(growth, ready, ready.slot)
        ready.facts |= _facts(ready.slot, command, ready.seed)
    except EsperError as error:
        if error.details.get("cuda_error") in STICKY:
            raise
        _undo(growth, ready)
        ready.error = (error.code, error.message)
    return ready


def _facts(slot: Slot, command: KasminaControlCommand, seed: Seed | None) -> frozenset[str]:
    held = seed or slot.seed
    fixed = held is not None and not held.named()
    final = fixed or slot.get("round") >= 2
    found = {"fixed" if fixed else "trainable", "final" if final else "round1"}
    if slot.state is not S.GRAFTING or slot.get("ramp_target") > 0:
        found.add("up")
    found.add("hard" if command.hard or slot.alpha == 0.0 else "soft")
    return frozenset(found)


def check_graft(graft: Graft) -> None:
    """E1013 for a word that is not known."""
    for what, known in (("operator", OPERATORS), ("curve", tuple(CURVES)), ("objective", OBJECTIVES),
                        ("isolate", ISOLATION), ("fossil", FOSSIL)):  # fmt: skip
        if getattr(graft, what) not in known:
            raise fail("E1013", f"{what}={getattr(graft, what)!r}", hint=f"one of {', '.join(known)}")
    if graft.ramp_steps < 0 or not graft.lr_scale > 0:
        raise fail("E1013", f"ramp_steps={graft.ramp_steps}, lr_scale={graft.lr_scale}")


def _ask_library(growth: Any, ready: Prepared) -> None:
    slot, command = ready.slot, ready.command
    assert slot is not None
    artifact = command.kernel_artifact_id
    check_graft(command.graft)
    bans, site = growth.bans, slot.site.name
    state, facts = known_facts(growth.library, artifact, slot.spec(), growth.allow_unvalidated)
    growth.asked(artifact, state)
    ready.numbers = {
        **facts,
        "embargoed": bans.embargoed(site, artifact, growth.epoch),
        "tombstoned": bans.buried(site, artifact),
        "quarantined": artifact in bans.quarantine,
    }
    if growth.allow_unvalidated:
        ready.numbers |= {"validated": True}


def still_valid(growth: Any, artifact: str) -> None:
    """E0721, E0740 or E0742 when the library says now that the artifact may not run. Its bytes are verified
    by whoever reads them, once per process."""
    state = growth.state_in_library(artifact)
    if state != VALIDATED and not growth.allow_unvalidated:
        code = "E0721" if state == "MISSING" else "E0742" if state == "REVOKED" else "E0740"
        raise EsperError(code, f"{artifact} is {state} now", node=artifact)


def _build(growth: Any, ready: Prepared, slot: Slot) -> None:
    still_valid(growth, slot.artifact)
    spec = slot.spec()
    if spec is None:
        raise fail("E1003", f"{slot.id}: the layer was not called yet", node=slot.id)
    first, end = slot.bounds()
    key = structure.key_of(slot.id, slot.artifact, growth.epoch)
    seed = make(slot.artifact, growth.library, spec, end - first, slot.graft, key, growth.allow_unvalidated)
    found = probe(seed, spec)
    ready.seed, ready.exec_us = seed, found.exec_us
    named = seed.named()
    grouped = not named
    if named and growth.surgeon is not None:
        grouped = ready.inserted = growth.surgeon.insert(slot.id, named, slot.graft.lr_scale)
    wanted = declared(seed.digest, seed.block.program.interface)["parameters"]
    own = sum(p.numel() for n, p in named.items() if n != "gate")
    ready.numbers = {
        "bytes_verified": True,
        "probe_finite": found.finite and not seed.broken,
        "probe_shape": found.shape,
        "parameters_as_declared": wanted == own,
        "group_inserted": grouped,
    }


def _undo(growth: Any, ready: Prepared) -> None:
    if ready.inserted and ready.slot is not None:
        growth.surgeon.remove(ready.slot.id)
        ready.inserted = False
    ready.seed = None


# -- judging
# -------------------------------------------------------------------------------------------------------


def _judge_all(
    growth: Any, prepared: Sequence[Prepared], acknowledged: Sequence[Sequence[tuple[str, str] | None]]
) -> list[Verdict]:
    """One after the other, each seeing what those before it would change in the counts."""
    counts = dict(growth.tally)
    found: list[Verdict] = []
    for at, ready in enumerate(prepared):
        failed = {rank: said[at] for rank, said in enumerate(acknowledged) if said[at] is not None}
        verdict = _judge(growth, ready, failed, counts)
        found.append(verdict)
        if verdict.move is not None and verdict.refusal is None:
            counts[verdict.move.source] = counts.get(verdict.move.source, 0) - 1
            counts[verdict.move.target] = counts.get(verdict.move.target, 0) + 1
    return found


def _judge(
    growth: Any, ready: Prepared, failed: Mapping[int, Any], counts: Mapping[Lifecycle, int]
) -> Verdict:
    command, slot = ready.command, ready.slot
    if slot is None:
        return _no("E1014", f"no slot {command.slot!r}", command, S.DORMANT)
    state = slot.state
    if failed:
        return _not_prepared(command, state, failed, growth.ranks.many)
    if state is S.GRAFTING and command.command is Verb.CULL and "soft" in ready.facts:
        if "up" in ready.facts:
            return Verdict()
        return _no("E1004", f"{slot.id} is going down already", command, state)
    move = choose(state, command.command, ready.facts)
    if move is None or not allowed(move, command.issuer) or command.command is Verb.ROLLBACK:
        return _no("E1004", _cannot(slot, command), command, state)
    if not move.gate:
        return Verdict(move)
    numbers = {
        **growth.evidence(slot),
        **ready.numbers,
        "adapting": float(sum(counts.get(s, 0) for s in ADAPTING) - (state in ADAPTING)),
        "grafting": float(counts.get(S.GRAFTING, 0) - (state is S.GRAFTING)),
        "ranks_prepared": True,
        **growth.told(slot.id),
    }
    record = ask(move.gate, numbers, growth.limits, slot=slot.id, epoch=growth.epoch)
    if record.passed:
        return Verdict(move, record)
    wrong = {c.measure for c in record.refused() if c.value == 0}
    unfit = {"shape_fits", "dtype_fits", "device_fits"} & wrong
    code = "E1003" if unfit else "E1005"
    reason = f"{slot.id}: {move.gate} refused: {record.reason()}"
    return _no(code, reason, command, state, record)


def _cannot(slot: Slot, command: KasminaControlCommand) -> str:
    ways = sorted({m.verb.value for m in moves_from(slot.state) if m.verb is not Verb.ROLLBACK})
    return (
        f"{command.command.value} by {command.issuer.value} in {slot.state.name} ({slot.id}); "
        f"possible: {', '.join(ways) or 'nothing'}"
    )


def _no(
    code: str,
    reason: str,
    command: KasminaControlCommand,
    state: Lifecycle,
    record: GateRecord | None = None,
) -> Verdict:
    return Verdict(refusal=Refusal(code, reason, command.slot, command.command, state, record))


def _not_prepared(
    command: KasminaControlCommand, state: Lifecycle, failed: Mapping[int, Any], many: int
) -> Verdict:
    code, reason = next(iter(failed.values()))
    if len(failed) < many:
        ranks = ", ".join(f"rank {r}: {c} {why}" for r, (c, why) in failed.items())
        return _no("E1012", f"{command.slot}: not all ranks prepared it ({ranks})", command, state)
    return _no(code, reason, command, state)


def _note(growth: Any, ready: Prepared, refusal: Refusal) -> None:
    """What a refusal leaves behind: an artifact that cannot be loaded is not asked for again."""
    slot = ready.slot
    growth.emit("GATE_REFUSED", refusal.slot, refusal=refusal.to_json())
    loading = slot is not None and slot.state is S.LOADING and refusal.verb is Verb.ADVANCE
    if loading and slot is not None and refusal.code != "E1012":
        slot.notes["load_failed"] = f"{refusal.code} {refusal.reason}"
