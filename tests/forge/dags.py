"""Random blueprints of pointwise work, reductions, movement and products, for laws that hold of every
graph.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from esper_ir.builder import Builder, Value
from esper_ir.diagnostics import EsperError
from esper_ir.graph import Blueprint
from esper_ir.types import Dim

UNARY = ("tanh", "sigmoid", "neg", "relu", "gelu", "sin", "square")
BINARY = ("add", "sub", "mul", "maximum")
REDUCTIONS = ("sum", "mean", "amax", "amin")
WIDTHS = (1, 3, 8)


class Grower:
    """Adds random nodes to a builder; what the shape rules refuse is not added."""

    def __init__(self, choice: random.Random, dtype: str) -> None:
        self.choice, self.dtype = choice, dtype
        self.b = Builder("random")
        self.rows = self.b.dim("rows", min=1, max=4096, tune=(64,))
        self.values: list[Value] = []
        self.products = 0

    def leaves(self) -> None:
        wide, deep = self.choice.choice(WIDTHS), self.choice.choice((2, 3))
        shapes = [(self.rows, wide), (wide,), (self.rows, deep, wide), (self.rows, 1), (deep, wide)]
        picked = [shapes[0], *self.choice.sample(shapes, self.choice.randint(1, 3))]
        self.values = [self.b.input(f"x{i}", self.dtype, s) for i, s in enumerate(picked)]

    def any(self) -> Value:
        """Late values more often than early ones."""
        at = max(self.choice.randrange(len(self.values)) for _ in range(2))
        return self.values[at]

    def grow(self) -> None:
        ways: list[Callable[[], Value]] = [
            self.unary, self.binary, self.binary, self.reduction, self.movement, self.product, self.norm,
        ]  # fmt: skip
        try:
            made = self.choice.choice(ways)()
        except (EsperError, ValueError, IndexError):
            return
        if made.type.rank <= 4:
            self.values.append(made)

    def unary(self) -> Value:
        return self.b.op(self.choice.choice(UNARY), self.any())

    def binary(self) -> Value:
        other = self.any() if self.choice.random() < 0.8 else self.choice.choice((0.5, 2, -1))
        return self.b.op(self.choice.choice(BINARY), self.any(), other)

    def reduction(self) -> Value:
        x = self.any()
        axes = [a for a in range(x.type.rank) if self.choice.random() < 0.5] or [x.type.rank - 1]
        op = self.choice.choice(REDUCTIONS)
        if any(x.type.shape[a].static is None for a in axes) and op == "mean":
            op = "sum"
        return self.b.op(op, x, dims=axes, keepdim=self.choice.random() < 0.5)

    def movement(self) -> Value:
        x, way = self.any(), self.choice.randrange(4)
        rank = x.type.rank
        if way == 0:
            return self.b.op("permute", x, dims=self.choice.sample(range(rank), rank))
        if way == 1:
            return self.b.op("unsqueeze", x, dim=self.choice.randrange(rank + 1))
        if way == 2 and rank > 1:
            at = self.choice.randrange(rank - 1)
            return self.b.op("flatten", x, start_dim=at, end_dim=at + 1)
        lead = self.choice.choice((2, self.rows))
        return self.b.op(
            "expand", x, shape=[str(lead) if lead is self.rows else 2, *map(_size, x.type.shape)]
        )

    def product(self) -> Value:
        x = self.any()
        self.products += 1
        size = x.type.shape[-1] if x.type.rank else Dim.of(1)
        if size.static is None or self.products > 2:
            return self.b.op("matmul", x, self.any())
        w = self.b.param(f"w{self.products}", self.dtype, [size, self.choice.choice(WIDTHS)])
        return self.b.op("matmul", x, w)

    def norm(self) -> Value:
        x = self.any()
        if self.choice.random() < 0.5:
            return self.b.op("softmax", x, dim=self.choice.randrange(x.type.rank))
        return self.b.op("rms_norm", x, eps=0.01)


def _size(size: Dim) -> int | str:
    return size.static if size.static is not None else str(size)


def blueprint(choice: random.Random, nodes: int = 8, dtype: str = "float32") -> Blueprint:
    """A verified blueprint with one to three outputs."""
    grower = Grower(choice, dtype)
    grower.leaves()
    for _ in range(nodes):
        grower.grow()
    count = min(choice.randint(1, 3), len(grower.values))
    outputs = {v.name: v for v in [grower.values[-1], *choice.sample(grower.values, count - 1)]}
    return grower.b.build(*outputs.values())
