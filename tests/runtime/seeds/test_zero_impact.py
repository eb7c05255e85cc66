"""A seed in TRAINING beside a host that has none: the same bits for 100 steps, whatever the loop does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import runtime
from runtime.seeds.commands import Graft
from runtime.seeds.incubation import OBJECTIVES
from runtime.seeds.lifecycle import Fault, Lifecycle
from tests.runtime.seeds.garden import LIMITS, Bed, Net, batches, loss_of, net, some

STEPS = 100


class Checkpointed(Net):
    """The site's part is computed again in the backward."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.front(x))
        h = checkpoint(self._middle, h, use_reentrant=self.reentrant)
        return self.head(h)

    def _middle(self, h: Tensor) -> Tensor:
        return self.drop(torch.tanh(self.body(h)))


class Reentrant(Checkpointed):
    reentrant = True


class Over(Net):
    """Writes over the site's result."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(torch.tanh(self.front(x)))
        return self.head(self.drop(torch.relu_(h)))


class Run:
    """Trains and keeps every bit that the host must not lose."""

    def __init__(self, model: nn.Module, optimizer: Any, *, amp: bool, accumulate: int, clip: float) -> None:
        self.model, self.optimizer = model, optimizer
        self.amp, self.accumulate, self.clip = amp, accumulate, clip
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=20) if amp else None
        self.seen: list[Tensor] = []

    def go(self, steps: int, shadow: Callable[[Callable[[], Tensor]], Any] | None = None) -> None:
        data = iter(batches(steps * self.accumulate))
        torch.manual_seed(11)
        for _ in range(steps):
            self.optimizer.zero_grad()
            for _ in range(self.accumulate):
                self._micro(next(data), shadow)
            self._update()
        self.seen += [p.detach().clone() for p in self.model.parameters()]
        self.seen += [b.detach().clone() for b in self.model.buffers()]
        self.seen.append(torch.get_rng_state())

    def _micro(self, batch: Any, shadow: Any) -> None:
        def forward() -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=self.amp):
                return loss_of(self.model, batch)

        loss = forward()
        share = loss / self.accumulate
        (self.scaler.scale(share) if self.scaler else share).backward()
        if shadow is not None:
            shadow(forward)
        self.seen.append(loss.detach())

    def _update(self) -> None:
        if self.scaler:
            self.scaler.unscale_(self.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.seen += [norm, *[p.grad.clone() for p in self.model.parameters()]]
        if self.scaler:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()


def host(kind: type[Net], dropout: float) -> Net:
    torch.manual_seed(0)
    return kind(dropout)


def both(
    artifact: str, kind: type[Net], graft: Graft, dropout: float, steps: int = STEPS, **loop: Any
) -> tuple[Run, Run, Any]:
    bare = host(kind, dropout)
    alone = Run(bare, torch.optim.AdamW(bare.parameters(), lr=1e-2), **loop)
    grown = host(kind, dropout)
    beside = Run(grown, torch.optim.AdamW(grown.parameters(), lr=1e-2), **loop)
    runtime.wrap(grown, "body", limits=LIMITS)
    growth = runtime.attach(grown, beside.optimizer, scaler=beside.scaler)
    with torch.autocast("cpu", torch.bfloat16, enabled=loop["amp"]):
        grown(batches(1)[0][0])
    bed = Bed.__new__(Bed)
    bed.growth, bed.slot = growth, growth.slots[0]
    bed.plant(artifact, graft)
    assert bed.slot.state is Lifecycle.TRAINING, growth.journal.lines
    started = {n: p.detach().clone() for n, p in bed.slot.seed.named().items()}
    alone.go(steps)
    beside.go(steps, growth.shadow_step)
    moved = any(not torch.equal(p, started[n]) for n, p in bed.slot.seed.named().items())
    assert moved, "the seed learnt nothing: the test would prove nothing"
    return alone, beside, bed


def same(alone: Run, beside: Run) -> int:
    """How many tensors were compared."""
    assert len(alone.seen) == len(beside.seen)
    wrong = [at for at, (a, b) in enumerate(zip(alone.seen, beside.seen, strict=True)) if not bitwise(a, b)]
    assert not wrong, f"{len(wrong)} of {len(alone.seen)} differ, the first is number {wrong[0]}"
    return len(alone.seen)


def bitwise(a: Tensor, b: Tensor) -> bool:
    return a.dtype is b.dtype and a.shape == b.shape and bytes(a.numpy().tobytes()) == b.numpy().tobytes()


PLAIN: dict[str, Any] = {"amp": False, "accumulate": 1, "clip": 1e9}


@pytest.mark.parametrize("objective", some(OBJECTIVES, ["proximal"]))
def test_every_objective(ids: dict[str, str], objective: str) -> None:
    assert same(*both(ids["mlp"], Net, Graft(objective=objective), 0.3, **PLAIN)[:2])


@pytest.mark.parametrize(
    ("kind", "loop"),
    [
        pytest.param(Checkpointed, PLAIN, marks=pytest.mark.slow),
        pytest.param(Reentrant, PLAIN, marks=pytest.mark.slow),
        pytest.param(Over, PLAIN, marks=pytest.mark.slow),
        pytest.param(Net, {**PLAIN, "accumulate": 3}, marks=pytest.mark.slow),
        pytest.param(Net, {**PLAIN, "clip": 0.05}, marks=pytest.mark.slow),
        (Checkpointed, {"amp": False, "accumulate": 2, "clip": 0.05}),
    ],
)
def test_whatever_the_loop_does(ids: dict[str, str], kind: type[Net], loop: dict[str, Any]) -> None:
    assert same(*both(ids["lora"], kind, Graft(), 0.3, **loop)[:2])


@pytest.mark.parametrize("accumulate", some([1, 2], [2]))
def test_mixed_precision_with_a_scaler(ids: dict[str, str], accumulate: int) -> None:
    loop = {"amp": True, "accumulate": accumulate, "clip": 0.5}
    assert same(*both(ids["bf16"], Net, Graft(), 0.3, **loop)[:2])


def test_a_nan_seed_cannot_reach_the_host(ids: dict[str, str]) -> None:
    bare, grown = net(dropout=0.3), net(dropout=0.3)
    alone = Run(bare, torch.optim.AdamW(bare.parameters(), lr=1e-2), **PLAIN)
    beside = Run(grown, torch.optim.AdamW(grown.parameters(), lr=1e-2), **PLAIN)
    bed = Bed.__new__(Bed)
    bed.growth = runtime.attach(runtime.wrap(grown, "body", limits=LIMITS), beside.optimizer)
    grown(batches(1)[0][0])
    bed.slot = bed.growth.slots[0]
    bed.plant(ids["mlp"])
    with torch.no_grad():
        bed.slot.seed.named()["w2"].fill_(float("nan"))
    alone.go(20)
    beside.go(20)
    same(alone, beside)
    bed.growth.snapshot()
    assert bed.slot.fault is Fault.NONFINITE
    bed.growth.commit()
    assert bed.slot.state is Lifecycle.EMBARGOED and bed.slot.seed is None
    assert ids["mlp"] in bed.growth.bans.quarantine


def test_a_frozen_host_still_teaches(ids: dict[str, str]) -> None:
    model = net()
    runtime.wrap(model, "body", limits=LIMITS)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    bed = Bed.__new__(Bed)
    bed.growth = runtime.attach(model, optimizer)
    model(batches(1)[0][0])
    bed.slot = bed.growth.slots[0]
    bed.plant(ids["mlp"])
    before = bed.slot.seed.named()["w2"].detach().clone()
    kept = [p.detach().clone() for p in model.parameters()]
    for batch in batches(3):
        loss_of(model, batch).backward()
        optimizer.step()
    assert not torch.equal(before, bed.slot.seed.named()["w2"])
    assert all(torch.equal(a, b) for a, b in zip(kept, model.parameters(), strict=True))
