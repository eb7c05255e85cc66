"""Under torch.compile: one graph through whole lives of slots, and the same numbers as in eager mode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch._dynamo.utils as dynamo
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils.checkpoint import checkpoint

import runtime
from runtime.seeds import telemetry, traced
from runtime.seeds.commands import KasminaControlCommand
from runtime.seeds.growth import Growth
from runtime.seeds.lifecycle import Lifecycle, Verb
from runtime.seeds.state import HEALTH
from runtime.seeds.telemetry import HealthObserver
from tests.runtime.seeds.garden import LIMITS, WIDTH, Bed, batches, loss_of, net, some, validate

STATES = ("DORMANT", "TRAINING", "GRAFTING", "STABILIZATION", "FINE_TUNING", "FOSSILIZED")


class Tall(nn.Module):
    """`layers` sites, one after the other; one of them a container."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.front = nn.Linear(8, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) if i == 0 else nn.Linear(WIDTH, WIDTH)
            for i in range(layers)
        )
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.front(x))
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Any:
    torch._dynamo.reset()
    dynamo.counters.clear()
    yield
    torch._dynamo.reset()


def graphs() -> int:
    return dynamo.counters["stats"]["unique_graphs"]


def life(growth: Growth, call: Any, optimizer: Any, ids: dict[str, str], at: int) -> set[Lifecycle]:
    """One slot from dormant to fossil, every other one culled on the way; the states seen."""
    slot, seen, data = growth.slots[at], set(), iter(batches(400, rows=16))

    def steps(many: int) -> None:
        for _ in range(many):
            optimizer.zero_grad()
            loss_of(call, next(data)).backward()
            optimizer.step()
            seen.add(slot.state)

    def send(verb: Verb, **more: Any) -> None:
        growth.submit(KasminaControlCommand(slot.site.name, slot.index, verb, ids["lora"], **more))
        growth.commit()

    send(Verb.REQUEST_GERMINATION)
    steps(12)
    growth.measure(slot.id, held_out_gain=0.5, predicted_gain=-0.5)
    send(Verb.PROMOTE)
    steps(8)
    if at % 2:
        send(Verb.CULL, hard=True)
        steps(1)
        return seen
    for verb in (Verb.ADVANCE, Verb.ADVANCE, Verb.ADVANCE, Verb.ADVANCE, Verb.ADVANCE, Verb.PROMOTE):
        growth.measure(slot.id, snapshot_excess=0.0, validation_excess=0.0, ablation=1.0, contribution=0.5,
                       latency_share=0.0)  # fmt: skip
        send(verb)
        steps(3)
    steps(1)
    return seen


@dataclass(frozen=True)
class Lived:
    """What one compiled host with many lives in it came to."""

    states: set[Lifecycle]
    grafts: int
    graphs: tuple[int, int]  # after the first step, after all lives
    breaks: int


def lived(ids: dict[str, str], layers: int, backend: str) -> Lived:
    torch.manual_seed(0)
    model = runtime.wrap(Tall(layers), "layers.*", limits=LIMITS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    growth = runtime.attach(model, optimizer)
    call = torch.compile(model, backend=backend, fullgraph=True)
    loss_of(call, batches(1, rows=16)[0]).backward()
    first = graphs()
    states: set[Lifecycle] = set()
    for at in range(layers):
        states |= life(growth, call, optimizer, ids, at)
    grafts = sum(len(s.chain) for s in growth.sites.values())
    return Lived(states, grafts, (first, graphs()), len(dynamo.counters["graph_break"]))


SEEN = {Lifecycle.TRAINING, Lifecycle.GRAFTING, Lifecycle.FINE_TUNING, Lifecycle.DORMANT}


@pytest.mark.parametrize("layers", some([2, 4], [2]))
def test_one_graph_through_whole_lives(ids: dict[str, str], layers: int) -> None:
    found = lived(ids, layers, "aot_eager")
    assert found.states >= SEEN
    assert (found.grafts, found.graphs, found.breaks) == ((layers + 1) // 2, (1, 1), 0)


@pytest.mark.slow
@pytest.mark.parametrize("layers", range(1, 17))
def test_one_graph_for_one_to_sixteen_slots(ids: dict[str, str], layers: int) -> None:
    found = lived(ids, layers, "aot_eager")
    assert (found.grafts, found.graphs, found.breaks) == ((layers + 1) // 2, (1, 1), 0)


@pytest.mark.slow
@pytest.mark.parametrize("layers", [1, 16])
def test_one_graph_by_inductor(ids: dict[str, str], layers: int) -> None:
    found = lived(ids, layers, "inductor")
    assert (found.grafts, found.graphs, found.breaks) == ((layers + 1) // 2, (1, 1), 0)


@pytest.mark.parametrize("state", some(STATES, ["GRAFTING"]))
def test_the_same_as_eager_in_every_state(ids: dict[str, str], state: str) -> None:
    """Loss, host gradients and seed gradients of one step."""
    found = []
    for compiled in (False, True):
        bed = Bed(net(dropout=0.0))
        if state == "FOSSILIZED":
            bed.bring(ids["fixed"], "EVALUATING")
            bed.growth.measure(bed.slot.id, contribution=0.5, latency_share=0.0)
            bed.command(Verb.PROMOTE)
            assert len(bed.slot.site.chain) == 1
        elif state != "DORMANT":
            bed.bring(ids["mlp"], state)
        bed.growth.arms(bed.slot.id, validate)
        bed.step(2)
        call = torch.compile(bed.model, backend="aot_eager", fullgraph=True) if compiled else bed.model
        bed.optimizer.zero_grad()
        loss = loss_of(call, batches(1, seed=5)[0])
        loss.backward()
        found.append([loss.detach(), *[p.grad for p in bed.model.parameters() if p.grad is not None],
                      *[g for _, g in sorted(bed.slot.grads.items())]])  # fmt: skip
    assert len(found[0]) == len(found[1]) >= 7
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.slow
def test_forwards_without_backwards_leave_nothing(ids: dict[str, str]) -> None:
    bed = Bed()
    bed.bring(ids["lora"], "GRAFTING")
    call = torch.compile(bed.model, backend="aot_eager")
    for batch in batches(3):
        loss_of(call, batch)
    assert traced.waiting() >= 3
    bed.step()
    assert not traced.waiting()


def test_each_backward_finds_its_own_forward(ids: dict[str, str]) -> None:
    """Two forwards wait; the first one's backward comes first."""
    found = []
    for compiled in (False, True):
        bed = Bed(net(dropout=0.0))
        bed.bring(ids["mlp"], "GRAFTING")
        bed.step(2)
        call = torch.compile(bed.model, backend="aot_eager", fullgraph=True) if compiled else bed.model
        losses = [loss_of(call, batch) for batch in batches(2, seed=7)]
        grads = []
        for loss in losses:
            bed.optimizer.zero_grad()
            loss.backward()
            grads += [p.grad.clone() for p in bed.model.parameters() if p.grad is not None]
        found.append(grads)
    assert len(found[0]) == len(found[1]) >= 8
    torch.testing.assert_close(found[0], found[1])


def test_telemetry_of_a_compiled_layer_is_that_of_an_eager_one() -> None:
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = runtime.wrap(net(dropout=0.0), "body", limits=LIMITS)
        growth = runtime.growth_of(model)
        growth.observe(HealthObserver(), every=2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        runtime.attach(model, optimizer)
        call = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        for batch in batches(6, seed=3):
            optimizer.zero_grad()
            loss_of(call, batch).backward()
            optimizer.step()
        found.append(growth.sites["body"].state.device["health"].clone())
    assert found[0][0, HEALTH.index("samples")] == found[0][0, HEALTH.index("grad_samples")] == 3
    torch.testing.assert_close(found[0], found[1])


class Woven(nn.Module):
    """Sites `a`, `b` and `c`; `a` is called twice, and `how` says by what `b` and `c` are called."""

    def __init__(self, how: Any = None) -> None:
        super().__init__()
        self.front, self.head = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 4)
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.how = how if how is not None else lambda part, x: part(x)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.a(torch.tanh(self.front(x))))
        x = self.how(lambda x: torch.tanh(self.b(x)), x)
        return self.head(self.how(lambda x: torch.tanh(self.c(torch.tanh(self.a(x)))), x))


def again(part: Any, x: Tensor) -> Tensor:
    return checkpoint(part, x, use_reentrant=False)


def reentrant(part: Any, x: Tensor) -> Tensor:
    return checkpoint(part, x, use_reentrant=True)


def of_compiled(how: Any) -> Any:
    """The part is compiled and called by the eager model."""
    return lambda part, x: how(torch.compile(part, backend="aot_eager", fullgraph=True), x)


@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize("native", [True, False])
def test_what_is_computed_again_is_observed_once(
    ids: dict[str, str], native: bool, busy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eager and compiled, by either kind of checkpoint: as without one. `busy`: below a graft."""
    if not native:
        monkeypatch.setattr(telemetry, "_native", None)

    def health(how: Any, compiled: bool = False) -> Tensor:
        torch.manual_seed(0)
        bed = Bed(Woven(how), sites=["a", "b", "c"])
        if busy:
            bed.slot = bed.growth.slot("b/0")
            bed.bring(ids["mlp"], "GRAFTING")
        bed.growth.observe(HealthObserver(), every=2)
        for site in bed.growth.sites.values():
            site.state.device["health"].zero_()
        call = torch.compile(bed.model, backend="aot_eager") if compiled else bed.model
        for batch in batches(6, seed=3):
            bed.optimizer.zero_grad()
            for _ in range(2):
                loss_of(call, batch).backward()
            bed.optimizer.step()
        bed.growth.observer.close_epoch(bed.growth.sites)
        return torch.stack([bed.growth.sites[name].state.device["health"][0] for name in "bc"])

    plain = health(None)
    assert plain[0, HEALTH.index("samples")] == plain[0, HEALTH.index("grad_samples")] > 1
    for how in (again, reentrant):
        for found in (health(how), health(how, compiled=True), health(of_compiled(how))):
            torch.testing.assert_close(found, plain)


@pytest.mark.parametrize("how", [None, again])
@pytest.mark.parametrize("loud", ["a", "b", "c"])
def test_layers_that_share_a_ticket_find_their_own_forwards(ids: dict[str, str], loud: str, how: Any) -> None:
    """Two forwards wait, in each of which one layer has a graft and another is observed."""
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        bed = Bed(Woven(how), sites=["a", "b", "c"])
        bed.slot = bed.growth.slot(f"{loud}/0")
        bed.send(Verb.REQUEST_GERMINATION, ids["mlp"])
        bed.growth.commit()
        bed.growth.measure(bed.slot.id, held_out_gain=0.5, predicted_gain=-0.5, trust_ratio=0.0, activity=1.0,
                           gradients_finite=True, training_steps=1000.0)  # fmt: skip
        bed.send(Verb.PROMOTE)
        bed.growth.commit()
        assert bed.slot.state is Lifecycle.GRAFTING
        bed.step(3)
        for site in bed.growth.sites.values():
            site.observer = HealthObserver()
            site.sample(True)
        call = torch.compile(bed.model, backend="aot_eager", fullgraph=True) if compiled else bed.model
        losses = [loss_of(call, batch) for batch in batches(2, seed=7)]
        for loss in losses:
            bed.optimizer.zero_grad()
            loss.backward()
            found.append([p.grad.clone() for p in bed.model.parameters() if p.grad is not None])
        found.append([g for _, g in sorted(bed.slot.grads.items())])
        health = [site.state.device["health"].clone() for site in bed.growth.sites.values()]
        found.append(health)
        bed.optimizer.step()  # what a part that was computed again left from its first forward
        assert not traced.waiting()
    assert len(found) == 8 and len(found[0]) >= 8 and found[2]
    torch.testing.assert_close(found[:4], found[4:])


@pytest.mark.parametrize("how", [None, again])
def test_layers_of_a_graph_share_a_ticket(how: Any) -> None:
    """But for parts that are computed again: of those, one after the other."""
    order: list[str] = []
    tickets: list[int] = []

    def note(graph: Any, _: Any) -> Any:
        for node in graph.graph.nodes:
            given = [*node.args[:1], *node.kwargs.values()]
            order.extend(f"{a}{node.kwargs['key'][-1]}" for a in given if "slots" in str(a))
        inputs = [n.meta["val"] for n in graph.graph.nodes if n.op == "placeholder"]
        tickets.append(sum(v.dtype is torch.uint64 for v in inputs if isinstance(v, Tensor)))
        return make_boxed_func(graph)

    bed = Bed(Woven(how), sites=["b", "c"])
    backend = aot_autograd(fw_compiler=lambda g, _: make_boxed_func(g), bw_compiler=note)
    loss_of(torch.compile(bed.model, backend=backend, fullgraph=True), next(bed.data)).backward()
    forward, backward = "esper.slots_.default", "esper.slots_backward_.default"
    found = [
        f"{back}{site}" for site in "cb" for back in ((backward,) if how is None else (forward, backward))
    ]
    assert (order, tickets) == (found, [1 if how is None else 0])
