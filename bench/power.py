"""What a card draws: idle, for a byte moved and for an operation of a product.

    python -m bench.power --out out/power        (on a card with nvidia-ml-py, under a minute)

The constants of forge/targets are estimates from published limits; these are measured: beyond the watts that
flow in any case, a copy's watts over its rate, and a product's over its.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch

from bench import results
from bench.crew import say
from bench.results import figure
from forge.target import resolve
from runtime.energy import Meter, calls_of

COPY_BYTES, SIDE = 1 << 30, 8192
WINDOW_S, WINDOWS, IDLE_S = 1.5, 3, 3.0


def draw(meter: Meter, work: Callable[[], Any]) -> tuple[float, float]:
    """(watts, calls a second) while the work runs."""
    calls, seconds, count = calls_of(work), 0.0, 0

    def counted() -> int:
        nonlocal seconds, count
        started = time.monotonic()
        done = calls()
        seconds, count = seconds + time.monotonic() - started, count + done
        return done

    spent = meter.measure(counted, WINDOW_S, WINDOWS)
    return spent.median * 1e-6 * count / seconds, count / seconds


def idle_watts(meter: Meter) -> float:
    """Watts of a card that holds a context and runs nothing."""
    torch.cuda.synchronize()
    time.sleep(1.0)
    before, at = meter.millijoules(), time.monotonic()
    time.sleep(IDLE_S)
    return (meter.millijoules() - before) / 1e3 / (time.monotonic() - at)


def measured(meter: Meter) -> dict[str, dict[str, Any]]:
    """Figures: watts, rates and picojoules."""
    device = torch.device("cuda")
    source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    a, b = (torch.randn(SIDE, SIDE, dtype=torch.bfloat16, device=device) for _ in range(2))
    idle = idle_watts(meter)
    product = torch.empty_like(a)
    copy, copies = draw(meter, lambda: target.copy_(source))
    multiply, products = draw(meter, lambda: torch.mm(a, b, out=product))
    moved, flops = 2 * COPY_BYTES * copies, 2 * SIDE**3 * products
    out = {
        "idle_watts": figure(idle, "W"), "copy_watts": figure(copy, "W"),
        "product_watts": figure(multiply, "W"),
        "copy_rate": figure(moved / 1e12, "TB/s"), "product_rate": figure(flops / 1e12, "TFLOP/s"),
        "byte_pJ": figure((copy - idle) / moved * 1e12, "pJ"),
        "flop_pJ": figure((multiply - idle) / flops * 1e12, "pJ"),
    }  # fmt: skip
    known = resolve("auto").energy
    if known is not None:
        for name in ("byte_pJ", "flop_pJ", "static_watts"):
            out[f"assumed_{name}"] = figure(getattr(known, name), "W" if "watts" in name else "pJ")
    return out


@click.command()
@click.option("--out", type=click.Path(path_type=Path), default=results.RESULTS, show_default=False)
def main(out: Path) -> None:
    """Measure and write the results file."""
    if not torch.cuda.is_available():
        raise click.ClickException("no card here")
    meter = Meter(torch.device("cuda"))
    if meter.absent:
        raise click.ClickException(meter.absent)
    figures = measured(meter)
    for name, one in figures.items():
        say(f"{name}: {one['value']:.4g} {one['unit']}")
    say(f"written: {results.write({**results.header('power'), 'rows': [], 'figures': figures}, out)}")


if __name__ == "__main__":
    main()
