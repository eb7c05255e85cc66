"""Every built-in optimizer with every built-in scheduler: a seed comes, learns and goes, and the host's
trajectory is to the bit that of a host without."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as sched
from torch.optim.swa_utils import SWALR

import runtime
from esper_ir.diagnostics import EsperError
from runtime.seeds.commands import Graft
from runtime.seeds.lifecycle import Lifecycle, Verb
from runtime.seeds.surgery import KEY, Surgeon
from tests.runtime.seeds.garden import LIMITS, WIDTH, Bed, loss_of

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "ASGD": {}, "Adadelta": {}, "Adafactor": {}, "Adagrad": {"initial_accumulator_value": 0.1}, "Adam": {},
    "AdamW": {"amsgrad": True}, "Adamax": {}, "LBFGS": {"max_iter": 2}, "Muon": {}, "NAdam": {}, "RAdam": {},
    "RMSprop": {"momentum": 0.9}, "Rprop": {}, "SGD": {"momentum": 0.9, "nesterov": True}, "SparseAdam": {},
}  # fmt: skip
SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "none": lambda o: None,
    "LambdaLR": lambda o: sched.LambdaLR(o, lambda n: 0.9**n),
    "MultiplicativeLR": lambda o: sched.MultiplicativeLR(o, lambda n: 0.95),
    "StepLR": lambda o: sched.StepLR(o, 2),
    "MultiStepLR": lambda o: sched.MultiStepLR(o, [2, 5]),
    "ConstantLR": lambda o: sched.ConstantLR(o, total_iters=4),
    "LinearLR": lambda o: sched.LinearLR(o, total_iters=6),
    "ExponentialLR": lambda o: sched.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: sched.PolynomialLR(o, total_iters=12),
    "CosineAnnealingLR": lambda o: sched.CosineAnnealingLR(o, 10),
    "CosineAnnealingWarmRestarts": lambda o: sched.CosineAnnealingWarmRestarts(o, 4),
    "CyclicLR": lambda o: sched.CyclicLR(o, 0.001, 0.01, step_size_up=3, cycle_momentum=False),
    "OneCycleLR": lambda o: sched.OneCycleLR(o, 0.01, total_steps=40, cycle_momentum="betas" in o.defaults),
    "ReduceLROnPlateau": lambda o: sched.ReduceLROnPlateau(o, patience=1, min_lr=[1e-5]),
    "SWALR": lambda o: SWALR(o, swa_lr=0.002, anneal_epochs=3),
    "SequentialLR": lambda o: sched.SequentialLR(
        o, [sched.LinearLR(o, total_iters=3), sched.LambdaLR(o, lambda n: 0.9**n)], [3]
    ),
    "ChainedScheduler": lambda o: sched.ChainedScheduler([sched.ExponentialLR(o, 0.9), sched.StepLR(o, 3)]),
}  # fmt: skip


class Words(nn.Module):
    """For SparseAdam: everything that learns is an embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Embedding(20, WIDTH, sparse=True)
        self.head = nn.Linear(WIDTH, 4).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)))


class Matrices(nn.Module):
    """For Muon: matrices alone."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Linear(8, WIDTH, bias=False)
        self.body = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(torch.tanh(self.front(x)))))


class Loop:
    def __init__(self, optimizer: str, scheduler: str) -> None:
        torch.manual_seed(3)
        self.sparse = optimizer == "SparseAdam"
        self.model: Any = Words() if self.sparse else Matrices()
        learning = [p for p in self.model.parameters() if p.requires_grad]
        kind = getattr(torch.optim, optimizer)
        self.optimizer = kind(learning, lr=0.01, **OPTIMIZERS[optimizer])
        self.scheduler = SCHEDULERS[scheduler](self.optimizer)
        self.data = torch.Generator().manual_seed(5)

    def go(self, steps: int) -> None:
        for _ in range(steps):
            if self.sparse:
                x = torch.randint(20, (16,), generator=self.data)
            else:
                x = torch.randn(16, 8, generator=self.data)
            y = torch.randint(4, (16,), generator=self.data)

            def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
                self.optimizer.zero_grad()
                loss = nn.functional.cross_entropy(self.model(x), y)
                loss.backward()
                return loss

            if isinstance(self.optimizer, torch.optim.LBFGS):
                self.optimizer.step(closure)
            else:
                closure()
                self.optimizer.step()
            if isinstance(self.scheduler, sched.ReduceLROnPlateau):
                self.scheduler.step(1.0)
            elif self.scheduler is not None:
                self.scheduler.step()

    def rates(self) -> list[Any]:
        return [
            {k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups if KEY not in g
        ]


def pair(ids: dict[str, str], optimizer: str, scheduler: str) -> int:
    """How many parameters were compared."""
    bare, grown = Loop(optimizer, scheduler), Loop(optimizer, scheduler)
    runtime.wrap(grown.model, "body", limits=LIMITS)
    growth = runtime.attach(grown.model, grown.optimizer, scheduler=grown.scheduler)
    bed = Bed.__new__(Bed)
    bed.growth, bed.slot = growth, growth.slots[0]
    for loop in (bare, grown):
        loop.go(3)
    bed.plant(ids["mlp"], Graft(lr_scale=0.5))
    assert bed.slot.state is Lifecycle.TRAINING, growth.journal.lines
    start = {n: p.detach().clone() for n, p in bed.slot.seed.named().items()}
    for loop in (bare, grown):
        loop.go(4)
    assert any(not torch.equal(p, start[n]) for n, p in bed.slot.seed.named().items())
    bed.command(Verb.CANCEL_GERMINATION)
    assert bed.slot.state is Lifecycle.DORMANT and growth.surgeon.names() == []
    for loop in (bare, grown):
        loop.go(4)
    for a, b in zip(bare.model.parameters(), grown.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert str(bare.rates()) == str(grown.rates())
    assert len(grown.optimizer.param_groups) == len(bare.optimizer.param_groups)
    if bare.scheduler is not None:
        assert str(bare.scheduler.state_dict()) == str(grown.scheduler.state_dict())
    return len(list(bare.model.parameters()))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer(ids: dict[str, str], optimizer: str) -> None:
    assert pair(ids, optimizer, "LambdaLR")


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_every_scheduler(ids: dict[str, str], scheduler: str) -> None:
    assert pair(ids, "SGD", scheduler)


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "scheduler"), list(product(OPTIMIZERS, SCHEDULERS)))
def test_the_whole_matrix(ids: dict[str, str], optimizer: str, scheduler: str) -> None:
    assert pair(ids, optimizer, scheduler)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_group_follows_the_first_ones_schedule(scheduler: str) -> None:
    loop = Loop("SGD", scheduler)
    surgeon = Surgeon(loop.optimizer, loop.scheduler)
    loop.go(2)
    surgeon.insert("body/0", {"w": nn.Parameter(torch.zeros(3))})
    loop.go(6)
    first, last = loop.optimizer.param_groups[0], loop.optimizer.param_groups[-1]
    assert first["lr"] == last["lr"]


def test_a_fused_step_under_a_scaler_teaches_a_graft_the_same(ids: dict[str, str]) -> None:
    """A fused optimizer divides by the loss scale inside its step; a seed's gradients have no scale."""
    found = []
    for fused in (False, True):
        bed = Bed(optimizer=lambda p, lr, fused=fused: torch.optim.Adam(p, lr=lr, fused=fused), lr=0.01)
        bed.growth.scaler = scaler = torch.amp.GradScaler("cpu", init_scale=512.0, enabled=fused)
        bed.bring(ids["lora"], "GRAFTING")
        for _ in range(LIMITS.ramp_steps):
            bed.optimizer.zero_grad()
            scaler.scale(loss_of(bed.model, next(bed.data))).backward()
            scaler.step(bed.optimizer)
            scaler.update()
        assert bed.slot.alpha == 1.0
        found.append([p.detach().clone() for p in (*bed.slot.seed.parameters(), *bed.model.parameters())])
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-6)


def test_what_is_frozen_does_not_move(ids: dict[str, str]) -> None:
    bed = Bed(optimizer=lambda p, lr: torch.optim.AdamW(p, lr=lr, weight_decay=0.1))
    bed.bring(ids["mlp"], "STABILIZATION")
    kept = copy.deepcopy(dict(bed.slot.seed.named()))
    bed.step(5)
    assert all(torch.equal(kept[n], p) for n, p in bed.slot.seed.named().items())
    assert bed.growth.surgeon.names() == ["body/0"]


def test_refusals_leave_the_optimizer_alone(ids: dict[str, str]) -> None:
    bed = Bed()
    with pytest.raises(EsperError) as error:
        runtime.attach(bed.model, bed.optimizer)
    assert error.value.code == "E1002"
    bed.growth.detach()
    for wrong in (None, torch.nn.Linear(2, 2)):
        with pytest.raises(EsperError) as error:
            runtime.attach(bed.model, wrong)  # type: ignore[arg-type]
        assert error.value.code == "E1008"
    other = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(EsperError) as error:
        runtime.attach(bed.model, bed.optimizer, scheduler=sched.StepLR(other, 1))
    assert error.value.code == "E1008" and bed.growth.surgeon is None
    assert not bed.optimizer._optimizer_step_pre_hooks
    boundary = bed.plant(ids["mlp"])
    refused = [r for r in boundary.refused if r.record is not None]
    assert refused[-1].record.gate == "G1" and "group_inserted" in refused[-1].reason
