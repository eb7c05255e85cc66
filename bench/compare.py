"""Whether a second run is faster than a first: a verdict per row, by the intervals of both.

    python -m bench.compare A.json B.json [--quantity dev] [--json]

faster or slower: the intervals do not meet and the medians are more than MARGIN apart; same: whatever the
truth inside the intervals, it is within MARGIN; ambiguous: the intervals do not allow either.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from bench import results
from bench.figures import KEY

MARGIN = 0.02
FASTER, SLOWER, SAME, AMBIGUOUS = "faster", "slower", "same", "ambiguous"
QUANTITIES = {"wall": "wall_ms", "dev": "dev_ms", "host": "host_us"}


@dataclass(frozen=True)
class Verdict:
    """`ratio`: time of the first over time of the second, with its widest bounds; above 1 the second is
    faster."""

    key: tuple[str, ...]
    quantity: str
    verdict: str
    ratio: float
    low: float
    high: float
    reason: str = ""


def judge(low: float, mid: float, high: float, margin: float = MARGIN) -> str:
    if low > 1.0 and mid > 1.0 + margin:
        return FASTER
    if high < 1.0 and mid < 1.0 / (1.0 + margin):
        return SLOWER
    if low >= 1.0 / (1.0 + margin) and high <= 1.0 + margin:
        return SAME
    return AMBIGUOUS


def of_rows(first: Mapping[str, Any], second: Mapping[str, Any], quantity: str) -> Verdict | None:
    """None when either has no such figure. A row that is wrong on one side is no comparison of speed."""
    key = key_of(first)
    if bool(first.get("correct")) != bool(second.get("correct")):
        worse = "second" if first.get("correct") else "first"
        return Verdict(key, quantity, AMBIGUOUS, 0.0, 0.0, 0.0, f"the {worse} is wrong or missing")
    a, b = (_interval(row, quantity) for row in (first, second))
    if a is None or b is None:
        return None
    low, mid, high = a[0] / b[2], a[1] / b[1], a[2] / b[0]
    return Verdict(key, quantity, judge(low, mid, high), mid, low, high)


def key_of(row: Mapping[str, Any]) -> tuple[str, ...]:
    thread = (row["backward_thread"],) if "backward_thread" in row else ()
    return (*(str(row.get(name, "plain" if name == "mode" else "")) for name in KEY), *thread)


def _interval(row: Mapping[str, Any], quantity: str) -> tuple[float, float, float] | None:
    found = [row.get(f"{quantity}_lo"), row.get(QUANTITIES[quantity]), row.get(f"{quantity}_hi")]
    numbers = [x for x in found if isinstance(x, (int, float)) and x > 0]
    return (numbers[0], numbers[1], numbers[2]) if len(numbers) == 3 else None


def compare(first: Mapping[str, Any], second: Mapping[str, Any], quantity: str) -> list[Verdict]:
    """Rows that both documents have, in the order of the first."""
    others = {key_of(row): row for row in second["rows"]}
    pairs = [(row, others[key_of(row)]) for row in first["rows"] if key_of(row) in others]
    found = [of_rows(a, b, quantity) for a, b in pairs]
    return [v for v in found if v is not None]


def warnings(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """What makes the two runs hard to compare."""
    found = []
    for name in ("bench", "card"):
        if first[name] != second[name]:
            found.append(f"{name}: {first[name]} and {second[name]}")
    found += [
        f"{k}: {v} and {second['versions'].get(k)}"
        for k, v in first["versions"].items()
        if second["versions"].get(k) != v
    ]
    return found


def missing(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """Rows that only one of the two has: what is not compared is not silently the same."""
    keys = [{key_of(row) for row in document["rows"]} for document in (first, second)]
    told = []
    for name, here, there in (("first", *keys), ("second", *keys[::-1])):
        told += [f"only in the {name}: {' '.join(key)}" for key in sorted(here - there)]
    return told


def digests(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """Rows of one artifact whose results have other bits in the second run."""
    kept = {_bits_key(r): r["digests"] for r in first["rows"] if "digests" in r}
    rows = [(key, r["digests"]) for r in second["rows"] if "digests" in r and (key := _bits_key(r)) in kept]
    return [
        f"{' '.join(key)}: {', '.join(n for n in theirs if kept[key].get(n) != theirs[n])}"
        for key, theirs in rows
        if kept[key] != theirs
    ]


def _bits_key(row: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(str(row.get(k, "")) for k in ("artifact", "size", "phase", "path"))


def _read(path: Path) -> dict[str, Any]:
    try:
        document = results.read(path)
    except ValueError as error:  # what is no JSON too
        raise click.ClickException(f"{path}: {error}") from error
    if "rows" not in document:
        raise click.ClickException(f"{path}: a bench without rows ({document['bench']})")
    return document


@click.command()
@click.argument("first", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("second", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--quantity", type=click.Choice(list(QUANTITIES)), multiple=True, help="Default: all.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on standard output.")
def main(first: Path, second: Path, quantity: tuple[str, ...], as_json: bool) -> None:
    """Compare two results files row by row. Exit 1 when a row of ours is slower or bits differ."""
    a, b = _read(first), _read(second)
    found = [v for q in quantity or QUANTITIES for v in compare(a, b, q)]
    differ, notes, alone = digests(a, b), warnings(a, b), missing(a, b)
    if as_json:
        rows = [asdict(v) for v in found]
        click.echo(
            json.dumps(
                {
                    "schema": "esper-compare/1",
                    "rows": rows,
                    "bits_differ": differ,
                    "warnings": notes,
                    "alone": alone,
                }
            )
        )
    else:
        for note in notes:
            click.echo(f"not the same {note}", err=True)
        for v in found:
            bounds = f"{v.ratio:.3f}x [{v.low:.3f}, {v.high:.3f}]" if not v.reason else v.reason
            click.echo(f"{v.verdict:10} {v.quantity:5} {bounds:28} {' '.join(v.key)}")
        for line in differ:
            click.echo(f"other bits {line}")
        for line in alone:
            click.echo(line)
        counted = {kind: sum(v.verdict == kind for v in found) for kind in (FASTER, SLOWER, SAME, AMBIGUOUS)}
        click.echo(", ".join(f"{count} {kind}" for kind, count in counted.items()))
    slower = [v for v in found if v.verdict == SLOWER and v.key[4].startswith("esper")]
    sys.exit(1 if slower or differ else 0)


if __name__ == "__main__":
    main()
