"""Products, small networks and gated MLPs beside cuBLAS, torch.compile and Liger (bench/families.py).

    python -m bench.products --make out/products --target h100      (anywhere: compiles; minutes)
    python -m bench.products --from out/products --out out/found    (there: checks, times; about two minutes)

`--only products`, `small` or `swiglu` does one family. Of every square product a kernel of ours is compiled
with each of several tiles, whatever the forge chooses by default; the quickest of them, found by a short
look, is timed beside the library's. Peers compile side by side in processes, which then time their share one
after the other. The results file is taken in by `python -m bench.report`.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click

import esper_ir.text as text
from bench import results
from bench.crew import bounded, end_well, say
from bench.families import FAMILIES, Case, cases
from bench.figures import show
from bench.shares import figures
from forge.plan import ProductWay
from forge.service import compile_blueprint, front
from forge.target import resolve
from forge.toolchain import toolchain_of
from forge.tune import space
from forge.tune.journal import SCHEMA as JOURNAL
from forge.tune.tiles import tile_row
from library.store import Library

TILES = 9  # of every product: the template's own among them
SECONDS, COMPILED_S = 140.0, 90.0


# -- compiling


def make(folder: Path, target: str, chosen: Sequence[Case], tiles: int, tiny: bool) -> dict[str, Any]:
    """Compile each, products with several tiles; `products.json` says which artifact is what, or what
    failed."""
    folder.mkdir(parents=True, exist_ok=True)
    made: dict[str, Any] = {"tiny": tiny, "target": target, "toolchain": toolchain_of(resolve(target))}
    made["cases"] = {}
    with Library.open(folder / "library", trust=folder / "trust", roles=("compiler",)) as library:
        for case in chosen:
            blueprint = text.parse(case.text())
            (folder / f"{case.name}.json").write_bytes(case.text())
            row = _compiled(blueprint, target, library, None)
            if not case.trains:
                row["tiles"] = [
                    {"tile": tile_row(way)["tile"], **_compiled(blueprint, target, library, journal)}
                    for way, journal in own_ways(blueprint, target, tiles)
                ]
            made["cases"][case.name] = row
            tried = [t for t in row.get("tiles", ()) if "artifact" in t]
            say(f"{case.name}: {row.get('artifact', row.get('why'))}, {len(tried)} tiles")
            (folder / "products.json").write_text(json.dumps(made, indent=1))
    return made


def _compiled(blueprint: Any, target: str, library: Library, journal: object) -> dict[str, Any]:
    try:
        (found,) = compile_blueprint(blueprint, targets=(target,), library=library, replay=journal)
    except Exception as error:
        return {"why": f"{type(error).__name__}: {error}"[:500]}
    return {"artifact": found.artifact_id, "compile_s": found.seconds["total"]}


def own_ways(blueprint: Any, target: str, tiles: int) -> list[tuple[ProductWay, dict[str, Any]]]:
    """The only product of a blueprint as a kernel of ours with the tiles that a search would begin with, the
    template's own and large ones first, each with the journal that asks for it; none on a target where
    products are library calls."""
    made = front(blueprint, target).kernels.choices.made
    keys = [key for key, (tile, _) in made.items() if isinstance(tile, ProductWay)]
    out = []
    for key in keys[:1]:
        ways = [w for w in space.neighbours(ProductWay(False), ("dual",)) if isinstance(w, ProductWay)]
        ways.sort(key=lambda w: (w.block_m > 0, not w.descriptors, -w.block_m * w.block_n))
        out += [(w, {"schema": JOURNAL, "choices": {key: tile_row(w)}}) for w in ways[:tiles]]
    return out


# -- timing


def crew(folder: Path, chosen: Sequence[Case], jobs: int, seconds: float, tiny: bool) -> list[dict[str, Any]]:
    """Rows of all cases: processes compile the peers of their share, wait for each other, then time one at a
    time."""
    began = time.monotonic()
    count = max(min(jobs, len(chosen)), 1)
    with tempfile.TemporaryDirectory(prefix="esper-products-") as held:
        place = Path(held)

        def one(at: int) -> list[dict[str, Any]]:
            mine = [c.name for c in chosen[at::count]]
            job = {
                "folder": str(folder), "cases": mine, "place": held, "at": at, "tiny": tiny,
                "end": began + seconds,
            }  # fmt: skip
            (place / f"{at}.job").write_text(json.dumps(job))
            out = place / f"{at}.jsonl"
            words = [sys.executable, "-m", "bench.products_worker", str(place / f"{at}.job"), str(out)]
            why = bounded(words, seconds + 10.0, _environment(tiny))
            (place / f"{at}.ready").touch()  # whatever became of it: nobody waits for it
            lines = [json.loads(x) for x in (out.read_text() if out.exists() else "").splitlines()]
            return [*lines, *_lost(chosen[at::count], lines, why)]

        with ThreadPoolExecutor(count + 1) as pool:
            starting = pool.submit(_start, place, count, began + min(COMPILED_S, seconds * 0.7))
            found = [pool.submit(one, at) for at in range(count)]
            rows = [row for future in found for row in future.result()]
            starting.result()
    order = {case.name: at for at, case in enumerate(chosen)}
    return sorted(rows, key=lambda r: order[r["case"]])


def _environment(tiny: bool) -> dict[str, str]:
    threads = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1" if tiny else "2"}
    return {**threads, "PYTHONWARNINGS": "ignore"}  # that ours are unproven: they are compared here


def _start(place: Path, count: int, end: float) -> None:
    """Timing begins when all have compiled, or when that took too long."""
    while len(list(place.glob("*.ready"))) < count and time.monotonic() < end:
        time.sleep(0.05)
    say(f"{len(list(place.glob('*.ready')))} of {count} processes have compiled; timing begins")
    (place / "go").touch()


def _lost(mine: Sequence[Case], lines: Sequence[dict[str, Any]], why: str) -> list[dict[str, Any]]:
    """A row without times for every case of which a process said nothing."""
    told = {line["case"] for line in lines}
    return [
        {"case": c.name, "family": c.family, "block": c.block.name, "size": c.size, "dtype": "bfloat16",
         "phase": "fb" if c.trains else "f", "mode": "plain", "impl": "esper-fast", "wall_ms": None,
         "dev_ms": None, "correct": False, "why": why or "nothing was told"}
        for c in mine if c.name not in told
    ]  # fmt: skip


def run(folder: Path, only: tuple[str, ...], jobs: int, seconds: float) -> dict[str, Any]:
    """The results document."""
    made = json.loads((folder / "products.json").read_text())
    chosen = [c for c in cases(only, made["tiny"]) if c.name in made["cases"]]
    rows = crew(folder, chosen, jobs, seconds, made["tiny"])
    for row in rows:
        if row.get("why"):
            say(f"{row['case']} {row['impl']}: {row['why'][-300:]}")
    told = {name: made[name] for name in ("tiny", "target", "toolchain")}
    absent = [family for family in FAMILIES if family not in {c.family for c in chosen}]
    notes = [f"left out: {', '.join(absent)}"] if absent else []
    return {**results.header("products"), **told, "rows": rows, "figures": figures(rows), "notes": notes}


@click.command()
@click.option("--only", multiple=True, help="Words in the names of families and cases.")
@click.option("--make", "make_", type=click.Path(path_type=Path), help="Compile into this folder.")
@click.option("--from", "from_", type=click.Path(path_type=Path), help="Time what is in this folder.")
@click.option("--target", default="auto", show_default=True)
@click.option("--tiles", default=TILES, show_default=True, help="With --make: kernels of ours per product.")
@click.option("--jobs", default=len(os.sched_getaffinity(0)), help="Processes side by side; default: cores.")
@click.option("--seconds", default=SECONDS, show_default=True, help="With --from: of all of it.")
@click.option("--tiny", is_flag=True, help="With --make: a few cases, small: whether it runs.")
@click.option("--out", type=click.Path(path_type=Path), default=results.RESULTS, show_default=False)
def main(
    only: tuple[str, ...], make_: Path | None, from_: Path | None, target: str, tiles: int, jobs: int,
    seconds: float, tiny: bool, out: Path,
) -> None:  # fmt: skip
    """Compile, or time and write the results file; both where neither is asked for."""
    with tempfile.TemporaryDirectory(prefix="esper-products-") as place:
        folder = make_ or from_ or Path(place)
        if from_ is None:
            make(folder, target, cases(only, tiny), tiles, tiny)
        if make_ is not None:
            return
        end_well(lambda: None)
        document = run(folder, only, jobs, seconds)
    show(document)
    say(f"written: {results.write(document, out)}")


if __name__ == "__main__":
    main()
