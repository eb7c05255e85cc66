"""`esper-gauntlet risk`: train, evaluate and explain models of the risk of failing in use."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from gauntlet.cli_base import emit, json_option, library_option, named

SHOWN = 12
"""Contributions that are shown without --json."""
FILE = click.Path(path_type=Path, dir_okay=False)

outcomes_option = click.option(
    "--outcomes", type=FILE, metavar="FILE", help="JSON lines (default: what the library was told about)."
)


@click.group()
def risk() -> None:
    """How likely an artifact is to fail in use: models of it, and what they say."""


@risk.command()
@outcomes_option
@click.option("--out", type=FILE, metavar="FILE", help="Model to write (default: the library's).")
@library_option
@json_option
def train(outcomes: Path | None, out: Path | None, library: str | None, as_json: bool) -> None:
    """Train a model on outcomes. Needs 1,000 with 100 failures; until then the model that is there stays."""
    from gauntlet.risk import learners, model, score

    with named(as_json), _opened(library, outcomes is None or out is None) as opened:
        found, basis = _outcomes(outcomes, opened)
        model.enough(found)
        made = model.fit(learners.load(), found, basis=basis)
        path = out or score.place(opened, basis)
        model.save(made, path)
    if as_json:
        emit({"model": str(path), "basis": basis, **made.facts})
    else:
        click.echo(f"{path}: {basis}, {_numbers(made.facts)}")


@risk.command()
@outcomes_option
@click.option("--svg", type=FILE, metavar="FILE", help="Reliability plot to write.")
@library_option
@json_option
def evaluate(outcomes: Path | None, svg: Path | None, library: str | None, as_json: bool) -> None:
    """How good scores are on kernel families, and on later outcomes, that the model has not seen."""
    from gauntlet.risk import evaluate as judge
    from gauntlet.risk import learners, model, picture
    from library.paths import writes_to

    with named(as_json), _opened(library, outcomes is None) as opened:
        found, basis = _outcomes(outcomes, opened)
        model.enough(found)
        said = {"basis": basis, **judge.evaluate(learners.load(), found)}
        if svg:
            with writes_to(svg):
                svg.write_text(picture.reliability(said["reliability"], basis), encoding="utf-8")
    if as_json:
        emit(said)
    else:
        _table(said)


@risk.command()
@click.argument("artifact", metavar="ID")
@click.option("--model", "path", type=FILE, metavar="FILE", help="Model (default: as `annotate` takes it).")
@library_option
@json_option
def explain(artifact: str, path: Path | None, library: str | None, as_json: bool) -> None:
    """What each feature adds to the score of an artifact, in log-odds."""
    from gauntlet.risk import explain as tell

    with named(as_json), _opened(library, True) as opened:
        said = tell.explain(opened, artifact, path)
    if as_json:
        emit(said)
    else:
        _explained(said)


@contextlib.contextmanager
def _opened(library: str | None, needed: bool) -> Iterator[Any]:
    """The library to read; None where files were given for everything."""
    from library.store import Library

    with Library.open(library, create=False, readonly=True) if needed else contextlib.nullcontext() as opened:
        yield opened


def _outcomes(path: Path | None, opened: Any) -> tuple[list[Any], str]:
    """With their basis: one simulated outcome makes the whole no evidence from the field."""
    from gauntlet.risk import field, outcomes

    found = outcomes.trainings(outcomes.read(path)) if path else field.outcomes(opened)
    real = all(o.basis == outcomes.FIELD for o in found)
    return found, outcomes.FIELD if real else outcomes.SIMULATED


def _numbers(facts: Any) -> str:
    names = ("outcomes", "failures", "artifacts", "families")
    return ", ".join(f"{facts[name]} {name}" for name in names)


def _table(said: dict[str, Any]) -> None:
    click.echo(f"basis: {said['basis']}")
    for row in said["scores"]:
        click.echo(
            f"{row['split']:7} {row['method']:20} Brier skill {_interval(row['skill'])}  "
            f"PR-AUC {_interval(row['precision'])}  {_numbers(row)}"
        )


def _interval(found: dict[str, float]) -> str:
    return f"{found['value']:6.3f} [{found['low']:.3f}, {found['high']:.3f}]"


def _explained(said: dict[str, Any]) -> None:
    click.echo(f"{said['artifact_id']}  risk {said['risk']:.4f}  basis {said['basis']}")
    click.echo(f"  {said['base']:+8.3f}  without any feature ({_numbers(said['facts'])})")
    shown = [row for row in said["contributions"][:SHOWN] if row["log_odds"]]
    for row in shown:
        value = "missing" if row["value"] is None else f"{row['value']:.4g}"
        click.echo(f"  {row['log_odds']:+8.3f}  {row['feature']} = {value}  ({row['text']})")
    rest = said["contributions"][len(shown) :]
    click.echo(f"  {sum(row['log_odds'] for row in rest):+8.3f}  the other {len(rest)} features")
