"""Replaced modules in train and in eval mode, and those that draw numbers: what an untouched module gives."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import runtime
from esper_ir.importers.torch_export import from_torch
from esper_ir.text import render
from forge.service import compile_file
from library.store import Library
from runtime import loader, trial
from runtime.swapping import Fit, swap, swapped
from tests.runtime.shelf import SIDE
from tests.runtime.test_executor import refusal

CLOSE = {"rtol": 1e-3, "atol": 1e-5}
Make = Callable[[nn.Module], str]


@pytest.fixture
def make(esper_library: Path, tmp_path: Path) -> Make:
    """The artifact of a module on [rows, SIDE], imported in the mode that it is in."""
    loader._meant.clear()
    loader._libraries.clear()

    def made(module: nn.Module) -> str:
        kind = next((p.dtype for p in module.parameters()), torch.float32)
        path = tmp_path / "module.json"
        path.write_text(
            render(from_torch(copy.deepcopy(module), torch.randn(8, SIDE, dtype=kind), dynamic=0))
        )
        with Library.open() as library:
            (found,) = compile_file(path, targets=("cpu",), library=library)
            library.record_verdict(found.artifact_id, {"stages": []}, passed=True)
        return found.artifact_id

    return made


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(SIDE, SIDE), nn.BatchNorm1d(SIDE)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.up(x)))


class Torn(nn.Module):
    """Dropout inside and at the end. `byhand`: by functions that say nothing of what they drop."""

    def __init__(self, p: float = 0.1, byhand: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(SIDE, SIDE), nn.Linear(SIDE, SIDE)
        self.drop, self.last, self.p, self.byhand = nn.Dropout(p), nn.Dropout(p), p, byhand

    def _drop(self, x: Tensor, layer: nn.Module) -> Tensor:
        if not self.byhand:
            return layer(x)
        return x * (torch.rand_like(x) >= self.p) / (1 - self.p) if self.training else x

    def forward(self, x: Tensor) -> Tensor:
        return self._drop(self.down(self._drop(torch.relu(self.up(x)), self.drop)), self.last)


def pair(module: nn.Module, artifact: str, training: bool, **fit: Any) -> tuple[nn.Module, nn.Module]:
    """An untouched model and one with the artifact in it, swapped in this mode."""
    plain = nn.Sequential(module).train(training)
    ours = copy.deepcopy(plain)
    before = torch.get_rng_state()
    swap(ours, {"0": Fit(artifact, **fit)})
    assert torch.equal(torch.get_rng_state(), before)
    assert [m.training for m in ours.modules()] == [m.training for m in plain.modules()]
    return plain, ours


@pytest.mark.parametrize("training", [True, False])
def test_batch_statistics_in_training_running_ones_in_evaluation(make: Make, training: bool) -> None:
    plain, ours = pair(Normed(), artifact := make(Normed().train()), training)
    report = swapped(ours)["0"]
    assert report["mode"] == "train" and "relative error" in report["left"]["eval"]
    assert report["imported_mode"] == "train" and sorted(report["updates"]) == list(report["updates"]) != []
    for _ in range(3):
        x = 2 + torch.randn(16, SIDE)
        torch.testing.assert_close(ours.train()(x), plain.train()(x), **CLOSE)
        torch.testing.assert_close(ours.eval()(x), plain.eval()(x), **CLOSE)
    for a, b in zip(ours.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(a, b, **CLOSE)
    assert swapped(ours)["0"]["counters"]["launches"] > 0
    refusal("E0852", swap, plain, {"0": Fit(artifact, mode="eval")})
    kept = pair(Normed(), artifact, True, mode="always")[1]
    assert swapped(kept)["0"]["mode"] == "always" and not swapped(kept)["0"]["left"]


def test_a_part_that_stays_in_evaluation(make: Make) -> None:
    """A norm that the user froze: the module trains with it so, and so is it tried."""
    frozen = Normed().train()
    frozen.norm.eval()
    plain = nn.Sequential(frozen)
    ours = copy.deepcopy(plain)
    swap(ours, {"0": make(frozen)})
    assert ours[0].training and not ours[0].norm.training and swapped(ours)["0"]["mode"] == "always"
    x = torch.randn(16, SIDE)
    torch.testing.assert_close(ours(x), plain(x), **CLOSE)


@pytest.mark.parametrize("training", [True, False])
def test_dropout_drops_in_training_only(make: Make, training: bool) -> None:
    artifact = make(Torn().train())
    for byhand in (False, True):
        plain, ours = pair(Torn(byhand=byhand), artifact, training)
        report = swapped(ours)["0"]
        assert report["mode"] == "train" and "eval" in report["left"] and report["draws"]
        x = torch.randn(64, SIDE)
        assert torch.equal(ours.eval()(x), plain.eval()(x))
        y = ours.train()(x[None])  # further axes fold as they do where nothing is drawn
        assert 0.05 < float((y == 0).float().mean()) < 0.15
    kept = pair(Torn(), artifact, True, mode="always")[1].eval()
    assert swapped(kept)["0"]["mode"] == "always" and not torch.equal(kept(x), kept(x))


def test_imported_in_evaluation(make: Make) -> None:
    plain, ours = pair(Torn(), artifact := make(Torn().eval()), True)
    assert swapped(ours)["0"]["mode"] == "eval" and "train" in swapped(ours)["0"]["left"]
    x = torch.randn(16, SIDE)
    torch.manual_seed(1)
    want = plain(x)
    torch.manual_seed(1)
    assert torch.equal(ours(x), want) and not swapped(ours)["0"]["counters"]["launches"]
    torch.testing.assert_close(ours.eval()(x), plain.eval()(x), **CLOSE)
    assert swapped(ours)["0"]["counters"]["launches"]
    refusal("E0852", swap, plain, {"0": Fit(artifact, mode="train")})
    rare = pair(Torn(0.0004, byhand=True), artifact, True)[1]  # seldom seen in one run
    assert swapped(rare)["0"]["mode"] == "eval"
    seen = pair(Torn(1e-4), artifact, True)[1]
    assert swapped(seen)["0"]["mode"] == "eval"
    assert swapped(pair(Torn(0.0), artifact, True)[1])["0"]["mode"] == "always"


def test_other_shares_are_refused(make: Make) -> None:
    artifact = make(Torn(0.1).train())
    for p, byhand in ((0.5, False), (0.11, False), (0.5, True), (0.2, True), (0.0, False)):
        model = nn.Sequential(Torn(p, byhand))
        told = str(refusal("E0852", swap, model, {"0": Fit(artifact, mode="train")}))
        if not byhand:
            assert f"it drops 0.1, 0.1, the module {f'{p}, {p}' if p else 'nothing'}" in told
        assert type(model[0]) is Torn
    told = str(refusal("E0852", swap, nn.Sequential(Torn(0.5)), {"0": artifact}))
    assert "0.1, 0.1" in told and "0.5, 0.5" in told
    exchanged = {
        f"{a}.{n}": f"{b}.{n}" for a, b in (("up", "down"), ("down", "up")) for n in ("weight", "bias")
    }
    for byhand in (False, True):
        wrong = Fit(artifact, names=exchanged)
        assert "mean" in str(refusal("E0852", swap, nn.Sequential(Torn(0.1, byhand)), {"0": wrong}))


def test_equal_shares_are_accepted_whatever_is_drawn(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    artifact = make(Torn(0.3).train())
    for seed in range(12):
        monkeypatch.setattr(trial, "SEED", seed)
        assert swapped(pair(Torn(0.3, byhand=True), artifact, True)[1])["0"]["mode"] == "train"


def test_without_a_trial_what_draws_is_for_training(make: Make) -> None:
    drawing, still = make(Torn().train()), make(Torn().eval())
    model = nn.Sequential(Torn(), Torn())
    swap(model, {"0": drawing, "1": still}, check=False)
    assert [r["mode"] for r in swapped(model).values()] == ["train", "always"]
    assert "not tried" in swapped(model)["0"]["left"]["eval"]


def test_swapped_while_autocast_is_on(make: Make) -> None:
    model = nn.Sequential(Normed())
    with torch.autocast("cpu", torch.bfloat16):
        swap(model, {"0": make(Normed().train())})
    assert swapped(model)["0"]["mode"] == "train"


def test_another_kind_of_module_is_not_sent_sharding(ids: dict[str, str]) -> None:
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.LayerNorm(64)

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(self.weight(x))

    told = refusal("E0851", swap, nn.Sequential(Other()), {"0": ids["head.norm"]})
    assert "weight: it is a LayerNorm" in str(told) and "shard" not in str(told)
    assert "weight.weight" in str(told)


def test_a_block_says_how_to_fold(ids: dict[str, str]) -> None:
    block = runtime.load(ids["square"])
    assert "x.flatten(0, -2)" in str(refusal("E0810", block, torch.randn(2, 3, SIDE)))
    assert "flatten" not in str(refusal("E0810", block, torch.randn(SIDE)))


class Root(nn.Module):
    """RMSNorm with its own epsilon."""

    def __init__(self, eps: float, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(SIDE, dtype=dtype)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (SIDE,), self.weight, self.eps)


class Behind(nn.Module):
    """An activation of normed values: what it cuts off shows where the norm's weight is large."""

    def __init__(self, cut: bool) -> None:
        super().__init__()
        self.norm, self.cut = nn.LayerNorm(SIDE), cut

    def forward(self, x: Tensor) -> Tensor:
        return F.relu6(self.norm(x)) if self.cut else F.relu(self.norm(x))


class Dropped(nn.Module):
    def __init__(self, eps: float) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(SIDE, eps), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.norm(x))


OTHERWISE: dict[str, tuple[nn.Module, nn.Module]] = {
    "eps 1e-4": (Root(1e-6), Root(1e-4)),
    "eps 2e-3": (Root(1e-6), Root(2e-3)),
    "eps in bfloat16": (Root(1e-6, torch.bfloat16), Root(1e-5, torch.bfloat16)),
    "statistics' eps": (nn.BatchNorm1d(SIDE, 1e-5).eval(), nn.BatchNorm1d(SIDE, 1e-3).eval()),
    "relu6": (nn.ReLU(), nn.ReLU6()),
    "relu6 of normed values": (Behind(False), Behind(True)),
    "gelu": (nn.GELU(), nn.GELU("tanh")),
    "dropout": (Dropped(1e-6), Dropped(1e-4)),
}


@pytest.mark.parametrize("which", OTHERWISE)
def test_other_functions_are_refused_at_some_size(make: Make, which: str) -> None:
    """Within 1e-3 of each other (bfloat16: 5e-2) on standard normal inputs."""
    same, other = (copy.deepcopy(m) for m in OTHERWISE[which])
    artifact = make(same)
    told = str(refusal("E0852", swap, nn.Sequential(other), {"0": Fit(artifact, mode="always")}))
    assert ("for inputs of size" in told) == (
        which in ("eps in bfloat16", "relu6", "relu6 of normed values", "dropout")
    )
    swap(nn.Sequential(same), {"0": Fit(artifact, mode="always")})


class Steep(nn.Module):
    """Attention among rows by large scores: rounding alone moves its results, in bfloat16 by all of them."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.q, self.k = (nn.Linear(SIDE, SIDE, bias=False, dtype=dtype) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(self.q(x) @ self.k(x).t(), -1) @ x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_module_that_rounding_moves_is_not_refused(make: Make, dtype: torch.dtype) -> None:
    model = nn.Sequential(Steep(dtype))
    swap(model, {"0": make(model[0])})
    assert swapped(model)["0"]["mode"] == "always"
