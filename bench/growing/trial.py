"""One trial of the planted bottleneck: a healthy twin, an untouched twin, and a host that may grow; the same
data, weights (but for the plant) and batches."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import runtime
from bench.growing.hosts import Towers, planted
from library.store import Library
from runtime.seeds.commands import Graft
from runtime.seeds.lifecycle import Lifecycle, Limits
from runtime.strategy.settings import PlateauSettings, Settings

PARTS, SIZE, FACTORS = 4, 4, 2
BATCH, EPOCHS, STEPS, RATE = 128, 64, 32, 4e-3
TRAIN, VALID, TEST = 16384, 2048, 4096
LABEL_NOISE = 0.2
FREQUENCY = 1.75  # radians per deviation of the input: most of each cosine is neither constant nor linear
SETTINGS = Settings(
    plateau=PlateauSettings(window=4, min_improvement=0.03, warmup=6),
    limits=Limits(planned_epochs=EPOCHS, deadline_least=10, speculative=True, max_rent=1.0),
    graft=Graft(fossil="train"),  # what it stands beside learns to the end as well
    telemetry_every=2,
    fine_tune_epochs=8,
    field_reports=False,
)


@dataclass(frozen=True)
class Data:
    """float32 [n, PARTS * SIZE] and [n, 1]: a sum over parts of cosines of random directions, all of one
    frequency, so that every block has the same work to do; plus noise of standard deviation LABEL_NOISE in
    training and validation; test labels are clean."""

    x: Tensor
    y: Tensor
    x_valid: Tensor
    y_valid: Tensor
    x_test: Tensor
    y_test: Tensor


def data(seed: int) -> Data:
    """A task of its own per seed."""
    generator = torch.Generator().manual_seed(10_000 + seed)
    directions = torch.randn(PARTS, SIZE, FACTORS, generator=generator)
    directions *= FREQUENCY / directions.norm(dim=1, keepdim=True)
    phases = torch.rand(PARTS, FACTORS, generator=generator) * 2 * math.pi
    x = torch.randn(TRAIN + VALID + TEST, PARTS, SIZE, generator=generator)
    clean = torch.cos(torch.einsum("nps,psf->npf", x, directions) + phases).sum((1, 2)) * (
        1.4 / math.sqrt(FACTORS)
    )
    noisy = clean + LABEL_NOISE * torch.randn(clean.shape, generator=generator)
    flat = x.flatten(1)
    end = TRAIN + VALID
    return Data(
        flat[:TRAIN],
        noisy[:TRAIN, None],
        flat[TRAIN:end],
        noisy[TRAIN:end, None],
        flat[end:],
        clean[end:, None],
    )


@dataclass(frozen=True)
class Grown:
    """`loss`: of the clean test labels. `asked`, `kept`: slots that a seed was asked for and that kept one;
    `first`: the slot asked for first; `epochs`: of the first seed kept, from its request on; `since`:
    from the first request of any."""

    loss: float
    asked: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    epochs: int | None = None
    since: int | None = None
    told: str = ""

    @property
    def first(self) -> str:
        return self.asked[0] if self.asked else ""


def host(seed: int, kind: str = "", at: int = 0) -> Towers:
    """Weights from the seed alone; a plant draws its own afterwards."""
    torch.manual_seed(seed)
    model = Towers(PARTS, SIZE, SIZE, 1)
    return planted(model, at, kind) if kind else model


def train(
    model: Towers,
    given: Data,
    seed: int,
    library: Library | None = None,
    settings: Settings = SETTINGS,
    watch: Callable[[Any], None] | None = None,
    epochs: int = EPOCHS,
) -> Grown:
    """Adam with a cosine schedule to a tenth; with a library the host may grow at "blocks.*"."""
    tamiyo = None
    if library is not None:
        runtime.wrap(model, "blocks.*", library=library)
        tamiyo = runtime.TamiyoController(model, config=settings)
        if watch is not None:
            tamiyo.bus.subscribe(watch)
    optimizer = torch.optim.Adam(model.parameters(), RATE, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs, eta_min=RATE / 10)
    if tamiyo is not None:
        tamiyo.growth.attach(optimizer, schedule)
    order = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    for _ in range(epochs):
        for rows in torch.randint(TRAIN, (STEPS, BATCH), generator=order):
            optimizer.zero_grad()
            F.mse_loss(model(given.x[rows]), given.y[rows]).backward()
            optimizer.step()
        if tamiyo is not None:
            tamiyo.end_epoch(lambda m: losses(m, given.x_valid, given.y_valid))
        schedule.step()
    loss = test_loss(model, given)
    return Grown(loss) if tamiyo is None else replace(history(tamiyo), loss=loss)


def losses(model: nn.Module, x: Tensor, y: Tensor) -> list[float]:
    """Mean squared error of every validation batch."""
    pairs = zip(x.split(BATCH), y.split(BATCH), strict=True)
    return [float(F.mse_loss(model(a), b)) for a, b in pairs]


def test_loss(model: nn.Module, given: Data) -> float:
    model.eval()
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        found = float(F.mse_loss(model(given.x_test), given.y_test))
    model.train()
    return found


def history(tamiyo: Any) -> Grown:
    """What the journal says became of the seeds."""
    asked: list[tuple[str, int]] = []
    kept: list[tuple[str, int]] = []
    for line in tamiyo.growth.journal.lines:
        if line["kind"] != "command":
            continue
        if line["to"] == Lifecycle.GERMINATED.name:
            asked.append((line["slot"], line["epoch"]))
        if line["to"] == Lifecycle.FOSSILIZED.name:
            kept.append((line["slot"], line["epoch"]))
    epochs = since = None
    if kept:
        slot, end = kept[0]
        epochs = end - max(epoch for s, epoch in asked if s == slot and epoch <= end)
        since = end - asked[0][1]
    slots = tuple(s for s, _ in asked), tuple(s for s, _ in kept)
    return Grown(math.nan, *slots, epochs, since, tamiyo.explain())
