"""At the ends of a type: what ordinary numbers hide is refused there, and what is right is not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from esper_ir.types import DType
from gauntlet import accuracy, inputs, meaning, ranges
from gauntlet.isolate import ForkServer
from gauntlet.runner import judge
from gauntlet.stage import Context, Recipe
from gauntlet.stages import gradients
from gauntlet.subject import Subject
from library.manifest import unpack
from tests.faults import corpus, handmade, toys
from tests.faults.sites import SHARE

MASK = "const float m = y[r * C + c] <= 0 ? 0 : g[r * C + c];"
FAULTS = {
    "a mask that multiplies": MASK.replace(
        "y[r * C + c] <= 0 ? 0 : g[r * C + c]", "g[r * C + c] * (y[r * C + c] > 0)"
    ),
    "no infinities": MASK.replace(": g[r * C + c]", ": __builtin_fminf(g[r * C + c], 0x1.fffffep+127f)"),
    "NaN is zero": MASK.replace("<= 0 ?", "<= 0 || g[r * C + c] != g[r * C + c] ?"),
    "small ones are zero": MASK.replace("<= 0 ?", "<= 0 || __builtin_fabsf(g[r * C + c]) < 1e-12f ?"),
    "subnormal ones are zero": MASK.replace("<= 0 ?", "<= 0 || __builtin_fabsf(g[r * C + c]) < 0x1p-126f ?"),
    "slope one at zero": MASK.replace("<= 0 ?", "< 0 ?"),
}


def _subject(toy: handmade.Toy) -> Subject:
    return Subject(unpack(handmade.build(toy)), torch.device("cpu"))


@pytest.mark.parametrize("name", list(FAULTS))
def test_a_fault_at_an_end_is_refused(name: str, server: ForkServer) -> None:
    changed = handmade.edit(toys.affine(), (MASK, FAULTS[name]))
    found = judge(handmade.build(changed), "cpu", server, quick=True, stages=("loads", "gradients"))
    assert found.passed is False and found.stages[-1].name == "gradients", found.reason


def test_infinities_lie_in_one_leaf_and_meet_exact_zeros() -> None:
    subject = _subject(toys.affine())
    recipe = Recipe("gradients", subject.base_dims(), "infinite x", cotangent="few", wanted=("x",), seed=3)
    values, (flowing,) = inputs.values(subject, recipe), inputs.cotangents(subject, recipe)
    assert flowing is not None
    infinite = values["x"].isinf()
    assert int(infinite.sum()) == ranges.MOST and int(infinite.any(1).sum()) == ranges.MOST, (
        "rows of their own"
    )
    assert bool(infinite[-1].any()), "the last row, where loops over rows end"
    assert all(bool(t.isfinite().all()) for n, t in values.items() if n != "x")
    assert 0.5 < float((flowing == 0).double().mean()) < 0.8
    again = inputs.values(_subject(toys.affine()), recipe)
    assert all(torch.equal(values[n], again[n]) for n in values)


def test_each_leaf_and_each_end_has_a_case() -> None:
    subject = _subject(toys.affine())
    pairs = ranges.pairs(subject)
    for leaf in ("x", "w", "b"):
        names = {f"{how} {leaf}" for how in ranges.HOW if how != "infinite"} | {
            f"infinite {leaf} among specks"
        }
        assert names <= {draw for draw, _ in pairs}
    assert {cotangent for _, cotangent in pairs} >= set(ranges.COTANGENTS)


def test_a_leaf_far_out_stands_beside_a_huge_one() -> None:
    subject = _subject(toys.affine())
    told = ranges.over(subject)
    assert len(told) == 6 and "far w over x" in told
    drawn = inputs.values(subject, Recipe("numerics", subject.base_dims(), "far w over x"))
    sizes = {n: float(t.abs().max()) for n, t in drawn.items()}
    assert sizes["x"] > 1e15 and 10 < sizes["w"] < 100 and sizes["b"] < 10


@pytest.mark.parametrize("columns", [64, 4096, 32768])
def test_a_share_of_a_row_far_out_is_a_normal_number(columns: int) -> None:
    """A card's exponential takes subnormal results for zero: beside a huge number that was a wrong result."""
    how = ranges.of_leaf("far x over z", "x")
    drawn = ranges.drawn(how, (64, columns), DType.float32, torch.Generator().manual_seed(5)).double()
    least = (drawn.amin(1) - drawn.amax(1)).exp().min()
    assert torch.finfo(torch.float32).tiny < float(least) < 1e-12
    assert ranges.of_leaf("far x over z", "z") == "huge" and ranges.of_leaf("far x", "x") == ranges.FAR


@pytest.mark.parametrize(("which", "at"), [(inputs.START, 0), (inputs.END, -1)])
def test_one_row_flows_back_alone_where_every_region_begins_and_ends(which: str, at: int) -> None:
    context = Context(_subject(toys.affine()), lambda event: None)
    found = [r for r in gradients._recipes(context) if r.cotangent == which]
    assert {tuple(sorted(r.wanted)) for r in found} >= {("b", "w", "x")}
    assert len({r.dims["rows"] for r in found}) >= 1 + len(context.subject.regions[1:])
    for recipe in found:
        (flowing,) = inputs.cotangents(context.subject, recipe)
        assert flowing is not None and bool(flowing[at].all())
        assert int(flowing.any(-1).sum()) == 1


def test_a_leak_between_parts_of_a_sum_is_felt_where_one_part_is_all() -> None:
    """d(w) of tanh(x w) + x, its sum over rows in 64 parts of which each has a little of the one before: what
    was missed once. Only the first part and the last one show it."""
    declared = next(d for d in corpus.blueprints() if d["name"] == "tanh_residual_96_f32")
    subject = Subject(unpack(corpus.compiled(declared, "cpu").container), torch.device("cpu"))
    recipe = Recipe("gradients", {"rows": 857}, cotangent=inputs.START, wanted=("w",))
    values = {n: t.double() for n, t in inputs.values(subject, recipe).items()}
    refused = {}
    for how in ("normal", inputs.START):
        (flowing,) = inputs.cotangents(subject, replace(recipe, cotangent=how))
        assert flowing is not None
        each = flowing.double() * values["x"] * (1 - torch.tanh(values["x"] * values["w"]).square())
        parts = torch.stack([part.sum(0) for part in each.split(14)])
        before = torch.cat([parts[:1], parts[:-1]])
        leaking = (parts + SHARE["float32"] * (before - parts)).sum(0).float()
        row = ("d(w)", leaking, parts.sum(0), each.float().sum(0))
        refused[how] = accuracy.one(subject, recipe, row)
    assert not refused["normal"] and "RMSE" in refused[inputs.START]


def test_sums_of_small_exact_numbers_are_not_moved() -> None:
    """Noise there would put a rectifier's argument off its kink, and excuse any slope."""
    subject = _subject(toys.affine())
    recipe = Recipe("gradients", subject.base_dims(), "ties", cotangent="few", wanted=("x", "w", "b"))
    values, flowing = inputs.values(subject, recipe), inputs.cotangents(subject, recipe)
    exact = meaning.gradients(subject, values, flowing, recipe.wanted, "float64")
    moved = meaning.rounded(subject, values, flowing, 0)
    assert all(torch.equal(moved[f"d({n})"], exact[n]) for n in recipe.wanted)
    assert float((values["x"] * values["w"] + values["b"] == 0).double().mean()) > 0.05, "kinks are met"
    normal = {n: torch.randn_like(t) for n, t in values.items()}
    assert not torch.equal(
        meaning.rounded(subject, normal, None, 0)["y"], meaning.outputs(subject, normal, "float64")[0]
    )


def _far(change: float) -> str:
    """What `small_ones` says of a softmax whose smallest exponentials are cut."""
    subject = _subject(toys.softmax())
    recipe = Recipe("numerics", {"rows": 17, "cols": 70}, "far x", seed=1)
    values = inputs.values(subject, recipe)
    x = values["x"]
    far = (x - x.amax(-1, keepdim=True)).clamp(min=change).exp()
    got = far / far.sum(-1, keepdim=True)
    exact, eager = (meaning.outputs(subject, values, p)[0] for p in ("float64", "declared"))
    others = accuracy.Others(
        lambda turn: meaning.rounded(subject, values, None, turn),
        [lambda: meaning.by_bodies(subject, values)],
    )
    row = ("y", got, exact, eager)
    assert accuracy.judged(subject, recipe, row, others).passed, "nothing beside the others of the tensor"
    return accuracy.small_ones(subject, row, others)


def test_a_cut_exponential_is_wrong_however_small() -> None:
    assert _far(-20.0) and not _far(-1000.0)


def test_a_body_keeps_what_float64_loses() -> None:
    """So a kernel that keeps it too is right."""
    from_body, from_torch = (
        torch.sigmoid(torch.tensor(-40.0, dtype=torch.float64)),
        0.5 * (1 + torch.tanh(torch.tensor(-20.0, dtype=torch.float64))),
    )
    assert float(from_torch) == 0.0 < float(from_body)


def test_few_or_equal_errors_are_not_many() -> None:
    values = torch.randn(64, dtype=torch.float64)
    assert accuracy._many(torch.rand(64, dtype=torch.float64) + 0.5, values)
    assert not accuracy._many(torch.rand(64, dtype=torch.float64) + 0.5, torch.ones_like(values))
    lone = torch.zeros(64, dtype=torch.float64)
    lone[3] = 1.0
    assert not accuracy._many(lone, values) and not accuracy._many(torch.zeros_like(lone), values)
