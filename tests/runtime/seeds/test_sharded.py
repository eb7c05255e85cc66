"""FSDP2 over two processes: a seed's whole life in a host whose parameters are spread over the ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import runtime
from esper_ir.diagnostics import EsperError
from runtime.seeds import structure
from runtime.seeds.commands import GraftingStrategy, KasminaControlCommand
from runtime.seeds.lifecycle import Verb
from runtime.seeds.trainer import Trainer
from tests.runtime.seeds.garden import LIMITS, batches, loss_of, net, validate
from tests.runtime.seeds.test_ranks import both

MEASURED = {"held_out_gain": 0.5, "predicted_gain": -0.5, "snapshot_excess": 0.0, "validation_excess": 0.0,
            "ablation": 1.0, "contribution": 0.5, "latency_share": 0.0}  # fmt: skip


class Sharded:
    """One process: the site a unit of its own, and the rest."""

    strategy = GraftingStrategy.FIXED_RAMP

    def __init__(self, ids: dict[str, str], folder: Path) -> None:
        self.ids, self.folder, self.rank = ids, folder, dist.get_rank()
        mesh = init_device_mesh("cpu", (2,))
        self.model: Any = runtime.wrap(net(dropout=0.0), "body", limits=LIMITS, run_dir=folder)
        self.growth = runtime.growth_of(self.model)
        fully_shard(self.model.body, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.002)
        runtime.attach(self.model, self.optimizer)
        self.data = iter(batches(400, seed=50 + self.rank))
        self.slot = self.growth.slots[0]

    def step(self, many: int) -> None:
        for _ in range(many):
            self.optimizer.zero_grad()
            loss_of(self.model, next(self.data)).backward()
            self.optimizer.step()

    def send(self, verb: Verb, steps: int) -> str:
        if self.rank == 0:
            command = KasminaControlCommand("body", 0, verb, self.ids["mlp"], grafting_strategy=self.strategy)
            self.growth.submit(command)
            self.growth.measure("body/0", **MEASURED)
        self.growth.commit()
        self.step(steps)
        seeds = [structure.checksum(p) for p in (self.slot.seed.parameters() if self.slot.seed else ())]
        assert len({str(s) for s in self.growth.ranks.gather((seeds, structure.digest(self.growth)))}) == 1
        return self.slot.state.name

    def run(self) -> dict[str, Any]:
        self.step(2)
        states = [self.send(Verb.REQUEST_GERMINATION, 12), self.send(Verb.PROMOTE, 8)]
        alpha, before = self.slot.alpha, self._host()
        arms = self.growth.arms("body/0", validate)
        same = all(torch.equal(a, b) for a, b in zip(before, self._host(), strict=True))
        states += [self.send(Verb.ADVANCE, 3) for _ in range(5)]
        states.append(self.send(Verb.PROMOTE, 3))
        refused = ""
        try:
            Trainer(self.model, self.optimizer, loss=loss_of, data=[], run_dir=self.folder).checkpoint()
        except EsperError as error:
            refused = error.code
        place = self.folder / f"out{self.rank}"
        runtime.save_model(self.model, place)
        fresh = runtime.load_model(net(dropout=0.0), place)
        return {
            "states": states, "alpha": alpha, "same": same, "refused": refused,
            "arms": [sum(arms.with_graft), sum(arms.without), sum(arms.snapshot)],
            "grown": [validate(self.model), validate(fresh)],
        }  # fmt: skip

    def _host(self) -> list[torch.Tensor]:
        return [p.full_tensor().clone() for p in self.optimizer.param_groups[0]["params"]]


class Drifting(Sharded):
    """A ramp that reads the drift of sharded weights."""

    strategy = GraftingStrategy.DRIFT_CONTROLLED


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Sharded", "Drifting"])
def test_a_life_in_a_sharded_host(kind: str, ids: dict[str, str], tmp_path: Path) -> None:
    told = both(f"tests.runtime.seeds.test_sharded:{kind}", ids, tmp_path)
    whole = ["TRAINING", "GRAFTING", "STABILIZATION", "EVALUATING", "FINE_TUNING", "STABILIZATION",
             "EVALUATING", "DORMANT"]  # fmt: skip
    for one in told:
        assert (one["states"], one["alpha"], one["refused"]) == (whole, 1.0, "E1017")
        assert one["same"] and one["arms"] == told[0]["arms"] and len(set(one["arms"])) == 3
        assert one["grown"][0] == pytest.approx(one["grown"][1], rel=1e-5)
