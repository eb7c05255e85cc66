"""Simulated deployments of hand-made artifacts: each kind of outcome, and what is written of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from bench import risk as bench
from gauntlet.isolate import CRASH, MACHINE, Ending, ForkServer, Limits
from gauntlet.jobs import encode_job
from gauntlet.risk import outcomes, simulate
from tests.faults import handmade, toys

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="no C compiler")
ADDS = "v = v + b[c];"


def _trained(server: ForkServer, toy: handmade.Toy, *seeds: int) -> list[dict[str, Any]]:
    """What workers say that do not examine before they train."""
    said: list[dict[str, Any]] = []
    job = {"device": "cpu", "quick": True, "seed": 1, "seeds": seeds, "examined": True}
    data = encode_job(job, handmade.build(toy))
    ending = server.run(
        "gauntlet.risk.worker:run", data, Limits(seconds=120.0), lambda e: said.append(dict(e))
    )
    return [*(e for e in said if e["event"] in ("deploy", "became")), {"event": "end", "kind": ending.kind}]


def test_a_sound_artifact_is_used_without_failure(server: ForkServer) -> None:
    one, two = (_trained(server, toys.affine(), 5, 6) for _ in range(2))
    assert [e["outcome"] for e in one if e["event"] == "became"] == ["EXPOSED"] * 2
    assert one == two  # a seed makes the same training again
    first, second = (e["deployment"] for e in one if e["event"] == "deploy")
    assert first != second and 1 <= first["dims"]["rows"] <= 4096


@pytest.mark.parametrize(
    ("old", "new", "outcome"),
    [
        ("sb[c] += m;", "sb[c] += 2 * m;", "MISMATCH"),
        (ADDS, "v = rows > 0 ? NAN : v;", "DIVERGED"),
    ],
)
def test_what_a_fault_does(server: ForkServer, old: str, new: str, outcome: str) -> None:
    said = _trained(server, handmade.edit(toys.affine(), (old, new)), 7)
    became = next(e for e in said if e["event"] == "became")
    assert became["outcome"] == outcome and became["reason"]


def test_a_death_is_told_by_the_supervisor(server: ForkServer) -> None:
    said = _trained(server, handmade.edit(toys.affine(), (ADDS, "*(volatile int *)8 = 1;")), 8)
    assert said[-1]["kind"] == "illegal-access" and not [e for e in said if e["event"] == "became"]


def _ending(kind: str, *events: dict[str, Any]) -> Ending:
    return Ending(kind, "a signal", events, "", 1.0)


def test_who_dies_while_training_has_crashed_and_the_others_go_on() -> None:
    life = simulate._Life(examined=True, deployments={1: {}, 2: {}}, became={1: ("EXPOSED", "")})
    assert simulate._goes_on(life, _ending(CRASH))
    assert life.became[1][0] == "EXPOSED" and life.became[2][0] == "CRASHED"


def test_the_machine_and_the_judge_are_not_held_against_an_artifact() -> None:
    for ending in (_ending(MACHINE), _ending(CRASH, {"event": "broke"})):
        life = simulate._Life(examined=True, deployments={1: {}})
        assert not simulate._goes_on(life, ending) and not life.became and not life.deployments


def _candidates() -> list[simulate.Candidate]:
    sound = handmade.build(toys.softmax())
    faulty = handmade.build(handmade.edit(toys.affine(), (ADDS, "*(volatile int *)8 = 1;")))
    return [
        simulate.Candidate("affine", "out-of-bounds store", lambda: faulty),
        simulate.Candidate("softmax", "", lambda: sound),
        simulate.Candidate("softmax", "", lambda: sound, 1),
    ]


def test_a_collection_goes_on_where_it_was_stopped(server: ForkServer, tmp_path: Path) -> None:
    path = tmp_path / "outcomes.jsonl"
    assert simulate.collect(_candidates(), path, server, wanted=2, trainings=2) == 2
    first = path.read_bytes()
    assert simulate.collect(_candidates(), path, server, wanted=4, trainings=2) == 4
    assert path.read_bytes().startswith(first)
    refused, *used = outcomes.read(path)
    assert refused.outcome == outcomes.REFUSED and "illegal-access" in refused.reason
    assert [o.outcome for o in used] == ["EXPOSED"] * 4 and len({o.artifact for o in used}) == 2
    assert {o.family for o in used} == {"softmax"} and {o.op_class for o in used} == {"reduction"}
    assert all(o.basis == outcomes.SIMULATED and o.features["numerics_cases"] >= 1 for o in used)
    assert json.loads(first.splitlines()[0])["planted"] == "out-of-bounds store"


@pytest.mark.slow
def test_outcomes_of_what_the_forge_makes(tmp_path: Path) -> None:
    """As the bench does, with three blocks: sound artifacts do not fail, some faulty ones do."""
    names = ("affine_relu_40_f32", "softmax_40_f32", "dense_relu_40_f32")
    found = bench.collected(tmp_path, 60, 10_000, 5, 600.0, names)
    ended = outcomes.trainings(found)
    assert len(ended) >= 60 and not [o.reason for o in ended if o.failed and not o.planted]
    assert any(o.failed for o in ended) and any(o.outcome == outcomes.REFUSED for o in found)
    made = bench.document(found, ["few"])
    assert made["rows"] == [] and made["figures"]["risk_outcomes"]["value"] == len(ended)
    assert sum(row["refused"] for row in made["classes"]) == len(found) - len(ended)
