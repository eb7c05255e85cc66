"""Families of products: square ones alone and with an epilogue, small networks, gated MLPs; each as a torch
function and as a blueprint of the same mathematics at one size.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from bench.blocks import Block, Leaf, Sizes
from bench.peers import COMPILE, EAGER, LIGER, LIGER_BLOCKS, REDUCE

PRODUCTS, SMALL, SWIGLU = "products", "small", "swiglu"
FAMILIES = (PRODUCTS, SMALL, SWIGLU)
SQUARES, WIDTHS, ROWS = (2048, 4096, 8192), (64, 128, 256, 512), (256, 1024, 4096)
RANKS, LORA_SIZES = (8, 16, 32, 64), ((1024, 256), (4096, 1024))
GATED, GATED_ROWS = (256, 512, 1024), (2048, 8192)
SMALLER = 16  # of the rows, and of the axes of a square, with --tiny
Nodes = Sequence[tuple[str, str, Sequence[Any], Mapping[str, Any]]]


@dataclass(frozen=True)
class Case:
    """A block at one size; `nodes`: its blueprint's (id, operator, operands, attributes), the last is the
    result. Without gradients where every leaf is fixed."""

    family: str
    block: Block
    sizes: Sizes
    nodes: Nodes
    compiled: bool = field(default=True)
    """Whether torch.compile is a peer: a product alone is the library's in any case."""

    @property
    def name(self) -> str:
        return f"{self.block.name}_{self.size}"

    @property
    def size(self) -> str:
        return self.block.size_label(self.sizes)

    @property
    def trains(self) -> bool:
        return not all(leaf.fixed for leaf in self.block.leaves)

    @property
    def epilogue(self) -> bool:
        return self.family == PRODUCTS and self.compiled

    def impls(self, cuda: bool) -> tuple[str, ...]:
        """Peers, the quickest to make first."""
        found = [EAGER]
        if self.compiled:
            found.append(COMPILE)
        if self.block.name in LIGER_BLOCKS:
            found.append(LIGER)
        if cuda and self.trains:
            found.append(REDUCE)
        return tuple(found)

    def document(self) -> dict[str, Any]:
        """The blueprint, every size a number."""
        leaves = {
            x.name: {"dtype": x.dtype, "shape": list(x.dims(self.sizes))} for x in self.block.leaves
        }  # fmt: skip
        nodes = [
            {"id": name, "op": op, "inputs": list(given), **({"attrs": dict(attrs)} if attrs else {})}
            for name, op, given, attrs in self.nodes
        ]
        return {
            "format": "esper-blueprint/1", "name": self.name, "inputs": leaves, "nodes": nodes,
            "outputs": [self.nodes[-1][0]],
            "differentiable": [x.name for x in self.block.leaves if not x.fixed],
            "metadata": {"description": f"{self.block.name} at {self.size}"},
        }  # fmt: skip

    def text(self) -> bytes:
        return json.dumps(self.document()).encode()


_TURNED: Mapping[str, Any] = {"dims": [1, 0]}
Made = tuple[str, Callable[..., Tensor], tuple[Leaf, ...], Nodes]


def _square(name: str, shape: tuple[str, str] = ("n", "n"), std: float = 1.0) -> Leaf:
    return Leaf(name, shape, std, fixed=True)


_A, _B = _square("a"), _square("b", std=0.02)
_ALONE: tuple[Made, ...] = (
    ("matmul_nn", lambda a, b: a @ b, (_A, _B), (("y", "matmul", ("a", "b"), {}),)),
    ("matmul_nt", lambda a, b: a @ b.t(), (_A, _B),
     (("t", "permute", ("b",), _TURNED), ("y", "matmul", ("a", "t"), {}))),
    ("matmul_tn", lambda a, b: a.t() @ b, (_A, _B),
     (("t", "permute", ("a",), _TURNED), ("y", "matmul", ("t", "b"), {}))),
)  # fmt: skip
_EPILOGUES: tuple[Made, ...] = (
    ("matmul_bias_gelu", lambda a, b, c: F.gelu(a @ b + c), (_A, _B, Leaf("c", ("n",), fixed=True)),
     (("u", "matmul", ("a", "b"), {}), ("v", "add", ("u", "c"), {}), ("y", "gelu", ("v",), {}))),
    ("matmul_residual", lambda a, b, r: r + a @ b, (_A, _B, _square("r")),
     (("u", "matmul", ("a", "b"), {}), ("y", "add", ("r", "u"), {}))),
)  # fmt: skip


def _products(tiny: bool) -> list[Case]:
    squares = [n // SMALLER for n in SQUARES[:1]] if tiny else SQUARES
    made = []
    for n in squares:
        for compiled, rows in ((False, _ALONE), (True, _EPILOGUES)):
            for name, fn, leaves, nodes in rows:
                sizes = {"m": n, "n": n, "k": n}
                work = Block(name, fn, leaves, (sizes,), ("n", "n"), flops=lambda s: 2.0 * s["n"] ** 3,
                             label=("m", "n", "k"))  # fmt: skip
                made.append(Case(PRODUCTS, work, sizes, nodes, compiled))
    return made


_X = Leaf("x", ("rows", "cols"))


def _mlp(activation: str, rows: int, cols: int, hidden: int) -> Case:
    """linear, activation, linear, with biases, weights as torch keeps them."""
    act = {"gelu": F.gelu, "silu": F.silu}[activation]
    leaves = (
        _X, Leaf("w1", ("hidden", "cols"), cols**-0.5), Leaf("b1", ("hidden",), 0.1),
        Leaf("w2", ("cols", "hidden"), hidden**-0.5), Leaf("b2", ("cols",), 0.1),
    )  # fmt: skip
    nodes = (
        ("u", "linear", ("x", "w1", "b1"), {}), ("h", activation, ("u",), {}),
        ("y", "linear", ("h", "w2", "b2"), {}),
    )  # fmt: skip
    sizes = {"rows": rows, "cols": cols, "hidden": hidden}
    work = Block(
        f"mlp_{activation}", lambda x, w1, b1, w2, b2: F.linear(act(F.linear(x, w1, b1)), w2, b2), leaves,
        (sizes,), ("rows", "cols"), flops=lambda s: 4.0 * s["rows"] * s["cols"] * s["hidden"],
    )  # fmt: skip
    return Case(SMALL, work, sizes, nodes)


def _lora(rows: int, cols: int, rank: int) -> Case:
    leaves = (_X, Leaf("a", ("cols", "rank"), 0.02), Leaf("b", ("rank", "cols"), 0.02))
    nodes = (
        ("u", "matmul", ("x", "a"), {}), ("v", "matmul", ("u", "b"), {}), ("s", "mul", ("v", 0.5), {}),
        ("y", "add", ("x", "s"), {}),
    )  # fmt: skip
    sizes = {"rows": rows, "cols": cols, "rank": rank}
    work = Block(
        "lora", lambda x, a, b: x + 0.5 * ((x @ a) @ b), leaves, (sizes,), ("rows", "cols"),
        flops=lambda s: 4.0 * s["rows"] * s["cols"] * s["rank"],
    )  # fmt: skip
    return Case(SMALL, work, sizes, nodes)


def _small(tiny: bool) -> list[Case]:
    widths, rows = (WIDTHS[:1], (16,)) if tiny else (WIDTHS, ROWS)
    made = [_mlp("gelu", m, n, 4 * n) for n in widths for m in rows]
    made += [_mlp("silu", m, n, 2 * n) for n in widths for m in rows[len(rows) // 2 :][:1]]
    pairs = ((16, 64),) if tiny else LORA_SIZES
    return made + [_lora(m, n, rank) for m, n in pairs for rank in (RANKS[:1] if tiny else RANKS)]


def gated_hidden(width: int) -> int:
    """Llama's rule: two thirds of four widths, rounded up to a multiple of 256 (4096 gives 11008)."""
    return -(-(8 * width // 3) // 256) * 256


def _gated(rows: int, width: int) -> Case:
    up = [Leaf(name, ("cols", "hidden"), width**-0.5) for name in ("wg", "wu")]
    leaves = (_X, *up, Leaf("wd", ("hidden", "cols"), gated_hidden(width) ** -0.5))
    nodes = (
        ("g", "matmul", ("x", "wg"), {}), ("u", "matmul", ("x", "wu"), {}), ("s", "silu", ("g",), {}),
        ("h", "mul", ("s", "u"), {}), ("y", "matmul", ("h", "wd"), {}),
    )  # fmt: skip
    sizes = {"rows": rows, "cols": width, "hidden": gated_hidden(width)}
    work = Block(
        "swiglu", lambda x, wg, wu, wd: (F.silu(x @ wg) * (x @ wu)) @ wd, leaves, (sizes,), ("rows", "cols"),
        flops=lambda s: 6.0 * s["rows"] * s["cols"] * s["hidden"],
    )  # fmt: skip
    return Case(SWIGLU, work, sizes, nodes)


def _swiglu(tiny: bool) -> list[Case]:
    if tiny:
        return [_gated(16, 64)]
    return [_gated(rows, width) for width in GATED for rows in GATED_ROWS]


def cases(only: Sequence[str] = (), tiny: bool = False) -> list[Case]:
    """All, or those with one of these words in the names of their family and of themselves."""
    made = [*_products(tiny), *_small(tiny), *_swiglu(tiny)]
    return [c for c in made if not only or any(w in f"{c.family} {c.name}" for w in only)]
