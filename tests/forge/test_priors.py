"""The table of measured tiles: what is near, what is kept of the rule, and how times become entries."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

import esper_ir.text as text
from bench.priors import entries_of, merged, shapes_of
from esper_ir.diagnostics import EsperError
from forge.lower import Kernels
from forge.pass_manager import run
from forge.pipelines import FAST
from forge.plan import MatmulTile, RowTile, Tile
from forge.service import front
from forge.target import resolve
from forge.tune import priors
from forge.tune.journal import Choices
from forge.tune.priors import Entry, Table, table
from forge.tune.shapes import Shape
from forge.work import Work

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
RULE = RowTile(1, 4, 4096, 4)


def entry(tile: Tile, sizes: tuple[int, ...], key: str = "k", family: str = "f") -> Entry:
    return Entry(key, Shape("sm_90a", family, sizes), tile, 1.0, 2.0, "block group", "card", "triton")


def found(rule: Tile, sizes: tuple[int, ...], *entries: Entry, family: str = "f") -> Any:
    return table(entries).find("asked", rule, Shape("sm_90a", family, sizes))


def test_the_very_work_comes_before_near_work() -> None:
    here, near = replace(RULE, warps=8), replace(RULE, warps=2)
    both = table([entry(here, (64, 64), key="asked"), entry(near, (8192, 4096))])
    assert both.find("asked", RULE, Shape("sm_90a", "f", (8192, 4096))) == (here, "table")


def test_rows_are_near_within_a_factor_of_four_and_columns_in_one_power_of_two() -> None:
    tile = replace(RULE, warps=8)
    assert found(RULE, (2048, 4000), entry(tile, (8192, 4096))) == (tile, "near")
    assert found(RULE, (2000, 4096), entry(tile, (8192, 4096))) is None
    assert found(RULE, (8192, 2048), entry(tile, (8192, 4096))) is None
    assert found(RULE, (8192, 4096), entry(tile, (8192, 4096)), family="other") is None
    assert table([entry(tile, (8, 8))]).find("asked", RULE, None) is None
    closer = replace(RULE, warps=2)
    rows = [entry(tile, (8192, 4096)), entry(closer, (4096, 4096), key="l")]
    assert found(RULE, (3000, 4096), *rows) == (closer, "near")


def test_products_are_near_within_a_factor_of_two_each_and_four_together() -> None:
    rule, tile = MatmulTile(64, 64, 64, 4, 3), MatmulTile(128, 128, 64, 8, 3)
    at = entry(tile, (4096, 4096, 4096))
    assert found(rule, (2048, 8192, 4096), at) == (tile, "near")
    assert found(rule, (2048, 8192, 5000), at) is None
    assert found(rule, (1024, 4096, 4096), at) is None


def test_what_decides_bits_and_direction_stays_as_the_rule_says() -> None:
    back = replace(RULE, reverse=True)
    tile = replace(RULE, warps=8)
    assert found(back, (8192, 4096), entry(tile, (8192, 4096))) == (replace(tile, reverse=True), "near")
    shared = RowTile(4, 0, 4096, 8, programs=128)
    assert found(RULE, (8192, 4096), entry(shared, (8192, 4096))) is None
    assert found(MatmulTile(64, 64, 64, 4, 3), (8192, 4096), entry(tile, (8192, 4096))) is None
    huge = RowTile(64, 64, 4096, 4)
    assert found(RULE, (8192, 4096), entry(huge, (8192, 4096))) is None, "no program holds it"


def planned(known: Table) -> Work:
    """layernorm for h100 with this table."""
    blueprint = text.load(EXAMPLES / "layernorm.json")
    steps = tuple(s for s in FAST.steps if s[0] not in ("build", "package"))
    kernels = Kernels(choices=Choices(priors=known))
    return run(replace(FAST, steps=steps), Work(blueprint, resolve("h100"), "fast", kernels=kernels))


def test_fast_takes_the_table_and_says_so() -> None:
    plain = planned(priors.NOTHING).kernels.choices
    key = next(k for k, (t, _) in sorted(plain.made.items()) if isinstance(t, RowTile) and not t.programs)
    tile, origin = plain.made[key]
    assert origin == "rule" and key in plain.shapes
    other = replace(tile, warps=1 if tile.warps != 1 else 2)
    shape = plain.shapes[key]
    same = planned(table([Entry(key, shape, other, 1.0, 2.0, "w", "c", "t")])).kernels
    assert same.choices.made[key] == (other, "table")
    assert any(s.plan.tile == other for s in same.by_key.values())
    wider = replace(shape, sizes=(shape.sizes[0] * 2, *shape.sizes[1:]))
    near = planned(table([Entry("elsewhere", wider, other, 1.0, 2.0, "w", "c", "t")])).kernels
    assert near.choices.made[key] == (other, "near")
    given = Choices({key: tile}, priors=table([Entry(key, shape, other, 1.0, 2.0, "w", "c", "t")]))
    assert given.pick(key, tile, shape) == tile and given.made[key][1] == "journal"


def times(key: str, prior: Tile, *trials: dict[str, Any]) -> dict[str, Any]:
    group = {"key": key, "group": "g", "kind": type(prior).__name__, "prior": asdict(prior), "floor_us": 1.0}
    return {"arch": "sm_90a", "toolchain": "triton 1", "block": "b", "groups": [{**group, "trials": trials}]}


def timed(tile: Tile, us: float) -> dict[str, Any]:
    row = {"kind": type(tile).__name__, "tile": asdict(tile)}
    return {**row, "us": us, "low": us * 0.99, "high": us * 1.01}


def test_times_become_entries_and_replace_older_ones() -> None:
    shape, better = Shape("sm_90a", "f", (8192, 4096)), replace(RULE, warps=8)
    known = {"k": shape}
    (won,), left = entries_of(times("k", RULE, timed(RULE, 100), timed(better, 80)), known, "H200")
    assert (won.tile, won.us, won.prior_us, won.card, left) == (better, 80, 100, "H200", [])
    (kept,), _ = entries_of(times("k", RULE, timed(RULE, 100), timed(better, 99)), known, "H200")
    assert kept.tile == RULE, "below the margin"
    none, left = entries_of(times("k", RULE, timed(better, 80)), known, "H200")
    assert not none and "no time" in left[0]
    none, left = entries_of(times("gone", RULE, timed(RULE, 80)), known, "H200")
    assert not none and "planned in another way" in left[0]
    assert merged([kept], [won]) == [won]
    assert priors.read(priors.written([won])) == [won]
    for data in (b"[]", b"{", b'{"schema": "esper-priors/1", "entries": [{"key": "k"}]}'):
        with pytest.raises((ValueError, KeyError, EsperError)):
            priors.read(data)


def test_groups_of_today_are_found_by_key() -> None:
    shapes = shapes_of(["softmax"], "h100")
    work = front(text.load(EXAMPLES / "softmax.json"), "h100")
    assert shapes == work.kernels.choices.shapes and shapes


def test_the_shipped_table_can_be_read_and_used() -> None:
    """Every entry is a tile that its kernels could hold, on an architecture that there is."""
    if not priors.PLACE.exists():
        assert priors.shipped() == priors.NOTHING
        return
    rows = json.loads(priors.PLACE.read_bytes())["entries"]
    entries = priors.read(priors.PLACE.read_bytes())
    assert len(entries) == len(rows) == len({e.key for e in entries})
    arches = {resolve(name).arch for name in ("h100", "a100", "l40s", "b200")}
    for one in entries:
        assert one.shape.arch in arches and one.us > 0 and one.us <= one.prior_us * 1.001
        assert priors.usable(one.tile, one.tile) == one.tile
