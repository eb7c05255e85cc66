"""How far chosen tiles are from the best: drawn groups, the search told of times, figures."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from bench import priors, tuner
from forge.plan import MatmulTile, ProductWay, RowTile
from forge.tune import halves, space
from forge.tune.tiles import values_of
from forge.tune.trials import Hunt, Trial

PRIOR = RowTile(1, 4, 128, 1)
IDLE = ("stages", "online")


def group(us: Any) -> dict[str, Any]:
    """As `time_only` gives it, every tile near the prior with the time that `us` says."""
    tiles = halves.around(PRIOR, 40, IDLE)
    rows = [{"kind": "RowTile", "tile": asdict(t), "us": us(t), "low": us(t), "high": us(t)} for t in tiles]
    return {
        "key": "k",
        "group": "g",
        "kind": "RowTile",
        "prior": asdict(PRIOR),
        "floor_us": 1.0,
        "idle": IDLE,
        "trials": rows,
    }


def test_what_the_search_finds_is_between_the_first_and_the_best() -> None:
    far = max(halves.around(PRIOR, 40, IDLE), key=lambda t: space.distance(t, PRIOR))

    def us(tile: Any) -> float:
        return 100.0 - 10.0 * (space.distance(PRIOR, far) - space.distance(tile, far))

    document = {"block": "b"}
    row = tuner.row_of(group(us), document, 40)
    assert row["fast_off_percent"] > 10 and row["best"]["tile"] == values_of(far)
    assert row["standard_off_percent"] == 0, "downhill all the way"
    assert tuner.row_of(group(us), document, 1)["standard_off_percent"] == row["fast_off_percent"]
    flat = tuner.row_of(group(lambda tile: 5.0), document, 40)
    assert flat["fast_off_percent"] == flat["standard_off_percent"] == 0
    found = tuner.figures([row, flat])
    assert found["fast_off_percent_max"]["met"] is False and found["standard_off_percent_max"]["met"] is True
    untimed = group(us)
    untimed["trials"] = [{"kind": "RowTile", "tile": asdict(PRIOR), "wrong": "crashed"}]
    missing = tuner.row_of(untimed, document, 40)
    assert (
        "no time" in missing["why"] and tuner.figures([row, missing])["fast_off_percent_max"]["value"] is None
    )


def test_groups_are_drawn_by_kind_and_built(tmp_path: Path) -> None:
    drawn = tuner._drawn({}, "h100", 6, 0, ("rmsnorm", "small_mlp"), 0.0)
    assert (
        len(drawn)
        == len(set(drawn))
        == 6
        == len(tuner._drawn({}, "h100", 6, 0, ("rmsnorm", "small_mlp"), 0.0))
    )
    assert drawn == tuner._drawn({}, "h100", 6, 0, ("rmsnorm", "small_mlp"), 0.0)
    assert drawn != tuner._drawn({}, "h100", 6, 1, ("rmsnorm", "small_mlp"), 0.0)
    (path,) = tuner.make(tmp_path, "h100", 1, 4, 0, ("rmsnorm",), 0.0)
    document = halves.read(path, halves.SCHEMA)
    (key,), groups = document["drawn"], {g["key"]: g for g in document["groups"]}
    assert document["block"] == "rmsnorm_residual" and key in groups and len(groups) > 1
    counts = Counter(c["key"] for c in document["candidates"])
    assert counts.pop(key) == 4 and set(counts.values()) == {1} and counts.keys() == groups.keys() - {key}
    with pytest.raises(Exception, match="no h100 here"):
        tuner.measured(tmp_path, 10.0)


def test_trials_go_by_what_a_group_could_gain() -> None:
    near, far = group(lambda tile: 2.0), {**group(lambda tile: 10.0), "key": "far"}
    none = {**group(lambda tile: 1.0), "key": "none"}
    assert tuner.shares_of([near, far, none], 100) == {"k": 10, "far": 90, "none": 1}


def test_all_groups_of_a_case_are_built_and_known_to_the_table(tmp_path: Path) -> None:
    (path,) = tuner.make_cases(tmp_path, "cpu", ("lora_1024x256x8",), 2)
    document = halves.read(path, halves.SCHEMA)
    keys = {g["key"] for g in document["groups"]}
    assert document["block"] == "lora_1024x256x8" and keys == set(document["drawn"])
    assert {c["key"] for c in document["candidates"]} == keys
    assert keys <= priors.shapes_of([document["block"]], "cpu").keys()


@pytest.mark.parametrize(("tuned", "left"), [(8.0, True), (9.5, False)])
def test_a_way_is_left_where_tiles_of_its_own_kernel_gain_as_much(tuned: float, left: bool) -> None:
    """The way that was quickest takes 9 of 10 us; the kernel's own tile more or less than that."""

    def timed(name: str, prior: Any, best: Any, us: float) -> Hunt:
        hunt = Hunt(name, name, prior)
        for tile, each in ((prior, 10.0), (best, us)):
            hunt.keep(Trial(tile, each, each, each))
        return hunt

    way = timed("u forward", ProductWay(True), ProductWay(True, 64, 64, 64, 4, 4, 8, 1), 9.0)
    tile = timed("u", MatmulTile(64, 64, 64, 4, 3), MatmulTile(64, 64, 128, 4, 3), tuned)
    other = timed("v", MatmulTile(64, 64, 64, 4, 3), MatmulTile(64, 64, 128, 4, 3), 5.0)
    assert priors._better_by_tile(way, 0.9, [way, tile, other]) is left
    assert not priors._better_by_tile(way, 0.9, [way, other]), "of another product"
    assert not priors._better_by_tile(tile, 0.9, [way, tile])
