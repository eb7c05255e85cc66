"""Which nodes share a kernel, what is kept for the backward, and how values are seen through views."""

from __future__ import annotations

from pathlib import Path

import pytest

import esper_ir.text as text
from esper_ir.builder import Builder
from esper_ir.diagnostics import Rejected
from esper_ir.graphbuilder import GraphBuilder
from esper_ir.types import Dim, DimSpec, DType, TensorType
from forge.fuse import Fuser
from forge.groups import Matcher
from forge.lower import PhaseLowering
from forge.partition import partition
from forge.plan import JoinedTile, KernelPlan, MatmulTile, RowTile, SumTile
from forge.service import front
from forge.target import resolve
from forge.templates import chain
from forge.views import View, dense_strides, is_dense, views
from forge.work import Work
from library.launch import KernelStep
from tests.forge.whole import check

F, B = DType.float32, DType.bfloat16
ROWS = {"rows": DimSpec(1, 4096, (64,), 1)}
H100 = resolve("h100")


def builder(**shapes: tuple[DType, list[int | str]]) -> GraphBuilder:
    return GraphBuilder({n: TensorType.of(d, s) for n, (d, s) in shapes.items()}, ROWS)


def example(name: str, target: str = "h100") -> Work:
    return front(text.load(Path(__file__).parents[2] / "examples" / f"{name}.json"), target)


def phase(work: Work, name: str, wanted: int = -1) -> PhaseLowering:
    """The plan of a phase; of the backward the one with the most gradients."""
    found = [low for low in work.lowerings if low.phase.name == name]
    return max(found, key=lambda low: len(low.phase.wanted))


def plans(work: Work, low: PhaseLowering) -> list[KernelPlan]:
    """Kernel of every step, in order; a library call counts as None."""
    known = {s.plan.name: s.plan for s in work.kernels.by_key.values()}
    steps = [s for s in low.plan.steps if isinstance(s, KernelStep)]
    assert len(steps) == len(low.plan.steps), "a library call among the steps"
    return [known[s.variants[-1].kernel] for s in steps]


# Views --------------------------------------------------------------------------------------------


def strides(view: View) -> list[str]:
    return [str(s) for s in view.strides]


def test_movement_is_strides() -> None:
    b = builder(x=(F, ["rows", 4, 1, 6]), v=(F, [6]))
    p = b("permute", b.value("x"), dims=(1, 0, 3, 2))
    e = b("expand", b.value("v"), shape=(Dim.sym("rows"), 6))
    r = b("reshape", b.value("x"), shape=(Dim.sym("rows"), 24))
    q = b("reshape", p, shape=(4, Dim.sym("rows"), 6))
    s = b("reshape", p, shape=(Dim.sym("rows") * 4, 6))
    known = views(b.graph([p, e, r, q, s]))
    assert strides(known["x"]) == ["24", "6", "0", "1"] and is_dense(known["x"])
    assert strides(known[p.name]) == ["6", "24", "1", "0"] and known[p.name].base == "x"
    assert strides(known[e.name]) == ["0", "1"] and known[e.name].base == "v"
    assert strides(known[r.name]) == ["24", "1"] and known[r.name].base == "x"
    assert strides(known[q.name]) == ["6", "24", "1"] and known[q.name].base == "x", "only a 1 came and went"
    assert known[s.name].base == s.name, "axes of permuted memory merge in a copy only"
    assert [str(d) for d in dense_strides((Dim.of(2), Dim.of(1), Dim.of(3)))] == ["3", "0", "1"]


# Groups -------------------------------------------------------------------------------------------


def groups(b: GraphBuilder, *outputs: object) -> list[set[str]]:
    """Operators of each group."""
    made = partition(b.graph(list(outputs)), H100)  # type: ignore[arg-type]
    return [{n.op for n in g.nodes} for g in made.groups]


def test_pointwise_work_around_a_row_reduction_is_one_group() -> None:
    b = builder(x=(F, ["rows", 8]), w=(F, [8]))
    x = b.value("x")
    mean = b("mean", b("mul", x, x), dims=(1,), keepdim=True)
    y = b("mul", b("mul", x, b("rsqrt", b("add", mean, 1e-6))), b.value("w"))
    assert groups(b, y) == [{"mul", "mean", "add", "rsqrt"}]


def test_work_on_a_finished_column_is_in_the_second_stage_and_nothing_else_is() -> None:
    b = builder(x=(F, ["rows", 8]))
    x = b.value("x")
    total = b("sum", x, dims=(0,), keepdim=False)
    half = b("cast", total, dtype=B)
    back = b("mul", x, total)
    made = groups(b, half, back)
    assert {"sum", "cast"} in made and {"mul"} in made and len(made) == 2


def test_two_products_are_two_groups_and_an_epilogue_joins_its_own() -> None:
    b = builder(x=(B, ["rows", 16]), w=(B, [16, 16]), v=(B, [16, 16]))
    first = b("relu", b("matmul", b.value("x"), b.value("w")))
    second = b("add", b("matmul", first, b.value("v")), b.value("x"))
    assert groups(b, second) == [{"matmul", "relu"}, {"matmul", "add"}]


def test_float32_products_are_library_calls_that_nothing_joins() -> None:
    b = builder(x=(F, ["rows", 16]), w=(F, [16, 16]))
    y = b("relu", b("matmul", b.value("x"), b.value("w")))
    made = partition(b.graph([y]), H100)
    assert [{n.op for n in g.nodes} for g in made.groups] == [{"matmul"}, {"relu"}]
    assert len(made.externs) == 1 and any(r.why.code == "dtype" for r in made.refusals)


def test_a_node_between_two_groups_keeps_them_apart() -> None:
    """max -> product -> subtract: joining the first and the last would need the product before it is
    there.
    """
    b = builder(x=(F, ["rows", 16]), w=(F, [16, 16]))
    x = b.value("x")
    top = b("sub", x, b("amax", x, dims=(1,), keepdim=True))
    y = b("sub", b("matmul", top, b.value("w")), top)
    made = partition(b.graph([y]), H100)
    assert len(made.groups) == 3 and made.groups[1].contraction is not None
    known = dict(views(made.graph))
    assert len(Fuser(Matcher(made.graph), known, made.externs).fuse(made.groups)) == 3


def test_groups_come_in_an_order_in_which_they_can_run() -> None:
    work = example("small_mlp")
    for low in work.lowerings:
        made: set[str] = set(low.parts.graph.inputs)
        for group in low.parts.groups:
            own = group.values()
            reads = {low.parts.views[v].base for n in group.nodes for v in n.tensors} - own
            creations = {n.id for n in low.parts.graph if n.op == "full"}
            assert reads - creations <= made, (group.name, reads - made)
            made |= own


# The examples -------------------------------------------------------------------------------------


def test_norm_of_a_sum_forward_is_one_kernel() -> None:
    work = example("rmsnorm_residual")
    for name in ("forward", "inference"):
        (plan,) = plans(work, phase(work, name))
        assert isinstance(plan.tile, RowTile) and plan.tile.block_cols == 4096


def test_norm_of_a_sum_backward_is_one_kernel_and_one_ordered_sum() -> None:
    work = example("rmsnorm_residual")
    low = phase(work, "backward")
    first, second = plans(work, low)
    assert isinstance(first.tile, RowTile) and isinstance(second.tile, SumTile)
    numbers = dict(zip(low.plan.wanted, low.plan.gradients, strict=True))
    assert numbers["x"] == numbers["r"] != numbers["w"], "the gradients of both summands are one value"
    stored = [second.accesses[s.access] for s in second.body if type(s).__name__ == "Store"]
    assert [a.dtype for a in stored] == [B], "the rounding of the column sum is folded into the second stage"


def test_norm_keeps_one_number_a_row() -> None:
    work = example("rmsnorm_residual")
    types = work.joint.graph.types if work.joint else {}
    kept = [n for n in work.saved if n not in ("x", "r", "w")]
    assert [types[n].shape[-1] for n in kept] == [Dim.of(1)] and len(kept) == 1


@pytest.mark.parametrize(("most", "kernels"), [(64, 1), (1 << 20, 2)])
def test_few_rows_are_added_in_one_kernel(most: int, kernels: int) -> None:
    """A mean, a sum in a narrower type and an extremum; many rows leave partial rows first, and both operands
    are read beside each other.
    """
    b = Builder("few")
    b.dim("rows", max=most, tune=(min(most, 4096),))
    x, y = b.input("x", "float32", ["rows", 5, 8]), b.input("y", "bfloat16", ["rows", 5, 8])
    outs = [b.mean(x, dims=[0]), b.sum(y, dims=[0]), b.op("amax", x, dims=[0])]
    work = check(b.build(*outs, differentiable=[]), {"rows": 37}, "h100")
    (low,) = work.lowerings
    assert len(low.plan.steps) == kernels


def test_products_in_a_row_are_one_kernel_forward_and_backward() -> None:
    work = example("small_mlp")
    for name in ("inference", "forward"):
        (only,) = plans(work, phase(work, name))
        assert only.chain is not None and only.chain.head.matmul is not None
    made = plans(work, phase(work, "backward"))
    chains = [p for p in made if p.chain is not None]
    weights = [q for p in made for q in (p.tile.parts if isinstance(p.tile, JoinedTile) else (p,))]
    split = {p.tile.split_k > 1 for p in weights if isinstance(p.tile, MatmulTile)}
    assert len(chains) == 1 and sum(isinstance(p.tile, MatmulTile) for p in weights) == 2
    assert len(made) == 2 + any(split), "both gradients beside each other, and their second stages"
    assert "erf" in str(chains[0].chain), "gelu' is computed where its cotangent is made"


def refusal(**sizes: int) -> str:
    """Why x [rows, k] a [k, r] b [r, n] stays two products; empty when it is a chain."""
    b = builder(x=(B, ["rows", sizes["k"]]), a=(B, [sizes["k"], sizes["r"]]), b=(B, [sizes["r"], sizes["n"]]))
    u = b("matmul", b.value("x"), b.value("a"))
    graph = b.graph({"y": b("matmul", u, b.value("b"))})
    first, second = graph.nodes
    found = chain._fits(first, second, graph, H100)
    assert (chain.candidates(graph, dict(views(graph)), H100) == {}) == isinstance(found, Rejected)
    return found.code if isinstance(found, Rejected) else ""


def test_a_chain_needs_a_narrow_value_and_small_weights() -> None:
    assert refusal(k=64, r=256, n=64) == refusal(k=4096, r=16, n=4096) == ""
    assert refusal(k=64, r=257, n=64) == refusal(k=4096, r=64, n=4096) == "size"


def test_a_chain_does_not_skip_what_stands_between() -> None:
    """b reads what a third group makes of the narrow value: the products stay apart."""
    b = builder(x=(B, ["rows", 16]), a=(B, [16, 16]), w=(B, [16, 16]))
    u = b("matmul", b.value("x"), b.value("a"))
    v = b("matmul", u, b.value("w"))
    scale = b("amax", u, dims=(0,), keepdim=True)
    graph = b.graph({"y": b("mul", v, scale)})
    parts = partition(graph, H100)
    pairs = chain.candidates(graph, parts.views, H100)
    assert pairs and not any(g.chain for g in chain.merged(parts.groups, pairs, parts.views))


def test_mlp_keeps_no_view_and_no_activation() -> None:
    work = example("small_mlp")
    assert "h" not in work.saved and set(work.saved) <= {"x", "w1", "w2", "u"}


@pytest.mark.parametrize("name", ["rmsnorm_residual", "small_mlp", "digits_block"])
def test_saved_values_are_leaves_or_results_with_memory(name: str) -> None:
    work = example(name)
    assert work.joint is not None
    known = views(work.joint.graph)
    assert work.saved and all(known[s].base == s for s in work.saved)
    backward = [low for low in work.lowerings if low.phase.name == "backward"]
    assert all(set(low.phase.saved) == set(work.saved) for low in backward), "one list for every mask"


def test_the_gradient_of_a_transposed_weight_is_written_once() -> None:
    """A linear layer reads its [out, in] weight turned over; no kernel turns the gradient back."""
    b = Builder("linear")
    b.dim("rows", max=64, tune=(64,))
    x, w = b.input("x", B, ["rows", 24]), b.param("w", B, [40, 24])
    work = check(b.build(b.relu(b.matmul(x, b.permute(w, dims=(1, 0))))), {"rows": 9}, "h100")
    low = phase(work, "backward")
    products = [n for n in low.parts.graph if n.op == "matmul"]
    assert [n.types[0].shape for n in products if n.id in low.phase.gradients.values()] and len(products) == 2
    assert all(n.op != "cast" for n in low.parts.graph), "nothing is copied"


@pytest.mark.parametrize("target", ["h100", "cpu"])
def test_a_result_that_is_the_last_value_in_another_shape_is_stored_once(target: str) -> None:
    b = Builder("reshaped")
    b.dim("rows", max=64, tune=(64,))
    x = b.input("x", F, ["rows", 4, 16])
    y = b.avg_pool1d(x, kernel=[3], stride=[1], padding=[1])  # of images with one line
    work = check(b.build(y), {"rows": 5}, target)
    for low in work.lowerings:
        for step in low.plan.steps:
            assert isinstance(step, KernelStep)
            places = [a.value for a in step.args if a.kind == "buffer"]
            assert len(places) == len(set(places)), (low.plan.phase, places)


@pytest.mark.parametrize("order", [(0, 1), (1, 0), (1, 2), (2, 1, 0)], ids=str)
@pytest.mark.parametrize("target", ["h100", "cpu"])
def test_one_value_in_several_shapes_is_every_result(target: str, order: tuple[int, ...]) -> None:
    b = Builder("reshaped")
    b.dim("rows", max=64, tune=(64,))
    x = b.input("x", F, ["rows", 4, 16])
    y = b.avg_pool1d(x, kernel=[3], stride=[1], padding=[1])
    shapes = (y, b.reshape(y, shape=["rows", 64]), b.reshape(y, shape=["rows", 2, 32]))
    check(b.build(*(shapes[at] for at in order)), {"rows": 5}, target)
