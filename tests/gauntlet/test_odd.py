"""Blocks that are odd, and right."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gauntlet.stage import Context, Failed, Passed
from gauntlet.stages import gradients, loads, selftest
from gauntlet.subject import Subject
from library.manifest import unpack
from tests.faults import corpus

NODE = corpus.node
NOWHERE = [NODE("a", "abs", "x"), NODE("b", "neg", "a"), NODE("c", "sub", "b", 1.0), NODE("y", "log", "c")]


@pytest.mark.parametrize(
    "nodes", [[NODE("y", "log", "x")], [NODE("y", "sqrt", "x")], NOWHERE], ids=["log", "sqrt", "nowhere"]
)
def test_a_function_that_is_not_finite_everywhere(nodes: list[dict[str, Any]]) -> None:
    """No difference of NaN and NaN says anything of a gradient."""
    made = corpus.compiled(corpus.blueprint("odd", "float32", {"x": ["rows", 8]}, {}, nodes), "cpu")
    subject = Subject(unpack(made.container), torch.device("cpu"))
    subject.hurry = True
    found = gradients.STAGE.run(Context(subject, lambda event: None, quick=True))
    assert isinstance(found, Passed), found


def test_a_block_without_elements_has_a_verdict() -> None:
    """There is nothing to be wrong about, and the judge says so."""
    made = corpus.compiled(
        corpus.blueprint("none", "float32", {"x": ["rows", 0]}, {}, [NODE("y", "relu", "x")]), "cpu"
    )
    context = Context(Subject(unpack(made.container), torch.device("cpu")), lambda event: None)
    assert isinstance(loads.STAGE.run(context), Passed)
    found = selftest.STAGE.run(context)
    assert isinstance(found, Failed) and "cannot be judged" in found.reason
