"""From a blueprint to plans that compute what it means: chosen graphs, and laws over random ones."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from esper_ir.builder import Builder, Value
from esper_ir.diagnostics import EsperError
from esper_ir.graph import Blueprint
from esper_ir.verify import typed
from forge.partition import partition
from forge.service import front
from forge.target import resolve
from tests.forge.dags import blueprint as random_blueprint
from tests.forge.whole import check

F, B = "float32", "bfloat16"
Outputs = tuple[Value, ...]
Make = Callable[[Builder], Outputs]
CASES: dict[str, Make] = {}


def case(make: Make) -> Make:
    CASES[make.__name__] = make
    return make


def made(make: Make) -> Blueprint:
    b = Builder(make.__name__)
    b.dim("rows", min=1, max=65536, tune=(64,))
    return b.build(*make(b))


@case
def rms_residual(b: Builder) -> Outputs:
    h = b.add(b.input("x", B, ["rows", 64]), b.input("r", B, ["rows", 64]))
    return (b.mul(b.rms_norm(h), b.param("w", B, [64])),)


@case
def layer_norm_affine_of_rank_3(b: Builder) -> Outputs:
    x = b.input("x", B, ["rows", 3, 48])
    return (b.layer_norm(x, b.param("w", B, [48]), b.param("c", B, [48]), normalized_shape=[48]),)


@case
def softmaxes(b: Builder) -> Outputs:
    x = b.input("x", F, ["rows", 33])
    return b.softmax(x, dim=-1), b.log_softmax(x, dim=0)


@case
def sums_over_every_choice_of_axes(b: Builder) -> Outputs:
    x = b.exp(b.input("x", F, ["rows", 5, 6]))
    picks = [[0], [1], [2], [0, 1], [0, 2], [1, 2], [0, 1, 2]]
    return tuple(b.sum(x, dims=p) for p in picks)


@case
def sums_of_a_value_in_another_order_of_axes(b: Builder) -> Outputs:
    """Its maker and the sums would share a kernel whose columns lie in the maker's order."""
    y = b.sin(b.input("x", F, ["rows", 2, 13]))
    turned = b.permute(y, dims=[0, 2, 1])
    return y, b.sum(turned, dims=[0]), b.amax(turned, dims=[0], keepdim=True), b.var(turned, dims=[0])


@case
def extremes_over_every_choice_of_axes(b: Builder) -> Outputs:
    x = b.input("x", B, ["rows", 5, 6])
    return tuple(b.op(op, x, dims=p) for op in ("amax", "amin") for p in ([0], [1], [2], [0, 2]))


@case
def means(b: Builder) -> Outputs:
    x = b.input("x", B, ["rows", 4, 8])
    return b.mean(x, dims=[1, 2]), b.mean(x, dims=[2]), b.mean(x, dims=[1], keepdim=True)


@case
def variances(b: Builder) -> Outputs:
    x = b.input("x", F, ["rows", 9])
    return b.var(x, dims=[1]), b.std(x, dims=[1], keepdim=True)


@case
def a_low_rank_branch(b: Builder) -> Outputs:
    x = b.input("x", B, ["rows", 3, 40])
    u = b.add(b.matmul(x, b.param("a", B, [40, 12])), b.param("c", B, [12]))
    return (b.add(x, b.mul(b.matmul(u, b.param("b", B, [12, 40])), 0.5)),)


@case
def a_bottleneck_whose_narrow_value_is_a_result(b: Builder) -> Outputs:
    h = b.sigmoid(b.matmul(b.input("x", B, ["rows", 24]), b.param("w", B, [24, 40])))
    return h, b.relu(b.matmul(h, b.param("v", B, [40, 8])))


@case
def a_product_whose_epilogue_reads_the_narrow_value(b: Builder) -> Outputs:
    u = b.matmul(b.input("x", B, ["rows", 16]), b.param("w", B, [16, 16]))
    return (b.add(u, b.matmul(b.tanh(u), b.param("v", B, [16, 16]))),)


@case
def three_products_in_a_row(b: Builder) -> Outputs:
    x = b.input("x", B, ["rows", 32])
    for i in range(3):
        x = b.relu(b.matmul(x, b.param(f"w{i}", B, [32, 32])))
    return (x,)


@case
def a_scaled_operand_of_a_product(b: Builder) -> Outputs:
    x = b.input("x", B, ["rows", 48])
    return (b.matmul(b.mul(x, 0.25), b.param("w", B, [48, 16])),)


@case
def a_view_of_an_input(b: Builder) -> Outputs:
    x = b.input("x", F, ["rows", 4, 8])
    return b.reshape(x, shape=["rows", 32]), b.permute(x, dims=[2, 0, 1])


@case
def an_input_itself(b: Builder) -> Outputs:
    x = b.input("x", F, ["rows", 8])
    return x, b.relu(x)


@case
def an_output_that_is_used(b: Builder) -> Outputs:
    y = b.exp(b.input("x", F, ["rows", 8]))
    z = b.permute(y, dims=[1, 0])
    return y, b.mul(y, y), z, b.mul(z, z)


@case
def two_outputs_of_one_meaning(b: Builder) -> Outputs:
    x = b.input("x", F, ["rows", 1])
    return b.amin(x, dims=[1], keepdim=True), b.mul(x, 1.0), b.mul(x, 1.0, name="again")


@case
def a_parameter_that_nothing_reads(b: Builder) -> Outputs:
    b.param("w", F, [8])
    return (b.relu(b.input("x", F, ["rows", 8])),)


@case
def reshape_that_is_no_view(b: Builder) -> Outputs:
    x = b.permute(b.input("x", B, ["rows", 4, 8]), dims=[0, 2, 1])
    w = b.param("w", B, [32, 3])
    return (b.matmul(b.reshape(x, shape=["rows", 32]), w), b.reshape(x, shape=["32*rows"]))


@case
def broadcast_both_ways(b: Builder) -> Outputs:
    x, z = b.input("x", F, ["rows", 1]), b.input("z", F, [1, 8])
    s = b.param("s", F, [])
    return b.mul(x, z), b.mul(x, s), b.expand(s, shape=["rows", 8])


@case
def vectors(b: Builder) -> Outputs:
    x = b.input("x", F, ["rows"])
    return b.exp(x), b.sum(x, dims=[0])


@case
def one_column(b: Builder) -> Outputs:
    x, w = b.input("x", F, ["rows", 1]), b.param("w", F, [1])
    return (b.mul(b.rms_norm(x), w),)


@case
def columns_that_are_no_power_of_two(b: Builder) -> Outputs:
    x, w = b.input("x", F, ["rows", 5000]), b.param("w", F, [5000])
    return (b.mul(b.rms_norm(x), w),)


@case
def rows_too_long_for_registers(b: Builder) -> Outputs:
    x, w = b.input("x", F, ["rows", 40000]), b.param("w", F, [40000])
    return (b.mul(b.rms_norm(x), w),)


@case
def a_head_norm(b: Builder) -> Outputs:
    y = b.reshape(b.input("x", F, ["rows", 24]), shape=["rows", 4, 6])
    return (b.mul(b.rms_norm(y), b.param("w", F, [6])),)


@case
def small_mlp_of_rank_3(b: Builder) -> Outputs:
    x = b.input("x", B, ["rows", 3, 16])
    h = b.gelu(b.matmul(x, b.param("w", B, [16, 32])))
    return (b.add(x, b.matmul(h, b.param("v", B, [32, 16]))),)


@case
def gated_mlp(b: Builder) -> Outputs:
    x = b.input("x", B, ["rows", 16])
    g, u = b.param("g", B, [16, 32]), b.param("u", B, [16, 32])
    h = b.mul(b.silu(b.matmul(x, g)), b.matmul(x, u))
    return (b.matmul(h, b.param("d", B, [32, 16])),)


@case
def linear_with_bias(b: Builder) -> Outputs:
    x = b.input("x", B, ["rows", 16])
    return (b.linear(x, b.param("w", B, [32, 16]), b.param("c", B, [32])),)


@case
def attention(b: Builder) -> Outputs:
    q, k, v = (b.input(n, F, ["rows", 2, 8, 16]) for n in "qkv")
    scores = b.mul(b.matmul(q, b.transpose(k, dim0=-1, dim1=-2)), 0.25)
    return (b.matmul(b.softmax(scores, dim=-1), v),)


@case
def batched_product_of_one_and_many(b: Builder) -> Outputs:
    return (b.matmul(b.input("x", F, ["rows", 4, 8]), b.input("y", F, [1, 8, 6])),)


@case
def products_of_transposed_operands(b: Builder) -> Outputs:
    x = b.input("x", B, ["rows", 16])
    t = b.transpose(x, dim0=0, dim1=1)
    return b.matmul(t, x), b.softmax(b.matmul(x, t), dim=-1)


@case
def products_of_reversed_operands(b: Builder) -> Outputs:
    x = b.input("x", B, ["rows", 16])
    return (b.matmul(b.op("reverse", x, dim=1), b.param("w", B, [16, 8])),)


def narrow(b: Builder, x: Value) -> Value:
    """Two products through 8 columns."""
    return b.matmul(b.relu(b.matmul(x, b.param("w", B, [16, 8]))), b.param("v", B, [8, 24]))


@case
def products_in_a_row_of_single_positions(b: Builder) -> Outputs:
    x = b.input("x", B, ["rows", 1, 16])
    return narrow(b, x), b.matmul(x, b.param("u", B, [16, 40]))


@case
def products_in_a_row_of_axes_exchanged(b: Builder) -> Outputs:
    return (narrow(b, b.permute(b.input("x", B, [3, "rows", 16]), dims=[1, 0, 2])),)


@case
def products_in_a_row_of_repeated_rows(b: Builder) -> Outputs:
    return (narrow(b, b.expand(b.input("x", B, ["rows", 1, 16]), shape=["rows", 3, 16])),)


@case
def an_epilogue_wider_than_the_product(b: Builder) -> Outputs:
    x, w = b.input("x", B, ["rows", 8]), b.param("w", B, [8, 1])
    return (b.mul(x, b.tanh(b.matmul(x, w))),)


@case
def an_epilogue_that_keeps_leading_axes_apart(b: Builder) -> Outputs:
    x, s = b.input("x", B, ["rows", 3, 16]), b.input("s", B, [3, 1])
    return (b.mul(b.matmul(x, b.param("w", B, [16, 8])), s),)


@case
def squeeze_and_excite(b: Builder) -> Outputs:
    x = b.input("x", F, ["rows", 16, 10])
    s = b.sigmoid(b.matmul(b.mean(x, dims=[2]), b.param("w", F, [16, 16])))
    return (b.mul(x, b.unsqueeze(s, dim=2)),)


@case
def a_reduction_over_axes_that_an_operand_does_not_walk_as_one(b: Builder) -> Outputs:
    x, w = b.input("x", F, ["rows", 4, 8]), b.input("w", F, [8])
    return (b.sum(b.mul(x, w), dims=[1, 2]),)


@case
def integers(b: Builder) -> Outputs:
    x, y, z = (
        b.input("x", "int32", ["rows", 9]),
        b.input("y", "int64", [9]),
        b.input("z", "int8", ["rows", 9]),
    )
    u = b.input("u", "uint8", ["rows", 9])
    sums = (
        b.sum(x, dims=[1]),
        b.sum(z, dims=[0]),
        b.amax(z, dims=[1]),
        b.amin(u, dims=[1]),
        b.amax(x, dims=[0]),
    )
    return b.mul(x, y), b.add(z, u), *sums


@case
def truths(b: Builder) -> Outputs:
    t, x = b.input("t", "bool", ["rows", 9]), b.input("x", F, ["rows", 9])
    return b.where(t, x, 0.0), b.logical_not(t), b.gt(x, 0.5), b.sum(t, dims=[1]), b.mul(x, t)


@case
def numbers(b: Builder) -> Outputs:
    x, f = b.input("x", F, ["rows", 2]), b.full(shape=["rows", 2], value=3.0, dtype=F)
    c = b.constant("c", F, [2], [1.5, 2.5])
    return b.mul(x, c), b.sum(b.mul(x, f), dims=[0]), f, b.sum(f, dims=[1]), b.sub(1, x), b.pow(x, 2)


@case
def wide_and_half_floats(b: Builder) -> Outputs:
    d, h = b.input("d", "float64", ["rows", 16]), b.input("h", "float16", ["rows", 16])
    return b.rms_norm(d), b.layer_norm(h, normalized_shape=[16]), b.cast(h, dtype="float64")


@case
def a_parameter_stored_wider_than_it_is_read(b: Builder) -> Outputs:
    return (b.mul(b.input("x", B, ["rows", 16]), b.param("w", F, [16], compute=B)),)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("target", ["h100", "cpu"])
def test_plans_mean_what_the_graph_means(name: str, target: str) -> None:
    sizes = (1,) if "registers" in name else (2,) if "power" in name else (1, 7, 70)
    blueprint = made(CASES[name])
    for rows in sizes:
        check(blueprint, {"rows": rows} if "rows" in blueprint.dims else {}, target)


@pytest.mark.parametrize(
    "name", ["rms_residual", "integers", "truths", "numbers", "sums_over_every_choice_of_axes"]
)
def test_as_c_they_mean_the_same(name: str) -> None:
    blueprint = made(CASES[name])
    for rows in (1, 70):
        check(blueprint, {"rows": rows}, "cpu", "c")


def two_dims(b: Builder) -> Outputs:
    b.dim("batch", min=1, max=64, tune=(2, 8))
    b.dim("seq", min=1, max=8192, tune=(128, 2048))
    x = b.input("x", B, ["batch", "seq", 64])
    return (b.matmul(b.mul(b.rms_norm(x), b.param("w", B, [64])), b.param("v", B, [64, 32])),)


def reductions_of_two_dims(b: Builder) -> Outputs:
    b.dim("batch", min=1, max=64, tune=(2, 8))
    b.dim("seq", min=1, max=8192, tune=(128, 2048))
    x = b.input("x", F, ["batch", "seq", 9])
    return b.softmax(x, dim=1), b.sum(x, dims=[0]), b.mean(x, dims=[1]), b.permute(x, dims=[1, 0, 2])


@pytest.mark.parametrize("make", [two_dims, reductions_of_two_dims])
@pytest.mark.parametrize("seq", [5, 600])
def test_two_symbolic_axes(make: Make, seq: int) -> None:
    """The sizes 5 and 600 lie in different ranges of the tuned ones."""
    b = Builder(make.__name__)
    check(b.build(*make(b)), {"batch": 3, "seq": seq})


@pytest.mark.parametrize(
    ("low", "high", "tune", "rows"),
    [(0, 16, (), 0), (1, 1, (), 1), (5, 9, (), 7), (1, 2**31 - 1, (), 7), (16, 1024, (64,), 32)],
)
def test_ranges(low: int, high: int, tune: tuple[int, ...], rows: int) -> None:
    """No rows at all, one row only, nothing to tune for, more than 32 bits can address."""
    b = Builder("ranges")
    b.dim("rows", min=low, max=high, tune=tune, multiple_of=16 if low == 16 else 1)
    x, w, v = b.input("x", B, ["rows", 64]), b.param("w", B, [64]), b.param("v", B, [64, 8])
    check(b.build(b.matmul(b.mul(b.rms_norm(x), w), v)), {"rows": rows})


SETTINGS = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
MANY = settings(SETTINGS, max_examples=400)
RANDOM = given(
    seed=st.integers(0, 2**32), nodes=st.integers(1, 9), dtype=st.sampled_from([F, B]), rows=st.integers(1, 9)
)


@SETTINGS
@RANDOM
def test_random_graphs_mean_what_they_say(seed: int, nodes: int, dtype: str, rows: int) -> None:
    assert _means_what_it_says(seed, nodes, dtype, rows) > 0


@pytest.mark.slow
@MANY
@RANDOM
def test_many_random_graphs_mean_what_they_say(seed: int, nodes: int, dtype: str, rows: int) -> None:
    assert _means_what_it_says(seed, nodes, dtype, rows) > 0


def _means_what_it_says(seed: int, nodes: int, dtype: str, rows: int) -> int:
    """Any order of groups that were a cycle would read memory that no kernel has written yet: NaN. How many
    phases were run."""
    blueprint = random_blueprint(random.Random(seed), nodes, dtype)
    return len(check(blueprint, {"rows": rows}, "h100").lowerings)


def refused(blueprint: Blueprint) -> EsperError:
    with pytest.raises(EsperError) as found:
        front(blueprint, "h100")
    return found.value


def test_what_has_no_kernel_is_named() -> None:
    """Every operator has one; a composite that nothing expanded has none."""

    def whole(b: Builder) -> Outputs:
        return (b.softmax(b.input("x", F, ["rows", 9])),)

    with pytest.raises(EsperError) as found:
        partition(typed(made(whole)), resolve("h100"))
    assert found.value.code == "E0530" and found.value.node == "softmax" and "softmax" in found.value.message


def test_a_gradient_asked_for_that_is_nothing_is_named() -> None:
    b = Builder("nothing")
    x, w = b.input("x", F, [4, 8]), b.param("w", F, [8])
    error = refused(b.build(b.relu(x), differentiable=[x, w]))
    assert error.code == "E0534" and "w" in error.message


def test_a_dim_that_no_input_shows_is_named() -> None:
    b = Builder("hidden")
    b.dim("rows", min=1, max=64, tune=(8,))
    error = refused(b.build(b.relu(b.input("x", F, ["2*rows"]))))
    assert error.code == "E0536" and error.node == "rows"


@pytest.mark.parametrize("wanted", [[], ["x"], ["w"]])
def test_only_what_is_differentiable_gets_a_gradient(wanted: list[str]) -> None:
    b = Builder("subset")
    leaves = {"x": b.input("x", F, [7, 8]), "w": b.param("w", F, [8])}
    blueprint = b.build(b.mul(leaves["x"], leaves["w"]), differentiable=[leaves[n] for n in wanted])
    work = check(blueprint, {})
    assert (list(work.joint.gradients) if work.joint else []) == wanted
    assert {low.phase.name for low in work.lowerings} == (
        {"inference", "forward", "backward"} if wanted else {"inference"}
    )


def test_indices_past_int32_are_64_bits_wide() -> None:
    def long(b: Builder) -> Outputs:
        return (b.relu(b.input("x", F, ["rows", 40000])),)

    def short(b: Builder) -> Outputs:
        return (b.relu(b.input("x", F, ["rows", 1000])),)

    for make, wide in ((long, True), (short, False)):
        plans = [s.plan for s in front(made(make), "h100").kernels.by_key.values()]
        assert {p.wide for p in plans} == {wide}
