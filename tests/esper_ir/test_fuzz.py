"""Random operands and attributes for every operator: a rule accepts or refuses with a code, and what it
accepts expands, has a gradient or a reason, and gives the types it promised.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from esper_ir.diagnostics import EsperError
from esper_ir.expand import expand
from esper_ir.grad import Joint, joint
from esper_ir.graph import Graph
from esper_ir.graphbuilder import GraphBuilder
from esper_ir.opdef import Attr, NotDifferentiable, OpDef
from esper_ir.oracle import index_limits
from esper_ir.reference import evaluate
from esper_ir.registry import OPS
from esper_ir.types import Dim, DimSpec, DType, TensorType

SIZES: list[int | str] = [0, 1, 2, 3, 3, 4, "n", "n", "m", "2*n", "n+1"]
DTYPES = [DType.float32, DType.float32, DType.float32, DType.bfloat16, DType.float64, DType.int64, DType.bool]
BOUND = {"n": 3, "m": 2}
WINDOWS = ("conv", "max_pool", "avg_pool", "lp_pool")


def random_attr(attr: Attr, rng: random.Random) -> Any:
    if attr.choices and rng.random() < 0.9:
        return rng.choice(attr.choices)
    numbers = [rng.randint(-4, 4), rng.random() * 4 - 2, 0.0, True, 2**62]
    ints = tuple(rng.randint(-3, 3) for _ in range(rng.randint(0, 3)))
    pools: dict[str, list[Any]] = {
        "int": [rng.randint(-4, 4)],
        "float": numbers[:3],
        "number": numbers[:3],
        "scalar": [*numbers[:3], "n", "2*n+1"],
        "bool": [True, False],
        "str": ["none", "tanh", ""],
        "dtype": [d.value for d in DType],
        "ints": [ints, tuple(rng.sample(range(3), 3))],
        "shape": [tuple(rng.choice([*SIZES, -1]) for _ in range(rng.randint(0, 3)))],
    }
    return rng.choice([*pools[attr.kind] * 8, None, *numbers, "x", (1.5,)])


def random_operand(rng: random.Random, like: TensorType | None) -> TensorType | float:
    if rng.random() < 0.08:
        return rng.choice([0, 1, 2.5, True])
    if like is not None and rng.random() < 0.5:
        cut = rng.randint(0, like.rank)
        return TensorType(like.dtype if rng.random() < 0.9 else rng.choice(DTYPES), like.shape[cut:])
    return TensorType.of(rng.choice(DTYPES), [rng.choice(SIZES) for _ in range(rng.randint(0, 4))])


def drawn(op: OpDef, rng: random.Random) -> tuple[list[TensorType | float], dict[str, Any]]:
    """Operands and attributes out of nothing."""
    operands: list[TensorType | float] = []
    first: TensorType | None = None
    for _ in range(rng.randint(*op.arity)):
        operands.append(random_operand(rng, first))
        first = first or (operands[-1] if isinstance(operands[-1], TensorType) else None)
    return operands, {a.name: random_attr(a, rng) for a in op.params if rng.random() < 0.7}


def disturbed(op: OpDef, rng: random.Random) -> tuple[list[TensorType | float], dict[str, Any]]:
    """One of the operator's samples, with a size replaced everywhere, perhaps an operand or an attribute."""
    sample = rng.choice(op.samples)
    sizes = sorted({d.static for t in sample.operands if isinstance(t, TensorType) for d in t.shape} - {None})
    old, new = (Dim.of(rng.choice(sizes)), Dim.of(rng.choice(SIZES))) if sizes else (Dim(), Dim())
    operands: list[TensorType | float] = []
    for t in sample.operands:
        if isinstance(t, TensorType):
            t = TensorType(t.dtype, tuple(new if d == old else d for d in t.shape))
        operands.append(random_operand(rng, None) if rng.random() < 0.05 else t)
    attrs = dict(sample.attrs)
    attrs |= {a.name: random_attr(a, rng) for a in op.params if rng.random() < 0.1}
    return operands, attrs


def attempt(op: OpDef, rng: random.Random) -> Graph | None:
    """The graph of one node, or None when the rule refuses it with a code."""
    operands, attrs = (drawn if rng.random() < 0.7 else disturbed)(op, rng)
    types = {f"a{i}": t for i, t in enumerate(operands) if isinstance(t, TensorType)}
    builder = GraphBuilder(types, {"n": DimSpec(max=8), "m": DimSpec(max=8)})
    given = [builder.value(f"a{i}") if f"a{i}" in types else t for i, t in enumerate(operands)]
    try:
        return builder.graph(builder.emit_named("y", op.name, given, attrs)[:1])  # type: ignore[arg-type]
    except EsperError as error:
        assert error.code[:3] in ("E01", "E02"), error
        return None


def values_of(graph: Graph, rng: random.Random) -> dict[str, torch.Tensor]:
    def tensor(kind: TensorType) -> torch.Tensor:
        shape = [d.value(BOUND) for d in kind.shape]
        generator = torch.Generator().manual_seed(rng.randrange(1000))
        whole = kind.dtype in (DType.int64, DType.int32)
        return (torch.rand(shape, generator=generator) * 0.8 + (1.1 if whole else 0.1)).to(
            getattr(torch, kind.dtype.value)
        )

    return {name: tensor(kind) for name, kind in graph.inputs.items()}


def shapes(graph: Graph) -> list[list[int]]:
    return [[d.value(BOUND) for d in graph.types[n].shape] for n in graph.outputs]


@pytest.mark.parametrize("most", [24, pytest.param(60, marks=pytest.mark.slow)])
@pytest.mark.parametrize("op", OPS.values(), ids=lambda o: o.name)
def test_rules_hold_for_random_operands(op: OpDef, most: int) -> None:
    """`most` graphs that the rule accepts; two fifths of them are computed too."""
    rng = random.Random(op.name)
    accepted = 0
    for _ in range(3000):
        graph = attempt(op, rng)
        if graph is None:
            continue
        if accepted >= most:
            break
        accepted += 1
        flat = expand(graph)
        assert flat.types["y"] == graph.types["y"]
        wanted = [n for n, t in graph.inputs.items() if t.dtype.is_floating]
        both = None
        if wanted and graph.types["y"].dtype.is_floating and not isinstance(op.vjp, NotDifferentiable):
            both = gradients(graph, wanted)
        least = 1 if op.name.startswith(WINDOWS) else 0  # a symbolic image may be smaller than a window
        named = {s for t in graph.types.values() for d in t.shape for s in d.symbols()}
        if (
            accepted > most * 2 // 5
            or named - set(BOUND)
            or any(size < least for shape in shapes(graph) for size in shape)
        ):
            continue
        run(graph, flat, both.graph if both else None, rng)
    assert accepted >= 5, "the random operands never fit: the test says nothing"


def gradients(graph: Graph, wanted: list[str]) -> Joint | None:
    """None where the operator says that it has no gradient for these attributes."""
    try:
        return joint(graph, wanted)
    except EsperError as error:
        if error.code == "E0204" and "no gradient" in error.message:
            return None
        raise


def run(graph: Graph, flat: Graph, both: Graph | None, rng: random.Random) -> None:
    """What was accepted can be computed, with the promised types, in both forms."""
    symbols = {s for t in graph.inputs.values() for d in t.shape if d == Dim.sym(str(d)) for s in d.symbols()}
    needed = {s for t in graph.types.values() for d in t.shape for s in d.symbols()}
    needed |= {s for n in flat.nodes for _, v in n.attrs for d in v_dims(v) for s in d.symbols()}
    if needed - symbols:
        return  # a size that no input gives
    limits = {name: limit.value(BOUND) for name, limit in index_limits(graph).items()}
    values = values_of(graph, rng)
    if any(not limit and values[name].numel() for name, limit in limits.items()):
        return  # positions in nothing
    values |= {name: values[name].clamp(max=limit - 1) for name, limit in limits.items()}
    for one in (graph, flat):
        out = evaluate(one, values)["y"]
        assert out.dtype == getattr(torch, graph.types["y"].dtype.value)
        assert [list(out.shape)] == shapes(graph)
    if both is not None:
        kind = graph.types["y"]
        seed = torch.ones([d.value(BOUND) for d in kind.shape], dtype=getattr(torch, kind.dtype.value))
        for name, value in evaluate(both, {**values, "grad:y": seed}).items():
            assert value.dtype == getattr(torch, both.types[name].dtype.value)


def v_dims(value: Any) -> list[Dim]:
    if isinstance(value, Dim):
        return [value]
    return [d for d in value if isinstance(d, Dim)] if isinstance(value, tuple) else []
