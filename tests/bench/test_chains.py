"""Chains as modules: all import and compile in small, and rows say who is ahead."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from bench import chains
from library.store import Library


def test_some_import_compile_and_are_right(tmp_path: Path) -> None:
    """One without parameters, one with, one of two operands and one whose result is whole numbers."""
    names = ("l1_norm", "swish_norm", "hinge", "argmin_rows")
    small = [c for c in chains.CHAINS if c.name in names]
    made = chains.make(tmp_path, "cpu", small, tiny=True)
    assert set(made["chains"]) == set(names) and all("artifact" in r for r in made["chains"].values())
    assert json.loads((tmp_path / "chains.json").read_text()) == made


def test_names_and_operands() -> None:
    assert len({c.name for c in chains.CHAINS}) == len(chains.CHAINS) >= 40
    (decay,) = chains.named(("cumprod",))
    (x,) = decay.operands(torch.device("cpu"), tiny=True)
    assert x.shape == (128, 16384) and float(x.min()) >= 0.5


@pytest.mark.parametrize(("off", "right"), [(0.0, True), (2e-7, True), (1e-5, False)])
def test_right_is_by_float64_and_eager(off: float, right: bool) -> None:
    wide = torch.linspace(-1, 1, 64, dtype=torch.float64)
    assert chains._right(wide.float() + off, wide.float(), wide) is right
    numbers = torch.arange(4)
    assert chains._right(numbers, numbers, numbers.double()) is True


def test_figures_count_what_is_ahead() -> None:
    def row(name: str, ours: float, right: bool = True) -> dict[str, object]:
        return {"chain": name, "correct": right, "ms": {"eager": 2.0, "esper": ours, "compile": 1.0}}

    rows = [row("a", 0.5), row("b", 1.5), row("c", 0.5, right=False), row("e", 2.01)]
    rows.append({"chain": "d", "correct": False})
    found = chains.figures(rows, len(rows))
    assert found["correct"]["value"] == 3
    assert found["ahead_of_eager"]["value"] == 0.4 and found["ahead_of_eager"]["behind"] == ["c", "d"]
    assert found["ahead_of_eager"]["level"] == ["e"] and found["level_with_eager"]["value"] == 1
    assert found["ahead_of_compile"]["value"] == 0.2 and not found["ahead_of_compile"]["met"]


def test_a_run_that_is_stopped_leaves_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def timed(chain: chains.Chain, *_: object) -> dict[str, object]:
        if chain is chains.CHAINS[1]:
            raise KeyboardInterrupt
        return {"chain": chain.name, "correct": True, "ms": {"eager": 2.0, "esper": 1.0, "compile": 1.0}}

    monkeypatch.setattr(chains, "timed", timed)
    few = list(chains.CHAINS[:3])
    with pytest.raises(KeyboardInterrupt):
        made: Any = dict.fromkeys(c.name for c in few)
        chains.written(few, made, cast(Library, None), True, float("inf"), tmp_path)
    (place,) = tmp_path.glob("chains-*.json")
    found = json.loads(place.read_text())
    assert [r["chain"] for r in found["rows"]] == [few[0].name]
    assert found["figures"]["ahead_of_eager"]["value"] == pytest.approx(1 / 3)
