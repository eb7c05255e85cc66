"""Modules of torch as blueprints: the twin of what was imported equals the module, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from esper_ir.eager import to_torch
from esper_ir.graph import Blueprint
from esper_ir.importers.torch_export import from_torch
from esper_ir.text import parse, render
from tests.esper_ir.chains import CHAINS, Chain
from tests.esper_ir.networks import GPT, NETWORKS, tokens
from tests.esper_ir.pictures import PICTURES, Shapes

WHOLE = (*NETWORKS, *PICTURES)


def inputs(shapes: Any, low: float = -1.0) -> tuple[Tensor, ...]:
    gen = torch.Generator().manual_seed(1)
    return tuple(torch.rand(s, generator=gen) * (1.0 - low) + low for s in shapes)


def flat(value: Any) -> list[Tensor]:
    return [v for v in torch.utils._pytree.tree_leaves(value) if isinstance(v, Tensor)]


def backward(
    module: nn.Module, given: tuple[Tensor, ...], names: dict[str, str] | None = None
) -> dict[str, Tensor]:
    """Outputs, and gradients of inputs and parameters, of random cotangents."""
    held = tuple(t.clone().requires_grad_() if t.is_floating_point() else t for t in given)
    found = flat(module(*held))
    gen = torch.Generator().manual_seed(2)
    roots = [v for v in found if v.requires_grad]
    cotangents = [torch.randn(v.shape, generator=gen).to(v.dtype) for v in roots]
    out = {f"output {i}": v.detach() for i, v in enumerate(found)}
    if not roots:
        return out
    module.zero_grad()
    torch.autograd.backward(roots, cotangents)
    out |= {f"input {i}": v.grad for i, v in enumerate(held) if v.grad is not None}
    return out | {n: p.grad for n, p in module.named_parameters() if p.grad is not None}


def same(module: nn.Module, blueprint: Blueprint, given: tuple[Tensor, ...]) -> int:
    """The text makes the round trip, and the twin gives what the module gives: so many tensors were compared,
    results and gradients."""
    assert parse(render(blueprint)) == blueprint
    ours, theirs = backward(to_torch(blueprint), given), backward(module, given)
    assert set(ours) == set(theirs)
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, msg=lambda text, n=name: f"{n}: {text}")
    return len(theirs)


def larger(shapes: Shapes) -> Shapes:
    """Twice the batch, in every input that has it."""
    first = shapes[0][0]
    return tuple((s[0] + first, *s[1:]) if s[0] == first else s for s in shapes)


@pytest.mark.parametrize("chain", CHAINS, ids=lambda c: c.name)
def test_chain(chain: Chain) -> None:
    torch.manual_seed(0)
    module = chain.make()
    given = inputs(chain.shapes, chain.low)
    blueprint = from_torch(module, given, dynamic=0 if chain.varies else None)
    same(module, blueprint, given)
    if chain.varies:
        assert set(blueprint.dims) == {"batch"}
        same(module, blueprint, inputs(larger(chain.shapes), chain.low))


TRAINED = [pytest.param(*row, True, id=f"train-{row[0]}") for row in WHOLE]
EVALUATED = [
    pytest.param(*row, False, id=f"eval-{row[0]}", marks=[pytest.mark.slow] * (at % 3 > 0))
    for at, row in enumerate(WHOLE)
]


@pytest.mark.parametrize(("name", "make", "shapes", "varies", "training"), [*TRAINED, *EVALUATED])
def test_network(name: str, make: Any, shapes: Any, varies: bool, training: bool) -> None:
    torch.manual_seed(0)
    module = make().train(training)
    given = inputs(shapes)
    blueprint = from_torch(module, given, dynamic=0 if varies else None)
    assert same(module, blueprint, given) > 0
    if varies:
        assert same(module, blueprint, inputs(larger(shapes))) > 0


def test_tied_embeddings_and_loss() -> None:
    torch.manual_seed(0)
    module = GPT()
    given = tokens()
    blueprint = from_torch(module, given, dynamic=0)
    same(module, blueprint, given)
    params = [leaf.name for leaf in blueprint.of_kind("param")]
    assert "wte.weight" in params and "lm_head.weight" not in params
    assert set(params) == {n for n, _ in module.named_parameters()}
