"""Policies: who gets a seed, and when. What runs already is carried on by `carry`, the same for all of them
but `off` and `replay`.

A policy sees one `View` and gives decisions. It moves nothing, draws from its own generator alone, and its
state is plain data.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from runtime.seeds.commands import GraftingStrategy, KasminaControlCommand, read
from runtime.seeds.facts import SlotFacts
from runtime.seeds.lifecycle import Issuer, Lifecycle, Limits, Measured, Verb, ask
from runtime.strategy.choosing import Choice
from runtime.strategy.decisions import WAIT, Decision
from runtime.strategy.errors import fail
from runtime.strategy.packet import SystemStatePacket
from runtime.strategy.plateau import Plateau
from runtime.strategy.settings import Settings
from runtime.strategy.sites import Scores, free

S = Lifecycle
UNREST, IRREGULAR = 0.05, 1.0  # above: a ramp that watches weight drift, or the norm of gradients
LOOKED_AT = 4  # slots for which the library is asked at one boundary


@dataclass(frozen=True)
class View:
    """What a policy decides from. `choose` asks the library for one slot; `germinated` counts seeds asked for
    so far; `asked_at`: score of each waiting slot when its seed was asked for."""

    packet: SystemStatePacket
    scores: Scores
    plateau: Plateau
    settings: Settings
    limits: Limits
    choose: Callable[[str], Choice]
    germinated: int
    asked_at: Mapping[str, float]

    @property
    def epoch(self) -> int:
        return self.packet.current_epoch

    def room(self) -> int:
        """How many more seeds may be asked for now."""
        busy = sum(f.state in _BUSY for f in self.packet.seed_states.values())
        waiting = len(self.packet.in_state(S.GERMINATED))
        left = self.settings.max_germinations - self.germinated
        return max(0, min(self.limits.concurrent + self.settings.waiting - busy - waiting, left))


_BUSY = (S.LOADING, S.TRAINING, S.GRAFTING, S.STABILIZATION, S.EVALUATING, S.FINE_TUNING)


class Policy(Protocol):
    """See the module's text. `carries`: whether running seeds are carried on."""

    carries: bool

    def germinate(self, view: View) -> list[Decision]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class _Stateless:
    carries = True

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        del state


class Off(_Stateless):
    """Does nothing, also to what runs already."""

    carries = False

    def germinate(self, view: View) -> list[Decision]:
        del view
        return []


class Heuristic(_Stateless):
    """At a plateau the slot with the highest score gets a seed, if its score is high enough and something in
    the library fits; a waiting seed is cancelled when its slot recovered."""

    def germinate(self, view: View) -> list[Decision]:
        found = self._cancel(view)
        if view.room() == 0 or not view.plateau.reached:
            return found
        improvement = (
            f"plateau: improvement {view.plateau.improvement:.2%} over {view.settings.plateau.window} epochs"
        )
        ranked = (n for n in view.scores.best() if free(view.packet, view.scores.slots[n]))
        ahead, needed = list(islice(ranked, LOOKED_AT)), view.settings.sites.min_score
        good = [n for n in ahead if view.scores.total[n] >= needed]
        if not ahead:
            return [*found, Decision(view.epoch, "", WAIT, (improvement, unmeasured(view)))]
        if not good:
            nearest, score = view.scores.slots[ahead[0]], view.scores.total[ahead[0]]
            least = (
                f"no slot reaches score {needed:g} (sites.min_score); {nearest} is nearest with {score:.4g}"
            )
            why = view.scores.why(ahead[0], view.packet)
            return [*found, Decision(view.epoch, nearest, WAIT, (improvement, least, why))]
        return found + self._ask(view, good, improvement)

    def _ask(self, view: View, good: Sequence[int], improvement: str) -> list[Decision]:
        found: list[Decision] = []
        for number in good:
            slot, why = view.scores.slots[number], view.scores.why(number, view.packet)
            choice = view.choose(slot)
            if not choice.artifact:
                found.append(Decision(view.epoch, slot, WAIT, (improvement, why, choice.why())))
                continue
            found.append(germinate(view, slot, choice, (improvement, why)))
            if sum(d.command is not None for d in found) >= view.room():
                break
        return found

    def _cancel(self, view: View) -> list[Decision]:
        found: list[Decision] = []
        for facts in view.packet.in_state(S.GERMINATED):
            then, now = view.asked_at.get(facts.slot), view.scores.of(facts.slot)
            if then is None or not now < view.settings.sites.recovered * then:
                continue
            why = f"the slot recovered: score {now:.2f}, was {then:.2f}"
            found.append(order(view, facts, Verb.CANCEL_GERMINATION, why))
        return found


class Random(_Stateless):
    """With a fixed chance per epoch a random free slot gets a random fitting artifact: the control that any
    choice of sites has to beat."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def germinate(self, view: View) -> list[Decision]:
        slots = [slot for slot in view.packet.seed_states if free(view.packet, slot)]
        if view.room() == 0 or not slots or self._random.random() >= view.settings.random_chance:
            return []
        slot = self._random.choice(slots)
        choice = view.choose(slot)
        if not choice.matches:
            return [Decision(view.epoch, slot, WAIT, ("drawn at random", choice.why()))]
        artifact = self._random.choice(choice.matches).artifact_id
        return [germinate(view, slot, choice, ("drawn at random",), artifact)]

    def state_dict(self) -> dict[str, Any]:
        version, numbers, gauss = self._random.getstate()
        return {"random": [version, list(numbers), gauss]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        version, numbers, gauss = state["random"]
        self._random.setstate((version, tuple(numbers), gauss))


class FixedSchedule(_Stateless):
    """What the schedule of the settings says, at the epochs it says; a line whose slot is busy is left
    out."""

    def germinate(self, view: View) -> list[Decision]:
        found: list[Decision] = []
        for line in view.settings.schedule:
            if line.epoch != view.epoch:
                continue
            if line.slot not in view.packet.seed_states:
                known = ", ".join(list(view.packet.seed_states)[:8])
                raise fail("E1032", f"no slot {line.slot!r}", node="schedule", hint=f"slots: {known}")
            choice = view.choose(line.slot) if not line.artifact else None
            artifact = line.artifact or (choice.artifact if choice else "")
            why = f"the schedule names epoch {line.epoch}"
            if not artifact or not free(view.packet, line.slot):
                state = view.packet.seed_states[line.slot].state.name
                left = choice.why() if choice and not artifact else f"the slot is {state}"
                found.append(Decision(view.epoch, line.slot, WAIT, (why, left)))
                continue
            found.append(germinate(view, line.slot, choice, (why,), artifact))
        return found


class Replay(_Stateless):
    """The controller's commands of another run's journal, at the same epochs."""

    carries = False

    def __init__(self, journal: Path) -> None:
        try:
            lines = [line for line in read(journal) if line["kind"] == "command"]
        except OSError as error:
            raise fail("E1032", f"cannot be read: {error}", node=str(journal)) from None
        self._commands: dict[int, list[KasminaControlCommand]] = {}
        for line in lines:
            command = KasminaControlCommand.from_json(line["command"])
            if command.issuer is Issuer.CONTROLLER:
                self._commands.setdefault(int(line["epoch"]), []).append(command)

    def germinate(self, view: View) -> list[Decision]:
        return [
            Decision(view.epoch, command.slot, command.command.value, ("replayed",), command)
            for command in self._commands.get(view.epoch, [])
        ]


def policy_of(settings: Settings) -> Policy:
    """The policy that the settings name."""
    makers: Mapping[str, Callable[[], Policy]] = {
        "heuristic": Heuristic,
        "random": lambda: Random(settings.seed),
        "fixed_schedule": FixedSchedule,
        "off": Off,
        "replay": lambda: Replay(Path(settings.journal)),
    }
    return makers[settings.policy]()


# -- what all policies share


def unmeasured(view: View) -> str:
    """Why no free slot has a score: how many samples there are, how many are needed, what to set."""
    packet, settings = view.packet, view.settings
    waiting = {n: s for n, s in enumerate(view.scores.slots) if free(packet, s)}
    if not waiting:
        return "no slot is free"
    samples, needed = packet.health_map.samples, settings.sites.min_samples
    most = max(waiting, key=lambda n: samples[n])
    steps, every = packet.step // (packet.current_epoch + 1), settings.telemetry_every
    told = (
        f"no slot was measured enough: {waiting[most]} has the most sampled steps of this epoch, "
        f"{samples[most]:.0f} of the {needed} needed (sites.min_samples); "
        f"one step in {every} is sampled (telemetry_every), and an epoch has {steps}"
    )
    if not samples[most] and steps // every >= needed:
        return f"{told}: are the wrapped layers called while training?"
    if steps < needed:
        return f"{told}: set sites.min_samples to at most {max(steps, 1)}, telemetry_every to 1"
    return f"{told}: set telemetry_every to at most {max(steps // max(needed, 1), 1)}"


def germinate(
    view: View, slot: str, choice: Choice | None, because: tuple[str, ...], artifact: str = ""
) -> Decision:
    """Ask for a seed of the chosen artifact (or of `artifact`) in a slot."""
    layer, _, chunk = slot.rpartition("/")
    strategy, why = strategy_of(view, slot)
    lines = (*because, *((choice.why(),) if choice else ()), why)
    command = KasminaControlCommand(
        layer,
        int(chunk),
        Verb.REQUEST_GERMINATION,
        kernel_artifact_id=artifact or (choice.artifact if choice else ""),
        selected_for_tags=choice.tags() if choice else (),
        grafting_strategy=strategy,
        reason="; ".join(because),
        graft=view.settings.graft,
    )
    return Decision(view.epoch, slot, command.command.value, lines, command)


def order(view: View, facts: SlotFacts, verb: Verb, why: str, *, hard: bool = False) -> Decision:
    """A command about a seed that is there."""
    command = KasminaControlCommand(facts.site, facts.index, verb, reason=why, hard=hard)
    return Decision(view.epoch, facts.slot, verb.value, (why,), command)


def strategy_of(view: View, slot: str) -> tuple[GraftingStrategy, str]:
    """How the ramp is to go, by stability, with the reason."""
    if view.settings.strategy != "auto":
        return GraftingStrategy(view.settings.strategy), f"{view.settings.strategy} by configuration"
    unrest = view.plateau.unrest
    if unrest > UNREST:
        return (
            GraftingStrategy.DRIFT_CONTROLLED,
            f"DRIFT_CONTROLLED: validation loss moves {unrest:.1%} an epoch",
        )
    signals = view.packet.health_map[slot]
    norm, spread = signals["gradient_norm"], signals["gradient_variance"]
    inside = view.limits.gradient_low <= norm <= view.limits.gradient_high
    if inside and spread > IRREGULAR * norm * norm:
        return (
            GraftingStrategy.GRAD_NORM_GATED,
            f"GRAD_NORM_GATED: gradient norm {norm:.3g} varies by {spread:.3g}",
        )
    return GraftingStrategy.FIXED_RAMP, "FIXED_RAMP: the run is calm"


def carry(view: View) -> list[Decision]:
    """The next command for every seed that runs: graft when G2 lets it, fine-tune, evaluate again, keep, or
    drop at once when its contribution is negative. Deadlines are the mechanics' business."""
    found: list[Decision] = []
    for facts in view.packet.in_state(S.TRAINING, S.EVALUATING, S.FINE_TUNING):
        decision = _CARRY[facts.state](view, facts)
        if decision is not None:
            found.append(decision)
    return found


def _after_training(view: View, facts: SlotFacts) -> Decision | None:
    if facts.ready:
        return order(view, facts, Verb.PROMOTE, "gate G2 holds: the seed learnt what helps")
    record = ask("G2", facts.evidence, view.limits)
    return Decision(view.epoch, facts.slot, WAIT, (f"gate G2: {record.reason()}",))


def _after_evaluating(view: View, facts: SlotFacts) -> Decision | None:
    contribution = facts.evidence.get("contribution")
    if not isinstance(contribution, Measured):
        return None
    told = f"contribution {contribution.value:.2%} [{contribution.low:.2%}, {contribution.high:.2%}]"
    if contribution.value < 0.0:
        return order(view, facts, Verb.CULL, f"negative {told}")
    last = facts.round == 2 or facts.parameters == 0
    if not facts.ready:
        record = ask("G5" if last else "G4", facts.evidence, view.limits)
        return Decision(view.epoch, facts.slot, WAIT, (f"gate {record.gate}: {record.reason()}", told))
    if last:
        return order(view, facts, Verb.PROMOTE, f"gate G5 holds: {told}")
    return order(view, facts, Verb.ADVANCE, f"gate G4 holds: {told}")


def _after_tuning(view: View, facts: SlotFacts) -> Decision | None:
    spent = view.epoch - facts.since_epoch
    if spent < view.settings.fine_tune_epochs:
        return None
    return order(view, facts, Verb.ADVANCE, f"{spent} epochs of fine-tuning are over")


_CARRY: Mapping[Lifecycle, Callable[[View, SlotFacts], Decision | None]] = {
    S.TRAINING: _after_training,
    S.EVALUATING: _after_evaluating,
    S.FINE_TUNING: _after_tuning,
}
