"""Imported modules through the compiler: C code and plans against the meaning, an artifact against torch."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

import runtime
from esper_ir.importers.torch_export import from_torch
from forge.service import compile_blueprint, front
from library.store import Library
from tests.esper_ir.chains import CHAINS, Chain
from tests.esper_ir.networks import NETWORKS
from tests.esper_ir.pictures import PICTURES, Picture
from tests.esper_ir.random_chains import module_of
from tests.esper_ir.test_import_torch import backward, inputs
from tests.forge.whole import Machine, check, close, compared, rms

FEW = ("linear_gated", "conv2d_mish_mish", "l2_rows", "up2d_means", "cumsum_masked", "hinge")
EVERY = (*CHAINS, *(Chain(*row) for row in NETWORKS))


def compiled(chain: Chain, target: str, backend: str) -> int:
    """Forward, backward and every mask of gradients against the blueprint in fp64: so many phases."""
    torch.manual_seed(0)
    module, given = chain.make(), inputs(chain.shapes)
    blueprint = from_torch(module, given, dynamic=0 if chain.varies else None)
    work = check(blueprint, dict.fromkeys(blueprint.dims, given[0].shape[0]), target, backend)
    return len(work.lowerings)


@pytest.mark.parametrize("chain", [c for c in CHAINS if c.name in FEW], ids=lambda c: c.name)
def test_few_chains_in_c(chain: Chain) -> None:
    assert compiled(chain, "cpu", "c") > 0


@pytest.mark.slow
@pytest.mark.parametrize("chain", EVERY, ids=lambda c: c.name)
def test_every_chain_in_c(chain: Chain) -> None:
    assert compiled(chain, "cpu", "c") > 0


@pytest.mark.slow
@pytest.mark.parametrize("chain", CHAINS, ids=lambda c: c.name)
def test_every_chain_as_plans_for_the_card(chain: Chain) -> None:
    assert compiled(chain, "h100", "plans") > 0


@pytest.mark.slow
@pytest.mark.parametrize("chain", [Chain(*row) for row in NETWORKS], ids=lambda c: c.name)
def test_every_network_as_plans_for_the_card(chain: Chain) -> None:
    """Norms stand behind norms and magnify how torch, which runs plans here, rounds and splits a sum among
    threads; eager may be lucky (the same plans as C are held to the strict rule above).
    """
    torch.manual_seed(0)
    module, given = chain.make(), inputs(chain.shapes)
    blueprint = from_torch(module, given, dynamic=0 if chain.varies else None)
    work = front(blueprint, "h100")
    found, wide, eager = compared(work, Machine(work), dict.fromkeys(blueprint.dims, given[0].shape[0]))
    for name, value in found.items():
        off = rms(value.double() - wide[name].double())
        assert off <= 1e-4 * (rms(wide[name]) + 1.0) or close(value, wide[name], eager[name]), name


@pytest.mark.slow
@pytest.mark.parametrize(("target", "backend"), [("cpu", "c"), ("h100", "plans")])
@pytest.mark.parametrize("row", PICTURES, ids=lambda r: r[0])
def test_every_picture(row: Picture, target: str, backend: str) -> None:
    """Norms stand behind norms here: a gradient that cancels to nothing keeps roundings of its parts, which
    are of the size of the cotangents.
    """
    torch.manual_seed(0)
    _, make, shapes, _ = row
    given = inputs(shapes)
    work = front(from_torch(make(), given, dynamic=0), target)
    found, wide, _ = compared(work, Machine(work, backend), {"batch": given[0].shape[0]})
    for name, value in found.items():
        assert rms(value.double() - wide[name].double()) <= 1e-4 * (rms(wide[name]) + 1.0), name


@pytest.mark.slow
@pytest.mark.parametrize("target", ["cpu", "h100"])
@pytest.mark.parametrize("seed", range(40))
def test_random_chains_as_plans(seed: int, target: str) -> None:
    """Every chain has a plan, and results are no further from fp64 than roundings that a norm may magnify."""
    module, given = module_of(seed)
    blueprint = from_torch(module, given, dynamic=0)
    work = front(blueprint, target)
    found, wide, _ = compared(work, Machine(work), {"batch": 3})
    for name, value in found.items():
        assert rms(value.double() - wide[name]) <= 1e-3 * (rms(wide[name]) + 1.0), name


@pytest.mark.parametrize("name", ["linear_swish_norm", "conv2d_residual_logs", "linear_batch_norm"])
def test_an_artifact_trains_as_the_module_does(name: str, esper_library: Path) -> None:
    """Compiled, loaded, given the values of the module: results, gradients and statistics are torch's,
    at two sizes.
    """
    (chain,) = [c for c in CHAINS if c.name == name]
    torch.manual_seed(0)
    module, given = chain.make(), inputs(chain.shapes)
    blueprint = from_torch(module, given, dynamic=0)
    with Library.open(esper_library, roles=("compiler",)) as library:
        made = compile_blueprint(blueprint, targets=("cpu",), library=library)[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        block = runtime.load(made.artifact_id, allow_unvalidated=True)
    block.load_state_dict(dict(blueprint.values))
    wide = inputs([(s[0] + 3, *s[1:]) for s in chain.shapes])
    for tensors in (given, wide):
        ours, theirs = backward(block, tensors), backward(module, tensors)
        assert set(ours) == set(theirs)
        for label, value in theirs.items():
            torch.testing.assert_close(ours[label], value, rtol=1e-4, atol=1e-5, msg=f"{label} of {name}")
        for label, value in block.named_buffers():
            torch.testing.assert_close(value, module.state_dict()[label], msg=label)


def test_results_without_a_gradient_are_served_whatever_inputs_ask(esper_library: Path) -> None:
    """Places and truth values: an artifact has no plans for training, and a call none to miss."""
    blueprint = from_torch(lambda x: (x.argmax(1), (x > 0).any(1)), torch.randn(3, 4), dynamic=0)
    with Library.open(esper_library, roles=("compiler",)) as library:
        made = compile_blueprint(blueprint, targets=("cpu",), library=library)[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        block = runtime.load(made.artifact_id, allow_unvalidated=True)
    x = torch.randn(5, 4, requires_grad=True)
    for _ in range(2):
        place, above = block(x)
        assert torch.equal(place, x.argmax(1)) and torch.equal(above, (x > 0).any(1))
        assert not place.requires_grad
