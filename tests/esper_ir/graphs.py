"""Large blueprints for timing; importing this needs no torch."""

from __future__ import annotations

from esper_ir.graph import Blueprint, Leaf, Node
from esper_ir.types import DimSpec, TensorType


def long_graph(count: int) -> Blueprint:
    """A chain with shared operands, deep enough for any recursion to fail."""
    ops = ["add", "mul", "exp", "sub"]
    nodes = [Node("n0", "add", ("x", "x"))]
    for i in range(1, count):
        op = ops[i % 4]
        operands = (f"n{i - 1}", f"n{i // 2}")
        nodes.append(Node(f"n{i}", op, operands[: 1 if op == "exp" else 2]))
    leaf = Leaf("x", "input", TensorType.of("float32", ["rows", 8]))
    return Blueprint("long", (leaf,), tuple(nodes), (nodes[-1].id,), {"rows": DimSpec()})


def doubling(count: int) -> Blueprint:
    """Every node reads the one before twice: a tree of it would double in size at each step."""
    nodes = [Node("n0", "sub", ("x", "x"))]
    nodes += [Node(f"n{i}", "sub", (f"n{i - 1}", f"n{i - 1}")) for i in range(1, count)]
    leaf = Leaf("x", "input", TensorType.of("float32", ["rows", 8]))
    return Blueprint("doubling", (leaf,), tuple(nodes), (nodes[-1].id,), {"rows": DimSpec()})
