"""What loading costs without a driver, on any processor: an artifact for a card, with a stub of its driver.

    python -m bench.stubbed [--out FOLDER]

The block of the first measurements, compiled for `h100` and proven by decree: a verdict is signed that no
judge gave, into a library that goes with this run, since without one an artifact is read strictly. Reading,
verifying, decoding and binding are what they are on a card; the stub's calls are counted apart.
"""

from __future__ import annotations

import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import click
import torch

from bench import results
from bench.load import walked
from bench.results import ROOT, figure
from bench.whole import HOST_LOAD_US, HOST_PIECES
from forge.service import compile_file
from library.platform import Platform
from library.store import Library
from runtime import loader, system, timing
from runtime.driver import Driver

STUB = ROOT / "tests" / "runtime" / "stub_cuda.c"
BLOCK, TARGET = ROOT / "examples" / "rmsnorm_residual.json", "h100"
ROUNDS, WARM = 400, 30
HOPPER = {"cuda_cc": (9, 0), "driver": 13000, "cpu_level": 4}


def measure(place: Path, rounds: int = ROUNDS) -> dict[str, Any]:
    """Figures in microseconds, and the pieces with their medians and 99th percentiles."""
    stub = place / "libcuda.so.1"
    subprocess.run(["gcc", "-O2", "-shared", "-fPIC", "-w", "-o", stub, STUB], check=True)
    where: dict[str, Any] = {"trust": place / "trust", "roles": ("compiler", "validator")}
    with Library.open(place / "library", **where) as library:
        name = compile_file(BLOCK, targets=(TARGET,), library=library)[0].artifact_id
        library.record_verdict(name, {"stages": []}, passed=True, reason="by decree, to measure loading")
    with Library.open(place / "library", trust=place / "trust", roles=(), readonly=True) as library:
        library.warm()
        spans = _timed(library, name, Driver(str(stub)), rounds)
    whole = [sum(spans[piece][at] for piece in HOST_PIECES if piece in spans) for at in range(rounds)]
    found = timing.Timing(tuple(whole))
    figures = {
        "load_without_driver_us_p50": figure(found.median, "us", HOST_LOAD_US, lo=found.low, hi=found.high),
        "load_without_driver_us_p99": figure(found.p99, "us", None),
    }
    pieces = {n: {"p50": statistics.median(s), "p99": timing.Timing(tuple(s)).p99} for n, s in spans.items()}
    return {"figures": figures, "details": {"artifact": name, "pieces": pieces}}


def _timed(library: Library, name: str, driver: Driver, rounds: int) -> dict[str, list[float]]:
    device = torch.device("cuda", 0)
    ours = system.machine("cpu", 0)
    machine = Platform(**HOPPER, torch=ours.torch, externs=ours.externs)
    driver.enter(0)

    launch = loader.launch_of(library.load(name))
    dims = tuple((d.tune or (d.min,))[0] for d in launch.interface.dims)
    spans = walked(library, name, device, lambda _: machine, dims, WARM + rounds, cuda=driver)
    return {what: taken[WARM:] for what, taken in spans.items()}


@click.command()
@click.option("--out", type=click.Path(path_type=Path), default=results.RESULTS, show_default=False)
def main(out: Path) -> None:
    """Measure and write the results file."""
    with tempfile.TemporaryDirectory(prefix="esper-stubbed-") as place:
        found = measure(Path(place))
    click.echo(f"written: {results.write({**results.header('load'), 'rows': [], **found}, out)}", err=True)


if __name__ == "__main__":
    main()
