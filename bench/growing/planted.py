"""Planted bottlenecks, four kinds, and healthy hosts: what was found, what was fixed, what was disturbed.

    python -m bench.growing.planted OUT.jsonl [--first 100] [--trials 150] [--stop SECONDS]

One line per training; a file that has some goes on where it ended, so the trials can be made in pieces. The
seeds are not those that anything was tried on while it was written.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import torch

from bench.growing import artifacts, trial
from bench.growing.hosts import KINDS
from bench.results import commit, figure
from library.store import Library

FIRST, TRIALS = 100, 150
RESOLVED = 0.9
TARGET = 143  # of 150: the lower bound of the Wilson interval is above 90 %
MOST_EPOCHS = 30


def plan(first: int, trials: int) -> Iterator[tuple[int, str]]:
    """(seed, kind) of every training: kind "" is the healthy twin, "grown" the healthy host that may grow."""
    many = -(-trials // len(KINDS))
    left = trials
    for seed in range(first, first + many):
        yield seed, ""
        yield seed, "grown"
        for kind in KINDS[:left]:
            yield seed, kind
        left -= len(KINDS)


def one(seed: int, kind: str, library: Library) -> dict[str, Any]:
    """One line: the healthy twin's loss, a healthy host's growth, or both hosts of one plant."""
    given, at = trial.data(seed), seed % trial.PARTS
    base = {"seed": seed, "kind": kind or "twin", "commit": commit()[0]}
    if not kind:
        return {**base, "healthy": trial.train(trial.host(seed), given, seed).loss}
    planted = kind if kind != "grown" else ""
    grown = trial.train(trial.host(seed, planted, at), given, seed, library)
    told = {"grown": grown.loss, "asked": grown.asked, "kept": grown.kept, "epochs": grown.epochs}
    if not planted:
        return {**base, **told}
    untouched = trial.train(trial.host(seed, kind, at), given, seed).loss
    return {**base, **told, "site": f"blocks.{at}/0", "untouched": untouched}


def judged(lines: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Every plant with its twin: `found` (its slot was the first that a seed was asked for), `resolved`
    (share of the gap to the healthy twin that growth closed), `fixed`."""
    kept = list(lines)
    healthy = {line["seed"]: line["healthy"] for line in kept if line["kind"] == "twin"}
    rows = []
    for line in kept:
        if line["kind"] not in KINDS or line["seed"] not in healthy:
            continue
        gap = line["untouched"] - healthy[line["seed"]]
        resolved = (line["untouched"] - line["grown"]) / gap if gap > 0 else None
        found = bool(line["asked"]) and line["asked"][0] == line["site"]
        fixed = resolved is not None and resolved >= RESOLVED and line["site"] in line["kept"]
        row = {k: line[k] for k in ("seed", "kind", "site", "asked", "kept", "epochs", "untouched", "grown")}
        rows.append(
            {**row, "healthy": healthy[line["seed"]], "resolved": resolved, "found": found, "fixed": fixed}
        )
    return rows


def figures(lines: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Counts over all plants and by kind, and what happened to healthy hosts."""
    kept = list(lines)
    rows = judged(kept)
    many = len(rows)
    whole = TARGET if many == TRIALS else None
    both = sum(r["found"] and r["fixed"] for r in rows)
    found: dict[str, Any] = {
        "planted_found_and_fixed": figure(both, "trials", whole, at_least=True, of=many),
        "planted_located_first": figure(
            sum(r["found"] for r in rows), "trials", of=many, chance=1 / trial.PARTS
        ),
        "planted_fixed": figure(sum(r["fixed"] for r in rows), "trials", of=many),
    }
    for kind in KINDS:
        of = [r for r in rows if r["kind"] == kind]
        hits = sum(r["found"] and r["fixed"] for r in of)
        located = sum(r["found"] for r in of)
        found[f"planted_{kind}_found_and_fixed"] = figure(hits, "trials", of=len(of), located=located)
    closed = [r["resolved"] for r in rows if r["resolved"] is not None and r["kept"]]
    found["planted_resolved_p50_where_kept"] = figure(statistics.median(closed) if closed else None, "ratio")
    spent = [r["epochs"] for r in rows if r["epochs"] is not None]
    found["germinated_to_fossilised_epochs_max"] = figure(
        max(spent, default=None), "epochs", MOST_EPOCHS, median=statistics.median(spent) if spent else None
    )
    healthy = [line for line in kept if line["kind"] == "grown"]
    asked, grown = (sum(bool(line[k]) for line in healthy) for k in ("asked", "kept"))
    found["healthy_hosts_with_a_seed_tried"] = figure(asked, "hosts", of=len(healthy))
    found["healthy_hosts_with_a_graft_kept"] = figure(grown, "hosts", of=len(healthy))
    twins = {line["seed"]: line["healthy"] for line in kept if line["kind"] == "twin"}
    better = [
        line["grown"] < twins[line["seed"]] for line in healthy if line["kept"] and line["seed"] in twins
    ]
    found["healthy_grafts_that_lowered_the_test_loss"] = figure(sum(better), "hosts", of=len(better))
    return found


def run(
    out: Path, library: Library, first: int = FIRST, trials: int = TRIALS, stop: float = 1e9
) -> list[Any]:
    """Make the trainings that `out` lacks, until done or `stop` seconds are over; all its lines."""
    lines = [json.loads(t) for t in out.read_text(encoding="utf-8").splitlines()] if out.exists() else []
    done = {(line["seed"], "" if line["kind"] == "twin" else line["kind"]) for line in lines}
    end = time.monotonic() + stop
    for seed, kind in plan(first, trials):
        if (seed, kind) in done:
            continue
        if time.monotonic() > end:
            break
        lines.append(json.loads(json.dumps(one(seed, kind, library))))
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(lines[-1]) + "\n")
    return lines


def part(out: str, folder: str, first: int, trials: int) -> None:
    """What one of several processes does."""
    torch.set_num_threads(1)
    with artifacts.stocked(Path(folder), artifacts.WIDE) as library:
        run(Path(out), library, first, trials)


def together(folder: Path, workers: int, first: int = FIRST, trials: int = TRIALS) -> list[Any]:
    """The same shared among processes, each with seeds of its own. `folder` holds the stocked library."""
    seeds = -(-trials // len(KINDS))
    share = -(-seeds // workers)
    jobs = []
    for number in range(workers):
        start = number * share
        many = min(trials - start * len(KINDS), share * len(KINDS))
        if many > 0:
            jobs.append((str(folder / f"planted{number}.jsonl"), str(folder), first + start, many))
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=part, args=job) for job in jobs]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    texts = [Path(job[0]).read_text(encoding="utf-8") for job in jobs if Path(job[0]).exists()]
    return [json.loads(line) for text in texts for line in text.splitlines()]


@click.command()
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--first", default=FIRST, show_default=True)
@click.option("--trials", default=TRIALS, show_default=True)
@click.option("--stop", default=1e9, help="Seconds after which no training is begun.")
def main(out: Path, first: int, trials: int, stop: float) -> None:
    """Make trials and print the figures so far."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="esper-planted-") as folder:
        with artifacts.stocked(Path(folder), artifacts.WIDE) as library:
            lines = run(out, library, first, trials, stop)
    click.echo(json.dumps(figures(lines), indent=1))


if __name__ == "__main__":
    main()
