"""Measures what is compiled here against its peers and writes bench/results/.

    python -m bench.harness [blocks] [host] [load] [bits] [runtime] [--only WORD] [--library DIR] [--out DIR]

Without --library, everything is compiled for this machine and proven first, in a library that goes with the
run.
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import torch

from bench import bits, faults, figures, growth, host, load, peers, results, risk, tuner, whole
from bench import gauntlet as repeated
from bench.blocks import SIZES, Block, Sizes, available
from bench.crew import MIN_S, Crew, Job, Means, end_well, say
from bench.measure import QUICK, Effort, ceilings
from bench.prepare import HOST_BLOCK, REPEATED, compile_all
from bench.training import MODELS
from bench.whole_models import Bench
from gauntlet.isolate import ForkServer
from gauntlet.runner import prove
from gauntlet.sampling import BRIEF
from library.store import Library

BENCHES = ("blocks", "host", "load", "bits")
# Only when named: host and load are part of the first.
ASKED = ("runtime", "models", "faults", "growth", "risk", "gauntlet", "tuner")
OWN = ("faults", "growth", "risk", "gauntlet", "tuner")  # have artifacts of their own
CPU_ELEMENTS = 1 << 23  # of the largest leaf: a processor is measured at sizes it is used for
LIMIT_S = 170.0
MODES = ("plain", "graphed", "stack16")
ROOM = 0.5  # of a card's memory for what is kept while peers compile; the rest is for what comes and goes
CPU_EFFORT = Effort(repeats=9, rounds=15, span_ms=9000.0)


class Run:
    """What all benches of one run share."""

    def __init__(
        self,
        library: Library,
        compiled: dict[str, dict[str, Any]],
        only: tuple[str, ...],
        options: dict[str, Any],
    ) -> None:
        self.library, self.compiled, self.only, self.options = library, compiled, only, options
        self.end = time.monotonic() + options["seconds"]
        self.device = results.device_here()
        say(f"measuring the ceilings of {self.device}")
        self.ceilings = ceilings(self.device)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # the memory is for the processes that measure
        say(", ".join(f"{k} {v:.3g}" for k, v in self.ceilings.items()))

    def left(self) -> float:
        """Seconds of the run's limit."""
        return self.end - time.monotonic()

    def ids(self) -> dict[str, str]:
        """Artifact id by block, of what was compiled for this run."""
        return {facts["block"]: artifact for artifact, facts in self.compiled.items()}

    def blocks(self) -> list[Block]:
        """Those asked for that were compiled for this run."""
        ids = self.ids()
        return [block for block in available(self.only) if block.name in ids]

    def sizes(self, block: Block) -> list[Sizes]:
        """Those asked for. A processor is measured at what it is used for: the small ones."""
        wanted = block.named_sizes(self.options["sizes"])
        if self.device.type == "cuda":
            return wanted
        small = [s for s in wanted if max(_elements(block, s)) <= CPU_ELEMENTS]
        return small or [min(wanted, key=lambda s: max(_elements(block, s)))]

    def sized(self, name: str) -> list[tuple[Block, Sizes]]:
        """Blocks that are measured at the size of this name, those with long products first: their peers
        compile longest."""
        found = [
            (block, sizes)
            for block in self.blocks()
            for sizes in block.named_sizes((name,))
            if sizes in self.sizes(block)
        ]
        return sorted(found, key=lambda pair: -pair[0].flops(pair[1]))

    def document(self, bench: str, **parts: Any) -> dict[str, Any]:
        return {**results.header(bench, self.ceilings), **parts}


def _elements(block: Block, sizes: Sizes) -> list[int]:
    return [leaf.nbytes(sizes) // 2 for leaf in block.leaves]


# -- blocks


def blocks(run: Run) -> dict[str, Any]:
    """Every block at every size asked for: all compiled side by side, then measured one by one (on several
    cards, all implementations of one size on one card). The file is written whenever a block is done, so
    that a run that is stopped leaves what it has."""
    jobs = [_job(run, block, sizes, at) for at in run.options["sizes"] for block, sizes in run.sized(at)]
    if run.device.type != "cuda":  # one after the other there: large products keep nobody waiting
        jobs.sort(key=lambda job: job.block.flops(job.sizes))
    sheet = Sheet(run, [job.label for job in jobs])
    with tempfile.TemporaryDirectory(prefix="esper-peers-") as made:
        cuda, now = run.device.type == "cuda", time.monotonic()
        asked = run.options["cards"].split(",") if run.options["cards"] else [""]
        means = Means(
            tuple(asked) if cuda else (),
            run.options["jobs"] or (max(1, (os.cpu_count() or 2) - 2) if cuda else 1),
            now + min(run.options["compile_seconds"], run.left()),
            run.end,
            run.options["limit"],
            run.options["peers"] or Path(made),
            ROOM * torch.cuda.get_device_properties(0).total_memory if cuda else math.inf,
        )
        end_well(sheet.write)
        Crew(jobs, means, sheet.tell).go()
    return sheet.document()


def _job(run: Run, block: Block, sizes: Sizes, name: str) -> Job:
    first = sizes == run.sizes(block)[0]
    named = peers.names(block, run.device, name == SIZES[0] or run.options["all_max"])
    impls = [n for n in named if n not in run.options["skip"]]
    data = {
        "block": block.name, "sizes": dict(sizes), "impls": impls,
        "effort": asdict(run.options["effort"]), "stack": first and "stack16" in run.options["modes"],
        "modes": run.options["modes"], "waterfall": first, "ceilings": run.ceilings,
        "library": str(run.library.home), "compiled": run.compiled, "threads": run.options["threads"],
        "unproven": run.options["unproven"],
    }  # fmt: skip
    return Job(block, sizes, data)


class Sheet:
    """What a run of blocks has so far. A row is kept from its last measurement."""

    def __init__(self, run: Run, wanted: list[str]) -> None:
        self.run, self.wanted = run, wanted
        self.rows: dict[tuple[str, ...], dict[str, Any]] = {}
        self.waterfall: list[dict[str, Any]] = []
        self.problems: list[dict[str, Any]] = []

    def tell(self, job: Job, lines: list[dict[str, Any]]) -> None:
        label = {"block": job.block.name, "size": job.block.size_label(job.sizes)}
        for line in lines:
            kind, line = line["kind"], {k: v for k, v in line.items() if k != "kind"}
            if kind == "row":
                self.rows[tuple(str(line.get(k)) for k in figures.KEY)] = line
            elif kind == "waterfall":
                self.waterfall += [{**label, **r} for r in line["rows"]]
            elif kind in ("broke", "killed"):
                self.problems.append({**label, **line})
        self.write()

    def document(self) -> dict[str, Any]:
        run, rows = self.run, list(self.rows.values())
        card = torch.cuda.get_device_name() if run.device.type == "cuda" else "cpu"
        there = {f"{r['block']} {r['size']}" for r in rows if figures.is_ours(r)}
        lost = sorted(set(self.wanted) - there)
        found = figures.of_blocks(rows, run.ceilings, card, lost, self.waterfall)
        return run.document(
            "blocks", rows=rows, figures=found, waterfall=self.waterfall, problems=self.problems
        )

    def write(self) -> None:
        results.write(self.document(), self.run.options["out"])


# -- the others


def hosts(run: Run) -> dict[str, Any]:
    found = host.measure(run.library, run.ids(), seconds=run.options["host_seconds"])
    return run.document("host", **found)


def loads(run: Run) -> dict[str, Any]:
    block = next(iter(run.blocks()), None)
    if block is None:
        raise click.ClickException("no block was compiled")
    name = run.ids()[block.name]
    return run.document("load", rows=[], **load.measure(run.library, name, block, run.options["unproven"]))


def runtimes(run: Run) -> dict[str, Any]:
    block = next(iter(run.blocks()), None)
    if block is None:
        raise click.ClickException("no block was compiled")
    ids = run.ids()
    found = whole.measure(run.library, ids[block.name], block, run.sizes(block)[0], ids, run.options)
    return run.document("runtime", **found)


def models(run: Run) -> dict[str, Any]:
    which = run.options["models"]
    ids = {key: artifact for artifact, facts in run.compiled.items() for key in facts.get("modules", ())}
    cuda = run.device.type == "cuda"
    end_well(lambda: None)
    found = Bench(which, run.library.home, ids, run.options, cuda).measure()
    return run.document("models", **found)


def digests(run: Run) -> dict[str, Any]:
    """The sizes that are small first, and what there was time for."""
    jobs = [(block, sizes) for block in run.blocks() for sizes in run.sizes(block)]
    jobs.sort(key=lambda job: sum(_elements(*job)))
    rows: list[dict[str, Any]] = []
    done: list[str] = []

    def document() -> dict[str, Any]:
        left = sorted({f"{block.name} {block.size_label(sizes)}" for block, sizes in jobs} - set(done))
        return run.document("bits", rows=rows, figures=bits.figures(rows), left_out=left)

    end_well(lambda: results.write(document(), run.options["out"]))
    for block, sizes in jobs:
        if run.left() < MIN_S:
            break
        rows += bits.rows(run.library, block, sizes, run.options["unproven"])
        done.append(f"{block.name} {block.size_label(sizes)}")
    return document()


DO = {"blocks": blocks, "host": hosts, "load": loads, "bits": digests, "runtime": runtimes, "models": models}


def provable(compiled: dict[str, dict[str, Any]]) -> list[str]:
    """Artifacts of named blocks; the host blocks are loaded unproven, see bench.host."""
    return [
        artifact for artifact, facts in compiled.items() if facts["block"] not in (HOST_BLOCK.stem, REPEATED)
    ]


@contextmanager
def opened(
    folder: Path | None, only: tuple[str, ...], models: str
) -> Iterator[tuple[Library, dict[str, dict[str, Any]]]]:
    """The prepared library with its keys and what compiling took, or one made for this machine now."""
    if folder is not None:
        os.environ |= {"ESPER_KEYS": str(folder / "trust"), "ESPER_LIBRARY": str(folder / "library")}
        compiled = json.loads((folder / "compiled.json").read_text(encoding="utf-8"))
        with Library.open(folder / "library", create=False, readonly=True) as library:
            yield library, compiled
        return
    with tempfile.TemporaryDirectory(prefix="esper-bench-") as made:
        os.environ |= {"ESPER_KEYS": f"{made}/trust", "ESPER_LIBRARY": f"{made}/library"}
        with Library.open(Path(made) / "library", trust=Path(made) / "trust") as library:
            compiled = compile_all("auto", library, only, models)
            _prove(library, provable(compiled))
            yield library, compiled


def _prove(library: Library, artifacts: Iterable[str]) -> None:
    """Verdicts for what was just compiled."""
    with ForkServer() as server:
        for artifact in artifacts:
            verdict = prove(artifact, library=library, server=server, quick=True, effort=BRIEF)
            say(f"{artifact}: {verdict.state} {verdict.reason}")


def _words(allowed: tuple[str, ...]) -> Callable[[click.Context, click.Parameter, str], tuple[str, ...]]:
    """Comma-separated words out of `allowed`, in its order."""

    def read(context: click.Context, option: click.Parameter, value: str) -> tuple[str, ...]:
        given = [word for word in value.split(",") if word]
        unknown = [word for word in given if word not in allowed]
        if unknown or not given:
            raise click.BadParameter(f"{', '.join(unknown) or 'nothing'}: choose from {', '.join(allowed)}")
        return tuple(word for word in allowed if word in given)

    return read


@click.command()
@click.argument("benches", nargs=-1, type=click.Choice((*BENCHES, *ASKED)))
@click.option("--only", multiple=True, help="Words in the names of blocks (default: all with a blueprint).")
@click.option("--library", type=click.Path(path_type=Path), help="Folder made by bench.prepare, proven here.")
@click.option("--out", type=click.Path(path_type=Path), default=results.RESULTS, show_default=False)
@click.option("--limit", default=LIMIT_S, show_default=True, help="Seconds for one block at one size.")
@click.option("--skip", multiple=True, help="Implementations to leave out, such as compile-max-autotune.")
@click.option(
    "--sizes", default=",".join(SIZES), show_default=True, callback=_words(SIZES), help="Of blocks."
)
@click.option(
    "--modes", default=",".join(MODES), show_default=True, callback=_words(MODES), help="Of blocks."
)
@click.option("--all-max", is_flag=True, help="max-autotune at every size, not only at medium.")
@click.option("--jobs", default=0, help="Processes that compile side by side (default: cores less two).")
@click.option("--compile-seconds", default=3600.0, show_default=True, help="Limit of all compiling of peers.")
@click.option("--peers", type=click.Path(path_type=Path), help="Folder that keeps what peers compiled.")
@click.option("--host-seconds", default=80.0, show_default=True, help="Limit of the host bench.")
@click.option("--models", type=click.Choice(tuple(MODELS)), default="large", help="Sizes of whole models.")
@click.option("--models-seconds", default=150.0, show_default=True, help="Limit of the whole models.")
@click.option("--side-rounds", default=3, show_default=True, help="Fresh processes of each implementation.")
@click.option(
    "--seconds", default=7200.0, show_default=True, help="Limit of all block measurements together."
)
@click.option("--cards", default="", help="Cards that share the blocks, such as 0,1,2,3 (default: one).")
@click.option("--unproven", is_flag=True, help="Measure artifacts without a verdict too; rows say so.")
@click.option("--threads", type=int, default=0, help="CPU threads (default: torch's).")
@click.option("--quick", is_flag=True, help="Few repeats: whether it runs, not how fast.")
def main(
    benches: tuple[str, ...],
    only: tuple[str, ...],
    library: Path | None,
    out: Path,
    quick: bool,
    **options: Any,
) -> None:
    """Measure and write one results file per bench (default: all but `runtime`, which holds two of them)."""
    effort = QUICK if quick else Effort() if torch.cuda.is_available() else CPU_EFFORT
    failed = 0
    asked = tuple(dict.fromkeys(benches or BENCHES))
    if "faults" in asked:  # has blocks of its own
        failed += faults.alone(library, out, quick)
    if "growth" in asked:  # has hosts and seeds of its own
        failed += growth.alone(only, out)
    if "risk" in asked:  # trains with what `faults` judges
        failed += risk.alone(out)
    if "gauntlet" in asked:  # measures a library of its own
        failed += repeated.alone(out, quick)
    if "tuner" in asked:  # builds the candidates that it times
        failed += tuner.alone(only, out, quick)
    asked = tuple(bench for bench in asked if bench not in OWN)
    if not asked:
        sys.exit(failed)
    with opened(library, only, options["models"] if "models" in asked else "") as (store, compiled):
        run = Run(store, compiled, only, {**options, "effort": effort, "out": out})
        for bench in asked:
            say(bench)
            try:
                document = DO[bench](run)
            except Exception as error:
                failed += 1
                say(f"{bench} failed: {type(error).__name__}: {str(error)[:500]}")
                continue
            say(f"written: {results.write(document, out)}")
            figures.show(document)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
