"""Results of several runs of one commit on one kind of card, in one file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bench import figures, results
from bench.compare import key_of

Row = Mapping[str, Any]
RUN = ("date", "host", "versions", "ceilings", "dirty")


def take(path: Path, folder: Path) -> Path:
    """Put a results file into `folder`: into the file of the same bench, commit and card where there is one.
    ValueError: no results file, or one of a tree that was no commit."""
    new = results.read(path)
    if new["dirty"] or new["commit"] == "unknown":
        raise ValueError(f"{path}: measured a tree that is not a commit")
    found = new
    for there in sorted(folder.glob(f"{new['bench']}-*.json")):
        old = results.read(there)
        if there.resolve() == path.resolve() or any(old[k] != new[k] for k in ("commit", "card")):
            continue
        if not any(same(run, new) for run in runs_of(old)):
            found = merged(old, found)
        else:
            found = old
        there.unlink()
    if found["bench"] == "blocks":
        found = {**found, "figures": _of_rows(found)}
    return results.write(found, folder)


def runs_of(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    return document.get("runs") or [{name: document[name] for name in RUN}]


def same(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    return a["date"] == b["date"] and a["host"] == b["host"]


def merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Of two runs, given in any order: what both measured is the later one's; `runs` says what each was."""
    first, last = sorted((old, new), key=lambda document: document["date"])
    found = {**first, **last, "runs": [*runs_of(first), *runs_of(last)]}
    if "rows" in first or "rows" in last:
        found["rows"] = _joined(first, last, "rows", lambda row: (*key_of(row), str(row.get("path", ""))))
    if last["bench"] == "blocks":
        return _blocks(found, first, last)
    return {**found, "figures": {**first.get("figures", {}), **last.get("figures", {})}}


def _blocks(found: dict[str, Any], first: Mapping[str, Any], last: Mapping[str, Any]) -> dict[str, Any]:
    """A row without a time replaces none with one; figures are those of all rows."""
    timed = {key_of(row) for row in (*first["rows"], *last["rows"]) if row.get("wall_ms") is not None}
    kept = {key_of(row): row for row in first["rows"]}
    for row in last["rows"]:
        key = key_of(row)
        if key not in kept or row.get("wall_ms") is not None or key not in timed:
            kept[key] = row
    ours = {_place(row) for row in kept.values() if figures.is_ours(row)}
    all_problems = [*first.get("problems", ()), *last.get("problems", ())]
    problems = list({_place(p): p for p in all_problems if _place(p) not in ours}.values())
    waterfall = _joined_groups(first.get("waterfall", []), last.get("waterfall", []))
    return {**found, "rows": list(kept.values()), "waterfall": waterfall, "problems": problems}


def _of_rows(document: Mapping[str, Any]) -> dict[str, Any]:
    """Figures of the bench `blocks`, by the rules of now."""
    rows, problems = document["rows"], document.get("problems", ())
    ours = {_place(row) for row in rows if figures.is_ours(row)}
    lost = sorted({" ".join(_place(p)) for p in problems if _place(p) not in ours})
    waterfall = document.get("waterfall", ())
    return figures.of_blocks(rows, document["ceilings"], document["card"], lost, waterfall)


def _place(row: Row) -> tuple[str, str]:
    return str(row["block"]), str(row["size"])


def _joined(
    first: Mapping[str, Any], last: Mapping[str, Any], name: str, key: Callable[[Row], tuple[str, ...]]
) -> list[Row]:
    rows = [*first.get(name, ()), *last.get(name, ())]
    return list({key(row): row for row in rows}.values())


def _joined_groups(first: list[Row], last: list[Row]) -> list[Row]:
    """All steps of a block at a size come from one run."""
    later = {_place(row) for row in last}
    return [*(row for row in first if _place(row) not in later), *last]
