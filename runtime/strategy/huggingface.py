"""Growth under the Hugging Face Trainer; needs the package `transformers`.

    trainer = Trainer(model=model, args=args, train_dataset=..., eval_dataset=...)
    trainer.add_callback(GrowthCallback(tamiyo, trainer))

The callback takes the trainer itself: the optimizer that callbacks are handed can be None. Losses come from
the trainer's evaluation loader and its `compute_loss`, unless `validate` is given. It does not roll back:
when that is asked for, training stops with the reason, and the last checkpoint is the place to go on from.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from torch import nn

from runtime.controller import TamiyoController
from runtime.strategy.errors import fail
from runtime.strategy.packet import AdaptationSignal

try:
    from transformers import TrainerCallback as Base  # pyright: ignore[reportMissingImports]
except ModuleNotFoundError:
    Base: Any = object

log = logging.getLogger("esper.runtime")


class GrowthCallback(Base):
    """`every`: "epoch", or a number of optimizer steps that counts as one. E1035 without the package, E1036
    without an optimizer or evaluation data."""

    def __init__(
        self,
        tamiyo: TamiyoController,
        trainer: Any,
        validate: Callable[[nn.Module], Any] | None = None,
        every: str | int = "epoch",
    ) -> None:
        if Base is object:
            raise fail("E1035", "transformers is not installed", hint="pip install 'esper-forge[hf]'")
        self.tamiyo, self.trainer, self.every = tamiyo, trainer, every
        self.validate = validate or self._losses
        self.signal = AdaptationSignal()

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Hand the optimizer over, once."""
        if self.tamiyo.growth.surgeon is not None:
            return
        optimizer = self.trainer.optimizer if self.trainer.optimizer is not None else given.get("optimizer")
        if optimizer is None:
            raise fail("E1036", "the trainer has no optimizer yet", node="on_train_begin")
        raw = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it, and schedulers of the wrapper
        scheduler = getattr(self.trainer, "lr_scheduler", None)
        scheduler = getattr(scheduler, "scheduler", scheduler)
        if scheduler is not None and getattr(scheduler, "optimizer", raw) is optimizer:
            scheduler.optimizer = raw  # the same groups; new ones must reach both
        scaler = getattr(getattr(self.trainer, "accelerator", None), "scaler", None)
        self.tamiyo.growth.attach(raw, scheduler, scaler)

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if isinstance(self.every, int) and state.global_step % self.every == 0:
            self._end(control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if self.every == "epoch":
            self._end(control)

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.tamiyo.close()

    def _end(self, control: Any) -> None:
        self.signal = self.tamiyo.end_epoch(self.validate)
        if self.signal.emergency_rollback_required:
            log.error("a rollback is required, training stops: %s", self.signal.reason)
            control.should_training_stop = True

    def _losses(self, model: nn.Module) -> list[float]:
        """Loss of every evaluation batch, as the trainer computes it."""
        if self.trainer.eval_dataset is None:
            raise fail("E1036", "the trainer has no eval_dataset", hint="give it one, or pass validate=")
        found = []
        for batch in self.trainer.get_eval_dataloader():
            inputs = self.trainer._prepare_inputs(batch)
            found.append(float(self.trainer.compute_loss(model, inputs)))
        return found
