"""The growth side of one model: its wrapped layers and slots, the hook that ticks, and what a boundary reads.

    growth = runtime.growth_of(model)

Between boundaries nothing changes but numbers: the optimizer's hook hands seeds their gradients, counts, and
advances ramps by integers. Everything else happens in `commit` (`runtime.seeds.boundary`).
"""

from __future__ import annotations

import copy
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from esper_ir.diagnostics import EsperError
from runtime.seeds import evidence as measuring
from runtime.seeds import stepping, traced
from runtime.seeds.bans import Bans
from runtime.seeds.boundary import commit, uncollected
from runtime.seeds.commands import Journal, KasminaControlCommand, Queue
from runtime.seeds.errors import fail
from runtime.seeds.facts import Arms, Boundary, Event, Listener, Observer, SlotFacts, Snapshot
from runtime.seeds.layer import Site, Slot, overriding
from runtime.seeds.lifecycle import (
    ADAPTING,
    HOLDING_SEED,
    LEARNING,
    WAITING,
    Fault,
    Lifecycle,
    Limits,
    Measured,
    Number,
)
from runtime.seeds.ranks import Ranks
from runtime.seeds.resuming import restore, state_of
from runtime.seeds.seed import state_in_library
from runtime.seeds.state import HEALTH, PROBE
from runtime.seeds.surgery import Surgeon

log = logging.getLogger("esper.growth")
_NOT_COPIED = frozenset(
    "_model listeners surgeon scaler _handles run_dir journal bans library".split()
    + "observer _due _sampled _turn".split()
)
_TOLD = tuple("lifecycle alpha round paused fault seed_steps exec_us last_update_epoch health probe".split())
_STATES = tuple(Lifecycle(code) for code in range(14))
_NOTHING: Mapping[str, Number] = MappingProxyType({})
_NO_HEALTH: Mapping[str, float] = MappingProxyType(dict.fromkeys(HEALTH, 0.0))
_NO_PROBE: Mapping[str, float] = MappingProxyType(dict.fromkeys(PROBE, 0.0))
NEVER = 1 << 62
ENOUGH_HELD_OUT = 16  # held-out batches after which a boundary starts counting anew


class Growth:
    """Everything that grows in one model. Made by `runtime.wrap`."""

    def __init__(self, model: nn.Module, sites: Mapping[str, Site], limits: Limits, **options: Any) -> None:
        self._model = weakref.ref(model)
        self.sites = dict(sites)
        self.slots: tuple[Slot, ...] = tuple(s for site in self.sites.values() for s in site.slots)
        self.order = {s.id: at for at, s in enumerate(self.slots)}
        self.limits = limits
        self.library: Any = options.get("library")
        self.allow_unvalidated: bool = bool(options.get("allow_unvalidated"))
        run_dir = options.get("run_dir")
        self.run_dir = Path(run_dir) if run_dir is not None else None
        self.ranks = Ranks(options.get("group"))
        files = self.run_dir if self.ranks.first else None
        self.journal = Journal(files / "journal.jsonl" if files else None)
        self.bans = Bans(self.run_dir / "tombstones.jsonl" if self.run_dir else None, self.ranks.first)
        self.queue = Queue()
        self.epoch = self.step = 0
        self.ticks = 0  # optimizer steps since the last commit
        self.listeners: list[Listener] = []
        self.surgeon: Surgeon | None = None
        self.scaler: Any = None
        self.observer: Observer | None = None
        self.every = 50
        # By step within `every`: who is observed from there on, and for how many steps.
        self._due: dict[int, tuple[tuple[Site, ...], int]] = {}
        self._sampled: tuple[Site, ...] = ()
        self._turn = NEVER  # the step before which others are chosen
        self._counted = (-1, 1)  # committed grafts, parameters with them
        self.moving: tuple[Slot, ...] = ()
        self.tally: Counter[Lifecycle] = Counter({Lifecycle.DORMANT: len(self.slots)})
        self._told: dict[str, dict[str, Number]] = {}
        self._states: dict[str, str] = {}  # by artifact, as the library said at this boundary
        self._snapshot: Snapshot | str | None = None  # text: checked, and facts not asked for
        self._handles: list[Any] = []
        self.queue.seen(line["command"]["command_id"] for line in self.journal.lines if "command" in line)
        for site in self.sites.values():
            site.loss_scale = self.loss_scale

    @property
    def limits(self) -> Limits:
        return self._limits

    @limits.setter
    def limits(self, limits: Limits) -> None:
        self._limits = limits
        for site in self.sites.values():  # what seeds learn by is what gates ask for
            site.radius = limits.trust_radius

    def __deepcopy__(self, memo: dict[int, Any]) -> Growth:
        """Goes with a copy of the whole model; it has no optimizer and no files, and nobody listens."""
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        model = memo.get(id(self.model), self.model)
        kept = {k: v for k, v in self.__dict__.items() if k not in _NOT_COPIED}
        made.__dict__.update({k: copy.deepcopy(v, memo) for k, v in kept.items()})
        made._model, made.library, made.run_dir = weakref.ref(model), self.library, None
        made.listeners, made._handles = [], []
        made.surgeon = made.scaler = made.observer = None
        made._due, made._sampled, made._turn = {}, (), NEVER
        made.journal, made.bans = Journal(), Bans()
        made.journal.lines = list(self.journal.lines)
        made.bans.load_state_dict(self.bans.state_dict())
        made.bans.tombstones = list(self.bans.tombstones)
        for site in made.sites.values():
            site.loss_scale = made.loss_scale
        return made

    def __getstate__(self) -> None:
        raise fail("E1002", "a model with slots is not pickled", hint="runtime.save_model, or a checkpoint")

    @property
    def model(self) -> nn.Module:
        found = self._model()
        if found is None:
            raise fail("E1002", "the model is gone")
        return found

    # -- finding things
    # ---------------------------------------------------------------------------------------------------

    def find(self, slot_id: str) -> Slot | None:
        at = self.order.get(slot_id)
        return None if at is None else self.slots[at]

    def busy(self) -> list[Slot]:
        """Slots that are not dormant, in their order."""
        many = sum(count for state, count in self.tally.items() if state is not Lifecycle.DORMANT)
        if not many:
            return []
        return [
            slot
            for site in self.sites.values()
            for slot, code in zip(site.slots, site.state.column("lifecycle"), strict=True)
            if code
        ]

    def told(self, slot_id: str) -> dict[str, Number]:
        """What `measure` was given about a slot."""
        return dict(self._told.get(slot_id, {}))

    def slot(self, slot_id: str) -> Slot:
        """E1014 for an id that is none."""
        found = self.find(slot_id)
        if found is None:
            some = ", ".join([*self.order][:8])
            raise fail("E1014", f"no slot {slot_id!r}", node=slot_id, hint=f"slots: {some}")
        return found

    def loss_scale(self) -> Tensor | None:
        """The scaler's scale on its device, without reading it."""
        return getattr(self.scaler, "_scale", None) if self.scaler is not None else None

    def emit(self, kind: str, slot: str = "", **facts: Any) -> None:
        """Tell every listener; one that raises is logged and does not stop a step."""
        event = Event(kind, self.epoch, self.step, slot, facts)
        for listener in self.listeners:
            try:
                listener(event)
            except Exception:  # a listener is anybody's code
                log.exception("a listener failed on %s", kind)

    def observe(self, observer: Observer | None, every: int = 50) -> None:
        """Install telemetry: called for every layer in one of `every` optimizer steps, for the first of them
        beginning with the next. They take turns, so that no step bears the cost and memory of all."""
        self.observer, self.every = observer, max(int(every), 1)
        for site in self.sites.values():
            site.observer = observer
        self._begin_turns()

    def _begin_turns(self) -> None:
        turns: dict[int, tuple[Site, ...]] = {}
        for number, site in enumerate(self.sites.values() if self.observer is not None else ()):
            at = number * self.every // len(self.sites)
            turns[at] = (*turns.get(at, ()), site)
        for at in [*turns]:  # where a turn ends nobody is observed, but for those whose turn begins there
            turns.setdefault((at + 1) % self.every, ())
        order = sorted(turns)
        later = zip(order, order[1:] + order[:1], strict=True)
        self._due = {at: (turns[at], (then - at - 1) % self.every + 1) for at, then in later}
        self._take_turns()

    def _take_turns(self) -> None:
        """Choose who is observed in the next step."""
        found = self._due.get(self.step % self.every)
        if found is None:  # a run goes on from between two turns, or nobody observes
            found = (), 1 if self._due else NEVER
        due, ahead = found
        self._turn = self.step + ahead
        if due is not self._sampled:
            for site in self._sampled:
                site.sample(False)
            for site in due:
                site.sample(True)
            self._sampled = due

    # -- the optimizer
    # ---------------------------------------------------------------------------------------------------

    def attach(self, optimizer: Optimizer, scheduler: Any = None, scaler: Any = None) -> None:
        """Who gets new parameters, and whose steps advance ramps. E1002 when an optimizer is attached already
        (`detach` first), E1008 for what is no optimizer, or a scheduler of another one."""
        if self.surgeon is not None:
            raise fail("E1002", "an optimizer is attached already", hint="growth.detach() first")
        self.surgeon, self.scaler = Surgeon(optimizer, scheduler), scaler
        self._handles = [
            optimizer.register_step_pre_hook(lambda *_: stepping.before(self)),
            optimizer.register_step_post_hook(lambda *_: self.tick()),
        ]
        self.reselect()

    def detach(self) -> None:
        """Take the hooks away. E1002 while a seed has a group in the optimizer."""
        if self.surgeon is not None and self.surgeon.names():
            raise fail("E1002", f"{self.surgeon.names()[0]} has a group in the optimizer")
        for handle in self._handles:
            handle.remove()
        self._handles, self.surgeon, self.scaler = [], None, None

    def tick(self) -> None:
        """After every optimizer step: count, let companions step, advance ramps, choose what the next step
        samples and whether it teaches. Integers of the host only."""
        if self.moving or self.surgeon is not None:
            stepping.after(self)
        step = self.step = self.step + 1
        self.ticks += 1
        self._snapshot = None
        if traced.WAITING:
            for site in self.sites.values():
                traced.forget(site.key)
        if step >= self._turn:
            self._take_turns()
        if self.moving:
            teaching = self.step % self.limits.held_out_every != self.limits.held_out_every - 1
            for slot in self.moving:
                slot.site.teaching = teaching

    def reselect(self) -> None:
        """Called after anything changed that the hooks depend on."""
        codes = {int(s) for s in LEARNING}
        self.moving = tuple(
            slot
            for site in self.sites.values()
            for slot, code in zip(site.slots, site.state.column("lifecycle"), strict=True)
            if code in codes
        )
        for site in self.sites.values():
            site.refresh()

    def settle(self, tally: Counter[Lifecycle]) -> None:
        """Called when slots were written from outside a boundary (a checkpoint): how many are in which
        state."""
        self.tally, self._snapshot = tally, None
        self._sampled = tuple(site for site in self.sites.values() if site.sampling)
        self._begin_turns()
        self._told.clear()
        self.reselect()

    def state_dict(self) -> dict[str, Any]:
        """Everything that grows, as plain containers and tensors (`runtime.seeds.resuming`)."""
        return state_of(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Become what `state_dict` gave; the optimizer's groups are not touched. Errors: E1006, and those of
        loading an artifact; nothing is changed then."""
        restore(self, state)

    @contextmanager
    def override(self, slot_id: str, alpha: Tensor | float) -> Iterator[None]:
        """Forwards inside run with this alpha for the slot: a number, or a value per sample (fp32, first
        axis), which measures with and without in one pass."""
        self.slot(slot_id)
        with overriding(self.sites, {slot_id: alpha}):
            yield

    def shadow_step(self, closure: Callable[[], Tensor]) -> dict[str, float]:
        """Teach every seed in TRAINING under the objective "shadow" by the task's loss through it: `closure`
        runs the model and gives the loss. Host gradients, buffers and random numbers stay what they were.
        Call it once per step, beside the host's backward; the loss by slot id."""
        told: dict[str, float] = {}
        for slot in self.moving:
            if slot.state is Lifecycle.TRAINING and slot.graft.objective == "shadow" and slot.site.teaching:
                told[slot.id] = stepping.shadow(self, slot, closure)
        return told

    # -- boundaries
    # ---------------------------------------------------------------------------------------------------

    def measure(self, slot_id: str, **numbers: Number) -> None:
        """What somebody else knows about a slot, by the names of `GATES`; holds until the slot moves. Also
        "held_out_loss", by which PERFORMANCE_LINKED hastens."""
        slot = self.slot(slot_id)
        loss = numbers.pop("held_out_loss", None)
        if loss is not None:
            stepping.heard(slot, loss.value if isinstance(loss, Measured) else float(loss))
        self._told.setdefault(slot_id, {}).update(numbers)

    def forget(self, slot_id: str) -> None:
        """What was measured about a slot holds no longer."""
        self._told.pop(slot_id, None)

    def arms(self, slot_id: str, validate: measuring.Validate) -> Arms:
        """Losses with the graft, without it, and by the host before it; kept as evidence for G3 to G5. The
        training's state is the same after as before, to the bit. All ranks call it; each arm is their mean,
        batch by batch."""
        slot = self.slot(slot_id)
        arms, numbers = measuring.measure_arms(self.model, self.sites, slot, validate, self.ranks)
        self.measure(slot_id, **numbers)
        self._snapshot = None
        return arms

    def evidence(self, slot: Slot) -> dict[str, Number]:
        """Everything measured about a slot now."""
        state = slot.state
        found: dict[str, Number] = {
            "adapting": float(sum(self.tally[s] for s in ADAPTING) - (state in ADAPTING)),
            "grafting": float(self.tally[Lifecycle.GRAFTING] - (state is Lifecycle.GRAFTING)),
            "fault": float(slot.fault),
        }
        if state is Lifecycle.TRAINING:
            found |= measuring.of_incubation(measuring.probe_of(slot), slot.get("seed_steps"))
        if state in HOLDING_SEED and slot.seed is not None:
            found["alpha_error"] = slot.alpha - slot.get("ramp_target")
            found["paused"] = float(slot.get("paused"))
            found["settled_steps"] = float(self.step - slot.get("entered_step"))
            found["rent"] = slot.seed.count() / self._parameters()
        if state is Lifecycle.EMBARGOED:
            found["embargo_left"] = float(slot.expires - self.epoch)
        if state is Lifecycle.RESETTING:
            grouped = self.surgeon is not None and slot.id in self.surgeon.names()
            found["released"] = slot.seed is None and not grouped
        return {**found, **self._told.get(slot.id, {})}

    def _parameters(self) -> int:
        """Of the host with its committed grafts; counted again when there are more."""
        grafts = sum(len(site.chain) for site in self.sites.values())
        if self._counted[0] != grafts:
            self._counted = grafts, max(sum(p.numel() for p in self.model.parameters()), 1)
        return self._counted[1]

    def snapshot(self) -> Snapshot:
        """All slots as they are now. The device's columns are copied once, checked against the mirror and
        summed over ranks; `corrupt` says what a check found, and asks for a rollback."""
        corrupt = self.checked()
        if not isinstance(self._snapshot, Snapshot):
            made = tuple(f for site in self.sites.values() for f in self._facts(site))
            self._snapshot = Snapshot(self.epoch, self.step, made, corrupt)
        return self._snapshot

    def checked(self) -> str:
        """Copy the device's columns, unless that was done since the last step: what a check of them found, ""
        when all held."""
        seen = self._snapshot
        if seen is None:
            seen = self._snapshot = self._fetched()
        return seen if isinstance(seen, str) else seen.corrupt

    def _fetched(self) -> str:
        corrupt = ""
        try:
            for name, site in self.sites.items():
                site.state.fetch(name)
        except EsperError as error:
            corrupt = f"{error.code} {error.message}"
        if self.ranks.many > 1:
            corrupt = next((c for c in self.ranks.gather(corrupt) if c), "")
            for site in self.sites.values():
                self.ranks.total(site.state.host["health"])
                self.ranks.total(site.state.host["probe"])
                self.ranks.most(site.state.host["fault"])
        return corrupt

    def _facts(self, site: Site) -> Iterator[SlotFacts]:
        columns = {name: site.state.column(name) for name in _TOLD}
        size, more = divmod(site.features, len(site.slots))
        for at, slot in enumerate(site.slots):
            state = _STATES[columns["lifecycle"][at]]
            idle = state is Lifecycle.DORMANT
            first = at * size + min(at, more)
            sampled = any(columns["health"][at])
            waits = state in WAITING
            left = columns["last_update_epoch"][at] + self.limits.deadline() - self.epoch if waits else -1
            evidence = _NOTHING if idle else self.evidence(slot)
            yield SlotFacts(
                slot.id,
                site.name,
                at,
                (first, first + size + (at < more)) if size else (0, 0),
                state,
                slot.artifact,
                columns["alpha"][at],
                columns["round"][at],
                bool(columns["paused"][at]),
                Fault(columns["fault"][at]),
                columns["seed_steps"][at],
                columns["exec_us"][at],
                columns["last_update_epoch"][at],
                left,
                not idle and stepping.ready(self, slot, state, evidence),
                slot.strategy.value,
                0 if slot.seed is None else slot.seed.count(),
                len(site.chain),
                dict(zip(HEALTH, columns["health"][at], strict=True)) if sampled else _NO_HEALTH,
                _NO_PROBE if idle else dict(zip(PROBE, columns["probe"][at], strict=True)),
                evidence,
            )

    def submit(self, command: KasminaControlCommand) -> bool:
        """Queue a command for the boundary; False when one of this id came before."""
        return self.queue.put(command)

    def commit(self, *, autopilot: bool = True) -> Boundary:
        """End of an epoch: carry out what is queued, then what is mechanical, and start the next epoch.

        All commands of a boundary are prepared first, on all ranks, and then carried out in the order of
        slots; a refused one changes nothing. E1009 when a graft's ramp should have advanced and no step of
        the attached optimizer was seen.
        """
        if not self.ticks and any(s.state is Lifecycle.GRAFTING for s in self.slots):
            raise fail("E1009", "no optimizer step was seen in an epoch with a graft under way",
                       hint="runtime.attach(model, optimizer), and step that optimizer")  # fmt: skip
        with self.ranks.counted(), uncollected():
            corrupt = self.checked()
            self._states.clear()
            done = commit(self, corrupt, autopilot)
            self._states.clear()
        self._end_epoch()
        return done

    def _end_epoch(self) -> None:
        for site in self.sites.values():
            site.state.empty("health")
        for slot in self.slots if any(s.active for s in self.sites.values()) else ():
            if slot.state is Lifecycle.TRAINING and measuring.probe_of(slot)["held"] >= ENOUGH_HELD_OUT:
                slot.site.state.clear(slot.index, "probe")
        self.epoch += 1
        self.ticks = 0
        self._snapshot = None

    def state_in_library(self, artifact: str) -> str:
        """What the library says now about an artifact; within one boundary it is asked once."""
        if artifact not in self._states:
            self._states[artifact] = state_in_library(self.library, artifact)
        return self._states[artifact]

    def asked(self, artifact: str, state: str) -> None:
        """What the library said of an artifact when it was asked for other reasons at this boundary."""
        self._states[artifact] = state

    def held_states(self) -> dict[str, str]:
        """What the library says now about the artifacts that slots hold, by slot id."""
        return {
            s.id: self.state_in_library(s.artifact)
            for site in self.sites.values()
            for s in site.active
            if s.artifact
        }


def growth_of(model: Any) -> Growth:
    """The growth side of a wrapped model, or of one inside a compiled or data-parallel wrapper. E1002 without
    one."""
    at = model
    while isinstance(at, nn.Module):
        found = at.__dict__.get("_esper_growth")
        if found is not None:
            return found
        at = at._modules.get("_orig_mod") or at._modules.get("module")
    raise fail("E1002", f"{type(model).__name__} is not wrapped", hint="runtime.wrap(model, sites=...)")
