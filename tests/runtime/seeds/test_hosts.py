"""Growth end to end: an MLP, a CNN and a Transformer, each with a crippled part that the heuristic finds,
and a graft that is kept; and seeds that do nothing beside hosts that improve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import runtime
from bench.growing import artifacts, lives, trial
from library.store import Library
from runtime.seeds.commands import Graft
from runtime.seeds.lifecycle import Lifecycle, Limits
from runtime.strategy.settings import PlateauSettings, Settings, SiteSettings

pytestmark = pytest.mark.slow
EPOCHS, STEPS, BATCH = 40, 32, 64
SETTINGS = Settings(
    plateau=PlateauSettings(window=3, min_improvement=0.15, warmup=8),
    sites=SiteSettings(min_score=2.5),
    limits=Limits(planned_epochs=EPOCHS, deadline_least=10, speculative=True, max_rent=2.0, g2_margin=0.0),
    graft=Graft(lr_scale=0.5),
    telemetry_every=4,
    fine_tune_epochs=6,
    field_reports=False,
)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Any:
    home = tmp_path_factory.mktemp("grown")
    home.chmod(0o700)
    with artifacts.stocked(home) as found:
        yield found


class Pictures(nn.Module):
    """Four groups of 8x8 pictures, each through a residual convolution block; pooled, then a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.stems = nn.ModuleList(nn.Conv2d(1, 16, 3, padding=1) for _ in range(4))
        self.blocks = nn.ModuleList(Cell() for _ in range(4))
        self.head = nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        parts = zip(x.split(1, 1), self.stems, self.blocks, strict=True)
        return self.head(torch.cat([block(stem(p)).mean((2, 3)) for p, stem, block in parts], 1))


class Cell(nn.Module):
    """x + b(relu(a(x))) over pictures; channels can be dead."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(channels, 32, 3, padding=1), nn.Conv2d(32, channels, 1)
        self.register_buffer("alive", torch.ones(32, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(F.relu(self.a(x)) * self.alive)


class Sequence(nn.Module):
    """Four streams of tokens of width 64, attention over all of them, then an MLP of its own per stream."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 64)
        self.attend = nn.MultiheadAttention(64, 4, batch_first=True)
        self.norm = nn.LayerNorm(64)
        self.blocks = nn.ModuleList(trial_block() for _ in range(4))
        self.head = nn.Linear(256, 1)

    def forward(self, x: Tensor) -> Tensor:  # [batch, 4 streams, 4 tokens, 4]
        tokens = self.embed(x.flatten(1, 2))
        tokens = self.norm(tokens + self.attend(tokens, tokens, tokens, need_weights=False)[0])
        streams = tokens.view(x.shape[0], 4, 4, 64)
        found = [block(streams[:, i]).mean(1) for i, block in enumerate(self.blocks)]
        return self.head(torch.cat(found, 1))


def trial_block() -> nn.Module:
    from bench.growing.hosts import Block

    return Block()


def pictures(generator: torch.Generator, count: int, filters: Tensor) -> tuple[Tensor, Tensor]:
    """Pictures of different contrast; the target is a sum over the four of how strongly a filter answers,
    squared: what one channel of ReLU cannot tell."""
    contrast = 0.3 + 1.2 * torch.rand(count, 4, 1, 1, generator=generator)
    x = contrast * torch.randn(count, 4, 8, 8, generator=generator)
    answers = F.conv2d(x, filters, padding=1, groups=4)
    return x, answers.square().mean((2, 3)).sum(1, keepdim=True)


def streams(generator: torch.Generator, count: int, directions: Tensor) -> tuple[Tensor, Tensor]:
    x = torch.randn(count, 4, 4, 4, generator=generator)
    return x, torch.cos(1.5 * torch.einsum("nstd,sd->nst", x, directions)).mean(2).sum(1, keepdim=True) * 2.0


def grown(model: nn.Module, data: Any, library: Library) -> tuple[runtime.TamiyoController, list[float]]:
    torch.set_num_threads(1)
    runtime.wrap(model, "blocks.*", library=library)
    tamiyo = runtime.TamiyoController(model, config=SETTINGS)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    runtime.attach(model, optimizer)
    generator = torch.Generator().manual_seed(1)
    held = [data(torch.Generator().manual_seed(2), 512) for _ in range(1)][0]
    losses = []

    def validate(m: nn.Module) -> list[float]:
        return [float(F.mse_loss(m(a), b)) for a, b in zip(held[0].split(64), held[1].split(64), strict=True)]

    for _ in range(EPOCHS):
        for _ in range(STEPS):
            x, y = data(generator, BATCH)
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
        tamiyo.end_epoch(validate)
        losses.append(tamiyo._history[-1])
    return tamiyo, losses


def kept(tamiyo: runtime.TamiyoController) -> list[str]:
    moves = [line for line in tamiyo.growth.journal.lines if line["kind"] == "command"]
    return [line["slot"] for line in moves if line["to"] == Lifecycle.FOSSILIZED.name]


def test_an_mlp_grows_where_it_was_crippled(library: Library) -> None:
    torch.set_num_threads(1)
    given = trial.data(7)
    untouched = trial.train(trial.host(7, "dead", 3), given, 7).loss
    done = trial.train(trial.host(7, "dead", 3), given, 7, library)
    assert done.first == "blocks.3/0" and "blocks.3/0" in done.kept, done.told
    assert done.loss < 0.7 * untouched


def test_a_cnn_grows_where_it_was_crippled(library: Library) -> None:
    torch.manual_seed(0)
    model = Pictures()
    with torch.no_grad():
        model.blocks[2].alive[1:] = 0.0
    filters = torch.randn(4, 1, 3, 3, generator=torch.Generator().manual_seed(5)) / 2.0
    tamiyo, losses = grown(model, lambda g, n: pictures(g, n, filters), library)
    assert "blocks.2/0" in kept(tamiyo), tamiyo.explain()
    artifact = next(s for s in tamiyo.growth.sites["blocks.2"].chain).seed.artifact_id
    assert artifact.startswith("148d344be491"), "the convolution seed, found by its shape"
    assert losses[-1] < losses[15]


def test_a_transformer_grows_where_it_was_crippled(library: Library) -> None:
    torch.manual_seed(0)
    model = Sequence()
    with torch.no_grad():
        model.blocks[1].alive[1:] = 0.0
    directions = torch.randn(4, 4, generator=torch.Generator().manual_seed(5)) / 2.0
    tamiyo, losses = grown(model, lambda g, n: streams(g, n, directions), library)
    assert "blocks.1/0" in kept(tamiyo), tamiyo.explain()
    assert losses[-1] < losses[15]


def test_seeds_that_do_nothing_are_never_kept(tmp_path: Path) -> None:
    found = lives.trap(str(tmp_path), hosts=4, epochs=10)
    assert all(figure["value"] == 0 for figure in found.values()), found
    assert next(iter(found.values()))["hosts_loss_fell_by"] > 0.3
