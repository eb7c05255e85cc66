"""What is outside the promise is refused by name or computed right, never wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import runtime
from esper_ir import text
from esper_ir.diagnostics import EsperError
from forge.service import compile_blueprint
from library.store import Library
from tests.promises.shelf import Shelf, drawn

TARGETS = ("cpu", pytest.param("h100", marks=pytest.mark.gpu))
EXAMPLE = "digits_block"
Change = Callable[[torch.Tensor], torch.Tensor]


def _transposed(x: torch.Tensor) -> torch.Tensor:
    return x.t().contiguous().t()


def _every_second_column(x: torch.Tensor) -> torch.Tensor:
    return torch.stack((x, torch.full_like(x, float("nan"))), 2).flatten(1)[:, ::2]


def _shifted_by_one_element(x: torch.Tensor) -> torch.Tensor:
    return torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape)


def _one_row_expanded(x: torch.Tensor) -> torch.Tensor:
    return x[:1].expand(x.shape)


LAYOUTS = (_transposed, _every_second_column, _shifted_by_one_element, _one_row_expanded)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("change", LAYOUTS)
def test_non_contiguous_inputs_are_right_or_refused(shelf: Shelf, target: str, change: Change) -> None:
    """Values and gradients are those of the same numbers in dense, aligned memory."""
    block = shelf.block(EXAMPLE, target)
    (base,) = drawn(block, EXAMPLE, 33)
    odd = change(base.detach()).requires_grad_()
    plain = odd.detach().clone(memory_format=torch.contiguous_format).requires_grad_()
    assert torch.equal(odd, plain)
    expected = block(plain)
    expected.sum().backward()
    try:
        found = block(odd)
    except EsperError as refusal:
        assert refusal.code.startswith("E08"), refusal
        return
    found.sum().backward()
    assert torch.equal(found, expected)
    assert plain.grad is not None and odd.grad is not None and torch.equal(odd.grad, plain.grad)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("rows", [0, 65537])
def test_out_of_range_is_refused(shelf: Shelf, target: str, rows: int) -> None:
    block = shelf.block(EXAMPLE, target)
    with pytest.raises(EsperError) as refusal:
        block(torch.zeros(rows, 64, device=block.report()["device"]))
    assert refusal.value.code == "E0813" and refusal.value.exit_code == 2
    assert "65536" in str(refusal.value)


@pytest.mark.parametrize("target", TARGETS)
def test_fallback_is_right_and_counted(shelf: Shelf, target: str) -> None:
    block = shelf.block(EXAMPLE, target, fallback="eager")
    (x,) = drawn(block, EXAMPLE, 65537)
    found = block(x)
    assert block.report()["counters"]["eager_fallbacks"] == 1
    torch.testing.assert_close(found[:65536], block(x[:65536]), rtol=1e-4, atol=1e-4)
    assert block.report()["counters"]["eager_fallbacks"] == 1


@pytest.mark.parametrize("target", TARGETS)
def test_other_dtypes_ranks_and_sizes_are_refused(shelf: Shelf, target: str) -> None:
    block = shelf.block(EXAMPLE, target)
    device = block.report()["device"]
    wrong = (
        torch.zeros(8, 64, dtype=torch.float64),
        torch.zeros(8, 8, 64),
        torch.zeros(8, 63),
        torch.zeros(64),
    )
    for x in wrong:
        with pytest.raises(EsperError) as refusal:
            block(x.to(device))
        assert refusal.value.code in ("E0810", "E0811", "E0815"), refusal.value
    assert isinstance(block, runtime.Block)


def test_the_twin_takes_tensors_in_the_order_of_a_call(esper_library: Path) -> None:
    """Names that sort differently from their order: the manifest is sorted, a call's order is meaning."""
    blueprint = {
        "format": "esper-blueprint/1",
        "name": "difference",
        "dims": {"rows": {"min": 1, "max": 64}},
        "inputs": {name: {"dtype": "float32", "shape": ["rows", 8]} for name in "za"},
        "params": {},
        "nodes": [{"id": "y", "op": "sub", "inputs": ["z", "a"]}],
        "outputs": ["y"],
    }
    with Library.open(esper_library) as library:
        parsed = text.parse(json.dumps(blueprint))
        made = compile_blueprint(parsed, targets=("cpu",), library=library)[0]
    z, a = torch.randn(5, 8), torch.randn(5, 8)
    with pytest.warns(runtime.UnvalidatedWarning):
        block = runtime.load(made.artifact_id, allow_unvalidated=True, fallback="eager")
        twin = runtime.twin(made.artifact_id, allow_unvalidated=True)
    assert torch.equal(block(z, a), z - a)
    assert torch.equal(twin(z, a), z - a)
    big = torch.randn(65, 8), torch.randn(65, 8)
    assert torch.equal(block(*big), big[0] - big[1])
    assert block.report()["counters"]["eager_fallbacks"] == 1
