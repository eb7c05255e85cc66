"""Where roundings of scores decide what attention gives: there no share of a row is wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from esper_ir import grad, text, verify
from esper_ir.builder import Builder
from esper_ir.expand import expand
from esper_ir.reference import evaluate
from gauntlet import inputs, meaning
from gauntlet import subject as subjects
from gauntlet.stage import Context, Failed, Passed, Recipe, Skipped
from gauntlet.stages import gradients, numerics
from gauntlet.subject import Subject
from library.manifest import unpack
from tests.faults import corpus


@pytest.mark.parametrize("layout", ["BHSD", "BSHD"])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_means_the_same_in_primitives(layout: str, causal: bool) -> None:
    """Results and gradients, without a library's node left: what roundings inside it do can be asked."""
    b = Builder("attended")
    q, k, v = (b.input(n, "bfloat16", [2, 3, 5, 4] if layout == "BHSD" else [2, 5, 3, 4]) for n in "qkv")
    y = b.attention(q, k, v, is_causal=causal, layout=layout, scale=0.5)
    flat = expand(grad.joint(verify.typed(b.build(y)), ["q", "k", "v"]).graph)
    opened = subjects._opened(flat)
    assert not [n.op for n in opened if n.op.startswith("attention")]
    torch.manual_seed(0)
    shapes = {n: [d.value({}) for d in t.shape] for n, t in flat.inputs.items()}
    given = {n: torch.randn(shape, dtype=torch.float64) for n, shape in shapes.items()}
    one, other = (evaluate(g, given, precision="float64") for g in (flat, opened))
    for a, c in zip(flat.outputs, opened.outputs, strict=True):
        torch.testing.assert_close(one[a], other[c], rtol=1e-12, atol=1e-12)


def _attended() -> Subject:
    b = Builder("attended")
    b.dim("batch", max=64)
    q, k, v = (b.input(n, "float32", ["batch", 2, 6, 8]) for n in "qkv")
    blueprint = json.loads(text.render(b.build(b.attention(q, k, v, is_causal=True))))
    return Subject(unpack(corpus.compiled(blueprint, "cpu").container), torch.device("cpu"))


@pytest.mark.parametrize(("times", "right"), [(1.0, False), (30.0, False), (1e4, True)])
def test_where_roundings_of_scores_decide_no_gradient_is_wrong(
    times: float, right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backward that takes exp(score - logarithm of the sum) has any share of a row where a score of 1e8 is
    rounded. Of scores that are certain a share is as right or wrong as ever."""
    subject = _attended()
    torch.manual_seed(0)
    leaves = {n: times * torch.randn(3, 2, 6, 8) for n in "qkv"}
    subject.stored = {**leaves, f"{inputs.COTANGENT}{subject.blueprint.outputs[0]}": torch.randn(3, 2, 6, 8)}
    assert meaning.decided(subject, leaves) is not right
    trained = subject.trained

    def off(*given: Any) -> dict[str, torch.Tensor]:
        return {n: t + 0.1 * t.abs().max() for n, t in trained(*given).items()}

    monkeypatch.setattr(subject, "trained", off)
    context = Context(subject, lambda event: None)
    recipe = Recipe("gradients", {"batch": 3}, cotangent="normal", wanted=("q", "k", "v"))
    said = gradients.STAGE.check(context, recipe)
    assert isinstance(said, Skipped if right else Failed), said
    monkeypatch.setattr(subject, "trained", lambda *given: {n: t.log() for n, t in off(*given).items()})
    assert isinstance(gradients.STAGE.check(context, recipe), Failed), "NaN is no share"
    infer = subject.infer
    monkeypatch.setattr(subject, "infer", lambda values: [t + 0.1 * t.abs().max() for t in infer(values)])
    said = numerics.STAGE.check(context, replace(recipe, stage="numerics", cotangent="", wanted=()))
    assert isinstance(said, Failed), "a share of a row is known forwards"


def test_scores_excuse_no_gradient_beside_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    b = Builder("beside")
    b.dim("batch", max=64)
    q, k, v = (b.input(n, "float32", ["batch", 2, 6, 8]) for n in "qkv")
    u, w = b.input("u", "float32", ["batch", 5]), b.param("w", "float32", [5])
    blueprint = b.build(b.attention(q, k, v), b.exp(b.sub(u, w)))
    subject = Subject(
        unpack(corpus.compiled(json.loads(text.render(blueprint)), "cpu").container), torch.device("cpu")
    )
    assert meaning.through_attention(subject) == {"d(q)", "d(k)", "d(v)"}
    torch.manual_seed(0)
    far = {"u": torch.full((3, 5), 2e6), "w": torch.full((5,), 2e6)}
    near = {n: torch.randn(3, 2, 6, 8) for n in "qkv"}
    assert meaning.decided(subject, near | far), "exponents of others are theirs"
    large = {n: 1e4 * t for n, t in near.items()} | {n: torch.randn(t.shape) for n, t in far.items()}
    assert not meaning.decided(subject, large)
    flowing = [torch.randn(3, 2, 6, 8), torch.randn(3, 5)]
    names = (f"{inputs.COTANGENT}{n}" for n in subject.blueprint.outputs)
    subject.stored = large | dict(zip(names, flowing, strict=True))
    trained = subject.trained
    for off, right in (("q", True), ("u", False), ("w", False)):

        def moved(*given: Any, off: str = off) -> dict[str, torch.Tensor]:
            return {n: t + 0.1 * t.abs().max() * (n == off) for n, t in trained(*given).items()}

        monkeypatch.setattr(subject, "trained", moved)
        recipe = Recipe("gradients", {"batch": 3}, cotangent="normal", wanted=("q", "k", "v", "u", "w"))
        said = gradients.STAGE.check(Context(subject, lambda event: None), recipe)
        assert isinstance(said, Passed if right else Failed), (off, said)
