"""Resume and rollback to the bit, in every state; kills at every phase; what must not be restored."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import runtime
from esper_ir.diagnostics import EsperError
from runtime import loader
from runtime.cache import Cache
from runtime.seeds import checkpoint
from runtime.seeds.checkpoint import Shelf
from runtime.seeds.commands import Graft, GraftingStrategy, KasminaControlCommand
from runtime.seeds.lifecycle import Issuer, Lifecycle, Verb
from runtime.seeds.trainer import Trainer
from tests.runtime.seeds.garden import LIMITS, Net, loss_of, net, some, validate

STATES = (
    *"DORMANT GERMINATED LOADING TRAINING GRAFTING STABILIZATION".split(),
    *"EVALUATING FINE_TUNING FOSSILIZED EMBARGOED".split(),
)
LEARNT = {
    "snapshot_excess": 0.0, "validation_excess": 0.0, "ablation": 0.5, "contribution": 0.5,
    "held_out_gain": 0.5, "predicted_gain": -0.5, "latency_share": 0.0,
}  # fmt: skip


QUICK = replace(LIMITS, min_training_steps=4)


class Script:
    """A controller that sends what a list says, one command a boundary, and measures what gates ask."""

    def __init__(self, growth: Any, verbs: list[tuple[Verb, str]], artifact: str, **options: Any) -> None:
        self.growth, self.verbs, self.artifact, self.options = growth, verbs, artifact, options
        self.at = 0

    def end_epoch(self, validate: Any) -> Any:
        slot = self.growth.slots[0]
        if slot.state in (Lifecycle.GRAFTING, Lifecycle.EVALUATING, Lifecycle.TRAINING):
            self.growth.measure(slot.id, **LEARNT)
        pilot = True
        if self.at < len(self.verbs):
            verb, mark = self.verbs[self.at]
            pilot = mark != "hold"
            self.growth.submit(
                KasminaControlCommand(
                    slot.site.name, slot.index, verb, self.artifact, hard=True, **self.options
                )
            )
        self.at += 1
        boundary = self.growth.commit(autopilot=pilot)
        return type(
            "Signal",
            (),
            {"emergency_rollback_required": bool(boundary.rollback), "reason": boundary.rollback},
        )

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


GERMINATE = (Verb.REQUEST_GERMINATION, "")
WAY: dict[str, list[tuple[Verb, str]]] = {
    "DORMANT": [],
    "GERMINATED": [(Verb.REQUEST_GERMINATION, "hold")],
    "LOADING": [(Verb.REQUEST_GERMINATION, "hold"), (Verb.ADVANCE, "hold")],
    "TRAINING": [GERMINATE],
    "GRAFTING": [GERMINATE, (Verb.PROMOTE, "")],
    "STABILIZATION": [GERMINATE, (Verb.PROMOTE, ""), (Verb.ADVANCE, "hold")],
    "EVALUATING": [GERMINATE, (Verb.PROMOTE, ""), (Verb.ADVANCE, "hold"), (Verb.ADVANCE, "hold")],
    "FINE_TUNING": [GERMINATE, (Verb.PROMOTE, ""), *[(Verb.ADVANCE, "hold")] * 3],
    "FOSSILIZED": [GERMINATE, (Verb.PROMOTE, ""), *[(Verb.ADVANCE, "hold")] * 5, (Verb.PROMOTE, "hold")],
    "EMBARGOED": [GERMINATE, (Verb.CULL, "")],
}


def loaded(rows: int = 96) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(rows, 8, generator=generator)
    y = torch.randint(4, (rows,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)


def make(folder: Path, artifact: str, state: str, **options: Any) -> Trainer:
    graft = options.pop("graft", Graft())
    strategy = options.pop("strategy", GraftingStrategy.FIXED_RAMP)
    model = runtime.wrap(net(dropout=0.2), "body", limits=options.pop("limits", QUICK), run_dir=folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.97**n)
    growth = runtime.growth_of(model)
    script = Script(growth, WAY[state], artifact, graft=graft, grafting_strategy=strategy)
    return Trainer(model, optimizer, loss=loss_of, data=loaded(), run_dir=folder, scheduler=scheduler,
                   controller=script, validate=validate, schedule="step", clip=1.0, **options)  # fmt: skip


def everything(trainer: Trainer) -> dict[str, Any]:
    """What must be equal: a checkpoint as plain text and tensors."""
    return flat(trainer.capture())


def flat(value: Any, at: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        return {k: v for key, item in value.items() for k, v in flat(item, f"{at}.{key}").items()}
    if isinstance(value, (list, tuple)):
        return {k: v for n, item in enumerate(value) for k, v in flat(item, f"{at}.{n}").items()}
    return {at: value}


def differing(a: dict[str, Any], b: dict[str, Any], *ignored: str) -> list[str]:
    names = [n for n in {**a, **b} if not any(part in n for part in ignored)]
    return [n for n in names if not equal(a.get(n), b.get(n))]


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype is b.dtype and a.shape == b.shape and a.numpy().tobytes() == b.numpy().tobytes()
    return type(a) is type(b) and a == b


# What differs between two runs of the same training by its nature: measured times and random ids.
NATURE = ("exec_us", "command_id", ".seen", ".hash", ".previous")


def columns(found: dict[str, Any]) -> dict[str, Any]:
    """State tensors without the measured time of a call."""
    return {n: (masked(t) if n.endswith((".mirror", ".device")) else t) for n, t in found.items()}


def masked(data: Tensor) -> Tensor:
    from runtime.seeds.state import offsets

    first, size = offsets(1)["exec_us"]
    data = data.clone()
    data[first : first + size] = 0
    return data


@pytest.mark.parametrize("state", some(STATES, ["TRAINING", "GRAFTING", "FOSSILIZED"]))
def test_resumed_in_every_state(ids: dict[str, str], tmp_path: Path, state: str) -> None:
    """Stop in a state, begin again from the files in a fresh model, go on: the same to the bit."""
    epochs = max(len(WAY[state]), 1)
    whole = make(tmp_path / "a", ids["mlp"], state)
    whole.fit(epochs)
    assert whole.growth.slots[0].state.name == state or state == "DORMANT"
    held, kept = everything(whole), whole.shelf.newest()[1]
    again = make(tmp_path / "a", ids["mlp"], state)
    assert again.resume()
    assert not differing(columns(held), columns(everything(again)))
    whole.fit(epochs + 2)
    again.growth.journal.path = None  # two runs, one folder
    again.shelf = Shelf(tmp_path / "b")
    again.put_back(kept)  # the random numbers are the process's: begin where the other began
    again.fit(epochs + 2)
    wrong = differing(columns(everything(whole)), columns(everything(again)), *NATURE)
    assert not wrong, wrong[:5]


@pytest.mark.parametrize("strategy", some(GraftingStrategy, [GraftingStrategy.DRIFT_CONTROLLED]))
def test_resumed_in_the_middle_of_a_ramp(
    ids: dict[str, str], tmp_path: Path, strategy: GraftingStrategy
) -> None:
    more = {"checkpoint_every": 2, "strategy": strategy}
    whole = make(tmp_path / "a", ids["mlp"], "GRAFTING", **more)
    whole.fit(2)
    whole.fit(3)
    middle = [p for p in whole.shelf.all() if int(p.name[-8:]) == 16]
    state = whole.shelf.read(middle[0])
    assert 0 < state["trainer"]["position"] < 6
    again = make(tmp_path / "b", ids["mlp"], "GRAFTING", **more)
    again.put_back(state)
    assert 0.0 < again.growth.slots[0].alpha < 1.0 or strategy is GraftingStrategy.GRAD_NORM_GATED
    again.fit(3)
    wrong = differing(columns(everything(whole)), columns(everything(again)), *NATURE)
    assert not wrong, wrong[:5]


def rolled(ids: dict[str, str], tmp_path: Path, state: str, extra: int) -> list[str]:
    """Go on, roll back, go on the same number of steps. What differs: after the rollback from what was held,
    and at the end from the run that was never rolled back."""
    epochs = max(len(WAY[state]), 1)
    run = make(tmp_path / "a", ids["mlp"], state)
    run.fit(epochs)
    run.growth.journal.path = None
    held = checkpoint.decoded(checkpoint.encoded(run.capture()))
    run.fit(epochs + extra)
    first = everything(run)
    run.put_back(held)
    at_once = differing(flat(held), everything(run))
    run.fit(epochs + extra)
    return at_once + differing(columns(first), columns(everything(run)), *NATURE)


@pytest.mark.parametrize("state", ["FINE_TUNING"])
def test_rolled_back_and_the_same_n_steps_later(ids: dict[str, str], tmp_path: Path, state: str) -> None:
    assert rolled(ids, tmp_path, state, 2) == []


@pytest.mark.slow
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("extra", [1, 2, 3])
def test_rolled_back_from_every_state(ids: dict[str, str], tmp_path: Path, state: str, extra: int) -> None:
    assert rolled(ids, tmp_path, state, extra) == []


def test_nan_in_a_graft_is_buried_and_not_tried_again(ids: dict[str, str], tmp_path: Path) -> None:
    run = make(tmp_path, ids["mlp"], "GRAFTING")
    run.fit(2)
    slot = run.growth.slots[0]
    assert slot.state is Lifecycle.GRAFTING
    run._one_epoch()
    host = [p.detach().clone() for p in run.model.parameters()]
    before = run.shelf.all()
    with torch.no_grad():
        slot.seed.named()["w2"].fill_(float("nan"))
    run.fit(4)
    assert all(torch.isfinite(p).all() for p in host)
    assert slot.state is Lifecycle.ROLLED_BACK and slot.seed is None and slot.alpha == 0.0
    assert run.growth.bans.buried("body", ids["mlp"]) and run.epoch == 4 and before
    lines = [line["kind"] for line in run.growth.journal.lines]
    assert "rollback" in lines
    again = make(tmp_path, ids["mlp"], "GRAFTING")
    assert again.resume() and again.growth.slots[0].state is Lifecycle.ROLLED_BACK
    growth = again.growth
    growth.submit(KasminaControlCommand("body", 0, Verb.RELEASE))
    assert growth.commit().refused[0].code == "E1004"  # an operator's alone
    growth.submit(KasminaControlCommand("body", 0, Verb.RELEASE, issuer=Issuer.OPERATOR))
    assert [a.target.name for a in growth.commit().applied] == ["RESETTING", "DORMANT"]
    growth.submit(KasminaControlCommand("body", 0, Verb.REQUEST_GERMINATION, ids["mlp"]))
    refused = growth.commit().refused[0]
    assert refused.code == "E1005" and "tombstoned" in refused.reason
    growth.submit(KasminaControlCommand("body", 0, Verb.REQUEST_GERMINATION, ids["lora"]))
    assert growth.commit().applied


@pytest.mark.parametrize("how", some(["mirror", "device"], ["device"]))
def test_a_state_tensor_that_fails_its_check_asks_for_a_rollback(
    ids: dict[str, str], tmp_path: Path, how: str
) -> None:
    run = make(tmp_path, ids["mlp"], "TRAINING")
    run.fit(2)
    site = run.growth.sites["body"]
    data = site.state._mirror if how == "mirror" else site.state._bytes
    good = checkpoint.decoded(checkpoint.encoded(run.capture()))
    data[0] ^= 1
    assert "E1010" in run.growth.snapshot().corrupt
    run.growth._snapshot = None
    run.fit(3)
    assert run.epoch == 3 and run.rollbacks == 1 and run.growth.snapshot().corrupt == ""
    assert run.growth.slots[0].state is Lifecycle.TRAINING and good["growth"]["epoch"] == 2


def test_a_loss_that_is_not_finite_rolls_back_and_gives_up_in_the_end(
    ids: dict[str, str], tmp_path: Path
) -> None:
    run = make(tmp_path, ids["mlp"], "DORMANT")
    ends: list[tuple[str, Any]] = []
    run.growth.listeners.append(lambda e: ends.append((e.kind, e.facts)) if e.kind[:3] == "RUN" else None)
    run.fit(1)
    assert ends == [("RUN_FINISHED", {})]
    inner, run.loss = run.loss, lambda m, b: inner(m, b) * float("nan")
    with pytest.raises(EsperError) as error:
        run.fit(2)
    assert error.value.code == "E1016"
    assert len(ends) == 2 and ends[1][0] == "RUN_FAILED" and "E1016" in ends[1][1]["reason"]
    run.loss, run.rollbacks = inner, 0
    run.put_back(run.shelf.newest()[1])
    run.fit(2)
    assert run.epoch == 2


def test_five_are_kept_and_damage_is_passed_over(ids: dict[str, str], tmp_path: Path) -> None:
    run = make(tmp_path, ids["mlp"], "TRAINING")
    run.fit(7)
    places = run.shelf.all()
    assert len(places) == 5
    newest = places[-1] / "state.pt"
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 1
    newest.write_bytes(bytes(data))
    with pytest.raises(EsperError) as error:
        run.shelf.read(places[-1])
    assert error.value.code == "E1007"
    found = run.shelf.newest()
    assert found is not None and found[0] == places[-2]
    for place in places:
        (place / checkpoint.MANIFEST).write_text("3")
    with pytest.raises(EsperError) as error:
        run.resume()
    assert error.value.code == "E1007" and run.epoch == 7


def test_a_checkpoint_of_another_model_changes_nothing(ids: dict[str, str], tmp_path: Path) -> None:
    run = make(tmp_path / "a", ids["mlp"], "GRAFTING")
    run.fit(2)
    state = run.capture()
    model = net(seed=4)
    model.head = torch.nn.Linear(16, 5)
    other = runtime.attach(runtime.wrap(model, "body"), torch.optim.AdamW(model.parameters()))
    wrapped = net()
    elsewhere = runtime.attach(runtime.wrap(wrapped, "front"), torch.optim.AdamW(wrapped.parameters()))
    third = net()
    sgd = runtime.attach(runtime.wrap(third, "body"), torch.optim.SGD(third.parameters(), lr=0.1))
    for growth in (other, elsewhere, sgd):
        before = flat(checkpoint.capture(growth))
        with pytest.raises(EsperError) as error:
            checkpoint.put_back(growth, state)
        assert error.value.code == "E1006"
        assert not differing(before, flat(checkpoint.capture(growth)))


def test_an_artifact_that_is_gone_is_named_and_nothing_changes(
    own: tuple[Any, dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, ids = own
    run = make(tmp_path, ids["mlp"], "GRAFTING")
    run.fit(2)
    library.revoke(ids["mlp"], "for the test")
    monkeypatch.setattr(loader, "_cache", Cache())  # as a new process would begin
    again = make(tmp_path, ids["mlp"], "GRAFTING")
    before = everything(again)
    with pytest.raises(EsperError) as error:
        again.resume()
    assert error.value.code == "E0742"
    assert not differing(before, everything(again))


KILLED = """
import os, sys
from pathlib import Path
from runtime.seeds import {module} as seam
from tests.runtime.seeds import test_checkpoint as t
folder, artifact, phase, when = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
count = 0
def reached(name):
    global count
    if name == phase:
        count += 1
        if count == when:
            os.kill(os.getpid(), 9)
seam.reached = reached
run = t.make(folder, artifact, "GRAFTING")
run.resume()
run.fit(4)
"""


def killed(module: str, phase: str, when: int, folder: Path, artifact: str) -> int:
    """The exit status of a run that kills itself there."""
    code = KILLED.format(module=module)
    command = [sys.executable, "-c", code, str(folder), artifact, phase, str(when)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return done.returncode


def after_kill(ids: dict[str, str], tmp_path: Path) -> list[str]:
    """What differs between the killed run in "a", resumed and finished, and one that nobody killed."""
    again = make(tmp_path / "a", ids["mlp"], "GRAFTING")
    again.resume()
    again.fit(4)
    again.growth.journal.verify()
    whole = make(tmp_path / "b", ids["mlp"], "GRAFTING")
    whole.fit(4)
    found = differing(columns(everything(whole)), columns(everything(again)), *NATURE)
    on_disk = [json.loads(line) for line in (tmp_path / "a" / "journal.jsonl").read_text().splitlines()]
    left = [place.name for place in (tmp_path / "a" / "checkpoints").glob(".*")]
    return found + left + ([] if on_disk == again.growth.journal.lines else ["the journal on disk"])


PHASES = [("checkpoint", p) for p in ("begin", "state", "manifest", "renamed", "tidied")]
PHASES += [("boundary", p) for p in ("prepared", "judged", "applied", "journalled")]


@pytest.mark.slow
@pytest.mark.parametrize(("module", "phase"), PHASES)
@pytest.mark.parametrize("when", [2, 3, 4])
def test_killed_at_every_phase(
    ids: dict[str, str], tmp_path: Path, module: str, phase: str, when: int
) -> None:
    assert killed(module, phase, when, tmp_path / "a", ids["mlp"]) == -signal.SIGKILL
    assert after_kill(ids, tmp_path) == []


def test_killed_while_an_old_one_is_put_aside(ids: dict[str, str], tmp_path: Path) -> None:
    """The same step saved twice, killed in between: the one before is still there."""
    run = make(tmp_path, ids["mlp"], "DORMANT")
    run.fit(2)

    def stop(phase: str) -> None:
        if phase == "aside":
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "reached", stop)
        with pytest.raises(KeyboardInterrupt):
            run.checkpoint()
    found = run.shelf.newest()
    assert found is not None and isinstance(run.model, Net)
