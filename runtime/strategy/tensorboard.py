"""Events of growth as TensorBoard scalars and texts; needs the package `tensorboard` (the extra `growth`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from runtime.seeds.facts import Event
from runtime.strategy.errors import fail
from runtime.strategy.running import FAILED, FINISHED


class TensorBoardWriter:
    """A listener. Losses and accuracy per epoch, alpha, score and health per slot that is not dormant, a text
    for everything that happens to a seed. E1035 without the package."""

    def __init__(self, folder: Path | str) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ModuleNotFoundError:
            raise fail("E1035", "writing for TensorBoard needs the package tensorboard",
                       hint="pip install 'esper-forge[growth]'") from None  # fmt: skip
        self._writer: Any = SummaryWriter(str(folder))

    def __call__(self, event: Event) -> None:
        if event.kind == "EPOCH":
            self._epoch(event)
        elif event.kind in (FINISHED, FAILED):
            self._writer.close()
        elif event.slot:
            told = ", ".join(f"{k} {v}" for k, v in event.facts.items())
            self._writer.add_text(f"seeds/{event.slot}", f"{event.kind} {told}", event.epoch)

    def _epoch(self, event: Event) -> None:
        for name in ("validation_loss", "validation_accuracy"):
            value = event.facts.get(name)
            if value is not None:
                self._writer.add_scalar(f"growth/{name}", value, event.epoch)
        for row in event.facts.get("slots", ()):
            numbers = {"alpha": row.get("alpha"), "score": row.get("score"), **row.get("health", {})}
            for name, value in numbers.items():
                if isinstance(value, int | float):
                    self._writer.add_scalar(f"slots/{row['slot']}/{name}", value, event.epoch)
        self._writer.flush()
