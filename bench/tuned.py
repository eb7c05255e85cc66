"""What a search on this machine's device chooses, for speed and for power: a look, no comparison of blocks.

    python -m bench.tuned --out out/tuned [--budget 15]          (on a card: two blocks, about a minute)

Every block is compiled by `standard` for each objective, at one size, within the budget; then again from its
journal, which must give the same id. Rows say how many tiles were tried and refused, how much faster the
groups are than with their first tiles, which products became kernels of ours, and whether joules decided.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import click

import esper_ir.text as text
from bench import results
from bench.blocks import available
from bench.crew import say
from bench.results import figure
from esper_ir.graph import Blueprint
from forge.service import compile_blueprint
from forge.tune import halves
from forge.tune.trials import Hunt
from library.store import Library

BLOCKS, OBJECTIVES = ("linear_gelu", "rmsnorm_residual"), ("speed", "power")


def at_one_size(path: Path) -> Blueprint:
    """A block tuned for its middle size alone."""
    made = text.load(path)
    dims = {
        n: replace(d, tune=(sorted(d.tune)[len(d.tune) // 2],)) if d.tune else d for n, d in made.dims.items()
    }
    return replace(made, dims=dims)


def row_of(report: Mapping[str, Any], aim: str) -> dict[str, Any]:
    """What a report of a search says."""
    hunts = [halves.hunt_of(g) for g in report.get("groups", ())]
    for hunt, group in zip(hunts, report.get("groups", ()), strict=True):
        hunt.recall(group["trials"])
    trials = [t for h in hunts for t in h.trials.values()]
    pairs = [p for h in hunts if (p := _taken(h, aim)) is not None]
    ways = [won for g, (_, won) in zip(report.get("groups", ()), map(_chosen(aim), hunts), strict=True)
            if g["kind"] == "ProductWay"]  # fmt: skip
    return {
        "groups": len(hunts), "trials": len(trials), "refused": sum(bool(t.wrong) for t in trials),
        "gain": sum(p for p, _ in pairs) / sum(w for _, w in pairs) if pairs else None,
        "by_energy": sum(g.get("decided") == "energy" for g in report.get("groups", ())),
        "products": len(ways), "products_own": sum(getattr(w, "own", False) for w in ways),
        "absent": report.get("absent", ""), "untimed": report.get("untimed", ""),
    }  # fmt: skip


def _chosen(aim: str) -> Any:
    return lambda hunt: (hunt.prior, hunt.winner(aim) or hunt.prior)


def _taken(hunt: Hunt, aim: str) -> tuple[float, float] | None:
    """Microseconds of the first tile and of the one that was chosen."""
    first, won = (hunt.trials.get(repr(t)) for t in _chosen(aim)(hunt))
    return None if first is None or first.wrong or won is None else (first.us, won.us)


def searched(library: Library, name: str, blueprint: Blueprint, aim: str, budget_s: float) -> dict[str, Any]:
    """A row: one search and its replay."""
    options: dict[str, Any] = {"pipelines": ("standard",), "objectives": (aim,), "library": library}
    started = time.monotonic()
    (made,) = compile_blueprint(blueprint, budget_s=budget_s, **options)
    seconds = time.monotonic() - started
    report = json.loads(library.side_file(made.artifact_id, "tuning.json"))
    journal = json.loads(library.side_file(made.artifact_id, "journal.json"))
    (again,) = compile_blueprint(blueprint, replay=journal, **options)
    row = {"block": name, "objective": aim, "seconds": seconds, "artifact": made.artifact_id}
    warnings = [str(w) for w in made.warnings]
    return {
        **row,
        **row_of(report, aim),
        "replay_same": again.artifact_id == made.artifact_id,
        "warnings": warnings,
    }


def figures(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "replays_same": figure(sum(r["replay_same"] for r in rows), "searches", len(rows), at_least=True),
        "by_energy": figure(sum(r["by_energy"] for r in rows if r["objective"] == "power"), "groups"),
        "products_own": figure(sum(r["products_own"] for r in rows), "products"),
        "refused": figure(sum(r["refused"] for r in rows), "tiles"),
    }


@click.command()
@click.option(
    "--only", multiple=True, default=BLOCKS, show_default=True, help="Words in the names of blocks."
)
@click.option("--budget", default=15.0, show_default=True, help="Seconds of one search.")
@click.option("--out", type=click.Path(path_type=Path), default=results.RESULTS, show_default=False)
def main(only: tuple[str, ...], budget: float, out: Path) -> None:
    """Search, replay, and write the results file."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="esper-tuned-") as folder:
        places = {"trust": Path(folder, "trust"), "roles": ("compiler",)}
        with Library.open(Path(folder, "library"), **places) as library:
            for block, aim in product(available(only), OBJECTIVES):
                rows.append(searched(library, block.name, at_one_size(block.blueprint), aim, budget))
                say(json.dumps(results.plain(rows[-1])))
    document = {**results.header("tuned"), "rows": rows, "figures": figures(rows)}
    say(f"written: {results.write(document, out)}")


if __name__ == "__main__":
    main()
