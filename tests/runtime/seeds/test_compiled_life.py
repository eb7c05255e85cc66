"""A seed's whole life inside a graph made by inductor, beside the same life in eager mode: the compiled graph
writes over its buffers, and nothing that a graft keeps for its backward may lie in them."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch import Tensor
from torch._inductor.utils import run_and_get_code

import runtime
from runtime.seeds.lifecycle import Lifecycle, Verb
from tests.runtime.seeds.conftest import Ids
from tests.runtime.seeds.garden import LIMITS, Bed, batches, loss_of
from tests.runtime.seeds.test_compiled import Tall

pytestmark = pytest.mark.slow


def life(ids: Ids, called: Any) -> list[float]:
    """Losses of 60 steps: learning, grafting, culling, learning again."""
    limits = replace(LIMITS, embargo_epochs=0)
    bed = Bed(sites=["front", "body"], limits=limits)
    model = called(bed.model)
    slot, losses = bed.growth.slot("body/0"), []
    for number in range(60):
        if number % 10 == 0:
            if slot.state is Lifecycle.DORMANT:
                bed.send(Verb.REQUEST_GERMINATION, ids["mlp"], slot)
            elif slot.state is Lifecycle.TRAINING:
                bed.growth.measure(slot.id, held_out_gain=0.5, predicted_gain=-0.1)
                bed.send(Verb.PROMOTE, slot=slot)
            elif number == 40:
                bed.send(Verb.CULL, slot=slot, hard=True)
            bed.growth.commit()
        bed.optimizer.zero_grad()
        loss = loss_of(model, next(bed.data))
        loss.backward()
        bed.optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def test_a_life_under_inductor_is_that_of_eager_mode(ids: Ids) -> None:
    torch.compiler.reset()
    compiled = life(ids, torch.compile)
    assert compiled == pytest.approx(life(ids, lambda model: model), rel=1e-3, abs=1e-4)


def test_the_program_of_inductor_neither_copies_nor_dispatches_where_nothing_grows() -> None:
    model = runtime.wrap(Tall(3), ["layers.1", "layers.2"], limits=LIMITS)
    x = batches(1, rows=16)[0][0]
    model(x)

    def train() -> Tensor:
        loss = torch.compile(model, fullgraph=True)(x).square().mean()
        loss.backward()
        return loss

    with torch._inductor.config.patch(force_disable_caches=True):
        _, programs = run_and_get_code(train)
    whole = "\n".join(programs)
    assert whole.count(" not in esper_loud else esper_run(") == 1
    assert whole.count(" not in esper_loud else esper_run_next(") == 1
    assert whole.count("None if not esper_waiting else esper_run_back(") == 2
    assert not re.search(r"slots_(next_|backward_)?\.default\(", whole)
    assert "clone" not in whole
