"""Tests generated from the operator records: type, gradient, text, expansion and scalar body of every
sample.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from esper_ir.expand import expand
from esper_ir.grad import joint
from esper_ir.graph import Blueprint, Graph, Leaf, Node
from esper_ir.graphbuilder import GraphBuilder
from esper_ir.opdef import Composite, NotDifferentiable, OpDef, Pointwise, Sample, compute_dtype
from esper_ir.oracle import classes
from esper_ir.reference import evaluate
from esper_ir.registry import OPS
from esper_ir.text import parse, render
from esper_ir.types import DType, TensorType
from esper_ir.verify import typed
from tests.esper_ir.cases import CASES, graph_of, values_of, whole_graph
from tests.esper_ir.scalars import run_body
from tests.source import ROOT

FLOAT_CONSTANTS = ("celu", "hardsigmoid")  # torch's float64 kernels use constants rounded to float32
ULP = {torch.float64: 2.0**-52, torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


def close(found: torch.Tensor, wanted: torch.Tensor, ulps: float, scale: float = 1.0) -> None:
    """`scale`: size of the operands, whose rounding a difference of them keeps."""
    assert found.dtype == wanted.dtype and found.shape == wanted.shape
    if not wanted.is_floating_point():
        assert torch.equal(found, wanted)
        return
    bound = ulps * ULP[wanted.dtype]
    torch.testing.assert_close(found, wanted, rtol=bound, atol=bound * scale, equal_nan=True)


@pytest.mark.parametrize(("op", "sample"), CASES)
def test_reference_has_the_inferred_type(op: OpDef, sample: Sample) -> None:
    graph = graph_of(op, sample)
    for name, value in evaluate(graph, values_of(graph, sample)).items():
        kind = graph.types[name]
        assert value.dtype == getattr(torch, kind.dtype.value)
        assert list(value.shape) == [d.value({}) for d in kind.shape]
        assert not value.is_floating_point() or op.name in ("var", "std") or torch.isfinite(value).all()


@pytest.mark.parametrize(("op", "sample"), CASES)
def test_gradient_is_that_of_autograd(op: OpDef, sample: Sample) -> None:
    graph = graph_of(op, sample)
    assert (gradient_agrees(op, graph, values_of(graph, sample)) > 0) == differentiable(op, graph)


INSIDE = {"binary_cross_entropy": "of probabilities", "kl_div": "NaN in torch for a target of 0"}
EACH = {f"{o.name}-{s.attrs}": (o, s) for o in OPS.values() if o.name not in INSIDE for s in o.samples[::-1]}


@pytest.mark.parametrize("key", EACH)
def test_gradient_at_ties_and_kinks(key: str) -> None:
    """Of operands with few values, which are equal to each other and to bounds."""
    op, sample = EACH[key]
    graph = graph_of(op, sample)
    few = torch.tensor([0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 2.0, 3.0], dtype=torch.float64)
    few = few.abs() if sample.low >= 0 else few
    generator = torch.Generator().manual_seed(0)
    values = values_of(graph, sample)
    for name, value in values.items():
        if value.is_floating_point():
            values[name] = few[torch.randint(len(few), value.shape, generator=generator)]
    assert (gradient_agrees(op, graph, values) > 0) == differentiable(op, graph)


EXTREMA = [
    o
    for o in OPS.values()
    if any(part in o.name.split("_") for part in ("max", "amax", "amin", "cummax", "cummin"))
    and not isinstance(o.vjp, NotDifferentiable)
]


@pytest.mark.parametrize("op", EXTREMA, ids=lambda o: o.name)
def test_gradient_of_extrema_of_nan(op: OpDef) -> None:
    compared = 0
    for sample in op.samples:
        graph = graph_of(op, sample)
        values = values_of(graph, sample)
        for value in values.values():
            if value.is_floating_point() and value.numel():
                value.view(-1)[:: max(2, value.numel() // 3)] = math.nan
        compared += gradient_agrees(op, graph, values)
    assert compared > 0


def differentiable(op: OpDef, graph: Graph) -> bool:
    """Whether there is a gradient to ask for; an operator without one says why."""
    if isinstance(op.vjp, NotDifferentiable):
        assert op.vjp.reason
        return False
    return graph.types["y"].dtype.is_floating and any(t.dtype.is_floating for t in graph.inputs.values())


def gradient_agrees(op: OpDef, graph: Graph, values: dict[str, torch.Tensor]) -> int:
    """In float64, for a random cotangent: of so many operands, none where nothing is differentiable."""
    wanted = [n for n, t in graph.inputs.items() if t.dtype.is_floating]
    if not differentiable(op, graph):
        return 0
    both = joint(graph, wanted)
    assert all(both.graph.types[g] == graph.inputs[n] for n, g in both.gradients.items() if g)
    values = {n: v.double() if v.is_floating_point() else v for n, v in values.items()}
    leaves = {n: values[n].clone().requires_grad_() for n in wanted}
    out = evaluate(graph, {**values, **leaves}, precision="float64")["y"]
    seed = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    if not out.requires_grad:
        assert not any(both.gradients.values())
        return len(wanted)
    expected = torch.autograd.grad(out, list(leaves.values()), seed, allow_unused=True)
    found = evaluate(both.graph, {**values, "grad:y": seed}, precision="float64")
    for name, want in zip(wanted, expected, strict=True):
        got = found[g] if (g := both.gradients[name]) else torch.zeros_like(values[name])
        want = torch.zeros_like(values[name]) if want is None else want
        bound = 1e-7 if op.name in FLOAT_CONSTANTS else 1e-9
        torch.testing.assert_close(got, want, rtol=bound, atol=bound, equal_nan=True)
    return len(wanted)


SEVERAL = [
    pytest.param(op, s, id=f"{op.name}-{i}")
    for op in OPS.values()
    for i, s in enumerate(op.samples)
    if len(whole_graph(op, s).outputs) > 1
]


@pytest.mark.parametrize(("op", "sample"), SEVERAL)
def test_every_output_and_its_gradient(op: OpDef, sample: Sample) -> None:
    """Operators with several results: each is that of the expansion, and all cotangents count."""
    graph = whole_graph(op, sample)
    values = {n: v.double() if v.is_floating_point() else v for n, v in values_of(graph, sample).items()}
    leaves = {n: v.clone().requires_grad_(v.is_floating_point()) for n, v in values.items()}
    outs = evaluate(graph, leaves, precision="float64")
    flat = evaluate(expand(graph), values, precision="float64")
    for name, value in outs.items():
        torch.testing.assert_close(flat[name], value.detach(), rtol=1e-9, atol=1e-9)
    roots = [n for n, v in outs.items() if v.requires_grad and n not in UNGRADED.get(op.name, ())]
    wanted = [n for n, v in leaves.items() if v.requires_grad]
    if not roots or isinstance(op.vjp, NotDifferentiable):
        return
    graph = whole_graph(op, sample, tuple(roots))
    both = joint(graph, wanted)
    generator = torch.Generator().manual_seed(2)
    seeds = [torch.randn(outs[n].shape, dtype=torch.float64, generator=generator) for n in roots]
    expected = torch.autograd.grad([outs[n] for n in roots], [leaves[n] for n in wanted], seeds)
    given = {**values, **{both.cotangents[n]: s for n, s in zip(roots, seeds, strict=True)}}
    found = evaluate(both.graph, given, precision="float64")
    for name, want in zip(wanted, expected, strict=True):
        label = both.gradients[name]
        assert label is not None
        torch.testing.assert_close(found[label], want, rtol=1e-9, atol=1e-9)


UNGRADED = {"attention": ("y.1",)}
"""Outputs without a gradient: the logarithm of the sum of exponentials."""


@pytest.mark.parametrize(
    "op", [o for o in OPS.values() if isinstance(o.lowering, Composite)], ids=lambda o: o.name
)
def test_expansion_means_the_same(op: OpDef) -> None:
    for sample in op.samples:
        graph = graph_of(op, sample)
        flat = expand(graph)
        assert not any(isinstance(OPS[n.op].lowering, Composite) for n in flat)
        assert flat.outputs == graph.outputs and flat.types["y"] == graph.types["y"]
        values = values_of(graph, sample)
        close(
            evaluate(flat, values)["y"],
            evaluate(graph, values)["y"],
            64 if any(t.dtype.is_floating for t in graph.inputs.values()) else 0,
        )
        wide = [evaluate(g, values, precision="float64")["y"] for g in (flat, graph)]
        torch.testing.assert_close(*wide, rtol=1e-11, atol=1e-11, equal_nan=True)


@pytest.mark.parametrize(
    "op", [o for o in OPS.values() if isinstance(o.lowering, Pointwise)], ids=lambda o: o.name
)
def test_body_means_the_same(op: OpDef) -> None:
    assert isinstance(op.lowering, Pointwise)
    for sample in op.samples:
        graph = graph_of(op, sample)
        (node,) = graph.nodes
        values = values_of(graph, sample)
        operands = [values[r] if isinstance(r, str) else r for r in node.inputs]
        compute = compute_dtype(
            [graph.types[r] if isinstance(r, str) else r for r in node.inputs], node.types
        )
        expr = op.lowering.body(dict(node.attrs))
        got = run_body(expr, operands, None if op.name == "cast" else compute)
        want = evaluate(graph, values)["y"]
        got = got.to(want.dtype).expand(want.shape)
        close(
            got,
            want,
            (4 if want.dtype in (torch.float32, torch.float64) else 1) * op.tolerance.factor,
            max(1.0, sample.high),
        )


@pytest.mark.parametrize("op", OPS.values(), ids=lambda o: o.name)
def test_text_round_trip(op: OpDef) -> None:
    for sample in op.samples:
        graph = graph_of(op, sample)
        leaves = tuple(Leaf(n, "input", t) for n, t in graph.inputs.items())
        attrs = tuple(sorted(sample.attrs.items()))
        nodes = (Node("y", op.name, graph.nodes[0].inputs, attrs),)
        bp = Blueprint(op.name, leaves, nodes, ("y",))
        again = parse(render(bp))
        assert again == bp and render(again) == render(bp)
        assert typed(again).types == graph.types


@pytest.mark.parametrize("op", OPS.values(), ids=lambda o: o.name)
def test_record_is_whole(op: OpDef) -> None:
    assert op.doc and op.samples and op.cost is not None
    graph: Graph = graph_of(op, op.samples[0])
    (node,) = graph.nodes
    operands = [graph.types[r] if isinstance(r, str) else r for r in node.inputs]
    assert op.cost(operands, node.types, dict(node.attrs)).value({}) >= 0
    for attr in op.params:
        assert attr.kind in ("int", "float", "bool", "str", "dtype", "ints", "shape", "number", "scalar")
    assert op.tolerance.factor == 1.0 or op.tolerance.reason
    kinds = {t.dtype for s in op.samples for t in s.operands if hasattr(t, "dtype")}
    whole = isinstance(op.vjp, NotDifferentiable) and "whole numbers" in op.vjp.reason
    positions = [DType.int64] if op.indices or op.attr("offset") or whole else []
    allowed = {DType.float32, DType.bfloat16, DType.bool, *positions}
    assert not op.arity[0] or allowed & kinds


def special_values(dtype: DType) -> torch.Tensor:
    kind = getattr(torch, dtype.value)
    info = torch.finfo(kind)
    rows = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0, 0.5, 3.0, -3.0, 20.5, -20.5, 100.0, -100.0]
    return torch.tensor([*rows, info.max, -info.max, info.tiny], dtype=kind)


UNARY = [
    o for o in OPS.values() if isinstance(o.lowering, Pointwise) and o.arity == (1, 1) and o.name != "cast"
]


@pytest.mark.parametrize("op", UNARY, ids=lambda o: o.name)
def test_special_values_of_one_operand(op: OpDef) -> None:
    x = special_values(DType.float32)
    builder = GraphBuilder({"a0": TensorType.of("float32", x.shape)})
    for attrs in {str(s.attrs): s.attrs for s in op.samples}.values():
        graph = builder.graph([builder(op.name, builder.value("a0"), **attrs)])
        want = evaluate(graph, {"a0": x})[graph.outputs[0]]
        assert isinstance(op.lowering, Pointwise)
        got = run_body(op.lowering.body(dict(graph.nodes[-1].attrs)), [x], DType.float32).to(want.dtype)
        wide = evaluate(graph, {"a0": x}, precision="float64")[graph.outputs[0]].to(want.dtype)
        # gelu(inf) is NaN in torch's float32 CPU kernel, inf in float64 and on CUDA: either is right.
        sure = classes(wide) == classes(want) if want.is_floating_point() else torch.ones_like(want)
        close(got[sure], want[sure], 8 * op.tolerance.factor)


BINARY = [
    o
    for o in OPS.values()
    if isinstance(o.lowering, Pointwise) and o.arity == (2, 2) and not o.name.startswith(("bitwise", "int_"))
]


@pytest.mark.parametrize("op", BINARY, ids=lambda o: o.name)
def test_special_values_of_two_operands(op: OpDef) -> None:
    one = special_values(DType.float32)
    x, y = (t.flatten() for t in torch.meshgrid(one, one, indexing="ij"))
    kind = TensorType.of("float32", x.shape)
    builder = GraphBuilder({"a0": kind, "a1": kind})
    graph = builder.graph([builder(op.name, builder.value("a0"), builder.value("a1"))])
    want = evaluate(graph, {"a0": x, "a1": y})[graph.outputs[0]]
    assert isinstance(op.lowering, Pointwise)
    got = run_body(op.lowering.body(dict(graph.nodes[-1].attrs)), [x, y], DType.float32).to(want.dtype)
    close(got, want, 8 * op.tolerance.factor)


APART = {"softsign": math.inf, "remainder": math.inf, "acosh": 1.0, "logit": 0.0}
"""Sizes at which the gradient depends on the form of the formula."""


@pytest.mark.parametrize("op", [*UNARY, *BINARY], ids=lambda o: o.name)
def test_gradient_at_special_values(op: OpDef) -> None:
    """Of NaN, infinities, ties and bounds. One element at a time: the vectors of torch's CPU kernels compare
    otherwise for NaN here and there than that and its kernels on cards."""
    bounds = {float(v) for s in op.samples for v in s.attrs.values() if isinstance(v, (int, float))}
    one = torch.tensor([*special_values(DType.float64)[:14].tolist(), -0.5, 6.0, *sorted(bounds)]).double()
    one = one[one.abs() != APART.get(op.name, math.nan)]
    many = op.arity[0]
    rows = torch.cartesian_prod(*[one] * many).reshape(-1, many, 1)
    for attrs in {str(s.attrs): s.attrs for s in op.samples}.values():
        graph = graph_of(op, Sample((TensorType.of("float32", (1,)),) * many, attrs))
        for row in rows:
            compared = gradient_agrees(op, graph, dict(zip(graph.inputs, row, strict=True)))
            assert (compared > 0) == differentiable(op, graph)


ROWS = (
    "softmax",
    "log_softmax",
    "logsumexp",
    "rms_norm",
    "layer_norm",
    "amax",
    "amin",
    "sum",
    "mean",
    "prod",
)


@pytest.mark.parametrize("name", ROWS)
def test_special_rows(name: str) -> None:
    """Rows with NaN, one infinity, both, only infinities: the expansion has them where torch has."""
    inf, nan = math.inf, math.nan
    x = torch.tensor(
        [[1.0, nan, 2.0], [inf, 1.0, 2.0], [-inf, 1.0, 2.0], [inf, -inf, 0.0], [-inf] * 3, [inf] * 3]
    )
    builder = GraphBuilder({"a0": TensorType.of("float32", x.shape)})
    params = (
        {"dim": -1} if OPS[name].attr("dim") else {"dims": (1,)} if OPS[name].attr("dims") else {"eps": 1e-6}
    )
    graph = builder.graph([builder(name, builder.value("a0"), **params)])
    want = evaluate(graph, {"a0": x})[graph.outputs[0]]
    assert bool(want.isnan().any()), "of these rows some are undefined for every operator"
    close(evaluate(expand(graph), {"a0": x})[graph.outputs[0]], want, 8)


def test_the_language_is_imported_quickly_and_without_torch(tmp_path: Path) -> None:
    """In time of the process at the reference's pace, its byte code there as after an installation."""
    code = (
        "import time; t = time.process_time()\n"
        "import esper_ir.builder, esper_ir.canonical, esper_ir.grad, esper_ir.text, esper_ir.verify\n"
        "t = time.process_time() - t; import sys; from tests.pace import slowness\n"
        "print(t / slowness(), 'torch' in sys.modules, 'networkx' in sys.modules)"
    )
    found = []
    around = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    around["PYTHONPYCACHEPREFIX"] = str(tmp_path)
    for _ in range(4):
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=around)
        seconds, *heavy = done.stdout.split()
        assert heavy == ["False", "False"], done
        found.append(float(seconds))
    assert min(found) < 0.150, found
