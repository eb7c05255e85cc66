"""The tensors of a case: however they lie in memory, the reference is asked about the values that the
artifact is given; and something always flows back."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from esper_ir import text
from esper_ir.builder import Builder
from gauntlet import inputs
from gauntlet.stage import Recipe
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
