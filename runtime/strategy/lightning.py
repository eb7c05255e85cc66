"""Growth under Lightning's Trainer; needs the package `lightning`.

    trainer = Trainer(callbacks=[GrowthCallback(tamiyo, validate)])

The model inside the LightningModule is wrapped with `runtime.wrap` before. The callback attaches the
optimizer when fitting starts, ends an epoch after each training epoch, and saves the controller with
Lightning's checkpoints. It does not roll back: when that is asked for, training stops with the reason, and
the last checkpoint is the place to go on from.
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
    from lightning.pytorch import Callback as Base  # pyright: ignore[reportMissingImports]
except ModuleNotFoundError:
    Base: Any = object

log = logging.getLogger("esper.runtime")


class GrowthCallback(Base):
    """`validate(model)` gives the loss of every validation batch, for the controller's own model (not the
    LightningModule around it). E1035 without the package, E1036 for a module with several optimizers, or
    manual optimisation with none."""

    def __init__(self, tamiyo: TamiyoController, validate: Callable[[nn.Module], Any]) -> None:
        if Base is object:
            raise fail("E1035", "lightning is not installed", hint="pip install 'esper-forge[lightning]'")
        super().__init__()
        self.tamiyo, self.validate = tamiyo, validate
        self.signal = AdaptationSignal()

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Hand the optimizer over, once."""
        if self.tamiyo.growth.surgeon is not None:
            return
        optimizers = list(trainer.optimizers)
        if len(optimizers) != 1:
            raise fail("E1036", f"{len(optimizers)} optimizers; growth works with one", node="on_fit_start")
        optimizer = getattr(optimizers[0], "optimizer", optimizers[0])  # LightningOptimizer wraps it
        configs = list(getattr(trainer, "lr_scheduler_configs", ()) or ())
        scheduler = configs[0].scheduler if configs else None
        scaler = getattr(getattr(trainer, "precision_plugin", None), "scaler", None)
        self.tamiyo.growth.attach(optimizer, scheduler, scaler)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Measure, decide, commit."""
        self.signal = self.tamiyo.end_epoch(self.validate)
        if self.signal.emergency_rollback_required:
            log.error("a rollback is required, training stops: %s", self.signal.reason)
            trainer.should_stop = True

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self.tamiyo.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.tamiyo.close(exception)

    def state_dict(self) -> dict[str, Any]:
        return {"tamiyo": self.tamiyo.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.tamiyo.load_state_dict(state_dict["tamiyo"])
