"""How many planted faults the gauntlet refuses, and how many clean artifacts it lets through.

    python -m bench.faults [--count 480] [--seed 0] [--device cpu]      makes artifacts here and judges them
    python -m bench.faults --make FOLDER --target h100                  only makes them, packed as FOLDER.tar
    python -m bench.faults --from FOLDER --device cuda:0 --seconds 140  judges what was made elsewhere

What is planted is drawn, by `seed`, evenly over the classes and the blocks of `tests/faults`. Every verdict
is made by the same fork server, workers and stages as `esper-gauntlet bench`.
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import random
import statistics
import sys
import tarfile
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from bench import results
from esper_ir.discover import collect
from gauntlet import elf
from gauntlet.isolate import ForkServer
from gauntlet.runner import Judgement, judge
from gauntlet.stages import integrity
from library.manifest import unpack
from tests.faults import classes, corpus, ordinary, witness
from tests.faults.fault import FaultClass, Mutant
from tests.faults.table import bound

COUNT, BLUEPRINTS, SUBTLE, LEAST = 480, 40, 10.0, 10
DEAR = {"endless loop": 5}
"""Mutants of classes whose every verdict takes seconds by nature: a launch that does not end is waited for,
twice."""
KINDS: dict[str, FaultClass] = collect(classes, "CLASSES")
SMALL = [name for name, kind in KINDS.items() if not kind.no_small]


@dataclass(frozen=True)
class Planted:
    """One artifact to judge: `kind` is empty for a clean one, `file` lies in the folder; `by_value` as of its
    class."""

    kind: str
    block: str
    kernel: str
    place: str
    file: str
    seed: int
    subtle: bool = False
    by_value: bool = False


def say(text: str) -> None:
    click.echo(f"[{time.strftime('%H:%M:%S')}] {text}", err=True)


# -- making


def make(folder: Path, target: str, count: int, seed: int, only: Sequence[str] = ()) -> list[Planted]:
    """Compile every block (or those with one of the words in their name), draw `count` mutants evenly over
    the classes, and write all artifacts."""
    folder.mkdir(parents=True, exist_ok=True)
    blocks = {b.name: b for b in _blocks(target, only)}
    chosen = draw(list(blocks.values()), count, seed)
    planted: list[Planted] = []
    for name, block in blocks.items():
        planted += list(_written(folder, block, [m for at, m in chosen if at == name], seed))
    clean = len([p for p in planted if p.kind])
    each = -(-clean // len(blocks))
    for name in blocks:
        planted += [Planted("", name, "", "", f"{name}.artifact", seed + at) for at in range(each)]
    random.Random(seed).shuffle(planted)
    text = "".join(json.dumps(asdict(p)) + "\n" for p in planted)
    (folder / "planted.jsonl").write_text(text, encoding="utf-8")
    (folder / "commit").write_text(" ".join(map(str, results.commit())), encoding="utf-8")
    return planted


def _blocks(target: str, only: Sequence[str]) -> Iterator[corpus.Block]:
    for data in corpus.blueprints():
        if not only or any(word in data["name"] for word in only):
            yield corpus.compiled(data, target)


def draw(blocks: Sequence[corpus.Block], count: int, seed: int) -> list[tuple[str, Mutant]]:
    """(block, mutant): as many of every class, over as many blocks as it has places in; of classes that have
    subtle ones twice as many, four of five of them subtle."""
    rng = random.Random(seed)
    found: dict[str, list[tuple[str, Mutant]]] = {}
    for name, kind in KINDS.items():
        found[name] = _spread([(b.name, m) for b in blocks for m in kind.mutants(b)], rng)
    left, out = count, []
    weight = {n: 2 if any(m.subtle for _, m in pairs) else 1 for n, pairs in found.items()}
    open_ = sum(weight.values())
    for name in sorted(found, key=lambda k: min(len(found[k]), DEAR.get(k, count)) / weight[k]):
        share = min(-(-left * weight[name] // open_), len(found[name]), DEAR.get(name, count))
        open_ -= weight[name]
        out += found[name][:share]
        left -= share
    return out


def _spread(pairs: list[tuple[str, Mutant]], rng: random.Random) -> list[tuple[str, Mutant]]:
    """In an order that any beginning of is spread over blocks, four subtle ones to a plain one."""
    subtle, plain = (
        _over_blocks([p for p in pairs if p[1].subtle == wanted], rng) for wanted in (True, False)
    )
    turns = range(max(-(-len(subtle) // 4), len(plain)))
    return [p for at in turns for p in (*subtle[4 * at : 4 * at + 4], *plain[at : at + 1])]


def _over_blocks(pairs: list[tuple[str, Mutant]], rng: random.Random) -> list[tuple[str, Mutant]]:
    lanes: dict[str, list[tuple[str, Mutant]]] = defaultdict(list)
    for pair in pairs:
        lanes[pair[0]].append(pair)
    for lane in lanes.values():
        rng.shuffle(lane)
    keys = sorted(lanes)
    rng.shuffle(keys)
    out = []
    while any(lanes.values()):
        out += [lanes[key].pop() for key in keys if lanes[key]]
    return out


def _written(folder: Path, block: corpus.Block, mutants: Sequence[Mutant], seed: int) -> Iterator[Planted]:
    """The block's own artifact and those of its mutants, whose kernels share one module."""
    (folder / f"{block.name}.artifact").write_bytes(block.container)
    texts = {f"{m.kernel}__{at}": _renamed(m, f"{m.kernel}__{at}") for at, m in enumerate(mutants) if m.text}
    modules = {state: _module(block, texts, state) for state in (False, True)}
    for at, mutant in enumerate(mutants):
        manifest = block.manifest
        if mutant.launch is not None:
            manifest["launch"] = mutant.launch
        for kernel in manifest["launch"]["kernels"] if mutant.text else ():
            kernel["entry"] = f"{mutant.kernel}__{at}" if kernel["name"] == mutant.kernel else kernel["entry"]
        data = corpus.packed(block, manifest, modules[STATE in mutant.text] if mutant.text else None)
        file = hashlib.sha256(data).hexdigest()[:24] + ".artifact"
        (folder / file).write_bytes(data)
        yield Planted(
            mutant.kind, block.name, mutant.kernel, mutant.place[:120], file, seed, mutant.subtle,
            KINDS[mutant.kind].by_value or mutant.by_value,
        )  # fmt: skip


STATE = "static "


def _module(block: corpus.Block, texts: Mapping[str, str], state: bool) -> bytes | None:
    """Those with a memory of their own lie apart: a module that has one is refused for it, whatever is
    launched."""
    chosen = {entry: text for entry, text in texts.items() if (STATE in text) == state}
    code = corpus.with_kernels(block, chosen) if chosen else None
    if code is not None and block.kind == "c":
        _same_imports(block, code)
    return code


def _same_imports(block: corpus.Block, code: bytes) -> None:
    """A mutant that asks for what no kernel has would be refused for that, and prove nothing."""
    clean = elf.read(bytes(next(iter(unpack(block.container).blobs.values()))))
    added = {name for name in elf.read(code).imports - clean.imports if not integrity.known(name)}
    assert not added, f"{block.name}: mutants ask for {sorted(added)}"


def _renamed(mutant: Mutant, entry: str) -> str:
    return mutant.text.replace(f"{mutant.kernel}(", f"{entry}(")


# -- judging


class Kept:
    """Rows of what was judged, in a file as each is known where one is given: a later run goes on there."""

    def __init__(self, path: Path | None, planted: Sequence[Planted]) -> None:
        self._path, self._lock, self._over = path, threading.Lock(), False
        names = {(c.file, c.seed) for c in planted}  # a clean one is judged with several seeds
        lines = path.read_text(encoding="utf-8").splitlines() if path is not None and path.exists() else []
        told = {(row["file"], row["seed"]): row for row in map(_whole, lines) if row}
        self.rows = [row for key, row in told.items() if key in names]
        self.left = [c for c in planted if (c.file, c.seed) not in told]
        self._asked = len(planted)

    def add(self, row: dict[str, Any]) -> None:
        with self._lock:
            if self._over:
                return
            self.rows.append(row)
            if self._path is not None:
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(results.plain(row)) + "\n")
            if len(self.rows) % 20 == 0:
                say(f"{len(self.rows)} of {self._asked}")

    def close(self) -> None:
        """What comes later is of a judge that was stopped, and says nothing."""
        with self._lock:
            self._over = True


def _whole(line: str) -> dict[str, Any] | None:
    """None for a line that was being written when the machine went away."""
    try:
        return json.loads(line)
    except ValueError:
        return None


GRACE_S = 15.0  # for judges that are at work when the time is over


def judged(
    folder: Path, planted: Sequence[Planted], device: str, jobs: int, seconds: float, quick: bool,
    kept: Path | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """A row per artifact that was judged before the time was over; `jobs` at a time. Clean ones get all cases
    with the first of their seeds, the short list with the others. A fault that passed is looked for a witness
    against (`tests/faults/witness.py`); how far one that was refused is off on ordinary values is measured by
    itself (`tests/faults/ordinary.py`), where its class has small forms. `kept`: a file of rows, read first
    and added to. `device`: one, or several with commas between, which the judges share out."""
    servers: queue.SimpleQueue[tuple[ForkServer, str]] = queue.SimpleQueue()
    devices = device.split(",")
    begun: list[ForkServer] = []
    end, rows, commit = time.monotonic() + seconds, Kept(kept, planted), results.commit()[0]

    first = min((c.seed for c in planted if not c.kind), default=0)

    def one(case: Planted, alone: bool = False) -> None:
        if time.monotonic() > end:
            return
        server, place = servers.get()
        try:
            row = _looked_at(folder, case, server, place, quick or (not case.kind and case.seed > first))
        finally:
            servers.put((server, place))
        rows.add({**row, "commit": commit, "alone": alone or jobs == 1})

    def start(at: int) -> None:
        server = ForkServer(packages=("gauntlet", "tests"))
        begun.append(server)  # first, so that it is closed whatever happens
        server.start()
        servers.put((server, devices[at % len(devices)]))

    pool = ThreadPoolExecutor(jobs)
    try:
        list(pool.map(start, range(jobs)))
        say(f"{jobs} judges, {len(rows.left)} of {len(planted)} to judge")
        first_ones = [c for c in rows.left if not c.kind and c.seed == first][:ALONE]
        for case in first_ones:
            one(case, alone=True)
        work = [pool.submit(one, case) for case in rows.left if case not in first_ones]
        late = wait(work, timeout=max(end - time.monotonic(), 0.0) + GRACE_S).not_done
        rows.close()
        for future in set(work) - late:
            future.result()
    finally:
        for server in begun:
            server.close()
        pool.shutdown(wait=True, cancel_futures=True)
        for server in begun:
            server.close()  # one that a judge started anew when its first was gone
    return rows.rows


def _looked_at(
    folder: Path, case: Planted, server: ForkServer, place: str, short: bool
) -> dict[str, Any]:  # fmt: skip
    """The row of one artifact."""
    seen, error, data = witness.Seen("", False), None, (folder / case.file).read_bytes()
    found = judge(data, place, server, quick=short, seed=case.seed)
    if case.by_value and found.passed:
        clean = (folder / f"{case.block}.artifact").read_bytes()
        seen = witness.find(clean, data, place, server, seed=case.seed)
    if case.kind and found.passed is False and not KINDS[case.kind].no_small:
        error = ordinary.error(data, place, server, KINDS[case.kind].cotangents, seed=case.seed)
    if bool(case.kind) != (found.passed is False):
        say(f"{case.kind or 'clean'}, {case.block}: {found.passed} {found.reason} ({case.place})")
        say(f"  {'a fault' if seen.fault else 'no fault'}: {seen.place or 'the same numbers'}")
    told = {"witness": seen.place, "beyond": seen.fault, "full": not short, "ordinary": error}
    return {**_row(case, found), **told}


def _row(case: Planted, found: Judgement) -> dict[str, Any]:
    stage = next((s for s in found.stages if s.outcome == "failed"), None)
    margin = stage.metrics.get("margin") if stage else None
    own = sum(s.metrics.get("own_seconds", 0.0) for s in found.stages)
    spent = {s.name: round(s.seconds, 2) for s in found.stages}
    left_out = sum(s.metrics.get("cases_left_out", 0) for s in found.stages)
    told = {"stage": stage.name if stage else "", "margin": margin, "reason": found.reason[:160]}
    times = {"seconds": round(found.seconds, 2), "spent": spent, "own": own, "left_out": left_out}
    return {**asdict(case), "passed": found.passed, **told, **times}


# -- the document


def document(
    rows: Sequence[Mapping[str, Any]],
    asked: int,
    seed: int,
    device: str,
    head: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """As a results file: caught and planted by class, those under ten times the bound, and the clean ones.
    `head`: of the file, as it was when the judging began."""
    faults, clean = [r for r in rows if r["kind"]], [r for r in rows if not r["kind"]]
    same = [r for r in faults if _no_fault(r) and not r["witness"]]
    within = [r for r in faults if _no_fault(r) and r["witness"]]
    faults = [r for r in faults if not _no_fault(r)]
    missed = [r for r in faults if not _caught(r)]
    refused = [r for r in clean if r["passed"] is not True]
    kinds, names = sorted({r["kind"] for r in faults}), len({r["block"] for r in clean})
    by_class = [_of_class(kind, [r for r in faults if r["kind"] == kind]) for kind in kinds]
    figures = {
        "faults_planted": results.figure(len(faults), "count", 300, at_least=True),
        "faults_classes": results.figure(len(kinds), "count", 12, at_least=True),
        "faults_missed": results.figure(len(missed), "count", 0),
        "faults_missed_share_at_most_95": results.figure(bound(len(missed), len(faults)), "share", 0.01),
        "classes_with_small_forms": results.figure(len(SMALL), "count"),
        "classes_with_10_under_10x_the_bound": results.figure(
            sum(c["class"] in SMALL and c["under_10x"] >= LEAST for c in by_class),
            "count",
            len(SMALL),
            at_least=True,
        ),
        "mutants_that_change_nothing": results.figure(len(same), "count"),
        "mutants_never_beyond_the_bound": results.figure(len(within), "count"),
        "clean_judged": results.figure(len(clean), "count", 300, at_least=True),
        "clean_blueprints": results.figure(names, "count", BLUEPRINTS, at_least=True),
        "clean_refused": results.figure(len(refused), "count", 0),
        "clean_refused_share_at_most_95": results.figure(bound(len(refused), len(clean)), "share", 0.01),
        "judge_own_processor_seconds_median": results.figure(_own(clean), "s", 2.0),
        "judge_own_processor_seconds_alone": results.figure(
            _own([r for r in clean if r.get("alone")]), "s", 2.0
        ),
    }
    notes = [f"seed {seed}; {len(rows)} of {asked} artifacts judged on {device} within the time given"]
    full = sum(bool(r.get("full")) for r in [*faults, *clean])
    notes += [f"{full} by all cases, the others by the short list"]
    at = Counter(str(r.get("commit", "unknown"))[:7] for r in rows)
    notes += [f"judged at {name}: {count}" for name, count in at.items() if len(at) > 1]
    told = {"wrong": _told([*missed, *refused]), "change_nothing": _told(same), "within": _told(within)}
    return {
        **(head or results.header("faults")),
        "rows": by_class,
        "figures": figures,
        **told,
        "notes": notes,
    }


ALONE = 6
"""Clean artifacts that are judged before the others, one at a time: many judges on a card wait for each other
in its driver, which counts as their own processor time."""


def _own(clean: Sequence[Mapping[str, Any]]) -> float | None:
    """What the judge itself took of a processor for a clean artifact with all cases, beyond its kernels."""
    taken = [r["own"] for r in clean if r.get("full") and r["passed"]]
    return statistics.median(taken) if taken else None


def _told(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [{k: r[k] for k in ("kind", "block", "kernel", "place", "reason", "witness")} for r in rows]


def _no_fault(row: Mapping[str, Any]) -> bool:
    """Wherever it was compared it gives the clean artifact's numbers, or others that are as right by the rule
    of docs/bounds.md."""
    return bool(row["by_value"] and row["passed"] and not row["beyond"])


BEFORE_RUNNING = ("forged manifest", "work skipped on repeat")
"""Classes that integrity is there to refuse. Any other fault that it refuses was planted badly: it counts as
missed."""


def _caught(row: Mapping[str, Any]) -> bool:
    return row["passed"] is False and (row["stage"] != "integrity" or row["kind"] in BEFORE_RUNNING)


def _of_class(kind: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """`small`: planted as such; `under_10x`: refused, and on ordinary values off by less than ten times the
    bound, `hidden` of them not at all there; `no_small`: why there are none."""
    stages = sorted({str(r["stage"]) for r in rows if r["stage"]})
    refused = [r for r in rows if _caught(r)]
    errors = [r["ordinary"] for r in refused if r.get("ordinary") is not None]
    near = {"under_10x": sum(e < SUBTLE for e in errors), "hidden": sum(e < 1 for e in errors)}
    why = KINDS[kind].no_small if kind in KINDS else ""
    small = sum(r["subtle"] for r in rows)
    return {"class": kind, "planted": len(rows), "caught": len(refused), "small": small, **near,
            "stages": stages, "blueprints": len({r["block"] for r in rows}),
            **({"no_small": why} if why else {})}  # fmt: skip


def show(found: Mapping[str, Any]) -> None:
    """The table on standard error."""
    for row in found["rows"]:
        near = (
            f"{row['under_10x']:3} under 10x the bound ({row['hidden']} under it); {row['small']} small ones"
        )
        why = row.get("no_small", "")
        say(f"{row['class']:36} {row['caught']:3} of {row['planted']:3}, {why or near}")
    for name, figure in found["figures"].items():
        met = {None: "", True: "met", False: "MISSED"}[figure["met"]]
        value = "not measured" if figure["value"] is None else f"{figure['value']:.5g}"
        say(f"{name:40} {value} {met}")


def pack(folder: Path) -> Path:
    out = folder.with_suffix(".tar")
    with tarfile.open(out, "w") as tar:
        tar.add(folder, arcname=folder.name)
    return out


def run(
    folder: Path | None, device: str, count: int, seed: int, jobs: int, seconds: float, quick: bool,
    kept: Path | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Judge what lies in the folder, or what is made for this processor now."""
    head = results.header("faults")  # the tree may move on while this runs
    with tempfile.TemporaryDirectory(prefix="esper-faults-") as made:
        home = folder or Path(made)
        if folder is None:
            make(home, "cpu" if device == "cpu" else "auto", count, seed)
        lines = (home / "planted.jsonl").read_text(encoding="utf-8").splitlines()
        planted = [Planted(**json.loads(line)) for line in lines]
        rows = judged(home, planted, device, jobs, seconds, quick, kept)
    return document(rows, len(planted), seed, device, head)


def alone(folder: Path | None, out: Path, quick: bool) -> int:
    """As a bench of `bench.harness`: on the card where there is one, what `--make` made for it. 1 when
    something was misjudged."""
    device = "cuda:0" if results.device_here().type == "cuda" else "cpu"
    found = run(folder, device, COUNT, 0, max(2, (os.cpu_count() or 2) - 2), 7200.0, quick)
    show(found)
    say(f"written: {results.write(found, out)}")
    return int(bool(found["wrong"]))


@click.command()
@click.option("--make", "made", type=click.Path(path_type=Path), help="Only make the artifacts, into FOLDER.")
@click.option("--from", "folder", type=click.Path(path_type=Path), help="Judge what was made into FOLDER.")
@click.option("--target", default="h100", show_default=True, help="With --make.")
@click.option("--only", multiple=True, help="With --make: words in the names of blocks.")
@click.option("--device", default="cpu", show_default=True)
@click.option("--count", default=COUNT, show_default=True, help="Faults; as many clean artifacts.")
@click.option("--seed", default=0, show_default=True, help="Of what is drawn, and of the battery's values.")
@click.option("--jobs", default=2, show_default=True, help="Judges at a time.")
@click.option("--seconds", default=7200.0, show_default=True, help="Limit of the judging.")
@click.option("--quick", is_flag=True, help="The short list of cases for faults too.")
@click.option("--rows", "kept", type=click.Path(path_type=Path), help="File of verdicts, to go on from.")
@click.option("--out", type=click.Path(path_type=Path), default=results.RESULTS, show_default=False)
def main(
    made: Path | None, folder: Path | None, target: str, only: tuple[str, ...], device: str, count: int,
    seed: int, jobs: int, seconds: float, quick: bool, kept: Path | None, out: Path,
) -> None:  # fmt: skip
    """Plant faults, judge them and clean artifacts, write the results file. Exit 1 when one was misjudged."""
    if made is not None:
        planted = make(made, target, count, seed, only)
        say(f"{sum(bool(p.kind) for p in planted)} faults of {len(planted)} artifacts: {pack(made)}")
        return
    found = run(folder, device, count, seed, jobs, seconds, quick, kept)
    show(found)
    say(f"written: {results.write(found, out)}")
    sys.exit(1 if found["wrong"] else 0)


if __name__ == "__main__":
    main()
