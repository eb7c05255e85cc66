"""Columns some way apart as one position: the same numbers, each read and computed once."""

from __future__ import annotations

import pytest

from esper_ir.builder import Builder, Value
from forge.halves import places_of
from forge.lowered import Launch
from forge.plan import KernelPlan, Load, Store
from forge.service import front
from tests.forge.test_inside import F, Make, blueprint, rms_rope
from tests.forge.whole import check


def kernels(make: Make, target: str = "h100") -> list[KernelPlan]:
    work = front(blueprint(make), target)
    steps = [s for low in work.lowerings for _, lowered in low.lowered for s in lowered.steps]
    return [s.plan for s in steps if isinstance(s, Launch)]


@pytest.mark.parametrize("target", ["h100", "cpu"])
def test_a_rotated_row_is_read_and_normed_once(target: str) -> None:
    forward = kernels(rms_rope(64), target)[0]
    assert forward.cols.static == 32 and not any(a.parts for a in forward.accesses)
    read = [forward.accesses[s.access] for s in forward.body if isinstance(s, Load)]
    assert len([a for a in read if a.buffer == "x"]) == len([a for a in read if a.buffer == "w"]) == 2
    assert len([s for s in forward.body if isinstance(s, Store)]) == 2
    assert not any(a.parts for p in kernels(rms_rope(64), target) for a in p.accesses)


@pytest.mark.parametrize("target", ["h100", "cpu"])
@pytest.mark.parametrize("width", [16, 20, 64, 192])
def test_the_same_numbers(width: int, target: str) -> None:
    check(blueprint(rms_rope(width)), {"rows": 37}, target)


def test_what_cannot_be_taken_apart_stays() -> None:
    def shifted(b: Builder) -> tuple[Value, ...]:
        return (b.op("reverse", b.input("x", F, ["rows", 48]), dim=-1),)

    for plan in (*kernels(shifted), *kernels(rms_rope(10))):
        assert places_of(plan.space, plan.accesses, plan.body) == 1
