"""`python -m runtime bench ID` and `python -m runtime doctor [ID]`: thin; `--json` is one document on
stdout."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from esper_ir.diagnostics import EXIT_INTERRUPTED, EsperError
from library.cli_base import Interruptible

SAYS = {"faster": "esper faster", "slower": "esper slower", "level": "level", "worthless": "worthless"}


@contextmanager
def refusals(as_json: bool) -> Iterator[None]:
    """An EsperError becomes text on stderr (a document on stdout with --json) and its exit code."""
    try:
        yield
    except EsperError as error:
        if as_json:
            click.echo(json.dumps({"schema": "esper-error/1", "error": error.to_json()}, default=str))
        click.echo(str(error), err=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


@click.group(cls=Interruptible, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Load, run and time stored artifacts."""
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="esper: %(message)s")


@main.command()
@click.argument("name", metavar="ID")
@click.option("--json", "as_json", is_flag=True, help="One document on stdout.")
@click.option("--library", type=click.Path(), default=None, help="Library to read (default ESPER_LIBRARY).")
@click.option("--compile", "compiled", is_flag=True, help="Also time torch.compile of the eager twin.")
@click.option("--allow-unvalidated", is_flag=True, help="Accept what is not proven yet; warns.")
@click.option("--rounds", type=click.IntRange(3, 10_000), default=20, show_default=True)
def bench(
    name: str, as_json: bool, library: str | None, compiled: bool, allow_unvalidated: bool, rounds: int
) -> None:
    """Load, call, forward and backward of an artifact, beside eager."""
    with refusals(as_json):
        from runtime import bench as bencher

        found = bencher.measure(
            name, library=library, allow_unvalidated=allow_unvalidated, compiled=compiled, rounds=rounds
        )
        click.echo(json.dumps(found, indent=1, default=str)) if as_json else _table(found)


def _table(found: dict[str, Any]) -> None:
    load = found["load"]
    click.echo(
        f"{found['artifact']} on {found['device']}, {found['dims']}, native dispatch: {found['native']}"
    )
    click.echo(
        f"load: first {load['first_us']:.0f} us, uncached {load['uncached']['median_us']:.0f} us, "
        f"cached {load['cached']['median_us']:.1f} us"
    )
    click.echo(f"{'us, median (95 % interval)':28}" + "".join(f"{k:>34}" for k in ("f", "fb")))
    for row in found["rows"]:
        kinds = [k for k in ("wall", "host", "dev") if not isinstance(row[k], str)]
        for kind in kinds if found["device"] != "cpu" else kinds[:1]:
            cells = [_cell(row[kind][k], "_us", 1) for k in ("f", "fb")]
            click.echo(f"{row['impl'] + ' ' + kind:28}" + "".join(f"{cell:>34}" for cell in cells))
    for row in found["comparison"]:
        cells = [f"{_cell(row[k], '', 2)} {SAYS[row[k]['says']]}" for k in ("f", "fb")]
        click.echo(f"{row['impl'] + ' over esper, wall':28}" + "".join(f"{cell:>34}" for cell in cells))
    for note in found["notes"]:
        click.echo(note, err=True)


def _cell(of: dict[str, Any], unit: str, digits: int) -> str:
    middle = of[f"median{unit}"] if unit else of["ratio"]
    return f"{middle:.{digits}f} ({of[f'low{unit}']:.{digits}f}..{of[f'high{unit}']:.{digits}f})"


@main.command()
@click.option("--if-possible", is_flag=True, help="Exit 0 when it cannot be built, and say why.")
def build(if_possible: bool) -> None:
    """Compile the optional autograd node for the torch and Python that are installed here."""
    try:
        with refusals(False):
            from runtime import node

            click.echo(f"built {node.build()}", err=True)
    except SystemExit:
        if not if_possible:
            raise


@main.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="One document on stdout.")
@click.option("--once", is_flag=True, help="Print the board as it stands and end.")
@click.option("--interval", default=0.5, show_default=True, help="Seconds between looks at the run.")
def watch(run: Path, as_json: bool, once: bool, interval: float) -> None:
    """Board of a growing run: slots, stages, alphas, health. RUN is the run_dir of the configuration.

    Follows the run until it ends; elsewhere than on a terminal the board is printed once.
    """
    with refusals(as_json):
        from rich.console import Console

        from runtime.strategy.board import watch as follow

        quiet = (
            Console(stderr=True, quiet=True)
            if as_json
            else Console(width=None if sys.stdout.isatty() else 130)
        )
        board = follow(run, quiet, once=once or as_json, interval_s=interval)
        if as_json:
            click.echo(json.dumps(board.to_json(), indent=1))


@main.command()
@click.argument("name", metavar="[ID]", required=False)
@click.option("--json", "as_json", is_flag=True, help="One document on stdout.")
@click.option("--library", type=click.Path(), default=None, help="Library to read (default ESPER_LIBRARY).")
def doctor(name: str | None, as_json: bool, library: str | None) -> None:
    """This machine, its driver, the library, and what would be chosen for an id and why."""
    from runtime import api

    found = api.doctor(name, library=library)
    if as_json:
        click.echo(json.dumps(found, indent=1, default=str))
    else:
        _tell(found)
    if found["problems"]:
        sys.exit(found["problems"][0]["exit_code"])


def _tell(found: dict[str, Any]) -> None:
    click.echo(f"torch {found['torch']}, CUDA {'yes' if found['cuda'] else 'no'}, strict {found['strict']}")
    native = found["native"]
    click.echo(f"native dispatch: built {native['built']}, used {native['used']}; node: {native['node']}")
    for kind, facts in found["machines"].items():
        told = ", ".join(f"{k} {v}" for k, v in facts.items() if v)
        click.echo(f"{kind}: {told}")
    click.echo("library: " + ", ".join(f"{k} {v}" for k, v in found["library"].items()))
    choice = found.get("choice")
    if choice:
        click.echo(f"blueprint {choice['blueprint'][:12]}: would take {choice['chosen'][:1] or 'nothing'}")
        for name, why in choice["refused"].items():
            click.echo(f"  not {name}: {why['code']} {why['reason']}")
    for problem in found["problems"]:
        click.echo(f"problem {problem['code']}: {problem['message']}", err=True)
