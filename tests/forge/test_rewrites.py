"""Rewrites on random graphs: reference before equals reference after, to the bit where that is claimed."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from esper_ir.builder import Builder, Value
from esper_ir.expand import expand
from esper_ir.grad import joint
from esper_ir.graph import Graph
from esper_ir.opdef import Composite
from esper_ir.ops.rules import torch_dtype
from esper_ir.reference import evaluate
from esper_ir.registry import OPS
from esper_ir.verify import typed
from forge.passes.clean import eliminate_dead, merge_equal
from forge.passes.fold import RULES, fold
from forge.passes.reductions import straighten
from forge.passes.scale import carry
from forge.pipelines import _plain
from tests.forge.dags import blueprint

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


@OFTEN
@GRAPHS
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
