"""Operators, curves, strategies, isolation; the objectives; the state tensor; layers of other shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import runtime
from esper_ir.diagnostics import EsperError
from runtime.seeds import incubation
from runtime.seeds.commands import Graft, GraftingStrategy
from runtime.seeds.evidence import mean_of, over_ranks
from runtime.seeds.grafting import CURVES, OPERATORS, Reading, alpha_at, blend, effective, progress
from runtime.seeds.lifecycle import Lifecycle, Limits, Verb
from runtime.seeds.seed import Spec, make
from runtime.seeds.state import COLUMNS, StateTensor, artifact_prefix, offsets
from tests.runtime.seeds.conftest import Ids
from tests.runtime.seeds.garden import LIMITS, WIDTH, Bed, Net, batches, loss_of, net, some, validate
from tests.runtime.seeds.test_zero_impact import Checkpointed, Reentrant

YES = torch.tensor(True)


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_operators_are_the_identity_at_zero_and_whole_at_one(operator: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    h, out = torch.randn(5, 8).to(dtype), torch.randn(5, 8).to(dtype)
    h[0, 0] = -0.0
    gate = torch.randn(8).to(dtype)
    z = effective(operator, h, out, gate)
    at = [blend(h, z, torch.tensor(a), YES, isolated=True) for a in (0.0, 0.5, 1.0)]
    assert all(y.dtype is dtype for y in at) and z.dtype is dtype
    assert at[0].view(torch.uint8).equal(h.view(torch.uint8)) and at[2].equal(z)
    torch.testing.assert_close(at[1].float(), (h.float() + z.float()) / 2, rtol=2e-2, atol=2e-2)
    named = {"lerp": out, "add": h + out, "mul": h * (1 + torch.tanh(out))}
    assert operator == "gate" or z.equal(named[operator])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nothing_that_is_not_finite_is_blended_in(bad: float) -> None:
    h = torch.randn(4, 3, requires_grad=True)
    z = torch.full((4, 3), bad, requires_grad=True)
    for alpha, finite in ((0.0, torch.tensor(True)), (0.7, torch.tensor(False))):
        y = blend(h, z, torch.tensor(alpha), finite, isolated=False)
        assert y.equal(h)
    y.sum().backward()
    assert h.grad.equal(torch.ones(4, 3)) and z.grad.equal(torch.zeros(4, 3))


def test_gradients_of_a_blend() -> None:
    h = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    z = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    alpha = torch.tensor(0.3)
    assert torch.autograd.gradcheck(lambda a, b: blend(a, b, alpha, YES, isolated=False), (h, z))
    blend(h, z, alpha, YES, isolated=True).sum().backward()
    torch.testing.assert_close(h.grad, torch.ones_like(h))
    torch.testing.assert_close(z.grad, torch.full_like(z, 0.3), rtol=1e-6, atol=1e-6)


def test_an_alpha_per_sample_measures_both_arms_in_one_pass(ids: dict[str, str]) -> None:
    bed = Bed()
    bed.bring(ids["mlp"], "STABILIZATION")
    x = batches(1)[0][0]
    alphas = torch.zeros(len(x))
    alphas[::2] = 1.0
    with bed.growth.override("body/0", alphas):
        mixed = bed.model(x)
    with bed.growth.override("body/0", 0.0):
        without = bed.model(x)
    assert mixed[1::2].equal(without[1::2])
    torch.testing.assert_close(mixed[::2], bed.model(x)[::2])
    with pytest.raises(EsperError) as error, bed.growth.override("elsewhere/0", 0.0):
        pass
    assert error.value.code == "E1014"


def test_arms_of_several_ranks_are_one() -> None:
    assert over_ranks([(1.0, 2.0, 3.0), (3.0, 4.0)]) == (2.0, 3.0) and over_ranks([]) == ()
    same = (0.5, 0.7, 0.6)
    assert mean_of(over_ranks([same, same])) == mean_of(same)  # the same data twice is not more data


@pytest.mark.parametrize("curve", CURVES)
def test_ramps_are_functions_of_integers(curve: str) -> None:
    up = [alpha_at(0.0, 1.0, 30, n, curve) for n in range(31)]
    assert up[0] == 0.0 and up[30] == 1.0 == alpha_at(0.0, 1.0, 30, 99, curve)
    assert all(a < b for a, b in zip(up, up[1:], strict=False))
    assert alpha_at(0.6, 0.0, 5, 0, curve) == 0.6 and alpha_at(0.6, 0.0, 5, 5, curve) == 0.0
    assert abs(alpha_at(0.0, 1.0, 30, 15, curve) - 0.5) < 1e-12
    assert alpha_at(0.0, 1.0, 5000, 4999, curve) < 1.0


def test_strategies() -> None:
    limits, s = Limits(), GraftingStrategy
    assert progress(s.FIXED_RAMP, Reading(drift=9.0, gradient=9.0), limits) == 1
    assert [progress(s.PERFORMANCE_LINKED, Reading(falls=n), limits) for n in (0, 1, 2, 3, 9)] == [
        1,
        2,
        3,
        4,
        4,
    ]
    assert [progress(s.DRIFT_CONTROLLED, Reading(drift=d), limits) for d in (0.0, 0.12, 0.13)] == [1, 1, 0]
    gated = [progress(s.GRAD_NORM_GATED, Reading(gradient=g), limits) for g in (None, 0.05, 0.1, 1.0, 1.01)]
    assert gated == [1, 0, 1, 1, 0]


def test_a_drifting_host_pauses_its_graft(ids: dict[str, str]) -> None:
    events: list[Any] = []
    bed = Bed(lr=0.05)
    bed.growth.listeners.append(events.append)
    bed.plant(ids["mlp"], grafting_strategy=GraftingStrategy.DRIFT_CONTROLLED)
    bed.step(20)
    bed.growth.measure(bed.slot.id, held_out_gain=0.5, predicted_gain=-0.1)
    bed.command(Verb.PROMOTE)
    with torch.no_grad():
        bed.model.body.weight.mul_(2.0)
    bed.step(4)
    assert bed.slot.alpha < 1.0 and bed.slot.get("paused") == 1
    held = bed.slot.alpha
    bed.growth.arms(bed.slot.id, validate)
    assert not bed.growth.snapshot().of("body/0").ready  # G3: paused, and not at its target
    with torch.no_grad():
        bed.model.body.weight.copy_(bed.slot.before["body.weight"])
    bed.step(8)
    assert bed.slot.alpha > held and bed.slot.get("paused") == 0
    assert [e.kind for e in events if e.kind.startswith("RAMP")] == ["RAMP_PAUSED", "RAMP_RESUMED"]


@pytest.mark.parametrize(
    ("isolate", "grafting", "tuning"),
    [("until_fine_tuning", True, False), ("always", True, True), ("never", False, False)],
)
def test_isolation(ids: dict[str, str], isolate: str, grafting: bool, tuning: bool) -> None:
    """Whether the host below learns through the seed."""
    bed = Bed()
    bed.bring(ids["mlp"], "GRAFTING", Graft(isolate=isolate))
    bed.step(LIMITS.ramp_steps)
    assert bed.slot.isolated == grafting

    def below() -> Tensor:
        h = torch.randn(4, WIDTH, requires_grad=True)
        y = bed.slot.site.run(h)
        (g,) = torch.autograd.grad(y.sum(), h)
        return g

    assert below().equal(torch.ones(4, WIDTH)) == grafting
    bed.growth.arms(bed.slot.id, validate)
    bed.growth.commit()
    bed._onward("STABILIZATION")
    bed._onward("EVALUATING")
    assert bed.slot.state is Lifecycle.FINE_TUNING and bed.slot.isolated == tuning


@pytest.mark.parametrize("state", some(["GRAFTING", "FINE_TUNING"], ["FINE_TUNING"]))
@pytest.mark.parametrize("kind", some([Checkpointed, Reentrant], [Checkpointed]))
def test_a_graft_under_activation_checkpointing(ids: dict[str, str], state: str, kind: type[Net]) -> None:
    """Computed again in the backward: the same loss and gradients, nothing counted twice."""
    found = []
    for made in (Net, kind):
        torch.manual_seed(0)
        bed = Bed(made(0.3))
        torch.manual_seed(1)
        bed.bring(ids["mlp"], state)
        bed.step(3)
        torch.manual_seed(2)
        bed.optimizer.zero_grad()
        loss = loss_of(bed.model, batches(1)[0])
        loss.backward()
        grads = [p.grad for p in bed.model.parameters()]
        found.append([loss.detach(), *grads, *[g for _, g in sorted(bed.slot.grads.items())]])
    assert len(found[0]) == 1 + 6 + 4
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


# -- objectives
# -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("objective", ["proximal", "reconstruct", "ste"])
def test_slopes_are_the_gradients_of_the_objectives(objective: str) -> None:
    torch.manual_seed(1)
    h, g = torch.randn(6, 5), torch.randn(6, 5) * 1e-3
    for size in (0.05, 3.0):
        d = (torch.randn(6, 5) * size).requires_grad_()
        at = incubation.scales(h, g, 0.2)
        losses = {
            "proximal": incubation.proximal_loss(d, g, at),
            "reconstruct": d.square().sum() / at.reach.square(),
            "ste": (g * d).sum() / (at.g * at.reach)
            if d.norm() <= at.reach
            else d.square().sum() / at.reach**2,
        }
        (wanted,) = torch.autograd.grad(losses[objective], d)
        torch.testing.assert_close(
            incubation.slope(objective, d.detach(), g, at), wanted, rtol=1e-4, atol=1e-6
        )


def test_the_identity_has_loss_one_whatever_the_loss_scale() -> None:
    h, g = torch.randn(4, 3), torch.randn(4, 3)
    for scale in (1e-6, 1.0, 65536.0):
        at = incubation.scales(h, g * scale, 0.2)
        zero = torch.zeros(4, 3)
        assert abs(float(incubation.proximal_loss(zero, g * scale, at)) - 1.0) < 1e-4
        best = -at.reach / at.g * (g * scale)
        assert float(incubation.proximal_loss(best, g * scale, at)) < 1e-6
        gain, predicted, ratio = incubation.held_out(best, g * scale, at)
        assert (
            abs(float(gain) - 1) < 1e-4
            and abs(float(predicted) + 1) < 1e-4
            and abs(float(ratio) - 0.2) < 1e-4
        )


def held_back(lr: float) -> Bed:
    """A host that does not learn by itself, so that its gradient goes on pointing somewhere."""
    bed = Bed(optimizer=lambda p, **_: torch.optim.Adam(p, lr=lr))
    for parameter in bed.model.parameters():
        parameter.requires_grad_(False)
    return bed


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["proximal", "ste"])
def test_a_seed_stays_in_its_trust_radius(ids: dict[str, str], objective: str) -> None:
    """The straight-through objective without a guard runs away; with it the ratio is bounded."""
    bed = held_back(0.01)
    bed.plant(ids["mlp"], Graft(objective=objective))
    bed.step(300)
    probe = bed.growth.snapshot().of("body/0").probe
    assert 0.02 < probe["ratio"] / probe["held"] < 0.3
    evidence = bed.growth.evidence(bed.slot)
    assert evidence["activity"] > 0.05 and evidence["gradients_finite"]
    assert evidence["predicted_gain"].high < 0


def test_shadow_steps_teach_and_are_counted(ids: dict[str, str]) -> None:
    bed = held_back(0.01)
    bed.plant(ids["mlp"], Graft(objective="shadow"))
    assert bed.growth.shadow_step(lambda: torch.zeros((), requires_grad=True)) == {"body/0": 0.0}
    for batch in batches(60):
        bed.optimizer.zero_grad()
        loss = loss_of(bed.model, batch)
        loss.backward()
        told = bed.growth.shadow_step(lambda batch=batch: loss_of(bed.model, batch))
        bed.optimizer.step()
    assert not told or told["body/0"] < float(loss.detach())  # through the seed it is lower by now
    evidence = bed.growth.snapshot().of("body/0").evidence
    assert evidence["gradients_finite"] and evidence["activity"] > 0.01
    assert bed.slot.get("seed_steps") == 48 and evidence["predicted_gain"].high < 0


def test_reconstruction_alone_never_passes(ids: dict[str, str]) -> None:
    """A seed that begins as the identity has learnt nothing, and G2 says so."""
    bed = Bed()
    bed.plant(ids["mlp"], Graft(objective="reconstruct"))
    bed.step(100)
    (refusal,) = bed.command(Verb.PROMOTE).refused
    assert refusal.record.gate == "G2" and "held_out_gain" in refusal.reason


@pytest.mark.slow
def test_a_seed_that_helps_passes_g2_by_itself(ids: dict[str, str]) -> None:
    bed = held_back(0.003)
    bed.plant(ids["mlp"])
    bed.step(200)
    assert bed.growth.snapshot().of("body/0").ready
    assert bed.command(Verb.PROMOTE).applied


# -- the state tensor
# -------------------------------------------------------------------------------------------------------


def test_the_layout_of_the_state_tensor() -> None:
    state = StateTensor(3)
    assert {c.name: state.host[c.name].dtype for c in COLUMNS} == {c.name: c.dtype for c in COLUMNS}
    assert all(first % 8 == 0 for first, _ in offsets(3).values())
    state.set(1, alpha=0.25, lifecycle=4, artifact=artifact_prefix("f" * 64))
    assert state.get("artifact", 1) == -1 and state.get("alpha", 1) == 0.25 and state.get("alpha", 0) == 0.0
    state.device["health"][2, 0] += 5
    state.device["fault"][0] = 3
    state.fetch("layer")
    assert state.get("fault", 0) == 3 and float(state.host["health"][2, 0]) == 5
    assert artifact_prefix("0123456789abcdef" + "0" * 48) == 0x0123456789ABCDEF


@pytest.mark.parametrize("column", [c.name for c in COLUMNS if c.owner == "host"])
@pytest.mark.parametrize("side", ["host", "device"])
def test_any_flipped_byte_is_found(column: str, side: str) -> None:
    state = StateTensor(2)
    state.set(0, alpha=0.5)
    data = state._mirror if side == "host" else state._bytes
    first, size = offsets(2)[column]
    data[first + size - 1] ^= 64
    with pytest.raises(EsperError) as error:
        state.fetch("layer")
    assert error.value.code == "E1010" and (side == "host" or column in error.value.message)


# -- other layers
# -------------------------------------------------------------------------------------------------------


class Pictures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Conv2d(1, 4, 3, padding=1)
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.body(x)).mean((2, 3)))


class Tokens(nn.Module):
    """The site gives a tuple, and three axes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.body(x, x, x, need_weights=False)[0]).mean(1)


@pytest.mark.parametrize(
    ("kind", "shape", "name", "operator"),
    [
        (Pictures, (6, 1, 8, 8), "conv", "lerp"),
        (Pictures, (6, 1, 8, 8), "conv", "gate"),
        (Tokens, (6, 5, WIDTH), "lora", "lerp"),
        (Tokens, (6, 5, WIDTH), "lora", "gate"),
    ],
)
def test_pictures_and_tokens(
    ids: dict[str, str], kind: type[nn.Module], shape: tuple[int, ...], name: str, operator: str
) -> None:
    torch.manual_seed(0)
    model = runtime.wrap(kind(), "body", limits=LIMITS)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    bed = Bed.__new__(Bed)
    bed.model, bed.optimizer, bed.scheduler = model, optimizer, None
    bed.growth = runtime.attach(model, optimizer)
    bed.slot = bed.growth.slots[0]
    bed.data = iter([(torch.randn(shape), torch.randint(4, (6,))) for _ in range(80)])
    model(torch.randn(shape))
    bed.plant(ids[name], Graft(operator=operator))
    assert bed.slot.state is Lifecycle.TRAINING, bed.growth.journal.lines[-1]
    bed.step(20)
    assert bed.growth.snapshot().of("body/0").probe["held"] >= 3
    bed.growth.measure(bed.slot.id, held_out_gain=0.5, predicted_gain=-0.5)
    bed.command(Verb.PROMOTE)
    before = {n: p.detach().clone() for n, p in bed.slot.seed.named().items()}
    bed.step(LIMITS.ramp_steps + 4)
    assert bed.slot.alpha == 1.0
    assert any(not torch.equal(p, before[n]) for n, p in bed.slot.seed.named().items())


class Encoder(nn.Module):
    """torch's own layer, whose fast path in eval mode does not call its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)).mean(1)


def test_a_graft_is_not_left_out_by_a_fast_path(ids: dict[str, str]) -> None:
    torch.manual_seed(0)
    model = runtime.wrap(Encoder(), "body.linear2", limits=LIMITS)
    bed = Bed.__new__(Bed)
    bed.model, bed.scheduler = model, None
    bed.optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    bed.growth = runtime.attach(model, bed.optimizer)
    bed.slot = bed.growth.slots[0]
    x = torch.randn(6, 5, WIDTH)
    bed.data = iter([(x, torch.randint(4, (6,)))] * 40)
    model(x)
    bed.plant(ids["fixed"])
    bed.step(LIMITS.ramp_steps)
    model.eval()
    with torch.no_grad():
        grafted = model(x)
        with bed.growth.override(bed.slot.id, 0.0):
            assert not torch.allclose(model(x), grafted)
    torch.testing.assert_close(model(x), grafted)  # as with gradients, where torch takes the slow path
    bed.command(Verb.CULL, hard=True)
    runtime.unwrap(model)
    assert not model.body.linear2._forward_pre_hooks


def test_chunks_grow_apart(ids: dict[str, str]) -> None:
    bed = Bed(seeds_per_layer=2)
    first, second = bed.growth.slots
    assert (first.bounds(), second.bounds()) == ((0, 8), (8, 16))
    x = batches(1)[0][0]
    h = torch.randn(4, WIDTH)
    plain = bed.model(x)
    bed.send(Verb.REQUEST_GERMINATION, ids["fixed_half"], second)
    bed.growth.commit()
    assert second.state is Lifecycle.GRAFTING and torch.equal(bed.model(x), plain)
    bed.step(LIMITS.ramp_steps)
    y = bed.slot.site.run(h)
    assert y[:, :8].equal(h[:, :8])
    torch.testing.assert_close(y[:, 8:], torch.tanh(h[:, 8:]))


def test_the_model_moves_and_everything_of_it(ids: dict[str, str]) -> None:
    bed = Bed()
    bed.bring(ids["mlp"], "GRAFTING")
    bed.model.eval()
    assert not bed.slot.seed.training
    bed.model.train()
    assert bed.slot.seed.training
    keys = set(net().state_dict())
    assert set(bed.model.state_dict()) == keys
    assert {n for n, _ in bed.model.named_parameters()} == keys
    loss_of(bed.model, batches(1)[0]).backward()
    assert all(p.grad is None for p in bed.slot.seed.parameters())  # kept apart from what the host sees


def test_the_parameters_of_a_seed_come_from_its_key_alone(ids: Ids) -> None:
    """As the process's own random numbers would give them from that seed; those stay what they are."""
    spec = Spec((8, WIDTH), torch.float32, torch.device("cpu"))
    before = torch.get_rng_state()
    first, again, other = (make(ids["mlp"], None, spec, WIDTH, Graft(), key) for key in (7, 7, 8))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(7)
    by_hand = runtime.load(ids["mlp"])
    torch.set_rng_state(before)
    values = [[p.detach() for _, p in m.named_parameters()] for m in (first.block, again.block, by_hand)]
    assert values[0] and all(map(torch.equal, values[0], values[1]))
    assert all(map(torch.equal, values[0], values[2]))
    assert not all(map(torch.equal, values[0], [p.detach() for _, p in other.block.named_parameters()]))
    assert all(p.requires_grad for p in first.named().values())
