"""The table of moves, the gates, and slots driven by every command in every state."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

import runtime
from esper_ir.diagnostics import EsperError
from runtime.seeds.applying import enter
from runtime.seeds.lifecycle import (
    GATES,
    HOLDING_SEED,
    LIVE,
    MOVES,
    Issuer,
    Lifecycle,
    Limits,
    Measured,
    Verb,
    allowed,
    ask,
    choose,
    legal,
)
from runtime.strategy.settings import settings_of
from tests.runtime.seeds.garden import LIMITS, Bed, validate

S = Lifecycle
FIXED = ""
LEAVES = {
    S.DORMANT: {S.GERMINATED},
    S.GERMINATED: {S.LOADING, S.CANCELLED},
    S.LOADING: {S.TRAINING, S.GRAFTING, S.CANCELLED, S.CULLED},
    S.TRAINING: {S.GRAFTING, S.CANCELLED, S.CULLED, S.ROLLED_BACK},
    S.GRAFTING: {S.STABILIZATION, S.CULLED, S.ROLLED_BACK},
    S.STABILIZATION: {S.EVALUATING, S.GRAFTING, S.CULLED, S.ROLLED_BACK},
    S.EVALUATING: {S.FINE_TUNING, S.FOSSILIZED, S.GRAFTING, S.CULLED, S.ROLLED_BACK},
    S.FINE_TUNING: {S.STABILIZATION, S.CULLED, S.ROLLED_BACK},
    S.FOSSILIZED: {S.RESETTING},
    S.CULLED: {S.EMBARGOED},
    S.CANCELLED: {S.RESETTING},
    S.EMBARGOED: {S.RESETTING},
    S.RESETTING: {S.DORMANT},
    S.ROLLED_BACK: {S.RESETTING},
}


def test_fourteen_states_and_their_aliases() -> None:
    assert [s.value for s in S] == list(range(14))
    assert S.BLENDING is S.GRAFTING and S.PRUNED is S.CULLED and S.HOLDING is S.STABILIZATION


@pytest.mark.parametrize(("source", "target"), list(product(S, S)))
def test_all_pairs_of_states(source: Lifecycle, target: Lifecycle) -> None:
    """14 x 14: the table has exactly the moves of the design, and each has one verb."""
    assert legal(source, target) == (target in LEAVES[source])
    verbs = [m.verb for m in MOVES if m.source is source and m.target is target]
    assert len(verbs) == len(set(verbs)) <= 1


def test_gates_and_issuers_stand_where_the_design_has_them() -> None:
    gates = {(m.source.name, m.target.name): m.gate for m in MOVES if m.gate}
    assert gates == {
        ("DORMANT", "GERMINATED"): "G0",
        ("GERMINATED", "LOADING"): "G0b",
        ("LOADING", "TRAINING"): "G1",
        ("LOADING", "GRAFTING"): "G1",
        ("TRAINING", "GRAFTING"): "G2",
        ("GRAFTING", "STABILIZATION"): "G3",
        ("STABILIZATION", "EVALUATING"): "G3s",
        ("EVALUATING", "FINE_TUNING"): "G4",
        ("EVALUATING", "FOSSILIZED"): "G5",
        ("EMBARGOED", "RESETTING"): "embargo",
        ("RESETTING", "DORMANT"): "reset",
    }
    rolled = [m for m in MOVES if S.ROLLED_BACK in (m.source, m.target)]
    for move in rolled:
        who = [i for i in Issuer if allowed(move, i)]
        assert who == [Issuer.TRAINER if move.target is S.ROLLED_BACK else Issuer.OPERATOR]
    fossil = next(m for m in MOVES if m.target is S.FOSSILIZED)
    assert not allowed(fossil, Issuer.AUTOPILOT) and allowed(fossil, Issuer.CONTROLLER)


@pytest.mark.parametrize("gate", GATES)
def test_an_unmeasured_gate_fails_and_says_which(gate: str) -> None:
    record = ask(gate, {}, Limits())
    assert not record.passed and all(c.value is None and not c.passed for c in record.checks)
    assert "not measured" in record.reason() and record.to_json()["checks"]


def test_a_gate_is_judged_by_the_end_of_the_interval() -> None:
    others = {"rent": 0.0, "latency_share": 0.0, "fault": 0.0}
    unsure = ask("G5", {"contribution": Measured(0.05, -0.01, 0.11, 5), **others}, Limits())
    assert not unsure.passed and unsure.refused()[0].low == -0.01
    assert ask("G5", {"contribution": Measured(0.05, 0.02, 0.08, 5), **others}, Limits()).passed
    assert not ask("G5", {"contribution": float("nan"), **others}, Limits()).passed


def test_round_one_of_a_seed_that_learns_never_fossilises() -> None:
    assert choose(S.EVALUATING, Verb.PROMOTE, {"trainable", "round1", "hard"}) is None
    assert choose(S.EVALUATING, Verb.ADVANCE, {"trainable", "round1"}).target is S.FINE_TUNING
    assert choose(S.EVALUATING, Verb.ADVANCE, {"fixed", "final"}) is None
    assert choose(S.EVALUATING, Verb.PROMOTE, {"fixed", "final"}).target is S.FOSSILIZED
    assert choose(S.GRAFTING, Verb.ADVANCE, {"trainable", "round1", "soft"}) is None  # going down


def put(bed: Bed, state: Lifecycle) -> None:
    """The slot into a state by hand."""
    slot = bed.slot
    enter(bed.growth, slot, state)
    slot.set(alpha=1.0 if state in LIVE else 0.0, ramp_target=1.0 if state in LIVE else 0.0)
    if state not in HOLDING_SEED:
        bed.growth.surgeon.remove(slot.id)
    bed.growth.reselect()


@pytest.mark.parametrize(("state", "verb"), list(product(S, Verb)))
def test_every_command_in_every_state(ids: dict[str, str], state: Lifecycle, verb: Verb) -> None:
    """Carried out along the table, or refused with the state untouched."""
    bed = Bed()
    bed.plant(ids["lora"])
    put(bed, state)
    bed.growth.ticks = 1
    bed.send(verb, ids["lora"], hard=True, issuer=Issuer.CONTROLLER)
    boundary = bed.growth.commit(autopilot=False)
    if boundary.applied:
        assert legal(state, boundary.applied[0].target) and bed.slot.state is boundary.applied[0].target
    else:
        (refusal,) = boundary.refused
        assert refusal.code in ("E1004", "E1005", "E1008") and bed.slot.state is state
        assert refusal.state is state and refusal.slot == "body/0"
        if refusal.code == "E1005":
            assert refusal.record is not None and refusal.record.refused()
    counted = {s: sum(x.state is s for x in bed.growth.slots) for s in S}
    assert all(bed.growth.tally[s] == n for s, n in counted.items())


ONWARD = {
    S.DORMANT: Verb.REQUEST_GERMINATION,
    S.TRAINING: Verb.PROMOTE,
    S.GRAFTING: Verb.ADVANCE,
    S.STABILIZATION: Verb.ADVANCE,
    S.FINE_TUNING: Verb.ADVANCE,
}
MOST = (
    {(m.source, m.target) for m in MOVES} - {(s, S.ROLLED_BACK) for s in S} - {(S.ROLLED_BACK, S.RESETTING)}
)


def likely(slot: Any, pick: random.Random) -> Verb:
    """Mostly the verb that leads on."""
    if pick.random() < 0.25:
        return pick.choice(list(Verb))
    if slot.state in (S.GERMINATED, S.LOADING) and pick.random() < (
        0.2 if slot.state is S.GERMINATED else 0.6
    ):
        return pick.choice([Verb.CANCEL_GERMINATION, Verb.CULL])
    if slot.state is S.EVALUATING:
        return Verb.PROMOTE if slot.get("round") == 2 or slot.artifact.startswith(FIXED) else Verb.ADVANCE
    return ONWARD.get(slot.state, Verb.ADVANCE)


def walk(ids: dict[str, str], seed: int, boundaries: int) -> set[tuple[Lifecycle, Lifecycle]]:
    """Random commands for many boundaries: only legal moves, a consistent mirror, and the host untouched
    wherever alpha is 0. The moves that were seen."""
    pick = random.Random(seed)
    limits = replace(LIMITS, concurrent=2, grafting_locks=2, embargo_epochs=1, ramp_steps=2, settle_steps=1)
    bed = Bed(seeds_per_layer=2, limits=limits)
    names = [ids["half"], ids["half"], ids["fixed_half"], ids["lora"], "0" * 12 + "-none-fast-00000000"]
    seen: set[tuple[Lifecycle, Lifecycle]] = set()
    for _ in range(boundaries):
        bed.step(pick.choice([2, 10]))
        for slot in bed.growth.slots:
            if slot.state in LIVE and pick.random() < 0.8:
                bed.growth.arms(slot.id, validate)
            if pick.random() < 0.8:
                good = {"held_out_gain": 0.5, "predicted_gain": -0.5, "contribution": 0.5, "ablation": 1.0}
                bed.growth.measure(slot.id, latency_share=0.0, **good)
            if pick.random() < 0.9:
                hard = pick.random() < 0.5
                bed.send(likely(slot, pick), pick.choice(names), slot, hard=hard)
        boundary = bed.growth.commit(autopilot=pick.random() < 0.5)
        for done in boundary.applied:
            assert done.source is done.target is S.GRAFTING or legal(done.source, done.target), done
            seen.add((done.source, done.target))
        consistent(bed)
    return seen


def consistent(bed: Bed) -> None:
    assert bed.growth.snapshot().corrupt == ""
    bed.growth.journal.verify()
    groups = set(bed.growth.surgeon.names())
    for slot in bed.growth.slots:
        holding = slot.state in HOLDING_SEED
        assert (slot.seed is not None) == holding, slot.state
        assert (slot.id in groups) == (holding and bool(slot.seed.named()))
        assert slot.alpha == 0.0 or slot.state in LIVE
    if not any(s.state in LIVE for s in bed.growth.slots):
        layer = bed.model.body
        x = torch.ones(4, 16)
        plain = torch.nn.functional.linear(x, layer.weight, layer.bias)
        for graft in layer.esper_grafts:
            plain = graft(plain)
        assert plain.equal(layer(x))


def test_random_walks(ids: dict[str, str]) -> None:
    global FIXED
    FIXED = ids["fixed_half"][:12]
    assert len(walk(ids, 3, 20) & MOST) >= 10


@pytest.mark.slow
def test_long_random_walks_make_every_move(ids: dict[str, str]) -> None:
    global FIXED
    FIXED = ids["fixed_half"][:12]
    seen = set().union(*(walk(ids, seed, 120) for seed in range(100, 105)))
    assert not MOST - seen, MOST - seen


def test_deadlines_cull_and_the_embargo_holds(ids: dict[str, str]) -> None:
    bed = Bed(limits=LIMITS)
    bed.plant(ids["mlp"])
    for _ in range(LIMITS.deadline() - 1):
        assert bed.slot.state is S.TRAINING
        bed.growth.commit()
    boundary = bed.growth.commit()
    assert [a.target for a in boundary.applied] == [S.CULLED, S.EMBARGOED]
    assert "TRAINING for 5 epochs" in boundary.applied[0].reason
    other = bed.command(Verb.REQUEST_GERMINATION, ids["mlp"])
    assert other.refused[0].code == "E1004"
    while bed.slot.state is S.EMBARGOED:
        bed.growth.commit()
    assert bed.slot.state is S.DORMANT and bed.growth.epoch >= LIMITS.embargo_epochs + LIMITS.deadline()
    assert not bed.command(Verb.REQUEST_GERMINATION, ids["mlp"]).refused


def test_one_adaptation_at_a_time_and_a_queue(ids: dict[str, str]) -> None:
    bed = Bed(sites=["front", "body"])
    first, second = bed.growth.slots
    bed.send(Verb.REQUEST_GERMINATION, ids["lora"], first)
    bed.send(Verb.REQUEST_GERMINATION, ids["lora"], second)
    bed.growth.commit()
    assert (first.state, second.state) == (S.TRAINING, S.GERMINATED)
    bed.send(Verb.CANCEL_GERMINATION, slot=first)
    bed.growth.commit()
    assert (first.state, second.state) == (S.DORMANT, S.TRAINING)


def test_a_negative_contribution_takes_the_graft_down_at_once(ids: dict[str, str]) -> None:
    bed = Bed()
    bed.bring(ids["lora"], "EVALUATING")
    bed.growth.measure(bed.slot.id, contribution=-0.02)
    assert bed.growth.commit().applied[-1].target is S.GRAFTING
    bed.step(LIMITS.ramp_steps)
    assert bed.slot.alpha == 0.0
    bed.growth.commit()
    assert bed.slot.state is S.EMBARGOED and bed.slot.seed is None and not bed.growth.surgeon.names()


def test_a_soft_cull_turns_a_ramp_round(ids: dict[str, str]) -> None:
    bed = Bed()
    bed.bring(ids["lora"], "GRAFTING")
    bed.step(3)
    alpha = bed.slot.alpha
    assert 0 < alpha < 1
    bed.command(Verb.CULL)
    assert bed.slot.state is S.GRAFTING and bed.slot.get("ramp_target") == 0.0
    falling = []
    for _ in range(3):
        bed.step()
        falling.append(bed.slot.alpha)
    assert alpha > falling[0] > falling[1] > falling[2] == 0.0
    bed.growth.commit()
    assert bed.slot.state is S.EMBARGOED


@pytest.mark.parametrize(
    "wrong", [{"held_out_every": 0}, {"held_out_every": 1}, {"checkpoints": 0}, {"trust_radius": 0.0},
              {"ramp_steps": -1}, {"loss_window": 0}, {"trust_radius": float("nan")}],
)  # fmt: skip
def test_limits_that_no_run_could_go_on_with(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(EsperError) as found:
        Limits(**wrong)
    assert found.value.code == "E1013" and name in found.value.message
    with pytest.raises(EsperError):
        settings_of({"limits": wrong})


def test_a_controllers_limits_are_what_seeds_learn_by() -> None:
    model = runtime.wrap(nn.Sequential(nn.Linear(8, 8)), "0")
    growth = runtime.growth_of(model)
    growth.limits = replace(growth.limits, trust_radius=0.05)
    assert [site.radius for site in growth.sites.values()] == [0.05]
    assert runtime.growth_of(copy.deepcopy(model)).limits.trust_radius == 0.05
