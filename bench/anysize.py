"""Whether one artifact holds its speed over its whole range: odd sizes beside the sizes it was tuned for.

    python -m bench.anysize --out out/anysize [--only WORD]           (a minute or two on a card; compiles)
    python -m bench.anysize --library out/card --out out/anysize      (what bench.prepare compiled)

Of every block the axis with a range is set to its tuned sizes, to primes around them and halfway between, to
1, 2, 3 and 17 and beyond the largest. A tuned size gives the time per element; what a size in between is
expected to take lies on the line between its tuned neighbours, and beyond the last one on that one's rate;
below the first it is that one's time. The ratio is expected time over measured time, forward and backward.
"""

from __future__ import annotations

import json
import math
import tempfile
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

import esper_ir.text as text
from bench import correct, measure, peers, results
from bench.blocks import Block, Leaf, Sizes, available
from bench.crew import say
from bench.results import figure
from forge.service import compile_file
from library.store import Library

BLOCKS = ("rmsnorm_residual", "layernorm", "softmax", "cross_entropy", "bias_gelu", "kl_div",
          "groupnorm_silu", "batchnorm_relu", "embedding_norm", "squeeze_excite")  # fmt: skip
SMALL = (1, 2, 3, 17)
LEAST = 0.9
MEMORY = 24 << 30
"""Bytes that the tensors of one block may take together, all its sizes at once."""


def axis(block: Block) -> str:
    """The axis whose size the sizes of the block differ in."""
    (name,) = [n for n in block.sizes[0] if len({s[n] for s in block.sizes}) > 1]
    return name


def _prime(start: int, step: int) -> int:
    at = start + step
    while at < 2 or any(at % d == 0 for d in range(2, math.isqrt(at) + 1)):
        at += step
    return at


def odd_sizes(tuned: Sequence[int], most: int) -> list[int]:
    """Sizes that nobody tuned for, at most `most`."""
    found: set[int] = set(SMALL)
    for at in tuned:
        found |= {_prime(at, 1)} | ({_prime(at, -1)} if at > 3 else set())
    for low, high in zip(tuned, tuned[1:], strict=False):
        found.add(_prime((low + high) // 2, 1))
    found.add(_prime(2 * tuned[-1], 1))
    return sorted(s for s in found - set(tuned) if s <= most)


def expected(size: int, times: Mapping[int, float]) -> float:
    """Time by the tuned sizes' times: see the module."""
    known = sorted(times)
    if size <= known[0]:
        return times[known[0]]
    if size >= known[-1]:
        return times[known[-1]] * size / known[-1]
    at = bisect_left(known, size)
    low, high = known[at - 1], known[at]
    share = (size - low) / (high - low)
    return times[low] * (1 - share) + times[high] * share


def rows_of(block: Block, artifact: str, library: Library, device: torch.device) -> list[dict[str, Any]]:
    """A row per size that fits."""
    name = axis(block)
    tuned = sorted({s[name] for s in block.sizes})
    least, most = _range(block, name)
    sizes = [s for s in sorted({*tuned, *odd_sizes(tuned, most)}) if s >= least]
    here = [s for s in sizes if block.memory(_sized(block, s)) <= MEMORY]
    loaded = peers.esper(artifact, library, allow_unvalidated=True)
    calls, wrong, held = {}, {}, 0.0
    for size in here:
        at = _sized(block, size)
        held += 3 * sum(leaf.nbytes(at) for leaf in block.leaves)
        if held > MEMORY:
            break
        args = [_made(leaf, at, device) for leaf in block.leaves]
        cotangent = _cotangent(block, args)
        wrong[size] = correct.truth(block.blueprint, block.fn, args, cotangent).why_wrong(
            correct.results(loaded, args, cotangent)
        )
        calls[str(size)] = measure.steps(loaded, args, cotangent)["fb"]
    found = measure.measured(calls, measure.Effort(5, 7), device, "fb")
    kind = "dev_ms" if device.type == "cuda" else "wall_ms"
    made = [{"block": block.name, "axis": name, "size": int(n), "tuned": int(n) in tuned,
             "wrong": wrong[int(n)], "phase": "fb", **found.row(n)} for n in calls]  # fmt: skip
    times = {r["size"]: r[kind] for r in made if r["tuned"]}
    for row in made:
        row["ratio"] = expected(row["size"], times) / row[kind] if times else None
    say(f"{block.name}: " + ", ".join(f"{r['size']} {r[kind]:.3f} ms {r['ratio']:.2f}" for r in made))
    return made


def _range(block: Block, name: str) -> tuple[int, int]:
    dim = text.load(block.blueprint).dims[name]
    return dim.min, dim.max


def _sized(block: Block, size: int) -> Sizes:
    return {**block.sizes[0], axis(block): size}


def _made(leaf: Leaf, sizes: Sizes, device: torch.device) -> Tensor:
    """A leaf drawn on the device: a processor would draw for minutes."""
    if leaf.below:
        return torch.randint(0, sizes[leaf.below], leaf.dims(sizes), device=device)
    value = torch.randn(leaf.dims(sizes), device=device).mul_(leaf.std).to(getattr(torch, leaf.dtype))
    return value.requires_grad_(not leaf.fixed)


def _cotangent(block: Block, args: list[Tensor]) -> Tensor:
    with torch.no_grad():
        return torch.randn_like(block.fn(*args))


def figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The slowest size beside its neighbours, how many are below the bound, how many are wrong."""
    odd = [r for r in rows if not r["tuned"] and r["ratio"] is not None]
    worst = min(odd, key=lambda r: r["ratio"], default=None)
    slow = [f"{r['block']} {r['size']}" for r in odd if r["ratio"] < LEAST]
    told = {"of": f"{worst['block']} {worst['size']}"} if worst else {}
    return {
        "sizes": figure(len(rows), "count"),
        "sizes_wrong": figure(sum(bool(r["wrong"]) for r in rows), "count", 0),
        "sizes_below_the_tuned_neighbours": figure(len(slow), "count", 0, which=slow),
        "slowest_beside_neighbours": figure(
            worst["ratio"] if worst else None, "ratio", LEAST, at_least=True, **told
        ),
    }


def compiled(blocks: Sequence[Block], folder: Path | None, library: Library) -> dict[str, str]:
    """Artifact by block: of a folder that bench.prepare wrote, or made now for the device here."""
    if folder is not None:
        known = json.loads((folder / "compiled.json").read_text())
        return {found["block"]: name for name, found in known.items()}
    target = "auto" if torch.cuda.is_available() else "cpu"
    return {
        b.name: compile_file(b.blueprint, targets=(target,), library=library)[0].artifact_id for b in blocks
    }


@click.command()
@click.option("--only", multiple=True, default=BLOCKS, show_default=True, help="Words in names of blocks.")
@click.option("--library", "folder", type=click.Path(path_type=Path), help="A folder of bench.prepare.")
@click.option("--out", type=click.Path(path_type=Path), default=results.RESULTS, show_default=False)
def main(only: tuple[str, ...], folder: Path | None, out: Path) -> None:
    """Time, check and write the results file."""
    rows: list[dict[str, Any]] = []
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory(prefix="esper-anysize-") as made:
        home = folder or Path(made)
        places: dict[str, Any] = {"trust": home / "trust", "roles": () if folder else ("compiler",)}
        with Library.open(home / "library", **places) as library:
            ids = compiled(available(only), folder, library)
            for block in (b for b in available(only) if b.name in ids):
                rows += rows_of(block, ids[block.name], library, results.device_here())
    document = {**results.header("anysize"), "rows": rows, "figures": figures(rows)}
    say(f"written: {results.write(document, out)}")


if __name__ == "__main__":
    main()
