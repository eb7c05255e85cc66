"""Measures what is compiled here against its peers and writes bench/results/.

    python -m bench.harness [blocks] [host] [load] [bits] [runtime] [--only WORD] [--library DIR] [--out DIR]

Without --library, everything is compiled for this machine and proven first, in a library that goes with the
run.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

import click
import torch

from bench import bits, figures, host, load, peers, results, whole
from bench.blocks import Block, Sizes, available
from bench.measure import QUICK, Effort, ceilings
from bench.prepare import HOST_BLOCK, REPEATED, compile_all
from gauntlet.isolate import ForkServer
from gauntlet.runner import prove
from library.store import Library

BENCHES = ("blocks", "host", "load", "bits")
ASKED = ("runtime",)  # only when named: host and load are part of it
CPU_ELEMENTS = 1 << 23  # of the largest leaf: a processor is measured at sizes it is used for
LIMIT_S, MIN_S = 170.0, 20.0
CPU_EFFORT = Effort(repeats=9, rounds=15)


def say(text: str) -> None:
    click.echo(f"[{time.strftime('%H:%M:%S')}] {text}", err=True)


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
        if self.device.type == "cuda":
            return list(block.sizes)
        small = [s for s in block.sizes if max(_elements(block, s)) <= CPU_ELEMENTS]
        return small or [min(block.sizes, key=lambda s: max(_elements(block, s)))]

    def document(self, bench: str, **parts: Any) -> dict[str, Any]:
        return {**results.header(bench, self.ceilings), **parts}


def _elements(block: Block, sizes: Sizes) -> list[int]:
    return [leaf.nbytes(sizes) // 2 for leaf in block.leaves]


# -- blocks


def blocks(run: Run) -> dict[str, Any]:
    """Every block at every size, each in a process of its own; a row is kept from its last measurement.
    With several cards one process a card: all implementations of one size are measured on one card."""
    rows: dict[tuple[str, ...], dict[str, Any]] = {}
    waterfalls, problems = [], []
    cards: queue.SimpleQueue[str] = queue.SimpleQueue()
    for card in run.options["cards"].split(",") if run.options["cards"] else [""]:
        cards.put(card)

    def on_a_card(job: tuple[int, Block, Sizes]) -> list[dict[str, Any]] | None:
        card = cards.get()
        try:
            return None if run.left() < MIN_S else _in_process(run, job[1], job[2], job[0] == 0, card)
        finally:
            cards.put(card)

    jobs = [(at, block, sizes) for block in run.blocks() for at, sizes in enumerate(run.sizes(block))]
    jobs.sort(key=lambda job: job[0])  # the main size of every block first
    with ThreadPoolExecutor(max_workers=cards.qsize()) as pool:
        answers = list(pool.map(on_a_card, jobs))
    for (_, block, sizes), lines in zip(jobs, answers, strict=True):
        label = {"block": block.name, "size": block.size_label(sizes)}
        if lines is None:
            problems.append({**label, "why": "no time was left"})
        for line in lines or []:
            kind = line.pop("kind")
            if kind == "row":
                rows[tuple(str(line.get(k)) for k in figures.KEY)] = line
            elif kind == "waterfall":
                waterfalls += [{**label, **r} for r in line["rows"]]
            elif kind in ("broke", "killed"):
                problems.append({**label, **line})
    found = list(rows.values())
    card = torch.cuda.get_device_name() if run.device.type == "cuda" else "cpu"
    summary = figures.of_blocks(found, run.ceilings, card, len(problems))
    return run.document("blocks", rows=found, figures=summary, waterfall=waterfalls, problems=problems)


def _in_process(run: Run, block: Block, sizes: Sizes, first: bool, card: str = "") -> list[dict[str, Any]]:
    effort = run.options["effort"]
    named = [n for n in peers.names(block, run.device) if n not in run.options["skip"]]
    impls = [n for n in named if n != peers.MAX or first or run.options["all_max"]]
    job = {
        "block": block.name, "sizes": dict(sizes), "impls": impls, "effort": asdict(effort), "stack": first,
        "ceilings": run.ceilings, "library": str(run.library.home), "compiled": run.compiled,
        "threads": run.options["threads"],
        "unproven": run.options["unproven"],
    }  # fmt: skip
    label, begin = f"{block.name} {block.size_label(sizes)}", time.monotonic()
    with tempfile.TemporaryDirectory(prefix="esper-bench-") as folder:
        place, out = Path(folder) / "job.json", Path(folder) / "out.jsonl"
        place.write_text(json.dumps(job), encoding="utf-8")
        ended = _bounded(
            [sys.executable, "-m", "bench.worker", str(place), str(out)],
            min(run.options["limit"], run.left()),
            {"CUDA_VISIBLE_DEVICES": card} if card else {},
        )
        text = out.read_text(encoding="utf-8") if out.exists() else ""
    lines = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
    lines += _unfinished(lines, ended, block, sizes)
    say(
        f"{label}: {time.monotonic() - begin:.0f} s, {sum(x['kind'] == 'row' for x in lines)} rows, "
        f"{ended or 'done'}"
    )
    for line in lines:
        if line.get("why"):
            say(f"  {line.get('impl', 'worker')}: {str(line['why'])[-300:]}")
    return lines


def _bounded(
    command: list[str], seconds: float, environment: Mapping[str, str] = MappingProxyType({})
) -> str:
    """Empty when the process ended well; the process and all its children are gone afterwards."""
    process = subprocess.Popen(
        command,
        cwd=results.ROOT,
        stdout=sys.stderr,
        start_new_session=True,
        env={**os.environ, **environment},
    )
    try:
        code = process.wait(timeout=seconds)
        return "" if code == 0 else f"exit code {code}"
    except subprocess.TimeoutExpired:
        return f"stopped after {seconds:.0f} s"
    finally:
        _kill_group(process)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, 9)
    except (ProcessLookupError, PermissionError):
        pass
    process.wait()


def _unfinished(lines: list[dict[str, Any]], ended: str, block: Block, sizes: Sizes) -> list[dict[str, Any]]:
    """What a process that did not end well leaves to say: the peer it was at did not get there."""
    if any(line["kind"] == "done" for line in lines):
        return []
    tried = [line["impl"] for line in lines if line["kind"] == "trying"]
    base = {
        "block": block.name,
        "size": block.size_label(sizes),
        "dtype": block.leaves[0].dtype,
        "mode": "plain",
    }
    rows = [
        {
            "kind": "row",
            **base,
            "phase": phase,
            "impl": impl,
            "wall_ms": None,
            "dev_ms": None,
            "correct": False,
            "why": ended,
        }
        for impl in tried[-1:]
        for phase in ("f", "fb")
    ]
    return [*rows, {"kind": "killed", "why": ended}]


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


def digests(run: Run) -> dict[str, Any]:
    rows = [
        row
        for block in run.blocks()
        for size in run.sizes(block)
        for row in bits.rows(run.library, block, size, run.options["unproven"])
    ]
    return run.document("bits", rows=rows, figures=bits.figures(rows))


DO = {"blocks": blocks, "host": hosts, "load": loads, "bits": digests, "runtime": runtimes}


def provable(compiled: dict[str, dict[str, Any]]) -> list[str]:
    """Artifacts of named blocks; the host blocks are loaded unproven, see bench.host."""
    return [
        artifact for artifact, facts in compiled.items() if facts["block"] not in (HOST_BLOCK.stem, REPEATED)
    ]


@contextmanager
def opened(folder: Path | None, only: tuple[str, ...]) -> Iterator[tuple[Library, dict[str, dict[str, Any]]]]:
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
            compiled = compile_all("auto", library, only)
            _prove(library, provable(compiled))
            yield library, compiled


def _prove(library: Library, artifacts: Iterable[str]) -> None:
    """Verdicts for what was just compiled."""
    with ForkServer() as server:
        for artifact in artifacts:
            verdict = prove(artifact, library=library, server=server, quick=True)
            say(f"{artifact}: {verdict.state} {verdict.reason}")


@click.command()
@click.argument("benches", nargs=-1, type=click.Choice((*BENCHES, *ASKED)))
@click.option("--only", multiple=True, help="Words in the names of blocks (default: all with a blueprint).")
@click.option("--library", type=click.Path(path_type=Path), help="Folder made by bench.prepare, proven here.")
@click.option("--out", type=click.Path(path_type=Path), default=results.RESULTS, show_default=False)
@click.option("--limit", default=LIMIT_S, show_default=True, help="Seconds for one block at one size.")
@click.option("--skip", multiple=True, help="Implementations to leave out, such as compile-max-autotune.")
@click.option("--all-max", is_flag=True, help="max-autotune at every size, not only the first.")
@click.option("--host-seconds", default=80.0, show_default=True, help="Limit of the host bench.")
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
    with opened(library, only) as (store, compiled):
        run = Run(store, compiled, only, {**options, "effort": effort})
        for bench in dict.fromkeys(benches or BENCHES):
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
