"""Powers by the numbers that torch, too, computes by products and roots."""

from __future__ import annotations

import json

import pytest

import esper_ir.text as text
from forge.emit.triton import emit_kernel
from forge.service import front
from tests.forge.test_interpreter import powers


def bodies(power: float, phase: str = "") -> str:
    """The kernels' own text, for a card; of one phase, of whose kernels names begin so."""
    work = front(text.parse(json.dumps(powers(power))), "h100")
    texts = {s.plan.name: emit_kernel(s.plan) for s in work.kernels.by_key.values()}
    texts = {name: whole for name, whole in texts.items() if name.startswith(phase)}
    assert texts
    return "".join(whole[whole.index(f"def {name}(") :] for name, whole in texts.items())


@pytest.mark.parametrize("power", [1, 2, 3, 2.0, 3.0, 0.5, -0.5, -1.0, -2.0])
def test_the_general_function_is_not_asked(power: float) -> None:
    """It takes several times what memory does: x^3 of float32 ran at half the rate of a copy."""
    assert "_pow(" not in bodies(power, "inf")
    assert "_pow(" in bodies(2.5, "inf")


@pytest.mark.parametrize("power", [1, 2, 3, 2.0, 3.0, 0.5, -1.0])
def test_nor_for_the_slope(power: float) -> None:
    assert "_pow(" not in bodies(power)
