"""The tensors of a case: however they lie in memory, the reference is asked about the values that the
artifact is given; and something always flows back."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from esper_ir import text
from esper_ir.builder import Builder
from gauntlet import inputs, medley
from gauntlet.stage import Context, Recipe
from gauntlet.stages import determinism, gradients
from gauntlet.subject import Subject
from library.manifest import unpack
from tests.faults import corpus, handmade, toys


@pytest.mark.parametrize("layout", inputs.LAYOUTS)
def test_the_reference_takes_what_the_artifact_gets(layout: str) -> None:
    subject = Subject(unpack(handmade.build(toys.affine())), torch.device("cpu"))
    values, meant = inputs.case(subject, Recipe("numerics", subject.base_dims(), layout=layout))
    assert all(torch.equal(values[n], meant[n]) for n in values)
    assert all(t.is_contiguous() for t in meant.values())


def test_places_are_no_outputs_that_gradients_come_from() -> None:
    b = Builder("largest")
    b.dim("rows", max=64)
    found = b.many("topk", b.input("x", "float32", ["rows", 9]), k=2, dim=1)
    given = json.loads(text.render(b.build(*found)))
    subject = Subject(unpack(corpus.compiled(given, "cpu").container), torch.device("cpu"))
    recipe = Recipe("gradients", subject.base_dims(), wanted=("x",))
    for kind in inputs.cotangent_kinds(subject):
        case = replace(recipe, cotangent=kind)
        flowing = inputs.cotangents(subject, case)
        assert subject.trained(inputs.values(subject, case), flowing, ("x",))["x"].shape[1] == 9


def test_large_and_small_rows_in_turn_are_of_one_size_in_a_product() -> None:
    """And what a row takes in of the next is not. Weights have no rows of their own."""
    subject = Subject(unpack(handmade.build(toys.affine())), torch.device("cpu"))
    recipe = Recipe("gradients", subject.base_dims(), "seesaw", "dense", "seesaw", ("x",))
    drawn, (flowing,) = inputs.values(subject, recipe), inputs.cotangents(subject, recipe)
    assert flowing is not None
    own, other = drawn["x"] * flowing, drawn["x"][:-1] * flowing[1:]
    sizes = [float(t.square().mean().sqrt()) for t in (own, other[::2], other[1::2])]
    assert 0.5 < sizes[0] < 2 and sizes[1] > 1e5 and sizes[2] < 1e-5
    assert 0.3 < float(drawn["w"].abs().mean()) < 1.5


def test_in_a_medley_each_tensor_is_drawn_in_a_way_of_its_own() -> None:
    """All ways come about, of leaves and of cotangents, at few rows; and a number stands for one draw."""
    subject = Subject(unpack(handmade.build(toys.affine())), torch.device("cpu"))
    tried = list(medley.tried(subject, 7, 600))
    assert {dims["rows"] for _, dims in tried} == {1, 2, 3}
    pairs = {tuple(medley.of_leaf(draw, n) for n in ("x", "w", "cotangent:y")) for draw, _ in tried}
    mostly = {(x, w) for x, w, y in pairs if y in medley.ONE_SIGN}
    assert mostly >= {(x, w) for x in medley.MILD for w in medley.ONE_SIGN}, "no two names go together"
    flowing = [medley.of_leaf(draw, "cotangent:y") in medley.ONE_SIGN for draw, _ in tried]
    assert 0.75 < sum(flowing) / len(flowing) < 0.9
    for place in range(3):
        assert {ways[place] for ways in pairs} == set(medley.WAYS)
    assert len(pairs) > 400
    draw, dims = next((d, s) for d, s in tried if medley.of_leaf(d, "x") == medley.ALIKE and s["rows"] == 2)
    recipe = Recipe("gradients", dims, draw, cotangent=draw, seed=3)
    x = inputs.values(subject, recipe)["x"]
    assert bool((x == x[0, 0]).all()) and torch.equal(x, inputs.values(subject, recipe)["x"])
    assert not torch.equal(x, inputs.values(subject, replace(recipe, seed=4))["x"])


def test_rows_of_one_sign_with_zeros_begin_with_some_and_end_with_some() -> None:
    subject = Subject(unpack(handmade.build(toys.affine())), torch.device("cpu"))
    x = inputs.values(subject, Recipe("numerics", subject.base_dims(), "holed"))["x"]
    zero = x == 0
    assert bool(zero[:, 0].any()) and bool(zero[:, -1].any()) and not bool(zero.all(-1).any())
    assert bool((x[~zero] >= 4).all()) and torch.equal(x * 2, (x * 2).round())


def test_a_direction_of_a_large_tensor_goes_on_with_what_was_drawn() -> None:
    recipe, large = Recipe("gradients", {"rows": 3}), torch.empty(1100, 1024)
    drawn = inputs.direction(recipe, "w", large)
    assert drawn.shape == large.shape and drawn.dtype is torch.float64
    assert torch.equal(drawn, inputs.direction(recipe, "w", large)) and 0.9 < float(drawn.std()) < 1.1
    assert len({float(v) for v in drawn[:, 0]}) == 1100, "no row is as another"
    assert not torch.equal(drawn, inputs.direction(recipe, "v", large))
    for shape in ((), (0,), (3, 5)):
        assert inputs.direction(recipe, "w", torch.empty(shape)).shape == shape


@pytest.mark.parametrize("shape", [(5, 72), (3, 7), (4, 1), (9,), (0, 4)])
def test_balanced_rows_sum_to_zero(shape: tuple[int, ...]) -> None:
    rows = inputs._balanced(shape, torch.Generator().manual_seed(3))
    assert rows.shape == shape and bool((rows.sum(-1) == 0).all()) and bool((rows == rows.round()).all())
    assert shape not in [(5, 72), (3, 7)] or not torch.equal(rows[0], rows[1])


def test_medleys_of_another_seed_are_others() -> None:
    subject = Subject(unpack(handmade.build(toys.affine())), torch.device("cpu"))
    one, other = ({draw for draw, _ in medley.tried(subject, seed)} for seed in (0, 1))
    assert one and not one & other


@pytest.mark.parametrize("quick", [False, True])
def test_rows_that_sum_to_zero_are_drawn_for_every_plan(quick: bool) -> None:
    declared = next(d for d in corpus.blueprints() if d["name"] == "centred_40_f32")
    subject = Subject(unpack(corpus.compiled(declared, "cpu").container), torch.device("cpu"))
    tried = list(gradients._recipes(Context(subject, lambda event: None, quick, 0)))
    plans = {tuple(sorted(p.wanted)) for p in subject.launch.plans if p.phase == "backward"}
    for cotangent in (inputs.INTEGERS, "ones"):
        found = [r for r in tried if (r.draw, r.cotangent) == (inputs.BALANCED, cotangent)]
        assert plans <= {tuple(sorted(r.wanted)) for r in found}
        assert quick or max(r.dims["rows"] for r in found) > 1000, "where loops go round"
        for recipe in found[:1]:
            drawn, (flow,) = inputs.values(subject, recipe), inputs.cotangents(subject, recipe)
            assert (
                flow is not None and bool((drawn["x"].sum(-1) == 0).all()) and torch.equal(flow, flow.round())
            )


def test_on_a_card_what_is_repeated_in_a_hurry_ran_before() -> None:
    """Nothing has to be planned there for sizes of its own."""
    declared = next(d for d in corpus.blueprints() if d["name"] == "centred_40_f32")
    subject = Subject(unpack(corpus.compiled(declared, "h100").container), torch.device("cpu"))
    for device, largest in (("cpu", False), ("cuda", True)):
        subject.device = torch.device(device)
        tried = [r.dims for r in determinism._recipes(Context(subject, lambda event: None, True, 0))]
        assert (subject.largest_dims() in tried) is largest


@pytest.mark.parametrize("place", [torch.inf, -torch.inf, torch.nan])
def test_a_repeat_of_a_library_call_has_the_same_infinities_and_is_near_beside_them(place: float) -> None:
    first = torch.randn(8, 8)
    first[2, 2] = place
    wrong, elsewhere = first.clone(), first.clone()
    wrong[5, 5] += 1.0
    elsewhere[2, 2] = 0.0
    assert determinism.near(first, first + 1e-6)
    assert not determinism.near(first, wrong) and not determinism.near(first, elsewhere)
