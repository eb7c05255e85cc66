"""Neighbours of windows in one program: the same meaning at any size, and what that spares."""

from __future__ import annotations

from typing import Any

import pytest

from esper_ir.scalar import Arg, Cast, Const, Prim, prim
from esper_ir.types import Dim, DType
from forge.access import Access
from forge.emit.absent import zero_outside
from forge.emit.triton_rounding import exact, rounded_by_stores
from forge.folding import Affine, folded, line
from forge.plan import Compute, KernelPlan, Load, PointTile, Reduce, RowTile, Store
from forge.service import front
from forge.templates import windowed
from forge.work import Work
from tests.forge.test_blocks import BLOCKS, shrunk
from tests.forge.test_windows import POOLS, calls, depthwise, document, parsed, plans
from tests.forge.whole import check

ONE, ZERO = Dim.of(1), Dim()
HALF, WIDE = DType.bfloat16, DType.float32


def tiled(monkeypatch: pytest.MonkeyPatch, across: int, above: int, programs: int = 0) -> None:
    made = RowTile(4, 0 if programs else 4, 16, 1, programs, unroll=across, unroll_above=above)
    monkeypatch.setattr(windowed, "tile", lambda *_: made)


@pytest.mark.parametrize("numbers", [(2, 3, 0), (3, 1, 2), (4, 4, 0)])
@pytest.mark.parametrize("name", ["same size", "unlike axes"])
def test_neighbours_mean_the_same(
    name: str, numbers: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images that groups of neighbours do not divide, windows with and without gaps, sums over all of it."""
    tiled(monkeypatch, *numbers)
    shape, attrs = POOLS[name]
    assert not calls(check(parsed(document("max_pool2d", shape, "float32", attrs)), {}, "h100"))
    check(depthwise(name), {"n": 3} if name == "unlike axes" else {}, "h100")


def test_sizes_that_vary(monkeypatch: pytest.MonkeyPatch) -> None:
    tiled(monkeypatch, 2, 2, 3)
    attrs = {"kernel": [3], "stride": [1], "padding": [1], "data_format": "NHWC"}
    data: dict[str, Any] = document("max_pool2d", [2, "n", "rows", 16], "float32", attrs)
    data["dims"]["n"]["min"] = data["dims"]["rows"]["min"] = 3
    check(parsed(data), {"n": 5, "rows": 8}, "h100")


def _kernels(work: Work, tag: str) -> list[KernelPlan]:
    return [p for p in plans(work) if p.name.startswith(tag) and any(a.windows for a in p.accesses)]


def test_neighbours_of_a_pooling_read_each_element_once() -> None:
    """Two results of windows of nine read 15 elements; four gradients the four cotangents that reach them,
    by positions that are numbers."""
    sizes, dims = BLOCKS["max_pool_block"]
    blueprint = shrunk("max_pool_block", {**sizes, 56: 8, 128: 16})
    work = check(blueprint, dims, "h100")
    forward, *_ = _kernels(work, "fwd")
    read = [forward.accesses[s.access] for s in forward.body if isinstance(s, Load)]
    assert sum(bool(a.windows) for a in read) == 15
    backward = _kernels(work, "bwd")[-1]
    names = [e for s in backward.body if isinstance(s, Compute) for e in _names(s.expr)]
    read = [backward.accesses[s.access] for s in backward.body if isinstance(s, Load)]
    assert "fmod" not in names and sum(bool(a.windows) for a in read) == 8


def _names(expr: object) -> list[str]:
    if isinstance(expr, Prim):
        return [expr.name, *(n for a in expr.args for n in _names(a))]
    return _names(expr.arg) if isinstance(expr, Cast) else []


def test_the_gradient_of_filters_is_one_kernel_and_its_sum() -> None:
    work = front(depthwise("same size"), "h100")
    low = next(x for x in work.lowerings if x.phase.name == "backward" and x.phase.wanted == ("w",))
    assert not calls(work) and len(low.plan.steps) <= 3


# What is known beforehand.


def test_lines_and_numbers() -> None:
    at = Affine((0, 2), 1)
    assert line(prim("sub", prim("mul", Arg(0), 3), 5), [at]) == Affine((0, 6), -2)
    assert line(prim("mul", Arg(0), Arg(0)), [at]) is None
    space = (Dim.of(4), Dim.of(5))
    assert folded(prim("fmod", prim("add", Arg(0), 4), 2), [at], space) == Const(1)
    assert folded(prim("fmod", Arg(0), 4), [at], space) == prim("fmod", Arg(0), 4)
    assert folded(prim("ge", Arg(0), 1), [at], space) == Const(True)
    assert folded(prim("lt", Arg(0), 9), [at], space) == prim("lt", Arg(0), 9)
    assert folded(prim("eq", Arg(0), 10), [at], space) == Const(False)
    assert folded(prim("eq", Arg(0), 2), [at], space) == prim("eq", Arg(0), 2)
    assert folded(prim("lt", Arg(0), 10), [at], (Dim.of(4), Dim.sym("n"))) == prim("lt", Arg(0), 10)
    chosen = prim("add", prim("where", prim("lt", Arg(0), 1), Arg(1), 0.0), Arg(1))
    assert folded(chosen, [at, None], space) == Arg(1)


def _plan(*body: Load | Compute | Reduce | Store, dtype: DType = HALF) -> KernelPlan:
    full = Access("x", HALF, (Dim.of(64), ONE))
    accesses = (full, Access("b", HALF, (ZERO, ONE)), Access("y", dtype, (Dim.of(64), ONE)))
    return KernelPlan("k", (Dim.of(8), Dim.of(64)), accesses, body, PointTile(64, 1), ())


def test_what_stores_round_is_not_rounded_before() -> None:
    add, pick = prim("add", Arg(0), Arg(1)), prim("where", prim("le", Arg(0), 0.0), 0.0, Arg(1))
    start = (Load("v", 0), Load("b", 1), Compute("s", add, ("v", "b"), HALF))
    assert rounded_by_stores(_plan(*start, Store(2, "s"))) == {"s"}
    assert rounded_by_stores(_plan(*start, Store(2, "s"), dtype=WIDE)) == frozenset()
    passed = Compute("r", pick, ("v", "s"), HALF)
    assert rounded_by_stores(_plan(*start, passed, Store(2, "r"))) == {"s", "r"}
    looked = Compute("r", pick, ("s", "s"), HALF)
    assert rounded_by_stores(_plan(*start, looked, Store(2, "r"))) == {"r"}
    summed = (Reduce("t", "s", "sum", "col"), Store(2, "s"))
    assert rounded_by_stores(_plan(*start, *summed)) == frozenset()


def test_choices_of_rounded_values_are_rounded() -> None:
    assert exact(prim("maximum", Arg(0), 0.0), [HALF], HALF)
    assert not exact(prim("maximum", Arg(0), 0.1), [HALF], HALF)
    assert not exact(prim("add", Arg(0), Arg(1)), [HALF, HALF], HALF)
    assert not exact(prim("neg", Arg(0)), [WIDE], HALF) and exact(Cast(Arg(0), HALF), [WIDE], HALF)


def test_sums_of_what_is_not_there_need_no_mask() -> None:
    body = (
        Load("v", 0), Load("b", 1), Compute("p", prim("mul", Arg(0), Arg(0)), ("v",), WIDE),
        Compute("q", prim("mul", Arg(0), Arg(1)), ("v", "b"), WIDE),
        Compute("e", prim("exp", Arg(0)), ("v",), WIDE),
    )  # fmt: skip
    assert zero_outside(_plan(*body, Store(2, "v"))) == {"v", "p"}
