"""What two blueprints differ in, and a blueprint to look at."""

from __future__ import annotations

from dataclasses import replace

import pytest

from esper_ir.builder import Builder
from esper_ir.compare import compare, render
from esper_ir.graph import Blueprint, Node
from esper_ir.show import document, example_sizes, short
from esper_ir.show import render as table
from esper_ir.text import load
from tests.source import ROOT


def block(scale: float = 2.0, width: int = 6, last: str = "silu") -> Blueprint:
    b = Builder("block")
    b.dim("rows", max=64, tune=(8, 16))
    x = b.input("x", "float32", ["rows", width])
    w = b.param("w", "float32", [width, 4], "ones")
    h = b.matmul(x, w, name="h")
    s = b.mul(h, scale, name="s")
    return b.build(b.op(last, b.add(s, h, name="a"), name="y"))


def renamed(bp: Blueprint) -> Blueprint:
    """Nodes in the other order under other names, operands of the sum exchanged."""
    name = {n.id: f"n{i}" for i, n in enumerate(bp.nodes)}
    nodes = []
    for n in reversed(bp.nodes):
        inputs = [name.get(r, r) if isinstance(r, str) else r for r in n.inputs]
        nodes.append(Node(name[n.id], n.op, tuple(inputs[::-1] if n.op == "add" else inputs), n.attrs))
    return replace(bp, nodes=tuple(nodes), outputs=tuple(name[o] for o in bp.outputs))


def test_order_and_names_of_nodes_are_no_difference() -> None:
    found = compare(block(), renamed(block()))
    assert found.same_meaning and [r.what for r in found.rows] == ["outputs"]
    assert not compare(block(), block()).rows and "no difference" in render(compare(block(), block()))


@pytest.mark.parametrize(
    ("other", "rows"),
    [
        (block(scale=3.0), [("node", "s", "inputs")]),
        (block(last="relu"), [("node", "y", "op")]),
        (block(width=8), [("input", "x", "type"), ("param", "w", "type")]),
        (replace(block(), name="other"), [("name", "", "name")]),
        (replace(block(), differentiable=("w",)), [("differentiable", "", "list")]),
    ],
)
def test_every_change_is_named(other: Blueprint, rows: list[tuple[str, str, str]]) -> None:
    found = compare(block(), other)
    assert [(r.what, r.name, r.field) for r in found.rows] == rows
    assert found.same_meaning == (rows[0][0] == "name")
    assert found.to_json()["schema"] == "esper-diff/1" and rows[0][0] in render(found)


def test_a_change_is_told_once_and_not_at_every_node_behind_it() -> None:
    """The sum and the activation behind the changed factor are as they were."""
    found = compare(renamed(block()), renamed(block(scale=3.0)))
    assert [(r.name, r.field) for r in found.rows] == [("n1", "inputs")]


def test_added_and_removed() -> None:
    b = Builder("block")
    b.dim("rows", max=64, tune=(8, 16))
    x = b.input("x", "float32", ["rows", 6])
    w = b.param("w", "float32", [6, 4], "ones")
    shorter = b.build(b.silu(b.matmul(x, w, name="h"), name="y"))
    gone = [r for r in compare(block(), shorter).rows if r.field == "exists"]
    assert {(r.name, r.first, r.second) for r in gone} == {("s", "mul", None), ("a", "add", None)}
    added = [r for r in compare(shorter, block()).rows if r.field == "exists"]
    assert {(r.name, r.first, r.second) for r in added} == {("s", None, "mul"), ("a", None, "add")}


def test_show_counts_operations_and_bytes() -> None:
    made = document(block())
    assert made["at"] == {"rows": 16} and made["flops"]["h"] == "48*rows"
    assert made["total"]["flops"] == 16 * (2 * 6 * 4 + 4 + 4 + 4 * 4) - 16 * 4 * (4 - _weight(made))
    assert made["total"]["bytes"] == 4 * (16 * 6 + 6 * 4 + 16 * 4)
    text = table(made)
    assert "float32[rows, 4]" in text and "rows=16" in text and "s = mul(h, 2.0)" in text


def _weight(made: dict) -> int:
    """Operations per element of the activation, as its record says."""
    (row,) = [n for n in made["nodes"] if n["id"] == "y"]
    return row["flops"] // (16 * 4)


def test_sizes_without_tuning_lie_in_the_range() -> None:
    bp = load(ROOT / "examples" / "swiglu.json")
    for name, size in example_sizes(bp).items():
        assert bp.dims[name].min <= size <= bp.dims[name].max
    b = Builder("b")
    b.dim("rows", min=3, max=50, multiple_of=8)
    assert example_sizes(b.build(b.exp(b.input("x", "float32", ["rows"])))) == {"rows": 48}
    assert [short(v) for v in (0, 999, 1234, 5.6e9)] == ["0", "999", "1.23 k", "5.6 G"]
