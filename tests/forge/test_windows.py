"""Running values, lookups and pooling: in kernels of ours, with what is around them, and the same meaning."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import esper_ir.text as text
from esper_ir.builder import Builder, Value
from esper_ir.graph import Blueprint
from forge.emit.triton import emit_kernel
from forge.explain import explain
from forge.lower import PhaseLowering
from forge.plan import Compute, GatherTile, KernelPlan, Load, PlaceTile, Scan, ScanTile
from forge.service import front
from forge.work import Work
from library.launch import ExternStep
from tests.forge.test_blocks import BLOCKS, shrunk
from tests.forge.test_interpreter import ROOT
from tests.forge.whole import Machine, check, compared

SHAPES = {"end": ["n", "rows"], "middle": ["n", "rows", 6], "first": ["rows", 5, 3]}
AXES = {"end": 1, "middle": 1, "first": 0}


def document(
    op: str, shape: list[Any], dtype: str, attrs: dict[str, Any], operands: int = 1
) -> dict[str, Any]:
    names = ["x", "b"][:operands]
    dims = {"n": {"min": 1, "max": 64, "tune": [4]}, "rows": {"min": 1, "max": 4096, "tune": [64]}}
    return {
        "format": "esper-blueprint/1", "name": op, "dims": {k: v for k, v in dims.items() if k in shape},
        "inputs": {v: {"dtype": dtype, "shape": shape} for v in names}, "params": {},
        "nodes": [{"id": "y", "op": op, "inputs": names, "attrs": attrs}], "outputs": ["y"],
    }  # fmt: skip


def parsed(data: dict[str, Any]) -> Blueprint:
    return text.parse(json.dumps(data))


def plans(work: Work) -> list[KernelPlan]:
    return [s.plan for s in work.kernels.by_key.values()]


def calls(work: Work) -> set[str]:
    return {s.op for low in work.lowerings for s in low.plan.steps if isinstance(s, ExternStep)}


def backward(work: Work) -> PhaseLowering:
    return [low for low in work.lowerings if low.phase.name == "backward"][-1]


# Running values.


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("place", SHAPES)
@pytest.mark.parametrize("op", ["linear_scan", "cumsum", "cumprod", "logcumsumexp"])
def test_running_values_are_one_kernel(op: str, place: str, reverse: bool) -> None:
    attrs = {"dim": AXES[place], "reverse": reverse}
    data = document(op, SHAPES[place], "float32", attrs, 2 if op == "linear_scan" else 1)
    dims = {"n": 3, "rows": 11}
    work = check(parsed(data), {k: dims[k] for k in data["dims"]}, "h100")
    assert not calls(work)
    forward = [low for low in work.lowerings if low.phase.name == "inference"]
    assert all(len(low.plan.steps) == 1 for low in forward)


def test_running_values_in_c() -> None:
    for place in SHAPES:
        data = document("linear_scan", SHAPES[place], "bfloat16", {"dim": AXES[place]}, 2)
        dims = {"n": 3, "rows": 11}
        work = check(parsed(data), {k: dims[k] for k in data["dims"]}, "cpu", "c")
        assert any(isinstance(p.tile, ScanTile) for p in plans(work))


def test_a_recurrence_takes_its_gates_and_its_gradient_along() -> None:
    """Forward and backward are one kernel each beside the products."""
    sizes, dims = BLOCKS["mamba_scan"]
    work = check(shrunk("mamba_scan", sizes), dims, "h100")
    assert calls(work) <= {"mm"}
    scans = [g for g, low in backward(work).lowered if low.template == "scan"]
    assert len(scans) == 1 and scans[0].scan == (1, True)
    reads = [a for p in plans(work) if isinstance(p.tile, ScanTile) for a in p.accesses if a.windows]
    assert {w.add for a in reads for w in a.windows} == {-1, 1}


def test_running_values_of_two_directions_stay_apart() -> None:
    data = document("cumsum", ["n", "rows", 6], "float32", {"dim": 1})
    data["nodes"].append({"id": "z", "op": "cumsum", "inputs": ["y"], "attrs": {"dim": 1, "reverse": True}})
    data["outputs"] = ["z"]
    work = check(parsed(data), {"n": 2, "rows": 9}, "h100")
    assert all(len({s.reverse for s in p.body if isinstance(s, Scan)}) == 1 for p in plans(work))
    refused = [r for phase in explain(work)["phases"] for r in phase["refused"]]
    assert "direction" in {r["code"] for r in refused}


# Lookups.


def test_a_lookup_is_read_by_the_norm_and_its_gradient_has_no_sort() -> None:
    sizes, dims = BLOCKS["embedding_norm"]
    work = check(shrunk("embedding_norm", sizes), dims, "h100")
    assert not calls(work)
    assert {"PlaceTile", "GatherTile"} <= {type(p.tile).__name__ for p in plans(work)}
    inference = next(low for low in work.lowerings if low.phase.name == "inference")
    assert len(inference.plan.steps) == 1


def running(shape: list[int | str], dim: int) -> dict[str, Any]:
    """Running sums of rows of a table, along the positions or along a row."""
    data = document("cumsum", ["rows"], "float32", {"dim": dim})
    data["inputs"] = {"x": {"dtype": "int64", "shape": shape}}
    data["params"] = {"e": {"dtype": "float32", "shape": [50, 6]}}
    look = {"id": "h", "op": "embedding", "inputs": ["x", "e"], "attrs": {}}
    data["nodes"] = [look, {**data["nodes"][0], "inputs": ["h"]}]
    return data


@pytest.mark.parametrize(("shape", "dim"), [(["rows"], 0), (["rows"], 1), ([2, "rows"], 1)])
def test_running_values_of_a_lookup_read_the_rows_that_are_named(shape: list[int | str], dim: int) -> None:
    """In Triton's text no row of the table is loaded before its number is there."""
    made = plans(front(parsed(running(shape, dim)), "h100"))
    scans = [p for p in made if isinstance(p.tile, ScanTile) and any(a.table for a in p.accesses)]
    assert scans
    for plan in scans:
        (load,) = (s for s in plan.body if isinstance(s, Load) and s.row)
        lines = [line.strip() for line in emit_kernel(plan).splitlines()]
        used = [at for at, line in enumerate(lines) if f"{load.row}.to(" in line]
        named = [at for at, line in enumerate(lines) if line.startswith(f"{load.row} = ")]
        assert used and named and named[0] < used[0]


def lookup(rows: int, width: int) -> Blueprint:
    data = document("embedding", ["rows", 3], "int64", {})
    data["inputs"] = {"x": {"dtype": "int64", "shape": ["rows", 3]}}
    data["params"] = {"e": {"dtype": "float32", "shape": [rows, width]}}
    data["nodes"] = [{"id": "y", "op": "embedding", "inputs": ["x", "e"], "attrs": {}}]
    return parsed(data)


def test_the_gradient_of_a_table_adds_repeated_rows() -> None:
    blueprint = lookup(5000, 7)
    work = front(blueprint, "h100")
    tiles = [p.tile for p in plans(work)]
    part = next(t for t in tiles if isinstance(t, PlaceTile))
    block = next(t for t in tiles if isinstance(t, GatherTile))
    assert part.rows % block.rows == 0 and block.listed == part.rows
    numbers = torch.randint(5000, (40, 3))
    numbers[:20] = 4999
    given = {"x": numbers, "e": torch.randn(5000, 7)}
    found, wide, _ = compared(work, Machine(work), {"rows": 40}, given)
    assert torch.allclose(found["grad:e"].double(), wide["grad:e"], atol=1e-5)


def test_on_a_processor_lookups_are_library_calls() -> None:
    """Which say what position is out of range."""
    work = front(lookup(50, 8), "cpu")
    assert calls(work) == {"embedding", "embedding_grad"}
    refused = [r for phase in explain(work)["phases"] for r in phase["refused"]]
    assert {"positions", "order"} <= {r["code"] for r in refused}


# Pooling.

POOLS: dict[str, tuple[list[int], dict[str, Any]]] = {
    "halves": ([2, 6, 8, 3], {"kernel": [2], "data_format": "NHWC"}),
    "overlapping": ([2, 3, 7, 9], {"kernel": [3], "stride": [2], "padding": [1]}),
    "same size": ([1, 5, 6, 4], {"kernel": [3], "stride": [1], "padding": [1], "data_format": "NHWC"}),
    "gaps": ([1, 2, 9, 9], {"kernel": [2], "stride": [3]}),
    "partly outside": ([1, 2, 6, 5], {"kernel": [2], "ceil_mode": True}),
    "unlike axes": ([2, 7, 6, 4], {"kernel": [2, 3], "stride": [1, 2], "padding": [0, 1],
                                   "data_format": "NHWC"}),
    "whole": ([2, 4, 3, 5], {"kernel": [4, 3], "data_format": "NHWC"}),
    "one across": ([1, 8, 4, 5], {"kernel": [1, 2], "stride": [2, 3], "data_format": "NHWC"}),
}  # fmt: skip


@pytest.mark.parametrize("around", [False, True])
@pytest.mark.parametrize("name", POOLS)
def test_a_maximum_over_windows_is_one_kernel(name: str, around: bool) -> None:
    shape, attrs = POOLS[name]
    data = document("max_pool2d", shape, "float32", attrs)
    if around:
        data["nodes"].insert(0, {"id": "r", "op": "relu", "inputs": ["x"], "attrs": {}})
        data["nodes"][1]["inputs"] = ["r"]
    work = check(parsed(data), {}, "h100")
    assert not calls(work)
    phases = [low for low in work.lowerings if low.phase.name == "inference" or not around]
    # A window that covers the image is read as slices, which no other work follows.
    assert all(len(low.plan.steps) <= (2 if around and name == "whole" else 1) for low in phases)
    check(parsed(data), {}, "cpu", "c")


MEANS: dict[str, dict[str, Any]] = {
    "overlapping": {}, "same size": {"count_include_pad": False}, "gaps": {"divisor_override": 3},
    "partly outside": {}, "unlike axes": {"count_include_pad": False}, "whole": {},
}  # fmt: skip


@pytest.mark.parametrize("name", MEANS)
def test_a_mean_over_windows_is_one_kernel(name: str) -> None:
    shape, attrs = POOLS[name]
    data = document("avg_pool2d", shape, "bfloat16", {**attrs, **MEANS[name]})
    work = check(parsed(data), {}, "h100")
    assert not calls(work)
    # Shares of windows that hold unlike counts are worked out before they are added up.
    most = 1 if name in ("overlapping", "gaps", "whole") else 2
    assert all(len(low.plan.steps) <= most for low in work.lowerings)
    check(parsed(data), {}, "cpu", "c")


def test_places_of_maxima_are_those_of_torch() -> None:
    """Of equal ones the first, of NaN the last, and the first element of a window that holds only -inf."""
    shape, attrs = [1, 1, 7, 7], {"kernel": [3], "stride": [2], "padding": [1]}
    blueprint = parsed(document("max_pool2d", shape, "float32", attrs))
    work = front(blueprint, "h100")
    x = torch.randint(0, 3, (1, 1, 7, 7)).float()
    x[0, 0, :3, :3], x[0, 0, 5, 5] = -torch.inf, torch.nan
    found, _, eager = compared(work, Machine(work), {}, {"x": x})
    assert torch.equal(found["grad:x"] != 0, eager["grad:x"] != 0)
    torch.testing.assert_close(found["grad:x"], eager["grad:x"])
    assert torch.equal(found["y"].nan_to_num(7.0), eager["y"].nan_to_num(7.0))


def test_large_and_spread_windows_stay_library_calls() -> None:
    for attrs in ({"kernel": [9], "stride": [4]}, {"kernel": [3], "dilation": [2]}):
        work = front(parsed(document("max_pool2d", [1, 2, 20, 20], "float32", attrs)), "h100")
        assert calls(work) == {"max_pool2d", "max_pool2d_grad"}


def test_nothing_is_stored_between_a_convolution_and_its_pooling() -> None:
    sizes, dims = BLOCKS["max_pool_block"]
    work = check(shrunk("max_pool_block", sizes), dims, "h100")
    assert calls(work) == {"conv2d", "conv2d_input_grad", "conv2d_weight_grad"}
    forward = next(low for low in work.lowerings if low.phase.name == "forward")
    assert len(forward.plan.steps) == 2


# Depthwise convolutions.

FILTERS: dict[str, tuple[list[Any], list[int], dict[str, Any]]] = {
    "same size": ([2, 5, 6, 16], [3, 3], {"padding": [1]}),
    "unlike axes": (["n", 7, 4, 24], [1, 3], {"padding": [0, 2], "dilation": [1, 2]}),
    "larger": ([1, 4, 3, 16], [2, 2], {"padding": [1, 1]}),
    "spread": ([1, 8, 9, 40], [3, 2], {"stride": [2, 1], "padding": [1, 0]}),
}


def depthwise_document(name: str, dtype: str, after: bool = True) -> dict[str, Any]:
    shape, window, attrs = FILTERS[name]
    data = document("conv2d", shape, dtype, {**attrs, "groups": shape[-1], "data_format": "NHWC"})
    data["params"] = {"w": {"dtype": dtype, "shape": [shape[-1], *window, 1]}}
    data["nodes"][0]["inputs"] = ["x", "w"]
    if after:
        data["nodes"].append({"id": "z", "op": "relu", "inputs": ["y"], "attrs": {}})
        data["outputs"] = ["z"]
    return data


def depthwise(name: str, dtype: str = "bfloat16", after: bool = True) -> Blueprint:
    return parsed(depthwise_document(name, dtype, after))


@pytest.mark.parametrize("name", FILTERS)
def test_a_depthwise_convolution_is_a_kernel_with_what_follows(name: str) -> None:
    """One kernel lays the filters out, one adds the products of the windows; only the gradient of the operand
    where positions were skipped is a call."""
    work = check(depthwise(name), {"n": 3} if name == "unlike axes" else {}, "h100")
    strided = name == "spread"
    assert calls(work) == ({"conv2d_input_grad"} if strided else set())
    inference = next(low for low in work.lowerings if low.phase.name == "inference")
    assert len(inference.plan.steps) == 2
    check(depthwise(name), {"n": 3} if name == "unlike axes" else {}, "cpu", "c")


def test_a_depthwise_convolution_is_summed_in_float32() -> None:
    work = check(depthwise("same size", after=False), {}, "h100")
    check(depthwise("same size", "float64"), {}, "h100")
    wide = [s for p in plans(work) for s in p.body if isinstance(s, Compute) and len(s.args) == 2]
    assert wide and {s.dtype.value for s in wide} == {"float32"}


def test_few_channels_and_large_filters_stay_library_calls() -> None:
    for shape, window in (([1, 5, 5, 8], [3, 3]), ([1, 9, 9, 16], [5, 5]), ([1, 1, 9, 16], [1, 3])):
        data = document("conv2d", shape, "bfloat16", {"groups": shape[-1], "data_format": "NHWC"})
        data["params"] = {"w": {"dtype": "bfloat16", "shape": [shape[-1], *window, 1]}}
        data["nodes"][0]["inputs"] = ["x", "w"]
        assert "conv2d" in calls(front(parsed(data), "h100"))


# Windows of windows.


def moved(b: Builder, x: Value, *steps: tuple[int, int, int]) -> Value:
    """Windows (axis, add, size), one of the other."""
    for axis, add, size in steps:
        x = b.op("window", x, dim=axis, mul=1, add=add, div=1, size=size)
    return x


TWICE = ((0, -1, 7), (0, -1, 7))
CHAINS: dict[str, Callable[[Builder, Value, Value], Value]] = {
    "three": lambda b, x, _: moved(b, x, *TWICE, (0, -2, 8)),
    "of work": lambda b, x, _: moved(b, b.add(x, 1.0), *TWICE),
    "of work, another between": lambda b, x, _: moved(b, b.add(x, 1.0), TWICE[0], (1, 1, 5), (0, 1, 8)),
    "of work on windows": lambda b, x, y: moved(
        b, b.add(moved(b, x, TWICE[0]), moved(b, y, (1, -1, 5))), TWICE[1]
    ),
}


@pytest.mark.parametrize("name", CHAINS)
def test_windows_along_one_axis(name: str) -> None:
    """Two are no view of what the first one reads, and positions of the first are not those of the second."""
    b = Builder("chain")
    x, y = b.input("x", "float32", [7, 5]), b.input("y", "float32", [7, 5])
    blueprint = b.build(b.relu(CHAINS[name](b, x, y)))
    check(blueprint, {}, "h100")
    check(blueprint, {}, "cpu", "c")


# Triton's interpreter.

CASES: dict[str, dict[str, Any]] = {
    "mamba": {"path": "examples/mamba_scan.json", "sizes": {"1024": 20}, "dims": {"batch": 2, "rows": 37}},
    "embedding": {"path": "examples/embedding_norm.json", "sizes": {"32000": 70, "1024": 24},
                  "dims": {"rows": 90}},
    "pooling": {"path": "examples/max_pool_block.json", "sizes": {"56": 6, "128": 16}, "dims": {"n": 2}},
    "depthwise": {"blueprint": depthwise_document("unlike axes", "bfloat16"), "dims": {"n": 3}},
    "backwards": {"blueprint": document("cumsum", ["n", "rows"], "float32", {"dim": 1, "reverse": True}),
                  "dims": {"n": 3, "rows": 70}},
    "running lookup": {"blueprint": running(["rows"], 1), "dims": {"rows": 37}},
    "running lookups": {"blueprint": running(["rows"], 0), "dims": {"rows": 37}},
    "planes": {"blueprint": document("max_pool2d", *POOLS["overlapping"][:1], "bfloat16",
                                     POOLS["overlapping"][1]), "dims": {}},
}  # fmt: skip


@pytest.mark.slow
def test_triton_says_the_same() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.forge.interpreted", json.dumps(list(CASES.values()))],
        cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}, capture_output=True,
        text=True, timeout=540,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    for name, answer in zip(CASES, json.loads(done.stdout), strict=True):
        wrong = {n: r for n, r in answer["results"].items() if not r["ok"]}
        assert answer["results"] and not wrong, (name, wrong)
