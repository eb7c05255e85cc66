"""A sum of products of the library is added up by the library."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

import esper_ir.text as text
from forge.service import front
from forge.work import Work
from library.launch import ExternStep, KernelStep
from tests.forge.whole import check

BF16 = "bfloat16"


def document(products: int, nodes: list[tuple[str, str, list[str]]], outputs: list[str], *,
             dtype: str = BF16, batch: int = 0) -> dict[str, Any]:  # fmt: skip
    """y0 = x w0, y1 = x w1, ..., then `nodes`."""
    lead = [batch] if batch else []
    leaves = {"x": [*lead, 24, 16], **{f"w{i}": [*lead, 16, 40] for i in range(products)}}
    made = [(f"y{i}", "matmul", ["x", f"w{i}"]) for i in range(products)]
    return {
        "format": "esper-blueprint/1", "name": "sums",
        "inputs": {name: {"dtype": dtype, "shape": shape} for name, shape in leaves.items()},
        "nodes": [{"id": i, "op": op, "inputs": given} for i, op, given in (*made, *nodes)],
        "outputs": outputs,
    }  # fmt: skip


def backward(work: Work) -> list[str]:
    """Calls and kernels of the backward for every gradient."""
    steps = work.lowerings[-1].plan.steps
    return [s.op if isinstance(s, ExternStep) else "kernel" for s in steps]


ALIKE = [("s0", "silu", ["y0"]), ("s", "mul", ["s0", "y1"])]
CASES = {
    "two": (document(2, ALIKE, ["s"]), {"mm": 3, "addmm": 1}),
    "three": (document(3, [*ALIKE, ("t", "mul", ["s", "y2"])], ["t"]), {"mm": 4, "addmm": 2}),
    "float32": (document(2, ALIKE, ["s"], dtype="float32"), {"mm": 3, "addmm": 1}),
    "batched": (document(2, ALIKE, ["s"], batch=3), {"bmm": 3, "baddbmm": 1}),
}


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_added_up_by_the_library(name: str) -> None:
    data, wanted = CASES[name]
    work = check(text.parse(json.dumps(data)), {}, "cpu")
    assert Counter(step for step in backward(work) if step != "kernel") == wanted
    for low in work.lowerings:
        for step in low.plan.steps:
            if isinstance(step, ExternStep) and step.op in ("addmm", "baddbmm"):
                assert step.inputs[0].buffer == step.outs[0].buffer  # in place


def forward(nodes: list[tuple[str, str, list[str]]], outputs: list[str], **more: Any) -> list[str]:
    work = check(text.parse(json.dumps(document(2, nodes, outputs, **more))), {}, "cpu")
    return [s.op if isinstance(s, ExternStep) else "kernel" for s in work.lowerings[0].plan.steps]


def test_only_where_nobody_sees_the_terms() -> None:
    total = ("z", "add", ["y0", "y1"])
    assert forward([total], ["z"]) == ["mm", "addmm"]
    assert forward([total], ["z", "y0"]) == ["mm", "mm", "kernel"]
    assert forward([total, ("r", "relu", ["z"])], ["r"]) == ["mm", "mm", "kernel"]
    assert forward([("d", "add", ["y0", "y0"]), ("z", "add", ["d", "y1"])], ["z"]) == ["mm", "mm", "kernel"]
    assert forward([("z", "sub", ["y0", "y1"])], ["z"]) == ["mm", "mm", "kernel"]
    assert forward([total], ["z"], batch=2) == ["bmm", "baddbmm"]


def test_the_sum_belongs_to_the_last_product() -> None:
    work = front(text.parse(json.dumps(document(2, [("z", "add", ["y0", "y1"])], ["z"]))), "cpu")
    low = work.lowerings[0]
    assert [[n.id for n in group.nodes] for group, _ in low.lowered] == [["y0"], ["y1", "z"]]
    assert not any(isinstance(s, KernelStep) for s in low.plan.steps)


def linear(nodes: list[tuple[str, str, list[str]]], outputs: list[str], target: str = "h100",
           **shapes: list[Any]) -> list[str]:  # fmt: skip
    """Steps of the forward of p = x w + b at sizes of a card, and what follows."""
    leaves = {"x": [4096, 1024], "w": [1024, 4096], "b": [4096], **shapes}
    made = [("p", "matmul", ["x", "w"]), ("u", "add", ["b", "p"])]
    data = {
        "format": "esper-blueprint/1", "name": "linear", "outputs": outputs,
        "inputs": {name: {"dtype": BF16, "shape": shape} for name, shape in leaves.items()},
        "nodes": [{"id": i, "op": op, "inputs": given} for i, op, given in (*made, *nodes)],
    }  # fmt: skip
    low = front(text.parse(json.dumps(data)), target).lowerings[1]
    return [s.op if isinstance(s, ExternStep) else "kernel" for s in low.plan.steps]


def test_a_bias_is_the_librarys() -> None:
    gelu = ("y", "gelu", ["u"])
    assert linear([], ["u"]) == ["addmm"]
    assert linear([gelu], ["y"]) == ["addmm", "kernel"]
    assert linear([gelu], ["y"], x=[8, 512, 1024]) == ["addmm", "kernel"]
    assert linear([gelu], ["y"], "cpu") == ["mm", "kernel"]
    assert linear([gelu], ["y", "p"]) == ["mm", "kernel"]  # somebody sees the product
    assert linear([gelu], ["y"], b=[4096, 1]) == ["mm", "kernel"]  # one value a row
    assert linear([gelu], ["y"], b=[4096, 4096]) == ["mm", "kernel"]
    assert linear([gelu], ["y"], x=[3, 2048, 1024], w=[3, 1024, 4096]) == ["bmm", "kernel"]


@pytest.mark.parametrize("rows", [40, 1])
def test_numbers_with_a_bias(rows: int) -> None:
    """float64 has no kernel of ours, so that small sizes are library calls too."""
    leaves = {"x": ["n", 24], "w": [24, 16], "b": [16]}
    nodes = [("p", "matmul", ["x", "w"]), ("u", "add", ["p", "b"]), ("y", "gelu", ["u"])]
    data = {
        "format": "esper-blueprint/1", "name": "linear", "outputs": ["y"],
        "dims": {"n": {"min": 1, "max": 64}},
        "inputs": {name: {"dtype": "float64", "shape": shape} for name, shape in leaves.items()},
        "nodes": [{"id": i, "op": op, "inputs": given} for i, op, given in nodes],
    }  # fmt: skip
    work = check(text.parse(json.dumps(data)), {"n": rows}, "h100")
    assert any(isinstance(s, ExternStep) and s.op == "addmm" for s in work.lowerings[1].plan.steps)


def test_a_product_that_is_only_moved() -> None:
    """What moves for nothing lies in the product's group and is no addition."""
    data = document(1, [], ["y0"], dtype="float64")
    turned = {"id": "t", "op": "permute", "inputs": ["y0"], "attrs": {"dims": [1, 0]}}
    data |= {"nodes": [*data["nodes"], turned], "outputs": ["t"]}
    work = check(text.parse(json.dumps(data)), {}, "h100")
    assert any(isinstance(s, ExternStep) for s in work.lowerings[0].plan.steps)
