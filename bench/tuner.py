"""How far the tiles that are chosen are from the best that there are.

    python -m bench.tuner --make out/tuner --target h100     (anywhere: builds)
    python -m bench.tuner --from out/tuner                   (where the target is: times, all of them kept
                                                              below `times` beside the results file)
    python -m bench.tuner --make out/tuner --cases swiglu    (all groups of cases of bench.products instead)

Groups of the blocks' kernels are drawn by a seed; around the tile that `fast` takes, hundreds are built and
all are timed. From the times follows what each pipeline would have got: `fast` its first tile, `standard`
what its search finds when it is told them, with the trials that a group has there: of every other group of
the block the first tile is timed too, since trials go by what each group could gain.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

import esper_ir.text as text
from bench import results
from bench.blocks import available
from bench.crew import say
from bench.families import cases
from bench.results import figure
from forge.pipelines import EFFORTS, device_of
from forge.service import front
from forge.target import resolve
from forge.toolchain import toolchain_of
from forge.tune import halves
from forge.tune.search import hunts_of, next_tiles, share_out
from forge.tune.trials import Hunt, Trial, trial_of
from forge.work import Work

GROUPS, TRIALS = 10, 200
LEAST_US = 10.0
"""Of a group's floor on a card: what is shorter mostly waits."""
FAST_PERCENT, STANDARD_PERCENT = 12.0, 4.0


def make(
    folder: Path, target: str, groups: int = GROUPS, trials: int = TRIALS, seed: int = 0,
    only: tuple[str, ...] = (), least_us: float = LEAST_US,
) -> list[Path]:  # fmt: skip
    """Candidates of `groups` groups, `trials` of each, a file per block."""
    folder.mkdir(parents=True, exist_ok=True)
    chosen: dict[str, list[str]] = {}
    works: dict[str, Work] = {}
    for block, key in _drawn(works, target, groups, seed, only, least_us):
        chosen.setdefault(block, []).append(key)
    if not chosen:
        raise click.ClickException("no group of these blocks can be tuned and moves enough bytes")
    made = []
    for block, keys in sorted(chosen.items()):
        work = works[block]
        here = toolchain_of(work.target)
        built = halves.build_only(work.kernels, work.target, here, trials * len(keys), say, set(keys))
        if rest := {h.key for h in hunts_of(work.kernels)} - set(keys):
            beside = halves.build_only(work.kernels, work.target, here, 0, say, rest, least=1)
            built |= {part: [*beside[part], *built[part]] for part in ("groups", "candidates")}
        path = folder / f"{block}.candidates"
        halves.write({**built, "block": block, "drawn": sorted(keys)}, path)
        made.append(path)
    return made


def make_cases(folder: Path, target: str, words: Sequence[str], trials: int) -> list[Path]:
    """Candidates of every group of the cases with one of these words in their names, about `trials` of a
    case, a file per case: what `bench.priors` makes a table of."""
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for case in cases(words):
        work = front(text.parse(case.text()), target)
        built = halves.build_only(work.kernels, work.target, toolchain_of(work.target), trials, say)
        path = folder / f"{case.name}.candidates"
        halves.write({**built, "block": case.name, "drawn": [g["key"] for g in built["groups"]]}, path)
        made.append(path)
    return made


def _drawn(
    works: dict[str, Work], target: str, groups: int, seed: int, only: tuple[str, ...], least_us: float
) -> list[tuple[str, str]]:
    """(block, key) of groups, each kind of tile in turn, so that no kind is left out."""
    kinds: dict[str, list[tuple[str, str]]] = {}
    for block in available(only):
        work = works[block.name] = front(text.load(block.blueprint), target)
        for hunt in hunts_of(work.kernels):
            if hunt.floor_us >= least_us:
                kinds.setdefault(type(hunt.prior).__name__, []).append((block.name, hunt.key))
    rng = random.Random(seed)
    for each in kinds.values():
        rng.shuffle(each)
    rows = [each[at] for at in range(max(map(len, kinds.values()), default=0))
            for _, each in sorted(kinds.items()) if at < len(each)]  # fmt: skip
    return list(dict.fromkeys(rows))[:groups]


def measured(
    folder: Path, seconds: float, tell: Callable[[str], None] = say, times: Path | None = None,
    known: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Time everything in the folder; the results document. Every time goes into `times`, a file per block.
    `known`: such files of an earlier run on a card of this name, by block: not timed again."""
    end, header = time.monotonic() + seconds, results.header("tuner")
    rows: list[dict[str, Any]] = []
    kept = {name: found for name, found in (known or {}).items() if found["card"] == header["card"]}
    for path in sorted(folder.glob("*.candidates")):
        if time.monotonic() > end:
            break
        document = halves.read(path, halves.SCHEMA)
        device = device_of(resolve(str(document["target"])))
        if device is None:
            raise click.ClickException(f"no {document['target']} here")
        found = kept.get(document["block"]) or halves.time_only(
            document, device, None, end - time.monotonic(), tell
        )
        if times is not None:
            times.mkdir(parents=True, exist_ok=True)
            named = {"commit": header["commit"], **found, "block": document["block"], "card": header["card"]}
            halves.write(named, times / f"{document['block']}.times")
        shares = shares_of(found["groups"], EFFORTS["standard"][0])
        whole = {str(g["key"]) for g in document["groups"]} == {
            str(g["key"]) for g in found["groups"] if g["trials"]
        }
        rows += [
            {**row_of(group, document, shares[group["key"]] if whole else 0),
             "commit": found.get("commit", header["commit"])}
            for group in found["groups"]
            if group["trials"] and group["key"] in document["drawn"]
        ]  # fmt: skip
    return {**header, "rows": rows, "figures": figures(rows)}


def shares_of(groups: Sequence[Mapping[str, Any]], trials: int) -> dict[str, int]:
    """Trials of every group of a block by key, as the search shares them out."""
    hunts = [halves.hunt_of(group) for group in groups]
    for hunt, group in zip(hunts, groups, strict=True):
        hunt.recall(group["trials"])
    share_out(hunts, trials)
    return {hunt.key: hunt.share for hunt in hunts}


def row_of(group: Mapping[str, Any], document: Mapping[str, Any], share: int) -> dict[str, Any]:
    """A group with what each pipeline would have got, and how far from the best that is. `share`: trials of
    the search; none where other groups of the block have no times, and its share is not known."""
    trials = [t for t in map(trial_of, group["trials"]) if t is not None]
    right = [t for t in trials if not t.wrong]
    prior = halves.hunt_of(group).prior
    first = next((t for t in right if t.tile == prior), None)
    base = {
        "block": document["block"], "group": group["group"], "kind": group["kind"], "candidates": len(trials),
        "refused": len(trials) - len(right), "floor_us": group["floor_us"],
        "fast_from": group.get("origin", "rule"),
    }  # fmt: skip
    if first is None:
        return {**base, "why": "the tile of `fast` has no time"}
    best = min(right, key=lambda t: t.us)
    told = {"fast": first, **({"standard": searched(halves.hunt_of(group), trials, share)} if share else {})}
    off = {f"{name}_off_percent": 100 * (t.us / best.us - 1) for name, t in told.items()}
    return {**base, "best": best.row(), **{name: t.row() for name, t in told.items()}, **off}


def searched(hunt: Hunt, trials: Sequence[Trial], share: int) -> Trial:
    """What the search of `standard` finds when it is told these times; tiles without one are refused."""
    known = {repr(t.tile): t for t in trials}
    hunt.keep(known[repr(hunt.prior)])
    hunt.share = share
    while batch := next_tiles([hunt]):
        for _, tile in batch:
            hunt.keep(known.get(repr(tile), Trial(tile, wrong="not among the candidates")))
    return known[repr(hunt.winner() or hunt.prior)]


def figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {"groups": figure(len(rows), "groups", GROUPS, at_least=True)}
    out["candidates"] = figure(sum(r["candidates"] for r in rows), "candidates")
    for name, most in (("fast", FAST_PERCENT), ("standard", STANDARD_PERCENT)):
        off = [r[f"{name}_off_percent"] for r in rows if f"{name}_off_percent" in r]
        worst = max(off) if len(off) == len(rows) and off else None
        out[f"{name}_off_percent_max"] = figure(worst, "%", most)
        out[f"{name}_off_percent_p50"] = figure(statistics.median(off) if off else None, "%")
    return out


def alone(only: tuple[str, ...], out: Path, quick: bool) -> int:
    """As a bench of `bench.harness`: both halves on this machine."""
    with tempfile.TemporaryDirectory(prefix="esper-tuner-") as made:
        make(Path(made), "auto", GROUPS, 12 if quick else TRIALS, 0, only)
        found = measured(Path(made), 3600.0, times=out / "times")
    say(f"written: {results.write(found, out)}")
    return 0


@click.command()
@click.option(
    "--make", "made", type=click.Path(path_type=Path), help="Only build the candidates, into FOLDER."
)
@click.option("--from", "folder", type=click.Path(path_type=Path), help="Time what was built into FOLDER.")
@click.option("--target", default="h100", show_default=True, help="With --make.")
@click.option("--only", multiple=True, help="With --make: words in the names of blocks.")
@click.option(
    "--cases", "words", multiple=True, help="With --make: words in the names of cases of bench.products."
)
@click.option("--groups", default=GROUPS, show_default=True, help="With --make.")
@click.option("--trials", default=TRIALS, show_default=True, help="With --make: candidates of a group.")
@click.option("--seed", default=0, show_default=True, help="With --make: which groups.")
@click.option("--seconds", default=3600.0, show_default=True, help="With --from: limit of the timing.")
@click.option(
    "--known", type=click.Path(path_type=Path, exists=True), help="With --from: folder of times taken before."
)
@click.option("--out", type=click.Path(path_type=Path), default=results.RESULTS, show_default=False)
def main(
    made: Path | None, folder: Path | None, target: str, only: tuple[str, ...], words: tuple[str, ...],
    groups: int, trials: int, seed: int, seconds: float, known: Path | None, out: Path,
) -> None:  # fmt: skip
    """Build candidates, or time them and write the results file."""
    if (made is None) is (folder is None):
        raise click.UsageError("give --make FOLDER or --from FOLDER")
    if made is not None:
        ready = (
            make_cases(made, target, words, trials)
            if words
            else make(made, target, groups, trials, seed, only)
        )
        for path in ready:
            say(f"{path}: {path.stat().st_size / 2**20:.1f} MiB")
        return
    if folder is not None:
        before = [halves.read(path, halves.TIMES) for path in sorted(known.glob("*.times"))] if known else []
        found = measured(folder, seconds, times=out / "times", known={str(t["block"]): t for t in before})
        for name, one in found["figures"].items():
            say(f"{name}: {one['value']} {one['unit']}")
        say(f"written: {results.write(found, out)}")


if __name__ == "__main__":
    main()
