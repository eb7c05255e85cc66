"""Reverse mode over whole graphs."""

from __future__ import annotations

import pytest
import torch

from esper_ir.builder import Builder, Value
from esper_ir.diagnostics import EsperError
from esper_ir.expand import expand
from esper_ir.grad import Joint, joint
from esper_ir.graph import Blueprint
from esper_ir.reference import evaluate
from esper_ir.text import load
from esper_ir.types import DType, TensorType
from esper_ir.verify import typed
from tests.source import ROOT


def f32(b: Builder, name: str, *shape: int | str) -> Value:
    return b.input(name, "float32", list(shape))


def check(bp: Blueprint, rows: int = 5, wanted: tuple[str, ...] = (), flat: bool = False) -> Joint:
    """Gradients in float64 equal torch's autograd through the reference."""
    graph = typed(bp)
    names = wanted or tuple(graph.inputs)
    both = joint(graph, names)
    generator = torch.Generator().manual_seed(0)

    def fill(kind: TensorType) -> torch.Tensor:
        shape = [d.value({"rows": rows}) for d in kind.shape]
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    values = {n: fill(t) for n, t in graph.inputs.items()}
    leaves = {n: v.clone().requires_grad_(n in names) for n, v in values.items()}
    outputs = evaluate(graph, leaves, precision="float64")
    seeds = {n: fill(graph.types[n]) for n in graph.outputs}
    total = sum((outputs[n] * seeds[n]).sum() for n in graph.outputs)
    assert isinstance(total, torch.Tensor)
    expected = torch.autograd.grad(total, [leaves[n] for n in names], allow_unused=True)
    given = {**values, **{both.cotangents[n]: s for n, s in seeds.items()}}
    found = evaluate(expand(both.graph) if flat else both.graph, given, precision="float64")
    for name, want in zip(names, expected, strict=True):
        label = both.gradients[name]
        got = torch.zeros_like(values[name]) if label is None else found[label]
        torch.testing.assert_close(
            got, torch.zeros_like(got) if want is None else want, rtol=1e-10, atol=1e-10
        )
    for name in graph.outputs:
        torch.testing.assert_close(found[name], outputs[name].detach(), rtol=1e-12, atol=1e-12)
    return both


@pytest.mark.parametrize("name", ["rmsnorm_residual", "small_mlp", "digits_block"])
@pytest.mark.parametrize("flat", [False, True])
def test_examples(name: str, flat: bool) -> None:
    both = check(load(ROOT / "examples" / f"{name}.json"), rows=3, flat=flat)
    if name == "rmsnorm_residual":
        assert both.gradients["x"] == both.gradients["r"]
        assert len(both.graph.outputs) == 3


def test_sum_of_two_passes_the_cotangent_on() -> None:
    b = Builder("b")
    b.dim("rows")
    both = check(b.build(f32(b, "x", "rows", 3) + f32(b, "r", "rows", 3)))
    assert both.gradients == {"x": "grad:add", "r": "grad:add"}


def test_uses_add_up_and_unused_is_none() -> None:
    b = Builder("b")
    b.dim("rows")
    x, z = f32(b, "x", "rows", 3), f32(b, "z", 3)
    both = check(b.build(x * x + b.exp(x) * z, b.relu(x)), wanted=("x", "z"))
    assert both.gradients["z"] is not None
    b = Builder("b")
    x, z = f32(b, "x", 3), f32(b, "z", 3)
    both = check(b.build(b.floor(z) * 2.0 if False else b.exp(x), b.neg(z)), wanted=("x",))
    assert set(both.gradients) == {"x"}


def test_symbolic_sizes_in_means() -> None:
    b = Builder("b")
    b.dim("rows")
    x = f32(b, "x", "rows", 3)
    check(b.build(b.mean(x), b.mean(x, dims=[0]), b.var(x, dims=[0]), b.std(x)))


def test_two_outputs_with_one_value() -> None:
    b = Builder("b")
    x = f32(b, "x", 3)
    bp = b.build(b.exp(x, name="a"), b.exp(x, name="c"))
    assert check(bp).graph.outputs[:2] == ("a", "c")
    assert expand(typed(bp)).outputs == ("a", "c")


def test_master_parameter_has_a_master_gradient() -> None:
    b = Builder("b")
    b.dim("rows")
    x = b.input("x", "bfloat16", ["rows", 8])
    w = b.param("w", "float32", [8, 4], compute="bfloat16")
    both = check(b.build(x @ w))
    label = both.gradients["w"]
    assert label is not None and both.graph.types[label].dtype is DType.float32


def test_broadcasting_in_every_position() -> None:
    b = Builder("b")
    b.dim("rows")
    x, col, row, one = f32(b, "x", "rows", 3), f32(b, "col", "rows", 1), f32(b, "row", 3), f32(b, "one")
    check(
        b.build(
            (x * col + row) / (b.exp(one) + 1.0) - one, b.maximum(col, row), b.where(b.gt(col, 0.0), x, one)
        )
    )


def test_no_gradient_on_the_way() -> None:
    b = Builder("b")
    x, g = f32(b, "x", 1, 1, 4, 4), f32(b, "g", 1, 1, 2, 2)
    places = b.many("max_pool2d_with_indices", x, kernel=(2, 2))[1]
    graph = typed(b.build(b.max_pool2d_grad(g, x, places, kernel=(2, 2))))
    with pytest.raises(EsperError) as caught:
        joint(graph, ["g"])
    assert caught.value.code == "E0401" and caught.value.node == "max_pool2d_grad"
    with pytest.raises(EsperError) as caught:
        joint(graph, ["nothing"])
    assert caught.value.code == "E0310"


@pytest.mark.parametrize("op", ["floor", "sign", "detach"])
def test_what_is_constant_passes_zero(op: str) -> None:
    b = Builder("b")
    x, y = f32(b, "x", 3), f32(b, "y", 3)
    both = check(b.build(b.op(op, x) * y + b.exp(b.op(op, y))))
    assert both.gradients["x"] is None and both.gradients["y"] is not None
    assert joint(typed(b.build(b.op(op, x))), ["x"]).gradients == {"x": None}


def test_truth_values_stop_the_gradient() -> None:
    b = Builder("b")
    x, z = f32(b, "x", 3), f32(b, "z", 3)
    both = check(b.build(b.where(b.gt(x, z), z, 0.5)))
    assert both.gradients["x"] is None and both.gradients["z"] is not None


def test_infinite_cotangent_stays_out_of_the_branch_not_taken() -> None:
    b = Builder("b")
    graph = typed(b.build(b.relu(f32(b, "x", 3))))
    both = joint(graph, ["x"])
    values = {"x": torch.tensor([-1.0, 1.0, 0.0]), "grad:relu": torch.full((3,), float("inf"))}
    label = both.gradients["x"]
    assert label is not None
    assert evaluate(both.graph, values)[label].tolist() == [0.0, float("inf"), 0.0]


def test_deep_chain() -> None:
    b = Builder("b")
    v = f32(b, "x", 4)
    for i in range(3000):
        v = b.tanh(v) if i % 2 else v * 1.01
    both = joint(typed(b.build(v)), ["x"])
    assert len(expand(both.graph).nodes) > 6000
