"""A training loop that checkpoints, resumes and rolls back to the bit. Small on purpose: the calls are those
of a plain loop.

    trainer = runtime.Trainer(model, optimizer, loss=lambda m, b: criterion(m(b[0]), b[1]), data=loader,
                              validate=validate, controller=tamiyo, run_dir="run/")
    trainer.resume()                # from the newest good checkpoint, if there is one
    trainer.fit(epochs=30)

The trainer alone rolls back: on a loss that is not finite or far beyond its window, on a state tensor that
fails its check, on values of a grafted seed that are not finite, and when a controller asks for it. Seeds
that were in the host's result then are buried (never tried again at that layer) and their slots locked.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from runtime.seeds import applying, checkpoint
from runtime.seeds.checkpoint import Shelf
from runtime.seeds.errors import fail
from runtime.seeds.growth import Growth, growth_of
from runtime.seeds.layer import Slot
from runtime.seeds.lifecycle import HOLDING_SEED, Fault, Lifecycle
from runtime.seeds.stepping import Late

log = logging.getLogger("esper.growth")
LEAST_WINDOW = 10  # losses before one can be called far out


class RolledBack(Exception):
    """The run is at an earlier point now."""


class Trainer:
    """See the file. `loss(model, batch)` gives the batch's loss; `data` is iterated once per epoch (a loader
    that shuffles draws from torch's generator); `validate(model)` gives per-batch losses; `controller` has
    `end_epoch(validate)` and may have `state_dict`, `load_state_dict`. `accumulate`: batches per optimizer
    step. `clip`: norm that the host's gradients are clipped to. `schedule`: "epoch", "step" or "none".
    `checkpoint_every`: optimizer steps between checkpoints beside those of every epoch's end; 0 for none.
    `autocast`: dtype of `torch.autocast` around the loss. Optimizers that need a closure (LBFGS) are for
    plain loops."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        loss: Callable[[nn.Module, Any], Tensor],
        data: Iterable[Any],
        run_dir: Path | str,
        validate: Callable[[nn.Module], Iterable[Any]] | None = None,
        scheduler: Any = None,
        scaler: Any = None,
        controller: Any = None,
        accumulate: int = 1,
        clip: float | None = None,
        schedule: str = "epoch",
        checkpoint_every: int = 0,
        autocast: torch.dtype | None = None,
        most_rollbacks: int = 3,
    ) -> None:
        self.model, self.optimizer, self.scheduler, self.scaler = model, optimizer, scheduler, scaler
        self.growth: Growth = growth_of(model)
        self.loss, self.data, self.validate, self.controller = loss, data, validate, controller
        self.accumulate, self.clip, self.schedule = max(accumulate, 1), clip, schedule
        self.checkpoint_every, self.autocast, self.most_rollbacks = checkpoint_every, autocast, most_rollbacks
        if self.growth.surgeon is None:
            self.growth.attach(optimizer, scheduler, scaler)
        elif self.growth.surgeon.optimizer is not optimizer:
            raise fail("E1008", "the model is attached to another optimizer")
        self.shelf = Shelf(Path(run_dir) / "checkpoints", self.growth.limits.checkpoints)
        self.epoch = self.position = self.rollbacks = 0
        self.losses: deque[float] = deque(maxlen=self.growth.limits.loss_window)
        self._late: Late | None = None
        self._reason = ""  # why this rank would roll back, until all can
        self._start = checkpoint.random_state()
        self._failed_at = -1
        if schedule not in ("epoch", "step", "none"):
            raise fail("E1013", f"schedule={schedule!r}", hint="epoch, step or none")

    # -- the loop
    # ---------------------------------------------------------------------------------------------------

    def fit(self, epochs: int) -> None:
        """Train until `epochs` epochs are done, counted from the beginning of the run. E1016 after more than
        `most_rollbacks` at one point."""
        try:
            self._fit(epochs)
        except BaseException as error:
            self.growth.emit("RUN_FAILED", reason=f"{type(error).__name__}: {error}")
            raise
        self.growth.emit("RUN_FINISHED")

    def _fit(self, epochs: int) -> None:
        if not self.shelf.all():
            self.checkpoint()
        while self.epoch < epochs:
            try:
                self._one_epoch()
            except RolledBack:
                continue

    def _one_epoch(self) -> None:
        iterator = self._batches()
        self.model.train()
        for batch in iterator:
            self._batch(batch)
            self.position += 1
            whole = self.position % self.accumulate == 0
            every = self.checkpoint_every
            if every and whole and self.growth.step % every == 0:
                self._look(final=True)
                self.checkpoint()
        self._look(final=True)
        self._end()

    def _batches(self) -> Iterable[Any]:
        """The epoch's batches from the position on; a loader begins with the random numbers it had."""
        sampler: Any = getattr(self.data, "sampler", None)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(self.epoch)
        here = checkpoint.random_state()
        if self.position:
            checkpoint.set_random_state(self._start)
        else:
            self._start = here
        iterator = iter(self.data)
        for _ in range(self.position):
            next(iterator)
        if self.position:
            checkpoint.set_random_state(here)
        return iterator

    def _batch(self, batch: Any) -> None:
        first = self.position % self.accumulate == 0
        if first:
            self.optimizer.zero_grad(set_to_none=True)
        place = next((p.device.type for p in self.model.parameters()), "cpu")

        def forward() -> Tensor:
            with torch.autocast(place, dtype=self.autocast, enabled=self.autocast is not None):
                return self.loss(self.model, batch)

        loss = forward()
        share = loss / self.accumulate
        (self.scaler.scale(share) if self.scaler is not None else share).backward()
        self.growth.shadow_step(forward)
        self._look()
        self._late = Late(loss.detach().float())
        if (self.position + 1) % self.accumulate == 0:
            self._step()

    def _step(self) -> None:
        if self.clip is not None:
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        if self.scaler is not None:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        if self.schedule == "step" and self.scheduler is not None:
            self.scheduler.step()

    def _end(self) -> None:
        """The boundary: controller or autopilot, schedule, checkpoint."""
        snapshot = self.growth.snapshot()
        if snapshot.corrupt:
            self.rollback(snapshot.corrupt)
        if self.controller is not None:
            signal = self.controller.end_epoch(self.validate)
            asked = bool(getattr(signal, "emergency_rollback_required", False))
            reason = (str(getattr(signal, "reason", "")) or "the controller asked for it") if asked else ""
        else:
            reason = self.growth.commit().rollback
        if reason:
            self.rollback(reason)
        if self.schedule == "epoch" and self.scheduler is not None:
            self._schedule()
        self.epoch, self.position = self.epoch + 1, 0
        self.checkpoint()

    def _schedule(self) -> None:
        if isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            self.scheduler.step(fmean(self.losses) if self.losses else 0.0)
        else:
            self.scheduler.step()

    def _look(self, final: bool = False) -> None:
        """Read the loss of the step before (which waits for nothing new); roll back if it is not sane. Ranks
        decide together, at points that all of them reach (`final`)."""
        late, self._late = self._late, None
        value = late.read() if late is not None else None
        reason = self._reason or ("" if value is None else self._insane(value))
        if self.growth.ranks.many > 1:
            reason = next((r for r in self.growth.ranks.gather(reason) if r), "") if final else reason
            self._reason = "" if final else reason
            reason = reason if final else ""
        if reason:
            self.rollback(reason)
        if value is not None and not self._reason:
            self.losses.append(value)

    def _insane(self, value: float) -> str:
        """Why a loss asks for a rollback; "" when it does not."""
        if not math.isfinite(value):
            return f"loss {value}"
        if len(self.losses) < LEAST_WINDOW:
            return ""
        far = fmean(self.losses) + self.growth.limits.loss_sigmas * max(pstdev(self.losses), 1e-12)
        return f"loss {value:.6g} beyond {far:.6g}" if value > far else ""

    # -- checkpoints
    # ---------------------------------------------------------------------------------------------------

    def checkpoint(self) -> Path | None:
        """Save the run as it is now; where, on the first rank. A collective call."""
        state = self.capture()
        self.growth.emit("CHECKPOINT", position=self.position)
        if not self.growth.ranks.first:
            return None
        return self.shelf.save(state, step=self.growth.step, epoch=self.epoch)

    def capture(self) -> dict[str, Any]:
        """Everything that decides how the run goes on."""
        own = {
            "epoch": self.epoch,
            "position": self.position,
            "losses": list(self.losses),
            "start": self._start,
            "pending": None if self._late is None else self._late.read(),
        }
        held = getattr(self.controller, "state_dict", None)
        controller = held() if callable(held) else None
        return checkpoint.capture(self.growth, trainer=own, controller=controller)

    def put_back(self, state: Mapping[str, Any]) -> None:
        """Become what `capture` gave. Errors of `runtime.seeds.checkpoint.put_back`."""
        checkpoint.put_back(self.growth, state)
        own = state["trainer"]
        self.epoch, self.position, self._start = own["epoch"], own["position"], own["start"]
        self.losses = deque(own["losses"], maxlen=self.growth.limits.loss_window)
        self._reason = ""
        self._late = None if own["pending"] is None else Late(torch.tensor(own["pending"]))
        load = getattr(self.controller, "load_state_dict", None)
        if callable(load) and state["controller"] is not None:
            load(state["controller"])
        self.optimizer.zero_grad(set_to_none=True)

    def resume(self) -> bool:
        """Go on from the newest good checkpoint; False when there are none. Slots that were locked stay
        locked, whatever the checkpoint says. Errors as of `put_back`, and E1007 when there are checkpoints
        and none is good (a run that begins anew would drop them); with nothing changed."""
        found = self.shelf.newest()
        if found is None and self.shelf.all():
            raise fail("E1007", "no checkpoint of the run is good", node=str(self.shelf.folder),
                       hint="begin anew in another folder")  # fmt: skip
        if found is None:
            return False
        self.put_back(found[1])
        for slot_id in self.growth.bans.locked():
            slot = self.growth.find(slot_id)
            if slot is not None and slot.state is not Lifecycle.ROLLED_BACK:
                self._lock(slot)
        self.growth.reselect()
        return True

    def rollback(self, reason: str) -> None:
        """Back to the newest good checkpoint; what was grafted or failed is buried first. Raises `RolledBack`
        for the loop; E1016 when it happens again and again at one point."""
        growth = self.growth
        self.rollbacks = self.rollbacks + 1 if growth.step <= self._failed_at else 1
        self._failed_at = max(self._failed_at, growth.step)
        culprits = [(s.id, s.artifact, s.state.name) for s in self._suspects()]
        log.error("step %d: rolling back: %s", growth.step, reason)
        growth.emit("ROLLBACK", reason=reason, slots=[c[0] for c in culprits])
        if self.rollbacks > self.most_rollbacks:
            raise fail("E1016", f"{reason} (after {self.most_rollbacks} rollbacks to the same point)")
        found = self.shelf.newest()
        if found is None:
            raise fail("E1007", f"{reason}, and there is no good checkpoint to go back to")
        failed_step = growth.step
        for slot_id, artifact, _ in culprits:
            growth.bans.bury(slot_id, artifact, growth.epoch, reason)
        self.put_back(found[1])
        for slot_id, artifact, state in culprits:
            self._lock(growth.slot(slot_id))
            facts = {"slot": slot_id, "artifact": artifact, "from": state, "to": "ROLLED_BACK"}
            when = {"epoch": growth.epoch, "step": growth.step, "failed_step": failed_step}
            growth.journal.append("rollback", reason=reason, **when, **facts)
        growth.reselect()
        raise RolledBack(reason)

    def _suspects(self) -> list[Slot]:
        """Slots with a fault; else those whose seed is in the host's result."""
        held = [s for s in self.growth.busy() if s.state in HOLDING_SEED or s.state is Lifecycle.LOADING]
        faulty = [s for s in held if s.fault not in (Fault.NONE, Fault.EXEC)]
        return faulty or [s for s in held if s.alpha > 0.0]

    def _lock(self, slot: Slot) -> None:
        """ROLLED_BACK: y = h, until an operator releases it."""
        applying.release(self.growth, slot)
        slot.artifact = slot.artifact or self.growth.bans.locked().get(slot.id, {}).get("artifact", "")
        applying.enter(self.growth, slot, Lifecycle.ROLLED_BACK)
        self.growth.emit("SEED_ROLLED_BACK", slot.id, artifact=slot.artifact)
