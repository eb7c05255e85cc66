"""The growth demo: a small network on MNIST-1D with a planted bottleneck, which a controller finds and fixes.

    python -m bench.growing.demo [--out out/growth] [--json]

Two seeds of examples/ are compiled, proven and tagged before. The same network is then trained three times:
healthy, with one block all but dead, and with that block and slots. In the third training the controller sees
progress stop, finds the block by its health, loads an artifact by id, lets it learn beside the host, grafts,
evaluates and keeps it. No compiler runs while training; a board shows what happens; a plot is written.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.live import Live
from torch.nn import functional as F

import runtime
from bench.growing import artifacts, mnist1d
from bench.growing.hosts import Towers
from bench.growing.mnist1d import Signals
from esper_ir.diagnostics import EsperError
from library.store import Library
from runtime.seeds.events import EventReader
from runtime.seeds.facts import Event
from runtime.seeds.lifecycle import Lifecycle
from runtime.strategy.board import Board

ROOT = Path(__file__).resolve().parent.parent.parent
CONFIG = ROOT / "examples" / "growth.yaml"
KIND, AT, SEED = "dead", 1, 0
EPOCHS, RATE = 44, 3e-3
SITE = f"blocks.{AT}/0"
MIN_GAIN = 2.0  # points of test accuracy over the crippled network


@dataclass
class Result:
    """Test accuracies in percent; validation accuracies per epoch by training; what the controller did."""

    accuracy: dict[str, float] = field(default_factory=dict)
    curves: dict[str, list[float]] = field(default_factory=dict)
    events: list[tuple[int, str]] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    explained: str = ""
    counters: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    files: list[str] = field(default_factory=list)

    def failures(self) -> list[str]:
        """What of the demo's claims does not hold."""
        found = []
        if self.asked[:1] != [SITE]:
            found.append(f"the first seed was asked for at {self.asked[:1] or 'no slot'}, planted was {SITE}")
        if SITE not in self.kept:
            found.append(f"no graft was kept at {SITE}")
        gain = self.accuracy["grown"] - self.accuracy["crippled"]
        if gain < MIN_GAIN:
            found.append(f"test accuracy changed by {gain:.2f} points (at least {MIN_GAIN})")
        if self.counters.get("eager_fallbacks"):
            found.append(f"{self.counters['eager_fallbacks']} eager fallbacks")
        return found


@contextmanager
def shown(console: Console) -> Iterator[Any]:
    """A listener that keeps a board up to date: live on a terminal, printed at the end elsewhere."""
    board = Board()

    def take(event: Event) -> None:
        board.take({"kind": event.kind, "epoch": event.epoch, "step": event.step, "slot": event.slot,
                    "facts": dict(event.facts)})  # fmt: skip
        if live is not None and event.kind in ("EPOCH", "RUN_FINISHED"):
            live.update(board.render(), refresh=True)

    if not console.is_terminal:
        live = None
        yield take
        console.print(board.render())
        return
    with Live(board.render(), console=console, auto_refresh=False) as live:
        yield take


def train(model: Towers, data: Signals, tamiyo: runtime.TamiyoController | None = None) -> list[float]:
    """Adam over shuffled batches; validation accuracy per epoch. The loop of every training script, with one
    call more per epoch where a controller is there."""
    optimizer = torch.optim.Adam(model.parameters(), RATE, fused=True)
    if tamiyo is not None:
        runtime.attach(model, optimizer)
    order = torch.Generator().manual_seed(SEED)
    found: list[float] = []
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(data.x), generator=order).split(mnist1d.BATCH):
            optimizer.zero_grad()
            F.cross_entropy(model(data.x[rows]), data.y[rows]).backward()
            optimizer.step()
        found.append(mnist1d.accuracy(model, data.x_valid, data.y_valid))
        if tamiyo is not None:
            tamiyo.end_epoch(lambda m: mnist1d.losses(m, data.x_valid, data.y_valid), accuracy=found[-1])
    return found


def grow(result: Result, data: Signals, library: Library, out: Path, console: Console) -> None:
    """The third training."""
    model = mnist1d.host(SEED, KIND, AT)
    runtime.wrap(model, "blocks.*", library=library, run_dir=out)
    tamiyo = runtime.TamiyoController(model, policy="heuristic", config=CONFIG, run_dir=out)
    with shown(console) as take:
        tamiyo.bus.subscribe(take)
        result.curves["grown"] = train(model, data, tamiyo)
        tamiyo.close()
    result.accuracy["grown"] = mnist1d.accuracy(model, data.x_test, data.y_test)
    result.explained = tamiyo.explain(SITE)
    for line in tamiyo.growth.journal.lines:
        if line["kind"] == "command" and line["to"] in _NAMED:
            result.events.append((int(line["epoch"]), _NAMED[line["to"]]))
        if line.get("to") == Lifecycle.GERMINATED.name:
            result.asked.append(line["slot"])
        if line.get("to") == Lifecycle.FOSSILIZED.name:
            result.kept.append(line["slot"])
    for site in tamiyo.growth.sites.values():
        for graft in site.chain:
            for name, count in graft.seed.block.report()["counters"].items():
                result.counters[name] = result.counters.get(name, 0) + count
    runtime.save_model(model, out / "model")


_NAMED = {
    "TRAINING": "seed learns",
    "GRAFTING": "graft",
    "FINE_TUNING": "fine-tune",
    "FOSSILIZED": "kept",
    "CULLED": "dropped",
}


def plot(result: Result, path: Path) -> None:
    """Validation accuracy of the three trainings, the life of the seeds marked."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 5), dpi=120)
    for name, style in (("healthy", "--"), ("crippled", ":"), ("grown", "-")):
        curve = result.curves[name]
        label = f"{name} ({result.accuracy[name]:.1f} % on the test set)"
        axes.plot(range(len(curve)), curve, style, label=label, linewidth=2 if name == "grown" else 1.5)
    low = min(min(c) for c in result.curves.values())
    for number, (epoch, what) in enumerate(result.events):
        axes.axvline(epoch, color="grey", linewidth=0.8)
        axes.text(
            epoch + 0.15,
            low + 1.5 * (number % 3),
            what,
            rotation=90,
            va="bottom",
            fontsize=9,
            color="dimgrey",
        )
    axes.set_xlabel("epoch")
    axes.set_ylabel("validation accuracy, %")
    axes.set_title(
        f"MNIST-1D, block {AT} of {mnist1d.PARTS} all but dead: found, and a proven kernel grafted"
    )
    axes.legend(loc="center right", bbox_to_anchor=(1.0, 0.35))
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def run(out: Path, console: Console) -> Result:
    """Everything; `out` gets events, journal, plot and the grown model."""
    torch.set_num_threads(1)  # the layers are small: a second thread waits more than it works
    begin = time.perf_counter()
    result = Result()
    data = mnist1d.load()
    console.print(f"MNIST-1D: {len(data.x)} signals to learn from; compiling and proving two seeds")
    with tempfile.TemporaryDirectory(prefix="esper-growth-") as folder:
        with artifacts.stocked(Path(folder), artifacts.WIDE, lambda text: console.print(text)) as library:
            for name, kind in (("healthy", ""), ("crippled", KIND)):
                model = mnist1d.host(SEED, kind, AT)
                result.curves[name] = train(model, data)
                result.accuracy[name] = mnist1d.accuracy(model, data.x_test, data.y_test)
                console.print(f"{name}: {result.accuracy[name]:.2f} % on the test set")
            grow(result, data, library, out, console)
    plot(result, out / "growth.png")
    result.files = [str(out / name) for name in ("growth.png", "events.jsonl", "journal.jsonl", "model")]
    result.seconds = time.perf_counter() - begin
    return result


@click.command()
@click.option("--out", type=click.Path(path_type=Path), default=ROOT / "out" / "growth", show_default=False,
              help="Folder for events, journal, plot and model (default: out/growth).")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="One document on standard output.")
def main(out: Path, as_json: bool) -> None:
    """Plant a bottleneck, let a controller find it, load a proven kernel, graft, evaluate and keep it."""
    console = Console(stderr=as_json, width=None if sys.stdout.isatty() else 130)
    for old in ("events.jsonl", "journal.jsonl", "tombstones.jsonl"):
        (out / old).unlink(missing_ok=True)
    try:
        result = run(out, console)
    except ModuleNotFoundError as error:
        raise click.ClickException(
            f"{error.name} is missing: pip install 'esper-forge[demo,forge]'"
        ) from None
    except EsperError as error:
        click.echo(str(error), err=True)
        sys.exit(error.exit_code)
    failures = result.failures()
    if as_json:
        click.echo(
            json.dumps({"schema": "esper-growth-demo/1", **asdict(result), "failures": failures}, indent=1)
        )
    else:
        console.print(result.explained)
        told = ", ".join(f"{name} {value:.2f} %" for name, value in result.accuracy.items())
        console.print(f"test accuracy: {told}; {result.seconds:.0f} s in all")
        console.print(f"{result.files[0]}; again: python -m runtime watch {out}")
        assert next(EventReader(out).read(), None) is not None
    for failure in failures:
        click.echo(f"FAILED: {failure}", err=True)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
