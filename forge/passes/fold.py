"""Work that changes no bit is not done: movements that meet their inverse, casts there and back, neutral
numbers.

Every rule gives the same bits as before, NaN and -0.0 included: x + 0.0 stays, since it turns -0.0 into 0.0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from esper_ir.graph import Graph, Node
from esper_ir.graphbuilder import GraphBuilder, rewritten
from esper_ir.opdef import Operand, Val
from esper_ir.types import Dim, DType

WIDENS: Mapping[DType, frozenset[DType]] = {
    DType.bfloat16: frozenset({DType.float32, DType.float64}),
    DType.float16: frozenset({DType.float32, DType.float64}),
    DType.float32: frozenset({DType.float64}),
    DType.bool: frozenset(DType) - {DType.bool},
}
"""Types that hold every value of a type, so that a cast there and back is none."""


class Folder:
    """Knows the node behind each value that its builder made."""

    builder: GraphBuilder

    def __init__(self) -> None:
        self.made: dict[str, tuple[str, tuple[Operand, ...], dict[str, Any]]] = {}

    def behind(self, value: Operand, op: str) -> tuple[Val, dict[str, Any]] | None:
        """First operand and attributes of the node that made a value, when it is this operator."""
        found = self.made.get(value.name) if isinstance(value, Val) else None
        if found is None or found[0] != op or not isinstance(found[1][0], Val):
            return None
        return found[1][0], found[2]

    def note(self, values: tuple[Val, ...], op: str, operands: tuple[Operand, ...], attrs: Any) -> None:
        self.made.setdefault(values[0].name, (op, operands, dict(attrs)))


Rule = Callable[[Folder, tuple[Operand, ...], dict[str, Any], Node], "Val | None"]


def fold(graph: Graph) -> Graph:
    """The graph without such work; names and types of outputs stay."""
    folder = Folder()

    def change(builder: GraphBuilder, node: Node, values: dict[str, Val]) -> tuple[Val, ...]:
        folder.builder = builder
        operands = tuple(values[r] if isinstance(r, str) else r for r in node.inputs)
        attrs = dict(node.attrs)
        rule = RULES.get(node.op)
        builder.scope = node.id
        short = rule(folder, operands, attrs, node) if rule is not None else None
        builder.scope = ""
        if short is not None and short.type == node.types[0]:
            return (short,)
        made = builder.emit_named(node.id, node.op, operands, attrs)
        folder.note(made, node.op, operands, attrs)
        return made

    return rewritten(graph, change)


def _again(folder: Folder, op: str, x: Val, attrs: dict[str, Any]) -> Val:
    made = folder.builder(op, x, **attrs)
    folder.note((made,), op, (x,), attrs)
    return made


def _reshape(f: Folder, operands: tuple[Operand, ...], attrs: dict[str, Any], node: Node) -> Val | None:
    """Of a reshape: one reshape. To the shape that is there: nothing."""
    before = f.behind(operands[0], "reshape")
    x = before[0] if before else operands[0]
    assert isinstance(x, Val)
    if x.type == node.types[0]:
        return x
    return _again(f, "reshape", x, attrs) if before else None


def _permute(f: Folder, operands: tuple[Operand, ...], attrs: dict[str, Any], node: Node) -> Val | None:
    before = f.behind(operands[0], "permute")
    dims = tuple(before[1]["dims"][d] for d in attrs["dims"]) if before else attrs["dims"]
    x = before[0] if before else operands[0]
    assert isinstance(x, Val)
    if dims == tuple(range(len(dims))):
        return x
    return _again(f, "permute", x, {"dims": dims}) if before else None


def _reverse(f: Folder, operands: tuple[Operand, ...], attrs: dict[str, Any], node: Node) -> Val | None:
    before = f.behind(operands[0], "reverse")
    return before[0] if before is not None and before[1]["dim"] == attrs["dim"] else None


def _expand(f: Folder, operands: tuple[Operand, ...], attrs: dict[str, Any], node: Node) -> Val | None:
    x = operands[0]
    return x if isinstance(x, Val) and x.type == node.types[0] else None


def _slice(f: Folder, operands: tuple[Operand, ...], attrs: dict[str, Any], node: Node) -> Val | None:
    x = operands[0]
    whole = isinstance(x, Val) and attrs["start"] == Dim() and attrs["step"] == 1
    return x if whole and isinstance(x, Val) and attrs["end"] == x.type.shape[attrs["dim"]] else None


def _cast(f: Folder, operands: tuple[Operand, ...], attrs: dict[str, Any], node: Node) -> Val | None:
    """There and back through a type that holds every value. A cast to the own type is a copy, and stays."""
    before = f.behind(operands[0], "cast")
    if before is None or before[0].type.dtype is not attrs["dtype"]:
        return None
    return before[0] if before[1]["dtype"] in WIDENS.get(attrs["dtype"], ()) else None


def _neg(f: Folder, operands: tuple[Operand, ...], attrs: dict[str, Any], node: Node) -> Val | None:
    before = f.behind(operands[0], "neg")
    return before[0] if before else None


def _once(op: str) -> Rule:
    """What changes nothing the second time."""

    def rule(f: Folder, operands: tuple[Operand, ...], attrs: dict[str, Any], node: Node) -> Val | None:
        x = operands[0]
        return x if isinstance(x, Val) and f.behind(x, op) is not None else None

    return rule


def _is(operand: Operand, number: float) -> bool:
    """The number itself: neither a truth value nor the zero of the other sign."""
    if isinstance(operand, (Val, bool)):
        return False
    return operand == number and math.copysign(1.0, operand) > 0


def _neutral(number: float, right_only: bool) -> Rule:
    """x * 1, 1 * x, x / 1, x - 0: the other operand."""

    def rule(f: Folder, operands: tuple[Operand, ...], attrs: dict[str, Any], node: Node) -> Val | None:
        x, y = operands
        if isinstance(x, Val) and _is(y, number):
            return x
        return y if not right_only and isinstance(y, Val) and _is(x, number) else None

    return rule


def _same(first: int) -> Rule:
    """Two equal operands, from number `first` on: that operand."""

    def rule(f: Folder, operands: tuple[Operand, ...], attrs: dict[str, Any], node: Node) -> Val | None:
        x, y = operands[first : first + 2]
        return x if isinstance(x, Val) and x == y else None

    return rule


RULES: Mapping[str, Rule] = {
    "reshape": _reshape, "permute": _permute, "reverse": _reverse, "expand": _expand, "slice": _slice,
    "cast": _cast, "neg": _neg, "abs": _once("abs"), "relu": _once("relu"), "floor": _once("floor"),
    "ceil": _once("ceil"), "round": _once("round"), "trunc": _once("trunc"), "mul": _neutral(1, False),
    "div": _neutral(1, True), "sub": _neutral(0, True), "maximum": _same(0), "minimum": _same(0),
    "where": _same(1),
}  # fmt: skip
