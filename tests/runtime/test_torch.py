"""Every cell of docs/torch.md: it works, or refuses by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import runtime
from esper_ir.diagnostics import EsperError
from tests.runtime.matrix import modules, steps
from tests.runtime.matrix.cell import Bench, Row, cells

ROWS = (*steps.ROWS, *modules.ROWS)


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def _params(place: str) -> list[Any]:
    found = cells(ROWS, place)
    return [pytest.param(row, mode, id=f"{row.feature} / {mode}") for row, mode in found]


def judge(row: Row, mode: str, device: torch.device, load: Callable[..., Any]) -> None:
    bench, says = Bench(mode, device, load), row.says[mode]
    if says == "works":
        row.check(bench)
        return
    if says == "torch":
        with pytest.raises(RuntimeError):
            row.check(bench)
        return
    with pytest.raises(Exception) as caught:
        row.check(bench)
    error: BaseException | None = caught.value
    while error is not None and not isinstance(error, EsperError):
        error = error.__cause__ or error.__context__  # Dynamo wraps what is raised while it traces
    assert isinstance(error, EsperError) and error.code == says, caught.value


@pytest.mark.parametrize(("row", "mode"), _params("any"))
def test_on_a_processor(row: Row, mode: str, ids: dict[str, str]) -> None:
    judge(row, mode, torch.device("cpu"), lambda: runtime.load(ids["layers.*.mlp"]))
