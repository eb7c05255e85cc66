"""Whether risk scores say anything: outcomes of simulated deployments, and how well models of them do.

    python -m bench.harness risk                      makes candidates, trains with them, evaluates
    python -m bench.risk --folder F --count 60 --outcomes 200 --only softmax      a small one, kept in F

Candidates are the clean artifacts of `tests/faults` and mutants of them (as in `bench.faults`). What is in
the folder is gone on with: made once, tried once. The shipped model is trained on its outcomes:

    esper-gauntlet risk train --outcomes out/risk/outcomes.jsonl --out gauntlet/risk/simulated.json
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from bench import faults, results
from gauntlet.isolate import ForkServer
from gauntlet.risk import evaluate, learners, model, outcomes, picture
from gauntlet.risk.outcomes import REFUSED, Outcome
from gauntlet.risk.simulate import TRAININGS, Candidate, collect

FOLDER = results.ROOT / "out" / "risk"
FAULTS, WANTED, SEED = 900, 2000, 41
FAULTY_PER_CLEAN = 4
"""Most faults are refused by the examination: so about half of what is trained with is clean."""
SECONDS = 2400.0
say = faults.say


def candidates(folder: Path, count: int, seed: int, only: Sequence[str] = ()) -> list[Candidate]:
    """Made once, in the order of a draw. A clean artifact stands there several times, each time with another
    examination and other trainings."""
    if not (folder / "planted.jsonl").exists():
        say(f"planting {count} faults")
        faults.make(folder, "cpu", count, seed, only)
    lines = (folder / "planted.jsonl").read_text(encoding="utf-8").splitlines()
    found, turns, clean = [], Counter[str](), 0
    for planted in (faults.Planted(**json.loads(line)) for line in lines):
        clean += not planted.kind
        if planted.kind or clean % FAULTY_PER_CLEAN == 0:
            found.append(
                Candidate(
                    planted.block, planted.kind, (folder / planted.file).read_bytes, turns[planted.file]
                )
            )
            turns[planted.file] += 1
    return found


def collected(
    folder: Path, count: int, wanted: int, seed: int, seconds: float, only: Sequence[str] = ()
) -> list[Outcome]:
    """Everything in the folder's file, refused artifacts included."""
    path, told = folder / "outcomes.jsonl", time.monotonic()

    def progress(outcomes: int, failures: int) -> None:
        nonlocal told
        if time.monotonic() - told > 30:
            told = time.monotonic()
            say(f"{outcomes} of {wanted} outcomes, {failures} failures")

    made = candidates(folder, count, seed, only)
    with ForkServer() as server:
        collect(made, path, server, wanted=wanted, seconds=seconds, progress=progress)
    return outcomes.read(path)


def document(found: Sequence[Outcome], notes: Sequence[str]) -> dict[str, Any]:
    """As a results file."""
    ended = outcomes.trainings(found)
    said = evaluate.evaluate(learners.load(), ended) if _enough(ended) else {"scores": [], "reliability": []}
    header = results.header("risk")
    header["versions"] |= {n: results.version(n) for n in ("xgboost-cpu", "scikit-learn", "numpy")}
    parts = {"rows": said["scores"], "reliability": said["reliability"], "classes": _classes(found)}
    made = figures(found, said["scores"])
    return {**header, "basis": outcomes.SIMULATED, **parts, "figures": made, "notes": list(notes)}


def _enough(ended: Sequence[Outcome]) -> bool:
    failed = sum(o.failed for o in ended)
    return len(ended) >= model.LEAST and failed >= model.LEAST_FAILURES


def figures(found: Sequence[Outcome], scores: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of the results file; skills with their intervals, and the control as the best of its shuffles."""
    ended = [o for o in found if o.outcome != REFUSED]
    made = {
        "risk_outcomes": results.figure(len(ended), "count", 2000, at_least=True),
        "risk_failures": results.figure(sum(o.failed for o in ended), "count", 100, at_least=True),
        "risk_failures_of_sound_artifacts": results.figure(
            sum(o.failed for o in ended if not o.planted), "count", 0
        ),
        "risk_candidates_refused": results.figure(sum(o.outcome == REFUSED for o in found), "count"),
    }
    for split in sorted({row["split"] for row in scores}):
        rows = {row["method"]: row for row in scores if row["split"] == split}
        for method in ("model", "rule count", "3-feature logistic"):
            name = f"{method.replace(' ', '_').replace('-', '_')}_{split}"
            made[f"risk_skill_{name}"] = _figure(rows[method], "skill", 0.0 if method == "model" else None)
            made[f"risk_pr_auc_{name}"] = _figure(rows[method], "precision", None)
        control = [row for name, row in rows.items() if name.startswith("shuffled")]
        best = max(control, key=lambda row: row["skill"]["value"])
        made[f"risk_skill_shuffled_{split}"] = {**_figure(best, "skill", None), "runs": len(control)}
    return made


def _figure(row: Mapping[str, Any], name: str, target: float | None) -> dict[str, Any]:
    found = row[name]
    numbers = {n: row[n] for n in ("outcomes", "failures", "artifacts", "families")}
    made = results.figure(found["value"], "share", target, at_least=True)
    if target is not None:
        made["met"] = found["low"] > target  # with its whole interval
    return {**made, "low": found["low"], "high": found["high"], **numbers}


def _classes(found: Sequence[Outcome]) -> list[dict[str, Any]]:
    """By class of fault, the clean ones first: how many artifacts were refused, and what became of the
    rest."""
    rows = []
    for kind in sorted({o.planted for o in found}):
        mine = [o for o in found if o.planted == kind]
        ended = Counter(o.outcome for o in mine if o.outcome != REFUSED)
        rows.append(
            {"class": kind or "clean", "refused": sum(o.outcome == REFUSED for o in mine),
             "used": len({o.artifact for o in mine if o.outcome != REFUSED}), **dict(sorted(ended.items()))}
        )  # fmt: skip
    return rows


def show(found: Mapping[str, Any]) -> None:
    for name, figure in found["figures"].items():
        span = f" [{figure['low']:.3f}, {figure['high']:.3f}]" if "low" in figure else ""
        say(f"{name:44} {figure['value']:.5g}{span}")


def run(
    folder: Path, out: Path, count: int, wanted: int, seed: int, seconds: float, only: Sequence[str] = ()
) -> dict[str, Any]:
    """Collect, evaluate, write the results file and beside it the reliability plot."""
    began, before = time.monotonic(), folder.joinpath("outcomes.jsonl").exists()
    found = collected(folder, count, wanted, seed, seconds, only)
    spent = time.monotonic() - began
    notes = [
        f"seed {seed}; {TRAININGS} trainings with each artifact that passed its examination",
        f"collected in {spent:.0f} s{' on top of what was there' if before else ''}, one process, "
        f"{os.cpu_count()} cores, load average {os.getloadavg()[2]:.1f} over the last 15 minutes",
    ]
    made = document(found, notes)
    path = results.write(made, out)
    svg = path.with_suffix(".svg")
    title = "risk on families left out, simulated"
    svg.write_text(picture.reliability(made["reliability"], title), encoding="utf-8")
    say(f"written: {path}, {svg.name}")
    return made


def alone(out: Path) -> int:
    """As a bench of `bench.harness`. 1 when there are too few outcomes."""
    made = run(FOLDER, out, FAULTS, WANTED, SEED, SECONDS)
    show(made)
    return int(not made["rows"])


@click.command()
@click.option("--folder", type=click.Path(path_type=Path), default=FOLDER, show_default=False)
@click.option("--count", default=FAULTS, show_default=True, help="Faults to plant.")
@click.option("--outcomes", "wanted", default=WANTED, show_default=True)
@click.option("--seed", default=SEED, show_default=True)
@click.option("--seconds", default=SECONDS, show_default=True, help="Limit of the trainings.")
@click.option("--only", multiple=True, help="Words in the names of blocks.")
@click.option("--out", type=click.Path(path_type=Path), default=results.RESULTS, show_default=False)
def main(
    folder: Path, count: int, wanted: int, seed: int, seconds: float, only: tuple[str, ...], out: Path
) -> None:
    """Collect outcomes of simulated deployments and evaluate models on them."""
    show(run(folder, out, count, wanted, seed, seconds, only))


if __name__ == "__main__":
    main()
