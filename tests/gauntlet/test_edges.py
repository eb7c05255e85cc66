"""Beside an edge of a function a little wrong is quite wrong, and only values drawn for it show that."""

from __future__ import annotations

import pytest
import torch

from esper_ir import reference
from gauntlet import edges, inputs, meaning
from gauntlet.isolate import ForkServer
from gauntlet.runner import judge
from gauntlet.stage import Recipe
from gauntlet.subject import Subject
from library.manifest import unpack
from tests.faults import handmade, toys

MASK = "const float m = y[r * C + c] <= 0 ? 0 : g[r * C + c];"


def _subject(toy: handmade.Toy) -> Subject:
    return Subject(unpack(handmade.build(toy)), torch.device("cpu"))


@pytest.mark.parametrize("seed", range(3))
def test_arguments_lie_beside_the_edge_and_one_branch_is_right(seed: int) -> None:
    subject = _subject(toys.affine())
    assert edges.names(subject) == ["edge 0"]
    recipe = Recipe("gradients", subject.base_dims(), "edge 0", seed=seed)
    values = inputs.values(subject, recipe)
    assert {n: t.dtype for n, t in values.items()} == dict.fromkeys(values, torch.float32)
    wide = {n: t.double() for n, t in values.items()}
    exact = reference.evaluate_all(subject.flat, wide, precision="float64")
    (edge,) = edges._edges(subject)
    far = edges._distance(edge, exact)
    terms = (wide["x"] * wide["w"]).abs()
    near = far.abs() < 1e-4 * terms
    assert float(near.double().mean()) > 0.5, "they cancel"
    for turn in range(5):
        other = edges._distance(edge, meaning.shaken(subject, subject.flat, wide, 100 + turn))
        assert float(((other.sign() != far.sign()) & near).double().mean()) < 0.01, "no rounding decides"


def test_a_draw_is_made_again_from_its_recipe() -> None:
    one, two = (_subject(toys.affine()) for _ in range(2))
    recipe = Recipe("gradients", one.base_dims(), "edge 0", seed=3)
    first, again = inputs.values(one, recipe), inputs.values(two, recipe)
    assert all(torch.equal(first[n], again[n]) for n in first)
    normal = inputs.values(one, Recipe("gradients", one.base_dims(), "normal", seed=3))
    assert not all(torch.equal(first[n], normal[n]) for n in first)


def test_a_smooth_block_has_none() -> None:
    assert not edges.names(_subject(toys.softmax())) and not edges.names(_subject(toys.norm()))


def test_a_mask_that_is_wrong_by_a_millionth_is_refused(server: ForkServer) -> None:
    changed = handmade.edit(toys.affine(), (MASK, MASK.replace("<= 0", "<= 1e-6f")))
    found = judge(handmade.build(changed), "cpu", server, quick=True, stages=("loads", "gradients"))
    assert found.passed is False and "edge 0" in found.reason, found.reason
