"""A graph as one function: what the reference computes, and one graph under torch.compile."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from esper_ir.diagnostics import EsperError
from esper_ir.eager import to_torch
from esper_ir.graph import Graph, Node
from esper_ir.graphbuilder import GraphBuilder
from esper_ir.infer import infer
from esper_ir.opdef import OpDef, Sample
from esper_ir.ops.rules import torch_dtype
from esper_ir.reference import evaluate
from esper_ir.registry import OPS
from esper_ir.straight import straight
from esper_ir.text import load
from esper_ir.types import Dim, TensorType
from esper_ir.verify import typed

ROOT = Path(__file__).parents[2]
EXAMPLES = ("swiglu", "rmsnorm_residual", "rope_qk_norm", "squeeze_excite", "cross_entropy", "seed_attention")
CLOSE = {"rtol": 2e-2, "atol": 2e-2}


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def _leaves(graph: Graph, scale: int = 1) -> list[Tensor]:
    """Small tensors of the declared types in (0, 1); dims at `scale` times about the least that may be."""
    sizes = {n: -(-max(d.min, 2) // d.multiple_of) * d.multiple_of * scale for n, d in graph.dims.items()}
    return [_tensor([d.value(sizes) for d in t.shape], torch_dtype(t.dtype)) for t in graph.inputs.values()]


def _tensor(shape: list[int], dtype: torch.dtype) -> Tensor:
    return torch.rand(shape).to(dtype) if dtype.is_floating_point else torch.zeros(shape, dtype=dtype)


def _wanted(graph: Graph, leaves: list[Tensor]) -> tuple[Tensor, ...]:
    return tuple(evaluate(graph, dict(zip(graph.inputs, leaves, strict=True))).values())


@pytest.mark.parametrize("name", EXAMPLES)
def test_one_graph_for_all_sizes(name: str) -> None:
    graph = typed(load(ROOT / "examples" / f"{name}.json"))
    call = torch.compile(straight(graph), fullgraph=True, dynamic=True, backend="aot_eager")
    for scale in (2, 3):
        leaves = _leaves(graph, scale)
        torch.testing.assert_close(call(*leaves), _wanted(graph, leaves), **CLOSE)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


def test_a_compiled_twin_is_one_graph_with_its_gradients() -> None:
    twin = to_torch(load(ROOT / "examples" / "digits_block.json"))
    call, found = torch.compile(twin, fullgraph=True, backend="aot_eager"), []
    for fn in (twin, call):
        x = torch.linspace(-1, 1, 320).reshape(5, 64).requires_grad_(True)
        y = fn(x)
        found.append([y, *torch.autograd.grad(y.square().sum(), [x, *twin.parameters()])])
    torch.testing.assert_close(found[0], found[1])
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(call(x), found[0][0])
    with pytest.raises(EsperError, match="not 2"):
        twin(x, x)


def test_narrow_products_are_set_right_around_one_graph() -> None:
    seen: list[str] = []

    def backend(module: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        def run(*values: Tensor) -> Any:
            seen.append(torch.backends.cuda.matmul.fp32_precision)  # type: ignore[attr-defined]
            return module(*values)

        return run

    twin, settings = to_torch(load(ROOT / "examples" / "digits_block.json")), torch.backends.cuda.matmul
    call, x, before = torch.compile(twin, backend=backend), torch.randn(5, 64), settings.fp32_precision
    try:
        for precision in ("ieee", "tf32", "ieee"):
            settings.fp32_precision = precision
            torch.testing.assert_close(call(x), twin(x))
            assert settings.fp32_precision == precision
    finally:
        settings.fp32_precision = before
    assert seen == ["ieee"] * 3


def _single(op: OpDef, sample: Sample) -> Graph:
    attrs, types = infer(op, sample.operands, sample.attrs)
    kinds = {f"x{i}": o for i, o in enumerate(sample.operands) if isinstance(o, TensorType)}
    inputs = tuple(f"x{i}" if f"x{i}" in kinds else o for i, o in enumerate(sample.operands))
    node = Node("y", op.name, inputs, attrs, types)  # type: ignore[arg-type]
    return Graph(kinds, (node,), node.outputs)


def test_every_operator_to_the_bit() -> None:
    for op in OPS.values():
        for sample in op.samples[:3]:
            graph = _single(op, sample)
            leaves = _leaves(graph)
            torch.testing.assert_close(
                straight(graph)(*leaves), _wanted(graph, leaves), rtol=0, atol=0, equal_nan=True, msg=op.name
            )


def test_sizes_that_are_computed_numbers_and_what_has_no_operand() -> None:
    n = Dim.sym("n")
    odd = TensorType.of("float32", ["floordiv(n+1, 2)*3"])
    builder = GraphBuilder({"x": TensorType.of("float32", ["n", "2*n-1"]), "a b'; \n": odd})
    x = builder.value("x")
    filled = builder("full", shape=(n, 2 * n - 1), value=-1.5, dtype="float32")
    y = builder("maximum", builder("reshape", x, shape=(n * (2 * n - 1),)), -math.inf)
    graph = builder.graph({"y": y, "filled": filled})
    run = straight(graph)
    leaves = [torch.randn(5, 9), torch.randn(9)]
    assert all(torch.equal(a, b) for a, b in zip(run(*leaves), _wanted(graph, leaves), strict=True))
    wrong = (
        [torch.randn(5, 8), leaves[1]],
        [torch.randn(5), leaves[1]],
        [leaves[0].double(), leaves[1]],
        [leaves[0], torch.randn(8)],
    )
    for refused in wrong:
        with pytest.raises(EsperError) as caught:
            run(*refused)
        assert caught.value.code == "E0402"


def test_a_twin_is_copied_and_pickled() -> None:
    twin = to_torch(load(ROOT / "examples" / "digits_block.json"))
    x = torch.randn(5, 64)
    for other in (copy.deepcopy(twin), pickle.loads(pickle.dumps(twin))):
        assert torch.equal(other(x), twin(x))
