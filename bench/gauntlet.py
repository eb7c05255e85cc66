"""How well the gauntlet's numbers repeat, and whether its tags are the percentile sets.

    python -m bench.gauntlet [--count 240] [--quick]     a library made here, measured, tagged, measured again
    python -m bench.gauntlet --lanes 8                   the same, eight at a time on cores of their own
    python -m bench.gauntlet --here 500                  what ESPER_LIBRARY has, a part of it twice
    python -m bench.gauntlet --here 500 --part 1/2       every second of it (the others on another card)
    python -m bench.gauntlet --read                      only the table of what ESPER_LIBRARY has measured
    python -m bench.gauntlet --starter docs/starter.html only the page of the starter blocks, measured here

The library: the corpus of `tests/faults` at three widths, by the pipelines `fast` and `standard` and for both
objectives, and the starter blocks. Every artifact is proven (the short list of cases) and measured in five
fresh processes; then all are tagged, some are proven and measured once more, and all are tagged again.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
import time
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import click

from bench import results
from esper_ir import text
from esper_ir.diagnostics import EsperError
from esper_ir.graph import Blueprint
from forge.service import compile_blueprint
from gauntlet import entries, page, statistics
from gauntlet.annotating import annotate
from gauntlet.isolate import ForkServer
from gauntlet.peers import BY_NAME, LEAST, Report, cohort
from gauntlet.runner import prove
from gauntlet.sampling import QUICK, Effort
from library.contracts import KernelQuery
from library.records import PENDING_BENCHMARKING
from library.store import Library
from tests.faults import corpus

T = TypeVar("T")
R = TypeVar("R")
EFFORT = Effort(patience_s=2.0, seconds=8.0, heat_s=0.3)
"""Of the samples and widths of a full measurement; less patience with what stays noisy."""
COUNT, REPEATED = 240, 24
WIDTHS = (1, 4, 16)
STRIDE = 5
"""Through the corpus, which is sorted by kinds."""
LEAST_US, MOST_SPREAD = 10.0, 0.05
HURRIED_S = 20.0
STARTERS = "seed_*.json"
TAGS = {
    "speed": ("high_speed", "medium_speed", "low_speed"),
    "memory": ("low_memory", "medium_memory", "high_memory"),
    "power": ("low_power", "high_power"),
    "drift": ("numerically_stable",),
}


def say(text: str) -> None:
    click.echo(f"[{time.strftime('%H:%M:%S')}] {text}", err=True)


# -- the library


def blueprints() -> Iterator[tuple[Blueprint, dict[str, Any]]]:
    """(blueprint, how it is compiled), in an order that any beginning of is a mixture."""
    small = corpus.blueprints()
    mixed = [small[STRIDE * at % len(small)] for at in range(len(small))]
    wide = {factor: [_wider(data, factor) for data in mixed] for factor in WIDTHS}
    lanes = [[(b, {}) for b in wide[factor]] for factor in WIDTHS]
    lanes.append([(b, {"objectives": ("memory",)}) for b in wide[4]])
    lanes.append([(b, {"pipelines": ("standard",), "budget_s": 2.0}) for b in wide[16]])
    starters = sorted((results.ROOT / "examples").glob(STARTERS))
    lanes.append([(text.load(path), {}) for path in starters])
    for at in range(max(map(len, lanes))):
        yield from (lane[at] for lane in lanes if at < len(lane))


def _wider(data: Mapping[str, Any], factor: int) -> Blueprint:
    """A block of the corpus with its width, which stands in its name, so many times as large."""
    name, width, dtype = data["name"].rsplit("_", 2)
    sizes = {int(width): int(width) * factor}

    def resized(values: Mapping[str, Any]) -> dict[str, Any]:
        return {n: {**v, "shape": [sizes.get(s, s) for s in v["shape"]]} for n, v in values.items()}

    grown = {"inputs": resized(data["inputs"]), "params": resized(data["params"])}
    return text.parse(json.dumps({**data, **grown, "name": f"{name}_{int(width) * factor}_{dtype}"}))


def compiled(count: int, lanes: int = 1) -> list[str]:
    """Ids of so many artifacts; what two ways of compiling make alike is one."""
    found: dict[str, None] = {}
    at, all_ = 0, sum(1 for _ in blueprints())
    while len(found) < count and at < all_:
        these = range(at, min(at + count - len(found), all_))
        for ids in in_lanes(_compiled, these, lanes):
            found |= dict.fromkeys(ids)
        at = these.stop
        say(f"{len(found)} compiled")
    return list(found)


def _compiled(these: Sequence[int]) -> list[list[str]]:
    """Ids of what is made of each of `blueprints()`."""
    found = []
    with Library.open() as library:
        for at in these:
            blueprint, options = next(islice(blueprints(), at, None))
            try:
                made = compile_blueprint(blueprint, targets=("cpu",), library=library, **options)
                found.append([m.artifact_id for m in made])
            except EsperError as error:
                say(f"{blueprint.name}: {error}")
                found.append([])
    return found


# -- lanes


def in_lanes(work: Callable[[Sequence[T]], list[R]], items: Sequence[T], lanes: int) -> list[R]:
    """A result for each item, in their order: every lane is a process with its own share of the cores, so
    that none waits for another's."""
    if lanes == 1 or not items:
        return work(items)
    cores = sorted(os.sched_getaffinity(0))
    if lanes > len(cores):
        raise click.ClickException(f"{lanes} lanes on {len(cores)} cores: a lane needs one of its own")
    found: list[R | None] = [None] * len(items)
    with ProcessPoolExecutor(lanes, mp_context=multiprocessing.get_context("spawn")) as pool:
        shares = [cores[len(cores) * i // lanes : len(cores) * (i + 1) // lanes] for i in range(lanes)]
        running = [pool.submit(_lane, work, items[i::lanes], shares[i]) for i in range(lanes)]
        for i, lane in enumerate(running):
            found[i::lanes] = lane.result()
    return [r for r in found if r is not None]


def _lane(work: Callable[[Sequence[T]], list[R]], items: Sequence[T], cores: Sequence[int]) -> list[R]:
    os.sched_setaffinity(0, cores)
    return work(items)


# -- measuring


def measured(ids: Sequence[str], effort: Effort, again: bool = False, lanes: int = 1) -> list[str]:
    """Those that passed, proven and measured."""
    passed = in_lanes(partial(_measured, effort=effort, again=again), ids, lanes)
    return [name for name, good in zip(ids, passed, strict=True) if good]


def _measured(ids: Sequence[str], effort: Effort, again: bool) -> list[bool]:
    """Whether each passed."""
    passed = []
    with ForkServer() as server, Library.open() as library:
        for at, name in enumerate(ids):
            verdict = prove(name, library=library, server=server, quick=True, effort=effort, again=again)
            passed.append(verdict.passed)
            if not verdict.passed:
                say(f"{name}: {verdict.state} {verdict.reason}")
            if at % 10 == 9:
                say(f"{at + 1} of {len(ids)} measured")
    return passed


def row(library: Library, name: str) -> dict[str, Any]:
    """One line of the variance table: the first verdict, and whether the second agrees where there is one."""
    record, verdicts = library.record(name), library.verdicts(name)
    first = verdicts[-1].report
    wep, stages = first["wep"], {s["name"]: s["seconds"] for s in first["stages"]}
    found = {
        "artifact": name, "block": record.name, "pipeline": record.pipeline, "objective": record.objective,
        "class": wep["op_class"], "median_us": _us(wep["latency_ms_median"]), "samples": wep["samples"],
        "variance": wep["variance"], "conditions": wep["conditions"], "seconds": first["seconds"],
        "measurement_s": stages.get("measurement", 0.0), "stages_s": stages,
        "process_seconds": first["benchmark_results"].get("measurement", {}).get("process_seconds", []),
        "p99_us": _us(wep["latency_ms_p99"]),
    }  # fmt: skip
    if len(verdicts) > 1:
        spans = [v.report["wep"]["latency_interval_ms"] for v in verdicts]
        found["again_overlaps"] = statistics.overlap(spans[0], spans[-1])
        clocks = [_canary_us(v.report) for v in verdicts]
        at_one = [[end / clock for end in span] for span, clock in zip(spans, clocks, strict=True) if clock]
        found["again_overlaps_at_one_clock"] = len(at_one) == len(spans) and statistics.overlap(
            at_one[0], at_one[-1]
        )
        found["again_median_us"] = _us(verdicts[0].report["wep"]["latency_ms_median"])
    return found


def _canary_us(report: Mapping[str, Any]) -> float:
    """How fast the machine was then; 0 where it was not told."""
    told = report["benchmark_results"].get("measurement", {}).get("canary_us", [])
    return statistics.median(told) if told else 0.0


def _us(ms: Any) -> Any:
    return round(ms * 1e3, 3) if isinstance(ms, float) else ms


# -- tags


def expected(reports: Mapping[str, Report]) -> dict[tuple[str, str, str], set[str]]:
    """(hardware, class, tag) -> ids, from the numbers alone. Only cohorts that can be ranked."""
    groups: dict[tuple[str, str, str], dict[str, float]] = defaultdict(dict)
    for name, report in reports.items():
        for metric in BY_NAME.values():
            value = metric.of(report)
            if value is not None:
                groups[(*cohort(report), metric.name)][name] = -value if metric.up else value
    found = {}
    for (card, kind, metric), values in groups.items():
        if len(values) >= LEAST:
            sets = _sets(metric, values, reports)
            found |= {(card, kind, tag): sets[tag] for tag in TAGS[metric]}
    return found


def _sets(metric: str, values: Mapping[str, float], reports: Mapping[str, Report]) -> dict[str, set[str]]:
    """The percentile sets of one metric, smaller values better: cut where a share of all is strictly
    better, or for the worst quarter strictly worse."""
    n, ordered = len(values), sorted(values.values())
    better = {name: bisect_left(ordered, v) / n for name, v in values.items()}
    worse = {name: (n - bisect_right(ordered, v)) / n for name, v in values.items()}
    if metric == "speed":
        fast = {x for x in values if better[x] < 0.2}
        slow = {x for x in values if better[x] >= 0.7}
        return {"high_speed": fast, "low_speed": slow, "medium_speed": set(values) - fast - slow}
    if metric == "drift":
        sure = {x for x in values if reports[x]["wep"]["tolerance_used"] <= 0.5}
        return {"numerically_stable": {x for x in sure if better[x] < 0.5}}
    low = {x for x in values if better[x] < 0.25}
    high = {x for x in values if worse[x] < 0.25} - low
    return {f"low_{metric}": low, f"high_{metric}": high, f"medium_{metric}": set(values) - low - high}


def check_tags(library: Library, reports: Mapping[str, Report]) -> list[dict[str, Any]]:
    """One line per class and tag: what a query returns against the percentile set."""
    lines = []
    for (card, kind, tag), wanted in sorted(expected(reports).items()):
        answer = library.find(KernelQuery(required_tags=(tag,), limit=10_000))
        same = {m.artifact_id for m in answer.matches if cohort(reports[m.artifact_id]) == (card, kind)}
        lines.append({
            "hardware": card, "class": kind, "tag": tag, "expected": len(wanted), "returned": len(same),
            "missing": sorted(wanted - same), "too_many": sorted(same - wanted),
        })  # fmt: skip
    return lines


def retagged(library: Library, ids: Sequence[str], before: Mapping[str, Sequence[Any]]) -> dict[str, int]:
    """What a second run of tagging changed, and whether it kept what had been signed."""
    changed = lost = 0
    for name in ids:
        now = library.annotations(name)
        changed += len(now) > len(before[name])
        lost += now[: len(before[name])] != before[name]
    return {"changed": changed, "lost": lost}


# -- the document


def _share(rows: Sequence[Mapping[str, Any]], key: str) -> float | None:
    return sum(bool(r.get(key)) for r in rows) / len(rows) if rows else None


def document(
    rows: Sequence[Mapping[str, Any]], tags: Sequence[Mapping[str, Any]], again: Mapping[str, int],
    asked: int, lanes: int = 1, most: int = 200,
) -> dict[str, Any]:  # fmt: skip
    """As a results file; `most`: how many artifacts the run was to have."""
    long = [r for r in rows if isinstance(r["median_us"], float) and r["median_us"] >= LEAST_US]
    spread = [r["variance"] for r in long if isinstance(r["variance"], float)]
    good = [r for r in long if isinstance(r["variance"], float) and r["variance"] <= MOST_SPREAD]
    twice = [r for r in rows if "again_overlaps" in r]
    mean_s = sum(r["seconds"] for r in rows) / len(rows) if rows else None
    wrong = sum(len(t["missing"]) + len(t["too_many"]) for t in tags)
    figures = {
        "artifacts": results.figure(len(rows), "count", most, at_least=True),
        "artifacts_from_10_us": results.figure(len(long), "count"),
        "variance_at_most_5_percent": results.figure(
            len(good) / len(long) if long else None, "share", 0.95, at_least=True
        ),
        "variance_median": results.figure(statistics.median(spread) if spread else None, "share"),
        "steady": results.figure(sum(r["conditions"] == "steady" for r in rows) / max(len(rows), 1), "share"),
        "measured_twice": results.figure(len(twice), "count"),
        "intervals_that_overlap": results.figure(
            _share(twice, "again_overlaps"), "share", 0.95, at_least=True
        ),
        "intervals_that_overlap_at_one_clock": results.figure(
            _share(twice, "again_overlaps_at_one_clock"), "share"
        ),
        "seconds_per_artifact": results.figure(mean_s, "s"),
        "artifacts_per_day": results.figure(86400 / mean_s if mean_s else None, "1/d", 400, at_least=True),
        "tag_queries": results.figure(len(tags), "count"),
        "tags_not_of_their_percentile": results.figure(wrong, "count", 0),
        "tagged_again_changed": results.figure(again["changed"], "count"),
        "tagged_again_lost": results.figure(again["lost"], "count", 0),
    }
    return {
        **results.header("gauntlet"), "asked": asked, "lanes": lanes, "rows": list(rows),
        "figures": figures, "tags": list(tags),
        "over_5_percent": [r["artifact"] for r in long if r not in good], "risk": evaluated(),
        "notes": ["left out: verdicts in a hurry"],
    }  # fmt: skip


def evaluated() -> dict[str, Any] | None:
    """The newest evaluation of risk scores, by the commit that made it: `bench.harness risk` trains for an
    hour and is not repeated with every table of variances."""
    found = results.newest("risk")
    return {k: found[-1][k] for k in ("commit", "date", "figures")} if found else None


def run(count: int, effort: Effort, repeated: int = REPEATED, lanes: int = 1) -> dict[str, Any]:
    """Everything, in a library that goes with the run."""
    with tempfile.TemporaryDirectory(prefix="esper-gauntlet-") as made:
        os.environ |= {"ESPER_KEYS": f"{made}/trust", "ESPER_LIBRARY": f"{made}/library"}
        with Library.open(Path(made) / "library", trust=Path(made) / "trust") as library:
            ids = compiled(count, lanes)
            passed = measured(ids, effort, lanes=lanes)
            _, known = annotate(library)
            tags = check_tags(library, known.reports)
            before = {name: library.annotations(name) for name in passed}
            measured(passed[:: max(len(passed) // repeated, 1)], effort, again=True, lanes=lanes)
            _, known = annotate(library)
            tags += check_tags(library, known.reports)
            rows = [row(library, name) for name in passed]
            return document(rows, tags, retagged(library, passed, before), len(ids), lanes)


AGAIN = 0.25
"""Of the time for what is measured, so much more for what is measured again."""
READ = 20
"""Artifacts at least, of which a table read from a library says something about a card."""


def read() -> dict[str, Any]:
    """The table of the library that is there, of what `esper-gauntlet bench` measured on this device."""
    with Library.open() as library:
        _, known = annotate(library)
        names = sorted(known.reports)
        before = {name: library.annotations(name) for name in names}
        annotate(library)
        tags = check_tags(library, known.reports)
        rows = [row(library, name) for name in names]
        return document(rows, tags, retagged(library, names, before), len(names), most=READ)


def here(seconds: float, repeated: int, effort: Effort, part: str = "0/1") -> dict[str, Any]:
    """Prove and measure what ESPER_LIBRARY has for this card, or this processor, that has no verdict yet, and
    some of it once more. Begins none after so many seconds, and a quarter of them for the second time.
    `part`: "1/2" is every second of it, from the second on."""
    at, parts = map(int, part.split("/"))
    end = time.monotonic() + seconds
    with ForkServer() as server, Library.open(roles=("validator",)) as library:

        def one(name: str, again: bool) -> bool:
            if time.monotonic() > end:
                return False
            found = prove(name, library=library, server=server, quick=True, effort=effort, again=again)
            say(f"{name}: {found.state} {found.reason}, {found.seconds:.1f} s")
            return bool(found.passed)

        kind = "cuda" if results.device_here().type == "cuda" else "cpu"
        waiting = [r for r in library.artifacts(state=PENDING_BENCHMARKING) if r.kind == kind]
        names = [r.id for r in sorted(waiting, key=lambda r: r.id)][at::parts]
        passed = [name for name in names if one(name, again=False)]
        end += seconds * AGAIN
        for name in passed[:: max(len(passed) // repeated, 1)]:
            one(name, again=True)
    return read()


def starter(place: Path, effort: Effort) -> None:
    """The page of the starter blocks, compiled, proven, measured and tagged here."""
    with tempfile.TemporaryDirectory(prefix="esper-starter-") as made:
        os.environ |= {"ESPER_KEYS": f"{made}/trust", "ESPER_LIBRARY": f"{made}/library"}
        with Library.open(Path(made) / "library", trust=Path(made) / "trust") as library:
            ids = []
            for path in sorted((results.ROOT / "examples").glob(STARTERS)):
                made_here = compile_blueprint(text.load(path), targets=("cpu",), library=library)
                ids += [m.artifact_id for m in made_here]
            measured(ids, effort)
            annotate(library)
            head = results.header("gauntlet")
            note = (
                f"Proven and measured by commit {head['commit'][:7]}{' with changes' * head['dirty']} on "
                f"{head['host']['processor']}, torch {head['versions']['torch']}, {head['date'][:10]}."
            )
            place.write_text(page.page(entries.read(library), "Esper: the starter library", note), "utf-8")


def hurried(found: Mapping[str, Any]) -> dict[str, Any]:
    """The document of a run in a hurry: what a verdict with its numbers takes then, and none of the figures
    that more samples answer."""
    each = {r["block"]: r["seconds"] for r in found["rows"]}
    slow = {name: s for name, s in each.items() if s >= HURRIED_S}
    longest, count = max(each.values(), default=None), len(each)
    made = {
        "quick_artifacts": results.figure(count, "count"),
        "quick_seconds_median": results.figure(
            statistics.median(list(each.values())) if each else None, "s", HURRIED_S
        ),
        "quick_artifacts_in_20_s": results.figure(count - len(slow), "count", count, at_least=True),
        "quick_seconds_of_the_longest": results.figure(longest, "s", HURRIED_S, over=count, which=slow),
    }
    notes = ["left out: how well it repeats, tags (few samples)"]
    return {**found, "part": "quick", "figures": made, "notes": notes}


def show(found: Mapping[str, Any]) -> None:
    """The figures on standard error."""
    for name, figure in found["figures"].items():
        met = {None: "", True: "met", False: "MISSED"}[figure["met"]]
        value = "not measured" if figure["value"] is None else f"{figure['value']:.5g}"
        say(f"{name:32} {value} {figure['unit']} {met}")


def alone(out: Path, quick: bool) -> int:
    """As a bench of `bench.harness`. 1 when a tag is not of its percentile or history was lost."""
    found = run(COUNT, QUICK if quick else EFFORT)
    show(found)
    say(f"written: {results.write(found, out)}")
    wrong = ("tags_not_of_their_percentile", "tagged_again_lost")
    return int(any(found["figures"][name]["value"] for name in wrong))


@click.command()
@click.option("--count", default=COUNT, show_default=True, help="Artifacts to compile.")
@click.option("--repeated", default=REPEATED, show_default=True, help="Artifacts to measure twice.")
@click.option("--lanes", default=1, show_default=True, help="Artifacts at a time, on cores of their own.")
@click.option("--quick", is_flag=True, help="Few samples: what it takes, not how well it repeats.")
@click.option("--here", "here_s", default=0.0, help="Measure what ESPER_LIBRARY has, for so many seconds.")
@click.option("--part", default="0/1", show_default=True, help="Of what is there, with --here.")
@click.option("--read", "read_", is_flag=True, help="Only the table of what is measured in ESPER_LIBRARY.")
@click.option("--starter", "place", type=click.Path(path_type=Path), help="Only write the starter page here.")
@click.option("--out", type=click.Path(path_type=Path), default=results.RESULTS, show_default=False)
def main(
    count: int, repeated: int, lanes: int, quick: bool, here_s: float, part: str, read_: bool,
    place: Path | None, out: Path,
) -> None:  # fmt: skip
    """Measure a library twice, check its tags, write the results file."""
    effort = QUICK if quick else EFFORT
    if place is not None:
        starter(place, effort)
        return
    if here_s:
        found = here(here_s, repeated, effort, part)
    else:
        found = read() if read_ else run(count, effort, repeated, lanes)
    if quick:
        found = hurried(found)
    show(found)
    say(f"written: {results.write(found, out)}")


if __name__ == "__main__":
    main()
