"""Every cell of docs/torch.md: it works, or refuses by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import runtime
from esper_ir.diagnostics import EsperError
from tests.runtime.matrix import cards, combined, modules, ranks, steps
from tests.runtime.matrix.cell import COMPILED, DYNAMIC, Bench, Row, cells
from tests.runtime.test_executor import refusal

ROWS = (*steps.ROWS, *combined.ROWS, *modules.ROWS, *cards.ROWS)
ALWAYS = ("training step", "batch size changes", "stride-0 and strided cotangents")


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def _params(place: str) -> list[Any]:
    found = cells(ROWS, place)
    return [
        pytest.param(row, mode, id=f"{row.feature} / {mode}", marks=_marks(row, mode)) for row, mode in found
    ]


def _marks(row: Row, mode: str) -> list[Any]:
    """`dynamic` differs from `compile` in few rows: those always, the others with the long tests; so do the
    combinations, compiled."""
    long = mode == DYNAMIC and row.feature not in ALWAYS or mode == COMPILED and row in combined.ROWS
    return [pytest.mark.slow] if long else []


def judge(row: Row, mode: str, device: torch.device, load: Callable[..., Any]) -> str:
    """What comes of it: "works", "torch" where torch refuses it, or the code of our refusal."""
    bench, says = Bench(mode, device, load), row.says[mode]
    if says == "works":
        row.check(bench)
        return "works"
    if says == "torch":
        with pytest.raises(RuntimeError):
            row.check(bench)
        return "torch"
    with pytest.raises(Exception) as caught:
        row.check(bench)
    error: BaseException | None = caught.value
    while error is not None and not isinstance(error, EsperError):
        error = error.__cause__ or error.__context__  # Dynamo wraps what is raised while it traces
    assert isinstance(error, EsperError), caught.value
    return error.code


@pytest.mark.parametrize(("row", "mode"), _params("any"))
def test_on_a_processor(row: Row, mode: str, ids: dict[str, str]) -> None:
    said = judge(row, mode, torch.device("cpu"), lambda: runtime.load(ids["layers.*.mlp"]))
    assert said == row.says[mode]


def test_autocast_changes_no_dtype(ids: dict[str, str]) -> None:
    """The page's table of autocast for a block of bfloat16; that of float32 stands in the rows."""
    block = runtime.load(ids["norm_bf16"])
    x = torch.randn(5, 64)
    narrow = x.bfloat16().requires_grad_()
    plain = block(narrow)
    assert plain.dtype is torch.bfloat16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(block(narrow), plain)
        refusal("E0811", block, x)
    with torch.autocast("cpu", dtype=torch.float16):
        assert torch.equal(block(narrow), plain)


@pytest.fixture(scope="module")
def on_ranks(
    shelf_home: tuple[Path, dict[str, str]], tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, str]]:
    """Outcomes of the rows that need two processes, all run in one start of them."""
    home, made = shelf_home
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ESPER_LIBRARY", str(home / "library"))
        patch.setenv("ESPER_KEYS", str(home / "keys"))
        return ranks.run("cpu", made["layers.*.mlp"], tmp_path_factory.mktemp("ranks"))


SHARED = [pytest.param(r, m, id=f"{r.feature} / {m}") for r in ranks.ROWS for m in r.says]


@pytest.mark.parametrize(("row", "mode"), SHARED)
def test_on_two_ranks(row: ranks.Shared, mode: str, on_ranks: list[dict[str, str]]) -> None:
    for found in on_ranks:
        assert found[f"{row.feature} / {mode}"] == row.says[mode]


@pytest.mark.gpu
@pytest.mark.parametrize(("row", "mode"), [*_params("any"), *_params("card")])
def test_on_a_card(row: Row, mode: str, card_ids: dict[str, str]) -> None:
    said = judge(row, mode, torch.device("cuda", 0), lambda: runtime.load(card_ids["layers.*.mlp"]))
    assert said == row.says[mode]


@pytest.mark.gpu
@pytest.mark.parametrize(("row", "mode"), _params("cards"))
def test_on_two_cards(row: Row, mode: str, card_ids: dict[str, str]) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two cards: this test did NOT run")
    said = judge(row, mode, torch.device("cuda", 0), lambda: runtime.load(card_ids["layers.*.mlp"]))
    assert said == row.says[mode]


@pytest.mark.gpu
def test_on_two_ranks_with_cards(card_ids: dict[str, str], tmp_path: Path) -> None:
    """Each rank its own card; on a machine with one, both on that one, what can be."""
    cards_here = torch.cuda.device_count()
    rows = ranks.applicable("cuda", cards_here)
    for found in ranks.run("cuda", card_ids["layers.*.mlp"], tmp_path, cards_here):
        assert found == {f"{r.feature} / {m}": says for r in rows for m, says in r.says.items()}
