"""Tables of measurements, from the results files in bench/results/: all of them, and the README's summary.

A block's line is that of the newest run that measured it, on whatever card; where runs differ, every line
says which it is from. Figures are those of the newest run of a bench on a card.
"""

from __future__ import annotations

import json
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bench import figures

RESULTS = Path(__file__).resolve().parent.parent / "bench" / "results"
Key = tuple[str, str, str]


def documents(folder: Path = RESULTS) -> list[dict[str, Any]]:
    """All results files, oldest first."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    return sorted(found, key=lambda document: document["date"])


def tables(folder: Path = RESULTS) -> str:
    """Times of blocks and whole models, then figures."""
    found = documents(folder)
    if not found:
        return "No measurement is committed yet.\n"
    parts: list[str] = []
    for where in (True, False):  # on cards, then on processors
        here = [d for d in found if (d["card"] != "cpu") is where]
        parts += block_table([d for d in here if d["bench"] == "blocks"])
        parts += charts(folder, [d for d in here if d["bench"] == "blocks"], "../")
        parts += model_table([d for d in here if d["bench"] == "models"])
    runs: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for document in found:
        runs.setdefault((document["bench"], document["card"]), []).append(document)
    for (bench, card), those in list(runs.items()):
        whole = runs.get((PART_OF.get(bench, ""), card), [])
        if any(document["date"] >= those[-1]["date"] for document in whole):
            del runs[bench, card]
    parts += [
        _figures(those[-1]) + _earlier(those) for _, those in sorted(runs.items()) if those[-1].get("figures")
    ]
    return "\n".join(parts)


PART_OF = {"host": "runtime", "load": "runtime"}
"""Benches that a newer run of another one has in it: its figures stand for both."""
TARGETS = {"device": 1.2, "wall": 1.5}
"""Of the geometric means over all blocks."""
GATES = {
    "host_marginal_function_over_compile_own_thread": "host time of a block, beside torch.compile's",
    "host_marginal_function_over_mul_own_thread": "host time of a block, beside one `mul` of torch",
    "no_grad_call_us": "a call without gradients",
    "load_cached_entry_us_p50": "`runtime.load`, loaded before in this process",
    "load_uncached_us_p50": "`runtime.load`, read, verified, handed to the driver",
    "load_uncached_us_p99": "the same, 99th percentile",
    "first_step_ms": "first forward and backward of a fresh process",
    "first_step_without_compiler_triton_home": "that without compiler, Triton and a home to write to",
}
"""What calls and loads cost, in words."""


def summary(folder: Path = RESULTS) -> str:
    """Blocks on cards beside the fastest right peer, how they do on the whole, and whole models."""
    found = [d for d in documents(folder) if d["card"] != "cpu"]
    blocks = [d for d in found if d["bench"] == "blocks"]
    if not blocks:
        return "No measurement on a card is committed yet.\n"
    every = newest_rows(blocks)
    lines = {k: found for k, found in every.items() if any(row["wall_ms"] is not None for row in found[1])}
    runs = list({id(document): document for document, _ in lines.values()}.values())
    out = [*(f"- {head(document)}" for document in runs), ""]
    out += [
        "| forward and backward, ms | Esper device | best peer | | Esper wall | best peer | |",
        "|---" * 7 + "|",
    ]
    rows = [(key, beside(rows, "dev_ms"), beside(rows, "wall_ms")) for key, (_, rows) in lines.items()]
    rows.sort(key=lambda row: -row[1][0])
    out += [f"| {' '.join(key)} | {dev[1]} | {wall[1]} |" for key, dev, wall in rows]
    ratios = {"device": [dev[0] for _, dev, _ in rows], "wall": [wall[0] for _, _, wall in rows]}
    told = "; ".join(_mean(what, [r for r in found if r]) for what, found in ratios.items() if any(found))
    lost = len(every) - len(lines)
    more = f" Of {lost} further sizes nothing was timed before the run's time ended." if lost else ""
    out += ["", f"Geometric means of these lines: {told}.{more}" if told else "", ""]
    out += charts(folder, blocks)
    return "\n".join([*out, *gates(found), *model_table([d for d in found if d["bench"] == "models"])])


def gates(found: list[dict[str, Any]]) -> list[str]:
    """What a call and a load cost: of each figure the newest on a card."""
    lines = []
    for name, words in GATES.items():
        document = next((d for d in reversed(found) if name in d.get("figures", {})), None)
        if document is not None:
            cells = (words, *_said(document["figures"][name]), name_of(document))
            lines.append(f"| {' | '.join(cells)} |")
    if not lines:
        return []
    return ["", "| beside the kernels | measured | target | met | run |", "|---" * 5 + "|", *lines, ""]


def beside(rows: list[dict[str, Any]], field: str) -> tuple[float, str]:
    """The best peer's time over ours, and the cells: our time, the peer's with its name, the ratio."""
    ours = next((r for r in rows if r["impl"].startswith("esper")), {})
    mine = ours.get(field) if ours.get("correct") else None
    best = figures.best_peer(rows, field)
    theirs = "-" if best is None else f"{best[field]:.3f} {best['impl']}{_of_run(best)}"
    if mine is None or best is None:
        return 0.0, f"{'no figure' if mine is None else format(mine, '.3f')} | {theirs} | -"
    return best[field] / mine, f"{mine:.3f} | {theirs} | {best[field] / mine:.2f}x"


def _mean(what: str, ratios: list[float]) -> str:
    mean, aim = statistics.geometric_mean(ratios), TARGETS[what]
    met = "met" if mean >= aim else "missed"
    return f"{what} {mean:.2f}x of the best peer over {len(ratios)} (target {aim:g}, {met})"


def charts(folder: Path, found: list[dict[str, Any]], root: str = "") -> list[str]:
    """What bench.report has drawn, a picture per card; `root` is how a page reaches the repository."""
    named = {name_of(document).split()[0].lower(): document["card"] for document in found}
    return [
        f"![every block on {card}, beside its peers]({root}bench/results/{short}.svg)\n"
        for short, card in sorted(named.items())
        if (folder / f"{short}.svg").exists()
    ]


def name_of(document: dict[str, Any]) -> str:
    """The card and the commit of a run, short: "H200 5eddb4f"."""
    card = re.search(r"\b([A-Z]{1,2}\d{2,3}[A-Z]?)\b", document["card"])
    return f"{card[1] if card else document['card']} {document['commit'][:7]}"


def head(document: dict[str, Any]) -> str:
    when = f"{document['date'][:10]}, commit {document['commit'][:7]}"
    host = document.get("host", {})
    on = _processor(host) if host and document["card"] == "cpu" else document["card"]
    return f"{document['bench']} on {on}, torch {document['versions']['torch']}, {when}"


def _processor(host: dict[str, Any]) -> str:
    return f"cpu ({host.get('processor', 'unnamed')}, {host.get('cores', '?')} cores)"


def newest_rows(found: Iterable[dict[str, Any]]) -> dict[Key, tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Block, size and type -> (the newest run that has a time of it, its plain rows of forward and backward);
    a run that only says why there is none counts where there is no other. Missing and wrong rows stay, but a
    peer that was stopped in this run stands with its newest right time on such a card, and says of which."""
    kept: dict[Key, tuple[dict[str, Any], list[dict[str, Any]]]] = {}
    peers: dict[Key, list[tuple[dict[str, Any], dict[str, Any]]]] = {}
    for document in found:
        mine: dict[Key, list[dict[str, Any]]] = {}
        for row in document.get("rows", []):
            if row.get("phase") == "fb" and row.get("mode", "plain") == "plain" and "wall_ms" in row:
                mine.setdefault((row["block"], row["size"], row["dtype"]), []).append(row)
        for key, rows in mine.items():
            if key not in kept or any(row["wall_ms"] is not None for row in rows):
                known = {(found["card"], r["impl"]): r for found, r in peers.get(key, ())}
                kept[key] = (
                    document,
                    [_or_earlier(row, known.get((document["card"], row["impl"]))) for row in rows],
                )
            timed = [row for row in rows if row["wall_ms"] is not None and figures.counts(row)]
            peers.setdefault(key, []).extend(
                (document, {**row, "run": name_of(document)})
                for row in timed
                if not row["impl"].startswith("esper")
            )
    return kept


def _or_earlier(row: dict[str, Any], earlier: dict[str, Any] | None) -> dict[str, Any]:
    """A peer that was stopped is not a slow one: what an earlier run measured is held against ours."""
    return earlier if earlier is not None and row["wall_ms"] is None and row.get("why") else row


def block_table(found: list[dict[str, Any]]) -> list[str]:
    lines = newest_rows(found)
    if not lines:
        return []
    runs = list({id(document): document for document, _ in lines.values()}.values())
    impls = list(dict.fromkeys(row["impl"] for _, rows in lines.values() for row in rows))
    impls.sort(key=lambda impl: not impl.startswith("esper"))
    several = ["run"] if len(runs) > 1 else []
    out = [*(f"{head(document)}; device / wall ms, forward and backward\n" for document in runs)]
    out += ["| " + " | ".join(["block", "floor", *impls, *several]) + " |"]
    out += ["|---" * (len(impls) + 2 + len(several)) + "|"]
    for key, (document, rows) in lines.items():
        cells = {row["impl"]: row for row in rows}
        floor = rows[0].get("floor_ms")
        shown = [f"{floor:.3f}" if floor else "-", *(cell(cells.get(impl)) for impl in impls)]
        shown += [name_of(document)] if several else []
        out.append(f"| {' '.join(key)} | " + " | ".join(shown) + " |")
    return ["\n".join(out) + "\n"]


def cell(row: dict[str, Any] | None) -> str:
    """Times, with "~" where single elements are off; "wrong" for a result that is off as a whole, and the
    reason for one that did not come."""
    if row is None:
        return "-"
    if not figures.counts({"correct": True, **row}):
        measured = row.get("dev_ms") is not None or row.get("wall_ms") is not None
        return "wrong" if measured or not row.get("why") else str(row["why"])[:40]
    times = (row.get("dev_ms"), row.get("wall_ms"))
    single = "" if row.get("correct", True) else " ~"
    return " / ".join("-" if time is None else f"{time:.3f}" for time in times) + single + _of_run(row)


def _of_run(row: dict[str, Any]) -> str:
    return f" ({row['run'].split()[-1]})" if "run" in row else ""


def model_table(found: list[dict[str, Any]]) -> list[str]:
    """Of the newest run: what is counted in a second, and the most memory."""
    if not found:
        return []
    document = found[-1]
    lines = ["| model | way | in a second | ms a step | peak MiB | losses over noise |", "|---" * 6 + "|"]
    for row in document["rows"]:
        rate = f"{row['per_s']:.0f} {row['counted']}" if row.get("per_s") else str(row.get("why", "-"))[:40]
        step = f"{row['wall_ms']:.2f}" if row["wall_ms"] else "-"
        peak = f"{row['peak_MiB']:.0f}" if row.get("peak_MiB") else "-"
        off = f"{row['loss_off'] / row['loss_noise']:.2f}" if "loss_off" in row else "-"
        model = f"{row['block']} {row['size']} {row['dtype']}"
        lines.append(f"| {model} | {row['impl']} | {rate} | {step} | {peak} | {off} |")
    return [f"{head(document)}; training steps\n\n" + "\n".join(lines) + "\n"]


def risk_tables(folder: Path = RESULTS) -> str:
    """Of the newest run of the risk bench: every score with its interval and numbers, what became of the
    artifacts by class of fault, the reliability plot."""
    found = [d for d in documents(folder) if d["bench"] == "risk"]
    if not found:
        return "No measurement is committed yet.\n"
    document = found[-1]
    lines = [f"{head(document)}; basis `{document['basis']}`. {'; '.join(document['notes'])}.\n"]
    lines += [
        "| split | scores | Brier skill | PR-AUC | n | failures | artifacts | families |",
        "|---" * 8 + "|",
    ]
    for row in document["rows"]:
        spans = [
            f"{s['value']:.3f} [{s['low']:.3f}, {s['high']:.3f}]" for s in (row["skill"], row["precision"])
        ]
        counts = [str(row[name]) for name in ("outcomes", "failures", "artifacts", "families")]
        lines.append(f"| {row['split']} | {row['method']} | {' | '.join([*spans, *counts])} |")
    ours = next((row for row in document["rows"] if row["method"] == "model"), None)
    if ours and ours["skill"]["low"] <= 0:
        lines.append(
            "\nOn families left out the skill of the model is not told from zero: its scores say little more "
            "than the share of failures in the simulation."
        )
    picture = next((path.name for path in sorted(folder.glob("risk-*.svg"), reverse=True)), "")
    if picture:
        lines.append(f"\n![share that failed against score](../bench/results/{picture})")
    ends = ("EXPOSED", "MISMATCH", "DIVERGED", "ROLLED_BACK", "CRASHED")
    lines += ["", f"| planted | refused | used | {' | '.join(ends)} |", "|---" * (3 + len(ends)) + "|"]
    for row in document["classes"]:
        counts = [str(row.get(name, 0)) for name in ("refused", "used", *ends)]
        lines.append(f"| {row['class']} | {' | '.join(counts)} |")
    return "\n".join(lines) + "\n"


def _figures(document: dict[str, Any]) -> str:
    lines = [f"{head(document)}\n", "| figure | value | target | met |", "|---|---|---|---|"]
    lines += [f"| {name} | {' | '.join(_said(row))} |" for name, row in document["figures"].items()]
    lost = _stopped(document)
    return (
        "\n".join(lines)
        + "\n"
        + (f"\nStopped in that run, and in none of these figures: {lost}.\n" if lost else "")
    )


def _stopped(document: dict[str, Any]) -> str:
    """Peers of blocks that had no time to compile, with the number of sizes: figures are without them."""
    rows = [
        r for r in document.get("rows", ()) if r.get("phase") == "fb" and r.get("mode", "plain") == "plain"
    ]
    peers = [r for r in rows if document["bench"] == "blocks" and not r["impl"].startswith("esper")]
    lost = Counter(r["impl"] for r in peers if r["wall_ms"] is None and r.get("why"))
    return ", ".join(f"{impl} at {count} sizes" for impl, count in lost.items())


def _earlier(runs: Sequence[dict[str, Any]]) -> str:
    """Figures of parts that the newest run left out, each from the newest run that measured it."""
    if not any(note.startswith("left out") for note in runs[-1].get("notes", ())):
        return ""
    shown = set(runs[-1]["figures"])
    lines: list[str] = []
    for document in reversed(runs[:-1]):
        told = document.get("figures", {})
        new = {n: row for n, row in told.items() if n not in shown and row["value"] is not None}
        shown |= set(new)
        lines += [
            f"| {name} | {' | '.join(_said(row))} | {document['commit'][:7]} |" for name, row in new.items()
        ]
    table = [
        "",
        "What that run left out, from earlier ones:",
        "",
        "| figure | value | target | met | commit |",
        "|---" * 5 + "|",
    ]
    return "\n".join([*table, *lines]) + "\n" if lines else ""


def _said(row: dict[str, Any]) -> tuple[str, str, str]:
    """Value (with how many it is over, where a figure says so), target, and whether it was met."""
    met = {True: "yes", False: "no", None: "-"}[row.get("met")]
    target = "-" if row.get("target") is None else f"{row['target']:g} {row['unit']}"
    over = f" (over {row['over']})" if row.get("over") else ""
    return "not measured" if row["value"] is None else f"{row['value']:.4g} {row['unit']}{over}", target, met
