"""Where the second look of the judge begins and ends: cancellation is excused, a fault is not."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from bench import swaps
from esper_ir import oracle, text, verify
from esper_ir.builder import Builder
from esper_ir.expand import expand
from esper_ir.reference import evaluate
from esper_ir.types import DType
from gauntlet import accuracy, inputs, meaning
from gauntlet.stage import Context, Failed, Passed, Recipe
from gauntlet.stages import gradients
from gauntlet.subject import Subject
from library.manifest import unpack
from tests.faults import corpus, handmade, toys


@pytest.fixture
def subject() -> Subject:
    return Subject(unpack(handmade.build(toys.softmax())), torch.device("cpu"))


def _gradient(subject: Subject, recipe: Recipe, change: Any) -> Any:
    """The judgement of a float32 gradient of softmax, as a kernel would compute it, changed."""
    values, flowing = inputs.values(subject, recipe), inputs.cotangents(subject, recipe)
    y = meaning.outputs(subject, values, "declared")[0]
    g = flowing[0]
    assert g is not None
    total = torch.zeros(y.shape[0], 1)
    for at in range(y.shape[1]):  # one term after the other: another order than torch's
        total += (y * g)[:, at : at + 1]
    got = change(y * (g - total))
    exact = meaning.gradients(subject, values, flowing, ("x",), "float64")["x"]
    eager = meaning.gradients(subject, values, flowing, ("x",), "declared")["x"]
    others = accuracy.Others(
        lambda turn: meaning.rounded(subject, values, flowing, turn),
        [lambda: {"d(x)": meaning.gradients(subject, values, flowing, ("x",), "float64", flat=True)["x"]}],
    )
    return accuracy.all_of(subject, recipe, [("d(x)", got, exact, eager)], others)


@pytest.mark.parametrize("cotangent", ["ones", "normal", "columns"])
@pytest.mark.parametrize("draw", ["normal", "uneven", "shifted"])
def test_another_order_of_a_sum_is_right(subject: Subject, cotangent: str, draw: str) -> None:
    for seed in range(4):
        recipe = Recipe("gradients", {"rows": 17, "cols": 70}, draw, "dense", cotangent, ("x",), seed)
        assert isinstance(_gradient(subject, recipe, lambda t: t), Passed)


@pytest.mark.parametrize("draw", ["normal", "uneven", "shifted"])
def test_a_small_factor_is_wrong(subject: Subject, draw: str) -> None:
    recipe = Recipe("gradients", {"rows": 48, "cols": 70}, draw, "dense", "normal", ("x",), 1)
    assert isinstance(_gradient(subject, recipe, lambda t: t * (1 + 4e-6)), Failed)
    assert isinstance(_gradient(subject, recipe, lambda t: t.bfloat16().float()), Failed)


def test_an_infinite_weight_of_a_group_norm() -> None:
    """torch computes inf - inf where the meaning is inf; both are right, a finite number is not."""
    blueprint = json.loads(json.dumps(toys.affine().blueprint))
    blueprint |= {"name": "norm", "nodes": [{"id": "y", "op": "group_norm", "inputs": ["x", "w", "b"],
                  "attrs": {"num_groups": 4, "eps": 1e-5}}], "outputs": ["y"]}  # fmt: skip
    graph = verify.typed(text.parse(json.dumps(blueprint)))
    values = {"x": torch.rand(3, 40) + 0.5, "w": torch.ones(40), "b": torch.zeros(40)}
    values["w"][13] = torch.inf
    found = [evaluate(g, values, precision="float64") for g in (graph, expand(graph))]
    torchs, flat = (next(iter(results.values())) for results in found)
    assert bool(torchs[:, 13].isnan().any()) and bool(flat[:, 13].isinf().all())
    row = ("y", flat.float(), torchs, torchs.float())
    others = accuracy.Others(lambda turn: {"y": flat}, [lambda: {"y": flat}])
    assert torch.equal(accuracy._by_other_forms(row, others)[2][:, 13], flat[:, 13])
    wrong = ("y", torch.where(flat.isinf(), 1.0, flat).float(), torchs, torchs.float())
    assert not torch.equal(accuracy._by_other_forms(wrong, others)[2][:, 13], flat[:, 13])


def test_an_infinite_cotangent_flows_to_the_smaller_of_equal_distances() -> None:
    """Both are the root of 2.5 but for roundings. Where neither is the smaller, as torch and float64 have it
    here, both get the gradient: inf - inf in x. A kernel whose sum is rounded otherwise has inf there."""
    b = Builder("tie")
    b.dim("rows", max=64)
    x, y, z = (b.input(name, "float32", ["rows", 7]) for name in "xyz")
    blueprint = b.build(b.triplet_margin_loss(x, y, z, swap=True))
    given = corpus.compiled(json.loads(text.render(blueprint)), "cpu")
    block = Subject(unpack(given.container), torch.device("cpu"))
    values = {
        "x": torch.tensor([[0.0, 0.0, 0.5, 0.5, 0.0, 0.0, 0.0]]),
        "y": torch.tensor([[0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0]]),
        "z": torch.tensor([[0.5, 1.0, 0.0, 0.5, 0.0, 0.0, 1.0]]),
    }
    recipe, flowing = Recipe("gradients", {"rows": 1}, wanted=("x",)), [torch.tensor(torch.inf)]
    exact = meaning.gradients(block, values, flowing, ("x",), "float64")["x"]
    assert int(exact.isnan().sum()) == 3
    others = accuracy.Others(lambda turn: meaning.rounded(block, values, flowing, turn), ())

    def passed(got: torch.Tensor) -> bool:
        rows = [("d(x)", got, exact, exact.float())]
        return isinstance(accuracy.all_of(block, recipe, rows, others), Passed)

    y_is_nearer = torch.tensor([[1.0, 1.0, 1.0, -1.0, 1.0, 1.0, 1.0]]) * torch.inf
    assert passed(exact.float()) and passed(y_is_nearer)
    assert not passed(-y_is_nearer) and not passed(torch.zeros(1, 7))
    assert not passed(torch.full((1, 7), torch.nan))


def test_equal_values_are_rounded_alike_in_every_second_draw(subject: Subject) -> None:
    """Two far elements that are a row's maximum together share it in a kernel too."""
    x = torch.randn(3, 40, dtype=torch.float64)
    x[:, 7] = x[:, 31] = 1e9 / 3
    found = [meaning.shaken(subject, subject.flat, {"x": x}, turn)["y"] for turn in range(4)]
    assert [bool((y[:, 7] == y[:, 31]).all()) for y in found] == [False, True, False, True]
    assert float(found[1][:, 7].min()) > 0.49


def test_what_eager_may_overflow_to_is_right_in_the_second_look_too(subject: Subject) -> None:
    """inf - inf beside a sum of few terms: neither look alone excuses both."""
    exact = torch.full((4, 8), 0.5, dtype=torch.float64)
    exact[0, 0], eager = -torch.inf, exact.float()
    eager[0, 0] = torch.nan
    others = accuracy.Others(lambda turn: {"y": exact + 1e-5}, [])

    def passed(place: float) -> bool:
        got = exact.float() + 5e-6
        got[0, 0] = place
        row = ("y", got, exact, eager)
        return accuracy.judged(subject, Recipe("numerics", {"rows": 4, "cols": 8}), row, others).passed

    assert passed(torch.nan) and passed(-torch.inf) and not passed(torch.inf) and not passed(1.0)


@pytest.mark.parametrize("place", [torch.inf, torch.nan])
def test_a_form_that_is_no_number_says_nothing_of_other_elements(subject: Subject, place: float) -> None:
    exact = torch.randn(4, 40, dtype=torch.float64).abs() + 0.5
    other = exact.clone()
    other[1, 3] = place
    shapes = {"nearby": accuracy.Others(lambda turn: {"y": other}, []),
              "forms": accuracy.Others(lambda turn: {"y": exact}, [lambda: {"y": other}])}  # fmt: skip
    recipe, got = Recipe("numerics", {"rows": 4, "cols": 40}), exact.float()
    got[1, 20] *= 1.01  # the row of the one
    for others in shapes.values():
        assert accuracy.judged(subject, recipe, ("y", exact.float(), exact, exact.float()), others).passed
        assert not accuracy.judged(subject, recipe, ("y", got, exact, exact.float()), others).passed
        assert accuracy.small_ones(subject, ("y", got, exact, exact.float()), others)


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.parametrize("op", ["sigmoid", "silu", "exp"])
def test_results_of_functions_may_be_zero_where_they_are_no_normal_numbers(kind: str, op: str) -> None:
    """A gate that is nearly shut in every column of a row: 1e-38 in eager, zero where an instruction gives no
    smaller numbers; where gates are larger zero is wrong, and so is 1e-37."""
    b = Builder("gate")
    b.dim("rows", max=64)
    x, s = b.input("x", kind, ["rows", 64]), b.input("s", kind, ["rows", 64])
    block = Subject(
        unpack(corpus.compiled(text.to_json(b.build(x * b.op(op, s))), "cpu").container), torch.device("cpu")
    )
    dtype = getattr(torch, kind)

    def passed(gate: float, factor: float) -> bool:
        values = {"x": (1 + torch.rand(4, 64)).to(dtype), "s": torch.full((4, 64), gate, dtype=dtype)}
        (exact,), (eager,) = (meaning.outputs(block, values, how) for how in ("float64", "declared"))
        (label,) = block.blueprint.outputs
        forms = [lambda: {label: meaning.outputs(block, values, "float64", flat=True)[0]}]
        others = accuracy.Others(
            lambda turn: meaning.rounded(block, values, None, turn),
            forms,
            lambda: meaning.lost(block, values, None, torch.finfo(torch.float32).smallest_normal),
        )
        recipe = Recipe("numerics", {"rows": 4})
        row = (label, (exact * factor).to(dtype), exact, eager)
        return accuracy.judged(block, recipe, row, others).passed

    assert passed(-88.0, 1.0) and passed(-88.0, 0.0)
    assert not passed(-88.0, 10.0) and not passed(-88.0, -1.0) and not passed(-86.0, 0.0)
    assert meaning.flushed(block, {}, None) == {}, "no processor does that"


def test_a_subnormal_number_is_rounded_to_the_grid_of_its_type() -> None:
    """Of a product in bfloat16 near 1e-39 a rounding is 5e-41, not a 256th of it."""
    b = Builder("small")
    b.dim("rows", max=64)
    x, w = b.input("x", "bfloat16", ["rows", 64]), b.input("w", "bfloat16", ["rows", 64])
    graph = verify.typed(b.build(x * w))
    block = Subject(unpack(handmade.build(toys.affine())), torch.device("cpu"))
    values = {"x": (torch.rand(8, 64) * 1e-20).bfloat16(), "w": (torch.rand(8, 64) * 1e-19).bfloat16()}
    exact = evaluate(graph, values, precision="float64")
    found = meaning.shaken(block, graph, values, 0, declared=True)
    (name,) = exact
    off = (found[name] - exact[name]).abs()
    spacing = torch.finfo(torch.bfloat16).smallest_normal * torch.finfo(torch.bfloat16).eps
    assert 0.4 * spacing < float(off.max()) <= 0.51 * spacing
    assert bool((found[name] >= 0).all())


def test_a_lucky_eager_does_not_condemn_roundings_of_the_declared_type() -> None:
    """Of three images one passes the relu: a row of d(down.weight) has one error, that of the sum which came
    through a cast to bfloat16. Eager, here as right as the type can be, does not show it."""
    excite = swaps.excite_blueprint(256, 14, 16, torch.bfloat16)
    block = Subject(unpack(corpus.compiled(excite, "cpu").container), torch.device("cpu"))
    wanted = ("x", "down.weight", "up.weight")
    recipe = Recipe("gradients", {"rows": 3}, cotangent="normal", wanted=wanted)
    values, flowing = inputs.values(block, recipe), inputs.cotangents(block, recipe)
    exact = meaning.gradients(block, values, flowing, wanted, "float64")
    got = block.trained(values, flowing, wanted)
    rows = [(f"d({n})", got[n], exact[n], exact[n].to(got[n].dtype)) for n in wanted]
    others = accuracy.Others(lambda turn: meaning.rounded(block, values, flowing, turn), ())
    assert not accuracy.compare(block, recipe, rows[1]).passed
    assert isinstance(accuracy.all_of(block, recipe, rows, others), Passed)
    wrong = [(rows[1][0], rows[1][1] * 1.5, *rows[1][2:])]
    assert isinstance(accuracy.all_of(block, recipe, wrong, others), Failed)


def test_what_is_known_of_an_element_is_known_of_its_like() -> None:
    exact = torch.tensor([1.0, 1.9, 2.0, 1e-5, torch.inf, 0.0], dtype=torch.float64)
    known = torch.tensor([1e-3, 0.0, 1e-6, 1e-9, torch.inf, 0.0], dtype=torch.float64)
    assert accuracy._of_like_size(known, exact).tolist() == [1e-3, 1e-3, 1e-6, 1e-9, 0.0, 0.0]


def test_a_sum_that_cancels_is_rounded_on_the_way(subject: Subject) -> None:
    """Exact terms have an exact sum; others leave partial sums, however little is left in the end."""
    blueprint = json.loads(json.dumps(toys.affine().blueprint))
    blueprint |= {"name": "total", "outputs": ["y"],
                  "nodes": [{"id": "y", "op": "mean", "inputs": ["x"], "attrs": {"dims": [1]}}]}  # fmt: skip
    graph = verify.typed(text.parse(json.dumps(blueprint)))
    half = torch.randn(64, 20, dtype=torch.float64)
    x = torch.cat([half, 1e-9 - half], 1)
    rest = {"w": torch.ones(40), "b": torch.ones(40)}
    moved = meaning.shaken(subject, graph, {"x": x, **rest}, 0)["y"].square().mean().sqrt()
    unit = 2.0**-24
    assert 0.2 * unit < float(moved) < 2 * unit
    exact = (x * 4).round()
    assert torch.equal(meaning.shaken(subject, graph, {"x": exact, **rest}, 0)["y"], exact.mean(1))


def test_an_element_has_a_factor_of_its_own(subject: Subject) -> None:
    """What roundings on the way do to a few elements of a tensor is allowed to the full, and no more."""
    exact = torch.randn(48, 70, dtype=torch.float64).float().double()
    off = 1e-6 * torch.rand(48, 70, dtype=torch.float64)
    off[5, 7] = 2e-5
    recipe = Recipe("numerics", {"rows": 48, "cols": 70})
    others = accuracy.Others(lambda turn: {"y": exact + off}, [])

    def passed(times: float) -> bool:
        got = exact.clone()
        got[5, 7] += times * off[5, 7]
        return accuracy.judged(subject, recipe, ("y", got.float(), exact, exact.float()), others).passed

    assert passed(3.0) and not passed(8.0)


def test_three_small_draws_of_one_number_condemn_nothing(subject: Subject) -> None:
    """A one-hot cotangent leaves one element; eager is right by luck, and so are the first draws."""
    exact = torch.zeros(48, 70, dtype=torch.float64)
    exact[3, 4] = 0.7
    recipe = Recipe("gradients", {"rows": 48, "cols": 70}, cotangent="one-hot", wanted=("x",))
    unit = 2.0**-24
    by = [0.1, -0.2, 0.3, 3.0, -1.0, 2.0, -4.0, 0.5, 1.0, -2.0, 2.5]
    others = accuracy.Others(lambda turn: {"d(x)": exact * (1 + by[turn] * unit)}, [])

    def passed(times: float) -> bool:
        row = ("d(x)", (exact * (1 + times * unit)).float(), exact, exact.float())
        return accuracy.judged(subject, recipe, row, others).passed

    assert passed(6.0) and not passed(20.0)


def test_equal_values_that_are_rounded_alike_are_drawn_as_often_as_others(subject: Subject) -> None:
    """A mean that two of three draws do not show, since they round every value by itself."""
    exact = torch.randn(4, 70, dtype=torch.float64)
    noise = torch.randn(6, 4, 70, dtype=torch.float64) * 1e-7

    def nearby(turn: int) -> dict[str, torch.Tensor]:
        return {"y": exact + noise[turn] * (3 if turn % 2 else 1)}

    recipe = Recipe("numerics", {"rows": 4, "cols": 70})

    def passed(times: float) -> bool:
        got = (exact + times * 1e-7 * torch.randn(4, 70, dtype=torch.float64)).float()
        others = accuracy.Others(nearby, ())
        return accuracy.judged(subject, recipe, ("y", got, exact, exact.float()), others).passed

    assert passed(3.8) and not passed(5.0)


def test_the_worst_margin_is_of_all_results_behind_too(subject: Subject) -> None:
    """The first that is wrong is told; how far off the case is says the worst."""
    exact = torch.randn(4, 70, dtype=torch.float64)
    near, far = (exact.float() * by for by in (1 + 1e-5, 1.1))
    recipe = Recipe("numerics", {"rows": 4, "cols": 70})

    def margin(*results: torch.Tensor) -> float:
        found = accuracy.all_of(subject, recipe, [("y", got, exact, exact.float()) for got in results])
        assert isinstance(found, Failed)
        return found.metrics["margin"]

    assert margin(exact.float(), near, far) == margin(far) > 100 * margin(near)


def test_equal_values_are_rounded_alike_and_others_each_by_itself() -> None:
    seed = 3_141_592_653_589_793_238
    values = torch.randn(20_000, generator=torch.Generator().manual_seed(1)).bfloat16().double()
    drawn = meaning._scattered(values, seed)
    for value in values[:50]:
        assert len(torch.unique(drawn[values == value])) == 1
    each = meaning._scattered(torch.unique(values), seed)
    assert len(torch.unique(each)) == len(each) and -1 <= float(each.min()) and float(each.max()) <= 1
    assert abs(float(each.mean())) < 0.06 and abs(float(each.var()) - 1 / 3) < 0.03
    assert abs(float(torch.corrcoef(torch.stack((each[1:], each[:-1])))[0, 1])) < 0.1  # of neighbours
    assert not torch.equal(each, meaning._scattered(torch.unique(values), seed + 1))
    zeros = torch.tensor([0.0, -0.0], dtype=torch.float64)
    assert len(torch.unique(meaning._scattered(zeros, seed))) == 1


def _beside(
    subject: Subject, got: torch.Tensor, exact: torch.Tensor, eager: torch.Tensor | None, draw: str = "normal"
) -> tuple[Any, bool]:
    """The outcome, and whether eager was asked; None where nobody should."""
    asked: list[bool] = []

    def theirs() -> dict[str, torch.Tensor]:
        asked.append(True)
        assert eager is not None
        return {"d(x)": eager}

    others = accuracy.Others(lambda turn: {"d(x)": exact}, ())
    recipe = Recipe("gradients", subject.base_dims(), draw, cotangent="normal", wanted=("x",))
    return accuracy.beside_eager(
        subject, recipe, [("d(x)", got, exact)], theirs, others, accuracy.Seen()
    ), bool(asked)


def test_eager_is_asked_only_where_its_error_matters(subject: Subject) -> None:
    exact = torch.randn(48, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    right = exact.float()
    found, asked = _beside(subject, right, exact, None)
    assert isinstance(found, Passed) and not asked and found.metrics["tolerance_used"] < accuracy.EASY
    wrong = right * 1.00001
    found, asked = _beside(subject, wrong, exact, right)
    assert isinstance(found, Failed) and asked
    found, asked = _beside(subject, wrong, exact, right * 0.9999)
    assert isinstance(found, Passed) and asked, "eager was off by more"
    found, asked = _beside(subject, right, exact, right, "far x")
    assert isinstance(found, Passed) and asked
    over = torch.where(exact > 2, torch.inf, exact)
    found, asked = _beside(subject, over.float(), over, over.float())
    assert isinstance(found, Passed) and asked


@pytest.mark.parametrize("kind", [DType.float32, DType.bfloat16, DType.float16])
def test_what_is_right_without_eager_is_right_beside_any(kind: DType) -> None:
    """Its error widens the bound; the least that a number of the type can have is there already."""
    dtype = getattr(torch, kind.value)
    for seed in range(60):
        generator = torch.Generator().manual_seed(seed)
        exact = torch.randn(9, 33, dtype=torch.float64, generator=generator) * 2.0 ** (seed % 11 - 5)
        noise = torch.randn(exact.shape, dtype=torch.float64, generator=generator)
        unit = torch.finfo(dtype).eps
        got = (exact * (1 + noise * unit * (seed % 5))).to(dtype)
        alone = oracle.compare(got, exact, exact.to(dtype), 33, kind)
        eager = (exact * (1 + noise.flip(0) * unit * (seed % 7))).to(dtype)
        beside = oracle.compare(got, exact, eager, 33, kind)
        assert beside.passed or not alone.passed
        assert beside.worst_margin <= alone.worst_margin and beside.rmse_margin <= alone.rmse_margin


def test_equal_results_of_a_case_are_looked_at_once(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the first one is written over later: what was said belongs to the numbers."""
    exact = torch.randn(48, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    asked, real, seen = [], oracle.compare, accuracy.Seen()

    def compare(*args: Any) -> Any:
        asked.append(True)
        return real(*args)

    def outcome(got: torch.Tensor, name: str = "d(x)") -> Any:
        others = accuracy.Others(lambda turn: {name: exact}, ())
        recipe = Recipe("gradients", subject.base_dims(), "normal", cotangent="normal", wanted=("x",))
        eager = {name: exact.float()}
        return accuracy.beside_eager(subject, recipe, [(name, got, exact)], lambda: eager, others, seen)

    monkeypatch.setattr(oracle, "compare", compare)
    first = exact.float()
    assert isinstance(outcome(first), Passed) and len(asked) == 1
    assert isinstance(outcome(exact.float()), Passed) and len(asked) == 1
    first[0, 0] += 1.0
    assert isinstance(outcome(first), Failed)
    wrong = len(asked)
    assert isinstance(outcome(first.clone()), Failed) and len(asked) == wrong
    assert isinstance(outcome(exact.float()), Passed) and len(asked) == wrong


def test_numbers_of_a_body_keep_their_digits() -> None:
    """A kernel that takes 0.1 for its float32 is wrong in float64 (by 1.5e-8, of an allowed 1e-15)."""
    b = Builder("tenth")
    b.dim("rows", max=64)
    x = b.input("x", "float64", ["rows", 64])
    block = Subject(
        unpack(
            corpus.compiled(text.to_json(b.build(b.op("leaky_relu", x, negative_slope=0.1))), "cpu").container
        ),
        torch.device("cpu"),
    )
    values = {"x": -torch.rand(4, 64, dtype=torch.float64)}
    (found,) = meaning.by_bodies(block, values).values()
    assert float((found / values["x"] - 0.1).abs().max()) < 1e-15


def test_what_is_flushed_is_told_beside_results_that_are_no_floating_numbers() -> None:
    b = Builder("mixed")
    b.dim("rows", max=64)
    x = b.input("x", "float32", ["rows", 64])
    made = text.to_json(b.build(b.op("exp", x), b.op("gt", x, 0.0), b.op("argmax", x, dim=-1)))
    block = Subject(unpack(corpus.compiled(made, "cpu").container), torch.device("cpu"))
    found = meaning.lost(
        block, {"x": torch.full((2, 64), -88.0)}, None, torch.finfo(torch.float32).smallest_normal
    )
    changed = [bool(t.any()) for t in found.values()]
    assert changed == [True, False, False] and list(found) == list(block.blueprint.outputs)


@pytest.mark.parametrize(
    ("name", "seed", "draw"),
    [
        ("bias_gelu_96_f32", 541, "medley 553991"),
        ("bias_gelu_96_f32", 100036, "medley 102436868"),
        ("gate_96_f32", 100031, "medley 102431767"),
    ],
)
def test_what_a_function_is_asked_for_once_has_one_error(name: str, seed: int, draw: str) -> None:
    """gelu(x + b) with both alike, silu(x) z with x alike: a logistic function near 1 that is off by a
    rounding is so in every element, and few draws of roundings are off as far. These were refused."""
    block = corpus.compiled(next(d for d in corpus.blueprints() if d["name"] == name), "cpu")
    subject = Subject(unpack(block.container), torch.device("cpu"))
    context = Context(subject, lambda event: None, seed=seed, threads=1)
    cases = [r for r in gradients.STAGE.recipes(context) if r.draw == draw]
    assert cases and all(isinstance(gradients.STAGE.check(context, r), Passed) for r in cases)
    drawn = inputs.values(subject, cases[0])
    assert accuracy.numbers_of(subject, cases[0], drawn) < accuracy.MANY
    other = next(r for r in gradients.STAGE.recipes(context) if r.draw == "normal")
    assert accuracy.numbers_of(subject, other, drawn) == accuracy.MANY
