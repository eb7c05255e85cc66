"""Small seeds made by the forge from the blueprints of examples/, and models to grow them in."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import runtime
from forge.service import compile_file
from library.store import Library
from runtime.seeds.commands import Graft, KasminaControlCommand
from runtime.seeds.growth import Growth
from runtime.seeds.lifecycle import Limits, Verb

WIDTH = 16
ROOT = Path(__file__).resolve().parents[3]
REPORT = {"stages": [], "wep": {"latency_ms_p99": 0.05}}
NOTE = {"risk_score": 0.05, "conf_level": "High", "generated_tags": ["seed"]}
LIMITS = Limits(
    min_training_steps=8,
    ramp_steps=6,
    settle_steps=2,
    max_rent=100.0,
    embargo_epochs=2,
    planned_epochs=50,
    validation_tolerance=1.0,
    loss_tolerance=10.0,
)


def _shrunk(name: str, sizes: Mapping[int, int], dtype: str = "float32") -> dict[str, Any]:
    """A blueprint of examples/ with other sizes and dtype."""

    def walk(value: Any, key: str) -> Any:
        if isinstance(value, dict):
            return {k: walk(v, k) for k, v in value.items()}
        if isinstance(value, list):
            return [16] if key == "tune" else [walk(v, key) for v in value]
        if value == "bfloat16":
            return dtype
        return sizes.get(value, value) if isinstance(value, int) and key == "shape" else value

    return walk(json.loads((ROOT / "examples" / f"{name}.json").read_text()), "")


def _plain(name: str, nodes: list[dict[str, Any]], width: int = WIDTH, **more: Any) -> dict[str, Any]:
    return {
        "format": "esper-blueprint/1",
        "name": name,
        "dims": {"rows": {"min": 1, "max": 4096, "tune": [16]}},
        "inputs": {"x": {"dtype": "float32", "shape": ["rows", width]}},
        "params": {},
        "nodes": nodes,
        "outputs": ["y"],
        **more,
    }


def documents() -> dict[str, dict[str, Any]]:
    """Blueprint by the name that tests use."""
    small = {512: WIDTH, 1024: 32}
    ones = {"w": {"dtype": "float32", "shape": [WIDTH], "init": {"kind": "ones"}}}
    return {
        "mlp": _shrunk("seed_mlp", small),
        "lora": _shrunk("seed_lora", {512: WIDTH, 8: 2}),
        "half": _shrunk("seed_lora", {512: WIDTH // 2, 8: 2}),
        "bf16": _shrunk("seed_lora", {512: WIDTH, 8: 2}, "bfloat16"),
        "conv": _shrunk("seed_conv", {28: 8, 64: 4}),
        "fixed": _plain("fixed", [{"id": "y", "op": "tanh", "inputs": ["x"]}]),
        "fixed_half": _plain("fixed_half", [{"id": "y", "op": "tanh", "inputs": ["x"]}], WIDTH // 2),
        "noop": _plain("noop", [{"id": "y", "op": "mul", "inputs": ["x", "w"]}], params=ones),
    }


def fill(folder: Path, target: str = "cpu", only: tuple[str, ...] = ()) -> dict[str, str]:
    """Compile all, or `only` some, into the library that ESPER_LIBRARY names; artifact id by name."""
    made: dict[str, str] = {}
    with Library.open() as library:
        for name, document in documents().items():
            if only and name not in only:
                continue
            path = folder / f"{name}.json"
            path.write_text(json.dumps(document), encoding="utf-8")
            (found,) = compile_file(path, targets=(target,), library=library)
            library.record_verdict(found.artifact_id, REPORT, passed=True)
            library.annotate(found.artifact_id, NOTE)
            made[name] = found.artifact_id
    return made


def some(values: Iterable[Any], fast: Iterable[Any]) -> list[Any]:
    """Parameters of a test; those that are not `fast` wait for the slow suite."""
    kept = list(fast)
    return [v if v in kept else pytest.param(v, marks=pytest.mark.slow) for v in values]


# -- models and data
# -------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Three layers with dropout; the site is `body`."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.front = nn.Linear(8, WIDTH)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(torch.tanh(self.body(torch.tanh(self.front(x))))))


def net(seed: int = 0, **options: Any) -> Net:
    torch.manual_seed(seed)
    return Net(**options)


def batches(many: int, seed: int = 7, rows: int = 32) -> list[tuple[Tensor, Tensor]]:
    """A task that a linear map solves."""
    generator = torch.Generator().manual_seed(seed)
    truth = torch.randn(8, 4, generator=torch.Generator().manual_seed(99))
    xs = [torch.randn(rows, 8, generator=generator) for _ in range(many)]
    return [(x, (x @ truth).argmax(1)) for x in xs]


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def validate(model: nn.Module) -> list[float]:
    return [float(loss_of(model, b)) for b in batches(4, seed=1234)]


class Bed:
    """A wrapped model with optimizer, data and commands at hand."""

    def __init__(
        self,
        model: nn.Module | None = None,
        sites: Any = "body",
        *,
        optimizer: Callable[..., Any] = torch.optim.SGD,
        limits: Limits = LIMITS,
        lr: float = 0.05,
        scheduler: Callable[..., Any] | None = None,
        **options: Any,
    ) -> None:
        self.model = runtime.wrap(model if model is not None else net(), sites, limits=limits, **options)
        self.growth: Growth = runtime.growth_of(self.model)
        self.optimizer = optimizer(self.model.parameters(), lr=lr)
        self.scheduler = scheduler(self.optimizer) if scheduler is not None else None
        runtime.attach(self.model, self.optimizer, scheduler=self.scheduler)
        self.data: Iterator[tuple[Tensor, Tensor]] = iter(batches(4000))
        self.model(next(self.data)[0])
        self.slot = self.growth.slots[0]

    def step(self, many: int = 1) -> float:
        """Optimizer steps; the last loss."""
        value = 0.0
        for _ in range(many):
            self.optimizer.zero_grad()
            loss = loss_of(self.model, next(self.data))
            loss.backward()
            self.optimizer.step()
            if self.scheduler is not None:
                self.scheduler.step()
            value = float(loss.detach())
        return value

    def send(self, verb: Verb, artifact: str = "", slot: Any = None, **options: Any) -> None:
        at = slot or self.slot
        self.growth.submit(KasminaControlCommand(at.site.name, at.index, verb, artifact, **options))

    def command(self, verb: Verb, artifact: str = "", **options: Any) -> Any:
        """Send one and commit: the boundary."""
        self.send(verb, artifact, **options)
        return self.growth.commit()

    def plant(self, artifact: str, graft: Graft | None = None, **options: Any) -> Any:
        """A seed in TRAINING (or GRAFTING, of a fixed function)."""
        return self.command(Verb.REQUEST_GERMINATION, artifact, graft=graft or Graft(), **options)

    def bring(self, artifact: str, state: str, graft: Graft | None = None) -> None:
        """The first slot into this state, by the usual way."""
        self.plant(artifact, graft)
        for wanted in ("TRAINING", "GRAFTING", "STABILIZATION", "EVALUATING", "FINE_TUNING"):
            if self.slot.state.name != wanted:
                continue
            if wanted == state:
                return
            self._onward(wanted)
        assert self.slot.state.name == state, (self.slot.state, state)

    def _onward(self, state: str) -> None:
        self.step(24)
        if state == "TRAINING":
            self.growth.measure(self.slot.id, held_out_gain=0.5, predicted_gain=-0.1)
            self.command(Verb.PROMOTE)
        elif state == "GRAFTING":
            self.growth.arms(self.slot.id, validate)
            self.growth.commit()
        elif state == "STABILIZATION":
            self.growth.commit()
        elif state == "EVALUATING":
            self.growth.arms(self.slot.id, validate)
            self.growth.measure(self.slot.id, ablation=0.1, contribution=0.1)
            self.command(Verb.ADVANCE)
