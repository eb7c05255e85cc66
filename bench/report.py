"""Pictures and tables from the newest results files.

    python -m bench.report [FILE.json ...]

takes the files of a run into bench/results/ (a second run of one commit on one kind of card goes into the
same file), then writes bench/results/<card>.svg, the time of every block against the best peer, and the
README's tables (through docs.build, which also checks them).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

import click

from bench.figures import best_peer, counts, groups, is_ours
from bench.merge import take
from bench.results import RESULTS, newest, short_card
from docs import build, measured

WIDTH, LABEL, BAR, GAP, SCALE = 900, 270, 14, 12, 220  # pixels; SCALE: of a bar as long as the best peer's
COLOURS = {"ours": "#1b6ca8", "peer": "#b0b7bf", "other": "#d9dde1", "wrong": "#c0392b"}


def bars(document: Mapping[str, Any], quantity: str) -> list[tuple[str, list[tuple[str, float, str]]]]:
    """Per block and size: (implementation, milliseconds, colour), ours first, then peers from the fastest."""
    found = []
    for (block, size, _), rows in groups(list(document["rows"])).items():
        timed = [r for r in rows if r.get(f"{quantity}_ms")]
        best = best_peer(timed, f"{quantity}_ms")
        if best is None:
            continue
        ordered = sorted(timed, key=lambda r: (not is_ours(r), r[f"{quantity}_ms"]))
        found.append((f"{block} {size}", [_bar(r, quantity, r is best) for r in ordered]))
    return found


def _bar(row: Mapping[str, Any], quantity: str, best: bool) -> tuple[str, float, str]:
    kind = "ours" if is_ours(row) else "peer" if best else "other"
    return str(row["impl"]), float(row[f"{quantity}_ms"]), COLOURS[kind if counts(row) else "wrong"]


def svg(document: Mapping[str, Any]) -> str:
    """A bar chart: every bar as a multiple of the best peer's time, shorter is faster."""
    quantity = "dev" if any(r.get("dev_ms") for r in document["rows"]) else "wall"
    parts, y = [], 44
    for title, members in bars(document, quantity):
        unit = min(ms for _, ms, colour in members if colour == COLOURS["peer"])
        parts.append(f'<text x="8" y="{y + 11}" font-weight="bold">{escape(title)}</text>')
        for impl, ms, colour in members:
            length = min(SCALE * ms / unit, WIDTH - LABEL - 150)
            parts.append(f'<rect x="{LABEL}" y="{y}" width="{length:.1f}" height="{BAR}" fill="{colour}"/>')
            text = f"{impl} {ms:.4g} ms"
            parts.append(f'<text x="{LABEL + length + 6:.1f}" y="{y + 11}">{escape(text)}</text>')
            y += BAR + 3
        y += GAP
    what = {"dev": "device time", "wall": "wall time"}[quantity]
    commits = ", ".join(dict.fromkeys(c[:7] for c in document.get("commits", [document["commit"]])))
    head = f"{document['card']}: forward and backward, {what}; commit {commits}"
    title = f'<text x="8" y="24" font-size="15">{escape(head)}</text>'
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y}" '
    style = 'font-family="sans-serif" font-size="12">'
    paper = '<rect width="100%" height="100%" fill="#fff"/>'
    return "\n".join([opening + style, paper, title, *parts, "</svg>"]) + "\n"


def write(folder: Path = RESULTS) -> list[Path]:
    """One picture per card, of the newest measurement of each block there."""
    found, all_runs = [], measured.documents(folder)
    for document in newest("blocks", folder):
        runs = [d for d in all_runs if d["bench"] == "blocks" and d["card"] == document["card"]]
        lines = measured.newest_rows(runs)
        rows = [row for _, rows in lines.values() for row in rows]
        commits = [run["commit"] for run, _ in lines.values()]
        path = folder / f"{short_card(document['card'])}.svg"
        path.write_text(svg({**document, "rows": rows, "commits": commits}), encoding="utf-8")
        found.append(path)
    return found


@click.command()
@click.argument("files", nargs=-1, type=click.Path(exists=True, dir_okay=False, path_type=Path))
def main(files: tuple[Path, ...]) -> None:
    """Take FILES into bench/results, draw the charts and rebuild the README's tables."""
    for path in files:
        click.echo(f"taken: {take(path, RESULTS)}")
    for path in write():
        click.echo(f"written: {path}")
    sys.argv = sys.argv[:1]  # what docs.build reads
    sys.exit(build.main())


if __name__ == "__main__":
    main()
