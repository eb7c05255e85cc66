"""What only a card can show: a step that never waits for it, and the same bits beside a seed there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import runtime
from runtime import loader
from runtime.seeds import checkpoint
from runtime.seeds.commands import KasminaControlCommand
from runtime.seeds.lifecycle import Lifecycle, Verb
from tests.runtime.seeds import garden
from tests.runtime.seeds.garden import LIMITS, batches, loss_of, net

pytestmark = pytest.mark.gpu
GOOD = {"held_out_gain": 0.5, "predicted_gain": -0.5, "snapshot_excess": 0.0, "validation_excess": 0.0,
        "ablation": 0.5, "contribution": 0.5, "latency_share": 0.0}  # fmt: skip


@pytest.fixture(scope="module")
def card(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Artifacts for the card here; their library is in force."""
    home: Path = tmp_path_factory.mktemp("card")
    home.chmod(0o700)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ESPER_LIBRARY", str(home / "library"))
        patch.setenv("ESPER_KEYS", str(home / "keys"))
        patch.setenv("ESPER_SPOOL", str(home / "spool"))
        loader._meant.clear()
        loader._libraries.clear()
        yield garden.fill(home, "auto", ("mlp", "lora"))


class OnCard:
    def __init__(self, wrapped: bool, *, lr: float = 0.01) -> None:
        self.model = net(dropout=0.2).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr)
        self.data = [(x.cuda(), y.cuda()) for x, y in batches(120)]
        self.at = 0
        if wrapped:
            runtime.wrap(self.model, "body", limits=LIMITS)
            self.growth = runtime.attach(self.model, self.optimizer)
            self.slot = self.growth.slots[0]
            with torch.random.fork_rng():
                self.model(self.data[0][0])

    def step(self, many: int) -> None:
        for _ in range(many):
            self.optimizer.zero_grad()
            loss_of(self.model, self.data[self.at]).backward()
            self.optimizer.step()
            self.at += 1

    def send(self, verb: Verb, artifact: str = "", **more: Any) -> Any:
        self.growth.measure("body/0", **GOOD)
        self.growth.submit(KasminaControlCommand("body", 0, verb, artifact, **more))
        return self.growth.commit()


def test_the_same_bits_beside_a_seed(card: dict[str, str]) -> None:
    alone, beside = OnCard(False), OnCard(True)
    beside.send(Verb.REQUEST_GERMINATION, card["mlp"])
    assert beside.slot.state is Lifecycle.TRAINING, beside.growth.journal.lines[-1]
    first = beside.slot.seed.named()["w2"].detach().clone()
    for run in (alone, beside):
        torch.manual_seed(1)
        run.step(100)
    assert not torch.equal(first, beside.slot.seed.named()["w2"])
    assert all(
        torch.equal(a, b) for a, b in zip(alone.model.parameters(), beside.model.parameters(), strict=True)
    )
    assert beside.growth.snapshot().corrupt == "" and beside.growth.snapshot().slots[0].probe["held"] > 10


def test_a_step_never_waits_for_the_card(card: dict[str, str]) -> None:
    run = OnCard(True)
    run.step(2)
    run.send(Verb.REQUEST_GERMINATION, card["mlp"])
    states = []
    for verb in (None, Verb.PROMOTE, Verb.ADVANCE, Verb.ADVANCE, Verb.ADVANCE):
        if verb is not None:
            run.send(verb)
        run.step(1)
        states.append(run.slot.state.name)
        torch.cuda.set_sync_debug_mode("error")
        try:
            run.step(11)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert states[:2] == ["TRAINING", "GRAFTING"] and "FINE_TUNING" in states, states


def test_put_back_on_the_card_to_the_bit(card: dict[str, str]) -> None:
    run = OnCard(True)
    run.send(Verb.REQUEST_GERMINATION, card["lora"])
    run.step(12)
    run.send(Verb.PROMOTE)
    run.step(3)
    assert 0.0 < run.slot.alpha < 1.0
    at, held = run.at, checkpoint.decoded(checkpoint.encoded(checkpoint.capture(run.growth)))
    run.step(5)
    first = [p.detach().clone() for p in (*run.model.parameters(), *run.slot.seed.parameters())]
    checkpoint.put_back(run.growth, held)
    run.at = at
    run.step(5)
    again = [*run.model.parameters(), *run.slot.seed.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
