"""Results over operands on a processor: who may, and that the numbers stay."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import forge.lower
from bench.prepare import UNBUILT
from esper_ir import text
from esper_ir.builder import Builder
from forge.lower import PhaseLowering
from forge.lowered import Launch
from forge.pass_manager import run
from forge.plan import KernelPlan, Load
from forge.reuse import in_place
from forge.target import resolve
from forge.views import ONE
from forge.work import Work
from library.launch import ExternStep
from tests.forge.whole import check

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def apart() -> PhaseLowering:
    """x + u v, every value with memory of its own."""
    work = Work(text.load(EXAMPLES / "lora.json"), resolve("cpu-v3"), UNBUILT.name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forge.lower, "in_place", lambda plan, *rest, **more: plan)
        return run(UNBUILT, work).lowerings[0]


def of_steps(low: PhaseLowering) -> list[KernelPlan | None]:
    steps = [s for _, made in low.lowered for s in made.steps]
    return [s.plan if isinstance(s, Launch) else None for s in steps]


def test_a_sum_is_written_over_the_product_it_reads(apart: PhaseLowering) -> None:
    made = in_place(apart.plan, of_steps(apart))
    assert [b.name for b in made.buffers if b.source == "temp"] == ["u"]
    product = next(s for s in made.steps if s.group == "v")
    assert isinstance(product, ExternStep)
    assert [v.buffer for v in product.outs] == list(made.outputs)
    assert [made.buffers[v.buffer].name for v in product.inputs] == ["u", "b"]


@pytest.mark.parametrize("kind", ["saved", "read later", "another element", "read after"])
def test_an_operand_that_is_still_wanted_stays(kind: str, apart: PhaseLowering) -> None:
    plan, kernels = apart.plan, of_steps(apart)
    last = kernels[-1]
    assert last is not None
    operand = next(a for a in last.accesses if a.buffer == "v")
    number = next(n for n, b in enumerate(plan.buffers) if b.name == "v")
    if kind == "saved":
        plan = replace(plan, saved=(number,))
    elif kind == "read later":
        plan = replace(plan, steps=(*plan.steps, plan.steps[-1]))
        kernels.append(last)
    elif kind == "read after":
        kernels[-1] = replace(last, body=(*last.body, Load("again", last.accesses.index(operand))))
    else:
        moved = tuple(replace(a, offset=ONE) if a.buffer == "v" else a for a in last.accesses)
        kernels[-1] = replace(last, accesses=moved)
    assert in_place(plan, kernels) == plan


def test_rows_that_are_loaded_twice_are_not_written_over() -> None:
    """A variance down the columns looks at all rows of a program again, when a result of it is stored."""
    b = Builder("again")
    b.dim("rows", min=1, max=4096, tune=(64,))
    y = b.softmax(b.input("x", "float32", ["rows", 31]), dim=0)
    check(b.build(y, b.var(b.mul(y, 3.0), dims=[0], correction=0)), {"rows": 40}, "cpu", "c")
