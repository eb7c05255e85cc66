"""The text of row kernels: what is asked for first, and what is rounded."""

from __future__ import annotations

import re

import pytest

import esper_ir.text as text
from forge.emit.triton import emit_kernel
from forge.plan import KernelPlan, RowTile
from forge.service import front
from tests.forge.test_blocks import EXAMPLES


def kernels(name: str) -> list[KernelPlan]:
    work = front(text.parse((EXAMPLES / f"{name}.json").read_text()), "h100")
    return [s.plan for s in work.kernels.by_key.values()]


def one_block(plan: KernelPlan) -> bool:
    tile = plan.tile
    return isinstance(tile, RowTile) and not tile.programs and tile.rows_per_program == tile.block_rows


@pytest.mark.parametrize("name", ["batchnorm_relu", "softmax"])
def test_the_rows_of_one_block_are_asked_for_before_all_else(name: str) -> None:
    """Together, and before values of columns are handed round through shared memory."""
    several = 0
    for plan in filter(one_block, kernels(name)):
        lines = emit_kernel(plan).splitlines()
        rows = [at for at, line in enumerate(lines) if "tl.load(" in line and "row" in line]
        others = [at for at, line in enumerate(lines) if "tl.load(" in line and at not in rows]
        assert rows == list(range(rows[0], rows[-1] + 1)), plan.name
        assert not others or rows[-1] < others[0]
        several += len(rows) > 1
    assert several


@pytest.mark.parametrize("name", ["batchnorm_relu", "softmax", "rmsnorm_residual", "groupnorm_silu"])
def test_nothing_is_rounded_twice(name: str) -> None:
    """No compiler takes away a rounding that was written; stores of a value's type round it themselves."""
    for plan in kernels(name):
        written = emit_kernel(plan)
        assert not re.search(r"_round_bf16\(\(_round_bf16", written), plan.name
        assert not re.search(r"_round_bf16\(\(tl\.(maximum|where)\((v\d+|0\.0), (v\d+|0\.0)[,)]", written)
        for value in re.findall(r"tl\.store\([^,]+, \((\w+)\)\.to\(tl\.bfloat16\)", written):
            if len(re.findall(rf"\b{value}\b", written)) == 2:
                assert f"{value} = _round_bf16" not in written, (plan.name, value)
