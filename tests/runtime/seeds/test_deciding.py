"""Plateaus, scores of slots, policies: pure functions of packets, on packets written by hand."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from esper_ir.diagnostics import EsperError, Rejected
from library.contracts import KernelMatch, KernelQuery
from runtime.seeds.commands import GraftingStrategy, Journal
from runtime.seeds.facts import Boundary, Event
from runtime.seeds.health import SIGNALS, HealthMap
from runtime.seeds.lifecycle import Lifecycle, Limits, Measured, Refusal, Verb
from runtime.strategy.choosing import Choice, query_of
from runtime.strategy.decisions import Decision, Record
from runtime.strategy.packet import HardwareContext, SystemStatePacket
from runtime.strategy.plateau import plateau
from runtime.strategy.policies import View, carry, policy_of
from runtime.strategy.pressure import Ladder, Rung
from runtime.strategy.settings import PlateauSettings, QuerySettings, Settings, SiteSettings, settings_of
from runtime.strategy.sites import scores
from tests.pace import slowness
from tests.runtime.seeds.test_telemetry import facts

S = Lifecycle
FLAT = (2.0, 1.5, 1.2, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)
HEALTHY = {
    "chunk_variance": 1.0, "dead_node_ratio": 0.0, "effective_rank": 0.1, "avg_inter_node_correlation": 0.2,
    "activation_entropy": 2.0, "gradient_norm": 0.01, "gradient_variance": 1e-6, "predicted_gain": 1e-3,
    "gain_alignment": 0.1,
}  # fmt: skip


def packet(
    signals: dict[str, dict[str, float]],
    history: tuple[float, ...] = FLAT,
    samples: float = 20.0,
    **states: Any,
) -> SystemStatePacket:
    """Slots by what differs from HEALTHY; `states` by slot: facts that differ."""
    rows = {slot: {**HEALTHY, **given} for slot, given in signals.items()}
    values = np.array([[row[name] for name in SIGNALS] for row in rows.values()], dtype=np.float64)
    health = HealthMap(list(rows), values, np.full(len(rows), samples))
    slots = {slot: facts(slot, {}, **states.get(slot.partition("/")[0], {})) for slot in rows}
    return SystemStatePacket(len(history) - 1, None, history[-1], HardwareContext(), health, slots, history)


def six(**odd: dict[str, float]) -> dict[str, dict[str, float]]:
    return {f"{name}/0": odd.get(name, {}) for name in "abcdef"}


def match(artifact_id: str, *tags: str) -> KernelMatch:
    return KernelMatch(
        artifact_id, "ab", "cpu-v2", "x86-64-v2", tags, len(tags), 0.1, None, 0.0, "High", None
    )


def view(given: SystemStatePacket, settings: Settings | None = None, **more: Any) -> View:
    settings = settings or Settings()
    base: dict[str, Any] = {
        "packet": given,
        "scores": scores(given, settings.sites),
        "plateau": plateau(given.history, 99, settings.plateau),
        "settings": settings,
        "limits": Limits(),
        "choose": lambda slot: Choice(
            KernelQuery(preferred_tags=("trainable",)), (match("one", "trainable"),)
        ),
        "germinated": 0,
        "asked_at": {},
    }
    return View(**{**base, **more})


# -- plateaus


def test_a_plateau_is_reached_only_when_nothing_falls_any_more() -> None:
    settings = PlateauSettings(window=3, min_improvement=0.02, warmup=4)
    assert plateau([3, 2, 1, 1, 1, 1], 99, settings).reached
    assert not plateau([3, 2.5, 2, 1.6, 1.3, 1.1], 99, settings).reached
    assert not plateau([1, 1, 1], 99, settings).reached, "too little history"
    assert not plateau([3, 2, 1, 1, 1, 1], 2, settings).reached, "a graft changed the function meanwhile"
    assert plateau([1, 1, 1, 2, 2, 2], 99, settings).reached, "rising is no progress either"
    assert not plateau([-1, -2, -3, -4, -5, -6], 99, settings).reached, "a loss may be negative"
    for bad in (math.nan, math.inf):
        assert not plateau([bad, 3, 2.5, 2, 1.6, 1.3, 1.1], 99, settings).reached, "it falls since"
        assert plateau([bad, 2, 1, 1, 1, 1], 99, settings).reached
        assert not plateau([1, 1, 1, 1, bad, 1], 99, settings).reached, "a host that diverges"


# -- scores


def test_the_slot_with_aligned_gain_is_best() -> None:
    odd = six(c={"predicted_gain": 0.05, "gain_alignment": 0.9})
    found = scores(packet(odd), SiteSettings())
    assert found.slots[found.best()[0]] == "c/0"
    assert found.of("c/0") > SiteSettings().min_score > max(v for i, v in enumerate(found.total) if i != 2)


def test_gain_without_alignment_counts_nothing() -> None:
    found = scores(packet(six(c={"predicted_gain": 0.5, "gain_alignment": 0.05})), SiteSettings())
    assert found.total.max() < SiteSettings().min_score


@pytest.mark.parametrize("odd", [{"effective_rank": 0.05}, {"effective_rank": 0.3}, {"dead_node_ratio": 0.9}])
def test_a_slot_unlike_its_siblings_is_best(odd: dict[str, float]) -> None:
    found = scores(packet(six(e=odd)), SiteSettings())
    assert found.slots[found.best()[0]] == "e/0" and found.of("e/0") >= SiteSettings().min_score


def test_few_dead_nodes_are_no_reason_and_two_slots_are_no_siblings() -> None:
    odd = six(e={"dead_node_ratio": 0.0}) | {f"{n}/0": {"dead_node_ratio": 0.3} for n in "abcdf"}
    assert scores(packet(odd), SiteSettings()).distance.max() == 0.0
    two = {"a/0": {"effective_rank": 0.5}, "b/0": {}}
    assert scores(packet(two), SiteSettings()).distance.max() == 0.0


@pytest.mark.parametrize("names", ["a", "ab", "abc", "abcdef"])
def test_a_layer_that_is_all_dead_is_the_worst_whatever_its_siblings(names: str) -> None:
    dead = {"effective_rank": 0.0, "dead_node_ratio": 1.0, "predicted_gain": 0.0, "gain_alignment": 0.0}
    rows = {f"{n}/0": dead if n == names[-1] else {} for n in names}
    found = scores(packet(rows), SiteSettings())
    assert found.slots[found.best()[0]] == f"{names[-1]}/0" and found.total.max() > SiteSettings().min_score
    (decision,) = policy_of(Settings()).germinate(view(packet(rows)))
    assert decision.command is not None and "sees a constant" in decision.text()
    every = scores(packet(dict.fromkeys(rows, dead)), SiteSettings())
    assert every.total.min() > SiteSettings().min_score, "dead siblings make it no better"


def test_what_is_dead_counts_more_the_less_is_left() -> None:
    shares = (0.0, 0.5, 0.75, 0.9, 0.97, 1.0)
    found = [scores(packet({"a/0": {"dead_node_ratio": s}}), SiteSettings()).distance[0] for s in shares]
    assert found[:3] == [0.0, 0.0, 1.0] and found == sorted(found) and len(set(found)) == 5


def test_what_was_not_measured_has_no_score() -> None:
    given = packet(six(c={"predicted_gain": 0.05, "gain_alignment": 0.9}), samples=1.0)
    assert not scores(given, SiteSettings()).best()
    nan = packet({s: dict.fromkeys(SIGNALS, math.nan) for s in six()})
    assert not any(scores(nan, SiteSettings()).total > 0.0)


# -- the heuristic


def test_at_a_plateau_the_worst_slot_gets_the_best_artifact_by_id() -> None:
    given = packet(six(c={"predicted_gain": 0.05, "gain_alignment": 0.9}))
    (found,) = policy_of(Settings()).germinate(view(given))
    assert found.command is not None and found.command.kernel_artifact_id == "one"
    assert found.command.slot == "c/0" and found.command.command is Verb.REQUEST_GERMINATION
    assert found.command.selected_for_tags == ("trainable",)
    assert (
        "plateau" in found.text()
        and "alignment 0.90" in found.text()
        and "asked for trainable?" in found.text()
    )


@pytest.mark.parametrize("history", [FLAT[:3], tuple(0.8**n for n in range(12))])
def test_while_progress_is_made_nothing_is_asked_for(history: tuple[float, ...]) -> None:
    given = packet(six(c={"predicted_gain": 0.05, "gain_alignment": 0.9}), history)
    assert policy_of(Settings()).germinate(view(given)) == []


def test_a_healthy_host_is_left_alone_and_it_says_why() -> None:
    (found,) = policy_of(Settings()).germinate(view(packet(six())))
    assert found.action == "wait" and found.command is None and "no slot reaches score" in found.text()


def test_the_nearest_slot_is_named_with_its_score_and_the_threshold() -> None:
    near = packet(six(c={"predicted_gain": 0.05, "gain_alignment": 0.5}))
    (found,) = policy_of(Settings()).germinate(view(near))
    score = scores(near, SiteSettings()).of("c/0")
    assert 0.0 < score < 3.0 and found.slot == "c/0"
    assert f"no slot reaches score 3 (sites.min_score); c/0 is nearest with {score:.4g}" in found.text()


@pytest.mark.parametrize(
    ("samples", "steps", "every", "told"),
    [
        (1.0, 24, 50, "1 of the 4 needed (sites.min_samples); one step in 50 is sampled (telemetry_every), "
                      "and an epoch has 24: set telemetry_every to at most 6"),
        (0.0, 2, 50, "set sites.min_samples to at most 2, telemetry_every to 1"),
        (0.0, 500, 50, "are the wrapped layers called while training?"),
    ],
)  # fmt: skip
def test_too_few_samples_are_counted_and_the_setting_is_named(
    samples: float, steps: int, every: int, told: str
) -> None:
    given = replace(packet(six(), samples=samples), step=steps * len(FLAT))
    settings = Settings(telemetry_every=every)
    (found,) = policy_of(settings).germinate(view(given, settings))
    assert found.action == "wait" and told in found.text()
    busy = packet(six(), **{n: {"state": S.EMBARGOED} for n in "abcdef"})
    assert "no slot is free" in policy_of(Settings()).germinate(view(busy))[0].text()


def test_one_adaptation_at_a_time_and_one_that_waits() -> None:
    gains = {n: {"predicted_gain": 0.05, "gain_alignment": 0.9, "effective_rank": 0.02} for n in "ab"}
    given = packet(six(**gains), c={"state": S.TRAINING})
    found = policy_of(Settings()).germinate(view(given))
    assert [d.command is not None for d in found] == [True], "one runs, one may wait"
    assert view(packet(six(), c={"state": S.TRAINING}, d={"state": S.GERMINATED})).room() == 0
    assert view(packet(six()), germinated=1000).room() == 0


def test_when_nothing_fits_the_next_slot_is_looked_at() -> None:
    gains = {n: {"predicted_gain": 0.05, "gain_alignment": 0.9} for n in "ab"}
    nothing = Choice(KernelQuery(), (), {"x": Rejected("E0811", "dtype bfloat16")})

    def choose(slot: str) -> Choice:
        return nothing if slot == "a/0" else Choice(KernelQuery(), (match("two"),))

    settings = Settings(sites=SiteSettings(min_score=1.0))
    first, second = policy_of(settings).germinate(view(packet(six(**gains)), settings, choose=choose))[:2]
    assert first.action == "wait" and "nothing fits; 1 refused, 1 because: dtype bfloat16" in first.text()
    assert second.command is not None and second.command.kernel_artifact_id == "two"


def test_refusals_that_differ_in_ids_and_sizes_alone_are_one_group() -> None:
    said = [
        f"verdict on {n:012x}-cpu-v4-fast-{n:08x}: {n} of 1 signatures (by {n:016x})" for n in (7, 0xAB, 9)
    ]
    said += [f"takes {shape}, the layer gives [50, 96]{axis}" for shape, axis in
             (("['n', 64]", " (axis 1)"), ("[1, 'n', 32, 32]", ""))]  # fmt: skip
    refused = {str(n): Rejected("E0810", reason) for n, reason in enumerate(said)}
    told = Choice(KernelQuery(), (), refused).why()
    assert told.endswith(f"5 refused, 3 because: {said[0]}; 2 because: {said[3]}")


def test_a_waiting_seed_is_cancelled_when_its_slot_recovered() -> None:
    given = packet(six(), a={"state": S.GERMINATED})
    (found,) = policy_of(Settings()).germinate(view(given, asked_at={"a/0": 8.0}, germinated=1000))
    assert found.command is not None and found.command.command is Verb.CANCEL_GERMINATION
    still = packet(six(a={"predicted_gain": 0.05, "gain_alignment": 0.9}), a={"state": S.GERMINATED})
    assert policy_of(Settings()).germinate(view(still, asked_at={"a/0": 8.0}, germinated=1000)) == []


# -- carrying on


def carried(state: Lifecycle, **more: Any) -> list[Verb]:
    given = packet(six(), a={"state": state, "parameters": 10, **more})
    return [d.command.command for d in carry(view(given)) if d.command is not None]


def test_running_seeds_are_carried_on_by_their_gates() -> None:
    good, bad = Measured(0.05, 0.02, 0.08, 9), Measured(-0.01, -0.02, 0.0, 9)
    assert carried(S.TRAINING, ready=True) == [Verb.PROMOTE] and carried(S.TRAINING) == []
    assert carried(S.EVALUATING, ready=True, round=1, evidence={"contribution": good}) == [Verb.ADVANCE]
    assert carried(S.EVALUATING, ready=True, round=2, evidence={"contribution": good}) == [Verb.PROMOTE]
    assert carried(S.EVALUATING, round=2, evidence={"contribution": good}) == [], "the gate does not hold"
    assert carried(S.EVALUATING, ready=True, evidence={"contribution": bad}) == [Verb.CULL]
    assert carried(S.EVALUATING, ready=True) == [], "nothing was measured"
    assert carried(S.FINE_TUNING, since_epoch=9) == [] and carried(S.FINE_TUNING, since_epoch=3) == [
        Verb.ADVANCE
    ]
    fixed = {"parameters": 0, "round": 1, "ready": True, "evidence": {"contribution": good}}
    assert carried(S.EVALUATING, **fixed) == [Verb.PROMOTE], "a fixed function needs no second round"


# -- the other policies


def test_off_does_nothing() -> None:
    policy = policy_of(Settings(policy="off"))
    assert not policy.carries and policy.germinate(view(packet(six(c={"dead_node_ratio": 1.0})))) == []


def test_random_draws_the_same_after_a_resume() -> None:
    settings = Settings(policy="random", random_chance=0.7, seed=3)
    first = policy_of(settings)
    shown = view(packet(six()), settings)
    for _ in range(5):
        first.germinate(shown)
    second = policy_of(settings)
    second.load_state_dict(first.state_dict())
    drawn = [[d.slot for d in policy.germinate(shown)] for policy in (first, second) for _ in range(1)]
    assert drawn[0] == drawn[1]
    slots = {d.slot for _ in range(60) for d in first.germinate(shown)}
    assert len(slots) > 3


def test_a_fixed_schedule_does_what_it_says_and_names_a_slot_that_is_not_there() -> None:
    lines = [{"epoch": 9, "slot": "b/0", "artifact": "mine"}, {"epoch": 4, "slot": "a/0"}]
    settings = settings_of({"policy": "fixed_schedule", "schedule": lines})
    (found,) = policy_of(settings).germinate(view(packet(six()), settings))
    assert found.command is not None and (found.command.slot, found.command.kernel_artifact_id) == (
        "b/0",
        "mine",
    )
    wrong = settings_of({"policy": "fixed_schedule", "schedule": [{"epoch": 9, "slot": "zz/0"}]})
    with pytest.raises(EsperError) as refused:
        policy_of(wrong).germinate(view(packet(six()), wrong))
    assert refused.value.code == "E1032" and "a/0" in str(refused.value.hint)


def test_replay_repeats_the_controllers_commands_and_no_others(tmp_path: Any) -> None:
    given = packet(six(c={"predicted_gain": 0.05, "gain_alignment": 0.9}))
    (sent,) = policy_of(Settings()).germinate(view(given))
    assert sent.command is not None
    journal = Journal(tmp_path / "journal.jsonl")
    mechanical = replace(sent.command, issuer=type(sent.command.issuer)("autopilot"), command_id="x")
    for command in (sent.command, mechanical):
        journal.append("command", epoch=9, step=1, slot=command.slot, command=command.to_json())
    settings = Settings(policy="replay", journal=str(tmp_path / "journal.jsonl"))
    (found,) = policy_of(settings).germinate(view(packet(six()), settings))
    assert found.command == sent.command
    with pytest.raises(EsperError) as refused:
        policy_of(replace(settings, journal=str(tmp_path / "none")))
    assert refused.value.code == "E1032"


def test_the_ramp_is_chosen_by_stability() -> None:
    from runtime.strategy.policies import strategy_of

    calm = view(packet(six()))
    assert strategy_of(calm, "a/0")[0] is GraftingStrategy.FIXED_RAMP
    wild = view(packet(six(), history=(*FLAT, 1.4, 1.0, 1.5, 1.1)))
    assert strategy_of(wild, "a/0")[0] is GraftingStrategy.DRIFT_CONTROLLED
    rough = view(packet(six(a={"gradient_norm": 0.5, "gradient_variance": 0.6})))
    assert strategy_of(rough, "a/0")[0] is GraftingStrategy.GRAD_NORM_GATED
    told = view(packet(six()), Settings(strategy="PERFORMANCE_LINKED"))
    assert strategy_of(told, "a/0")[0] is GraftingStrategy.PERFORMANCE_LINKED


def test_tags_follow_the_context() -> None:
    settings = QuerySettings(preferred=("trainable",), latency_budget_ms=2.0)
    asked = query_of(settings, HardwareContext(memory_used=0.95), Limits())
    assert asked.preferred_tags == ("high_speed", "low_memory", "trainable")
    assert asked.max_latency_ms == 2.0 and asked.max_risk == Limits().max_risk
    assert query_of(QuerySettings(), HardwareContext(), Limits(speculative=True)).max_risk is None


# -- decisions


def boundary(**more: Any) -> Boundary:
    given = {"epoch": 9, "applied": (), "refused": (), "optimizer_changed": False, "structure": ""}
    return Boundary(**{**given, **more})


def test_the_record_explains_and_survives_a_checkpoint() -> None:
    given = packet(six(c={"predicted_gain": 0.05, "gain_alignment": 0.9}))
    decisions = policy_of(Settings()).germinate(view(given))
    assert decisions[0].command is not None
    refusal = Refusal("E1005", "risk 0.5 (needs <= 0.2)", "c/0", Verb.REQUEST_GERMINATION, S.DORMANT,
                      details={"command_id": decisions[0].command.command_id})  # fmt: skip
    record = Record()
    record.add(decisions, boundary(refused=(refusal,)))
    for _ in range(3):
        record.add([Decision(10, "a/0", "wait", ("nothing to do",))], boundary())
    assert len(record) == 2, "equal waits are kept once"
    assert "refused E1005: risk 0.5" in record.text("c/0") and record.text("zz") == "nothing was decided"
    other = Record()
    other.load_state_dict(record.state_dict())
    assert other.text() == record.text()


# -- pressure


def test_the_ladder_goes_down_rung_by_rung_and_up_late() -> None:
    done: list[tuple[str, bool]] = []
    ladder = Ladder(lambda on: done.append(("less", on)), lambda on: done.append(("eager", on)))
    assert ladder.look(0.5) is None
    assert ladder.look(0.98) is Rung.EAGER and done == [("less", True), ("eager", True)]
    assert ladder.look(0.95) is None, "no flutter near a threshold"
    assert ladder.look(0.5) is Rung.NORMAL and done[2:] == [("eager", False), ("less", False)]


# -- speed


def test_ten_thousand_slots_are_decided_in_time() -> None:
    rows = {f"layer{i // 100}/{i % 100}": {} for i in range(10_000)}
    rows["layer7/7"] = {"predicted_gain": 5.0, "gain_alignment": 0.9, "effective_rank": 0.01}
    given = packet(rows)
    best = math.inf
    for _ in range(3):
        began = time.process_time()
        shown = view(given)
        (found,) = [*carry(shown), *policy_of(Settings()).germinate(shown)]
        best = min(best, time.process_time() - began)
        assert found.slot == "layer7/7"
    assert best < 0.5 * slowness(), "the bench measures against 0.1 s on a quiet machine"
    assert isinstance(Event("EPOCH", 0, 0), Event)
