"""Features, and the file of outcomes: what is known beforehand, and what became of it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from esper_ir.diagnostics import EsperError
from gauntlet.risk import features, outcomes
from library.manifest import unpack
from tests.faults import handmade, toys
from tests.gauntlet import risks


@pytest.fixture(scope="module")
def manifest() -> dict:
    return dict(unpack(handmade.build(toys.affine())).manifest)


def test_features_come_from_records_alone(manifest: dict) -> None:
    found = features.of(risks.report(), manifest, [{"rows": 48}, {"rows": 5}])
    assert tuple(found) == features.NAMES
    assert (found["numerics_used"], found["gradients_used"], found["worst_used"]) == (0.2, 0.4, 0.4)
    assert found["numerics_cases"] == 3 and found["memory_cases"] == 0 and found["soak_steps"] == 0
    assert math.isnan(found["registers"]) and math.isnan(
        found["latency"]
    )  # unmeasured is missing, never zero
    assert found["workspace"] == pytest.approx(12, abs=0.01) and found["card"] == 0 and found["masked"] == 1


def test_distance_is_to_the_sizes_that_passed(manifest: dict) -> None:
    near = features.of(risks.report(), manifest, [{"rows": 48}])
    far = features.of(risks.report(), manifest, [{"rows": 48}, {"rows": 97 * 16}])
    odd = features.of(risks.report(), manifest, [{"rows": 50}])
    assert near["size_distance"] == near["size_beyond"] == near["rest_untested"] == 0
    assert far["size_distance"] == far["size_beyond"] == pytest.approx(math.log2((97 * 16 + 1) / 49))
    assert far["rest_untested"] == 0 and odd["rest_untested"] == 1  # 50 % 16 is no rest of 1, 16, 48
    untested = features.of({"stages": [], "wep": {}}, manifest, [{"rows": 48}])
    assert math.isnan(untested["size_distance"]) and untested["numerics_cases"] == 0


def test_a_family_has_no_sizes_and_no_types(manifest: dict) -> None:
    graph = features.graph_of(manifest)
    assert features.family(graph) == "add+mul+relu"
    assert features.check_pattern(risks.report()) == "numerics+gradients"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "outcomes.jsonl"
    with outcomes.Log(path) as opened:
        opened.append(risks.outcomes(6))
    return path


def test_outcomes_come_back_as_they_went(log: Path) -> None:
    for was, found in zip(risks.outcomes(6), outcomes.read(log), strict=True):
        assert found.failed == was.failed and found.key == was.key
        assert all(math.isnan(v) == math.isnan(found.features[n]) for n, v in was.features.items())


def test_a_line_without_an_end_is_cut_off_and_written_again(log: Path) -> None:
    whole = log.read_bytes()
    log.write_bytes(whole[:-40])
    assert len(outcomes.read(log)) == 5
    with outcomes.Log(log) as opened:
        opened.append(list(risks.outcomes(6))[5:])
    assert log.read_bytes() == whole


def _changed(log: Path, line: int, **changes: object) -> None:
    lines = log.read_text().splitlines()
    lines[line] = json.dumps({**json.loads(lines[line]), **changes})
    log.write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"features_schema": "esper-risk-features/0"}, "E0952"),
        ({"schema": "esper-outcome/0"}, "E0951"),
        ({"outcome": "FINE"}, "E0951"),
        ({"features": []}, "E0951"),
        ({"features": {"weather": 1.0}}, "E0953"),
    ],
)
def test_a_bad_line_is_named_and_nothing_is_lost(log: Path, changes: dict, code: str) -> None:
    _changed(log, 3, **changes)
    before = log.read_bytes()
    with pytest.raises(EsperError) as caught:
        outcomes.read(log)
    assert caught.value.code == code and "line 4" in caught.value.message
    assert log.read_bytes() == before


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(EsperError) as caught:
        outcomes.read(tmp_path / "none.jsonl")
    assert caught.value.code == "E0951"


def test_refused_artifacts_are_no_outcomes() -> None:
    found = [*risks.outcomes(3)]
    refused = outcomes.Outcome(**{**vars(found[0]), "outcome": outcomes.REFUSED})
    assert not refused.failed and outcomes.trainings([refused, *reversed(found)]) == found
