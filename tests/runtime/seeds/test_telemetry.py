"""Health signals against formulas written out, on inputs where the answer is known."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import runtime
from runtime.seeds import telemetry
from runtime.seeds.facts import SlotFacts
from runtime.seeds.health import health_of
from runtime.seeds.lifecycle import Fault, Lifecycle
from runtime.seeds.seed import Spec
from runtime.seeds.state import HEALTH, StateTensor
from runtime.seeds.telemetry import HealthObserver, parts


@dataclass
class FakeSite:
    name: str
    chunks: int
    state: StateTensor = field(init=False)
    spec: Spec | None = None

    def __post_init__(self) -> None:
        self.state = StateTensor(self.chunks)

    @property
    def slots(self) -> tuple[int, ...]:
        return tuple(range(self.chunks))


def facts(
    slot: str, health: dict[str, float], state: Lifecycle = Lifecycle.DORMANT, **more: Any
) -> SlotFacts:
    site, _, index = slot.rpartition("/")
    given: dict[str, Any] = {
        "slot": slot, "site": site, "index": int(index), "features": (0, 64), "state": state, "artifact": "",
        "alpha": 0.0, "round": 0, "paused": False, "fault": Fault.NONE, "seed_steps": 0, "exec_us": 0,
        "since_epoch": 0, "deadline": -1, "ready": False, "strategy": "FIXED_RAMP", "parameters": 0,
        "grafts": 0,
        "health": health, "probe": {}, "evidence": {},
    }  # fmt: skip
    return SlotFacts(**{**given, **more})


def observed(h: Tensor, chunks: int = 1, times: int = 1) -> list[dict[str, float]]:
    """Means of the signals of each chunk of one layer's result."""
    site, observer = FakeSite("layer", chunks), HealthObserver()
    for _ in range(times):
        observer.activation(site, h, site.state.device["health"])
    sums = site.state.device["health"]
    found = health_of(
        [facts(f"layer/{i}", dict(zip(HEALTH, sums[i].tolist(), strict=True))) for i in range(chunks)]
    )
    return [dict(found[slot]) for slot in found]


def test_dead_features_and_variance() -> None:
    torch.manual_seed(0)
    h = torch.randn(256, 8)
    h[:, :3] = 1.5
    (found,) = observed(h)
    assert found["dead_node_ratio"] == pytest.approx(3 / 8)
    assert found["chunk_variance"] == pytest.approx(float(h.var(0, correction=0).mean()), rel=1e-4)


def test_rank_of_copies_and_of_independent_features() -> None:
    torch.manual_seed(0)
    one = torch.randn(512, 1)
    (copies,) = observed(one.expand(512, 16) * torch.rand(16).add(0.5))
    assert copies["effective_rank"] == pytest.approx(1 / 16, rel=1e-3)
    assert copies["avg_inter_node_correlation"] == pytest.approx(1.0, rel=1e-3)
    (free,) = observed(torch.randn(512, 16))
    assert free["effective_rank"] > 0.9 and free["avg_inter_node_correlation"] < 0.1
    (low,) = observed(torch.randn(512, 2) @ torch.randn(2, 16))
    assert 1 / 16 < low["effective_rank"] <= 2.05 / 16


def test_entropy_of_a_normal_and_of_two_values() -> None:
    torch.manual_seed(0)
    (normal,) = observed(torch.randn(512, 64))
    cells = torch.linspace(-4.0, 4.0, 17)
    share = torch.special.ndtr(cells).diff()
    assert normal["activation_entropy"] == pytest.approx(float(-(share * share.log()).sum()), rel=0.03)
    (two,) = observed((torch.arange(500) % 10 < 3).float().unsqueeze(1).expand(500, 64))
    assert two["activation_entropy"] == pytest.approx(-0.3 * math.log(0.3) - 0.7 * math.log(0.7), rel=1e-4)


def test_chunks_are_measured_apart_also_when_they_do_not_divide() -> None:
    torch.manual_seed(0)
    h = torch.randn(128, 10)
    h[:, :4] = 0.0
    found = observed(h, chunks=3)  # 4 + 3 + 3 features
    assert [round(f["dead_node_ratio"], 3) for f in found] == [1.0, 0.0, 0.0]
    assert parts(10, 3) == [(0, 1, 0, 4), (1, 3, 4, 10)] and parts(8, 4) == [(0, 4, 0, 8)]


def test_images_have_their_channels_first() -> None:
    h = torch.randn(4, 6, 5, 5)
    h[:, 2] = 7.0
    (found,) = observed(h)
    assert found["dead_node_ratio"] == pytest.approx(1 / 6)


def test_means_over_samples_and_gradient_norms() -> None:
    site, observer = FakeSite("layer", 2), HealthObserver()
    columns = site.state.device["health"]
    for scale in (1.0, 3.0):
        observer.gradient(site, torch.full((4, 8), scale), columns)
    names = [dict(zip(HEALTH, row.tolist(), strict=True)) for row in columns]
    found = health_of([facts(f"layer/{i}", n) for i, n in enumerate(names)])
    assert found["layer/0"]["gradient_norm"] == pytest.approx(8.0)  # norms 4 and 12
    assert found["layer/0"]["gradient_variance"] == pytest.approx(16.0)
    assert math.isnan(found["layer/0"]["chunk_variance"])


def gain_of(target: nn.Module, steps: int = 60) -> tuple[float, float]:
    """(gain, alignment) where the loss is 1/2 |h - target(h)|^2 per sample."""
    torch.manual_seed(0)
    site, observer = FakeSite("layer", 1), HealthObserver()
    columns = site.state.device["health"]
    for _ in range(steps):
        h = torch.randn(128, 16)
        with torch.no_grad():
            g = (h - target(h)) / 128
        observer.activation(site, h, columns)
        observer.gradient(site, g, columns)
    observer.close_epoch({"layer": site})
    row = dict(zip(HEALTH, columns[0].tolist(), strict=True))
    return row["gain"] / row["windows"], row["alignment"] / row["windows"]


class Noise(nn.Module):
    """A target that nothing predicts."""

    def forward(self, h: Tensor) -> Tensor:
        return h + torch.randn_like(h)


class Bend(nn.Module):
    """A target that a ReLU branch could learn."""

    def forward(self, h: Tensor) -> Tensor:
        return h + torch.relu(h) - 0.4 + torch.randn_like(h)


def test_gain_is_predicted_where_a_branch_would_learn_and_only_there() -> None:
    noise, noise_alignment = gain_of(Noise())
    bend, bend_alignment = gain_of(Bend())
    assert bend_alignment > 0.6 and abs(noise_alignment) < 0.25
    assert bend > 3 * noise


def test_gain_does_not_depend_on_the_size_of_the_batch() -> None:
    torch.manual_seed(0)
    found = []
    for rows in (64, 2048):
        site, observer = FakeSite("layer", 1), HealthObserver()
        columns = site.state.device["health"]
        for _ in range(4096 // rows * 8):
            h = torch.randn(rows, 16)
            observer.activation(site, h, columns)
            observer.gradient(site, -torch.relu(h) / rows, columns)
        observer.close_epoch({"layer": site})
        found.append(float(columns[0][HEALTH.index("gain")]))
    assert found[0] == pytest.approx(found[1], rel=0.1)


def test_a_resumed_observer_goes_on_with_the_same_numbers() -> None:
    def feed(observer: HealthObserver, site: FakeSite, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(3):
            h = torch.randn(32, 8, generator=generator)
            observer.activation(site, h, site.state.device["health"])
            observer.gradient(site, torch.relu(h) / 32, site.state.device["health"])

    first, site = HealthObserver(), FakeSite("a", 2)
    feed(first, site, 0)
    first.close_epoch({"a": site})
    second, other = HealthObserver(), FakeSite("a", 2)
    second.load_state_dict(first.state_dict(), {"a": other})
    for observer, where in ((first, site), (second, other)):
        where.state.device["health"].zero_()
        feed(observer, where, 1)
        observer.close_epoch({"a": where})
    assert torch.equal(site.state.device["health"], other.state.device["health"])


def test_nothing_is_read_back_on_a_sampled_step(monkeypatch: pytest.MonkeyPatch) -> None:
    site, observer = FakeSite("layer", 4), HealthObserver()
    for name in ("item", "tolist", "numpy", "cpu"):
        monkeypatch.setattr(Tensor, name, lambda *a, **k: pytest.fail("telemetry waits for the device"))
    h = torch.randn(64, 32)
    observer.activation(site, h, site.state.device["health"])
    observer.gradient(site, h, site.state.device["health"])


@pytest.mark.parametrize("shape", [(64, 64, 1), (37, 50, 4), (700, 24, 3), (33, 300, 2), (5, 6, 6)])
def test_the_sums_in_c_are_those_of_torch(shape: tuple[int, int, int]) -> None:
    if telemetry._native is None:
        pytest.skip("the C part is not built")
    rows, features, chunks = shape
    torch.manual_seed(0)
    h, g = torch.randn(rows, features), 0.1 * torch.randn(rows, features)
    h[:, 1] = 0.5
    found = []
    for native in (True, False):
        site, observer = FakeSite("layer", chunks), HealthObserver()
        columns = site.state.device["health"]
        for many in (rows, max(rows - 3, 1)):
            if native:
                site.spec = Spec(tuple(h[:many].shape), h.dtype, h.device)
                assert observer.attend(site, h[:many]) is None and observer.seat(site, h[:many], columns)
                hear = observer.attend(site, h[:many])
                assert hear is not None
                hear(g[:many])
            else:
                observer.activation(site, h[:many], columns)
                observer.gradient(site, g[:many], columns)
        observer.close_epoch({"layer": site})
        found.append((site.state.device["health"].clone(), observer._branches["layer"].halves))
    assert found[0][0].abs().sum() > 1 and found[0][1].abs().sum() > 0
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)


def test_layers_take_turns_and_each_has_its_own() -> None:
    model = runtime.wrap(nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))), "*")
    growth = runtime.growth_of(model)
    growth.observe(HealthObserver(), every=8)
    for step in range(16):
        seen = [number for number, site in enumerate(growth.sites.values()) if site.sampling]
        assert seen == ([step % 8 // 2] if step % 2 == 0 else [])
        model(torch.randn(4, 8)).sum().backward()
        growth.tick()
    assert [site.state.device["health"][0, 0].item() for site in growth.sites.values()] == [2.0] * 4
    growth.observe(None)
    assert not any(site.sampling for site in growth.sites.values())


def test_more_layers_than_steps() -> None:
    model = runtime.wrap(nn.Sequential(*(nn.Linear(4, 4) for _ in range(5))), "*")
    growth = runtime.growth_of(model)
    growth.observe(HealthObserver(), every=1)
    for _ in range(3):
        assert all(site.sampling for site in growth.sites.values())
        model(torch.randn(4, 4)).sum().backward()
        growth.tick()
    assert [site.state.device["health"][0, 0].item() for site in growth.sites.values()] == [3.0] * 5


def test_the_gain_is_the_share_that_features_explain() -> None:
    """A gradient that is a feature plus noise of the same size: half of it."""
    torch.manual_seed(0)
    site, observer = FakeSite("layer", 1), HealthObserver()
    columns = site.state.device["health"]
    for _ in range(100):
        h = torch.randn(128, 16)
        observer.activation(site, h, columns)
        phi = torch.relu(h @ observer._branches["layer"].inward[:, :1].float())
        signal = (phi - phi.mean()) / phi.std()
        g = (signal + torch.randn(128, 1)) * torch.ones(16) / 128
        observer.gradient(site, g, columns)
    observer.close_epoch({"layer": site})
    row = dict(zip(HEALTH, columns[0].tolist(), strict=True))
    assert row["gain"] == pytest.approx(0.5, abs=0.06)
    assert row["alignment"] > 0.9


def test_sums_of_another_version_are_left_out() -> None:
    site, observer = FakeSite("a", 2), HealthObserver()
    observer.activation(site, torch.randn(32, 8), site.state.device["health"])
    old = {"a": {"halves": torch.zeros(2, 2, 16, 4), "scale": torch.ones(3), "features": 8}}
    resumed = HealthObserver()
    resumed.load_state_dict(old, {"a": site})
    assert not resumed._branches
    resumed.load_state_dict(observer.state_dict(), {"a": site})
    assert list(resumed._branches) == ["a"]


def test_turns_follow_a_checkpoint_with_another_stride() -> None:
    model = runtime.wrap(nn.Sequential(*(nn.Linear(8, 8) for _ in range(2))), "*")
    growth = runtime.growth_of(model)
    model(torch.randn(4, 8))
    growth.observe(HealthObserver(), every=6)
    for _ in range(3):
        growth.tick()
    held = growth.state_dict()
    growth.observe(growth.observer, every=2)
    growth.load_state_dict(held)
    for step in range(3, 9):
        seen = [number for number, site in enumerate(growth.sites.values()) if site.sampling]
        assert growth.step == step and seen == {0: [0], 3: [1]}.get(step % 6, [])
        growth.tick()


@pytest.mark.parametrize("native", [True, False])
def test_a_forward_that_is_computed_again_is_not_observed_again(
    native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not native:
        monkeypatch.setattr(telemetry, "_native", None)
    model = runtime.wrap(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), "0")
    growth = runtime.growth_of(model)
    growth.observe(HealthObserver(), every=1)
    x = torch.randn(4, 8, requires_grad=True)
    checkpoint(model, x, use_reentrant=False).sum().backward()
    row = dict(zip(HEALTH, growth.sites["0"].state.device["health"][0].tolist(), strict=True))
    assert row["samples"] == 1 and row["grad_samples"] <= 1
