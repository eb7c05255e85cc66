"""The demo: compile the examples, prove them, load them by id, train on real digits beside plain torch.

python -m bench.demo [--json] [--library DIR] [--target auto]
"""

from __future__ import annotations

import functools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import runtime
from bench import digits
from esper_ir.diagnostics import EsperError
from forge.service import compile_file
from gauntlet.isolate import ForkServer
from gauntlet.runner import prove
from gauntlet.sampling import QUICK
from library.store import Library
from runtime import timing

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
BLOCK = "digits_block"
COMPILED = ("rmsnorm_residual", "small_mlp", BLOCK)
SEEDS = (0, 1, 2, 3, 4)
ROWS = 64  # rows of the inputs with which calls are timed
MAX_GAP, MIN_ACCURACY = 0.5, 95.0  # points and percent


@dataclass(frozen=True)
class Artifact:
    """One compiled example. `load_us`: id to module, the first time; `call_us`, `twin_us`: no-grad calls."""

    blueprint: str
    artifact_id: str
    compile_s: float
    prove_s: float
    load_us: float
    call_us: float
    twin_us: float


@dataclass(frozen=True)
class Trained:
    """One implementation of the block inside the classifier; no accuracy where only steps were timed."""

    impl: str
    step_ms: float
    call_us: float
    accuracy: float | None = None
    accuracies: tuple[float, ...] = ()

    @classmethod
    def of(cls, impl: str, runs: list[digits.Run], call_us: float) -> Trained:
        """Medians of the step time, mean of the accuracies; a single run says nothing about accuracy."""
        found = tuple(run.accuracy for run in runs)
        step_ms = statistics.median(run.step_ms for run in runs)
        mean = statistics.fmean(found) if len(found) > 1 else None
        return cls(impl, step_ms, call_us, mean, found)


@dataclass
class Result:
    device: str
    artifacts: list[Artifact] = field(default_factory=list)
    trained: list[Trained] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def failures(self) -> list[str]:
        """What of the demo's claims does not hold; empty when all hold."""
        native, plain = (next(t for t in self.trained if t.impl == name) for name in ("esper", "eager"))
        assert native.accuracy is not None and plain.accuracy is not None
        gap = abs(native.accuracy - plain.accuracy)
        found = [f"accuracies differ by {gap:.2f} points (at most {MAX_GAP})"] if gap > MAX_GAP else []
        for one in (native, plain):
            if one.accuracy is not None and one.accuracy < MIN_ACCURACY:
                found.append(f"{one.impl}: {one.accuracy:.2f} % is under {MIN_ACCURACY} %")
        if self.counters["eager_fallbacks"]:
            found.append(f"{self.counters['eager_fallbacks']} eager fallbacks")
        if not self.counters["launches"]:
            found.append("no native launch was counted")
        return found


def call_us(blocks: Mapping[str, torch.nn.Module], inputs: list[torch.Tensor]) -> dict[str, float]:
    """Median microseconds of a no-grad call, interleaved: wall time on the cpu, host time on a card."""
    work = {name: functools.partial(block, *inputs) for name, block in blocks.items()}
    measure = timing.cpu_times if inputs[0].device.type == "cpu" else timing.host_times
    with torch.no_grad():
        return {name: found.median for name, found in measure(work).items()}


def example_inputs(path: Path, device: torch.device) -> list[torch.Tensor]:
    """Normal inputs as the blueprint declares them, every symbolic size at `ROWS`."""
    blueprint = json.loads(path.read_text(encoding="utf-8"))
    shapes = [
        ([size if isinstance(size, int) else ROWS for size in spec["shape"]], getattr(torch, spec["dtype"]))
        for spec in blueprint["inputs"].values()
    ]
    return [torch.randn(shape).to(device=device, dtype=dtype) for shape, dtype in shapes]


def build(path: Path, target: str, library: Library, server: ForkServer, device: torch.device) -> Artifact:
    """Compile with the fast pipeline, prove, load by id and time one example."""
    (compiled,) = compile_file(path, pipelines=("fast",), targets=(target,), library=library)
    verdict = prove(compiled.artifact_id, library=library, server=server, effort=QUICK)
    if not verdict.passed:
        raise click.ClickException(f"{path.name}: {verdict.artifact_id} {verdict.state}: {verdict.reason}")
    load = runtime.load  # imported here, so that what is timed is loading
    begin = time.perf_counter()
    block = load(compiled.artifact_id, library=library)
    load_us = 1e6 * (time.perf_counter() - begin)
    twin = runtime.twin(compiled.artifact_id, library=library)
    calls = call_us({"esper": block, "twin": twin}, example_inputs(path, device))
    seconds = compiled.seconds["total"], verdict.seconds
    return Artifact(path.stem, compiled.artifact_id, *seconds, load_us, calls["esper"], calls["twin"])


def train_all(result: Result, artifact_id: str, library: Library, data: digits.Digits, bar: Bar) -> None:
    """The same seeds, weights and batches for the compiled block and for plain torch; then torch.compile, of
    which only the step time is wanted, with the first seed."""
    device = data.x_train.device
    runs: dict[str, list[digits.Run]] = {"esper": [], "eager": []}
    blocks: dict[str, torch.nn.Module] = {}
    for seed in SEEDS:
        native = runtime.load(artifact_id, library=library)
        blocks = {"esper": native, "eager": digits.PlainBlock().to(device)}
        for impl, block in blocks.items():
            runs[impl].append(digits.train(digits.Classifier(block).to(device), data, seed, bar.step))
        for name in ("launches", "eager_fallbacks", "copies"):
            result.counters[name] = result.counters.get(name, 0) + native.report()["counters"][name]
    bar.say("train with torch.compile")
    compiled: Any = torch.compile(digits.PlainBlock().to(device))
    try:
        # Warmed with the shape that is trained, so that no step waits for the compiler.
        compiled(data.x_train[: digits.BATCH]).sum().backward()
        runs["torch.compile"] = [
            digits.train(digits.Classifier(compiled).to(device), data, SEEDS[0], bar.step)
        ]
        blocks["torch.compile"] = compiled
    except Exception as error:  # no C++ compiler, no Triton: whatever stops it here is reported, not hidden
        reason = str(error).strip().splitlines()[0][:160] if str(error).strip() else type(error).__name__
        result.notes.append(f"torch.compile does not work here: {reason}")
    calls = call_us(blocks, [data.x_test[:ROWS]])
    result.trained += [Trained.of(impl, done, calls[impl]) for impl, done in runs.items()]


@dataclass(frozen=True)
class Bar:
    """One progress bar on a terminal, one line for each step of the way elsewhere."""

    progress: Progress
    task: Any

    def step(self) -> None:
        self.progress.advance(self.task)

    def say(self, text: str) -> None:
        self.progress.update(self.task, description=text)
        if self.progress.disable:
            self.progress.console.print(text)


@contextmanager
def progress_bar(console: Console, total: int) -> Iterator[Bar]:
    columns = (TextColumn("{task.description:<34}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        yield Bar(progress, progress.add_task("starting", total=total))


def run(target: str, library: Library, console: Console) -> Result:
    device = torch.device("cuda" if torch.cuda.is_available() and not target.startswith("cpu") else "cpu")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    if device.type == "cpu":
        torch.set_num_threads(1)  # the block is small: a second thread waits more than it works
    result, begin = Result(name), time.perf_counter()
    data = digits.load(device)
    paths = [EXAMPLES / f"{name}.json" for name in COMPILED]
    trainings = 2 * len(SEEDS) + 1
    with progress_bar(console, len(paths) + trainings * digits.EPOCHS) as bar, ForkServer() as server:
        for path in paths:
            bar.say(f"compile and prove {path.stem}")
            result.artifacts.append(build(path, target, library, server, device))
            bar.step()
        block = next(one for one in result.artifacts if one.blueprint == BLOCK)
        bar.say("train on digits")
        train_all(result, block.artifact_id, library, data, bar)
        bar.say("done")
    result.seconds = time.perf_counter() - begin
    return result


def show(result: Result, console: Console) -> None:
    table = Table(title=f"Artifacts on {result.device}; calls without gradients, {ROWS} rows")
    for title in ("blueprint", "compile s", "prove s", "load us", "call us", "twin us", "artifact id"):
        table.add_column(
            title, justify="left" if title in ("blueprint", "artifact id") else "right", no_wrap=True
        )
    for a in result.artifacts:
        figures = (
            f"{a.compile_s:.2f}",
            f"{a.prove_s:.2f}",
            f"{a.load_us:.0f}",
            f"{a.call_us:.1f}",
            f"{a.twin_us:.1f}",
        )
        table.add_row(a.blueprint, *figures, a.artifact_id)
    console.print(table)
    table = Table(title=f"Digits, {len(SEEDS)} paired seeds")
    for title in ("block", "accuracy %", "step ms", "call us"):
        table.add_column(title, justify="left" if title == "block" else "right")
    for t in result.trained:
        table.add_row(
            t.impl, "-" if t.accuracy is None else f"{t.accuracy:.2f}", f"{t.step_ms:.3f}", f"{t.call_us:.1f}"
        )
    console.print(table)
    counted = ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in result.counters.items())
    console.print(f"{counted}; {result.seconds:.0f} s in all")
    for note in result.notes:
        console.print(note)


@contextmanager
def opened(place: Path | None) -> Iterator[Library]:
    """The library at `place` with the user's keys, else one with keys of its own that goes with the demo."""
    if place is not None:
        with Library.open(place) as library:
            yield library
        return
    with tempfile.TemporaryDirectory(prefix="esper-demo-") as folder:
        with Library.open(Path(folder) / "library", trust=Path(folder) / "trust") as library:
            yield library


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One document on standard output.")
@click.option(
    "--library", type=click.Path(path_type=Path), help="Keep the artifacts here; default: a temporary one."
)
@click.option("--target", default="auto", show_default=True, help="`auto` is the card present, else `cpu`.")
def main(as_json: bool, library: Path | None, target: str) -> None:
    """Compile the examples, prove them, load them by id and train on real digits beside plain torch."""
    console = Console(stderr=as_json, width=None if sys.stdout.isatty() else 130)
    try:
        with opened(library) as store:
            result = run(target, store, console)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "sklearn":
            raise
        raise click.ClickException("the digits come with scikit-learn: pip install scikit-learn") from None
    except EsperError as error:
        click.echo(str(error), err=True)
        sys.exit(error.exit_code)
    failures = result.failures()
    if as_json:
        click.echo(json.dumps({"schema": "esper-demo/1", **asdict(result), "failures": failures}, indent=1))
    else:
        show(result, console)
    for failure in failures:
        click.echo(f"FAILED: {failure}", err=True)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
