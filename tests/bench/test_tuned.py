"""What a search chose, read from its report."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from bench import tuned
from bench.blocks import available
from forge.plan import ProductWay, RowTile
from forge.tune.trials import Hunt, Trial, report


def test_rows_say_what_was_chosen_by_time_and_by_energy() -> None:
    rows = Hunt("a", "g", RowTile(1, 4, 128, 1))
    rows.keep(Trial(rows.prior, 100.0, 99.0, 101.0, "", 50.0, 49.0, 51.0))
    rows.keep(Trial(RowTile(1, 8, 128, 1), 80.0, 79.0, 81.0, "", 60.0, 59.0, 61.0))
    rows.keep(Trial(RowTile(1, 16, 128, 1), wrong="off"))
    product = Hunt("b", "p", ProductWay(False))
    product.keep(Trial(product.prior, 100.0, 99.0, 101.0))
    product.keep(Trial(ProductWay(True), 50.0, 49.0, 51.0))
    speed, power = (tuned.row_of(report([rows, product], "a", "t", aim), aim) for aim in ("speed", "power"))
    assert (speed["gain"], power["gain"]) == (200 / 130, 200 / 150)
    assert (speed["by_energy"], power["by_energy"]) == (0, 1)
    assert speed["products"] == speed["products_own"] == 1
    assert speed["trials"] == 5 and speed["refused"] == 1
    nothing = tuned.row_of({"untimed": "no h100 here"}, "speed")
    assert nothing["groups"] == 0 and nothing["gain"] is None and nothing["untimed"]
    assert asdict(ProductWay(True))["own"]


def test_blocks_are_searched_at_one_size(tmp_path: Path) -> None:
    (block,) = available(("linear_gelu",))
    made = tuned.at_one_size(block.blueprint)
    assert all(len(d.tune) <= 1 for d in made.dims.values()) and any(d.tune for d in made.dims.values())
