"""Tamiyo: at every epoch boundary, looks at the health of a wrapped model, decides, and commands seeds by
artifact id.

    tamiyo = runtime.TamiyoController(model, policy="heuristic", config="growth.yaml")
    signal = tamiyo.end_epoch(validate)     # validate(model) -> loss of every validation batch
    print(tamiyo.explain())

What it sees is a `SystemStatePacket`, what it sends are `KasminaControlCommand`s, what it says to the trainer
is an `AdaptationSignal`. `decide` is a pure function of the packet and the controller's state; nothing here
moves a slot or touches a gradient.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from library.store import Library
from runtime import loader
from runtime.cache import CacheInfo
from runtime.seeds import evidence
from runtime.seeds.events import EventBus, EventFile, LocalBus
from runtime.seeds.facts import Boundary, Event, Snapshot
from runtime.seeds.growth import Growth, growth_of
from runtime.seeds.health import SIGNALS, HealthMap, HealthReport, health_of
from runtime.seeds.lifecycle import Lifecycle, Verb
from runtime.seeds.telemetry import HealthObserver
from runtime.strategy import telling
from runtime.strategy.choosing import Choice, Chooser, query_of
from runtime.strategy.decisions import Decision, Record
from runtime.strategy.errors import fail
from runtime.strategy.packet import AdaptationSignal, SystemStatePacket
from runtime.strategy.plateau import plateau
from runtime.strategy.policies import Policy, View, carry, policy_of
from runtime.strategy.pressure import Ladder, hardware
from runtime.strategy.ranks import checked, mean_loss, rank
from runtime.strategy.running import Run
from runtime.strategy.settings import Settings, settings_of
from runtime.strategy.sites import Scores, scores
from runtime.strategy.tensorboard import TensorBoardWriter

Validate = Callable[[nn.Module], Any]
VERSION = 1
S = Lifecycle
_JUDGED = (S.GRAFTING, S.STABILIZATION, S.EVALUATING)
"""States whose gates ask for paired validation."""
_CHANGES = (S.GRAFTING, S.FOSSILIZED, S.CULLED, S.ROLLED_BACK)
_MOST_TELEMETRY = 4  # times rarer samples when telemetry gives way


class TamiyoController:
    """One controller for one wrapped model.

    `policy`: heuristic, random, fixed_schedule, off, replay, or an object with the methods of
    `runtime.strategy.policies.Policy`; overrides the configuration's. `config`: `Settings`, a mapping, or the
    path of a YAML file; E1030 for unknown keys. `library`: default the one that the model was wrapped with.
    `bus`: where events go, default in this process; with `run_dir` also to files that `python -m runtime
    watch` shows.
    """

    def __init__(
        self,
        model: nn.Module,
        policy: str | Policy | None = None,
        config: Settings | Mapping[str, Any] | Path | str | None = None,
        *,
        library: Library | Path | str | None = None,
        bus: EventBus | None = None,
        run_dir: Path | str | None = None,
    ) -> None:
        settings = settings_of(config)
        if isinstance(policy, str):
            settings = settings_of({**vars(settings), "policy": policy})
        if run_dir is not None:
            settings = replace(settings, run_dir=str(run_dir))
        self.model, self.settings = model, settings
        self.growth: Growth = growth_of(model)
        if settings.limits is not None:
            self.growth.limits = settings.limits
        self.policy: Policy = policy_of(settings) if policy is None or isinstance(policy, str) else policy
        self.library = loader.open_library(library if library is not None else self.growth.library)
        self.chooser = Chooser(self.library, settings.query)
        self.bus: EventBus = bus if bus is not None else LocalBus()
        self.growth.listeners += [self.bus.publish, self._heard]
        if settings.run_dir and rank() == 0:
            self.bus.subscribe(EventFile(settings.run_dir))
            if settings.tensorboard:
                self.bus.subscribe(TensorBoardWriter(Path(settings.run_dir) / "tensorboard"))
        self._run = Run(self.bus, self.growth.epoch, self.growth.step)
        weakref.finalize(self, self._run.given_up)
        self.observer = HealthObserver(memory=settings.sites.memory)
        self.growth.observe(self.observer, every=settings.telemetry_every)
        self.ladder = Ladder(self._observe_less, self._eager)
        self.record = Record()
        self._history: list[float] = []
        self._asked_at: dict[str, float] = {}
        self._begun: dict[str, float] = {}
        self._active_us: dict[str, float] = {}
        self._germinated = 0
        self._changed_at = 0
        self._health: HealthMap | None = None
        self._snapshot: Snapshot | None = None

    # -- once per epoch

    def end_epoch(self, validate: Validate, *, accuracy: float | None = None) -> AdaptationSignal:
        """Measure, decide, command, commit. `validate(model)` returns the loss of every validation batch, the
        same batches in the same order each time; it is called once for the model as it is and once per arm of
        every seed that is judged. `accuracy`: percent, only shown. E1031 for a `validate` that gives no
        losses."""

        def measured(model: nn.Module) -> Any:
            return checked(validate(model))

        self._run.at(self.growth.epoch, self.growth.step)
        loss = mean_loss(evidence.losses(measured, self.model))
        self._judge(measured)
        self._history.append(loss)
        packet = self.look(accuracy)
        if packet.corrupt:
            return AdaptationSignal(False, True, packet.corrupt)
        began = time.perf_counter()
        decisions, found = self.decide(packet)
        spent = time.perf_counter() - began
        self._send(decisions)
        began_commit = time.perf_counter()
        boundary = self.growth.commit()
        kept = self.record.add(decisions, boundary)
        self._remember(boundary, packet, found, 1e6 * (time.perf_counter() - began_commit))
        self._tell(boundary, packet, found, kept, spent)
        return AdaptationSignal(
            boundary.optimizer_changed,
            bool(boundary.rollback),
            boundary.rollback,
            tuple(d.text() for d in kept),
        )

    def look(self, accuracy: float | None = None) -> SystemStatePacket:
        """The packet of this boundary: telemetry closed, the state tensors copied once."""
        self.observer.close_epoch(self.growth.sites)
        self.growth._snapshot = None  # one that was taken before does not know what was just added
        snapshot = self._snapshot = self.growth.snapshot()
        self._health = health_of(snapshot.slots)
        return SystemStatePacket(
            current_epoch=snapshot.epoch,
            validation_accuracy=accuracy,
            validation_loss=self._history[-1] if self._history else float("nan"),
            hardware_context=hardware(self._device()),
            health_map=self._health,
            seed_states={facts.slot: facts for facts in snapshot.slots},
            history=tuple(self._history),
            step=snapshot.step,
            corrupt=snapshot.corrupt,
        )

    def decide(self, packet: SystemStatePacket) -> tuple[list[Decision], Scores]:
        """What to do at this boundary, and the scores of all slots. Sends nothing."""
        found = scores(packet, self.settings.sites)
        view = View(
            packet=packet,
            scores=found,
            plateau=plateau(packet.history, len(packet.history) - self._changed_at, self.settings.plateau),
            settings=self.settings,
            limits=self.growth.limits,
            choose=lambda slot: self.choose(slot, packet),
            germinated=self._germinated,
            asked_at=self._asked_at,
        )
        running = carry(view) if self.policy.carries else []
        return [*running, *self.policy.germinate(view)], found

    def choose(self, slot: str, packet: SystemStatePacket) -> Choice:
        """Artifacts for one slot, best first, by tags from the context."""
        limits = self.growth.limits
        spec = self.growth.slot(slot).spec()
        if spec is None:
            return Choice(query_of(self.settings.query, packet.hardware_context, limits))
        return self.chooser.choose(spec, packet.hardware_context, limits, lambda a: self._barred(slot, a))

    def _barred(self, slot: str, artifact: str) -> str:
        """Why an artifact may not be asked for in a slot now; "" when it may."""
        bans, site = self.growth.bans, self.growth.slot(slot).site.name
        if bans.embargoed(site, artifact, self.growth.epoch):
            return f"under embargo at {site}"
        if bans.buried(site, artifact):
            return f"led to a rollback at {site}"
        rent = self.chooser.parameters(artifact) / max(sum(p.numel() for p in self.model.parameters()), 1)
        if rent > self.growth.limits.max_rent:  # the last gate would refuse what it had let grow
            most = self.growth.limits.max_rent
            return f"rent {rent:.1%} of the host's parameters, at most {most:.1%} (limits.max_rent)"
        return bans.quarantine.get(artifact, "")

    def explain(self, slot: str | None = None, epoch: int | None = None) -> str:
        """Why what was done was done: every decision with its numbers, or those about one slot or epoch."""
        return self.record.text(slot, epoch)

    def health(self) -> list[HealthReport]:
        """The health of every slot at the last boundary, under the names of the design."""
        if self._snapshot is None or self._health is None:
            return []
        info = loader.cache_info()
        ratio = hit_ratio(info)
        slowest = max((f.exec_us for f in self._snapshot.slots), default=0)
        found = []
        for number, facts in enumerate(self._snapshot.slots):
            row = self._health.table[number]
            signals = {n: float(v) for n, v in zip(SIGNALS, row, strict=True) if v == v}
            found.append(
                HealthReport(
                    facts.slot, self._snapshot.epoch, facts.ready, signals, float(facts.exec_us),
                    self._active_us.get(facts.slot, 0.0), float(slowest), float(info.bytes), ratio,
                )
            )  # fmt: skip
        return found

    def close(self, error: BaseException | None = None) -> None:
        """The run is over, or failed with `error`: boards stop following it. `with` does it too; a run that
        nobody closes is closed when its process ends."""
        self._run.end(error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close(error)

    # -- measuring

    def _judge(self, validate: Validate) -> None:
        """Paired validation of every seed that a gate will ask about."""
        target = self.growth.limits.alpha_target
        for slot in self.growth.slots:
            if slot.state in _JUDGED and (slot.state is not S.GRAFTING or slot.alpha == target):
                self.growth.arms(slot.id, validate)

    def _device(self) -> torch.device:
        return next((p.device for p in self.model.parameters()), torch.device("cpu"))

    # -- afterwards

    def _send(self, decisions: Sequence[Decision]) -> None:
        """Queue the commands, on the rank that decides; with each new seed what the library knows of it."""
        if rank() != 0:
            return
        for decision in decisions:
            command = decision.command
            if command is None:
                continue
            if command.command is Verb.REQUEST_GERMINATION:
                numbers = self.chooser.evidence(command.kernel_artifact_id, self.growth.limits)
                self.growth.measure(command.slot, **numbers)
            self.growth.submit(command)

    def _remember(
        self, boundary: Boundary, packet: SystemStatePacket, found: Scores, commit_us: float
    ) -> None:
        for move in boundary.applied:
            if move.source is S.LOADING:
                self._active_us[move.slot] = commit_us
            if move.target is S.GERMINATED:
                self._germinated += 1
                self._asked_at[move.slot] = found.of(move.slot)
                self._begun[move.slot] = packet.validation_loss
            elif move.source is S.GERMINATED:
                self._asked_at.pop(move.slot, None)
            if move.target in _CHANGES:
                self._changed_at = len(self._history)

    def _tell(
        self,
        boundary: Boundary,
        packet: SystemStatePacket,
        found: Scores,
        decisions: Sequence[Decision],
        spent: float,
    ) -> None:
        if self.settings.field_reports and rank() == 0:
            telling.tell(telling.reports(boundary.applied, packet, self._begun, self.library), self.library)
        info = loader.cache_info()
        facts = telling.epoch_facts(
            self._now(packet), found, decisions, self.settings.policy, hit_ratio(info)
        )
        facts["decision_ms"] = 1e3 * spent
        self.bus.publish(Event("EPOCH", packet.current_epoch, packet.step, "", facts))
        moved = self.ladder.look(packet.hardware_context.memory_used)
        if moved is not None:
            pressure = {"rung": moved.name, "used": packet.hardware_context.memory_used}
            self.bus.publish(Event("MEMORY_PRESSURE", packet.current_epoch, packet.step, "", pressure))

    def _heard(self, event: Event) -> None:
        """A rollback is the trainer's, and told to the library when it happens: no boundary sees it."""
        self._run.heard(event)
        artifact = str(event.facts.get("artifact", ""))
        if event.kind == "SEED_ROLLED_BACK" and artifact and self.settings.field_reports and rank() == 0:
            before, now = self._begun.get(event.slot), self._history[-1:]
            report = telling.rolled_back(event, before, now[0] if now else None, self.library)
            telling.tell([report], self.library)

    def _now(self, packet: SystemStatePacket) -> SystemStatePacket:
        """The packet with the states that the boundary left."""
        states = {slot.id: slot for slot in self.growth.slots}
        now = {
            name: replace(
                f, state=states[name].state, alpha=states[name].alpha, artifact=states[name].artifact
            )
            if f.state is not states[name].state
            else f
            for name, f in packet.seed_states.items()
        }
        return replace(packet, seed_states=now)

    def _observe_less(self, less: bool) -> None:
        self.observer.gains = not less
        every = self.settings.telemetry_every * (_MOST_TELEMETRY if less else 1)
        self.growth.observe(self.observer, every=every)

    def _eager(self, on: bool) -> None:
        """Seeds answer by their eager twins, which need no workspace of their own."""
        for slot in self.growth.slots:
            if slot.seed is not None:
                slot.seed.block.rest(on)

    # -- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Everything that later decisions depend on, as plain data and tensors."""
        return {
            "version": VERSION,
            "policy_name": self.settings.policy,
            "policy": self.policy.state_dict(),
            "history": list(self._history),
            "asked_at": dict(self._asked_at),
            "begun": dict(self._begun),
            "germinated": self._germinated,
            "changed_at": self._changed_at,
            "record": self.record.state_dict(),
            "observer": self.observer.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on as the controller that wrote `state`; E1033 when it was another kind, and nothing is
        changed."""
        if state.get("version") != VERSION or state.get("policy_name") != self.settings.policy:
            told = f"version {state.get('version')}, policy {state.get('policy_name')!r}"
            raise fail(
                "E1033", f"the state is of {told}; this is version {VERSION}, {self.settings.policy!r}"
            )
        self.policy.load_state_dict(state["policy"])
        self._history = list(state["history"])
        self._asked_at, self._begun = dict(state["asked_at"]), dict(state["begun"])
        self._germinated, self._changed_at = int(state["germinated"]), int(state["changed_at"])
        self.record.load_state_dict(state["record"])
        self.observer.load_state_dict(state["observer"], self.growth.sites)


def hit_ratio(info: CacheInfo) -> float:
    """Of the process's cache of artifacts; 1 before anything was asked of it."""
    lookups = info.hits + info.misses
    return info.hits / lookups if lookups else 1.0
