"""What a memory budget costs: bytes kept for the backward, peak memory and time, by share.

    python -m bench.budget --out out/budget [--size small]        (four blocks, a few minutes)

Each block is compiled once per share of the bytes between the fewest (0) and those that `speed` keeps (1), at
one size; all of a block are timed side by side, forward and backward, with its peers. Bytes kept are those of
the plan; peaks are the card's, beyond what was there before the step.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

import esper_ir.text as text
from bench import measure, peers, results
from bench.blocks import SIZES, Block, Sizes, available
from bench.crew import say
from bench.results import figure
from esper_ir.graph import Blueprint
from forge.objectives import within
from forge.service import compile_blueprint, front
from forge.work import Work
from library.store import Library

BLOCKS = ("geglu", "squeeze_excite", "mamba_scan", "linear_cross_entropy")
TARGETS = {"linear_cross_entropy": 1.1}
"""Of the best peer's time beside that of the least budget."""
ESPER = "esper"
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)


def at(block: Block, sizes: Sizes) -> Blueprint:
    """The block tuned for these sizes alone."""
    made = text.load(block.blueprint)
    dims = {n: replace(d, tune=(sizes[n],)) if n in sizes else d for n, d in made.dims.items()}
    return replace(made, dims=dims)


def kept(work: Work, sizes: Sizes) -> int:
    """Bytes beyond parameters that the backward is handed."""
    if work.joint is None:
        return 0
    parameters = {v.name for v in work.blueprint.leaves if v.kind != "input"}
    types = work.joint.graph.types
    return sum(types[s].nbytes.value(sizes) for s in work.saved if s not in parameters)


def peak(step: Any) -> int | None:
    """Bytes of a step beyond what is there; None without a card."""
    if not torch.cuda.is_available():
        return None
    step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def curve(library: Library, block: Block, sizes: Sizes, shares: Sequence[float]) -> list[dict[str, Any]]:
    """A row per share, then one per peer; shares whose plans keep the same values are one artifact and share
    its times."""
    device, blueprint = results.device_here(), at(block, sizes)
    args = block.inputs(sizes, device)
    cotangent = _cotangent(block, args)
    target = "auto" if device.type == "cuda" else "cpu"
    ids: dict[float, str] = {}
    calls: dict[str, Any] = {}
    for share in shares:
        (made,) = compile_blueprint(
            blueprint, targets=(target,), objectives=(within(str(share)),), library=library
        )
        ids[share] = made.artifact_id
        loaded = peers.esper(made.artifact_id, library, allow_unvalidated=True)
        calls[made.artifact_id] = measure.steps(loaded, args, cotangent)["fb"]
    others = [name for name in peers.names(block, device, every=False) if name != peers.REDUCE]
    for name in others:
        calls[name] = measure.steps(peers.peer(name, block, args, cotangent)[0], args, cotangent)["fb"]
    effort = measure.Effort() if device.type == "cuda" else measure.QUICK  # seconds a step, there
    times = measure.measured(calls, effort, device, "fb", graphs=peers.uncaptured(block))
    label, right = block.size_label(sizes), calls[peers.EAGER]()
    rows = []
    for share in shares:
        name = ids[share]
        work = front(blueprint, target, aim=within(str(share)))
        row = {"block": block.name, "size": label, "impl": ESPER, "share": share, "artifact": name}
        row |= {"kept_bytes": kept(work, sizes), "peak_bytes": peak(calls[name]), "saved": list(work.saved)}
        row["off_eager"] = off(calls[name](), right)
        rows.append({**row, "phase": "fb", **times.row(name)})
        say(f"{block.name} {label} {share:g}: {rows[-1]['kept_bytes'] / 2**20:.1f} MiB kept, "
            f"{rows[-1]['wall_ms']:.3f} ms")  # fmt: skip
    for name in others:
        row = {"block": block.name, "size": label, "impl": name, "peak_bytes": peak(calls[name])}
        rows.append({**row, "phase": "fb", **times.row(name)})
        say(f"{block.name} {label} {name}: {rows[-1]['wall_ms']:.3f} ms")
    return rows


def off(found: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    """Of gradients: the largest root mean square difference from eager's, over theirs."""
    pairs = zip(found, right, strict=True)
    return max(
        float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-300)) for a, b in pairs
    )


def _cotangent(block: Block, args: list[Tensor]) -> Tensor:
    with torch.no_grad():
        return torch.randn_like(block.fn(*args))


def figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of the least budget beside the largest, by block and size: bytes kept, peak and time; and of every peer
    beside the least budget."""
    found: dict[str, Any] = {}
    for block, size in dict.fromkeys((r["block"], r["size"]) for r in rows):
        here, name = [r for r in rows if (r["block"], r["size"]) == (block, size)], f"{block}_{size}"
        own = sorted((r for r in here if r["impl"] == ESPER), key=lambda r: r["share"])
        least, most, others = own[0], own[-1], [r for r in here if r["impl"] != ESPER]
        found[f"{name}_kept_share"] = figure(least["kept_bytes"] / max(most["kept_bytes"], 1), "ratio")
        found[f"{name}_peak_ratio"] = figure(_ratio(least, most, "peak_bytes"), "ratio")
        found[f"{name}_time_ratio"] = figure(least["wall_ms"] / most["wall_ms"], "ratio")
        for peer in others:
            found[f"{name}_{peer['impl']}_peak"] = figure(_ratio(peer, least, "peak_bytes"), "x")
            found[f"{name}_{peer['impl']}_time"] = figure(_ratio(peer, least, "wall_ms"), "x")
        if others:
            best = min(others, key=lambda r: r["wall_ms"])
            aim = TARGETS.get(block)
            found[f"{name}_best_time"] = figure(_ratio(best, least, "wall_ms"), "x", aim, at_least=True)
    return found


def _ratio(one: Mapping[str, Any], other: Mapping[str, Any], name: str) -> float | None:
    """None where there is no card to ask."""
    return one[name] / other[name] if one[name] and other[name] else None


@click.command()
@click.option(
    "--only", multiple=True, default=BLOCKS, show_default=True, help="Words in the names of blocks."
)
@click.option("--size", "chosen", type=click.Choice(SIZES), multiple=True,
              help="Default: medium on a card, small elsewhere.")  # fmt: skip
@click.option("--share", "shares", multiple=True, type=float, default=SHARES, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), default=results.RESULTS, show_default=False)
def main(only: tuple[str, ...], chosen: tuple[str, ...], shares: tuple[float, ...], out: Path) -> None:
    """Compile, time, and write the results file."""
    chosen = chosen or ("medium" if torch.cuda.is_available() else "small",)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="esper-budget-") as folder:
        places = {"trust": Path(folder, "trust"), "roles": ("compiler",)}
        with Library.open(Path(folder, "library"), **places) as library:
            for block, size in product(available(only), chosen):
                rows += curve(library, block, block.sizes[SIZES.index(size)], shares)
    document = {**results.header("budget"), "rows": rows, "figures": figures(rows)}
    say(f"written: {results.write(document, out)}")


if __name__ == "__main__":
    main()
