"""The oracle: right answers pass on the whole battery, wrong ones do not."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from esper_ir.builder import Builder
from esper_ir.expand import expand
from esper_ir.graph import Graph
from esper_ir.oracle import (
    BOUNDS,
    DRAWS,
    LAYOUTS,
    PIECE,
    accumulation_length,
    battery,
    compare,
    element_bound,
    fit,
    impostors,
    index_limits,
    largest,
)  # fmt: skip
from esper_ir.reference import evaluate
from esper_ir.text import load
from esper_ir.types import DimSpec, DType
from esper_ir.verify import typed
from tests.source import ROOT


def graph_of(name: str) -> Graph:
    return typed(load(ROOT / "examples" / f"{name}.json"))


@pytest.mark.parametrize("name", ["rmsnorm_residual", "small_mlp", "digits_block"])
def test_battery_passes_what_is_right_and_nothing_else(name: str) -> None:
    graph = graph_of(name)
    flat, dtype = expand(graph), graph.types["y"].dtype
    cases = battery(graph, graph.dims, 1, byte_budget=1 << 19)
    assert {c.draw for c in cases} == set(DRAWS) and {c.layout for c in cases} == set(LAYOUTS)
    for case in cases:
        values = case.values()
        length = accumulation_length(graph, case.sizes)
        wide, eager = (evaluate(graph, values, precision=p)["y"] for p in ("float64", "declared"))
        mine = evaluate(flat, values)["y"]
        verdict = compare(mine, wide, eager, length, dtype)
        assert verdict.passed, (case.name, verdict)
        for label, wrong in impostors(wide, [values["x"]], dtype).items():
            assert not compare(wrong, wide, eager, length, dtype).passed, (case.name, label)


FAULTS: list[tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = [
    ("one row missing", lambda y: torch.cat([y[:-1], torch.zeros_like(y[-1:])])),
    ("last element", lambda y: torch.cat([y.flatten()[:-1], 2 * y.flatten()[-1:]]).view_as(y)),
    ("scaled by 1.01", lambda y: (y.double() * 1.01).to(y.dtype)),
    ("shifted along a row", lambda y: y.roll(1, -1)),
    ("one NaN", lambda y: torch.where(torch.arange(y.numel()).view_as(y) == 77, torch.nan, y)),
    ("another dtype", lambda y: y.double()),
    ("another shape", lambda y: y[:-1]),
    ("tf32-like rounding", lambda y: (y * (1 + 2**-9 * torch.randn(y.shape).sign())).to(y.dtype)),
]


@pytest.mark.parametrize(("label", "fault"), FAULTS, ids=[f[0] for f in FAULTS])
def test_planted_faults_are_caught(label: str, fault: Callable[[torch.Tensor], torch.Tensor]) -> None:
    graph = graph_of("digits_block")
    case = battery(graph, graph.dims, 1)[0]
    values = case.values()
    wide, eager = (evaluate(graph, values, precision=p)["y"] for p in ("float64", "declared"))
    verdict = compare(fault(eager), wide, eager, accumulation_length(graph, case.sizes), DType.float32)
    assert not verdict.passed and verdict.reason
    assert compare(eager, wide, eager, 1, DType.float32).passed


def test_bounds_are_never_flat() -> None:
    small, large = torch.full((64,), 1e-3, dtype=torch.float64), torch.full((64,), 1e3, dtype=torch.float64)
    bounds = [element_bound(v, v.float(), 16, DType.float32).max().item() for v in (small, large)]
    assert bounds[1] / bounds[0] > 1e5
    longer = element_bound(large, large.float(), 1 << 14, DType.float32).max().item()
    assert longer > 4 * bounds[1]


def test_exact_eager_leaves_a_few_ulps() -> None:
    wide = torch.arange(1, 101, dtype=torch.float64)
    eager = wide.float()
    one = eager * (1 + 2**-23)
    assert compare(one, wide, eager, 1, DType.float32).passed
    assert not compare(eager * (1 + 2**-19), wide, eager, 1, DType.float32).passed


def test_masks_and_integers() -> None:
    inf = float("inf")
    wide = torch.tensor([1.0, inf, -inf, float("nan")], dtype=torch.float64)
    eager = wide.float()
    assert compare(eager, wide, eager, 1, DType.float32).passed
    assert not compare(torch.tensor([1.0, -inf, -inf, float("nan")]), wide, eager, 1, DType.float32).passed
    over = torch.tensor([1e39, 1.0], dtype=torch.float64)
    assert compare(over.float(), over, torch.tensor([3e38, 1.0]), 1, DType.float32).passed
    whole = torch.tensor([1, 2])
    assert compare(whole, whole, whole, 1, DType.int64).passed
    assert compare(whole + 1, whole, whole, 1, DType.int64).where == (0,)


def test_sizes_stay_in_range_and_budget() -> None:
    graph = graph_of("rmsnorm_residual")
    spec = graph.dims["rows"]
    top = largest(graph, "rows", {"rows": 48}, 1 << 21)
    assert top == (1 << 21) // (4096 * 2)
    assert largest(graph, "rows", {"rows": 48}, 1 << 40) == spec.max
    assert fit(100, DimSpec(16, 128, (), 16)) == 96 and fit(1, DimSpec(5, 99, (), 4)) == 8
    sizes = {c.sizes["rows"] for c in battery(graph, graph.dims, 0, byte_budget=1 << 21)}
    assert {1, 48, 127, 128, 129, 251, top} <= sizes


def test_layouts_keep_values() -> None:
    graph = graph_of("small_mlp")
    cases = {c.layout: c for c in battery(graph, graph.dims, 3) if c.layout != "dense"}
    for name, case in cases.items():
        tensor = case.values()["x"]
        dense = LAYOUTS["dense"](tensor)
        assert torch.equal(tensor, dense)
        assert name in ("offset", "misaligned") or not tensor.is_contiguous()
        assert name != "misaligned" or tensor.data_ptr() % 16


def test_accumulation_length() -> None:
    assert accumulation_length(graph_of("small_mlp"), {"rows": 8}) >= 64 + 256
    assert accumulation_length(graph_of("rmsnorm_residual"), {"rows": 8}) >= 4096


@pytest.mark.parametrize("op", ["cumsum", "cumprod", "logcumsumexp", "linear_scan"])
def test_a_scan_adds_up_the_elements_of_its_axis(op: str) -> None:
    """The last of a row is a sum of all of it, whatever came out on the way."""
    b = Builder("scan")
    b.dim("n", max=4096)
    operands = [b.input(name, "float32", [3, "n"]) for name in ("a", "x")][op != "linear_scan" :]
    graph = typed(b.build(b.op(op, *operands, dim=1)))
    assert accumulation_length(graph, {"n": 300}) >= 300 > accumulation_length(graph, {"n": 30}) >= 30


def test_table_follows_the_formats() -> None:
    for dtype, row in BOUNDS.items():
        info = torch.finfo(getattr(torch, dtype.value))
        assert row.roundoff == info.eps / 2
        assert row.tiny == info.smallest_normal * info.eps


def test_a_lucky_row_of_eager_does_not_condemn_a_second_rounding() -> None:
    """silu of a value that was rounded: nearly two roundings of the one element that is not zero, where
    eager's own two happened to cancel."""
    wide = torch.zeros(1, 64, dtype=torch.float64)
    wide[0, 40] = 4.4388
    eager = wide.bfloat16()
    ours = eager.clone()
    ours[0, 40] = 4.46875
    u = BOUNDS[DType.bfloat16].roundoff
    assert float((eager.double() - wide).abs().max()) < 0.15 * u * 4.4388
    assert 1.6 * u < float((ours.double() - wide).abs().max()) / 4.4388 < 2 * u
    others = torch.randn(63, 64, dtype=torch.float64)
    rows = [torch.cat([t, others.to(t.dtype)]) for t in (ours, wide, eager)]
    assert compare(*rows, 1, DType.bfloat16).passed
    worse = rows[0].clone()
    worse[0, 40] = 4.5
    assert not compare(worse, *rows[1:], 1, DType.bfloat16).passed


def test_a_multiply_add_of_overflown_terms_is_not_finite() -> None:
    """g e + u e = inf - inf: -inf by its meaning, NaN in eager, inf where u e is not rounded before the sum.
    No number is right there, and nowhere else is the third."""
    exact = torch.zeros(4, 16, dtype=torch.float64)
    exact[1, 3], eager = -1e40, torch.zeros(4, 16)
    eager[1, 3] = math.nan

    def passed(place: float, plain: float = math.nan, meant: float = -1e40) -> bool:
        got, wide, other = torch.zeros(4, 16), exact.clone(), eager.clone()
        got[1, 3], other[1, 3], wide[1, 3] = place, plain, meant
        return compare(got, wide, other, 1, DType.float32).passed

    assert passed(math.inf) and passed(-math.inf) and passed(math.nan) and not passed(3e38)
    assert not passed(math.inf, plain=-math.inf) and not passed(math.nan, plain=-math.inf)
    assert not passed(-math.inf, plain=math.inf, meant=math.nan), "float64 has no number either"
    assert not passed(math.inf, plain=1.0, meant=1.0) and not passed(-math.inf, plain=math.inf, meant=1.0)


def test_errors_whose_squares_overflow_are_judged_in_pieces_too() -> None:
    """More elements than one piece holds, float64 at 1e200 (the gradient of a score of an infinite key)."""
    exact = torch.full((3, PIECE // 2), 1e200, dtype=torch.float64)
    got = exact.clone()
    got[-1] *= 1.5
    assert compare(exact, exact, exact, 1, DType.float64).passed
    found = compare(got, exact, exact, 1, DType.float64)
    assert not found.passed and "RMSE 2.887e+199" in found.reason


def test_positions_keep_their_limit_when_they_are_moved_about() -> None:
    """A reshape, a slice or a join before the lookup; of two tables the smaller one counts."""
    b = Builder("moved")
    i, j = b.input("i", "int64", (4, 6)), b.input("j", "int64", (24,))
    table, small = b.param("t", "float32", (9, 2)), b.param("s", "float32", (5, 2))
    flat = b.op("reshape", b.op("slice", i, dim=0, start=0, end=None), shape=(24,))
    first = b.op("embedding", b.op("cat", flat, j, dim=0), table)
    limits = index_limits(typed(b.build(first, b.op("embedding", j, small))))
    assert {name: size.static for name, size in limits.items()} == {"i": 9, "j": 5}
