"""Whole models: training steps of the decoder and the CNN by four ways to run them.

    python -m bench.training JOB.json OUT.jsonl

is one way of one model in a process of its own (see `run`): eager, `compile(model)`, our blocks swapped into
the eager model, and our blocks swapped into a model that is then compiled. All ways see the same weights and
batches; their losses are compared step by step with eager's. What counts as the same is measured too: how far
eager's own losses move when the weights are moved by at most their type's resolution.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bench.models import (
    SMALL_CNN,
    SMALL_DECODER,
    Cnn,
    CnnSizes,
    Decoder,
    DecoderSizes,
    cnn_batch,
    decoder_batch,
)
from bench.results import device_here, plain
from bench.swaps import cnn_parts, cnn_swaps, decoder_swaps
from bench.turns import Turn
from library.store import Library
from runtime import timing
from runtime.swapping import Fit, Plan, swap, swapped
from runtime.timing import Timing

EAGER, COMPILE, OURS, INSIDE = "eager", "compile", "esper-fast", "esper-fast-in-compile"
WAYS = (EAGER, COMPILE, OURS, INSIDE)
CURVE, PERTURBED = 16, 4  # steps of a loss curve; further curves of eager that say what noise is
RATE = 1e-3


@dataclass(frozen=True)
class Model:
    """What is trained. `batch` sequences of `rows` tokens, or images. `whole`: all of an image network but
    its head is swapped, else its gates alone."""

    name: str
    sizes: DecoderSizes | CnnSizes
    batch: int
    rows: int = 1
    whole: bool = True

    @property
    def counted(self) -> str:
        return "tokens" if self.name == "decoder" else "images"

    @property
    def label(self) -> str:
        shape = f"{self.batch}x{self.rows}" if self.name == "decoder" else f"{self.batch}"
        if isinstance(self.sizes, DecoderSizes):
            s = self.sizes
            return f"{s.layers}x{s.width}x{s.hidden}x{s.words}, batch {shape}"
        depths = "-".join(map(str, self.sizes.depths))
        return f"{depths}x{self.sizes.width}, {self.sizes.image} px, batch {shape}"

    def make(self) -> nn.Module:
        torch.manual_seed(0)
        return Decoder(self.sizes) if isinstance(self.sizes, DecoderSizes) else Cnn(self.sizes)

    def data(self, device: torch.device, seed: int) -> tuple[Tensor, Tensor]:
        if isinstance(self.sizes, DecoderSizes):
            return decoder_batch(self.sizes, self.batch, self.rows, device, seed)
        return cnn_batch(self.sizes, self.batch, device, seed)

    def swaps(self) -> Mapping[str, dict[str, Any]]:
        """Blueprints of ours by the modules that they stand for."""
        if isinstance(self.sizes, DecoderSizes):
            return decoder_swaps(self.sizes, self.batch, self.rows)
        with torch.device("meta"):
            return (cnn_swaps if self.whole else cnn_parts)(Cnn(self.sizes), (self.batch,))


LARGE = (Model("decoder", DecoderSizes(), 4, 2048), Model("cnn", CnnSizes(), 64, whole=False))
SMALL = (Model("decoder", SMALL_DECODER, 2, 16), Model("cnn", SMALL_CNN, 4))
MODELS = {"large": LARGE, "small": SMALL}


def model_blueprints(which: str) -> dict[str, dict[str, Any]]:
    """Blueprint by the key under which its artifact is found again."""
    return {
        f"{which} {model.name} {pattern}": blueprint
        for model in MODELS[which]
        for pattern, blueprint in model.swaps().items()
    }


def plan(which: str, model: Model, ids: Mapping[str, str]) -> Plan:
    """For `runtime.swap`; KeyError names a blueprint that was not compiled."""
    keys = {pattern: f"{which} {model.name} {pattern}" for pattern in model.swaps()}
    how: dict[str, Any] = {"channels_last": True, "mode": "train"} if model.name == "cnn" else {}
    return {pattern: Fit(ids[key], **how) for pattern, key in keys.items()}


class Trained:
    """One way to train one model, ready to step."""

    def __init__(
        self, model: Model, way: str, swaps: Callable[[nn.Module], Any], device: torch.device
    ) -> None:
        self.model, self.device = model, device
        self.plain = model.make().to(device)
        self.swapped = way in (OURS, INSIDE)
        if self.swapped:
            swaps(self.plain)
        self.start = {k: v.detach().clone() for k, v in self.plain.state_dict().items()}
        self.called: Any = self.plain
        if way in (COMPILE, INSIDE):
            self.called = torch.compile(self.plain, dynamic=False)
        self.optimizer = self._optimizer()
        # A few batches in turn, so that there is something to learn.
        self.batches = [model.data(device, seed) for seed in range(4)]

    def _optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.plain.parameters(), RATE, fused=self.device.type == "cuda")

    def step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        loss = self.called(*batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def curve(self, moved: int = 0) -> list[float]:
        """Losses from the start; `moved`: with weights off by up to their type's resolution."""
        self.plain.load_state_dict(self.start)
        self.optimizer = self._optimizer()
        if moved:
            generator = torch.Generator().manual_seed(moved)
            with torch.no_grad():
                for weight in self.plain.parameters():
                    noise = 2 * torch.rand(weight.shape, generator=generator).to(weight.device) - 1
                    weight.add_(weight * noise * torch.finfo(weight.dtype).eps)
        losses = [self.step(self.batches[at % len(self.batches)]) for at in range(CURVE)]
        return [float(loss) for loss in losses]


def run(job: dict[str, Any], tell: Callable[..., None]) -> None:
    """Lines: `ready` with losses and the seconds that compiling took, then (when told to go) `row`."""
    device = device_here()
    if device.type == "cpu":
        torch.set_num_threads(job["threads"] or torch.get_num_threads())
    which, way = job["which"], job["way"]
    model = next(m for m in MODELS[which] if m.name == job["model"])
    with Library.open(job["library"], create=False, readonly=True) as library:
        ready = Trained(model, way, lambda m: _swap(m, which, model, job, library), device)
        batch, begin = ready.batches[0], time.perf_counter()
        ready.step(batch)
        _wait(device)
        first = time.perf_counter() - begin
        losses = ready.curve()
        moved = [ready.curve(seed) for seed in range(1, PERTURBED + 1)] if way == EAGER else []
        ready.start, ready.batches = {}, []  # not memory of a training step
        tell("ready", losses=losses, moved=moved, first_step_s=first)
        _until(Path(job["go"]))
        with Turn(Path(job["turn_lock"])).held() if job.get("turn_lock") else nullcontext():
            tell("row", **_measured(ready, batch, job["repeats"], job["span_s"]))


def _swap(model: nn.Module, which: str, kind: Model, job: dict[str, Any], library: Library) -> None:
    swap(model, plan(which, kind, job["ids"]), library=library, allow_unvalidated=job["unproven"])


def _until(go: Path) -> None:
    while not go.exists():
        time.sleep(0.05)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _measured(ready: Trained, batch: tuple[Tensor, Tensor], repeats: int, span: float) -> dict[str, Any]:
    """Steps in a row, as a training loop makes them; a sample is the mean of one repeat."""
    device = ready.device
    for _ in range(2):
        ready.step(batch)
    _wait(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    ready.step(batch)
    _wait(device)
    inner = max(1, int(span / repeats / (time.perf_counter() - begin)))
    with timing.quiet():
        samples = tuple(_span(ready, batch, inner) for _ in range(repeats))
    found = Timing(samples)
    reports = swapped(ready.plain).values()
    return {
        "wall_ms": found.median / 1e3, "wall_lo": found.low / 1e3, "wall_hi": found.high / 1e3,
        "wall_iqr": found.iqr / 1e3, "dev_ms": None, "steps": inner * repeats,
        "peak_MiB": torch.cuda.max_memory_allocated() / (1 << 20) if device.type == "cuda" else None,
        "swapped": len(reports), "eager_calls": sum(r["eager_calls"] for r in reports),
    }  # fmt: skip


def _span(ready: Trained, batch: tuple[Tensor, Tensor], inner: int) -> float:
    """Microseconds a step."""
    _wait(ready.device)
    begin = time.perf_counter()
    for _ in range(inner):
        ready.step(batch)
    _wait(ready.device)
    return (time.perf_counter() - begin) / inner * 1e6


def deviation(a: list[float], b: list[float]) -> float:
    """Root mean square of the relative differences, step by step."""
    return statistics.fmean(((x - y) / y) ** 2 for x, y in zip(a, b, strict=True)) ** 0.5


def main() -> int:
    job, out = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), Path(sys.argv[2])

    def tell(kind: str, **fields: Any) -> None:
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(plain({"kind": kind, **fields})) + "\n")

    try:
        run(job, tell)
    except Exception:
        tell("broke", why=traceback.format_exc(limit=-4)[-1500:])
        return 1
    tell("done")
    return 0


if __name__ == "__main__":
    sys.exit(main())
