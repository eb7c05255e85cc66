"""From rows to figures: gates, geometric means against the best peer, and how they are shown."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.results import REFERENCE_COPY_TBPS, figure, geomean

KEY = ("block", "size", "dtype", "phase", "impl", "mode")
GATE_MS, GATE_BLOCK, GATE_SIZE = 0.125, "rmsnorm_residual", "8192x4096"
WALL_TARGET, DEV_TARGET, GRAPHED_TARGET, SLOWEST = 1.5, 1.2, 1.2, 0.98
LEAST_FLOOR_MS = 0.02
COPY_SHARE = 0.90


def is_ours(row: Mapping[str, Any]) -> bool:
    return str(row["impl"]).startswith("esper")


def groups(
    rows: list[dict[str, Any]], phase: str = "fb", mode: str = "plain"
) -> dict[tuple[str, ...], list[dict[str, Any]]]:
    """Rows of one phase and mode by block, size and dtype."""
    found: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in rows:
        if row["phase"] == phase and row.get("mode", "plain") == mode:
            found.setdefault((row["block"], row["size"], row["dtype"]), []).append(row)
    return found


def counts(row: Mapping[str, Any]) -> bool:
    """Whether a time is held against others. Ours has to be right in every element. A peer counts, too, that
    is right in the root mean square and off in single elements, as torch's own accuracy check would have it:
    a sum that is rounded at another place falls on the other side of a kink here and there."""
    single = row.get("single", ": element [" in str(row.get("why", "")))
    return bool(row.get("correct") or (single and not is_ours(row)))


def best_peer(rows: list[dict[str, Any]], field: str) -> dict[str, Any] | None:
    """The fastest peer that counts."""
    right = [r for r in rows if not is_ours(r) and counts(r) and r.get(field)]
    return min(right, key=lambda r: r[field], default=None)


def ratios(
    rows: list[dict[str, Any]], quantity: str, mode: str = "plain", phase: str = "fb"
) -> dict[str, tuple[float, float, float]]:
    """Best peer's time over ours with the widest bounds of both intervals, by block and size."""
    found = {}
    for (block, size, _), members in groups(rows, phase, mode).items():
        ours = next((r for r in members if is_ours(r) and r.get("correct") and r.get(f"{quantity}_ms")), None)
        peer = best_peer(members, f"{quantity}_ms")
        if ours is None or peer is None:
            continue
        mid = peer[f"{quantity}_ms"] / ours[f"{quantity}_ms"]
        low = peer[f"{quantity}_lo"] / ours[f"{quantity}_hi"]
        found[f"{block} {size}"] = (mid, low, peer[f"{quantity}_hi"] / ours[f"{quantity}_lo"])
    return found


def of_blocks(
    rows: list[dict[str, Any]],
    ceilings: Mapping[str, float],
    card: str,
    lost: Sequence[str] = (),
    waterfall: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Figures of the bench `blocks`; the gates are those of cards. `lost`: sizes without a row of ours."""
    found: dict[str, Any] = {}
    cuda = card != "cpu"
    asked = [("wall", "plain", WALL_TARGET if cuda else None)]
    if cuda:
        asked += [("dev", "plain", DEV_TARGET), ("wall", "graphed", GRAPHED_TARGET)]
    for quantity, mode, target in asked:
        by_size = ratios(rows, quantity, mode)
        name = f"fb_{quantity}" if mode == "plain" else f"fb_{mode}"
        mean = geomean(mid for mid, _, _ in by_size.values())
        found[f"{name}_geomean_vs_best_peer"] = figure(
            mean, "ratio", target, at_least=True, over=len(by_size)
        )
        slow = sorted(name for name, (_, _, high) in by_size.items() if high < SLOWEST)
        count = len(slow) if by_size else None
        found[f"{name}_slower_than_best_peer"] = figure(count, "sizes", 0, which=slow)
    wrong = [
        " ".join(str(r.get(k)) for k in ("block", "size", "impl"))
        for r in rows
        if is_ours(r) and not r.get("correct")
    ]
    which = sorted({*wrong, *lost})
    found["wrong_or_missing"] = figure(len(which), "sizes", 0, which=which)
    if cuda:
        found |= _gate(rows, ceilings, card) | _kernels(waterfall)
    return found


def _kernels(waterfall: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """How many of our kernels miss their share of the measured ceiling; short ones, which only wait for
    memory to answer, are not judged."""
    ours = [r for r in waterfall if r["kind"] == "kernel" and r["floor_ms"] >= LEAST_FLOOR_MS]
    found = {}
    for bound, name in (
        ("bytes", "memory_bound_kernels_under_90_percent"),
        ("flops", "products_under_90_percent"),
    ):
        judged = [r for r in ours if r.get("bound") == bound]
        low = [r for r in judged if not r["share"] or r["share"] < COPY_SHARE]
        which = [f"{r['block']} {r['phase']} {r['step']} {r['share'] or 0.0:.2f}" for r in low]
        found[name] = figure(len(low) if judged else None, "kernels", 0, over=len(judged), which=which)
    return found


def _gate(rows: list[dict[str, Any]], ceilings: Mapping[str, float], card: str) -> dict[str, Any]:
    """0.125 ms on a card that copies at 4.25 TB/s; on an H100 scaled by its own copy rate."""
    copy = ceilings["copy_TBps"]
    target = GATE_MS if "H200" in card else GATE_MS * REFERENCE_COPY_TBPS / copy
    key = (GATE_BLOCK, GATE_SIZE, "bfloat16")
    ours = next((r for r in groups(rows).get(key, []) if is_ours(r)), {})
    value = ours.get("dev_ms") if ours.get("correct") else None
    bounds = {"lo": ours.get("dev_lo"), "hi": ours.get("dev_hi")}
    share = ours["floor_ms"] / value if value else None
    return {
        "rmsnorm_residual_fb_dev_ms": figure(value, "ms", target, **bounds),
        "rmsnorm_residual_fb_share_of_copy": figure(share, "ratio", COPY_SHARE, at_least=True),
    }


def show(document: Mapping[str, Any]) -> None:
    """Rows and figures as tables on standard error."""
    console = Console(stderr=True, width=None if sys.stderr.isatty() else 150)
    rows = [r for r in document.get("rows", []) if "wall_ms" in r]
    if rows:
        table = Table(title=f"{document['bench']} on {document['card']}")
        fields = (
            "block",
            "size",
            "phase",
            "mode",
            "impl",
            "wall_ms",
            "dev_ms",
            "host_us",
            "floor_ms",
            "kernels",
            "correct",
        )
        for name in fields:
            table.add_column(name)
        for row in rows:
            table.add_row(*(_cell(row.get(name)) for name in fields))
        console.print(table)
    table = Table(title=f"figures of {document['bench']}")
    for name in ("figure", "value", "target", "met"):
        table.add_column(name)
    for name, one in document.get("figures", {}).items():
        table.add_row(name, f"{_cell(one['value'])} {one['unit']}", _cell(one["target"]), _cell(one["met"]))
    console.print(table)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
