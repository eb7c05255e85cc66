"""Two processes over gloo: one decides, both prepare, and both commit or none."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import runtime
from esper_ir.diagnostics import EsperError
from runtime.seeds import boundary, structure
from runtime.seeds.commands import KasminaControlCommand
from runtime.seeds.lifecycle import Verb
from runtime.seeds.trainer import Trainer
from tests.runtime.seeds.garden import LIMITS, batches, loss_of, net

GOOD = {"held_out_gain": 0.5, "predicted_gain": -0.5, "snapshot_excess": 0.0}


class Rank:
    def __init__(self, ids: dict[str, str], folder: Path) -> None:
        self.ids, self.folder = ids, folder
        self.rank = dist.get_rank()
        self.model = runtime.wrap(net(dropout=0.0), "body", limits=LIMITS, run_dir=folder)
        self.growth = runtime.growth_of(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        runtime.attach(self.model, self.optimizer)
        self.call = DistributedDataParallel(self.model)
        self.data = iter(batches(400, seed=50 + self.rank))
        self.slot = self.growth.slots[0]
        self.told: dict[str, Any] = {}

    def step(self, many: int) -> None:
        for _ in range(many):
            self.optimizer.zero_grad()
            loss_of(self.call, next(self.data)).backward()
            self.optimizer.step()

    def send(self, verb: Verb, **more: Any) -> Any:
        """Rank 0 alone knows of the command."""
        if self.rank == 0:
            command = KasminaControlCommand("body", 0, verb, self.ids["mlp"], **more)
            self.growth.submit(command)
            self.growth.measure("body/0", **GOOD)
        return self.growth.commit()

    def alike(self) -> None:
        """Host, seed, optimizer and structure are the same on both ranks."""
        held = [*self.model.parameters(), *(self.slot.seed.parameters() if self.slot.seed else [])]
        held += [v for s in self.optimizer.state.values() for v in s.values() if torch.is_tensor(v)]
        sums = [structure.checksum(t) for t in held]
        both: list[Any] = [None, None]
        dist.all_gather_object(both, (sums, structure.digest(self.growth)))
        assert both[0] == both[1], "the ranks went apart"

    def run(self) -> dict[str, Any]:
        self.step(2)
        whole = boundary._build

        def failing(*args: Any) -> None:
            if self.rank == 1:
                raise EsperError("E0731", "the file is damaged here", node="mlp")
            whole(*args)

        boundary._build = failing
        aborted = self.send(Verb.REQUEST_GERMINATION)
        boundary._build = whole
        self.told["aborted"] = [(r.code, r.reason) for r in aborted.refused]
        self.told["after_abort"] = self.slot.state.name
        self.told["groups"] = self.growth.surgeon.names()
        self.step(3)
        self.alike()
        self.growth.commit()
        self.told["second"] = self.slot.state.name
        self.step(12)
        self.alike()
        probe = self.growth.snapshot().of("body/0").probe
        self.told["held"] = probe["held"]
        self.send(Verb.PROMOTE)
        self.step(8)
        self.told["alpha"] = (self.slot.state.name, self.slot.alpha)
        self.alike()
        self._checkpoint()
        self.send(Verb.CULL, hard=True)
        self.step(2)
        self.alike()
        self.told["end"] = self.slot.state.name
        self._diverged()
        return self.told

    def _checkpoint(self) -> None:
        trainer = Trainer(self.model, self.optimizer, loss=loss_of, data=[], run_dir=self.folder)
        trainer.checkpoint()
        dist.barrier()
        at = self.growth.step
        rng = torch.get_rng_state()
        self.step(2)
        torch.rand(self.rank + 1)
        assert trainer.resume() and self.growth.step == at and torch.equal(torch.get_rng_state(), rng)
        self.alike()

    def _diverged(self) -> None:
        """A rank that went its own way is found at the boundary."""
        if self.rank == 1:
            self.slot.set(round=7)
        try:
            self.growth.commit()
        except EsperError as error:
            self.told["diverged"] = error.code


def main(folder: Path, rank: int, ids: dict[str, str], kind: str) -> None:
    """What a process of the tests does; `kind`: the class above or in test_sharded.py."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
    module, _, name = kind.rpartition(":")
    told = getattr(importlib.import_module(module), name)(ids, folder).run()
    (folder / f"rank{rank}.json").write_text(json.dumps(told))
    dist.destroy_process_group()


def both(kind: str, ids: dict[str, str], folder: Path) -> list[dict[str, Any]]:
    """Two processes; what each of them tells."""
    code = "import sys, json; from pathlib import Path; from tests.runtime.seeds.test_ranks import main; "
    code += "main(Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]), sys.argv[4])"
    command = [sys.executable, "-c", code, str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ESPER_SPOOL": str(folder / "spool")}
    running = [
        subprocess.Popen(
            [*command, str(rank), json.dumps(ids), kind], stderr=subprocess.PIPE, text=True, env=environment
        )
        for rank in range(2)
    ]
    errors = [process.communicate(timeout=300)[1] for process in running]
    assert [p.returncode for p in running] == [0, 0], "\n".join(e[-3000:] for e in errors)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.slow
def test_two_ranks_commit_together_or_not_at_all(ids: dict[str, str], tmp_path: Path) -> None:
    told = both("tests.runtime.seeds.test_ranks:Rank", ids, tmp_path)
    for one in told:
        (code_of, reason), *rest = one["aborted"]
        assert code_of == "E1012" and "rank 1: E0731" in reason and not rest
        assert one["after_abort"] == "LOADING" and one["groups"] == []
        assert one["second"] == "TRAINING" and one["alpha"] == ["GRAFTING", 1.0]
        assert one["held"] == told[0]["held"] > 2  # a sum over both ranks
        assert one["end"] == "EMBARGOED" and one["diverged"] == "E1012"
    assert len((tmp_path / "journal.jsonl").read_text().splitlines()) >= 6
