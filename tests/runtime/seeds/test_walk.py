"""The usual way through a slot's life, and what it leaves behind."""

from __future__ import annotations

import copy
import json

import pytest
import torch

import runtime
from runtime.seeds.commands import Graft, Journal
from runtime.seeds.lifecycle import Lifecycle, Verb
from runtime.seeds.saving import replay
from tests.runtime.seeds.garden import Bed, batches, net, validate


@pytest.mark.parametrize("name", ["mlp", "lora"])
def test_from_dormant_to_fossil(ids: dict[str, str], name: str) -> None:
    bed = Bed()
    bed.bring(ids[name], "FINE_TUNING")
    host = {n for n, _ in bed.model.named_parameters()}
    bed.step(8)
    bed.command(Verb.ADVANCE)
    bed.step(8)
    bed.growth.commit()
    assert bed.slot.state is Lifecycle.EVALUATING and bed.slot.get("round") == 2
    bed.growth.arms(bed.slot.id, validate)
    bed.growth.measure(bed.slot.id, contribution=0.05)
    x = batches(1)[0][0]
    before = bed.model(x)
    boundary = bed.command(Verb.PROMOTE)
    assert [a.target.name for a in boundary.applied] == ["FOSSILIZED", "RESETTING", "DORMANT"]
    assert torch.equal(bed.model(x), before)  # the graft is the host's now
    assert bed.slot.state is Lifecycle.DORMANT and bed.slot.seed is None
    grown = {n for n, _ in bed.model.named_parameters()} - host
    assert grown and all(n.startswith("body.esper_grafts.0.seed.") for n in grown)
    assert bed.growth.surgeon.names() == []
    told = replay(bed.growth.journal.lines)
    assert told["grafts"] == {"body": [ids[name]]} and told["states"] == {"body/0": "DORMANT"}


def test_the_emptied_slot_grafts_upon_the_graft(ids: dict[str, str]) -> None:
    bed = Bed()
    for place in range(2):
        bed.bring(ids["fixed"], "EVALUATING")
        bed.growth.measure(bed.slot.id, contribution=0.05, latency_share=0.0)
        bed.command(Verb.PROMOTE)
        assert len(bed.slot.site.chain) == place + 1 and bed.slot.state is Lifecycle.DORMANT
    x = batches(1)[0][0]
    plain = net()
    plain.load_state_dict({n: t for n, t in bed.model.state_dict().items() if "esper" not in n})
    wanted = plain.head(torch.tanh(torch.tanh(torch.tanh(plain.body(torch.tanh(plain.front(x)))))))
    torch.testing.assert_close(bed.model(x), wanted)


def test_saved_and_loaded_without_slots(ids: dict[str, str], tmp_path) -> None:
    bed = Bed(run_dir=tmp_path / "run")
    bed.bring(ids["fixed"], "EVALUATING")
    bed.growth.measure(bed.slot.id, contribution=0.05, latency_share=0.0)
    bed.command(Verb.PROMOTE)
    bed.bring(ids["lora"], "EVALUATING", Graft(operator="lerp"))
    bed.growth.measure(bed.slot.id, contribution=0.05, latency_share=0.0)
    refused = bed.command(Verb.PROMOTE).refused
    assert refused[0].code == "E1004"  # a seed that learns is fine-tuned first
    runtime.save_model(bed.model, tmp_path / "out")
    lineage = json.loads((tmp_path / "out" / "lineage.json").read_text())
    assert [g["artifact"] for g in lineage["grafts"]] == [ids["fixed"]] and lineage["live"] == ["body/0"]
    fresh = runtime.load_model(net(seed=5), tmp_path / "out")
    x = batches(1)[0][0]
    with bed.growth.override("body/0", 0.0):
        assert torch.equal(fresh(x), bed.model(x))
    assert "_esper_growth" not in fresh.__dict__
    assert torch.equal(copy.deepcopy(fresh)(x), fresh(x))
    runtime.save_model(fresh, tmp_path / "again")
    again = runtime.load_model(net(seed=6), tmp_path / "again")
    assert torch.equal(again(x), fresh(x))
    assert Journal(tmp_path / "run" / "journal.jsonl").lines == bed.growth.journal.lines


def test_a_copy_of_a_model_lives_alone(ids: dict[str, str]) -> None:
    bed = Bed()
    bed.bring(ids["mlp"], "GRAFTING")
    bed.step(3)
    twin = copy.deepcopy(bed.model)
    x = batches(1)[0][0]
    assert torch.equal(twin(x), bed.model(x))
    other = runtime.growth_of(twin)
    assert other is not bed.growth and other.slots[0].alpha == bed.slot.alpha
    bed.step(3)
    assert other.slots[0].alpha < bed.slot.alpha and not torch.equal(twin(x), bed.model(x))


def test_unwrap_gives_the_model_back(ids: dict[str, str]) -> None:
    bed = Bed()
    bed.plant(ids["mlp"])
    keys = list(net().state_dict())
    runtime.unwrap(bed.model)
    assert list(bed.model.state_dict()) == keys and type(bed.model.body) is torch.nn.Linear
    assert len(bed.optimizer.param_groups) == 1
