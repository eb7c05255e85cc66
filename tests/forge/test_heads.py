"""Attention between its projections: nothing is copied only to exchange heads and rows; views of views."""

from __future__ import annotations

import json
import random

import pytest
import torch

from bench.models import SMALL_DECODER
from bench.prepare import UNBUILT
from bench.swaps import layer_blueprint
from esper_ir import text
from esper_ir.builder import Builder
from esper_ir.graph import Graph
from esper_ir.reference import evaluate
from esper_ir.types import Dim
from esper_ir.verify import typed
from forge.pass_manager import run
from forge.passes.heads import heads_inside
from forge.pipelines import FAST
from forge.target import resolve
from forge.views import View, _reshape
from forge.work import Work


def test_a_decoder_layer_copies_nothing() -> None:
    blueprint = text.parse(json.dumps(layer_blueprint(SMALL_DECODER, 2, 16)))
    work = run(UNBUILT, Work(blueprint, resolve("h100"), FAST.name))
    for low in work.lowerings:
        groups = [group for group, _ in low.lowered]
        alone = [g.name for g in groups if not g.contraction and [n.op for n in g.nodes] == ["cast"]]
        assert not alone, low.phase.name
        steps = sum(len(made.steps) for _, made in low.lowered if made.template != "extern")
        calls = sum(made.template == "extern" for _, made in low.lowered)
        wanted = {"inference": (5, 8), "forward": (5, 8)}.get(low.phase.name)
        assert wanted is None or (steps, calls) == wanted
        if low.phase.name == "backward" and len(low.phase.wanted) == 10:
            assert steps <= 6 and calls == 15  # two of the four kernels sum over rows in two steps


def turned(before: bool, after: bool, heads: int = 3) -> Graph:
    b = Builder("turned")
    shape = (2, 5, 3, 8)
    q, k, v = (
        b.input(n, "float32", shape if n == "q" or heads == 3 else (2, 5, heads, 8)) for n in ("q", "k", "v")
    )
    sides = [b.op("permute", x, dims=(0, 2, 1, 3)) for x in (q, k, v)] if before else [q, k, v]
    out = b.op("scaled_dot_product_attention", *sides, is_causal=True)
    y = b.op("permute", out, dims=(0, 2, 1, 3)) if after else out
    return typed(b.build(y))


@pytest.mark.parametrize(
    ("graph", "done"),
    [(turned(True, True), True), (turned(True, False), True), (turned(False, True), True),
     (turned(False, False), False), (turned(True, True, 1), False)],
)  # fmt: skip
def test_only_between_exchanges(graph: Graph, done: bool) -> None:
    made = heads_inside(graph)
    assert any(n.op == "attention" for n in made) == done
    generator = torch.Generator().manual_seed(0)
    values = {
        name: torch.randn([d.value({}) for d in kind.shape], generator=generator)
        for name, kind in graph.inputs.items()
    }
    for name, value in evaluate(made, values).items():
        torch.testing.assert_close(value, evaluate(graph, values)[name])


def test_a_reshape_is_a_view_where_torch_says_so() -> None:
    draw, views = random.Random(3), 0
    for _ in range(300):
        base = torch.empty([draw.choice((1, 2, 3, 4, 6)) for _ in range(draw.randint(2, 4))])
        x = base.permute(draw.sample(range(base.dim()), base.dim()))
        rest, sizes = x.numel(), []
        while rest > 1 and draw.random() < 0.8:
            sizes.append(draw.choice([n for n in range(1, rest + 1) if rest % n == 0]))
            rest //= sizes[-1]
        sizes.append(rest)
        steps = tuple(Dim.of(0 if n == 1 else s) for n, s in zip(x.shape, x.stride(), strict=True))
        made = _reshape(View("x", tuple(map(Dim.of, x.shape)), steps), tuple(map(Dim.of, sizes)))
        try:
            want = x.view(sizes)
        except RuntimeError:
            assert made is None
            continue
        if made is not None:
            views += 1
            for n, mine, own in zip(sizes, made.strides, want.stride(), strict=True):
                assert n == 1 or mine == Dim.of(own)
    assert views > 100
