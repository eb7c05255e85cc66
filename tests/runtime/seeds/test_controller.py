"""The controller over real slots and artifacts: a life from germination to fossil, every policy, packets and
signals, field reports, resumes, artifacts that fail."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import runtime
from esper_ir.diagnostics import EsperError
from library.store import Library
from runtime.seeds.commands import KasminaControlCommand
from runtime.seeds.facts import Event, Snapshot
from runtime.seeds.health import SIGNALS
from runtime.seeds.lifecycle import Lifecycle, Limits, Verb
from runtime.strategy.settings import Settings, settings_of
from tests.runtime.seeds import garden
from tests.runtime.seeds.conftest import Ids
from tests.runtime.seeds.garden import LIMITS, Bed, validate

S = Lifecycle
BASE: dict[str, Any] = {"telemetry_every": 2, "limits": LIMITS, "fine_tune_epochs": 1}


def bed(**options: Any) -> Bed:
    """Two sites, so that there is a choice."""
    return Bed(garden.net(), ["front", "body"], optimizer=torch.optim.Adam, lr=5e-3, **options)


def controller(grown: Bed, **given: Any) -> runtime.TamiyoController:
    return runtime.TamiyoController(grown.model, config={**BASE, **given})


def epochs(grown: Bed, tamiyo: runtime.TamiyoController, many: int, steps: int = 20) -> list[Any]:
    signals = []
    for _ in range(many):
        grown.step(steps)
        signals.append(tamiyo.end_epoch(validate))
    return signals


def planned(epoch: int, slot: str, artifact: str = "") -> list[dict[str, Any]]:
    return [{"epoch": epoch, "slot": slot, "artifact": artifact}]


def test_a_seed_lives_from_the_schedule_to_the_fossil(ids: Ids, tmp_path: Path) -> None:
    grown = bed()
    heard: list[Event] = []
    tamiyo = controller(grown, policy="fixed_schedule", schedule=planned(1, "body/0", ids["lora"]),
                        run_dir=str(tmp_path / "run"))  # fmt: skip
    tamiyo.bus.subscribe(heard.append)
    # What a seed of random labels would be worth is not the point here: the gates are told.
    grown.growth.limits = LIMITS
    signals = epochs(grown, tamiyo, 2)
    slot = grown.growth.slot("body/0")
    assert slot.state is S.TRAINING and signals[1].optimizer_rebuild_required
    for _ in range(14):
        grown.step(20)
        if slot.state is S.TRAINING:
            grown.growth.measure(slot.id, held_out_gain=0.5, predicted_gain=-0.1)
        tamiyo.end_epoch(validate)
    moves = [line["to"] for line in grown.growth.journal.lines if line["kind"] == "command"]
    assert moves[:3] == ["GERMINATED", "LOADING", "TRAINING"]
    told = tamiyo.explain("body/0")
    assert "the schedule names epoch 1" in told and "promote body/0 -> TRAINING -> GRAFTING" in told
    kinds = {event.kind for event in heard}
    assert {"EPOCH", "SEED_GERMINATED", "SEED_STAGE_CHANGED"} <= kinds
    tamiyo.close()
    lines = [
        json.loads(t) for t in (tmp_path / "run" / "events.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert lines[-1]["kind"] == "RUN_FINISHED" and sum(line["kind"] == "EPOCH" for line in lines) == 16


def test_packets_hold_what_the_design_names(ids: Ids) -> None:
    grown = bed()
    tamiyo = controller(grown, policy="off")
    epochs(grown, tamiyo, 1)
    grown.step(20)
    packet = tamiyo.look(accuracy=50.0)
    assert (packet.current_epoch, packet.validation_accuracy) == (1, 50.0)
    assert math.isfinite(packet.validation_loss) and packet.hardware_context.device_type == "cpu"
    assert set(packet.seed_states) == {"front/0", "body/0"} == set(packet.health_map)
    signals = packet.health_map["body/0"]
    assert (
        set(signals) == set(SIGNALS) and signals["gradient_norm"] > 0 and 0 < signals["effective_rank"] <= 1
    )
    report = {r.slot: r for r in tamiyo.health()}["body/0"]
    assert report["activation_variance"] == report["chunk_variance"] == signals["chunk_variance"]
    assert report.epoch == 1 and not report.is_ready_for_transition and 0 <= report.cache_hit_ratio <= 1


def test_validation_leaves_no_trace_in_the_training(ids: Ids) -> None:
    """Same weights and random numbers after epochs with a controller as without."""
    found = []
    for watched in (False, True):
        torch.manual_seed(5)
        grown = Bed(garden.net(dropout=0.3), "body")
        tamiyo = controller(grown, policy="off") if watched else None
        for _ in range(3):
            grown.step(11)
            if tamiyo is not None:
                tamiyo.end_epoch(validate)
                assert grown.model.training
        found.append([*(p.detach().clone() for p in grown.model.parameters()), torch.rand(3)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_validations_are_not_observed(ids: Ids) -> None:
    grown = bed()
    tamiyo = controller(grown, policy="off", telemetry_every=10)
    grown.step(10)  # the next step would be sampled; the validation comes first
    tamiyo.end_epoch(validate)
    assert tamiyo.look().health_map.samples.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("given", [None, [], "text", {"loss": 1.0}, 3 + 4j])
def test_a_validate_that_gives_no_losses_is_refused(ids: Ids, given: Any) -> None:
    grown = bed()
    tamiyo = controller(grown, policy="off")
    grown.step(2)
    with pytest.raises(EsperError) as refused:
        tamiyo.end_epoch(lambda model: given)
    assert refused.value.code == "E1031" and grown.growth.epoch == 0 and grown.model.training


def test_the_library_is_asked_by_tags_and_what_does_not_fit_is_told(ids: Ids) -> None:
    grown = bed()
    tamiyo = controller(grown, policy="off", query={"required": ["seed"], "preferred": ["high_speed"]})
    grown.step(4)
    choice = tamiyo.choose("body/0", tamiyo.look())
    assert choice.artifact in {ids["mlp"], ids["lora"], ids["fixed"], ids["noop"]} and choice.tags() == (
        "seed",
    )
    assert choice.refused[ids["bf16"]].code == "E0811" and choice.refused[ids["half"]].code == "E0810"
    none = controller(bed(), policy="off", query={"required": ["low_power"]})
    none.growth.model(torch.randn(2, 8))
    assert none.choose("body/0", none.look()).artifact == ""


def test_an_artifact_that_costs_too_many_parameters_is_not_asked_for(ids: Ids) -> None:
    grown = bed()
    tamiyo = controller(grown, policy="off", limits={**vars(LIMITS), "max_rent": 0.2})
    grown.step(2)
    choice = tamiyo.choose("body/0", tamiyo.look())
    assert "rent" in choice.refused[ids["mlp"]].reason and ids["mlp"] not in [
        m.artifact_id for m in choice.matches
    ]


@pytest.mark.parametrize("name", ["required", "preferred", "excluded"])
def test_a_misspelt_tag_is_refused_before_the_training(ids: Ids, name: str) -> None:
    with pytest.raises(EsperError) as refused:
        controller(bed(), policy="off", query={name: ["high_sped"]})
    assert refused.value.code == "E1030" and refused.value.node == f"query.{name}"
    assert "did you mean high_speed" in str(refused.value.hint)


def test_refusals_are_told_by_reason_with_counts_and_the_nearest_first(own: tuple[Library, Ids]) -> None:
    library, ids = own
    library.annotate(ids["lora"], {"risk_score": 0.05, "conf_level": "Speculative"})
    library.annotate(ids["fixed"], {"risk_score": 0.9})
    library.annotate(ids["bf16"], {"risk_score": 0.9})  # and of the wrong dtype, which no setting changes
    library.revoke(ids["noop"], "no use")
    grown = bed(library=library)
    tamiyo = controller(grown, policy="off", limits={**vars(LIMITS), "max_rent": 0.5})
    grown.step(2)
    choice = tamiyo.choose("body/0", tamiyo.look())
    wanted = [
        (1, "risk too high: 0.9 > 0.2 (limits.max_risk)"),
        (1, "confidence is Speculative, nobody has used it yet (limits.speculative takes it)"),
        (1, "% of the host's parameters, at most 50.0% (limits.max_rent)"),
        (1, "bfloat16 where the layer gives float32"),
        (3, "takes ['rows', 8], the layer gives [32, 16] (axis 1)"),
        (1, "REVOKED: no use"),
    ]
    groups = choice.why().split("nothing fits; 8 refused, ")[1].split("; ")
    for group, (many, told) in zip(groups, wanted, strict=True):
        assert group.startswith(f"{many} because: ") and group.endswith(told), (group, told)
    told = controller(bed(library=library), policy="off", query={"blueprints": ["ffff"]})
    told.growth.model(torch.randn(2, 8))
    assert "none of query.blueprints" in told.choose("body/0", told.look()).why()


def test_the_heuristic_asks_at_a_plateau_only(ids: Ids) -> None:
    grown = bed()
    tamiyo = controller(grown, plateau={"window": 2, "warmup": 3, "min_improvement": 0.5}, max_germinations=1,
                        sites={"min_score": 0.0, "min_samples": 1})  # fmt: skip
    asked = []
    for _ in range(5):
        asked += [t for s in epochs(grown, tamiyo, 1) for t in s.decisions if "request_germination" in t]
    assert len(asked) == 1 and "plateau" in asked[0] and "DORMANT -> GERMINATED" in asked[0]


def test_random_and_off(ids: Ids) -> None:
    grown = bed()
    epochs(grown, controller(grown, policy="off"), 3)
    assert all(slot.state is S.DORMANT for slot in grown.growth.slots)
    grown = bed()
    tamiyo = controller(grown, policy="random", random_chance=1.0)
    epochs(grown, tamiyo, 1)
    assert sum(slot.state is not S.DORMANT for slot in grown.growth.slots) == 1


def test_a_policy_of_ones_own(ids: Ids) -> None:
    class Mine:
        carries = False
        seen: list[int] = []

        def germinate(self, view: Any) -> list[Any]:
            self.seen.append(view.epoch)
            return []

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: Mapping[str, Any]) -> None: ...

    grown = bed()
    tamiyo = runtime.TamiyoController(grown.model, policy=Mine(), config=BASE)
    epochs(grown, tamiyo, 2)
    assert Mine.seen == [0, 1]


def test_replay_of_a_journal_gives_the_same_moves(ids: Ids, tmp_path: Path) -> None:
    first = Bed(garden.net(), "body", run_dir=tmp_path / "one")
    epochs(first, controller(first, policy="fixed_schedule", schedule=planned(1, "body/0", ids["lora"])), 4)
    second = Bed(garden.net(), "body")
    epochs(second, controller(second, policy="replay", journal=str(tmp_path / "one" / "journal.jsonl")), 4)
    moves = [[(line["epoch"], line["slot"], line["to"]) for line in b.growth.journal.lines if "to" in line]
             for b in (first, second)]  # fmt: skip
    assert moves[0] == moves[1] and moves[0]
    assert first.growth.slots[0].seed is not None and second.growth.slots[0].seed is not None


def test_a_resumed_controller_decides_the_same(ids: Ids) -> None:
    def run(interrupted: bool) -> tuple[str, list[Any]]:
        torch.manual_seed(1)
        grown = bed()
        tamiyo = controller(grown, policy="random", random_chance=0.5, seed=4)
        epochs(grown, tamiyo, 4)
        if interrupted:
            state = tamiyo.state_dict()
            json.dumps({k: v for k, v in state.items() if k != "observer"})
            grown.growth.listeners.clear()
            tamiyo = controller(grown, policy="random", random_chance=0.5, seed=99)
            tamiyo.load_state_dict(state)
        epochs(grown, tamiyo, 4)
        rows = [(s.id, s.state, s.artifact) for s in grown.growth.slots]
        return tamiyo.explain(), [rows, tamiyo.look().health_map.table.tobytes()]

    assert run(False) == run(True)


def test_the_state_of_another_controller_is_refused(ids: Ids) -> None:
    state = controller(bed(), policy="off").state_dict()
    other = controller(bed(), policy="random")
    before = other.state_dict()
    with pytest.raises(EsperError) as refused:
        other.load_state_dict(state)
    assert refused.value.code == "E1033" and other.state_dict() == before


def test_a_culled_seed_is_reported_and_under_embargo(own: tuple[Library, Ids]) -> None:
    library, ids = own
    grown = bed(library=library)
    tamiyo = controller(grown, policy="fixed_schedule", schedule=planned(1, "body/0", ids["mlp"]))
    epochs(grown, tamiyo, 2)
    slot = grown.growth.slot("body/0")
    assert slot.state is S.TRAINING
    grown.growth.limits = Limits(**{**vars(LIMITS), "deadline_least": 1, "planned_epochs": 1})
    grown.growth.measure(slot.id, held_out_gain=-1.0)
    epochs(grown, tamiyo, 1)
    assert slot.state is S.EMBARGOED
    (report,) = library.outcomes(ids["mlp"])
    assert (report.outcome, report.seed_id) == ("CULLED", "body/0") and report.pre_metric > 0
    choice = tamiyo.choose("body/0", tamiyo.look())
    assert choice.refused[ids["mlp"]].reason == "under embargo at body"


def test_a_cancelled_seed_is_reported(own: tuple[Library, Ids]) -> None:
    library, ids = own
    grown = bed(library=library)
    lines = [*planned(1, "body/0", ids["mlp"]), *planned(1, "front/0", ids["mlp"])]
    tamiyo = controller(grown, policy="fixed_schedule", schedule=lines)
    epochs(grown, tamiyo, 2)
    assert sorted(s.state.name for s in grown.growth.slots) == ["GERMINATED", "TRAINING"], "one at a time"
    waiting = next(s for s in grown.growth.slots if s.state is S.GERMINATED)
    grown.growth.submit(KasminaControlCommand(waiting.site.name, waiting.index, Verb.CANCEL_GERMINATION))
    epochs(grown, tamiyo, 1)
    assert [r.outcome for r in library.outcomes(ids["mlp"])] == ["CANCELLED"]


def test_a_rollback_by_the_trainer_is_reported(own: tuple[Library, Ids], tmp_path: Path) -> None:
    library, ids = own
    grown = bed(library=library)
    tamiyo = controller(grown, policy="off")
    epochs(grown, tamiyo, 1)
    grown.growth.emit("SEED_ROLLED_BACK", "body/0", artifact=ids["lora"])
    (report,) = library.outcomes(ids["lora"])
    assert report.outcome == "ROLLED_BACK" and report.blueprint_id.startswith(ids["lora"][:12])


def test_a_revoked_artifact_is_refused_and_the_run_goes_on(own: tuple[Library, Ids]) -> None:
    library, ids = own
    grown = bed(library=library)
    tamiyo = controller(grown, policy="fixed_schedule", schedule=planned(1, "body/0", ids["lora"]))
    epochs(grown, tamiyo, 1)
    library.revoke(ids["lora"], "test")
    epochs(grown, tamiyo, 2)
    assert grown.growth.slot("body/0").state is S.DORMANT and "refused E" in tamiyo.explain("body/0")


def test_a_corrupt_state_asks_for_a_rollback(ids: Ids, monkeypatch: pytest.MonkeyPatch) -> None:
    grown = bed()
    tamiyo = controller(grown, policy="off")
    grown.step(4)
    grown.growth.slots[0].site.state.device["lifecycle"][0] = 7
    signal = tamiyo.end_epoch(validate)
    assert signal.emergency_rollback_required and "E1010" in signal.reason
    assert isinstance(grown.growth.snapshot(), Snapshot)


def test_memory_pressure_degrades_step_by_step(ids: Ids) -> None:
    grown = bed()
    tamiyo = controller(grown, policy="off")
    heard: list[Event] = []
    tamiyo.bus.subscribe(heard.append)
    grown.plant(ids["mlp"])
    block = grown.slot.seed.block
    grown.step(2)
    tamiyo.ladder.look(0.99)
    assert not tamiyo.observer.gains and grown.growth.every == 8
    launches, fallbacks = (block.report()["counters"][n] for n in ("launches", "eager_fallbacks"))
    grown.step(3)
    counters = block.report()["counters"]
    assert counters["launches"] == launches and counters["eager_fallbacks"] > fallbacks
    assert not block.failed_in_use and grown.slot.state is S.TRAINING
    assert tamiyo.ladder.look(0.1) is not None
    assert tamiyo.observer.gains and grown.growth.every == 2
    grown.step(3)
    assert block.report()["counters"]["launches"] > launches


def test_a_configuration_file_and_a_policy_argument(ids: Ids, tmp_path: Path) -> None:
    path = tmp_path / "growth.yaml"
    path.write_text("policy: random\nlimits: {concurrent: 3}\n", encoding="utf-8")
    tamiyo = runtime.TamiyoController(bed().model, policy="off", config=path)
    assert tamiyo.settings.policy == "off" and tamiyo.growth.limits == Limits(concurrent=3)
    assert settings_of(Settings()) == Settings()
    with pytest.raises(EsperError) as refused:
        runtime.TamiyoController(bed().model, policy="of")
    assert refused.value.code == "E1030"
