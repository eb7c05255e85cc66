"""Times from a card as the table of tiles that the package ships (forge/tune/priors.json).

    python -m bench.tuner --make out/tuner --target h100     (anywhere)
    python -m bench.tuner --from out/tuner --out out/found   (on the card: writes out/found/times/*.times)
    python -m bench.priors out/found/times/*.times           (anywhere: adds to the table)
    python -m bench.priors --products out/found/products-*.json     (the same, from results of bench.products)

Of every group the tile goes in that won: 2 % faster than the one the search began from, outside the noise;
else that one. A group that the forge of today would plan in another way is left out, and counted. Of a
product it is the way to do it that goes in: the library's call or the quickest kernel of ours. Where the
kernel of ours that was chosen gained more from a tile of its own than from one that a way names, the way is
left as it was.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

import esper_ir.text as text
from bench import results
from bench.blocks import available
from bench.crew import say
from bench.families import PRODUCTS, cases
from forge.plan import MatmulTile, ProductWay
from forge.service import front
from forge.tune import halves, priors
from forge.tune.priors import Entry
from forge.tune.shapes import Shape
from forge.tune.tiles import tile_of
from forge.tune.trials import MARGIN, Hunt


def entries_of(
    document: Mapping[str, Any], shapes: Mapping[str, Shape], card: str
) -> tuple[list[Entry], list[str]]:
    """Entries of the groups of one document of times, and why others gave none. `shapes`: of groups of today,
    by key.
    """
    made: list[Entry] = []
    left: list[str] = []
    hunts = [halves.hunt_of(group) for group in document["groups"]]
    for hunt, group in zip(hunts, document["groups"], strict=True):
        hunt.recall(group["trials"])
    for hunt in hunts:
        what = f"{document.get('block', '?')} {hunt.group}"
        prior = hunt.trials.get(repr(hunt.prior))
        if prior is None or prior.wrong or not math.isfinite(prior.us):
            left.append(f"{what}: the tile that it began from has no time")
        elif hunt.key not in shapes:
            left.append(f"{what}: planned in another way by now")
        else:
            best = hunt.trials[repr(hunt.winner() or hunt.prior)]
            if _better_by_tile(hunt, best.us / prior.us, hunts):
                best = prior
            made.append(
                Entry(hunt.key, shapes[hunt.key], best.tile, best.us, prior.us, what, card,
                      str(document["toolchain"]))
            )  # fmt: skip
    return made, left


def _better_by_tile(hunt: Hunt, gained: float, hunts: Sequence[Hunt]) -> bool:
    """Whether a product that is a kernel of ours by the rule gained as much from its own tiles, in every
    phase of its name, as from the way that was quickest."""
    if not isinstance(hunt.prior, ProductWay) or not hunt.prior.own or hunt.prior.block_m:
        return False
    name = hunt.group.rpartition(" ")[0]
    same = [h for h in hunts if isinstance(h.prior, MatmulTile) and h.group == name]
    times = [(h.trials.get(repr(h.winner() or h.prior)), h.trials.get(repr(h.prior))) for h in same]
    ratios = [best.us / prior.us for best, prior in times if best and prior]
    return bool(ratios) and max(ratios) <= gained


def shapes_of(blocks: Iterable[str], target: str) -> dict[str, Shape]:
    """What every tile of these blocks, and cases of bench.products, is chosen for today, by key."""
    wanted = set(blocks)
    out: dict[str, Shape] = {}
    graphs = [text.load(block.blueprint) for block in available() if block.name in wanted]
    graphs += [text.parse(case.text()) for case in cases() if case.name in wanted]
    for graph in graphs:
        out |= front(graph, target).kernels.choices.shapes
    return out


def ways_of(document: Mapping[str, Any]) -> list[Entry]:
    """The way of every product that bench.products timed both ways, by device time."""
    rows = {(r["case"], r["impl"]): r for r in document["rows"] if r.get("correct") and r.get("dev_ms")}
    made: list[Entry] = []
    for case in cases((PRODUCTS,), document["tiny"]):
        chosen, own = rows.get((case.name, "esper-fast")), rows.get((case.name, "esper-own"))
        choices = front(text.parse(case.text()), document["target"]).kernels.choices
        keys = [key for key, (tile, _) in choices.made.items() if isinstance(tile, ProductWay)]
        if chosen is None or own is None or not chosen["externs"] or len(keys) != 1:
            say(f"{case.name}: not timed both ways")
            continue
        better = own["dev_ms"] < (1 - MARGIN) * chosen["dev_ms"] and own["dev_hi"] < chosen["dev_lo"]
        way = tile_of(case.name, {"kind": "ProductWay", "tile": own["tile"]}) if better else ProductWay(False)
        us, before = (1e3 * r["dev_ms"] for r in (own if better else chosen, chosen))
        made.append(
            Entry(keys[0], choices.shapes[keys[0]], way, us, before, case.name, document["card"],
                  document["toolchain"])
        )  # fmt: skip
    return made


def merged(old: Sequence[Entry], new: Sequence[Entry]) -> list[Entry]:
    """New entries in the place of old ones for the same work."""
    return list({**{e.key: e for e in old}, **{e.key: e for e in new}}.values())


@click.command()
@click.argument("files", nargs=-1, type=click.Path(path_type=Path, exists=True))
@click.option(
    "--products", multiple=True, type=click.Path(path_type=Path, exists=True), help="Results files."
)
@click.option("--target", default="h100", show_default=True, help="Of the same architecture as the card.")
@click.option("--card", default="", help="Name of the card, where a file does not hold it.")
@click.option("--out", type=click.Path(path_type=Path), default=priors.PLACE, show_default=False)
def main(
    files: tuple[Path, ...], products: tuple[Path, ...], target: str, card: str, out: Path
) -> None:  # fmt: skip
    """Add the tiles that won in FILES (documents of times) to the table."""
    documents = [{"block": p.name.partition(".")[0], **halves.read(p, halves.TIMES)} for p in files]
    shapes = shapes_of((str(d["block"]) for d in documents), target)
    made: list[Entry] = []
    for document in documents:
        named = str(document.get("card") or card)
        if not named:
            raise click.UsageError(f"--card: {document['block']} does not say which card it was")
        found, left = entries_of(document, shapes, named)
        made += found
        for why in left:
            say(why)
    made += [entry for path in products for entry in ways_of(results.read(path))]
    old = priors.read(out.read_bytes()) if out.exists() else []
    table = merged(old, made)
    out.write_bytes(priors.written(table))
    say(f"{out}: {len(made)} entries from {len(files) + len(products)} files, {len(table)} in all")


if __name__ == "__main__":
    main()
