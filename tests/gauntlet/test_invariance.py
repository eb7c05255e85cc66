"""Equal rows have equal results: of which results that is asked, and how far apart they may be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from esper_ir.types import Dim, DType, TensorType
from gauntlet import equal, inputs, invariance
from gauntlet.stage import Context, Failed, Passed, Recipe, Skipped
from gauntlet.stages import gradients, numerics
from gauntlet.subject import Subject
from library.manifest import unpack
from tests.faults import corpus
from tests.faults.corpus import node

CPU = torch.device("cpu")
Shapes = Mapping[str, list[Any]]


def _subject(nodes: Sequence[Any], inputs: Shapes, params: Shapes) -> Subject:
    declared = corpus.blueprint("rows", "float32", inputs, params, nodes)
    return Subject(unpack(corpus.compiled(declared, "cpu").container), CPU)


X, W = {"x": ["rows", 24]}, {"w": [24]}


@pytest.mark.parametrize(
    ("nodes", "params", "rows"),
    [
        ([node("y", "mul", "x", "w")], W, {"y", "d(x)"}),
        ([node("y", "softmax", "x", dim=-1)], {}, {"y", "d(x)"}),
        ([node("y", "softmax", "x", dim=0)], {}, set()),
        ([node("m", "amax", "x", dims=[0], keepdim=True), node("y", "sub", "x", "m")], {}, set()),
        ([node("y", "cumsum", "x", dim=0)], {}, set()),
        ([node("y", "matmul", "x", "w")], {"w": [24, 8]}, {"y", "d(x)"}),
    ],
)
def test_what_depends_on_one_row_only(nodes: Sequence[Any], params: Shapes, rows: set[str]) -> None:
    subject = _subject(nodes, X, params)
    assert invariance.labels(subject, "rows") == rows
    context = Context(subject, lambda event: None, threads=1)
    drawn = list(invariance.tried(context, []))
    asked = rows and nodes[0]["op"] != "matmul"
    assert len({draw for draw, _, _ in drawn}) == (invariance.COUNT if asked else 0)
    assert not list(invariance.tried(Context(subject, lambda event: None, quick=True), []))


def test_all_rows_of_leaves_and_cotangents_are_alike_and_others_are_not() -> None:
    subject = _subject([node("y", "mul", "x", "w")], X, W)
    for number in range(8):
        draw = equal.named("rows", number)
        recipe = Recipe("gradients", {"rows": 5}, draw, cotangent=draw, wanted=("x", "w"), seed=number)
        (flow,) = inputs.cotangents(subject, recipe)
        assert flow is not None
        for rows in (inputs.values(subject, recipe)["x"], flow):
            assert rows.shape == (5, 24) and torch.equal(rows, rows[:1].expand_as(rows))
        each = invariance.one_by_one(subject, recipe, [flow])
        assert {0, 4} <= each.keys()
        for row, (alone,) in each.items():
            assert alone is not None and torch.equal(alone[row], flow[row])
            assert int(alone.ne(0).any(-1).sum()) <= 1
    assert invariance.summed(subject, recipe) == ("w",)


def test_a_size_that_is_no_axis_of_its_own() -> None:
    rows = Dim.sym("rows")
    for shape, at in (((rows, Dim.of(4)), 0), ((rows * 2, Dim.of(4)), None), ((rows, rows), None)):
        kind = TensorType(DType.float32, shape)
        assert equal.axis(kind, "rows") == at
        draw, dims = equal.named("rows", 1), {"rows": 6}
        row = torch.randn([d.value(dims) for d in equal.single(draw, kind).shape])
        levelled = equal.levelled(draw, kind, row, dims)
        assert list(levelled.shape) == [d.value(dims) for d in shape]
        assert len(row) == (1 if at == 0 else len(levelled))
        assert torch.equal(levelled, row.expand_as(levelled))


def _alike(found: torch.Tensor, exact: torch.Tensor, label: str = "y") -> invariance.Alike:
    return invariance.Alike(label, found, lambda: exact, lambda turn: exact * (1 + 2.0**-25 * turn / 10))


def test_how_far_rows_may_be_apart() -> None:
    """Two roundings of the result and of what leads to it."""
    exact = torch.linspace(1, 2, 24, dtype=torch.float64).expand(3, 24)
    recipe = Recipe("numerics", {"rows": 3}, equal.named("rows", 1))
    for roundings, right in ((1, True), (12, False)):
        found = exact.float().clone()
        found[2, 5] *= 1 + roundings * 2.0**-23
        outcome = invariance.judged(recipe, [_alike(found, exact)])
        assert isinstance(outcome, Passed if right else Failed), (roundings, outcome)
    found = exact.float().clone()
    found[1, 3] = torch.nan
    outcome = invariance.judged(recipe, [_alike(found, exact)])
    assert isinstance(outcome, Failed) and "inf or NaN in some only" in outcome.reason
    found[1, 3], found[0, 2] = found[0, 3], found[1, 2] * (1 + 2.0**-23)
    found[:, 7], found[:, 8] = torch.inf, torch.nan  # wrong, and alike: other cases see it
    assert isinstance(invariance.judged(recipe, [_alike(found, exact)]), Passed)
    largest = torch.full((3, 4), 65519.0, dtype=torch.float64)  # just below what float16 rounds to infinity
    halves = largest.half()
    halves[0] = torch.inf
    assert isinstance(invariance.judged(recipe, [_alike(halves, largest)]), Passed)
    apart = exact + torch.arange(3).unsqueeze(1)
    assert isinstance(invariance.judged(recipe, [_alike(apart.float(), apart)]), Skipped)


def test_whole_numbers_are_another_where_a_rounding_decides_them() -> None:
    recipe = Recipe("numerics", {"rows": 3}, equal.named("rows", 1))
    whole = torch.ones(3, 4, dtype=torch.int64)
    other = whole + torch.eye(3, 4, dtype=torch.int64)
    for exact, right in ((whole, False), (whole.double(), False), (other, True)):
        sure = invariance.Alike("y", other, lambda t=exact: t, lambda turn: whole)
        outcome = invariance.judged(recipe, [sure])
        assert isinstance(outcome, Skipped if right else Failed), outcome
    flips = invariance.Alike("y", other, lambda: whole, lambda turn: whole + turn % 2)
    assert isinstance(invariance.judged(recipe, [flips]), Passed)


def test_nothing_is_asked_beside_products() -> None:
    """Libraries order the terms of a product by its place in a tile, and these cancel: the rows differ."""
    nodes = [
        node("z", "cat", "x", "x", dim=1),
        node("v", "cat", "w", "u", dim=0),
        node("y", "matmul", "z", "v"),
    ]
    subject = _subject(nodes, {"x": ["rows", 67]}, {"w": [67, 33], "u": [67, 33]})
    assert invariance.labels(subject, "rows") == {"y", "d(x)"}
    assert not list(invariance.tried(Context(subject, lambda event: None, threads=1), []))


@pytest.mark.parametrize(
    ("width", "op"), [(67, "tanh"), (33, "gelu"), (5, "exp"), (67, "softmax"), (33, "rms_norm")]
)
def test_rows_that_begin_in_the_middle_of_a_vector(width: int, op: str) -> None:
    """What is left over of vectors is another element in each row."""
    attrs: dict[str, Any] = {"softmax": {"dim": -1}, "rms_norm": {"eps": 1e-6}}.get(op, {})
    nodes = [node("m", "mul", "x", "w"), node("t", op, "m", **attrs), node("y", "add", "t", "x")]
    subject = _subject(nodes, {"x": ["rows", width]}, {"w": [width]})
    context = Context(subject, lambda event: None, seed=5, threads=1)
    for stage in (numerics.STAGE, gradients.STAGE):
        for recipe in [r for r in stage.recipes(context) if r.draw.startswith(equal.DRAW)][::2]:
            outcome = stage.check(context, recipe)
            assert isinstance(outcome, Passed) and outcome.metrics["rows_apart"] < 0.5, outcome


@pytest.mark.parametrize("name", ["layer_norm_72_f32", "tanh_residual_64_bf16"])
def test_nothing_differs_in_what_is_right(name: str) -> None:
    block = corpus.compiled(next(d for d in corpus.blueprints() if d["name"] == name), "cpu")
    context = Context(Subject(unpack(block.container), CPU), lambda event: None, seed=3, threads=1)
    for stage in (numerics.STAGE, gradients.STAGE):
        tried = [r for r in stage.recipes(context) if r.draw.startswith(equal.DRAW)]
        assert len(tried) > invariance.COUNT
        for recipe in tried[:: 1 if stage is numerics.STAGE else 3]:
            outcome = stage.check(context, recipe)
            assert isinstance(outcome, Passed) and outcome.metrics["rows_apart"] == 0, outcome
