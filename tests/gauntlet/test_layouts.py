"""However a case lies in memory, the reference is asked about the values that the artifact is given."""

from __future__ import annotations

import pytest
import torch

from gauntlet import inputs
from gauntlet.stage import Recipe
from gauntlet.subject import Subject
from library.manifest import unpack
from tests.faults import handmade, toys


@pytest.mark.parametrize("layout", inputs.LAYOUTS)
def test_the_reference_takes_what_the_artifact_gets(layout: str) -> None:
    subject = Subject(unpack(handmade.build(toys.affine())), torch.device("cpu"))
    values, meant = inputs.case(subject, Recipe("numerics", subject.base_dims(), layout=layout))
    assert all(torch.equal(values[n], meant[n]) for n in values)
    assert all(t.is_contiguous() for t in meant.values())
