"""Rewrites on random graphs: reference before equals reference after, to the bit where that is claimed."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from esper_ir.builder import Builder, Value
from esper_ir.expand import expand
from esper_ir.grad import joint
from esper_ir.graph import Graph
from esper_ir.opdef import Composite, Reduction
from esper_ir.ops.rules import torch_dtype
from esper_ir.reference import evaluate
from esper_ir.registry import OPS
from esper_ir.types import Dim
from esper_ir.verify import typed
from forge.passes.clean import eliminate_dead, merge_equal
from forge.passes.fold import RULES, fold
from forge.passes.reductions import straighten
from forge.passes.scale import carry
from forge.pipelines import _plain
from tests.forge.dags import blueprint
from tests.forge.whole import check

Rewrite = Callable[[Graph], Graph]
ROWS = 5
EXACT: dict[str, Rewrite] = {
    "fold": fold,
    "cse": merge_equal,
    "cse, outputs apart": lambda g: merge_equal(g, apart=True),
    "dce": eliminate_dead,
    "dce of cse of fold": lambda g: eliminate_dead(merge_equal(fold(g))),
}
"""These move and drop work and never compute another number."""
CLOSE: dict[str, Rewrite] = {
    "decompose": expand,
    "canonicalise": lambda g: _plain(g, apart=True),
    "straighten": lambda g: straighten(expand(g)),
    "carry": lambda g: carry(expand(g)),
}
"""These may add up in another order: equal in float64 but for its last digits."""


def values(graph: Graph, seed: int, special: bool) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    out = {}
    for name, kind in graph.inputs.items():
        shape = [d.value({"rows": ROWS}) for d in kind.shape]
        value = torch.rand(shape, generator=generator, dtype=torch.float64) * 2 - 1
        if special and value.numel():
            odd = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-40])
            place = torch.randint(value.numel(), (2,), generator=generator)
            value.view(-1)[place] = odd[torch.randint(6, (2,), generator=generator)].double()
        out[name] = value.to(torch_dtype(kind.dtype))
    return out


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal with NaN equal to NaN, and 0.0 unlike -0.0."""
    if a.dtype is not b.dtype or a.shape != b.shape:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    alike = (a == b) & (torch.signbit(a) == torch.signbit(b))
    return bool((alike | (a.isnan() & b.isnan())).all())


def grown(seed: int, nodes: int, dtype: str, backward: bool) -> Graph:
    graph = typed(blueprint(random.Random(seed), nodes, dtype))
    return joint(graph, list(graph.inputs)).graph if backward else graph


GRAPHS = given(
    st.integers(0, 10**6), st.integers(2, 14), st.sampled_from(["float32", "bfloat16"]), st.booleans()
)
OFTEN = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.parametrize("name", EXACT)
@OFTEN
@GRAPHS
def test_exact_rewrites_keep_every_bit(name: str, seed: int, nodes: int, dtype: str, backward: bool) -> None:
    before = expand(grown(seed, nodes, dtype, backward))
    after = EXACT[name](before)
    assert len(after.nodes) <= len(before.nodes) + len(before.outputs)
    for special in (False, True):
        given_ = values(before, seed, special)
        old, new = evaluate(before, given_), evaluate(after, given_)
        for was, now in zip(before.outputs, after.outputs, strict=True):
            assert same_bits(old[was], new[now]), (was, now)


@pytest.mark.parametrize("name", CLOSE)
@OFTEN
@GRAPHS
def test_other_rewrites_keep_the_meaning(
    name: str, seed: int, nodes: int, dtype: str, backward: bool
) -> None:
    before = grown(seed, nodes, dtype, backward)
    after = CLOSE[name](before)
    assert not any(isinstance(OPS[n.op].lowering, Composite) for n in after)
    assert [before.types[o] for o in before.outputs] == [after.types[o] for o in after.outputs]
    given_ = values(before, seed, False)
    old, new = (evaluate(g, given_, precision="float64") for g in (before, after))
    for was, now in zip(before.outputs, after.outputs, strict=True):
        torch.testing.assert_close(new[now], old[was], rtol=1e-10, atol=1e-10, equal_nan=True)


LONG = (
    ("sum", "bfloat16", [70000], 1), ("mean", "float32", [16, 8, 1024], 3), ("amin", "bool", [70000], 1),
    ("sum", "int64", [2, 1, 40000], 3), ("mean", "float16", [2, 96000], 2), ("amax", "float32", [9600, 8], 2),
)  # fmt: skip
WHOLE = (("sum", "float32", [70001], 1), ("sum", "float32", [65536], 1), ("amax", "float32", [99991 * 2], 1))
"""No part of 4,096 elements divides the row, or one program goes through it."""


def of_rows(op: str, dtype: str, shape: list[int], axes: int) -> Graph:
    """A reduction over the last axes of 2 to 8 rows."""
    b = Builder("long")
    x = b.input("x", dtype, [b.dim("rows", min=2, max=8, tune=(4,)), *shape])
    y = getattr(b, op)(x, dims=list(range(-axes, 0)))
    return typed(b.build(y))


@pytest.mark.parametrize(("op", "dtype", "shape", "axes"), [*LONG, *WHOLE])
def test_few_long_rows_are_reduced_in_parts(op: str, dtype: str, shape: list[int], axes: int) -> None:
    before = of_rows(op, dtype, shape, axes)
    after = straighten(before)
    reductions = [n for n in after if isinstance(OPS[n.op].lowering, Reduction)]
    assert len(reductions) == (2 if (op, dtype, shape, axes) in LONG else 1)
    for node in reductions:
        size = after.types[node.tensors[0]].shape
        assert len(reductions) == 1 or all(
            (s.static or 0) <= 65536 for s in (size[d] for d in node.attr("dims"))
        )
    given_ = values(before, 3, False)
    (was,), (now,) = before.outputs, after.outputs
    old, new = (evaluate(g, given_, precision="float64") for g in (before, after))
    torch.testing.assert_close(new[now], old[was], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("target", "backend"), [("h100", "plans"), ("cpu", "c")])
def test_norms_of_few_long_rows_are_right(target: str, backend: str) -> None:
    b = Builder("long_norm")
    x = b.input("x", "float32", [b.dim("rows", min=1, max=8, tune=(4,)), 96, 1024])
    work = check(b.build(b.layer_norm(x, normalized_shape=[96, 1024])), {"rows": 2}, target, backend)
    spaces = [g.space for low in work.lowerings for g in low.parts.groups if g.split is not None]
    assert any(Dim.of(48) in space for space in spaces), "two parts of 48 rows of 1,024"


@OFTEN
@GRAPHS
@example(21657, 12, "float32", True)  # a sum of everything over three axes, of which two are long
def test_rewrites_are_done_once(seed: int, nodes: int, dtype: str, backward: bool) -> None:
    """A second time they change nothing."""
    once = _plain(grown(seed, nodes, dtype, backward), apart=True)
    assert _plain(once, apart=True) == once


FOLDED: dict[str, Callable[[Value, Builder], Value]] = {
    "reshape": lambda x, b: b.reshape(b.reshape(x, shape=[-1]), shape=["rows", 4]),
    "permute": lambda x, b: b.permute(b.permute(x, dims=[1, 0]), dims=[1, 0]),
    "reverse": lambda x, b: b.reverse(b.reverse(x, dim=1), dim=1),
    "expand": lambda x, b: b.expand(x, shape=["rows", 4]),
    "slice": lambda x, b: b.slice(x, dim=1),
    "cast": lambda x, b: b.cast(b.cast(x, dtype="float64"), dtype="float32"),
    "neg": lambda x, b: b.neg(b.neg(x)),
    "mul": lambda x, b: b.mul(1, b.mul(x, 1.0)),
    "div": lambda x, b: b.div(x, 1.0),
    "sub": lambda x, b: b.sub(x, 0.0),
    "maximum": lambda x, b: b.maximum(x, x),
    "minimum": lambda x, b: b.minimum(x, x),
    "where": lambda x, b: b.where(b.gt(x, 0.0), x, x),
}
KEPT: dict[str, Callable[[Value, Builder], Value]] = {
    "narrow and back": lambda x, b: b.cast(b.cast(x, dtype="bfloat16"), dtype="float32"),
    "plus zero": lambda x, b: b.add(x, 0.0),
    "minus minus zero": lambda x, b: b.sub(x, -0.0),
    "other order": lambda x, b: b.permute(b.permute(x, dims=[1, 0]), dims=[0, 1]),
    "other axis": lambda x, b: b.reverse(b.reverse(x, dim=0), dim=1),
    "times true": lambda x, b: b.mul(x, 2.0),
    "one over": lambda x, b: b.div(1.0, x),
    "part": lambda x, b: b.slice(x, dim=1, end=3),
}


def folded(make: Callable[[Value, Builder], Value]) -> tuple[Graph, Graph]:
    b = Builder("fold")
    b.dim("rows")
    graph = typed(b.build(b.exp(make(b.input("x", "float32", ["rows", 4]), b))))
    return graph, fold(graph)


@pytest.mark.parametrize("name", FOLDED)
def test_each_rule_folds(name: str) -> None:
    _, after = folded(FOLDED[name])
    kept = [n.op for n in eliminate_dead(after)]
    assert kept == ["exp"], kept


@pytest.mark.parametrize("name", KEPT)
def test_what_changes_bits_stays(name: str) -> None:
    before, after = folded(KEPT[name])
    assert len(eliminate_dead(after).nodes) > 1
    given_ = values(before, 3, True)
    out = [evaluate(g, given_)[g.outputs[0]] for g in (before, after)]
    assert same_bits(*out)


def test_idempotent_functions_fold() -> None:
    for op in ("abs", "relu", "floor", "ceil", "round", "trunc"):
        _, after = folded(lambda x, b, op=op: b.op(op, b.op(op, x)))
        assert [n.op for n in eliminate_dead(after)] == [op, "exp"]
    assert set(RULES) == set(FOLDED) | {"abs", "relu", "floor", "ceil", "round", "trunc"}
