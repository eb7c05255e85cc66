"""Windows along the columns: neighbouring results of one thread from vectors, and the same meaning."""

from __future__ import annotations

from typing import Any

import pytest

from esper_ir.scalar import Arg, Const, prim
from forge.emit.triton import emit_kernel
from forge.folding import multiplied
from forge.plan import KernelPlan, RowTile
from forge.service import front
from tests.forge.test_windows import calls, document, parsed, plans
from tests.forge.whole import check

ROWS: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "as many": ([2, 2, 5, 8], {"kernel": [3], "stride": [1], "padding": [1]}),
    "one more": ([2, 3, 4, 12], {"kernel": [1, 4], "stride": [1], "padding": [0, 2]}),
    "fewer": ([1, 2, 6, 16], {"kernel": [2, 6], "stride": [2, 1]}),
    "one row": ([3, 1, 1, 8], {"kernel": [1, 5], "stride": [1], "padding": [0, 2]}),
    "along both": ([2, 2, 7, 20], {"kernel": [3, 3], "stride": [2, 1], "padding": [1, 0]}),
}


def made(data: dict[str, Any]) -> list[KernelPlan]:
    found = [p for p in plans(front(parsed(data), "h100")) if p.name.startswith("inf")]
    return [p for p in found if isinstance(p.tile, RowTile) and p.tile.unroll_cols > 1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ROWS)
def test_vectors_mean_the_same(name: str, dtype: str) -> None:
    shape, attrs = ROWS[name]
    for op in ("max_pool2d", "avg_pool2d"):
        data = document(op, shape, dtype, attrs)
        data["nodes"].append({"id": "z", "op": "relu", "inputs": ["y"], "attrs": {}})
        data["outputs"] = ["z"]
        assert made(data)
        assert not calls(check(parsed(data), {}, "h100"))


def test_sizes_that_vary() -> None:
    data = document(
        "max_pool2d", ["n", 2, "rows", 8], "float32", {"kernel": [3], "stride": [1], "padding": [1]}
    )
    data["dims"]["rows"]["min"] = 3
    assert made(data)
    check(parsed(data), {"n": 2, "rows": 5}, "h100")


def test_a_sum_of_eight_is_three_vectors() -> None:
    data = document(
        "avg_pool2d", [2, 3, 1, 64], "float32", {"kernel": [1, 8], "stride": [1], "padding": [0, 4]}
    )
    (plan,) = made(data)
    text = emit_kernel(plan)
    assert text.count("tl.load(") == 3 and text.count("tl.store(") == 1
    assert "_div(" not in text and text.count("* 0.125") == 4


@pytest.mark.parametrize("width", [6, 9])
def test_rows_that_begin_between_vectors_are_left_alone(width: int) -> None:
    data = document("max_pool2d", [2, 2, 5, width], "float32", {"kernel": [3], "stride": [1], "padding": [1]})
    assert not made(data)


def test_divisions_that_are_products() -> None:
    def by(number: float) -> object:
        return multiplied(prim("neg", prim("div", Arg(0), number)))

    assert by(8) == prim("neg", prim("mul", Arg(0), 0.125)) and by(-0.5) == prim(
        "neg", prim("mul", Arg(0), -2.0)
    )
    for number in (3.0, 0.0, float("inf"), float("nan"), 2.0**-130):
        assert by(number) == prim("neg", prim("div", Arg(0), number))
    assert multiplied(prim("div", Const(2.0), Arg(0))) == prim("div", Const(2.0), Arg(0))
