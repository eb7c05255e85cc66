"""Planted bottlenecks, four kinds, and healthy hosts: what was found, what was fixed, what was disturbed.

    python -m bench.growing.planted OUT.jsonl [--first 100] [--trials 150] [--stop SECONDS]

A plant is a trial only if it costs something: the untouched host's test loss must be WORSE times its healthy
twin's (a block that its task does not need is no bottleneck, whatever was done to it). That is judged before
anything grows, and those that fail it are counted.

One line per seed and kind; a file that has some goes on where it ended, so the trials can be made in pieces.
The seeds are not those that anything was tried on while it was written.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import click
import torch

from bench.growing import artifacts, trial
from bench.growing.crowd import Job
from bench.growing.hosts import KINDS
from bench.results import ROOT, commit, figure
from library.store import Library

FIRST, TRIALS = 1000, 150
OF_A_JOB = 4  # trials: one seed, as a rule
RESOLVED = 0.9
TARGET = 143  # of 150: the lower bound of the Wilson interval is above 90 %
MOST_EPOCHS = 30
WORSE = 1.5
MOST_SEEDS = 4  # times those that would do if every plant cost something


def shares(trials: int) -> dict[str, int]:
    """Trials by kind, as even as they go."""
    return {kind: (trials + at) // len(KINDS) for at, kind in enumerate(reversed(KINDS))}


def healthy(seed: int) -> dict[str, Any]:
    """The line of a healthy twin."""
    loss = trial.train(trial.host(seed), trial.data(seed), seed).loss
    return {"seed": seed, "kind": "twin", "commit": commit()[0], "healthy": loss}


def tempted(seed: int, library: Library) -> dict[str, Any]:
    """The line of a healthy host that may grow."""
    return {"seed": seed, "kind": "grown", "commit": commit()[0], **_grown(seed, "", library)}


def plant(seed: int, kind: str, twin: float, library: Library) -> dict[str, Any]:
    """The line of one plant: the untouched host, and the one that may grow if the plant costs something."""
    at = seed % trial.PARTS
    untouched = trial.train(trial.host(seed, kind, at), trial.data(seed), seed).loss
    line = {"seed": seed, "kind": kind, "commit": commit()[0], "site": f"blocks.{at}/0",
            "untouched": untouched, "counts": untouched >= WORSE * twin}  # fmt: skip
    return {**line, **_grown(seed, kind, library)} if line["counts"] else line


def _grown(seed: int, kind: str, library: Library) -> dict[str, Any]:
    grown = trial.train(trial.host(seed, kind, seed % trial.PARTS), trial.data(seed), seed, library)
    return {"grown": grown.loss, "asked": grown.asked, "kept": grown.kept, "epochs": grown.epochs,
            "since": grown.since}  # fmt: skip


def judged(lines: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Every plant with its twin: `found` (its slot was the first that a seed was asked for), `resolved`
    (share of the gap to the healthy twin that growth closed), `fixed`."""
    kept = list(lines)
    twins = {line["seed"]: line["healthy"] for line in kept if line["kind"] == "twin"}
    rows = []
    for line in kept:
        if not line.get("counts") or line["seed"] not in twins:
            continue
        twin = twins[line["seed"]]
        resolved = (line["untouched"] - line["grown"]) / (line["untouched"] - twin)
        found = bool(line["asked"]) and line["asked"][0] == line["site"]
        fixed = resolved >= RESOLVED and line["site"] in line["kept"]
        row = {k: line[k] for k in ("seed", "kind", "site", "asked", "kept", "epochs", "untouched", "grown")}
        rows.append({**row, "healthy": twin, "resolved": resolved, "found": found, "fixed": fixed})
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
        closed = statistics.median(r["resolved"] for r in of) if of else None
        found[f"planted_{kind}_found_and_fixed"] = figure(
            hits, "trials", of=len(of), located=located, resolved_p50=closed
        )
    found["planted_that_cost_nothing"] = figure(
        sum(line.get("counts") is False for line in kept), "plants", least_ratio=WORSE
    )
    closed = [r["resolved"] for r in rows if r["kept"]]
    found["planted_resolved_p50_where_kept"] = figure(statistics.median(closed) if closed else None, "ratio")
    spent = [r["epochs"] for r in rows if r["epochs"] is not None]
    found["germinated_to_fossilised_epochs_max"] = figure(
        max(spent, default=None), "epochs", MOST_EPOCHS, median=statistics.median(spent) if spent else None
    )
    since = [line["since"] for line in kept if line.get("since") is not None and line["kind"] != "grown"]
    found["first_request_to_fossilised_epochs_max"] = figure(max(since, default=None), "epochs")
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
    """Make the lines that `out` lacks, until the trials are done or `stop` seconds are over; all its
    lines."""
    lines = [json.loads(t) for t in out.read_text(encoding="utf-8").splitlines()] if out.exists() else []
    end = time.monotonic() + stop
    wanted = shares(trials)
    for seed in range(first, first + MOST_SEEDS * -(-trials // len(KINDS))):
        for kind in ("twin", "grown", *KINDS):
            mine = [line for line in lines if line["kind"] == kind]
            enough = kind in wanted and sum(line["counts"] for line in mine) >= wanted[kind]
            if enough or any(line["seed"] == seed for line in mine) or _done(lines, wanted):
                continue
            if time.monotonic() > end:
                return lines
            lines.append(json.loads(json.dumps(_line(seed, kind, lines, library))))
            with out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(lines[-1]) + "\n")
    return lines


def _done(lines: Iterable[Mapping[str, Any]], wanted: Mapping[str, int]) -> bool:
    have = Counter(line["kind"] for line in lines if line.get("counts"))
    return all(have[kind] >= many for kind, many in wanted.items())


def _line(seed: int, kind: str, lines: Iterable[Mapping[str, Any]], library: Library) -> dict[str, Any]:
    if kind == "twin":
        return healthy(seed)
    if kind == "grown":
        return tempted(seed, library)
    twin = next(line["healthy"] for line in lines if line["kind"] == "twin" and line["seed"] == seed)
    return plant(seed, kind, twin, library)


def part(out: str, folder: str, first: int, trials: int) -> int:
    """What one of several processes does; how many lines it has."""
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    with artifacts.stocked(Path(folder), artifacts.WIDE) as library:
        return len(run(Path(out), library, first, trials))


def jobs(folder: Path, first: int = FIRST, trials: int = TRIALS) -> dict[str, Job]:
    """The same in pieces with seeds of their own, as `crowd.together` takes them. `folder` holds the stocked
    library; lines are kept under out/ by commit, so that what was stopped goes on where it ended."""
    kept = _lines_of(first, trials)
    pieces = -(-trials // OF_A_JOB)
    found: dict[str, Job] = {}
    for number in range(pieces):
        many = trials // pieces + (number < trials % pieces)
        out = str(kept / f"{number + 1}-of-{pieces}.jsonl")
        start = first + MOST_SEEDS * number
        found[f"planted {number + 1} of {pieces}"] = (part, (out, str(folder), start, many))
    return found


def lines(first: int = FIRST, trials: int = TRIALS) -> list[Any]:
    """What the jobs have left, those that broke as well."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(_lines_of(first, trials).glob("*.jsonl"))]
    return [json.loads(line) for text in texts for line in text.splitlines()]


def _lines_of(first: int, trials: int) -> Path:
    return ROOT / "out" / "planted" / f"{commit()[0][:12]}-{first}-{trials}"


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
